"""What is changed in Megatron's tokenizers, and why. Imported in training only."""

import functools
import tempfile
from typing import Any

from megatron.data_tools.tokenizer_files import write_gpt2_folder
from megatron.data_tools.tokenizers import check_gpt2_files


def mend_gpt2_bpe_tokenizer() -> None:
    """Makes `--tokenizer-type GPT2BPETokenizer --vocab-file X --merge-file Y` work from these two files.

    Replaces `megatron.core.tokenizers.text.libraries.megatron_hf_tokenizer.MegatronHFTokenizer.__init__` of
    megatron-core 0.19.2, which asks the model hub for "gpt2" even when both files are given, fails without a
    network, and with one takes the hub's vocabulary instead of the user's. Ours hands Megatron's own
    `HuggingFaceTokenizer` a folder made of the files. Other names than GPT2BPETokenizer go the old way.
    Calling it again changes nothing.

    The new constructor raises a ValueError that names the flags and the alternative if a file is missing.
    """
    from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer
    from megatron.core.tokenizers.text.libraries.megatron_hf_tokenizer import MegatronHFTokenizer

    original = MegatronHFTokenizer.__init__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def init_from_local_files(
        self: Any, tokenizer_path: str, vocab_file: str | None = None, merges_file: str | None = None, **options: Any
    ) -> None:
        if tokenizer_path != "GPT2BPETokenizer":
            original(self, tokenizer_path, vocab_file, merges_file, **options)
            return
        check_gpt2_files(vocab_file, merges_file)
        with tempfile.TemporaryDirectory() as folder:
            HuggingFaceTokenizer.__init__(
                self, str(write_gpt2_folder(folder, str(vocab_file), str(merges_file))), **options
            )

    MegatronHFTokenizer.__init__ = init_from_local_files
