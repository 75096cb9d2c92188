"""The workload of `graphllm bench serve` by its distribution, its statistics against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from graphllm.cli.bench.client import Timeline
from graphllm.cli.bench.metrics import parse_goodput, summarize
from graphllm.cli.bench.workload import Span, arrivals, random_prompts
from graphllm.config import ConfigError


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals(burstiness: float) -> None:
    times = np.array(arrivals(20_000, 50.0, burstiness, 3))
    gaps = np.diff(times)
    assert times[0] == 0
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)
    assert arrivals(5, 50.0, burstiness, 3) == arrivals(5, 50.0, burstiness, 3)
    assert arrivals(5, 50.0, burstiness, 4) != arrivals(5, 50.0, burstiness, 3)


def test_arrivals_all_at_once() -> None:
    assert arrivals(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]


def test_random_prompts() -> None:
    prompts = random_prompts(2000, Span(5, 9), Span(1, 4), 100, 7, prefix_len=3)
    assert {len(p.token_ids) for p in prompts} == set(range(8, 13))
    assert {p.output_len for p in prompts} == {1, 2, 3, 4}
    assert {i for p in prompts for i in p.token_ids} == set(range(100))
    assert len({tuple(p.token_ids[:3]) for p in prompts}) == 1
    assert len({tuple(p.token_ids) for p in prompts}) == 2000
    assert prompts == random_prompts(2000, Span(5, 9), Span(1, 4), 100, 7, prefix_len=3)


@pytest.mark.parametrize("text", ["", "0", "-5", "5-", "9-5", "x", "1-2-3", "1.5"])
def test_spans_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^input-len is "):
        Span.parse("input-len", text)


# --- statistics


def made(random: np.random.Generator, error: str | None = None) -> Timeline:
    tokens = int(random.integers(1, 40))
    pieces = (1000.0 + np.cumsum(random.exponential(0.02, tokens))).tolist()
    ended = pieces[-1] + 0.001
    return Timeline(1000.0, pieces, ended, int(random.integers(1, 99)), tokens, "length", error)


def test_statistics_are_those_of_numpy() -> None:
    random = np.random.default_rng(0)
    good = [made(random) for _ in range(200)]
    found = summarize([*good, made(random, "HTTP 429: x"), made(random, "HTTP 429: x"), made(random, "y")], 7.0, {})
    expected = {
        "ttft": np.array([t.pieces[0] - 1000.0 for t in good]),
        "e2el": np.array([t.pieces[-1] + 0.001 - 1000.0 for t in good]),
        "itl": np.concatenate([np.diff(t.pieces) for t in good]),
        "tpot": np.array([(t.ended - t.pieces[0]) / (len(t.pieces) - 1) for t in good if len(t.pieces) > 1]),
    }
    for name, seconds in expected.items():
        ms = seconds * 1000
        assert found[f"mean_{name}_ms"] == pytest.approx(ms.mean())
        assert found[f"std_{name}_ms"] == pytest.approx(ms.std())
        assert found[f"median_{name}_ms"] == found[f"p50_{name}_ms"] == pytest.approx(np.quantile(ms, 0.5))
        assert found[f"p90_{name}_ms"] == pytest.approx(np.quantile(ms, 0.9))
        assert found[f"p99_{name}_ms"] == pytest.approx(np.quantile(ms, 0.99))
    outputs, inputs = sum(len(t.pieces) for t in good), sum(t.prompt_tokens for t in good)
    assert (found["completed"], found["failed"], found["failures"]) == (200, 3, {"HTTP 429: x": 2, "y": 1})
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (inputs, outputs)
    assert found["request_throughput"] == pytest.approx(200 / 7)
    assert found["output_throughput"] == pytest.approx(outputs / 7)
    assert found["total_token_throughput"] == pytest.approx((inputs + outputs) / 7)
    assert found["tokens_per_chunk"] == 1
    assert found["request_goodput"] is None


def test_statistics_of_nothing() -> None:
    found = summarize([Timeline(0.0, error="gone")], 1.0, {"ttft": 100.0})
    assert (found["completed"], found["failed"], found["request_goodput"]) == (0, 1, 0)
    assert found["mean_ttft_ms"] is found["p99_itl_ms"] is found["tokens_per_chunk"] is None


def test_goodput() -> None:
    fast = Timeline(0.0, [0.1, 0.2, 0.3], 0.3, 1, 3, "length")
    late = Timeline(0.0, [0.25, 0.3, 0.35], 0.35, 1, 3, "length")
    slow = Timeline(0.0, [0.1, 0.5, 0.9], 0.9, 1, 3, "length")
    single = Timeline(0.0, [0.1], 0.1, 1, 1, "length")
    both = [fast, late, slow, single]
    assert summarize(both, 2.0, parse_goodput(["ttft:200"]))["request_goodput"] == 3 / 2
    assert summarize(both, 2.0, parse_goodput(["ttft:200 tpot:150"]))["request_goodput"] == 2 / 2
    assert summarize(both, 2.0, parse_goodput(["ttft:200", "e2el:200"]))["request_goodput"] == 1 / 2
    for wrong in ("itl:5", "ttft", "ttft:", "ttft:fast", "ttft:-1", "ttft:nan"):
        with pytest.raises(ConfigError, match=r"^goodput has "):
            parse_goodput([wrong])
