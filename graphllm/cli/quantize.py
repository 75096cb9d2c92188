"""`graphllm quantize`: writes a quantized checkpoint and says how near it is to the one it was made from."""

from __future__ import annotations

import sys
from typing import Any

from graphllm.config import EngineArgs
from graphllm.loading.checkpoint.source import find_source
from graphllm.loading.checkpoint.tensors import stored_checkpoint
from graphllm.quantize.run import Request, quantize


def quantize_model(model: str | None, *request: Any) -> None:
    """Quantize a checkpoint folder, or a name of the hub. request: the fields of `Request`."""
    wanted = Request(*request)
    source = find_source(EngineArgs(model=model))
    checkpoint = stored_checkpoint(source.files)
    made = quantize(source.folder, checkpoint, wanted, lambda line: print(line, file=sys.stderr))
    before, fit = sum(t.nbytes for t in checkpoint.tensors.values()), made.fit
    print(f"{wanted.output}: {wanted.scheme} by {wanted.method}, {made.matrices} matrices of {made.layers} layers, "
          f"{made.bits:.2f} bits a weight; {before / 1e6:,.1f} MB became {made.nbytes / 1e6:,.1f} MB "
          f"in {made.seconds:.0f} s")  # fmt: skip
    print(f"perplexity {fit.before:.4f} before, {fit.after:.4f} after; the same likeliest next token {fit.same:.2%} "
          f"({fit.tokens:,} tokens of {fit.text})")  # fmt: skip
