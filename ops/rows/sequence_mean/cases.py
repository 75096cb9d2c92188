"""Inputs for sequence_mean: ragged batches, empty sequences, rows inside of a sequence, padding."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-6, "float16": 1e-6}
_REASON = "float32 sums in another order"


def _owned(out_RD: torch.Tensor, args: Mapping[str, Any]) -> torch.Tensor:
    return out_RD[args["rows_R"].cpu() < int(args["query_start_loc"][-1])]


def _case(
    name: str, lengths: Sequence[int], D: int, pad: int = 0, back: int = 0, size: Literal["small", "real"] = "small"
) -> Case:
    """pad: rows after the last sequence's, and as many of rows_R. back: how many rows before the end of a sequence."""
    T = sum(lengths) + pad

    def inputs(make: Maker) -> dict[str, Any]:
        starts = [0]
        for n in lengths:
            starts.append(starts[-1] + n)
        ends = [b - 1 - min(back, b - 1 - a) for a, b in itertools.pairwise(starts) if b > a]
        rows = ends + [T - 1] * pad
        return {
            "x_TD": make.normal(T, D) + 0.5,
            "query_start_loc": make.tensor(starts, torch.int32),
            "rows_R": make.tensor(rows, torch.int32),
        }

    return Case(name, inputs, _TOLERANCE, _REASON, Bucket("mixed" if T > 8 else "decode", T, T), size, _owned)


CASES = (
    _case("nothing", [0], 32),
    _case("one_token", [1], 32),
    _case("ragged", [5, 0, 33, 1, 64], 40),
    _case("padded", [17, 3], 72, pad=4),
    _case("inside", [90, 2, 7], 16, back=3),
    _case("many_tokens", [700], 130),
    _case("bert_64x32", [32] * 64, 768, size="real"),
    _case("bert_512", [512] * 4, 768, size="real"),
)
