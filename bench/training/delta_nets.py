"""Gated delta nets as they are trained: transformers' layer, computed in chunks of tokens by batched products.

Inside of a chunk, the rule is a triangular system; between chunks, a loop carries the state. The inverse and the loop
are ops of their own, which torch.compile takes as they are. Source: Yang et al. 2024, "Gated Delta Networks".
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3_5ForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

CHUNK = 64
"""Tokens of a chunk. A row's length is a multiple."""
FASTEST, SLOWEST = 0.1, 0.001
"""Between these lie the step sizes that heads start with: a state is forgotten within some to thousands of tokens."""


@torch.library.custom_op("graphllm_training::inverse", mutates_args=())
def inverse(below_MCC: Tensor) -> Tensor:
    """The inverses of unit lower triangular matrices. below_MCC: what is below the diagonal, the rest zero; C a power
    of two. From blocks to blocks of twice the size, which has no large numbers on the way."""
    M, C, _ = below_MCC.shape
    inverse_MCC = torch.eye(C, dtype=below_MCC.dtype, device=below_MCC.device).repeat(M, 1, 1)
    size = 1
    while size < C:
        ours, theirs = (_diagonal_blocks(x, 2 * size) for x in (inverse_MCC, below_MCC))
        first, second, between = ours[..., :size, :size], ours[..., size:, size:], theirs[..., size:, :size]
        ours[..., size:, :size] = -_product(_product(second, between), first)
        size *= 2
    return inverse_MCC


def _diagonal_blocks(x_MCC: Tensor, size: int) -> Tensor:
    """A view: [M, C / size, size, size]."""
    count = x_MCC.shape[1] // size
    return x_MCC.view(-1, count, size, count, size).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Of small matrices, where a library's product of matrices would be slow, term by term."""
    return a @ b if a.shape[-1] > 8 else (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)


@inverse.register_fake
def _(below_MCC: Tensor) -> Tensor:
    return torch.empty_like(below_MCC)


