"""Batches of `graphllm run`: OpenAI's batch format, order, resuming after kill -9, and lines taken only when needed."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphllm.cli.run.batch import BatchItem, Item, Items, PlainItem
from graphllm.cli.run.inputs import Inputs
from graphllm.cli.run.results import JsonlSink
from graphllm.cli.run.run import Engine, Result, Summary, generate, read_schema
from graphllm.config import ConfigError, SchedulerConfig
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.requests.outputs import OutputProcessor
from graphllm.engine.requests.processor import Processor
from graphllm.engine.requests.text import Tokenizer
from graphllm.entrypoints.driver import Driver
from tests.engine import byte_tokenizer
from tests.engine.stub_core import StubCore, info

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
Run = Callable[..., Any]


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def _jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
    return path


def _line(id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": id, "method": "POST", "url": url, "body": {"model": "any", **body}}


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# --- the loop, on a core without a model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer.make(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> Engine:
    """Four sequences at a time; every token follows from the last one."""
    size = tokenizer.vocab_size
    logits = np.random.default_rng(0).normal(size=(size, 1, size)).repeat(size, axis=1)
    core = StubCore(info(size), logits)
    return Engine(
        Driver(core, Processor(tokenizer, core.info), OutputProcessor(tokenizer)), tokenizer, SchedulerConfig()
    )


def _prompt(id: str, text: str = "hello", **fields: Any) -> PlainItem:
    return PlainItem(id, text, None, None, {"ignore_eos": True, "max_tokens": 3, **fields})


def _generate(engine: Engine, items: Iterable[Item], stream: bool = False) -> list[Result]:
    return [r for step in generate(engine, items, GREEDY, stream, Summary()) for r in step]


def test_a_chat_that_is_none_is_one_line(engine: Engine) -> None:
    """Half of a surrogate pair inside the text of arguments, as clients send who cut a string within an emoji."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud83d"}'}}
    messages = [*_chat("x"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    place = "messages[1].tool_calls[0].function.arguments.a has "
    lines = [_line("a", messages=messages), _line("b", messages=_chat("x"), max_tokens=2, ignore_eos=True)]
    items: list[Item] = [BatchItem(i["custom_id"], i["method"], i["url"], i["body"]) for i in lines]
    items += [PlainItem("c", None, messages, None, {}), PlainItem("d", None, [{"content": "x"}], None, {})]
    found = {r.item.id: r for r in _generate(engine, items)}
    assert [str(found[id].error).startswith(place) for id in "ac"] == [True, True]
    assert str(found["d"].error).startswith("messages[0] is {'content'")
    assert found["b"].error is None
    (wrong,) = _generate(engine, [BatchItem("e", "POST", COMPLETIONS, {"prompt": ["a", "b " * 900]})])
    assert str(wrong.error).startswith("prompt[1]: prompt has")
    row = items[0].refused(found["a"].error)  # type: ignore[arg-type]
    assert (row["response"]["status_code"], row["response"]["body"]["error"]["param"]) == (400, "messages")


def test_lines_are_taken_when_there_is_room(engine: Engine) -> None:
    """Of 2,000 lines, no more than twice what a step holds are taken before others are done."""
    taken = 0

    def source() -> Iterator[Item]:
        nonlocal taken
        for i in range(2000):
            taken += 1
            yield _prompt(str(i))

    done = 0
    for step in generate(engine, source(), GREEDY, False, Summary()):
        # Those of the step just done made room that is used before the next one.
        assert taken - done <= 2 * 4
        done += len(step)
    assert (done, taken) == (2000, 2000)


def test_completions_count_as_room(engine: Engine) -> None:
    items = [_prompt(str(i), n=4, temperature=1.0) for i in range(9)]
    source = iter(items)
    steps = generate(engine, source, GREEDY, False, Summary())
    next(steps)
    assert len(list(source)) == 9 - 2
    assert sum(len(step) for step in steps) == 2


def test_results_and_summary(engine: Engine, tokenizer: Tokenizer) -> None:
    summary = Summary()
    items = [
        _prompt("short", max_tokens=1),
        _prompt("long", max_tokens=9),
        _prompt("wrong", temperature=-1),
        BatchItem("two", "POST", COMPLETIONS, {"prompt": ["hello", "cat"], "max_tokens": 5, "ignore_eos": True}),
    ]
    results = [r for step in generate(engine, items, GREEDY, False, summary) for r in step]
    by_id = {r.item.id: r for r in results}
    assert [(r.place, r.item.id) for r in sorted(results)] == [*enumerate(("short", "long", "wrong", "two"))]
    lengths = {id: [len(o.outputs[0].token_ids) for o in r.outputs] for id, r in by_id.items()}
    assert lengths == {"short": [1], "long": [9], "wrong": [], "two": [5, 5]}
    assert "temperature is -1" in str(by_id["wrong"].error)
    hello, cat = (tokenizer.encode(t) for t in ("hello", "cat"))
    assert [o.prompt_token_ids for o in by_id["two"].outputs] == [hello, cat]
    assert (summary.requests, summary.refused, summary.failed) == (3, 1, 0)
    assert (summary.output_tokens, summary.prompt_tokens) == (20, 3 * len(hello) + len(cat))
    assert summary.begun <= summary.first <= summary.ended


def test_a_line_runs_whole_or_not_at_all(engine: Engine) -> None:
    """When the core takes one of its prompts and not the next, the first is taken back."""
    core: Any = engine.driver.core
    core.refused.add("0.1")
    items = [BatchItem("a", "POST", COMPLETIONS, {"prompt": ["hello", "cat"]}), _prompt("b")]
    wrong, good = sorted(_generate(engine, items))
    assert "0.1: refused" in str(wrong.error)
    assert good.outputs[0].outputs[0].finish_reason == "length"
    assert core.aborted == ["0.0"]
    assert (core.unfinished, engine.driver.outputs.unfinished) == (0, 0)


def test_stop_strings_end_requests_in_the_core(engine: Engine) -> None:
    (whole,) = _generate(engine, [_prompt("a", max_tokens=20)])
    text = whole.outputs[0].outputs[0].text
    (cut,) = _generate(engine, [_prompt("a", max_tokens=20, stop=[text[3:5]])])
    assert cut.outputs[0].outputs[0].text == text[: text.find(text[3:5])]
    core: Any = engine.driver.core
    assert core.aborted == ["0.0"]
    assert core.unfinished == 0


def test_a_stream_is_the_text(engine: Engine) -> None:
    (whole,) = _generate(engine, [_prompt("a", max_tokens=9)])
    parts = _generate(engine, [_prompt("a", max_tokens=9)], stream=True)
    assert len(parts) == 9
    assert "".join(r.outputs[0].outputs[0].text for r in parts) == whole.outputs[0].outputs[0].text
    assert [r.outputs[0].finished for r in parts] == [False] * 8 + [True]
    (several,) = _generate(engine, [_prompt("a", n=2, temperature=1.0)], stream=True)
    assert [len(c.token_ids) for c in several.outputs[0].outputs] == [3, 3]


def test_priority_needs_its_policy(engine: Engine) -> None:
    late = PlainItem("late", "hello", None, None, {"max_tokens": 2}, priority=5)
    (refused,) = _generate(engine, [late])
    assert "--scheduling-policy priority" in str(refused.error)
    core: Any = engine.driver.core
    engine = engine._replace(scheduler=SchedulerConfig(scheduling_policy="priority"))
    assert _generate(engine, [late, _prompt("now")])[0].error is None
    assert {r.id: r.priority for r in core.added} == {"0.0": 5, "1.0": 0}


# --- results


def test_rows_are_written_in_the_order_of_the_input(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    for order in itertools.permutations(range(4)):
        out.unlink(missing_ok=True)
        sink = JsonlSink(out, [(str(i), "") for i in range(4)])
        held = 0
        for n, place in enumerate(order):
            sink.put(place, {"id": str(place)})
            first = next(i for i in range(5) if i not in order[: n + 1])
            assert [r["id"] for r in _rows(out)] == [str(i) for i in range(first)]
            held += first < n + 1
        sink.close()
        assert held == 0 or order != (0, 1, 2, 3)


def test_failures_of_the_engine_run_again(tmp_path: Path) -> None:
    """What was wrong with a request stays so; what the engine could not finish is taken out of the file."""
    response = {"request_id": "x", "body": {}}
    good = [
        {"id": "a", "digest": "A", "text": "", "finish_reason": "stop"},
        {"id": "b", "digest": "B", "error": "temperature is -1"},
        {"id": "c", "digest": "C", "choices": [{"finish_reason": "stop"}, {"finish_reason": "length"}]},
        {"id": "x1", "digest": "D", "custom_id": "d", "response": {"status_code": 200, **response}, "error": None},
        {"id": "x2", "digest": "E", "custom_id": "e", "response": {"status_code": 400, **response}, "error": None},
    ]
    bad = [
        {"id": "f", "digest": "F", "text": "", "finish_reason": "error", "error": "NaN"},
        {"id": "g", "digest": "G", "choices": [{"finish_reason": "stop"}, {"finish_reason": "error"}]},
        {"id": "x3", "digest": "H", "custom_id": "h", "response": {"status_code": 500, **response}, "error": None},
        {"id": "x4", "digest": "I", "custom_id": "i", "response": None, "error": {"code": "x", "message": "y"}},
    ]
    mixed = [r for pair in itertools.zip_longest(good, bad) for r in pair if r]
    out = _jsonl(tmp_path / "out.jsonl", mixed)
    out.write_bytes(out.read_bytes() + b'{"id": "half')
    (tmp_path / "link.jsonl").symlink_to(out)
    sink = JsonlSink(tmp_path / "link.jsonl", [*zip("fabcde", "FABCDE", strict=True)])
    assert (sink.finished, sink.refused, sink.moved) == ({1, 2, 3, 4, 5}, 2, 0)
    assert _rows(out) == good
    sink.put(0, {"id": "f", "text": "x"})
    sink.close()
    assert _rows(out) == [{"id": "f", "digest": "F", "text": "x"}, *good]  # in the order of the input
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.jsonl", "out.jsonl"]


def test_one_run_at_a_time(tmp_path: Path) -> None:
    out = _jsonl(tmp_path / "out.jsonl", [{"id": "a", "digest": "A", "finish_reason": "error"}])
    for _ in range(2):  # the second time the file is another one
        first = JsonlSink(out, [("a", "A")])
        with pytest.raises(ConfigError, match="another run is writing"):
            JsonlSink(out, [("a", "A")])
        first.close()
    JsonlSink(out, [("a", "A")]).close()


# --- input


def test_a_file_is_not_held_in_memory(tmp_path: Path) -> None:
    """20 MB of lines are gone through with a tenth of that."""
    import tracemalloc

    file = tmp_path / "in.jsonl"
    with file.open("w") as lines:
        for i in range(2000):
            lines.write(json.dumps(_line(f"{i}", messages=_chat("x" * 10_000))) + "\n")
    items = Items(Inputs(str(file), [], False, None, None))
    tracemalloc.start()
    for _ in range(2):
        assert sum(1 for _ in items) == 2000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


def test_a_pipe_can_be_gone_through_twice(tmp_path: Path) -> None:
    import threading

    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=('{"prompt": "a"}\n{"prompt": "b"}\n',))
    writer.start()
    items = Items(Inputs(str(pipe), [], True, None, None))
    writer.join()
    assert [i.id for i in items] == [i.id for i in items] == ["1", "2"]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c"])
def test_separators_inside_a_line(separator: str, tmp_path: Path) -> None:
    """str.splitlines would cut there; JSON allows the first three as they are."""
    text = f"one{separator}two"
    file = _jsonl(tmp_path / "in.jsonl", [_line(f"id{separator}", messages=_chat(text)), {"prompt": text}])
    file.write_text("\ufeff" + file.read_text(encoding="utf-8").replace("\n", "\r\n"), encoding="utf-8", newline="")
    batch, plain = Items(Inputs(str(file), [], True, None, None))
    assert isinstance(batch, BatchItem)
    assert isinstance(plain, PlainItem)
    assert (batch.id, batch.body["messages"][0]["content"], plain.prompt) == (f"id{separator}", text, text)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ({"method": "POST", "url": CHAT, "body": {}}, ["in.jsonl:2: custom_id is None"]),
        ({"custom_id": 7, "method": "POST", "url": CHAT, "body": {}}, ["in.jsonl:2: custom_id is 7", "give a string"]),
        ({"custom_id": "", "url": CHAT}, ["in.jsonl:2: custom_id is ''"]),
        (_line("one", messages=_chat("again")), ["in.jsonl:2: id 'one' appears twice"]),
        ({"prompt": "a", "priority": "high"}, ["in.jsonl:2: priority is 'high', give a whole number"]),
        ({"messages": None}, ["in.jsonl:2: messages must be a list"]),
    ],
)
def test_lines_without_a_usable_id(line: dict[str, Any], parts: list[str], tmp_path: Path) -> None:
    """They stop a run before it starts: nobody could tell whose result it is."""
    file = _jsonl(tmp_path / "in.jsonl", [_line("one", messages=_chat("hi")), line])
    with pytest.raises(ConfigError) as mistake:
        list(Items(Inputs(str(file), [], False, None, None)))
    assert [p for p in parts if p not in str(mistake.value)] == []


