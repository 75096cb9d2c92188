"""What comes with the embedded model to draft for it: the text that it would say anyway, and drafts that are right."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from bench.training.tasks import draw
from graphllm import LLM, SamplingParams
from graphllm.config import ConfigError
from graphllm.config.requests.structured_outputs import StructuredOutputsParams
from graphllm.embedded import DRAFTS
from tests.tiers import thorough

LEAST = {"eagle3": 1.4, "medusa": 1.2, "draft_model": 1.2}  # tokens of a step that verifies
TASKS = ("capital", "sort_numbers", "persona", "call_tool", "word_problem", "opposite")


@pytest.mark.parametrize("method", [m if m == "eagle3" else thorough(m) for m in DRAFTS])
@pytest.mark.thorough
def test_shipped_drafts(method: str) -> None:
    rng, params = Random(5), SamplingParams(temperature=0.0, max_tokens=48)
    chats = [draw(rng, name, held_out=True) for name in TASKS for _ in range(2)]
    messages = [chat.messages for chat in chats]
    said = {}
    for config in (None, {"method": method}):
        with LLM(backend="eager", dtype="float32", target="cpu", speculative_config=config) as llm:
            said[config is None] = [o.outputs[0].token_ids for o in llm.chat(messages, params, use_tqdm=False)]
            stats = llm.llm_engine.core.stats()
    assert said[True] == said[False]
    assert 1 + sum(stats.accepted_tokens) / stats.drafts > LEAST[method]


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"with the embedded model come .*eagle3"):
        LLM(backend="eager", speculative_config={"method": "eagle"})


TREE = str([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)])


ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"logprobs": 2, "logit_bias": {300: 1.5, 301: -2.0}},
    {"min_tokens": 20, "bad_words": ["the", "is a"], "logprob_token_ids": [65, 300]},
    {"structured_outputs": StructuredOutputsParams(regex=r"[A-Za-z0-9 .,:;'?!-]{1,90}")},
    {"temperature": 0.8, "top_p": 0.9, "seed": 4, "presence_penalty": 0.3},
)
GROWN = str({"top_k": 3, "depth": 4, "drafts": 10})
TREES = [
    pytest.param("medusa", TREE, id="medusa"),
    pytest.param("eagle3", TREE, id="eagle3", marks=pytest.mark.slow),
    pytest.param("eagle3", GROWN, id="eagle3, grown", marks=pytest.mark.slow),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("method", "said_tree"), TREES)
def test_a_tree_accepts_more(method: str, said_tree: str) -> None:
    """Of what is likeliest one path is right for longer than the first one alone; whatever is asked for, the text is
    the one without drafts, drawn tokens included, and log-probabilities are those of its tokens."""
    rng = Random(5)
    messages = [draw(rng, name, held_out=True).messages for name in TASKS for _ in range(2)]
    params = [SamplingParams(temperature=0.0, max_tokens=48)] * len(messages)
    asked = [SamplingParams(**{"temperature": 0.0, "max_tokens": 32} | ASKED[i // 2]) for i in range(len(messages))]
    said: dict[str, list[list[int]]] = {}
    scores: dict[str, list[float]] = {}
    lengths = {}
    tree = {"method": method, "speculative_token_tree": said_tree}
    for name, config in {"plain": None, "chain": {"method": method, "num_speculative_tokens": 3}, "tree": tree}.items():
        with LLM(backend="eager", dtype="float32", target="cpu", max_num_seqs=8, speculative_config=config) as llm:
            found = llm.chat(messages, params, use_tqdm=False)
            stats = llm.llm_engine.core.stats()
            lengths[name] = 1 + sum(stats.accepted_tokens) / max(stats.drafts, 1)
            if name != "chain":
                found += llm.chat(messages, asked, use_tqdm=False)
            said[name] = [o.outputs[0].token_ids for o in found]
            told = [o.outputs[0].logprobs for o in found]
        scores[name] = [
            entry.logprob for of_output in told if of_output for place in of_output for entry in place.values()
        ]
    assert said["tree"] == said["plain"]
    assert said["chain"] == said["plain"][: len(messages)]
    assert scores["tree"] == pytest.approx(scores["plain"], abs=1e-3)
    print(lengths)
    # EAGLE-3's run of three is nearly always right, which leaves a tree little.
    assert lengths["tree"] > lengths["chain"] + (0.1 if method == "medusa" else 0.03), lengths
