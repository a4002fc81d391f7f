#!/usr/bin/env bash
# GPT with 345M parameters on one node with 8 GPUs. Variables of the environment choose paths, layout and size; flags
# after the script's name come last and so win:
#
#     DATA_DIR=/data/mine TP=2 examples/gpt_345m_8gpu/train.sh --train-iters 1000
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

DATA_DIR=${DATA_DIR:-data/gpt2} # see README.md for how to make it
RUN_DIR=${RUN_DIR:-runs/gpt_345m}
GPUS=${GPUS:-8}
TP=${TP:-1} # tensor-parallel size
PP=${PP:-1} # pipeline stages; the rest of the GPUs are data-parallel

if [ ! -f "$DATA_DIR/train_text_document.idx" ]; then
    echo "error: no corpus in DATA_DIR=$DATA_DIR; examples/gpt_345m_8gpu/README.md says how to make it" >&2
    exit 1
fi

# Megatron asks for it wherever tensor parallelism overlaps with communication.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

DISTRIBUTED_ARGS=(
    --standalone
    --nproc-per-node "$GPUS"
)

MODEL_ARGS=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 1024
    --max-position-embeddings 1024
    --attention-dropout 0
    --hidden-dropout 0
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
if [ "$TP" -gt 1 ]; then
    PARALLEL_ARGS+=(--sequence-parallel)
fi

OPTIMIZER_ARGS=(
    --optimizer shampoo # block size 1024, roots every 10 steps, Adam's step norm
    --lr 6e-4
    --min-lr 6e-5
    --lr-decay-style cosine
    --lr-warmup-fraction 0.02
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
)

TRAINING_ARGS=(
    --bf16
    --micro-batch-size 8
    --global-batch-size 512
    --train-iters 20000
    --seed 1234
)

DATA_ARGS=(
    --train-data-path "$DATA_DIR/train_text_document"
    --valid-data-path "$DATA_DIR/valid_text_document"
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$DATA_DIR/tokenizer"
)

LOGGING_ARGS=(
    --log-interval 10
    --log-throughput
    --eval-interval 1000
    --eval-iters 20
    --tensorboard-dir "$RUN_DIR/tensorboard"
    --save "$RUN_DIR/checkpoints"
    --load "$RUN_DIR/checkpoints" # a second call goes on where the last checkpoint is
    --save-interval 1000
)

exec torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${LOGGING_ARGS[@]}" \
    "$@"
