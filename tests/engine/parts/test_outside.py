"""Capabilities of a package from outside, which edits nothing else: sampling with a state for each request, beside the
formulas on transformers' logits, and budgets that end requests of several at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from graphllm import LLM, SamplingParams
from graphllm.config import ConfigError
from graphllm.engine.core import PARTS
from tests.artifacts import LIMITS

OPTIONS: dict[str, Any] = {
    "target": "cpu",
    "backend": "eager",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    **LIMITS,
}
TAU, ETA, COUNT = 3.0, 0.3, 60
PROMPTS = [[5, 9, 77, 31], [8, 8, 8], [70, 2, 19, 44, 3]]


@pytest.fixture
def llm(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "site"))
    with LLM(checkpoint, **OPTIONS) as llm:
        core: Any = llm.llm_engine.core
        names = [part.name for part in core.parts]
        assert names.index("mirostat") < names.index("logprobs") < names.index("token_budget")
        yield llm


def _params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": COUNT, "ignore_eos": True, "seed": 5, **given})


@torch.no_grad()
def _surprises(model: Any, prompt: list[int], output: list[int], cut: bool) -> list[float]:
    """Bits of each token of an output where it was drawn; with ``cut`` as the formulas say, which it must obey."""
    logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].double()
    bound, found = 2 * TAU, []
    for row, token in zip(logits, output, strict=True):
        bits = -torch.log2(torch.softmax(row, dim=-1))
        if cut:
            allowed = (bits <= bound + 1e-4) | (bits == bits.min())
            assert allowed[token]
            bits = -torch.log2(torch.softmax(row.masked_fill(~allowed, -torch.inf), dim=-1))
            bound -= ETA * (bits[token].item() - TAU)
        found.append(bits[token].item())
    return found


def test_a_state_for_each_request(llm: LLM, checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    wanted = _params(extra_args={"mirostat_tau": TAU, "mirostat_eta": ETA})
    params = [wanted, _params(), wanted]
    outputs = [list(o.outputs[0].token_ids) for o in llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params)]
    for prompt, output, cut in zip(PROMPTS, outputs, (True, False, True), strict=True):
        assert len(output) == COUNT
        bits = _surprises(model, prompt, output, cut)
        assert (abs(sum(bits[10:]) / len(bits[10:]) - TAU) < 0.5) == cut


def test_a_budget_for_each_user(llm: LLM) -> None:
    params = [_params(max_tokens=30, extra_args={"user": user}) for user in ("a", "a", "b")]
    outputs = [o.outputs[0] for o in llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params)]
    counts = [len(o.token_ids) for o in outputs]
    assert (sum(counts[:2]), counts[2]) == (40, 30)
    assert {o.finish_reason for o in outputs} == {"length"}
    with pytest.raises(ConfigError, match="the budget of a is spent"):
        llm.generate({"prompt_token_ids": PROMPTS[0]}, params[0])
    assert len(llm.generate({"prompt_token_ids": PROMPTS[0]}, params[2])[0].outputs[0].token_ids) == 10
    assert llm.llm_engine.core.unfinished == 0


def test_a_limit_for_each_user(llm: LLM) -> None:
    """Its requests wait for one another; others pass them, and all get their tokens."""
    core: Any = llm.llm_engine.core
    users = ["a", "a", "a", "a", None, "b"]
    args = [{} if user is None else {"extra_args": {"limited_user": user}} for user in users]
    found: list[list[str]] = []
    step = core.step

    def watched() -> Any:
        news = step()
        running = core.scheduler.requests.running
        found.append([(s.request.params.extra_args or {}).get("limited_user", "") for s in running])
        return news

    core.step = watched
    params = [_params(max_tokens=10, **more) for more in args]
    outputs = llm.generate([{"prompt_token_ids": PROMPTS[0]} for _ in users], params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [10] * len(users)
    assert max(running.count("a") for running in found) == 2
    assert ["a", "a", "", "b"] in found


def test_a_place_that_there_is_not(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = tmp_path / "lost-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lost\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[graphllm.parts]\nlost = lost:Lost\n")
    (tmp_path / "lost.py").write_text(
        "from graphllm.engine.parts.part import Part\nclass Lost(Part):\n    name, after = 'lost', 'nobody'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ", ".join(part.name for part in PARTS)
    with pytest.raises(ConfigError, match=f"part 'lost' comes after 'nobody', which there is not; parts are {names}"):
        LLM(checkpoint, **OPTIONS)


def test_the_guide_has_the_whole_part() -> None:
    guide = Path(__file__).parents[3] / "docs" / "adding-a-part.md"
    here = Path(__file__).parent / "site" / "outside" / "token_budget.py"
    assert here.read_text() in guide.read_text()
