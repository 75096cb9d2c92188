"""Prometheus metrics: both text formats as the official parsers read them, histograms equal to the official library's,
vLLM's names, and what a request's timeline adds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import msgspec
import prometheus_client as prometheus
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain

import graphllm
from graphllm.config.requests.sampling_params import RequestOutputKind, SamplingParams
from graphllm.engine.requests.outputs import OutputProcessor, RequestOutput
from graphllm.engine.requests.processor import ParsedRequest
from graphllm.engine.requests.request import (
    STEP_SECONDS,
    STEP_TOKENS,
    BucketStats,
    CoreStats,
    Distribution,
    EngineCoreOutput,
    EngineRequest,
    TierStats,
)
from graphllm.entrypoints.streaming.streams import merge
from graphllm.server.supervision.metrics import Counted, Metrics
from tests.tiers import draws

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]

# Ours, vLLM's, its type there, its labels there beside model_name and engine.
NAMES = [
    ("requests_running", "num_requests_running", "gauge", []),
    ("requests_waiting", "num_requests_waiting", "gauge", []),
    ("requests_waiting_by_reason", "num_requests_waiting_by_reason", "gauge", ["reason"]),
    ("kv_cache_usage_ratio", "kv_cache_usage_perc", "gauge", []),
    ("engine_sleep_state", "engine_sleep_state", "gauge", ["sleep_state"]),
    ("prefix_cache_queries", "prefix_cache_queries", "counter", []),
    ("prefix_cache_hits", "prefix_cache_hits", "counter", []),
    ("external_prefix_cache_queries", "external_prefix_cache_queries", "counter", []),
    ("external_prefix_cache_hits", "external_prefix_cache_hits", "counter", []),
    ("preemptions", "num_preemptions", "counter", []),
    ("prompt_tokens", "prompt_tokens", "counter", []),
    ("prompt_tokens_cached", "prompt_tokens_cached", "counter", []),
    ("prompt_tokens_by_source", "prompt_tokens_by_source", "counter", ["source"]),
    ("prompt_tokens_cached_by_source", "prompt_tokens_cached_by_source", "counter", ["source"]),
    ("generation_tokens", "generation_tokens", "counter", []),
    ("draft_steps", "spec_decode_num_drafts", "counter", []),
    ("draft_tokens", "spec_decode_num_draft_tokens", "counter", []),
    ("accepted_tokens", "spec_decode_num_accepted_tokens", "counter", []),
    ("accepted_tokens_per_position", "spec_decode_num_accepted_tokens_per_pos", "counter", ["position"]),
    ("requests_finished", "request_success", "counter", ["finished_reason"]),
    ("admission_rejections", "admission_rejections", "counter", ["reason"]),
    ("iteration_tokens", "iteration_tokens_total", "histogram", []),
    ("request_prompt_tokens", "request_prompt_tokens", "histogram", []),
    ("request_generation_tokens", "request_generation_tokens", "histogram", []),
    ("request_max_num_generation_tokens", "request_max_num_generation_tokens", "histogram", []),
    ("request_params_n", "request_params_n", "histogram", []),
    ("request_params_max_tokens", "request_params_max_tokens", "histogram", []),
    ("request_prefill_kv_computed_tokens", "request_prefill_kv_computed_tokens", "histogram", []),
    ("time_to_first_token_seconds", "time_to_first_token_seconds", "histogram", []),
    ("inter_token_latency_seconds", "inter_token_latency_seconds", "histogram", []),
    ("request_time_per_output_token_seconds", "request_time_per_output_token_seconds", "histogram", []),
    ("e2e_request_latency_seconds", "e2e_request_latency_seconds", "histogram", []),
    ("request_queue_time_seconds", "request_queue_time_seconds", "histogram", []),
    ("request_inference_time_seconds", "request_inference_time_seconds", "histogram", []),
    ("request_prefill_time_seconds", "request_prefill_time_seconds", "histogram", []),
    ("request_decode_time_seconds", "request_decode_time_seconds", "histogram", []),
]


def families(metrics: Metrics, stats: CoreStats | None = None, openmetrics: bool = True) -> dict[str, Metric]:
    """What a parser reads, by name; each name comes once."""
    text, content_type = metrics.render([stats], openmetrics)
    assert content_type.startswith("application/openmetrics-text" if openmetrics else "text/plain; version=0.0.4")
    found = list((parse_openmetrics if openmetrics else parse_plain)(text.decode()))
    assert len({f.name for f in found}) == len(found)
    return {f.name: f for f in found}


def values(found: Iterable[Metric]) -> Values:
    """Samples by name and labels; each comes once."""
    out: Values = {}
    for family in found:
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in out
            out[key] = sample.value
    return out


def of(found: dict[str, Metric], name: str, **labels: str) -> float:
    """The value of one of our samples."""
    (value,) = {
        s.value
        for family in found.values()
        if family.name.startswith("graphllm_")
        for s in family.samples
        if (s.name, s.labels) == ("graphllm_" + name, labels)
    }
    return value


def core(started: float, **fields: Any) -> CoreStats:
    """Figures of a core with two buckets."""
    buckets = {"decode-2-4": BucketStats(), "mixed-2-32": BucketStats()}
    return CoreStats(**{"started": started, "total_blocks": 48, "buckets": buckets, **fields})


# --- the text


def busy() -> tuple[Metrics, CoreStats]:
    """Something of everything."""
    metrics, stats = Metrics('tiny "model"\n', {"device": "cpu"}), core(5.0, running=3, waiting=1, kv_usage=0.25)
    stats.buckets["mixed-2-32"].seconds.observe(0.002)
    stats.buckets["mixed-2-32"].tokens, stats.buckets["mixed-2-32"].padding = 30, 2
    stats.step_tokens.observe(30)
    stats.tiers = {"host": TierStats(100, 60, 7, 80, 20), "disk": TierStats(1000, 300, 5, 400, 50, 3, 2, 1)}
    stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens = 29, 8, 1
    stats.prefix_queries, stats.prefix_hits, stats.preemptions = 31, 9, 2
    stats.drafts, stats.draft_tokens, stats.accepted_tokens = 4, 12, [3, 1, 0]
    run_request(metrics, SamplingParams(output_kind=DELTA, max_tokens=3), [[(1.5, 0, 1)], [(1.75, 0, 2)]])
    metrics.track(SamplingParams()).end()
    metrics.rejected("max_num_queued_reqs")
    metrics.http_begins()
    metrics.http_begins()
    metrics.http("/v1/models", 200, 0.003)
    metrics.startup({"weights": 1.5, "process": 0.25})
    return metrics, stats


def test_both_formats_say_the_same() -> None:
    metrics, stats = busy()
    strict, plain = (families(metrics, stats, kind) for kind in (True, False))
    plain["graphllm_build"] = plain.pop("graphllm_build_info")  # that format knows no infos
    ours = [n for n in strict if not n.startswith("process_")]
    assert {n for n in plain if not n.startswith("process_")} == set(ours)
    assert values(strict[n] for n in ours) == values(plain[n] for n in ours)
    assert {n: strict[n].documentation for n in ours} == {n: plain[n].documentation for n in ours}
    assert {n for n in strict if n.startswith("process_")} >= {"process_cpu_seconds", "process_resident_memory_bytes"}


def test_vllm_names() -> None:
    """The same values under both names; vLLM's have its type and labels."""
    metrics, stats = busy()
    found = families(metrics, stats)
    assert {n for n in found if n.startswith("vllm:")} == {"vllm:" + theirs for _, theirs, _, _ in NAMES}
    for ours, theirs, kind, labels in NAMES:
        own, alias = found["graphllm_" + ours], found["vllm:" + theirs]
        assert (own.type, alias.type) == (kind, kind)
        for sample in alias.samples:
            assert sample.labels.pop("model_name") == 'tiny "model"\n'
            assert sample.labels.pop("engine") == "0"
            assert sorted(sample.labels.keys() - {"le"}) == labels
        renamed = {(n.replace("graphllm_" + ours, "vllm:" + theirs), ls): v for (n, ls), v in values([own]).items()}
        assert values([alias]) == renamed
        assert any(renamed.values()), ours


