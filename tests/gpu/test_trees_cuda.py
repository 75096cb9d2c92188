"""Trees of drafts on the GPU, compiled and captured: the text of plain decoding, and more of it in a step than by one
run of drafts."""

from __future__ import annotations

from random import Random

import pytest
import torch

from bench.training.tasks import draw
from graphllm import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
TREE = str([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)])
TASKS = ("capital", "sort_numbers", "persona", "call_tool", "word_problem", "opposite")


GROWN = str({"top_k": 3, "depth": 4, "drafts": 10})


@pytest.mark.parametrize(("method", "tree"), [("medusa", TREE), ("eagle3", TREE), ("eagle3", GROWN)])
def test_trees(method: str, tree: str) -> None:
    """Greedy, drawn and penalized requests beside each other, so that steps verify beside prompts, too."""
    rng = Random(5)
    messages = [draw(rng, name, held_out=True).messages for name in TASKS for _ in range(4)]
    kinds = ({}, {"temperature": 0.8, "seed": 3}, {"repetition_penalty": 1.2, "presence_penalty": 0.3})
    params = [
        SamplingParams(**{"temperature": 0.0, "max_tokens": 48} | kinds[i % 3]) for i in range(len(messages))
    ]  # fmt: skip
    said, lengths = {}, {}
    runs = {
        "plain": None,
        "chain": {"method": method, "num_speculative_tokens": 3},
        "tree": {"method": method, "speculative_token_tree": tree},
    }
    for name, drafts in runs.items():
        with LLM(
            dtype="float32", target="cuda", tune=False, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=256,
            kv_cache_memory_bytes=1 << 28, speculative_config=drafts,
        ) as llm:  # fmt: skip
            found = llm.chat(messages, params, use_tqdm=False)
            said[name] = [o.outputs[0].token_ids for o in found]
            stats = llm.llm_engine.core.stats()
            lengths[name] = 1 + sum(stats.accepted_tokens) / max(stats.drafts, 1)
    print(method, lengths)
    assert said["chain"] == said["plain"]
    assert said["tree"] == said["plain"]
    assert lengths["tree"] >= lengths["chain"]  # of three drafts in a row nearly all are right, so it adds little
