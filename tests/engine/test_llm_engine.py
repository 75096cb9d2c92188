"""LLMEngine over a stub core, what it counts and tells, and LLM's arguments of vLLM."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphllm import EngineArgs, PoolingParams, VllmConfig
from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from graphllm.engine.requests.request import CoreStats, EngineRequest
from graphllm.engine.requests.text import Tokenizer
from graphllm.engine.schedule.scheduler import Scheduler
from graphllm.entrypoints.llm import LLM
from graphllm.entrypoints.llm_engine import LLMEngine
from graphllm.entrypoints.metrics_reader import Counter, Gauge, Histogram
from graphllm.entrypoints.stat_loggers import LoggingStatLogger, stat_loggers
from tests.engine.byte_tokenizer import make
from tests.engine.stub_core import StubCore, info

VOCAB = 320
SCRIPT = {(5,): [11, 12, 13, 14], (6,): [21, 22, 23, 24]}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}{% if add_generation_prompt %}[bot]{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def core() -> StubCore:
    return StubCore(info(VOCAB), script=SCRIPT)


@pytest.fixture
def engine(core: StubCore, tokenizer: Tokenizer) -> LLMEngine:
    return LLMEngine(core, tokenizer, SamplingParams(max_tokens=2))


def run(engine: LLMEngine) -> Iterator[Any]:
    while engine.has_unfinished_requests():
        yield from engine.step()


# --- LLMEngine


def test_steps(engine: LLMEngine, core: StubCore) -> None:
    """Requests come while others run; outputs are of the kind that each asks for, under the names users gave."""
    delta, final = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
    assert engine.add_request("a", [5], SamplingParams(max_tokens=4)) == "a"
    assert engine.step()[0].outputs[0].token_ids == [11]
    engine.add_request("b", [6], SamplingParams(max_tokens=3, output_kind=delta))
    engine.add_request("c", [5], SamplingParams(max_tokens=4, output_kind=final))
    engine.add_request("d", [6])  # the model's defaults
    assert engine.get_num_unfinished_requests() == 4
    found: dict[str, list[list[int]]] = {}
    for output in run(engine):
        found.setdefault(output.request_id, []).append(output.outputs[0].token_ids)
    assert found == {
        "a": [[11, 12], [11, 12, 13], [11, 12, 13, 14]],
        "b": [[21], [22], [23]],
        "c": [[11, 12, 13, 14]],
        "d": [[21], [21, 22]],
    }
    assert (engine.get_num_unfinished_requests(), core.unfinished, engine.step()) == (0, 0, [])


def test_abort_and_the_same_name_again(engine: LLMEngine, core: StubCore) -> None:
    engine.add_request("a", [5], SamplingParams(max_tokens=4))
    engine.step()
    engine.abort_request(["a", "unknown"])
    engine.add_request("a", [6], SamplingParams(max_tokens=2))  # what the core says of the first is not for this one
    outputs = list(run(engine))
    assert [o.outputs[0].token_ids for o in outputs] == [[21], [21, 22]]
    assert outputs[-1].outputs[0].finish_reason == "length"
    engine.step()
    assert core.unfinished == 0


def test_requests_that_cannot_run(engine: LLMEngine, core: StubCore) -> None:
    engine.add_request("a", [5])
    for id, prompt, options, message in (
        ("a", [5], {}, "request_id: 'a' is already running"),
        ("b", [VOCAB], {}, "prompt has token id 320"),
        ("b", [5], {"lora_request": object()}, "lora_request is .*: give a LoRARequest"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.add_request(id, prompt, **options)  # type: ignore[arg-type]
    core.refused = {"c-2"}
    with pytest.raises(ConfigError, match="refused"):
        engine.add_request("c", [5])
    assert (engine.get_num_unfinished_requests(), engine.driver.outputs.unfinished) == (1, 1)


def test_pooling_is_refused(core: StubCore, tokenizer: Tokenizer) -> None:
    """With its reason, wherever vLLM takes its parameters; they can be made."""
    pooling: Any = PoolingParams(task="embed", dimensions=8)
    llm = LLM.from_core(core, tokenizer)
    for call in (
        lambda: llm.encode(["a"], pooling),
        lambda: llm.embed(["a"], pooling_params=pooling),
        lambda: llm.generate(["a"], pooling),
        lambda: llm.generate(["a"], [pooling]),
        lambda: llm.llm_engine.add_request("a", "a", pooling),
    ):
        with pytest.raises(ConfigError, match="the model generates text; use generate or chat with SamplingParams"):
            call()
    with pytest.raises(ConfigError, match="sampling_params is 5: give SamplingParams, or a list of them"):
        llm.generate(["a"], 5)  # type: ignore[arg-type]


# --- what it counts


def test_metrics(engine: LLMEngine) -> None:
    for id, prompt in (("a", [5]), ("b", [6])):
        engine.add_request(id, prompt, SamplingParams(max_tokens=3))
    engine.step()
    found = {(m.name, *m.labels.values()): m for m in engine.get_metrics()}
    assert found["vllm:num_requests_running",] == Gauge("vllm:num_requests_running", {}, 2.0)
    list(run(engine))
    found = {(m.name, *m.labels.values()): m for m in engine.get_metrics()}
    assert found["vllm:request_success", "length"] == Counter("vllm:request_success", {"finished_reason": "length"}, 2)
    lengths = found["vllm:request_generation_tokens",]
    assert isinstance(lengths, Histogram)
    assert (lengths.count, lengths.sum) == (2, 6)
    assert [lengths.buckets[bound] for bound in ("2", "5", "+Inf")] == [0, 2, 2]
    assert found["vllm:time_to_first_token_seconds",].count == 2  # type: ignore[union-attr]


def test_metrics_of_llm(core: StubCore, tokenizer: Tokenizer) -> None:
    llm = LLM.from_core(core, tokenizer)
    llm.generate([[5], [6], [5]], SamplingParams(max_tokens=2))
    (ended,) = [m for m in llm.get_metrics() if m.labels.get("finished_reason") == "length"]
    assert isinstance(ended, Counter)
    assert ended.value == 3


def test_the_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Rates since the last one; one line after all is done, then none."""
    clock = iter([0.0, 10.0, 20.0, 30.0, 40.0]).__next__
    logger = LoggingStatLogger(clock)
    busy = CoreStats(started=1.0, running=2, waiting=1, kv_usage=0.25, prompt_tokens=500, generated_tokens=100)
    busy.prefix_queries, busy.prefix_hits = 400, 100
    done = CoreStats(started=1.0, prompt_tokens=500, generated_tokens=150)
    replaced = CoreStats(started=2.0, prompt_tokens=0, generated_tokens=30)
    with caplog.at_level(logging.INFO):
        for stats in (busy, done, done, replaced):
            logger.record(stats, None)
            logger.log()
    assert [record.getMessage() for record in caplog.records] == [
        "prompts 50.0 tokens/s, output 10.0 tokens/s, running 2, waiting 1, KV cache 25.0 %, prefix cache hits 25.0 %",
        "prompts 0.0 tokens/s, output 5.0 tokens/s, running 0, waiting 0, KV cache 0.0 %, prefix cache hits 0.0 %",
        "prompts 0.0 tokens/s, output 0.0 tokens/s, running 0, waiting 0, KV cache 0.0 %, prefix cache hits 0.0 %",
        "prompts 0.0 tokens/s, output 3.0 tokens/s, running 0, waiting 0, KV cache 0.0 %, prefix cache hits 0.0 %",
    ]


