"""`graphllm run`: where prompts come from, where text goes, resuming, and mistakes told in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
PROMPTS = ["hello world", "the cat", "what is the answer"]


@pytest.fixture
def run(cli: Any, checkpoint: Path, eager_artifact: Path) -> Run:
    """run(*arguments, stdin=""): graphllm run, greedy, 8 tokens, no progress, on the eager artifact."""
    fixed = ("--model", checkpoint, "--artifact", eager_artifact, "--temperature", 0, "--max-tokens", 8, "--quiet")

    def call(*arguments: object, stdin: str = "") -> Any:
        return cli("run", *fixed, *arguments, stdin=stdin)

    return call


@pytest.fixture
def answers(run: Run) -> dict[str, str]:
    """What each prompt gives alone."""
    return {p: run("--prompt", p).out.removesuffix("\n") for p in PROMPTS}


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
    return path


def _refused(done: Any, *parts: str) -> None:
    """Status 2, one line that holds all parts, nothing on stdout."""
    assert done.code == 2
    assert done.out == ""
    (line,) = done.err.splitlines()
    assert line.startswith("graphllm: ")
    assert [p for p in parts if p not in line] == [], line


# --- prompts in, text out


def test_one_prompt_streams_its_text(run: Run) -> None:
    done = run("--prompt", "hello world")
    assert (done.code, done.err) == (0, "")
    assert done.out.endswith("\n")
    assert len(done.out) > 8


def test_several_prompts_are_labelled(run: Run, answers: dict[str, str]) -> None:
    done = run(*(a for p in PROMPTS for a in ("--prompt", p)))
    assert sorted(done.out.splitlines()) == [f"[prompt-{i}] {answers[p]}" for i, p in enumerate(PROMPTS)]


def test_text_file(run: Run, answers: dict[str, str], tmp_path: Path) -> None:
    """One prompt a line; empty lines are none; odd separators inside a line are text."""
    file = tmp_path / "prompts.txt"
    file.write_text(f"{PROMPTS[0]}\n\n{PROMPTS[1]}\r\nthe\u2028cat\x0bsat")
    out = tmp_path / "out.jsonl"
    assert run(file, "--output", out).code == 0
    rows = {r["id"]: r["text"] for r in _rows(out)}
    assert rows.keys() == {"line-1", "line-3", "line-4"}
    assert (rows["line-1"], rows["line-3"]) == (answers[PROMPTS[0]], answers[PROMPTS[1]])


def test_jsonl_file(run: Run, answers: dict[str, str], tmp_path: Path) -> None:
    messages = [{"role": "user", "content": PROMPTS[1]}]
    file = _jsonl(
        tmp_path / "in.jsonl",
        [
            {"id": "a", "prompt": PROMPTS[0]},
            {"custom_id": "b", "messages": messages},
            {"prompt": PROMPTS[2], "max_tokens": 3},
            {"id": 4, "prompt": "a line separator \u2028 inside", "temperature": 1.0, "seed": 5},
        ],
    )
    out = tmp_path / "out.jsonl"
    done = run(file, "--output", out)
    assert (done.code, done.out, done.err) == (0, "", "")
    rows = {r["id"]: r for r in _rows(out)}
    assert list(rows) == ["a", "b", "3", "4"]
    assert (rows["a"]["text"], rows["b"]["text"]) == (answers[PROMPTS[0]], answers[PROMPTS[1]])
    assert answers[PROMPTS[2]].startswith(rows["3"]["text"])
    assert rows["3"]["usage"]["completion_tokens"] == 3
    assert rows["a"].keys() == {"id", "digest", "text", "finish_reason", "usage"}
    assert rows["a"]["finish_reason"] == "length"
    assert rows["a"]["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("form", ["text", "jsonl"])
def test_stdin(form: str, run: Run, answers: dict[str, str], tmp_path: Path) -> None:
    lines = PROMPTS[:2] if form == "text" else ["", *(json.dumps({"prompt": p}) for p in PROMPTS[:2])]
    out = tmp_path / "out.jsonl"
    assert run("-", "--output", out, stdin="\n".join(lines)).code == 0
    assert {r["text"] for r in _rows(out)} == {answers[p] for p in PROMPTS[:2]}


def test_template_system_and_raw(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    """A prompt is put into the chat template, with the system message before it, unless it is raw."""
    from graphllm.engine.requests.text import Tokenizer

    tokenizer = Tokenizer.from_folder(checkpoint)
    for flags, text in (
        ((), "<|user|>hello<|bot|>"),
        (("--system", "be short"), "<|system|>be short<|user|>hello<|bot|>"),
        (("--raw",), "hello"),
    ):
        out = tmp_path / f"{len(flags)}{flags}.jsonl"
        assert run("--prompt", "hello", *flags, "--output", out).code == 0
        (row,) = _rows(out)
        assert row["usage"]["prompt_tokens"] == len(tokenizer.encode(text))


def test_a_model_without_a_template_gets_prompts_as_they_are(
    cli: Run, checkpoint: Path, eager_artifact: Path, tmp_path: Path
) -> None:
    """As a base model: nothing has to be said. A system message or messages of a line still need a template."""
    base = shutil.copytree(checkpoint, tmp_path / "base")
    (base / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "chat_template"}))
    command = (
        "run",
        "--model",
        base,
        "--artifact",
        eager_artifact,
        "--prompt",
        "hello",
        "--max-tokens",
        8,
        "--temperature",
        0,
    )
    plain, raw = cli(*command), cli(*command, "--raw")
    assert plain.code == raw.code == 0
    assert plain.out == raw.out != ""
    refused = cli(*command, "--system", "be short")
    assert refused.code == 1
    assert "the model has no chat template" in refused.err


def test_sampling_options(run: Run, answers: dict[str, str]) -> None:
    text = answers["hello world"]
    assert run("--prompt", "hello world", "--stop", text[4:6]).out == text[: text.find(text[4:6])] + "\n"
    one, two, other = (
        run("--prompt", "hello world", "--temperature", 1, "--seed", s, "--max-tokens", 30).out for s in (1, 1, 2)
    )
    assert one == two != other


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--max-num-seqs", 3), "max_num_seqs is 3: the artifact"),
        (("--dtype", "bfloat16"), "dtype is bfloat16: the artifact"),
        (("--max-model-len", 17), "max_model_len is 17: the artifact"),
        (("--buckets", "decode-1,mixed-2-64"), "buckets is decode-1,mixed-2-64: the artifact"),
        (("--quantization", "int8"), "quantization is int8: the artifact"),
    ],
)
def test_options_an_artifact_was_not_compiled_for(
    cli: Any, checkpoint: Path, eager_artifact: Path, options: tuple[object, ...], said: str
) -> None:
    """They were dropped silently once."""
    command = ("run", "--model", checkpoint, "--artifact", eager_artifact, "--prompt", "hello")
    done = cli(*command, *options)
    words = " ".join(done.err.split())
    assert done.code != 0
    assert said in words
    assert "was compiled with" in words
    assert "{" not in words
    compiled = json.loads(json.loads((eager_artifact / "manifest.json").read_text())["manifest"])["factors"]["compile"]
    same = ("--max-num-seqs", compiled["max_num_seqs"], "--max-tokens", 2, "--backend", "eager", "--target", "cpu",
            "--kv-cache-dtype", compiled["dtype"], "--mamba-ssm-cache-dtype", "float32")  # fmt: skip
    assert cli(*command, *same).code == 0


def test_summary(cli: Any, checkpoint: Path, eager_artifact: Path) -> None:
    arguments = (
        "--model",
        checkpoint,
        "--artifact",
        eager_artifact,
        "--prompt",
        "hello",
        "--max-tokens",
        5,
        "--ignore-eos",
    )
    done = cli("run", *arguments)
    words = " ".join(done.err.split())
    assert "1 requests, " in words
    assert " 5 output tokens in " in words
    assert "start-up, s: artifact " in words
    assert "first token" in words


# --- resuming


def test_resume(run: Run, tmp_path: Path) -> None:
    """Finished ids are skipped and kept as they are; a half-written last line is cut off and done again."""
    file = _jsonl(tmp_path / "in.jsonl", [{"id": f"r{i}", "prompt": PROMPTS[i % 3]} for i in range(6)])
    out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    assert run(file, "--output", whole).code == 0
    expected = {r["id"]: r["text"] for r in _rows(whole)}
    lines = whole.read_bytes().splitlines(keepends=True)
    kept = json.dumps(json.loads(lines[0]) | {"text": "as it was"}).encode() + b"\n"
    for half in (b"", lines[3][:17], lines[3][:-1], lines[3][:-1].replace(b"}", b"")):
        out.write_bytes(kept + lines[1] + lines[2] + half)
        assert run(file, "--output", out).code == 0
        rows = _rows(out)
        assert out.read_bytes().startswith(kept + lines[1] + lines[2])
        assert len(rows) == 6
        assert {r["id"]: r["text"] for r in rows} == expected | {rows[0]["id"]: "as it was"}
    before = out.read_bytes()
    assert run(file, "--output", out).code == 0  # all done: nothing is loaded, nothing changes
    assert out.read_bytes() == before


def test_all_finished_loads_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.jsonl"
    assert run("--prompt", "x", "--output", out).code == 0
    monkeypatch.delattr("graphllm.cli.run.run.resolve_model")
    assert run("--prompt", "x", "--output", out).code == 0


def _marked(out: Path) -> None:
    """Give results a text that no model gives: it shows which of them were kept."""
    _jsonl(out, [row | {"text": f"kept {row['text']}"} for row in _rows(out)])


def test_results_follow_their_lines(run: Run, answers: dict[str, str], tmp_path: Path) -> None:
    """In a file without ids, a line on top renumbers all others; a result stays with its text."""
    file, out, old = (tmp_path / name for name in ("in.txt", "out.jsonl", "out.jsonl.old"))
    file.write_text(f"{PROMPTS[0]}\n{PROMPTS[1]}\n{PROMPTS[1]}\n")
    assert run(file, "--output", out).code == 0
    _marked(out)
    file.write_text(f"{PROMPTS[2]}\n{PROMPTS[1]}\n{PROMPTS[0]}\n")
    done = run(file, "--output", out)
    assert (done.code, f"1 results of lines that are no longer in the input were moved to {old}" in done.err) == (
        0,
        True,
    )
    texts = [answers[PROMPTS[2]], f"kept {answers[PROMPTS[1]]}", f"kept {answers[PROMPTS[0]]}"]
    assert [(r["id"], r["text"]) for r in _rows(out)] == [(f"line-{i}", t) for i, t in enumerate(texts, 1)]
    assert [r["id"] for r in _rows(old)] == ["line-3"]
    before = out.read_bytes()
    assert run(file, "--output", out).code == 0
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (("--max-tokens", 7), False),
        (("--stop", "x"), False),
        (("--system", "be short"), False),
        (("--raw",), False),
        (("--model", "other"), False),
        (("--kv-cache-memory-bytes", "1MB"), True),
        (("--scheduling-policy", "priority"), True),
        (("--model", "moved"), True),
    ],
)
def test_what_results_depend_on(
    options: tuple[object, ...], kept: bool, run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file, save_file

    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out.jsonl"
    assert run("--prompt", PROMPTS[0], "--output", out).code == 0
    _marked(out)
    before = out.read_bytes()
    for name in ("other", "moved"):
        shutil.copytree(checkpoint, name)
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.5  # a fine-tuned one: the same shapes
    save_file(weights, "other/model.safetensors", {"format": "pt"})
    done = run("--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--output", out, *options)
    if kept:
        assert done.code == 0
        assert out.read_bytes().startswith(before)
        assert len(_rows(out)) == 2
    else:
        _refused(
            done, "holds 1 results and none of this run", "the sampling parameters, the model", "give another file"
        )
        assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"id": "prompt-0", "text": "x", "finish_reason": "stop"}\n', "written by an older version"),
        ('{"id": "prompt-0", "prompt": "an input file without a line end"}', "has a line that is no result"),
        ("notes without a line end", "has a line that is no result"),
    ],
)
def test_output_of_something_else_is_not_touched(content: str, said: str, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(content)
    _refused(run("--prompt", "x", "--output", out), said, str(out))
    assert out.read_text() == content


@pytest.mark.parametrize("lines", ["one\ntwo\nanother\n", "one\ntwo\n", "one\ntwo\nthree\nfour\n"])
def test_input_that_changes_while_it_is_read(
    lines: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No result is filed under a line that it was not made of."""
    from graphllm.cli.run import run as module

    file, out, resolve = tmp_path / "in.txt", tmp_path / "out.jsonl", module.resolve_model
    file.write_text("one\ntwo\nthree\n")

    def edited(*arguments: Any) -> Any:
        file.write_text(lines)
        return resolve(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, "resolve_model", edited)
        done = run(file, "--output", out)
    assert (done.code, done.err) == (1, f"graphllm: {file} was changed while it was read; run again\n")
    assert run(file, "--output", out).code == 0
    assert [r["id"] for r in _rows(out)] == [f"line-{i + 1}" for i in range(lines.count("\n"))]


