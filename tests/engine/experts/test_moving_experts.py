"""Experts that move between ranks while they serve: the text, log-probabilities and router choices of transformers
before, during and after, on 2 and 4 processes, with copies and without."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers

from graphllm import LLM, SamplingParams
from graphllm.config import ConfigError
from graphllm.engine.core import EngineCore
from graphllm.engine.experts import expert_balancer
from graphllm.engine.experts.expert_placement import moves_between
from graphllm.engine.parts.experts import Experts
from graphllm.weights.plan.expert_slots import routing_tables
from tests.checkpoints import random_checkpoint
from tests.engine.ranks.test_ranks import executor_of

LAYERS, N, K = 3, 8, 2
CONFIG = {
    "vocab_size": 197, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": LAYERS, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128, "initializer_range": 0.2,
    "num_experts": N, "num_experts_per_tok": K, "moe_intermediate_size": 16, "mlp_only_layers": [1],
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "norm_topk_prob": True,
}  # fmt: skip
SPARSE = (0, 2)
OPTIONS: dict[str, Any] = {
    "target": "cpu", "backend": "eager", "dtype": "float32", "max_model_len": 96, "max_num_seqs": 4,
    "max_num_batched_tokens": 32, "block_size": 8, "skip_tokenizer_init": True, "enable_prefix_caching": False,
    "enable_expert_parallel": True, "enable_eplb": True,
}  # fmt: skip
PROMPTS = [[5, 80, 2, 17, 9, 150], [33], [15, 61, 3, 44, 190, 12, 12, 7, 8, 9, 101], [66, 66, 66]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, logprobs=3, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, the one in the middle without experts."""
    return random_checkpoint(tmp_path_factory.mktemp("moving"), "Qwen3Moe", 4, CONFIG)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


@pytest.fixture
def one_move_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that many steps run with experts on their way."""
    monkeypatch.setattr(expert_balancer, "_MOST_BYTES", 1)


def check_output(found: Any, logits: torch.Tensor, tolerance: float = 1e-4, ties: float = 0.0) -> None:
    """A completion beside the logits [tokens, V] of its places: greedy tokens, and their log-probabilities. ties:
    log-probabilities that are so close count as equal where a token is chosen."""
    expected = logits.log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(found.token_ids).unsqueeze(1)).squeeze(1)
    assert bool((expected.amax(-1) - chosen <= ties).all())
    for row, ranked in zip(expected, found.logprobs, strict=True):
        for token, told in ranked.items():
            assert told.logprob == pytest.approx(float(row[token]), abs=tolerance)


def check(
    model: Any, llm: LLM, prompts: list[list[int]] = PROMPTS, tolerance: float = 1e-4, ties: float = 0.0
) -> np.ndarray:
    """Serve the prompts, beside transformers, as `check_output` does. Returns what its routers choose, [layers,
    experts]."""
    counted = np.zeros((LAYERS, N), dtype=np.int64)
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    for ids, output in zip(prompts, llm.generate(asked, GREEDY, use_tqdm=False), strict=True):
        found = output.outputs[0]
        assert len(found.token_ids) == GREEDY.max_tokens
        with torch.inference_mode():
            whole = model(torch.tensor([[*ids, *found.token_ids[:-1]]]), output_router_logits=True)
        check_output(found, whole.logits[0, len(ids) - 1 :], tolerance, ties)
        for layer, scores in zip(SPARSE, whole.router_logits, strict=True):
            counted[layer] += np.bincount(scores.topk(K, -1).indices.flatten().numpy(), minlength=N)
    return counted


def balancer_of(llm: LLM) -> expert_balancer.ExpertBalancer:
    found = cast("EngineCore", llm.llm_engine.core).part(Experts).balancer
    assert found is not None
    return found


def check_slots(llm: LLM, model: Any) -> None:
    """What rank 0 has in its slots are the experts of the placements, by their values, and so are its tables."""
    executor, balancer = executor_of(llm), balancer_of(llm)
    executor.synchronize()
    slots = executor.expert_slots
    assert slots is not None
    layout = slots._layout
    for layer, placement in balancer.placements.items():
        weights = dict(zip(layout.layers[layer], slots._parts[layer], strict=True))
        experts = model.model.layers[layer].mlp.experts
        for slot in range(layout.slots_of_rank):
            expert = placement[slot]
            assert torch.equal(weights[f"layers.{layer}.down"][slot], experts.down_proj[expert])
            assert torch.equal(weights[f"layers.{layer}.gate_up"][slot], experts.gate_up_proj[expert])
        for table, expected in zip(slots._tables[layer], routing_tables(placement, N), strict=True):
            assert table.tolist() == expected


def eplb(**given: Any) -> dict[str, Any]:
    return {**OPTIONS, "eplb_config": given}


@pytest.mark.parametrize(
    ("ranks", "redundant"),
    [pytest.param(r, n, id=f"{r}+{n}", marks=pytest.mark.slow if r == 4 else []) for r, n in ((2, 2), (4, 4), (4, 0))],
)
@pytest.mark.usefixtures("one_move_a_step")
def test_text_and_counts_before_during_and_after(checkpoint: Path, model: Any, ranks: int, redundant: int) -> None:
    """One process's numbers are transformers' here."""
    settings = eplb(num_redundant_experts=redundant, window_size=20, step_interval=12, log_balancedness=True)
    with LLM(checkpoint, tensor_parallel_size=ranks, **settings) as llm:
        counted = check(model, llm, PROMPTS[:1])  # 14 steps: the first moves are at its end
        moved = [balancer_of(llm).moved]
        for _ in range(4):
            counted += check(model, llm)
            moved.append(balancer_of(llm).moved)
            check_slots(llm, model)
        assert moved[0] < moved[1] < moved[-1], moved
        stats = llm.llm_engine.core.stats()
        assert stats.expert_tokens == counted.tolist()
        assert stats.expert_moves == moved[-1]
        assert {*stats.expert_balancedness} == {*SPARSE}
        metrics = llm.get_metrics()
        told = {(m.labels["layer"], m.labels["expert"]): m.value for m in metrics if m.name.endswith("expert_tokens")}
        assert told == {(f"{i}", f"{n}"): counted[i, n] for i in SPARSE for n in range(N)}


@pytest.mark.thorough
def test_it_gets_more_even(checkpoint: Path, model: Any) -> None:
    """The same requests again and again, all moves of a layer at once: the ranks' shares of tokens come closer."""
    with LLM(checkpoint, tensor_parallel_size=4, **eplb(num_redundant_experts=8, step_interval=18)) as llm:
        before = None
        for _ in range(3):
            check(model, llm)
            before = before or balancer_of(llm).balancedness()
        after = balancer_of(llm).balancedness()
        assert all(after[layer] > before[layer] for layer in SPARSE), (before, after)
        assert min(after.values()) > 0.9