class Told:
    """A user's logger."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.length, self.index = vllm_config.model_config.max_model_len, engine_index
        self.running: list[int] = []
        self.logged = 0

    def record(
        self, scheduler_stats: CoreStats, iteration_stats: None, mm_cache_stats: None = None, engine_idx: int = -1
    ) -> None:
        assert (iteration_stats, engine_idx) == (None, 0)
        self.running.append(scheduler_stats.num_running_reqs)

    def log(self) -> None:
        self.logged += 1


def test_a_users_logger(core: StubCore, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphllm.entrypoints.llm_engine.SECONDS", 0.0)
    (told,) = loggers = stat_loggers(EngineArgs(max_model_len=99), [Told])
    engine = LLMEngine(core, tokenizer, loggers=loggers)
    engine.add_request("a", [5], SamplingParams(max_tokens=3))
    list(run(engine))
    assert isinstance(told, Told)
    assert (told.running, told.logged) == ([1, 1, 0], 3)
    assert (told.length, told.index) == (99, 0)
    assert stat_loggers(EngineArgs(disable_log_stats=True), [Told]) == []


# --- arguments of LLM's methods


class Bar:
    """What a script passes as use_tqdm."""

    made: list[Bar] = []  # noqa: RUF012 (of one test)

    def __init__(self, total: int, desc: str) -> None:
        self.total, self.desc, self.done = total, desc, 0
        Bar.made.append(self)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.done = -self.done

    def update(self, count: int) -> None:
        self.done += count


def test_progress(core: StubCore, tokenizer: Tokenizer, capfd: pytest.CaptureFixture[str]) -> None:
    llm = LLM.from_core(core, tokenizer, SamplingParams(max_tokens=2))
    llm.generate([[5], [6]], use_tqdm=Bar)
    assert [(bar.total, bar.desc, bar.done) for bar in Bar.made] == [(2, "Processed prompts", -2)]
    for show in (True, False):
        llm.generate([5], use_tqdm=show)
    assert capfd.readouterr() == ("", "")  # no terminal
    with pytest.raises(ConfigError, match="use_tqdm is 1: give True, False or what makes a progress bar"):
        llm.generate([5], use_tqdm=1)  # type: ignore[arg-type]


def test_chat(tokenizer: Tokenizer) -> None:
    """A template of one's own, and a message that goes on; the prompts are what the template makes."""
    core = StubCore(info(VOCAB, max_model_len=256), np.zeros((VOCAB, VOCAB, VOCAB), dtype=np.int8))
    llm = LLM.from_core(core, tokenizer, SamplingParams(max_tokens=1, temperature=0))
    begun = [{"role": "user", "content": "Hi"}, {"role": "bot", "content": "I am "}]
    for options, prompt in (
        ({}, "[user]Hi[/][bot]I am [/][bot]"),
        ({"add_generation_prompt": False}, "[user]Hi[/][bot]I am [/]"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "[user]Hi[/][bot]I am "),
        ({"chat_template": "{{ messages[0].content }}!", "lora_request": None}, "Hi!"),
    ):
        (output,) = llm.chat(begun, **{"chat_template": TEMPLATE, **options})  # type: ignore[arg-type]
        assert output.prompt == prompt
    for options, message in (
        ({"continue_final_message": True}, "continue_final_message is True: give add_generation_prompt=False"),
        ({"chat_template": "{% if"}, "chat template: line 1"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs is .*: models here read text only"),
        (
            {"chat_template": "x", "add_generation_prompt": False, "continue_final_message": True},
            "does not show the last",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            llm.chat(begun, **options)  # type: ignore[arg-type]


def test_one_of_several_chats_is_named(tokenizer: Tokenizer) -> None:
    core = StubCore(info(VOCAB, max_model_len=256), np.zeros((VOCAB, VOCAB, VOCAB), dtype=np.int8))
    llm = LLM.from_core(core, tokenizer, SamplingParams(max_tokens=1, temperature=0))
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    user, system = {"role": "user", "content": "x"}, {"role": "system", "content": "y"}
    half = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\ud83d"}'}}]}
    for wrong, message in (
        ([user, system], "messages[1]: chat template: System message must be at the beginning."),
        ([user, {**user, "content": 5}], "messages[1][1].content is 5"),
        ([user, half], "messages[1][1].tool_calls[0].function.arguments.a has '\\ud83d'"),
        (["hi"], "messages[1][0] is 'hi'"),
        ([], "messages[1]: messages is []"),
    ):
        with pytest.raises(ConfigError, match="^" + re.escape(message)):
            llm.chat([[user], wrong, [user]], chat_template=strict)  # type: ignore[list-item]
        if wrong and not isinstance(wrong[0], str):
            with pytest.raises(ConfigError) as alone:
                llm.chat(wrong, chat_template=strict)  # type: ignore[arg-type]
            assert str(alone.value).startswith("messages[1]" if "[1][1]" in message else "chat template")
    found = llm.chat([[user, system, user], [user]], chat_template=strict)
    assert [output.prompt for output in found] == ["yxx", "x"]
    for options, told in (
        ({"chat_template_content_format": "parts"}, "chat_template_content_format is 'parts': give auto, string"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs has 'messages'"),
    ):
        with pytest.raises(ConfigError, match=told):
            llm.chat([user], **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"prompts\[1\]: prompt has '\\ude00': half of a surrogate pair"):
        llm.generate(["a", "\ude00"])


# --- repetition


@pytest.mark.parametrize(
    ("tokens", "how", "ends"),
    [
        ([1, 2, 1, 2, 1, 2, 1, 2], (2, 0, 3), 6),
        ([1, 2, 1, 2, 1, 2, 1, 2], (1, 0, 2), None),  # single tokens do not repeat
        ([1, 2, 3, 3, 3, 3], (4, 1, 3), 5),
        ([1, 2, 3, 3, 3, 3, 3, 3], (4, 2, 3), 8),  # 3 3 three times
        ([9, 1, 2, 3, 4, 1, 2, 3, 4], (4, 4, 2), 9),
        ([1, 1, 1, 1], (0, 0, 0), None),
    ],
)
@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_repetition(
    tokens: list[int], how: tuple[int, int, int], ends: int | None, width: int, kind: RequestOutputKind,
    tokenizer: Tokenizer,
) -> None:  # fmt: skip
    """Also where tokens come several at a time: what is behind the end is not given, and the core is told."""
    tokens = [token + 10 for token in tokens]  # the first ones are special
    core = StubCore(info(VOCAB), script={(5,): tokens}, width=width)
    engine = LLMEngine(core, tokenizer)
    ending = RepetitionDetectionParams(*how)
    params = SamplingParams(max_tokens=len(tokens), repetition_detection=ending, output_kind=kind)
    engine.add_request("a", [5], params)
    outputs = list(run(engine))
    given = [o.outputs[0].token_ids for o in outputs]
    assert ([*itertools.chain(*given)] if kind is RequestOutputKind.DELTA else given[-1]) == tokens[:ends]
    last = outputs[-1].outputs[0]
    at_the_limit = ends == len(tokens)  # which is the reason then
    assert last.finish_reason == ("length" if ends is None or at_the_limit else "repetition")
    assert core.unfinished == len(core.aborted)  # the news of it, which nobody has fetched


def test_mistakes_in_repetition() -> None:
    for how, message in (
        ((1, 2, 3), "min_pattern_size is 2: give at most max_pattern_size"),
        ((2, 1, 1), "min_count is 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            RepetitionDetectionParams(*how)
    with pytest.raises(ConfigError, match="max_size is 1: not supported"):
        SamplingParams(repetition_detection={"max_size": 1})  # type: ignore[arg-type]


# --- a user's own scheduler


class LongestFirst(Scheduler):
    """Of those that wait, the longest prompt goes first."""

    def urgency(self, request: EngineRequest) -> int:
        return -len(request.prompt)


def test_a_users_scheduler(checkpoint: Path, eager_artifact: Path) -> None:
    prompts = [[5] * length for length in (2, 9, 3, 8, 4, 7, 5, 6)]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    plain: dict[str, Any] = {"model": checkpoint, "artifact": eager_artifact, "device": "cpu", "max_model_len": 96}
    begun = {}
    for policy in (None, LongestFirst, f"{__name__}.LongestFirst"):
        with LLM(scheduler_cls=policy, **plain) as llm:
            outputs = llm.generate(prompts, params)
        order = sorted(outputs, key=lambda o: (o.metrics.first_scheduled_time, -len(o.prompt_token_ids)))
        begun[policy] = [len(o.prompt_token_ids) for o in order]
    assert sorted(begun[None][:4]) == [2, 3, 8, 9]
    assert begun[LongestFirst] == begun[f"{__name__}.LongestFirst"] == [9, 8, 7, 6, 5, 4, 3, 2]
    for wrong, message in (
        (dict, "scheduler_cls is 'builtins:dict': give a subclass of graphllm.engine.schedule.scheduler.Scheduler"),
        ("no.such.Thing", r"scheduler_cls: 'no.such.Thing' cannot be imported \(.*\); give package.module:name"),
        (type("Local", (), {"__qualname__": "f.<locals>.Local"}), "Local: put it at the top of a module"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(scheduler_cls=wrong, **plain)
