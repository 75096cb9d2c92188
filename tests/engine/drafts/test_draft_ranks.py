"""Draft models of an engine of several ranks: the model's text, and as many drafts and right ones as on one rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from graphllm import LLM, SamplingParams
from tests.engine.drafts.test_dflash import dflash
from tests.engine.drafts.test_draft_models import COUNT, DRAFTS, METHODS, V, made_model, saved
from tests.engine.harness import verify_all_drafts
from tests.tiers import thorough

GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
TREE = {"speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1)]"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "ranks", "more"),
    [
        thorough("eagle3", 2, {}),
        ("draft_model", 2, {}),
        *(pytest.param(name, 2, {}, marks=pytest.mark.slow) for name in ("eagle", "medusa", "mlp_speculator", "mtp")),
        pytest.param("dflash", 2, {}, marks=pytest.mark.slow),
        pytest.param("eagle3", 2, TREE, marks=pytest.mark.slow),
        pytest.param("eagle", 4, {}, marks=pytest.mark.slow),  # two heads of keys, each on two ranks
        pytest.param("eagle3", 2, {"backend": "inductor"}, marks=pytest.mark.slow),
    ],
)
def test_drafts(name: str, ranks: int, more: dict[str, Any], tmp_path: Path) -> None:
    model = made_model()
    method = dflash(model) if name == "dflash" else METHODS[name](model)
    folder, draft = saved(model, method, tmp_path)
    speculation = {"method": method.name, "model": str(draft), "num_speculative_tokens": DRAFTS}
    speculation |= {n: v for n, v in more.items() if n in TREE}
    if more.keys() & TREE.keys():
        del speculation["num_speculative_tokens"]
    options: dict[str, Any] = {
        "dtype": "float32", "backend": "eager", "target": "cpu", "max_model_len": 96, "max_num_seqs": 4,
        "max_num_batched_tokens": 32, "block_size": 8, "skip_tokenizer_init": True, "speculative_config": speculation,
        **{n: v for n, v in more.items() if n not in TREE},
    }  # fmt: skip
    rng = random.Random(2)
    prompts = [[rng.randrange(1, V) for _ in range(n)] for n in (40, 8, 31, 1, 16)]
    expected = []
    for prompt in prompts:
        with torch.no_grad():
            whole = model.generate(
                torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        expected.append(whole[0, len(prompt) :].tolist())
    counts = []
    for degree in (1, ranks):
        with LLM(folder, tensor_parallel_size=degree, **options) as llm:
            core: Any = llm.llm_engine.core
            verify_all_drafts(core)
            found = llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY)
            assert [o.outputs[0].token_ids for o in found] == expected
            stats = core.stats()
            counts.append((stats.draft_tokens, stats.accepted_tokens))
    assert counts[0] == counts[1]
    assert counts[0][0] > 20