def test_values() -> None:
    metrics, stats = busy()
    found = families(metrics, stats)
    value = partial(of, found)
    assert (value("requests_running"), value("requests_waiting"), value("kv_cache_usage_ratio")) == (3, 1, 0.25)
    assert (value("prompt_tokens_total"), value("prompt_tokens_cached_total")) == (29, 8)
    assert (value("prefix_cache_queries_total"), value("prefix_cache_hits_total")) == (31, 9)
    assert (value("generation_tokens_total"), value("preemptions_total")) == (1, 2)
    assert (value("external_prefix_cache_queries_total"), value("external_prefix_cache_hits_total")) == (31, 7)
    assert value("cache_tier_hits_total", tier="disk") == 5
    assert value("cache_tier_bytes", tier="host", kind="used") == 60
    assert value("cache_tier_copied_bytes_total", tier="disk", direction="to") == 400
    assert value("cache_tier_lost_files_total", tier="disk", kind="damaged") == 3
    assert value("cache_tier_lost_files_total", tier="disk", kind="dropped") == 2
    assert value("step_seconds_bucket", bucket="mixed-2-32", le="0.0015") == 0
    assert value("step_seconds_bucket", bucket="mixed-2-32", le="0.002") == 1
    assert value("step_seconds_count", bucket="decode-2-4") == 0
    assert value("step_tokens_total", bucket="mixed-2-32", kind="real") == 30
    assert value("step_tokens_total", bucket="mixed-2-32", kind="padding") == 2
    assert (value("iteration_tokens_sum"), value("iteration_tokens_count")) == (30, 1)
    reasons = {r: value("requests_finished_total", finished_reason=r) for r in ("stop", "length", "abort", "error")}
    assert reasons == {"stop": 0, "length": 1, "abort": 1, "error": 0}
    assert value("admission_rejections_total", reason="max_num_queued_reqs") == 1
    assert value("http_requests_total", route="/v1/models", status="200") == 1
    assert value("http_request_seconds_sum", route="/v1/models") == 0.003
    assert value("http_requests_in_flight") == 1
    assert value("startup_seconds", phase="weights") == 1.5
    assert value("build_info", version=graphllm.__version__, device="cpu") == 1
    metrics.startup({"weights": 2.0})
    again = values([families(metrics)["graphllm_startup_seconds"]])
    assert again == {("graphllm_startup_seconds", (("phase", "weights"),)): 2.0}


