"""Eight processes in every division: more ranks than heads of keys and values, stages of several ranks, experts by
number, and whole engines. Slow: on two cores each engine starts for ten seconds and more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from graphllm import LLM
from tests.checkpoints import random_checkpoint
from tests.core_processes import core_pids
from tests.engine.experts.test_moving_experts import CONFIG, GREEDY, OPTIONS, PROMPTS, check, check_output
from tests.engine.ranks.test_ranks import executor_of, pids_of
from tests.waiting import gone, until

pytestmark = pytest.mark.slow
WHOLE = {**OPTIONS, "enable_expert_parallel": False, "enable_eplb": False}
DENSE = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two heads of keys and values, eight of queries."""
    return random_checkpoint(tmp_path_factory.mktemp("dense"), "Llama", 6, DENSE)


def check_dense(folder: Path, llm: LLM, tolerance: float = 1e-4, ties: float = 0.0) -> None:
    """Greedy text of transformers and its log-probabilities, as `check_output` compares them."""
    alone = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = [{"prompt_token_ids": ids} for ids in PROMPTS * 3]
    for ids, output in zip(PROMPTS * 3, llm.generate(asked, GREEDY, use_tqdm=False), strict=True):
        found = output.outputs[0]
        with torch.inference_mode():
            logits = alone(torch.tensor([[*ids, *found.token_ids[:-1]]])).logits[0, len(ids) - 1 :]
        check_output(found, logits, tolerance, ties)


@pytest.mark.parametrize(("ranks", "stages"), [(8, 1), (4, 2), (2, 4)])
def test_matrices_and_stages(dense: Path, ranks: int, stages: int) -> None:
    with LLM(dense, **WHOLE, tensor_parallel_size=ranks, pipeline_parallel_size=stages) as llm:
        pids = pids_of(llm)
        assert len(pids) == 7
        assert executor_of(llm).pipeline_depth == stages
        check_dense(dense, llm)
    until(lambda: gone(*pids))


def test_engines(dense: Path) -> None:
    with LLM(dense, **WHOLE, data_parallel_size=8) as llm:
        check_dense(dense, llm)
        core: Any = llm.llm_engine.core
        assert [stats.steps > 0 for stats in core.engine_stats()] == [True] * 8
        pids = core_pids()
    until(lambda: gone(*pids))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight experts in a layer."""
    sizes = CONFIG | {"num_attention_heads": 8, "num_key_value_heads": 2}
    return random_checkpoint(tmp_path_factory.mktemp("experts"), "Qwen3Moe", 7, sizes)


@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 8},
        {"tensor_parallel_size": 8, "enable_eplb": True, "eplb_config": {"num_redundant_experts": 8}},
        {"data_parallel_size": 8},
    ],
    ids=["ranks", "with copies", "cores"],
)
def test_experts_by_number(experts: Path, settings: dict[str, Any]) -> None:
    """One expert a rank, or two with copies."""
    model = transformers.AutoModelForCausalLM.from_pretrained(experts, dtype=torch.float32)
    with LLM(experts, **{**OPTIONS, "enable_eplb": False, **settings}) as llm:
        for _ in range(2):
            check(model, llm, PROMPTS * 3)
