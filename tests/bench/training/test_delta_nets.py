"""Gated delta nets as they are trained: the rule against its recurrence, the layer against transformers'."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from bench.training import delta_nets

ROWS, HEADS, K, V = 2, 3, 8, 4


def inputs(length: int, largest: float) -> list[Tensor]:
    """Of the rule, in float64. largest: how fast a state is forgotten, at most."""
    draw = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn((ROWS, HEADS, length, size), generator=draw, dtype=torch.float64) for size in (K, K, V))
    g, beta = (torch.rand((ROWS, HEADS, length), generator=draw, dtype=torch.float64) for _ in range(2))
    k[:, 0] = k[:, 0, :1]  # a head that always reads and writes the same key
    k = k / k.norm(dim=-1, keepdim=True)
    return [x.requires_grad_() for x in (q, k, v, -largest * g, beta)]


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    state, out = q.new_zeros((ROWS, HEADS, K, V)), []
    for i in range(q.shape[2]):
        state = state * g[:, :, i, None, None].exp()
        known = torch.einsum("bhkv,bhk->bhv", state, k[:, :, i])
        change = beta[:, :, i, None] * (v[:, :, i] - known)
        state = state + k[:, :, i, :, None] * change[:, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, i]))
    return torch.stack(out, 2)


def gradients(rule: Callable[..., Tensor], given: list[Tensor]) -> tuple[Tensor, ...]:
    out = rule(*given)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return out, *torch.autograd.grad((out * weight).sum(), given)


@pytest.mark.parametrize(("length", "largest"), [(64, 0.1), (192, 0.001), (128, 30.0)])
def test_the_rule_and_its_gradients(length: int, largest: float) -> None:
    given = inputs(length, largest)
    pairs = zip(gradients(delta_nets.gated_delta, given), gradients(recurrence, given), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_rows_of_any_length_are_refused() -> None:
    with pytest.raises(ValueError, match="length of 100 tokens, no multiple of 64; pad them"):
        delta_nets.gated_delta(*inputs(100, 0.1))


def test_a_model_computes_and_learns_as_transformers_does() -> None:
    config = Qwen3_5TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, full_attention_interval=4,
    )  # fmt: skip
    torch.manual_seed(0)
    ours = Qwen3_5ForCausalLM(config)
    delta_nets.prepare(ours)
    theirs = copy.deepcopy(ours)
    for layer in theirs.modules():
        if isinstance(layer, delta_nets.DeltaNet):
            layer.__class__ = Qwen3_5GatedDeltaNet
    ids = torch.randint(64, (2, 128))
    logits = [model(input_ids=ids, use_cache=False).logits for model in (ours, theirs)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    for each in logits:
        torch.nn.functional.cross_entropy(each[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (found.grad - expected.grad).norm() <= 1e-4 * expected.grad.norm(), name
