"""What comes with the embedded model to draft for it: the text that it would say anyway, and drafts that are right."""

from __future__ import annotations

from random import Random

import pytest

from graphllm import LLM, SamplingParams
from graphllm.config import ConfigError
from graphllm.embedded import DRAFTS
from graphllm.embedded.tasks import draw

LEAST = {"eagle3": 1.4, "medusa": 1.2, "draft_model": 1.2}  # tokens of a step that verifies
TASKS = ("capital", "sort_numbers", "persona", "call_tool", "word_problem", "opposite")


@pytest.mark.parametrize("method", DRAFTS)
def test_shipped_drafts(method: str) -> None:
    rng, params = Random(5), SamplingParams(temperature=0.0, max_tokens=48)
    chats = [draw(rng, name, held_out=True) for name in TASKS for _ in range(2)]
    messages = [chat.messages for chat in chats]
    said = {}
    for config in (None, {"method": method}):
        with LLM(backend="eager", dtype="float32", target="cpu", speculative_config=config) as llm:
            said[config is None] = [o.outputs[0].token_ids for o in llm.chat(messages, params, use_tqdm=False)]
            stats = llm._core.stats()
    assert said[True] == said[False]
    assert 1 + sum(stats.accepted_tokens) / stats.drafts > LEAST[method]


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"with the embedded model come .*eagle3"):
        LLM(backend="eager", speculative_config={"method": "eagle"})


TREE = str([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)])


def test_a_tree_accepts_more() -> None:
    """Of the heads' likeliest tokens one path is right for longer than the first one alone; the text is the same."""
    rng, params = Random(5), SamplingParams(temperature=0.0, max_tokens=48)
    messages = [draw(rng, name, held_out=True).messages for name in TASKS for _ in range(2)]
    said, lengths = {}, {}
    configs = {"plain": None, "chain": {"method": "medusa", "num_speculative_tokens": 3},
               "tree": {"method": "medusa", "speculative_token_tree": TREE}}  # fmt: skip
    for name, config in configs.items():
        with LLM(backend="eager", dtype="float32", target="cpu", speculative_config=config) as llm:
            said[name] = [o.outputs[0].token_ids for o in llm.chat(messages, params, use_tqdm=False)]
            stats = llm._core.stats()
            lengths[name] = 1 + sum(stats.accepted_tokens) / max(stats.drafts, 1)
    assert said["tree"] == said["plain"]
    assert said["chain"] == said["plain"]
    assert lengths["tree"] > lengths["chain"] + 0.1, lengths