def test_one_bad_request_does_not_stop_the_others(run: Run, answers: dict[str, str], tmp_path: Path) -> None:
    file = _jsonl(
        tmp_path / "in.jsonl",
        [
            {"id": "long", "prompt": "word " * 500},
            {"id": "good", "prompt": PROMPTS[0]},
            {"id": "empty", "messages": []},
            {"id": "hot", "prompt": "x", "temperature": -1},
            {"id": "future", "prompt": "x", "watermarking": True},
        ],
    )
    out = tmp_path / "out.jsonl"
    assert run(file, "--output", out).code == 1
    rows = {r["id"]: r for r in _rows(out)}
    assert rows["good"]["text"] == answers[PROMPTS[0]]
    assert "there is room for 95 tokens" in rows["long"]["error"]
    assert "messages is []: give at least one message" in rows["empty"]["error"]
    assert "temperature is -1" in rows["hot"]["error"]
    assert "watermarking is True: " in rows["future"]["error"]


# --- mistakes


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ["no prompts: give --prompt, a file, or -"]),
        (("no-such.txt",), ["file: cannot read 'no-such.txt'"]),
        (("--prompt", "x", "--temperature", "-1"), ["temperature is -1.0: give a number from 0"]),
        (("--prompt", "x", "--top-p", "2", "--min-p", "3"), ["top_p is 2.0", "min_p is 3.0"]),
        (("--prompt", "x", "--max-tokens", "0"), ["max_tokens is 0"]),
        (
            ("--prompt", "x", "--artifact", "bild"),
            ["artifact: 'bild' is neither one of build, use, require, rebuild nor"],
        ),
        (
            ("--prompt", "x", "--kv-cache-memory-bytes", "much"),
            ["kv_cache_memory_bytes is 'much': that is no amount of memory", "2GiB"],
        ),
        (
            ("--prompt", "x", "--kv-cache-memory-bytes", "100"),
            ["kv cache: 100 bytes left for it, it needs 8.2 kB at least", "raise --kv-cache-memory-bytes"],
        ),
        (
            ("--prompt", "x", "--kv-cache-memory-bytes", "-5"),
            ["kv_cache_memory_bytes is '-5': that is no amount of memory"],
        ),
        (("--prompt", "x", "--buckets", "decode-x"), ["buckets: 'decode-x' is not of the form"]),
        (("--prompt", "x", "--max-num-seqs", "0"), ["max_num_seqs is 0"]),
        (
            ("--prompt", "x", "--output", "/no/such/folder/out.jsonl"),
            ["output: cannot write /no/such/folder/out.jsonl"],
        ),
        (("--prompt", "x", "--output", "/"), ["output: cannot write /"]),
        (("--prompt", "x", "--logprobs", "2"), ["logprobs: the terminal shows none; give --output"]),
        (("--prompt", "x", "--json-schema", "{}", "--regex", "a"), ["structured_outputs has json and regex"]),
        (("--prompt", "x", "--json-schema", "x.json"), ["json-schema: 'x.json' is no schema and no file"]),
        (("--prompt", "x", "--n", "2", "--temperature", "0"), ["n is 2: with temperature 0"]),
    ],
)
def test_mistakes(
    arguments: tuple[str, ...], parts: list[str], cli: Any, checkpoint: Path, eager_artifact: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    fixed = ("--model", checkpoint, *(() if "--artifact" in arguments else ("--artifact", eager_artifact)))
    _refused(cli("run", *arguments, *fixed), *parts)


def test_exit_status_is_the_same_with_and_without_output(run: Run, answers: dict[str, str], tmp_path: Path) -> None:
    """1 where a request has no answer; the others have theirs."""
    good, out = PROMPTS[0], tmp_path / "out.jsonl"
    for number, (arguments, problem) in enumerate([
        (("--prompt", "x" * 500), "prompt-1: prompt has"),
        (("--prompt", "", "--raw"), "prompt-1: prompt is empty"),
    ]):  # fmt: skip
        out = tmp_path / f"{number}.jsonl"
        shown = run("--prompt", good, *arguments)
        assert (shown.code, run("--prompt", good, *arguments, "--output", out).code) == (1, 1)
        assert run("--prompt", good, *arguments, "--output", out).code == 1  # skipped, and still no answer
        assert ("--raw" in arguments) or shown.out == f"[prompt-0] {answers[good]}\n"
        (line,) = shown.err.splitlines()
        assert line.startswith(f"graphllm: {problem}")
        assert _rows(out)[1]["error"] in line
    assert run("--prompt", "x", "--regex", "(").code == 1
    assert run("--prompt", good, "--temperature", -1, "--output", tmp_path / "no").code == 2
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("{", ["in.jsonl:2: not valid JSON"]),
        ("[1]", ["in.jsonl:2: give an object with either prompt"]),
        ("{}", ["in.jsonl:2: give an object with either prompt"]),
        ('{"prompt": "a", "messages": []}', ["in.jsonl:2: give an object with either prompt"]),
        ('{"prompt": 5}', ["in.jsonl:2: prompt is int, give a string"]),
        ('{"messages": "hello"}', ["in.jsonl:2: messages must be a list of objects"]),
        ('{"messages": ["hello"]}', ["in.jsonl:2: messages must be a list of objects"]),
        (
            '{"messages": [{"role": "user", "content": "x"}], "tools": 3}',
            ["in.jsonl:2: tools must be a list of objects"],
        ),
        ('{"id": "one", "prompt": "again"}', ["in.jsonl:2: id 'one' appears twice"]),
        (r'{"prompt": "\ud800"}', ["in.jsonl:2: not valid JSON", "surrogates"]),
    ],
)
def test_lines_that_cannot_be_used(line: str, parts: list[str], run: Run, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"id": "one", "prompt": "fine"}\n' + line)
    _refused(run(file), *parts)


def test_files_that_are_no_text(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"\xff\xfe\x00")
    _refused(run(tmp_path / "in.txt"), "file: cannot read", "utf-8")


@pytest.mark.parametrize("line", ["not json", "[1]", '{"text": "no id"}', ""])
def test_output_that_is_no_result_file(line: str, run: Run, tmp_path: Path) -> None:
    """A file of something else is not appended to."""
    out = tmp_path / "notes.txt"
    out.write_text(f"{line}\nmore\n")
    _refused(run("--prompt", "x", "--output", out), "output: ", "notes.txt has a line that is no result")
    assert out.read_text() == f"{line}\nmore\n"


@pytest.mark.parametrize("content", ["{", "[1, 2]", '"x"'])
def test_damaged_generation_config(
    content: str, cli: Any, checkpoint: Path, eager_artifact: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "generation_config.json").write_text(content)
    done = cli("run", "--model", folder, "--artifact", eager_artifact, "--prompt", "x")
    _refused(done, "generation_config.json", "damaged")


def test_usage_mistakes_are_typers(cli: Any) -> None:
    done = cli("run", "--max-tokens", "many")
    assert done.code == 2
    assert "Traceback" not in done.err
    assert "--max-tokens" in done.err