@settings(deadline=None, max_examples=draws(10, 30))
@given(st.lists(st.tuples(st.floats(0, 20) | st.sampled_from(STEP_SECONDS), st.integers(1, 4))))
def test_distributions_are_those_of_the_official_library(drawn: list[tuple[float, int]]) -> None:
    ours, theirs = Distribution.over(STEP_SECONDS), prometheus.Histogram("x", "x", registry=None, buckets=STEP_SECONDS)
    for value, times in drawn:
        ours.observe(value, times)
        for _ in range(times):
            theirs.observe(value)
    stats = core(1.0, buckets={"b": BucketStats(ours)})
    check_histogram(families(Metrics("m"), stats)["graphllm_step_seconds"], theirs, bucket="b")


def check_histogram(found: Metric, theirs: prometheus.Histogram, **labels: str) -> None:
    (expected,) = theirs.collect()
    wanted = {
        (s.name.removeprefix(expected.name), s.labels.get("le")): s.value
        for s in expected.samples
        if not s.name.endswith("_created")
    }
    got = {
        (s.name.removeprefix(found.name), s.labels.get("le")): s.value
        for s in found.samples
        if labels.items() <= s.labels.items()
    }
    assert got == pytest.approx(wanted)


# --- requests

Timeline = list[list[tuple[float, int, int]]]  # by step: time, completion, new tokens


