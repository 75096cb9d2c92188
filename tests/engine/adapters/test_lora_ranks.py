"""LoRA adapters of an engine of several ranks, beside PEFT's own model: each rank has its share of the tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.adapters import test_lora, test_moe_lora
from tests.engine.adapters.test_lora import ADAPTERS, GREEDY, LLAMA, _ids, _prompts

MIXED = [None, *ADAPTERS] * 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "changes", "options"),
    [
        # One key and value head, which both ranks have; a vocabulary that two do not divide, in the head's tables.
        (
            "qwen2",
            {"num_key_value_heads": 1, "tie_word_embeddings": False},
            {"tensor_parallel_size": 2, "lora_target_modules": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj",
             "up_proj", "down_proj", "lm_head", "embed_tokens")},
        ),
        pytest.param("qwen2", {}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("phi3", {}, {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("gpt2", {}, {"tensor_parallel_size": 4}, marks=pytest.mark.slow),
        pytest.param("qwen2", {}, {"tensor_parallel_size": 2, "backend": "inductor"}, marks=pytest.mark.slow),
        pytest.param("qwen2", {}, {"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_dense(name: str, changes: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    """Mixed in one batch, prompts in parts, of which two have tables at a time."""
    adapters = None
    if "lora_target_modules" in options:
        ends = ["lm_head", "embed_tokens"]
        linear = [m for m in options["lora_target_modules"] if m not in ends]
        chosen = {"all": linear, "some": [*ends, "o_proj"], "uneven": [*ends, "k_proj"]}
        adapters = {n: (o, chosen[n]) for n, o in ADAPTERS.items()}
    family = test_lora.Family(name, tmp_path, changes, adapters)
    with test_lora._open(family, **options) as llm:
        outputs = llm.generate(
            _ids(_prompts(len(MIXED))), GREEDY, lora_request=[a and family.adapters[a] for a in MIXED]
        )
        family.check(outputs, MIXED)
        alone = llm.generate(_ids(_prompts(2, seed=4)), GREEDY)
        family.check(alone, [None, None])


@pytest.mark.thorough
@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_experts(name: str, apart: bool, tmp_path: Path) -> None:
    """Divided by their width, and by their number."""
    family = test_moe_lora.Family(name, tmp_path, test_moe_lora.ADAPTERS)
    mixed = [None, *test_moe_lora.ADAPTERS] * 2
    with test_moe_lora._open(family, tensor_parallel_size=2, enable_expert_parallel=apart) as llm:
        requests = [a and family.requests[a] for a in mixed]
        family.check(llm.generate(test_moe_lora._prompts(len(mixed)), GREEDY, lora_request=requests), mixed)


@pytest.mark.thorough
def test_quantized(tmp_path: Path) -> None:
    family = test_lora.Family("qwen2", tmp_path, LLAMA | {"hidden_size": 128, "intermediate_size": 128})
    family.quantize()
    with test_lora._open(family, tensor_parallel_size=2, quantization="int8") as llm:
        requests = [a and family.adapters[a] for a in MIXED]
        family.check(llm.generate(_ids(_prompts(len(MIXED))), GREEDY, lora_request=requests), MIXED)