def test_schema_as_text_or_file(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    assert read_schema(str(tmp_path / "schema.json")) == '{"type": "object"}'
    assert read_schema(' {"type": "null"}') == ' {"type": "null"}'
    with pytest.raises(ConfigError, match=r"json-schema: 'no-such\.json' is no schema and no file"):
        read_schema("no-such.json")


# --- the command, on the tiny Llama


@pytest.fixture
def run(cli: Any, checkpoint: Path, eager_artifact: Path) -> Run:
    """run(*arguments): graphllm run, greedy, 8 tokens, no progress, on the eager artifact."""
    fixed = ("--model", checkpoint, "--artifact", eager_artifact, "--temperature", 0, "--max-tokens", 8, "--quiet")

    def call(*arguments: object) -> Any:
        return cli("run", *fixed, *arguments)

    return call


def test_openai_batch(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    """Lines of both endpoints give what the same prompts give alone; what cannot run has its error in its place."""
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    prompts = ["hello world", "the cat"]
    chats = [run("--prompt", p).out.removesuffix("\n") for p in prompts]
    raws = [run("--prompt", p, "--raw").out.removesuffix("\n") for p in prompts]
    constrained = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    lines: list[tuple[dict[str, Any], str | None]] = [
        (_line("chat", messages=_chat(prompts[0])), None),
        (_line("long", messages=_chat("word " * 500)), "messages"),
        (_line("both", COMPLETIONS, prompt=prompts), None),
        (_line("url", "/v1/embeddings", input="x"), None),
        (_line("get", messages=_chat("x")) | {"method": "GET"}, None),
        ({"custom_id": "empty", "url": CHAT, "method": "POST"}, None),
        (_line("unknown", messages=_chat("x"), frobnicate=1), "frobnicate"),
        (_line("grammar", messages=_chat("x"), structured_outputs={"regex": "("}), "structured_outputs"),
        (_line("enum", messages=_chat(prompts[1]), response_format=constrained), None),
        (_line("scored", messages=_chat(prompts[1]), max_completion_tokens=3, logprobs=True, top_logprobs=2), None),
    ]
    file = _jsonl(tmp_path / "in.jsonl", [line for line, _ in lines])
    out = tmp_path / "out.jsonl"
    done = run(file, "--output", out)
    assert (done.code, done.out) == (1, "")
    assert "of 10 requests 6 could not run" in " ".join(done.err.split())
    rows = _rows(out)
    assert [r["custom_id"] for r in rows] == [line["custom_id"] for line, _ in lines]
    assert len({r["id"] for r in rows}) == 10
    assert all(r["id"].startswith("batch_req_") and r["error"] is None for r in rows)
    by_id = {r["custom_id"]: r["response"] for r in rows}
    good = {"chat", "both", "enum", "scored"}
    assert {id: r["status_code"] for id, r in by_id.items()} == {id: 200 if id in good else 400 for id in by_id}
    for line, param in lines:
        if line["custom_id"] not in good:
            error = by_id[line["custom_id"]]["body"]["error"]
            assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, None)
            assert error["message"]
    chat = ChatCompletion.model_validate(by_id["chat"]["body"], strict=True)
    assert (chat.choices[0].message.content, chat.model) == (chats[0], "any")
    both = Completion.model_validate(by_id["both"]["body"], strict=True)
    assert [c.text for c in both.choices] == raws
    enum = ChatCompletion.model_validate(by_id["enum"]["body"], strict=True)
    assert json.loads(enum.choices[0].message.content or "") in ("yes", "no")
    scored = ChatCompletion.model_validate(by_id["scored"]["body"], strict=True)
    assert scored.choices[0].logprobs is not None
    content = scored.choices[0].logprobs.content or []
    assert [t.token for t in content] == [t.top_logprobs[0].token for t in content]  # greedy
    assert "".join(t.token for t in content) == scored.choices[0].message.content
    assert chats[1].startswith(scored.choices[0].message.content or "?")
    before = out.read_bytes()
    assert run(file, "--output", out).code == 1  # mistakes are not repeated
    assert out.read_bytes() == before


def test_a_chat_of_a_batch_goes_on_to_the_end_of_the_context(
    cli: Any, checkpoint: Path, eager_artifact: Path, tmp_path: Path
) -> None:
    """Unlike a plain prompt; and a completion has 16 tokens."""
    rows = [
        _line("chat", messages=_chat("hello"), ignore_eos=True, temperature=0),
        _line("text", COMPLETIONS, prompt="hello", ignore_eos=True, temperature=0),
    ]
    out = tmp_path / "out.jsonl"
    file = _jsonl(tmp_path / "in.jsonl", rows)
    assert cli("run", file, "--model", checkpoint, "--artifact", eager_artifact, "-o", out, "-q").code == 0
    chat, text = (r["response"]["body"]["usage"] for r in _rows(out))
    assert chat["total_tokens"] == 96
    assert text["completion_tokens"] == 16


def test_sampling_flags(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    fixed = ("--prompt", "hello", "--output", out)
    regex = "(ab|cd){2}"

    def row(*flags: object) -> dict[str, Any]:
        out.unlink(missing_ok=True)
        assert run(*fixed, *flags).code == 0
        (found,) = _rows(out)
        return found

    plain = row("--logprobs", 2)
    assert len(plain["logprobs"]) == 8
    tokens = [entry["token"] for entry in plain["logprobs"]]
    assert "".join(tokens) == plain["text"]
    assert [e["top_logprobs"][0]["token"] for e in plain["logprobs"]] == tokens
    assert row("--regex", regex)["text"] in {a + b for a in ("ab", "cd") for b in ("ab", "cd")}
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": [1, 22]}')
    assert json.loads(row("--json-schema", schema)["text"]) in (1, 22)
    several = row("--n", 3, "--temperature", 1, "--seed", 1)
    assert len({c["text"] for c in several["choices"]}) > 1
    assert several["usage"]["completion_tokens"] <= 24
    (first, *_) = Tokenizer.from_folder(checkpoint).encode(tokens[0])
    assert row("--stop-token-ids", first)["usage"]["completion_tokens"] == 1
    assert row("--stop-token-ids", first, "--min-tokens", 4)["usage"]["completion_tokens"] >= 4
    assert row("--repetition-penalty", 50, "--presence-penalty", 2, "--frequency-penalty", 2)["text"] != plain["text"]


def test_failures_of_the_engine_are_told(cli: Any, checkpoint: Path, eager_artifact: Path, tmp_path: Path) -> None:
    """A model that gives NaN: status 1, status_code 500; with a sound one the same command completes the file."""
    from safetensors.torch import load_file, save_file

    broken = shutil.copytree(checkpoint, tmp_path / "model")
    weights = load_file(checkpoint / "model.safetensors")
    save_file({n: w * float("nan") if n == "lm_head.weight" else w for n, w in weights.items()},
              broken / "model.safetensors", {"format": "pt"})  # fmt: skip
    file = _jsonl(tmp_path / "in.jsonl", [_line("a", messages=_chat("hello")), {"prompt": "hi", "id": "b"}])
    out = tmp_path / "out.jsonl"
    fixed = ("run", file, "-o", out, "--artifact", eager_artifact, "--max-tokens", 3, "--ignore-eos", "-q")
    done = cli(*fixed, "--model", broken)
    assert done.code == 1
    assert "the engine failed with 2, run again" in " ".join(done.err.split())
    batch, plain = _rows(out)
    assert (batch["response"]["status_code"], plain["finish_reason"]) == (500, "error")
    assert batch["response"]["body"]["error"]["type"] == "server_error"
    assert "NaN" in plain["error"]
    assert cli(*fixed, "--model", checkpoint).code == 0
    batch, plain = _rows(out)
    assert (batch["response"]["status_code"], plain["finish_reason"]) == (200, "length")
    assert cli("run", "--prompt", "x", "--model", broken, "--artifact", eager_artifact).code == 1