def outputs_of(params: SamplingParams, timeline: Timeline, scheduled: float = 1.25) -> Iterator[RequestOutput]:
    """What a reader gets who takes each output at once: their times go on with the request, as the engine's do. It
    arrives at 1.0; the last tokens of a completion end it."""
    now = [0.0]
    ids = [f"{i}_r" for i in range(params.n)]
    requests = [
        EngineRequest(id=i, prompt=[5, 6, 7], params=params, stop_ids=[], limit=99, seed=0, arrival=1.0) for i in ids
    ]
    processor = OutputProcessor(None, lambda: now[0])
    processor.add(ParsedRequest("r", None, [5, 6, 7], params, requests, frozenset()))
    last = {index: (at, i) for at, step in enumerate(timeline) for i, (_, index, _) in enumerate(step)}
    begun: set[int] = set()
    for at, step in enumerate(timeline):
        updates = []
        for i, (now[0], index, count) in enumerate(step):
            reason = "length" if last[index] == (at, i) else None
            first = {} if index in begun else {"cached": 2, "scheduled": scheduled + index / 64}
            begun.add(index)
            updates.append(EngineCoreOutput(ids[index], [9] * count, reason, **first))
        yield from processor.process(updates).outputs


def run_request(metrics: Metrics, params: SamplingParams, timeline: Timeline) -> None:
    tracker = metrics.track(params)
    for output in outputs_of(params, timeline):
        tracker.output(output)
    tracker.end()


@st.composite
def timelines(draw: Any, completions: int) -> Timeline:
    """Steps at growing times in which some completions get tokens, each of them some at last."""
    now, out = 1.5, []
    for _ in range(draw(st.integers(1, 8))):
        now += draw(st.integers(1, 200)) / 1024  # exact in binary
        out.append([(now, i, draw(st.integers(1, 4))) for i in range(completions) if draw(st.booleans())])
    out.append([(now + 0.125, i, 1) for i in range(completions)])
    return [step for step in out if step]


def histogram(found: dict[str, Metric], name: str, observed: Iterable[float]) -> None:
    """Check one of ours against the official library's over the same values."""
    ours = found["graphllm_" + name]
    bounds = [float(s.labels["le"]) for s in ours.samples if "le" in s.labels]
    theirs = prometheus.Histogram("x", "x", registry=None, buckets=bounds)
    for value in observed:
        theirs.observe(value)
    check_histogram(ours, theirs)


@settings(deadline=None, max_examples=draws(10, 30))
@given(data=st.data(), kind=st.sampled_from(RequestOutputKind), n=st.integers(1, 3))
def test_a_request(data: st.DataObject, kind: RequestOutputKind, n: int) -> None:
    timeline = data.draw(timelines(n))
    limit = data.draw(st.none() | st.integers(1, 99))
    metrics = Metrics("m")
    run_request(metrics, SamplingParams(n=n, max_tokens=limit, output_kind=kind), timeline)
    first, last = timeline[0][0][0], timeline[-1][0][0]
    tokens: Counter[int] = Counter()
    gaps: list[float] = []
    came: dict[int, float] = {}
    for step in timeline:
        for now, index, count in step:
            tokens[index] += count
            if index in came:
                gaps += [(now - came[index]) / count] * count
            elif now > first:  # beside another, which began the request
                gaps += [(now - first) / (count - 1)] * (count - 1) if count > 1 else []
            came[index] = now
    longest, total = max(tokens.values()), sum(tokens.values())
    if kind is FINAL_ONLY:
        gaps = [(last - first) / (longest - 1)] * (total - n) if longest > 1 else []
    found = families(metrics)
    histogram(found, "inter_token_latency_seconds", gaps)
    histogram(found, "time_to_first_token_seconds", [first - 1.0])
    histogram(found, "e2e_request_latency_seconds", [last - 1.0])
    scheduled = 1.25 + timeline[0][0][1] / 64
    histogram(found, "request_queue_time_seconds", [scheduled - 1.0])
    histogram(found, "request_prefill_time_seconds", [first - scheduled])
    histogram(found, "request_decode_time_seconds", [last - first])
    histogram(found, "request_inference_time_seconds", [last - scheduled])
    pace = [(last - first) / (longest - 1)] if longest > 1 else []
    histogram(found, "request_time_per_output_token_seconds", pace)
    histogram(found, "request_prompt_tokens", [3])
    cached = 2 if timeline[0][0][1] == 0 or 0 in tokens else 0
    histogram(found, "request_prefill_kv_computed_tokens", [3 - cached])
    histogram(found, "request_generation_tokens", [total])
    histogram(found, "request_max_num_generation_tokens", [longest])
    histogram(found, "request_params_n", [n])
    histogram(found, "request_params_max_tokens", [] if limit is None else [limit])
    assert of(found, "requests_finished_total", finished_reason="length") == n