@pytest.mark.slow
@pytest.mark.usefixtures("one_move_a_step")
def test_stages_that_are_divided(checkpoint: Path, model: Any) -> None:
    """Two stages of two ranks: each moves the experts of its own layers."""
    settings = eplb(num_redundant_experts=2, step_interval=12)
    with LLM(checkpoint, tensor_parallel_size=2, pipeline_parallel_size=2, **settings) as llm:
        for _ in range(4):
            check(model, llm)
        assert balancer_of(llm).moved > 4


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"backend": "inductor"}, {"num_speculative_tokens": 2, "prompt_lookup_max": 3}])
def test_compiled_and_with_drafts(checkpoint: Path, model: Any, how: dict[str, Any]) -> None:
    settings = {**eplb(num_redundant_experts=2), **how}
    with LLM(checkpoint, tensor_parallel_size=2, **settings) as llm:
        for seed in range(4):
            check(model, llm)
            scatter(llm, seed)
            check_slots(llm, model)


def scatter(llm: LLM, seed: int) -> None:
    """Move experts anywhere, whatever the load. Before the balancer has moved any."""
    draw, balancer = random.Random(seed), balancer_of(llm)
    for layer, old in balancer.placements.items():
        new = draw.sample(old, len(old))
        groups = moves_between(old, new, 2)
        llm.llm_engine.core.executor.do(balancer._moves(layer, groups))
        assert balancer.placements[layer] == new


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_rounded_weights_move_with_their_scales(tmp_path: Path, quantization: str) -> None:
    """The text of ranks whose experts stay."""
    torch.manual_seed(5)
    wide = CONFIG | {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**wide)).save_pretrained(tmp_path)
    settings: dict[str, Any] = {**OPTIONS, "tensor_parallel_size": 2, "quantization": quantization}
    asked = [{"prompt_token_ids": ids} for ids in PROMPTS]
    with LLM(tmp_path, **settings | {"enable_eplb": False}) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(asked, GREEDY)]
    with LLM(tmp_path, **settings, num_redundant_experts=2) as llm:
        layout = executor_of(llm).experts
        assert layout is not None
        assert len(layout.layers[0]) > 2  # values and scales
        for seed in range(4):
            assert [o.outputs[0].token_ids for o in llm.generate(asked, GREEDY)] == expected
            scatter(llm, seed)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"enable_eplb": True}, "enable_eplb is True: it moves whole experts between ranks; set enable_expert_para"),
        ({"num_redundant_experts": 2}, "num_redundant_experts is 2: enable_eplb makes the copies; set it, or use 0"),
        (
            {**OPTIONS, "tensor_parallel_size": 4, "num_redundant_experts": 3},
            "num_redundant_experts is 3: with the 8 experts of a layer that is no multiple of tensor_parallel_size, 4; "
            "use 0 or a multiple of 4 more",
        ),
        ({"eplb_config": {"windows": 2}}, "eplb_config.windows is 2: there are num_redundant_experts, window_size"),
        ({"eplb_config": {"policy": "flat"}}, "eplb_config.policy is 'flat': use default"),
        ({"eplb_config": {"window_size": 0}}, "eplb_window_size is 0: it must be at least 1"),
        (
            {**OPTIONS, "tensor_parallel_size": 2, "enable_lora": True, "lora_target_modules": "experts"},
            "lora_target_modules is experts: with enable_eplb experts move between ranks, and their adapters would not",
        ),
    ],
)
def test_settings_that_cannot_be(checkpoint: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        LLM(checkpoint, **{"target": "cpu", "backend": "eager", "skip_tokenizer_init": True, **given})


def test_a_model_without_experts() -> None:
    with pytest.raises(ConfigError, match="enable_expert_parallel: the model has no experts; leave it out"):
        LLM(tensor_parallel_size=2, **OPTIONS)
