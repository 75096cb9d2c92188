"""Triton kernel for process_logits: one program for each tile of a row, which reads only what the row has on."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ir.op import each_alone
from graphllm.ops.sampling.process_logits.op import process_logits
from graphllm.ops.sampling.process_logits.operands import Changes, StepDrafts

_BLOCK = 2048  # tokens of a tile, whole words of the mask
_LIST = 256  # entries of a list of biases read at a time


@triton.jit
def _penalized(x, count, repetition, frequency, presence):
    times = count & 0x3FFFFFFF
    scaled = tl.where(x > 0, x / repetition, x * repetition)
    y = tl.where(count != 0, scaled, x) - frequency * times.to(tl.float32)
    return y - tl.where(times > 0, presence, 0.0)


@triton.jit
def _draft(first_draft_ptr, i, bits, TREE: tl.constexpr):
    """The draft of that number among those before a row, -1 for one on another branch."""
    draft = tl.load(first_draft_ptr + i)
    if TREE:
        draft = tl.where((bits < 0) | (((bits >> (i + 1)) & 1) != 0), draft, -1)
    return draft


@triton.jit
def _adjust_kernel(
    logits_ptr, slot_ptr, mask_row_ptr, mask_ptr, bias_count_ptr, repetition_ptr, frequency_ptr, presence_ptr,
    counts_ptr, bias_token_ptr, bias_value_ptr, drafts_ptr, logits_indices_ptr, place_ptr, ancestors_ptr, out_ptr,
    V: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, MASK_ROW: tl.constexpr, COUNTS_ROW: tl.constexpr,
    TOKEN_ROW: tl.constexpr, VALUE_ROW: tl.constexpr, BLOCK: tl.constexpr, LIST: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    s = tl.program_id(1)
    word = tile * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    bit = tl.arange(0, 32)
    token = word[:, None] * 32 + bit[None, :]
    inside = token < V
    row_ptr = logits_ptr + s.to(tl.int64) * ROW
    out_row_ptr = out_ptr + s.to(tl.int64) * V
    slot = tl.load(slot_ptr + s).to(tl.int64)
    counts_row_ptr = counts_ptr + slot * COUNTS_ROW
    repetition, frequency = tl.load(repetition_ptr + s), tl.load(frequency_ptr + s)
    presence, bias_count = tl.load(presence_ptr + s), tl.load(bias_count_ptr + s)
    penalized = (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)
    mask_row = tl.load(mask_row_ptr + s)
    allowed_ptr = mask_ptr + mask_row.to(tl.int64) * MASK_ROW
    place = tl.load(place_ptr + s)
    at = tl.load(logits_indices_ptr + s)
    first_draft_ptr = drafts_ptr + at + 1 - place
    bits = 0
    if TREE:
        bits = tl.load(ancestors_ptr + at)

    x = tl.load(row_ptr + token * COL, mask=inside, other=0.0).to(tl.float32)
    if mask_row >= 0:
        words = tl.load(allowed_ptr + word, mask=word * 32 < V, other=0)
        x = tl.where(((words[:, None] >> bit[None, :]) & 1) != 0, x, float("-inf"))
    if penalized:
        count = tl.load(counts_row_ptr + token, mask=inside, other=0)
        for i in range(place):
            count += (token == _draft(first_draft_ptr, i, bits, TREE)).to(tl.int32)
        x = _penalized(x, count, repetition, frequency, presence)
    tl.store(out_row_ptr + token, x, mask=inside)

    if bias_count > 0:
        # The tile's tokens that are in the list, once more from the start: the bias comes before the penalties.
        tl.debug_barrier()
        for start in range(0, bias_count, LIST):
            entry = start + tl.arange(0, LIST)
            listed = entry < bias_count
            biased = tl.load(bias_token_ptr + slot * TOKEN_ROW + entry, mask=listed, other=0)
            mine = listed & (biased // BLOCK == tile)
            y = tl.load(row_ptr + biased * COL, mask=mine, other=0.0).to(tl.float32)
            if mask_row >= 0:
                allowed = tl.load(allowed_ptr + biased // 32, mask=mine, other=0)
                y = tl.where(((allowed >> (biased % 32)) & 1) != 0, y, float("-inf"))
            y += tl.load(bias_value_ptr + slot * VALUE_ROW + entry, mask=mine, other=0.0)
            if penalized:
                times = tl.load(counts_row_ptr + biased, mask=mine, other=0)
                for i in range(place):
                    times += (biased == _draft(first_draft_ptr, i, bits, TREE)).to(tl.int32)
                y = _penalized(y, times, repetition, frequency, presence)
            tl.store(out_row_ptr + biased, y, mask=mine)


def _supports(site: CallSite) -> bool:
    args = site.args
    return args["logits_SV"].dtype in (torch.float32, torch.float16, torch.bfloat16) and all(
        t.stride(-1) == 1 for name, t in args.items() if name != "logits_SV" and t is not None
    )


@process_logits.impl("triton_process_logits", device="cuda", supports=_supports, row_order=each_alone)
def triton_process_logits(logits_SV: Tensor, changes: Changes, step: StepDrafts) -> Tensor:
    """One launch."""
    S, V = logits_SV.shape
    out_SV = torch.empty((S, V), dtype=torch.float32, device=logits_SV.device)
    launch_triton(
        _adjust_kernel, (triton.cdiv(V, _BLOCK), S),
        logits_SV, *changes, *step[:3], logits_SV if step.ancestors_T is None else step.ancestors_T, out_SV,
        V=V, ROW=logits_SV.stride(0), COL=logits_SV.stride(1), MASK_ROW=changes.mask_SW.stride(0),
        COUNTS_ROW=changes.counts_NV.stride(0), TOKEN_ROW=changes.bias_token_NB.stride(0),
        VALUE_ROW=changes.bias_value_NB.stride(0), BLOCK=_BLOCK, LIST=_LIST, TREE=step.ancestors_T is not None,
        num_warps=4,
    )  # fmt: skip
    return out_SV