@settings(deadline=None, max_examples=draws(10, 30))
@given(data=st.data())
def test_a_slow_reader(data: st.DataObject) -> None:
    """Merged outputs: whatever was taken together, the tokens' times add up to the same."""
    timeline = data.draw(timelines(1))
    params = SamplingParams(output_kind=DELTA)
    metrics = Metrics("m")
    tracker = metrics.track(params)
    pending: RequestOutput | None = None
    taken: list[int] = []  # steps that each reading took
    count = 0
    for output in outputs_of(params, timeline):
        pending, count = (output if pending is None else merge(pending, output)), count + 1
        if output.finished or data.draw(st.booleans()):
            tracker.output(pending)
            taken.append(count)
            pending, count = None, 0
    found = families(metrics)
    times = [step[0][0] for step in timeline]
    tokens = [step[0][2] for step in timeline]
    histogram(found, "time_to_first_token_seconds", [times[0] - 1.0])
    histogram(found, "request_generation_tokens", [sum(tokens)])
    assert of(found, "inter_token_latency_seconds_sum") == pytest.approx(times[-1] - times[0])
    first = tokens[0] if taken[0] == 1 else 1
    assert of(found, "inter_token_latency_seconds_count") == sum(tokens) - first


def test_requests_that_do_not_finish() -> None:
    """They count by their reason; of their times only those of the tokens that came are known."""
    metrics = Metrics("m")
    params = SamplingParams(n=2, output_kind=DELTA)
    timeline = [[(2.0, 0, 1), (2.0, 1, 1)], [(2.5, 0, 2)], [(3.0, 1, 1)]]
    for reason in ("abort", "error"):
        tracker = metrics.track(params)
        for output in islice(outputs_of(params, timeline), 2):
            tracker.output(output)
        tracker.end(reason)
        tracker.end()
        tracker.end("error")
    refused = metrics.track(params)
    refused.reject("max_num_queued_reqs")
    refused.end()
    wrong = metrics.track(params)
    wrong.drop()
    wrong.end()
    found = families(metrics)
    reasons = {r: of(found, "requests_finished_total", finished_reason=r) for r in ("length", "abort", "error")}
    assert reasons == {"length": 2, "abort": 1, "error": 1}
    assert of(found, "admission_rejections_total", reason="max_num_queued_reqs") == 1
    histogram(found, "time_to_first_token_seconds", [1.0, 1.0])
    histogram(found, "inter_token_latency_seconds", [0.25] * 4)
    for name in ("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prompt_tokens"):
        histogram(found, name, [])


# --- restarts of the core


def shown(metrics: Metrics, stats: CoreStats | None) -> dict[str, Metric]:
    """As `families`, without the text between."""
    metrics.render([stats])
    return {family.name: family for family in metrics.collect()}


