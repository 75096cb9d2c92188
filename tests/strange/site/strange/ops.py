"""Ops of the strange layers. Their references have no loop over data, so that Inductor compiles them for any device."""

import torch
from torch import Tensor

from graphllm.ir import Cost, Extern, nbytes, op

TAIL, NARROW = 3, 8  # rows that a recurrent layer remembers; by how much values are narrower than keys


def _cost(x_TD: Tensor) -> Cost:
    return Cost(2 * nbytes(x_TD), x_TD.numel())


def _tokens(query_start_loc: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each token: its number, its sequence, its place in it and whether it is no padding."""
    t = torch.arange(count, device=query_start_loc.device)
    s = (t[:, None] >= query_start_loc[None, 1:]).sum(1).clamp(max=query_start_loc.shape[0] - 2)
    return t, s, t - query_start_loc[s], t < query_start_loc[-1]


@op(boundary=True, mutates=("tail", "total"), cost=_cost)
def strange_recurrent(
    x_TD: Tensor, tail: Tensor, total: Tensor, query_start_loc: Tensor, slots: Tensor, state_versions: Tensor
) -> Tensor:
    """x plus the mean of the rows before it (tail [N, versions, 3, D]) plus a decaying sum of all (total [N, versions,
    D] float64). slots, state_versions [S]: where a sequence's states are; see docs/architecture.md."""
    t, s, i, real = _tokens(query_start_loc, x_TD.shape[0])
    count, versions = query_start_loc[s + 1] - query_start_loc[s], tail.shape[1]
    slot, version = slots.long()[s], state_versions.long()[s]
    last, rows = tail[slot, version], []
    for j in range(TAIL, 0, -1):
        old = last[t, (TAIL - j + i).clamp(0, TAIL - 1)]
        rows.append(torch.where((i >= j)[:, None], x_TD[(t - j).clamp(min=0)], old))
    back = t[:, None] - t[None, :]
    decay = torch.where((s[:, None] == s[None, :]) & (back >= 0), 0.75 ** back.clamp(min=0).double(), 0.0)
    sums = decay @ x_TD.double() + (0.75 ** (i + 1).double())[:, None] * total[slot, version]
    out_TD = x_TD + torch.stack(rows).mean(0) + sums.to(x_TD.dtype)
    kept = real & ((i == count - 1) | (count <= versions))
    at = torch.where(kept, slot, tail.shape[0] - 1), i.clamp(max=versions - 1)
    tail.index_put_(at, torch.stack([*rows[1:], x_TD], 1))
    total.index_put_(at, sums)
    return out_TD


@op(boundary=True, cost=_cost)
def strange_tables(
    x_TD: Tensor,
    sequence_ids: Tensor,
    fresh: Tensor,
    num_decodes: Tensor,
    chunks: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    chunk: int,
) -> Tensor:
    """x plus the sine of each token's position, which follows from the tables that the host makes of a step."""
    t = torch.arange(x_TD.shape[0], device=x_TD.device)
    start = torch.where(fresh > 0, 0, seq_lens - query_start_loc.diff())
    sequence, first = chunks.unbind(1)
    inside = (t[:, None] >= first) & (t[:, None] < first + chunk) & (sequence_ids[:, None] == sequence)
    at = ((t[:, None] - query_start_loc[sequence.clamp(min=0)]) * inside).sum(1)
    at = torch.where(t < num_decodes, 0, at)  # the first sequences have one token each
    return x_TD + torch.sin((start[sequence_ids] + at).to(x_TD.dtype))[:, None]


@op(boundary=True, mutates=("latent", "scale"), cost=_cost)
def strange_latent(
    x_TD: Tensor, latent: Tensor, scale: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor
) -> Tensor:
    """Causal attention over rows that are keys and, but for the last 8 numbers, values: latent [B, P, D] int8, scale
    [B, P]."""
    t, s, _, real = _tokens(query_start_loc, x_TD.shape[0])
    P, D = latent.shape[1:]
    at = (seq_lens - query_start_loc[1:])[s] + t
    block = torch.where(real, block_table[s, (at // P).clamp(0, block_table.shape[1] - 1)], 0).long()
    place = torch.where(real, at % P, 0)
    largest = x_TD.float().abs().amax(-1).clamp(min=1e-6) / 127
    latent.index_put_((block, place), (x_TD.float() / largest[:, None]).round().to(torch.int8))
    scale.index_put_((block, place), largest)
    first = P * torch.arange(block_table.shape[1], device=x_TD.device)
    blocks = torch.where(first < seq_lens[:, None], block_table, 0).long()  # entries behind a sequence are anything
    kept = (latent[blocks].float() * scale[blocks][..., None]).flatten(1, 2)[s]
    past = torch.arange(kept.shape[1], device=x_TD.device) <= at[:, None]
    kept = torch.where(past[..., None], kept, 0.0)  # behind a sequence's tokens may lie anything, and 0 * NaN is NaN
    scores = (x_TD.float()[:, None] * kept).sum(-1).masked_fill(~past, float("-inf"))
    out = (torch.softmax(scores, -1)[..., None] * kept[..., : D - NARROW]).sum(1)
    return torch.nn.functional.pad(out, (0, NARROW)).to(x_TD.dtype)


@op(boundary=True, cost=_cost)
def strange_bidirectional(x_TD: Tensor, query_start_loc: Tensor) -> Tensor:
    """Attention of each token to all of its sequence, whose rows are keys and values at once."""
    _, s, _, real = _tokens(query_start_loc, x_TD.shape[0])
    seen = (s[:, None] == s[None, :]) & (real[None, :] | ~real[:, None])
    scores = (x_TD.float() @ x_TD.float().T).masked_fill(~seen, float("-inf"))
    return (torch.softmax(scores, -1) @ x_TD.float()).to(x_TD.dtype)


@op(boundary=True, mutates=("memory",), cost=_cost)
def strange_remember(x_TD: Tensor, memory: Tensor, item_rows: Tensor) -> None:
    """Write rows of x into memory [N, D] at item_rows [T]; those with -1 go to its last row, which nobody reads."""
    rows = torch.where(item_rows < 0, memory.shape[0] - 1, item_rows).long()
    memory.index_put_((rows,), x_TD.to(memory.dtype))


@op(cost=_cost, neutral=("item_rows", "x_TD"))
def strange_placed(x_TD: Tensor, memory: Tensor, item_rows: Tensor) -> Tensor:
    """Rows of memory [N, D] in place of those of x where item_rows [T] is not negative."""
    return torch.where((item_rows >= 0)[:, None], memory[item_rows.clamp(min=0)], x_TD)


@op(boundary=True, cost=_cost)
def strange_cross(
    x_TD: Tensor, memory: Tensor, item_start: Tensor, item_length: Tensor, query_start_loc: Tensor
) -> Tensor:
    """Attention of each token to the rows item_start[s] to item_start[s] + item_length[s] of memory [N, D], which are
    keys and values at once; zeros where there is none."""
    _, s, _, _ = _tokens(query_start_loc, x_TD.shape[0])
    row = torch.arange(memory.shape[0], device=x_TD.device)
    first = item_start[s][:, None]
    seen = (row >= first) & (row < first + item_length[s][:, None])
    weights = torch.softmax((x_TD.float() @ memory.float().T).masked_fill(~seen, -1e30), -1) * seen
    return (weights @ memory.float()).to(x_TD.dtype)


@op(cost=_cost, neutral=("adapter_ids", "y_TD"))
def strange_adapted(y_TD: Tensor, x_TD: Tensor, table: Tensor, adapter_ids: Tensor) -> Tensor:
    """y plus x, scaled by the row of table [A, D] that adapter_ids [T] names."""
    return y_TD + x_TD * table[adapter_ids]


_CENTER = Extern("strange_center", "(Tensor(a!) centered, Tensor(b!) mean, Tensor(c!) work, Tensor x, float f) -> ()")


@op(boundary=True, cost=_cost)
def strange_center(x_TD: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """x without its mean, which is weighed with the factor, and that mean [T]."""
    mean_T = (x_TD * factor).mean(-1)
    return x_TD - mean_T[:, None], mean_T


def _center(x_TD: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    centered, work, mean = torch.empty_like(x_TD), torch.empty_like(x_TD), x_TD.new_empty(x_TD.shape[0])
    _CENTER(centered, mean, work, x_TD, factor)
    return centered, mean


for _device in ("cpu", "cuda"):
    strange_center.impl(f"extern_{_device}", device=_device)(_center)