def _inverse_saved(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _inverse_backward(ctx: Any, grad_MCC: Tensor) -> Tensor:
    (inverse_MCC,) = ctx.saved_tensors
    turned_MCC = inverse_MCC.mT
    return -(turned_MCC @ grad_MCC @ turned_MCC).tril(-1)


inverse.register_autograd(_inverse_backward, setup_context=_inverse_saved)


@torch.library.custom_op("graphllm_training::carry", mutates_args=())
def carry(reads: Tensor, values: Tensor, keys: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Chunk after chunk: new = values - reads @ state; state = kept * state + keys^T @ new.

    Args:
        reads: float32 [M, chunks, C, K], the keys as they read a state
        values: float32 [M, chunks, C, V]
        keys: float32 [M, chunks, C, K], the keys as they write to it
        kept: float32 [M, chunks], the share of a state that is there after the chunk

    Returns: each chunk's state before it, [M, chunks, K, V], and what is new to it, [M, chunks, C, V].
    """
    M, count, _, K = reads.shape
    states = reads.new_zeros((M, count, K, values.shape[-1]))
    new = torch.empty_like(values)
    for i in range(count):
        torch.baddbmm(values[:, i], reads[:, i], states[:, i], alpha=-1, out=new[:, i])
        if i + 1 < count:
            after = torch.mul(states[:, i], kept[:, i, None, None], out=states[:, i + 1])
            after.baddbmm_(keys[:, i].mT, new[:, i])
    return states, new


@carry.register_fake
def _(reads: Tensor, values: Tensor, keys: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    return values.new_empty((*keys.shape[:2], keys.shape[-1], values.shape[-1])), torch.empty_like(values)


@torch.library.custom_op("graphllm_training::carry_back", mutates_args=())
def carry_back(
    reads: Tensor, keys: Tensor, kept: Tensor, grad_states: Tensor, grad_new: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of `values` and of each chunk's state after it, from the last chunk to the first."""
    grad_values, grad_after = torch.empty_like(grad_new), torch.zeros_like(grad_states)
    for i in reversed(range(reads.shape[1])):
        torch.baddbmm(grad_new[:, i], keys[:, i], grad_after[:, i], out=grad_values[:, i])
        if i:
            kept_i, before = kept[:, i, None, None], grad_after[:, i - 1]
            torch.addcmul(grad_states[:, i], grad_after[:, i], kept_i, out=before)
            before.baddbmm_(reads[:, i].mT, grad_values[:, i], alpha=-1)
    return grad_values, grad_after


@carry_back.register_fake
def _(reads: Tensor, keys: Tensor, kept: Tensor, grad_states: Tensor, grad_new: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(grad_new), torch.empty_like(grad_states)


def _carry_saved(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    reads, _, keys, kept = inputs
    ctx.save_for_backward(reads, keys, kept, *output)


def _carry_backward(ctx: Any, grad_states: Tensor, grad_new: Tensor) -> tuple[Tensor, ...]:
    reads, keys, kept, states, new = ctx.saved_tensors
    grad_values, grad_after = carry_back(reads, keys, kept, grad_states.contiguous(), grad_new.contiguous())
    return -grad_values @ states.mT, grad_values, new @ grad_after.mT, (grad_after * states).sum((-2, -1))


carry.register_autograd(_carry_backward, setup_context=_carry_saved)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule over rows of tokens, each from an empty state.

    Args:
        q, k: float32 [rows, heads, length, K], normalized and, q, scaled
        v: float32 [rows, heads, length, V]
        g: float32 [rows, heads, length], logarithms of what a state keeps
        beta: float32 [rows, heads, length]

    Returns: [rows, heads, length, V]. Raises ValueError for a length that is no multiple of a chunk.
    """
    rows, heads, length, _ = q.shape
    if length % CHUNK:
        raise ValueError(f"rows have a length of {length} tokens, no multiple of {CHUNK}; pad them")
    q, k, v, g, beta = (x.reshape(rows * heads, length // CHUNK, CHUNK, *x.shape[3:]) for x in (q, k, v, g, beta))
    sums = g.cumsum(-1)
    since = sums.unsqueeze(-1) - sums.unsqueeze(-2)
    decay = since.masked_fill(torch.ones_like(since, dtype=torch.bool).triu(1), -math.inf).exp()
    k_beta = k * beta.unsqueeze(-1)
    system = ((k_beta @ k.mT) * decay).tril(-1)
    solved = inverse(system.flatten(0, 1)).view_as(system)
    reads = solved @ (k_beta * sums.exp().unsqueeze(-1))
    values = solved @ (v * beta.unsqueeze(-1))
    last = sums[..., -1:]
    states, new = carry(reads, values, k * (last - sums).exp().unsqueeze(-1), last.squeeze(-1).exp())
    out = (q * sums.exp().unsqueeze(-1)) @ states + ((q @ k.mT) * decay) @ new
    return out.reshape(rows, heads, length, -1)


class DeltaNet(Qwen3_5GatedDeltaNet):
    """The layer as it is trained: whole rows, nothing cached, no padding; as many heads of keys as of values."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        length = hidden_states.shape[1]
        weights = [x.weight for x in (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)]
        counts = [len(weight) for weight in weights]
        spare = -sum(counts) % 8  # products of matrices are fast for a multiple of 16 bytes
        projected = functional.linear(hidden_states, functional.pad(torch.cat(weights), (0, 0, 0, spare)))
        mixed, z, beta, a, _ = projected.split((*counts, spare), -1)
        mixed = functional.pad(mixed, (0, 0, self.conv_kernel_size - 1, 0))
        taps = self.conv1d.weight.squeeze(1).to(mixed.dtype)
        mixed = functional.silu(sum(mixed[:, i : i + length] * taps[:, i] for i in range(self.conv_kernel_size)))
        sizes = (self.key_dim, self.key_dim, self.value_dim)
        q, k, v = (x.unflatten(-1, (self.num_v_heads, -1)).transpose(1, 2).float() for x in mixed.split(sizes, -1))
        g = -self.A_log.float().exp() * functional.softplus(a.float() + self.dt_bias)
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        with torch.autocast(hidden_states.device.type, enabled=False):
            g, beta = (x.transpose(1, 2) for x in (g, beta.float().sigmoid()))
            out = gated_delta(q * self.head_k_dim**-0.5, k, v, g, beta)
        z = z.unflatten(-1, (self.num_v_heads, -1))
        return self.out_proj(self.norm(out.transpose(1, 2).to(z.dtype), z).flatten(-2))


@torch.no_grad()
def prepare(model: Qwen3_5ForCausalLM) -> None:
    """Lets the delta nets of a new model compute as above, and gives them a spread of decays and taps of one size."""
    for layer in model.modules():
        if isinstance(layer, Qwen3_5GatedDeltaNet):
            layer.__class__ = DeltaNet
            layer.conv1d.reset_parameters()
            steps = torch.empty_like(layer.dt_bias).uniform_(math.log(SLOWEST), math.log(FASTEST)).exp()
            layer.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # softplus gives the steps back
