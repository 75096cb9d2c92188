"""Routing and experts against layers of transformers, in float32."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from graphllm.ops.moe.fused_moe import fused_moe
from graphllm.ops.moe.moe_route import moe_route
from tests.ops.implementations import implementation

D, N, K = 64, 16, 4


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def _modeling(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def _filled(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(0.5 * torch.randn(tensor.shape, generator=generator))
    return module


def _same_choice(found: tuple[Tensor, Tensor], weights: Tensor, experts: Tensor) -> None:
    """Whatever the order in a row."""
    dense = [torch.zeros(len(w), N).scatter(1, e.long(), w) for w, e in (found, (weights.detach(), experts))]
    torch.testing.assert_close(*dense)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("route", [moe_route, implementation(moe_route, "triton")], ids=["reference", "triton"])
def test_rows_without_numbers_choose_experts_that_exist(route: Any, groups: int) -> None:
    """Weights that overflow make such rows; what then multiplies with experts reads where these numbers say."""
    logits = torch.randn(6, N)
    expected = moe_route(logits_TN=logits, k=K, groups=groups, kept_groups=2 if groups > 1 else 1)
    logits[1], logits[3, 2:5], logits[4] = torch.nan, torch.nan, -torch.inf
    weights, experts = route(logits_TN=logits, k=K, groups=groups, kept_groups=2 if groups > 1 else 1)
    assert all(len({e for e in row if 0 <= e < N}) == K for row in experts.tolist())
    sound = [0, 2, 5]
    torch.testing.assert_close(weights[sound], expected[0][sound])
    assert torch.equal(experts[sound], expected[1][sound])


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_router_of_deepseek_v2(method: str) -> None:
    config = transformers.DeepseekV2Config(
        hidden_size=D, n_routed_experts=N, num_experts_per_tok=K, n_group=4, topk_group=2, topk_method=method,
        routed_scaling_factor=16.0,
    )  # fmt: skip
    router, x = _filled(_modeling("deepseek_v2").DeepseekV2TopkRouter(config)), torch.randn(50, D) / 8
    logits, weights, experts = router(x)
    groups = {"groups": 4, "kept_groups": 2} if method != "greedy" else {}
    _same_choice(moe_route(logits.detach(), K, renormalize=False, scale=16.0, **groups), weights, experts)


def test_router_of_deepseek_v3() -> None:
    config = transformers.DeepseekV3Config(
        hidden_size=D, n_routed_experts=N, num_experts_per_tok=K, n_group=4, topk_group=2, routed_scaling_factor=2.5
    )
    router, x = _filled(_modeling("deepseek_v3").DeepseekV3TopkRouter(config)), torch.randn(50, D) / 8
    logits, weights, experts = router(x)
    bias = router.e_score_correction_bias
    found = moe_route(logits.detach(), K, "sigmoid", scale=2.5, groups=4, kept_groups=2, bias_N=bias)
    _same_choice(found, weights, experts)


def test_layer_of_gpt_oss() -> None:
    """Softmax over the chosen; gates and ups that lie by turns and transposed, biases, clamped."""
    config = transformers.GptOssConfig(
        hidden_size=D, intermediate_size=20, num_local_experts=N, num_experts_per_tok=K, swiglu_limit=1.5
    )
    config._experts_implementation = "eager"
    modeling = _modeling("gpt_oss")
    router, layer = _filled(modeling.GptOssTopKRouter(config)), _filled(modeling.GptOssExperts(config))
    x = torch.randn(30, D) / 4
    logits, weights, experts = router(x)
    found = moe_route(logits.detach(), K)
    _same_choice(found, weights, experts)

    def halves(by_turns: Tensor) -> Tensor:
        return torch.cat([by_turns[..., ::2], by_turns[..., 1::2]], -1)

    out = fused_moe(
        x, halves(layer.gate_up_proj).transpose(1, 2), layer.down_proj.transpose(1, 2), *found, "clamped", 1.5,
        halves(layer.gate_up_proj_bias), layer.down_proj_bias,
    )  # fmt: skip
    torch.testing.assert_close(out, layer(x, experts, weights), atol=1e-5, rtol=1e-5)


def test_experts_of_nemotron_h() -> None:
    """Without a gate, squared ReLU, of experts that a sigmoid and a correction chose."""
    config = transformers.NemotronHConfig(
        hidden_size=D, moe_intermediate_size=20, n_routed_experts=N, num_experts_per_tok=K, routed_scaling_factor=2.5
    )
    config._experts_implementation = "eager"
    modeling = _modeling("nemotron_h")
    router, layer = _filled(modeling.NemotronHTopkRouter(config)), _filled(modeling.NemotronHExperts(config))
    x = torch.randn(30, D) / 4
    logits, weights, experts = router(x)
    found = moe_route(logits.detach(), K, "sigmoid", scale=2.5, bias_N=router.e_score_correction_bias)
    _same_choice(found, weights, experts)
    out = fused_moe(x, layer.up_proj, layer.down_proj, *found, "relu2")
    torch.testing.assert_close(out, layer(x, experts, weights), atol=1e-5, rtol=1e-5)
