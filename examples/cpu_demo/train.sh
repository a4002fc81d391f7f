#!/usr/bin/env bash
# A small GPT on 4 CPU processes: tensor parallel 2 x data parallel 2, distributed optimizer, Shampoo. `make demo` runs
# this script. Variables of the environment choose the paths; flags after the script's name come last and so win:
#
#     DATA_DIR=data/demo RUN_DIR=runs/mine examples/cpu_demo/train.sh --optimizer adam --lr 3e-3
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

DATA_DIR=${DATA_DIR:-data/demo} # made by: python tools/prepare_corpus.py stdlib --output data/demo
RUN_DIR=${RUN_DIR:-runs/cpu_demo}

if [ ! -f "$DATA_DIR/train_text_document.idx" ]; then
    echo "error: no corpus in DATA_DIR=$DATA_DIR; make it with" >&2
    echo "       python tools/prepare_corpus.py stdlib --output $DATA_DIR" >&2
    exit 1
fi

# A run on CPU, also where there are GPUs; the cores are shared out among the 4 processes.
export CUDA_VISIBLE_DEVICES=
cores=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 4 ? cores / 4 : 1))}

DISTRIBUTED_ARGS=(
    --standalone
    --nproc-per-node 4
)

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 128
    --num-attention-heads 4
    --seq-length 128
    --max-position-embeddings 128
    --position-embedding-type rope
    --attention-dropout 0
    --hidden-dropout 0
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 2 # 4 processes: data-parallel size 2
    --use-distributed-optimizer
)

OPTIMIZER_ARGS=(
    --optimizer shampoo
    --lr 5e-3
    --min-lr 1e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
)

TRAINING_ARGS=(
    --micro-batch-size 16
    --global-batch-size 32
    --train-iters 300
    --seed 1234
)

DATA_ARGS=(
    --train-data-path "$DATA_DIR/train_text_document"
    --valid-data-path "$DATA_DIR/valid_text_document"
    --tokenizer-type SentencePieceTokenizer
    --tokenizer-model "$DATA_DIR/tokenizer/tokenizer.model"
    --num-workers 0 # read in the training processes: the cores are few
)

LOGGING_ARGS=(
    --log-interval 1
    --eval-interval 1000 # only at the end
    --eval-iters 10
    --tensorboard-dir "$RUN_DIR/tensorboard"
    --save "$RUN_DIR/checkpoints"
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
