"""The process in which transformers reads a tokenizer of another kind (sentencepiece, tiktoken, vocabulary and merges)
and writes it as a tokenizer.json: ``python -m`` this, a folder to write to, and the files.

It runs no code of the checkpoint. What is wrong goes to stdout, with status 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from graphllm.engine.process.limited_process import limit_memory, limit_time

_MEMORY = 4 << 30
_SECONDS = 300


def main() -> None:
    """Convert one."""
    target, folder = sys.argv[1], Path(sys.argv[2]).parent
    limit_memory(_MEMORY)
    limit_time(_SECONDS)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"{type(tokenizer).__name__} has no form that the tokenizers library reads")
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    try:
        main()
    except Exception as wrong:  # of transformers and what it uses
        print(" ".join(str(wrong).split())[:300] or type(wrong).__name__)
        sys.exit(1)