def work(stats: CoreStats, steps: list[tuple[float, int]]) -> None:
    """What some steps add to a core's figures."""
    for seconds, tokens in steps:
        bucket = stats.buckets["decode-2-4" if tokens <= 4 else "mixed-2-32"]
        bucket.seconds.observe(seconds)
        bucket.tokens += tokens
        bucket.padding += tokens % 3
        stats.step_tokens.observe(tokens)
        stats.prompt_tokens += tokens
        stats.cached_tokens += tokens // 2
        stats.generated_tokens += 1
        stats.preemptions += tokens % 2
        stats.prefix_queries += tokens
        stats.prefix_hits += tokens // 2


STEPS = st.lists(st.tuples(st.integers(0, 2**14).map(lambda n: n / 2**10), st.integers(1, 2**15)), max_size=6)


@settings(deadline=None, max_examples=draws(10, 25))
@given(st.lists(STEPS | st.sampled_from(["restart", "silent"]), min_size=1, max_size=8))
def test_counters_only_grow(events: list[Any]) -> None:
    """Over restarts and silence they are the totals of all cores; the gauges are the living core's."""
    metrics, total, stats = Metrics("m"), core(0.0), core(1.0)
    before: Values = {}
    known = False
    for number, event in enumerate(events):
        if event == "restart":
            stats = core(2.0 + number, running=number)
        elif event != "silent":
            work(stats, event)
            work(total, event)
        # Work of a core that nobody asked before it died is lost, so here it is asked after each event.
        found = shown(metrics, None if event == "silent" else stats)
        known = known or event != "silent"
        now = values(f for f in found.values() if f.type in ("counter", "histogram"))
        assert all(now[key] >= value for key, value in before.items())
        before = now
        up = event != "silent"
        assert values([found["graphllm_engine_up"]]) == {("graphllm_engine_up", ()): up}
        assert ("graphllm_requests_running" in found) == ("vllm:num_requests_running" in found) == up
        if up:
            assert found["graphllm_requests_running"].samples[0].value == stats.running
    for name, family in shown(Metrics("m"), total).items():
        if family.type in ("counter", "histogram") and known:
            assert values([found[name]]) == values([family])


REQUESTS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["/a", "/b"]), st.integers(0, 2**14)), max_size=12)


@settings(deadline=None, max_examples=draws(10, 25))
@given(REQUESTS, st.sets(st.integers(0, 2)))
def test_processes_count_as_one(requests: list[tuple[int, str, int]], gone: set[int]) -> None:
    """Three of a server, some of which end: nothing is lost of what they have counted but what they had in flight."""
    whole, parts = Metrics("m"), [Metrics("m") for _ in range(3)]
    for number, route, ticks in requests:
        for metrics in (whole, parts[number]):
            metrics.http_begins()
            metrics.http(route, 200, ticks / 2**10)
            metrics.completed("stop")
    for number in gone:
        parts[number].http_begins()
    controller = Metrics("m")
    for number in gone:
        controller.absorb(_sent(parts[number].counted()))
    others = [_sent(part.counted()) for number, part in enumerate(parts) if number not in gone]
    found = {f.name: f for f in parse_plain(controller.render([None], others=others)[0].decode())}
    wanted = {f.name: f for f in parse_plain(whole.render([None])[0].decode())}
    counted = [name for name in wanted if not name.startswith("process_")]
    assert [values([found[name]]) for name in counted] == [values([wanted[name]]) for name in counted]


def _sent(counted: Counted) -> Counted:
    """As it comes out of a message."""
    return msgspec.json.decode(msgspec.json.encode(counted), type=Counted)


def test_bounds_are_whole_and_growing() -> None:
    for bounds in (STEP_SECONDS, STEP_TOKENS):
        assert list(bounds) == sorted(set(bounds))
    for family in families(Metrics("m"), core(1.0)).values():
        if family.type == "histogram":
            bounds = [float(s.labels["le"]) for s in family.samples if s.labels.get("le")]
            assert bounds[-1] == float("inf")
    first = families(Metrics("m"))["vllm:inter_token_latency_seconds"].samples[0].labels["le"]
    assert float(first) <= 0.0005
