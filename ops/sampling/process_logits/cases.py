"""Inputs for process_logits: each change by itself and all together, rows of one batch that differ, real
vocabularies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker


class _Row(NamedTuple):
    """What one row asks for. mask: its own row of the mask, or none. bias: entries of its list that count. place:
    drafts before it."""

    mask: bool = False
    bias: int = 0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    place: int = 0


_OFF = _Row()
_ROWS = (
    _Row(mask=True),
    _Row(bias=5),
    _OFF,
    _Row(repetition=1.3),
    _Row(frequency=0.7),
    _Row(presence=-1.1),
    _Row(True, 12, 0.8, -0.5, 0.9),
    _Row(True, 1, 1.0, 0.1, 0.0),
    _Row(False, 12, 1.1, 0.0, 0.0),
)
_DRAFTED = (
    _Row(repetition=1.3, place=1),
    _Row(True, 12, 0.8, -0.5, 0.9, 4),
    _Row(False, 12, 1.2, 0.4, -0.6, 7),
    _Row(frequency=0.7, place=3),
    _Row(presence=1.1),
    _Row(mask=True, place=5),
)
_PROMPT = 1 << 30


def _case(name: str, rows: Sequence[_Row], V: int, B: int = 12, size: str = "small", tree: bool = False) -> Case:
    """One case. B: room in a slot's list of biases. tree: rows but for the first are nodes of one, of any form."""
    S, N, most = len(rows), len(rows) + 1, 1 + max((row.place for row in rows), default=0)
    T = most * S

    def inputs(make: Maker) -> dict[str, object]:
        at_T = torch.arange(T, device=make.device)
        times_NV = make.integers(-6, 5, N, V).clamp(min=0)
        prompt_NV = (make.integers(0, 4, N, V) == 0) * _PROMPT
        # 7919 is prime, so no token comes twice.
        token_NB = (make.integers(0, V, N, 1) + torch.arange(B, device=make.device) * 7919) % V
        return {
            "logits_SV": make.normal(S, V, scale=3.0),
            "slot_S": make.tensor(list(range(S))[::-1], torch.int32),
            "mask_row_S": make.tensor([(s + 1) % S if row.mask else -1 for s, row in enumerate(rows)], torch.int32),
            "mask_SW": make.integers(-(2**31), 2**31, S, -(-V // 32)),
            "bias_count_S": make.tensor([row.bias for row in rows], torch.int32),
            "repetition_S": make.tensor([row.repetition for row in rows], torch.float32),
            "frequency_S": make.tensor([row.frequency for row in rows], torch.float32),
            "presence_S": make.tensor([row.presence for row in rows], torch.float32),
            "counts_NV": times_NV + prompt_NV.int(),
            "bias_token_NB": token_NB.int(),
            "bias_value_NB": make.normal(N, B, scale=5.0, dtype=torch.float32),
            # Few different ones, so that some come twice; among them tokens that have a bias.
            "drafts_T": torch.where(make.integers(0, 3, T) > 0, make.integers(-1, 4, T), token_NB[0, :1].sum().int()),
            "logits_indices_S": make.tensor([most * (s + 1) - 1 for s in range(S)], torch.int32),
            "place_S": make.tensor([row.place for row in rows], torch.int32),
            "ancestors_T": make.integers(-1, 256, T).long().where(at_T >= most, -1) if tree else None,
        }

    return Case(
        name,
        inputs,
        {"float32": 3e-7, "bfloat16": 3e-7, "float16": 3e-7},
        "float32 arithmetic on the logits as they are",
        Bucket("decode", S, S),
        size,  # type: ignore[arg-type]
    )


def _repeat(rows: Sequence[_Row], S: int) -> list[_Row]:
    return [rows[i % len(rows)] for i in range(S)]


_QWEN = 151936

CASES = (
    _case("nothing", [], 50),
    _case("off", [_OFF, _OFF], 333),
    _case("narrow", _ROWS, 13),
    _case("mixed", _ROWS, 2600),
    _case("long_bias", [_Row(bias=300), _Row(True, 257, 1.2), _Row(bias=1)], 4100, B=300),
    _case("no_room_for_bias", _repeat([_Row(mask=True), _Row(repetition=1.5)], 3), 64, B=0),
    _case("drafted", _DRAFTED, 37),
    _case("drafted_wide", _DRAFTED, 4500),
    _case("tree", _DRAFTED, 37, tree=True),
    _case("tree_wide", _DRAFTED, 4500, tree=True),
    *(_case(f"off_qwen_s{S}", _repeat([_OFF], S), _QWEN, size="real") for S in (1, 64, 256)),
    *(_case(f"mask_qwen_s{S}", _repeat([_Row(mask=True)], S), _QWEN, size="real") for S in (1, 64, 256)),
    *(_case(f"penalties_qwen_s{S}", _repeat([_Row(False, 0, 1.1, 0.2, 0.3)], S), _QWEN, size="real") for S in (1, 64)),
    _case("drafted_qwen_s64", _repeat(_DRAFTED, 64), _QWEN, size="real"),
    *(_case(f"mixed_qwen_s{S}", _repeat(_ROWS, S), _QWEN, 1024, size="real") for S in (64, 256)),
)
