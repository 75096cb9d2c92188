"""`graphllm run`: prompts from the command line, a file or stdin; text to the terminal or resumable JSONL."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from graphllm import prepare
from graphllm.cli.build import build_errors, compile_progress, console, embedded_or
from graphllm.config import ConfigError, Env
from graphllm.engine.params import SamplingParams

if TYPE_CHECKING:
    from graphllm.engine.engine import Engine, Output
    from graphllm.engine.text import Tokenizer

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_POLICIES = ("build", "use", "require", "rebuild")
_DEFAULT_MAX_TOKENS = 256
_LINE_FIELDS = {"id", "custom_id", "prompt", "messages", "tools"}


@dataclass(frozen=True)
class Inputs:
    """Where prompts come from and where text goes. file: .txt, .jsonl or "-". raw: no chat template."""

    file: str | None
    prompts: list[str]
    raw: bool
    system: str | None
    output: Path | None


@dataclass(frozen=True)
class Item:
    """One prompt: text, or chat messages. fields: sampling fields of its own."""

    id: str
    prompt: str | None
    messages: list[dict[str, Any]] | None
    tools: list[dict[str, Any]] | None
    fields: dict[str, Any]


def run(
    model: Path | None,
    inputs: Inputs,
    sampling: Mapping[str, Any],
    wanted: prepare.Overrides,
    artifact: str,
    kv_cache_memory: str | None,
    gpu_memory_utilization: float,
    random: bool,
    quiet: bool,
) -> None:
    """Generate for every input. Raises ConfigError for user mistakes, before anything is loaded where it can be
    known."""
    started = time.perf_counter()
    items = list(read_items(inputs))
    if not items:
        raise ConfigError("no prompts: give --prompt, a file, or - to read stdin")
    sink = JsonlSink(inputs.output) if inputs.output else None
    if sink:
        skipped = [i for i in items if i.id in sink.finished]
        items = [i for i in items if i.id not in sink.finished]
        if skipped and not quiet:
            console.print(f"{len(skipped)} of {len(skipped) + len(items)} are already in {inputs.output}; skipped")
        if not items:
            return
    memory = parse_bytes(kv_cache_memory) if kv_cache_memory else None
    source = prepare.open_source(embedded_or(model), random)
    defaults = _defaults(source.folder, sampling)
    _set_threads_environment()
    place, manifest = _artifact(source, wanted, artifact, quiet)
    phases: dict[str, float] = {"artifact": time.perf_counter() - started}
    engine = prepare.load_engine(
        source, place, manifest, memory, gpu_memory_utilization, lambda name, s: phases.update({name: s})
    )
    if manifest["factors"]["compile"]["target"]["device"] == "cpu":
        _use_free_cores()
    emit = sink.write if sink else _Terminal(single=len(items) == 1).write
    summary = generate(engine, engine.tokenizer, items, defaults, inputs, emit, quiet or not sink)
    if sink:
        sink.close()
    if not quiet:
        if summary.first:
            phases["first token"] = summary.first - started
        _print_summary(summary, phases)


def _set_threads_environment() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _use_free_cores() -> None:
    import torch

    from graphllm.machine import free_cores

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(free_cores())


def _artifact(
    source: prepare.Source, wanted: prepare.Overrides, artifact: str, quiet: bool
) -> tuple[Path, dict[str, Any]]:
    folder = None if artifact in _POLICIES else Path(artifact)
    if folder is not None and not (folder / "manifest.json").exists():
        raise ConfigError(
            f"artifact: {artifact!r} is neither one of {', '.join(_POLICIES)} nor the folder of an artifact"
        )
    config = prepare.compile_config(source.config, wanted)
    with compile_progress(quiet) as progress, build_errors():
        policy: Any = "require" if folder else artifact
        return prepare.find_or_build(source, config, Env.read(), policy, progress, folder)


def _defaults(folder: Path, sampling: Mapping[str, Any]) -> SamplingParams:
    file = folder / "generation_config.json"
    try:
        given = dict(json.loads(file.read_text())) if file.exists() else {}
    except (ValueError, TypeError) as damage:
        raise ConfigError(f"{file}: damaged ({damage}); download it again") from damage
    if given.pop("repetition_penalty", 1.0) != 1.0:
        console.print("generation_config.json asks for a repetition penalty, which is not supported yet: going without")
    base = SamplingParams.from_generation_config(given)
    if "max_new_tokens" not in given:
        base = SamplingParams.from_fields({"max_tokens": _DEFAULT_MAX_TOKENS}, base)
    if given.get("do_sample") is False and sampling.get("temperature") is None:
        base = SamplingParams.from_fields({"temperature": 0.0}, base)
    return SamplingParams.from_fields(sampling, base)


def read_items(inputs: Inputs) -> Iterator[Item]:
    """All prompts in order. Raises ConfigError naming file and line for a line that cannot be used."""
    for i, text in enumerate(inputs.prompts):
        yield _text_item(f"prompt-{i}", text, inputs)
    if inputs.file is None:
        return
    name, lines = _open_lines(inputs.file)
    seen: set[str] = set()
    as_json = name.endswith(".jsonl") or (name == "stdin" and "".join(lines).lstrip().startswith("{"))
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        item = _json_item(line, f"{name}:{number}", inputs) if as_json else _text_item(f"line-{number}", line, inputs)
        if item.id in seen:
            raise ConfigError(f"{name}:{number}: id {item.id!r} appears twice; ids must be unique")
        seen.add(item.id)
        yield item


def _open_lines(file: str) -> tuple[str, list[str]]:
    try:
        if file == "-":
            return "stdin", sys.stdin.read().split("\n")  # splitlines would also cut at U+2028, which JSON may hold
        return file, Path(file).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as failure:
        raise ConfigError(f"file: cannot read {file!r}: {failure}") from failure


def _text_item(id: str, text: str, inputs: Inputs) -> Item:
    if inputs.raw:
        return Item(id, text, None, None, {})
    return Item(id, None, _chat(text, inputs.system), None, {})


def _chat(text: str, system: str | None) -> list[dict[str, Any]]:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": text}]


def _json_item(line: str, where: str, inputs: Inputs) -> Item:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is valid JSON and no text
    except ValueError as damage:
        raise ConfigError(f"{where}: not valid JSON ({damage})") from damage
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise ConfigError(f"{where}: give an object with either prompt (text) or messages (a chat)")
    id = str(row.get("id", row.get("custom_id", where.rsplit(":", 1)[-1])))
    fields = {k: v for k, v in row.items() if k not in _LINE_FIELDS}
    for name in ("messages", "tools"):
        if row.get(name) is not None and not _is_objects(row[name]):
            raise ConfigError(f"{where}: {name} must be a list of objects")
    if "messages" in row:
        return Item(id, None, row["messages"], row.get("tools"), fields)
    if not isinstance(row["prompt"], str):
        raise ConfigError(f"{where}: prompt is {type(row['prompt']).__name__}, give a string")
    item = _text_item(id, row["prompt"], inputs)
    return Item(id, item.prompt, item.messages, row.get("tools"), fields)


def _is_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


class JsonlSink:
    """Appends one line for each finished request. A file left by an interrupted run is continued: its complete lines
    are kept and their ids skipped, a half-written last line is cut off."""

    def __init__(self, path: Path) -> None:
        self.finished: set[str] = set()
        keep = 0
        try:
            self._file: IO[bytes] = path.open("a+b")
            self._file.seek(0)
        except OSError as failure:
            raise ConfigError(f"output: cannot write {path}: {failure}") from failure
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            try:
                self.finished.add(str(json.loads(line)["id"]))
            except (ValueError, TypeError, LookupError) as damage:
                raise ConfigError(f"output: {path} has a line that is no result; move the file away") from damage
            keep += len(line)
        self._file.truncate(keep)

    def write(self, item: Item, output: Output | None, error: str | None = None) -> None:
        """Add a request's line when it is done."""
        if output is not None and output.finish_reason is None:
            return
        row: dict[str, Any] = {"id": item.id}
        if output is None:
            row |= {"error": error}
        else:
            usage = {"prompt_tokens": output.prompt_tokens, "completion_tokens": len(output.token_ids)}
            row |= {"text": output.text, "finish_reason": output.finish_reason, "usage": usage}
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Make sure everything is on disk."""
        os.fsync(self._file.fileno())
        self._file.close()


class _Terminal:
    """Streams a single answer as it comes; prints several when each is done."""

    def __init__(self, single: bool) -> None:
        self._single = single

    def write(self, item: Item, output: Output | None, error: str | None = None) -> None:
        if output is None:
            raise ConfigError(f"{item.id}: {error}")
        if self._single:
            print(output.delta, end="" if output.finish_reason is None else "\n", flush=True)
        elif output.finish_reason:
            print(f"[{item.id}] {output.text}", flush=True)


@dataclass
class Summary:
    """What a run did. first, begun, ended: clock readings in seconds."""

    begun: float
    first: float = 0.0
    ended: float = 0.0
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


def generate(
    engine: Engine,
    tokenizer: Tokenizer,
    items: list[Item],
    defaults: SamplingParams,
    inputs: Inputs,
    emit: Callable[..., None],
    quiet: bool,
) -> Summary:
    """Run every item; items that cannot run are reported through ``emit`` with their error and the others go on."""
    from rich.progress import Progress, TextColumn

    summary = Summary(time.perf_counter())
    by_id = {}
    for item in items:
        try:
            prompt = _encode(tokenizer, item)
            engine.add(prompt, SamplingParams.from_fields(item.fields, defaults), item.id)
        except ConfigError as mistake:
            emit(item, None, str(mistake))
            continue
        by_id[item.id] = item
    with Progress(*Progress.get_default_columns(), TextColumn("{task.fields[rate]}"), console=console,
                  transient=True, disable=quiet) as view:  # fmt: skip
        task = view.add_task("generating", total=len(by_id), rate="")
        for output in engine.run():
            summary.first = summary.first or time.perf_counter()
            summary.output_tokens += 1
            emit(by_id[output.id], output)
            if output.finish_reason:
                summary.requests += 1
                summary.prompt_tokens += output.prompt_tokens
                rate = summary.output_tokens / (time.perf_counter() - summary.begun)
                view.update(task, advance=1, rate=f"{rate:.1f} tokens/s")
    summary.ended = time.perf_counter()
    return summary


def _encode(tokenizer: Tokenizer, item: Item) -> list[int]:
    if item.messages is None:
        return tokenizer.encode(item.prompt or "")
    return tokenizer.encode_chat(item.messages, tools=item.tools)


def _print_summary(summary: Summary, phases: Mapping[str, float]) -> None:
    seconds = max(summary.ended - summary.begun, 1e-9)
    console.print(
        f"{summary.requests} requests, {summary.prompt_tokens} prompt and {summary.output_tokens} output tokens in "
        f"{seconds:.2f} s: {summary.output_tokens / seconds:.1f} tokens/s",
        highlight=False,
    )
    console.print("start-up, s: " + ", ".join(f"{name} {s:.2f}" for name, s in phases.items()), highlight=False)


def parse_bytes(text: str) -> int:
    """Bytes of "2GiB", "500MB" or a plain number. Raises ConfigError when it is neither."""
    lowered = text.strip().lower().removesuffix("b")
    digits = lowered.rstrip("kmgi")
    try:
        return int(float(digits) * _UNITS[lowered[len(digits) :]])
    except (ValueError, KeyError) as damage:
        raise ConfigError(f"kv-cache-memory: {text!r} is no amount of memory; write 2GiB, 500MB or bytes") from damage
