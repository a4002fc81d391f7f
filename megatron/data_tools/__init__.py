"""Turning text into the `.bin/.idx` pairs that Megatron's datasets read.

Nothing here imports `torch`, `transformers` or `megatron.core` when it is imported, so that `--help` of the
tools is immediate and a worker process starts in a fraction of a second. Modules, in order of dependence:

    errors          the one exception that users are meant to see
    documents       input files to records (one record is one document), with file and line
    tokenizer_files writes tokenizers to disk: byte-level, GPT-2 BPE folder, SentencePiece training
    tokenizers      loads the tokenizer that the training flags name, without Megatron's import
    dataset_files   writes and reads the `.bin/.idx` format; atomic
    encoding        records to token ids, in worker processes, in order
    preprocess      the pipeline behind `tools/preprocess_data.py`
    fetch, corpora  named corpora: where they come from, checksums, documents, splits
    prepare         the pipeline behind `tools/prepare_corpus.py`
    checks          refuses a `--split` that Megatron's dataset builder would loop on for ever
    seams           the one change to Megatron: `GPT2BPETokenizer` from local files
"""
