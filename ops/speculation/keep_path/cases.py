"""Inputs for keep_path: paths that stay, that jump and that cross the ends of blocks, in every kind of cache."""

from __future__ import annotations

from typing import Any, Literal

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_PATHS = ((0, 2, 5), (0, 1, 3), (0, 1, 2), (0, 4, 5), (0, 2, 3))


def _case(
    name: str, starts: tuple[int, ...], kept: tuple[int, ...], *, rows: int = 6, P: int = 16, cache: str = "",
    heads: tuple[int, ...] = (2, 32), size: Literal["small", "real"] = "small", empty: tuple[int, ...] = (),
) -> Case:  # fmt: skip
    """One case. starts: tokens of each sequence before the step. kept: how many tokens are kept. heads: of keys
    and values and their numbers; of a latent and its key, its numbers. empty: sequences that have no rows."""
    S, scaled = len(starts), cache == "int8" and len(heads) == 2

    def inputs(make: Maker) -> dict[str, Any]:
        blocks = [-(-(start + rows) // P) for start in starts]
        dtype = getattr(torch, cache) if cache else make.dtype
        shape = (sum(blocks) + 1, *((2, heads[0]) if len(heads) == 2 else ()), P, heads[-1] + 4 * scaled)
        order = torch.randperm(sum(blocks), generator=make.generator, device=make.generator.device).cpu() + 1
        table = torch.zeros(S, max(blocks) + 1, dtype=torch.int32)
        for s, n in enumerate(blocks):
            used = sum(blocks[:s])
            table[s, :n] = order[used : used + n]
        drawn = make.normal(*shape, scale=20.0)
        counts = [0 if s in empty else rows for s in range(S)]
        return {
            "cache": drawn.to(dtype), "block_table": table.to(make.device),
            "query_start_loc": make.tensor([sum(counts[:i]) for i in range(S + 1)], torch.int32),
            "seq_lens": make.tensor([a + b for a, b in zip(starts, counts, strict=True)], torch.int32),
            "path_SD": make.tensor([_PATHS[s % len(_PATHS)] for s in range(S)], torch.int32),
            "kept_S": make.tensor(list(kept), torch.int32),
        }  # fmt: skip

    exact = dict.fromkeys(("float32", "bfloat16", "float16"), 0.0)
    sequences = S if len(empty) < S else 0
    return Case(name, inputs, exact, "bytes are copied", Bucket("decode", sequences, sequences, rows), size)


CASES = (
    _case("one", (7,), (3,)),
    _case("paths", (0, 13, 30, 14, 100), (3, 3, 3, 2, 1)),
    _case("nothing_kept", (5, 40, 3), (1, 0, 2), empty=(2,)),
    _case("nothing", (5,), (0,), empty=(0,)),
    _case("small_blocks", (6, 7, 5, 4), (3, 3, 3, 3), P=4, heads=(3, 20)),
    _case("fp8", (9, 13), (3, 3), cache="float8_e4m3fn"),
    _case("int8", (9, 13, 60, 15, 2), (3, 3, 3, 3, 2), cache="int8"),
    _case("latents", (9, 13, 60, 15, 2), (3, 3, 3, 3, 2), heads=(44,)),
    _case("latents_fp8", (9, 13), (3, 3), cache="float8_e4m3fn", heads=(576,)),
    _case("latents_int8", (9, 13, 60), (3, 3, 3), cache="int8", heads=(92,), empty=(1,)),
    _case("8b_b32", (4000,) * 32, (3,) * 32, heads=(8, 128), size="real"),
)
