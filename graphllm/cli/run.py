"""`graphllm run`: prompts from the command line, a file or stdin; text to the terminal or resumable JSONL."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress, TextColumn

from graphllm.cli.batch import Inputs, Item, Items, JsonlSink
from graphllm.cli.build import build_errors, compile_progress, console
from graphllm.config import ConfigError, EngineArgs, SchedulerConfig
from graphllm.config.sampling import RequestOutputKind, SamplingParams
from graphllm.engine.outputs import OutputProcessor, RequestOutput
from graphllm.engine.processor import ParsedRequest, Processor
from graphllm.engine.request import Core
from graphllm.engine.text import Tokenizer
from graphllm.entrypoints.core import load_core
from graphllm.entrypoints.model import ResolvedModel, resolve_model
from graphllm.server.chat.call import Call, Style, check_priority, write_out
from graphllm.server.chat.reading import failure

_AHEAD = 2  # completions in the engine, as a multiple of those in one step
_ADMITTED = 32  # lines read before each step at most, so that the device does not wait for the tokenizer


def run(args: EngineArgs, inputs: Inputs, sampling: Mapping[str, Any], quiet: bool) -> int:
    """Generate for every input; the exit status: 1 when the engine failed with some of them. Raises ConfigError for
    user mistakes, before anything is loaded where it can be known."""
    started = time.perf_counter()
    items = Items(inputs)
    ids = [item.id for item in items]
    if not ids:
        raise ConfigError("no prompts: give --prompt, a file, or - to read stdin")
    if inputs.output is None and sampling.get("logprobs") is not None:
        raise ConfigError("logprobs: the terminal shows none; give --output FILE with --logprobs")
    sink = JsonlSink(inputs.output) if inputs.output else None
    finished = sink.finished if sink else set()
    todo = sum(id not in finished for id in ids)
    if todo < len(ids) and not quiet:
        console.print(f"{len(ids) - todo} of {len(ids)} are already in {inputs.output}; skipped", markup=False)
    if not todo:
        return 0
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Where nobody says how long: a plain line and a line of a batch file have defaults of their own.
    open_end = SamplingParams(max_tokens=None)
    with compile_progress(quiet) as progress, build_errors():
        resolved = resolve_model(args, progress, sampling, open_end)
    name = Path(resolved.config.model.model).name
    phases: dict[str, float] = {"artifact": time.perf_counter() - started}

    def clock(name: str, seconds: float) -> None:
        phases[name] = phases.get(name, 0.0) + seconds

    summary = Summary()
    with contextlib.closing(_load(resolved, clock)) as engine:
        left = (item for item in items if item.id not in finished)
        news = generate(engine, left, resolved.defaults, todo == 1 and sink is None, summary)
        with _progress(todo, quiet or sink is None) as show:
            for step in news:
                for result in step:
                    if sink:
                        sink.put(result.place, _row(result, name))
                    else:
                        _print(result)
                show(summary)
    if sink:
        sink.close()
    if not quiet:
        if summary.first:
            phases["first token"] = summary.first - started
        _print_summary(summary, phases)
    if summary.refused or summary.failed:
        _print_failures(summary, inputs.output)
    return 1 if summary.failed else 0


def read_schema(given: str) -> str:
    """A JSON schema, from a file or as it is. Raises ConfigError when it is neither."""
    if given.lstrip().startswith(("{", "true", "false")):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        raise ConfigError(f"json-schema: {given!r:.80} is no schema and no file of one ({reason})") from reason


class Engine(NamedTuple):
    """What requests pass through."""

    core: Core
    tokenizer: Tokenizer
    processor: Processor
    outputs: OutputProcessor
    scheduler: SchedulerConfig
    style: Style = Style()

    def close(self) -> None:
        """Give back memory and threads."""
        self.core.close()


def _load(resolved: ResolvedModel, phases: Callable[[str, float], None]) -> Engine:
    core, tokenizer = load_core(resolved.config, phases, resolved.processors), resolved.tokenizer
    assert tokenizer is not None
    return Engine(
        core,
        tokenizer,
        Processor(tokenizer, core.info, core.grammars),
        OutputProcessor(tokenizer),
        resolved.config.scheduler,
        Style.of(tokenizer),
    )


class Result(NamedTuple):
    """News of an item. place: in the input, from 0 on. call, outputs: what it asked for and got, one output for each
    of its prompts; a stream's newest text only, until one is finished. error: why it cannot run, instead."""

    place: int
    item: Item
    call: Call | None
    outputs: list[RequestOutput]
    error: ConfigError | None = None


@dataclass
class Summary:
    """What a run did. refused: items that could not run. failed: those that the engine could not finish. begun, first,
    ended: clock readings in seconds."""

    begun: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    requests: int = 0
    refused: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / max((self.ended or time.perf_counter()) - self.begun, 1e-9)

    def add(self, result: Result) -> None:
        """Count an item that is done."""
        if result.error is not None:
            self.refused += 1
            return
        self.requests += 1
        self.failed += failure(result.outputs) is not None
        self.prompt_tokens += sum(len(o.prompt_token_ids) for o in result.outputs)
        self.cached_tokens += sum(o.num_cached_tokens for o in result.outputs)


@dataclass
class _Open:
    """An item in the engine. outputs: by number of the prompt, those that are finished."""

    place: int
    item: Item
    call: Call
    requests: list[ParsedRequest]
    outputs: dict[int, RequestOutput]


def generate(
    engine: Engine, items: Iterable[Item], defaults: SamplingParams, stream: bool, summary: Summary
) -> Iterator[list[Result]]:
    """Run items to their end; the results of each step. Items are taken when there is room for them, and those that
    cannot run do not stop the others. stream: a single completion's text comes as it is made."""
    core, outputs = engine.core, engine.outputs
    defaults = replace(defaults, output_kind=RequestOutputKind.FINAL_ONLY)
    source = iter(enumerate(items))
    running: dict[str, tuple[_Open, int]] = {}  # by id of the request: its item, and which of its prompts
    completions, more = 0, True
    summary.begun = time.perf_counter()
    while more or running:
        results = []
        for _ in range(_ADMITTED):
            if completions >= _AHEAD * core.info.max_num_seqs or not more:
                break
            taken = next(source, None)
            if taken is None:
                more = False
                break
            try:
                opened = _admit(engine, *taken, defaults, stream)
            except ConfigError as mistake:
                results.append(Result(*taken, None, [], mistake))
                summary.add(results[-1])
                continue
            for number, request in enumerate(opened.requests):
                running[request.request_id] = opened, number
                completions += request.params.n
        updates = core.step() if core.unfinished else []
        summary.output_tokens += sum(len(update.tokens) for update in updates)
        if not summary.first and summary.output_tokens:
            summary.first = time.perf_counter()
        processed = outputs.process(updates)
        core.abort(processed.aborts)
        for output in processed.outputs:
            opened, number = running[output.request_id]
            if output.finished:
                opened.outputs[number] = output
                completions -= opened.call.params.n
                del running[output.request_id]
            if len(opened.outputs) == len(opened.requests):
                whole = [opened.outputs[i] for i in range(len(opened.requests))]
                results.append(Result(opened.place, opened.item, opened.call, whole))
                summary.add(results[-1])
            elif not output.finished:
                results.append(Result(opened.place, opened.item, opened.call, [output]))
        yield results
    while core.unfinished:  # the ends of what a stop string aborted
        core.step()
    summary.ended = time.perf_counter()


def _admit(engine: Engine, place: int, item: Item, defaults: SamplingParams, stream: bool) -> _Open:
    """Queue all requests of an item, or none."""
    core, outputs = engine.core, engine.outputs
    call = item.call(defaults)
    check_priority(call, engine.scheduler)
    call, prompts = write_out(call, engine.tokenizer, engine.style)
    if stream and len(prompts) == call.params.n == 1:
        call = call._replace(params=replace(call.params, output_kind=RequestOutputKind.DELTA))
    requests = [
        engine.processor.make(
            prompt, call.params, f"{place}.{i}", priority=call.priority, cache_salt=call.cache_salt
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip
    try:
        for request in requests:
            outputs.add(request)
            for part in request.requests:
                core.add(part)
    except ConfigError:
        core.abort(outputs.abort(request.request_id for request in requests))
        raise
    return _Open(place, item, call, requests, {})


def _row(result: Result, model: str) -> dict[str, Any]:
    if result.error is not None:
        return result.item.refused(result.error)
    assert result.call is not None
    return result.item.row(result.call, result.outputs, model)


def _print(result: Result) -> None:
    """Text to the terminal: one answer as it comes, several when each is done."""
    id = result.item.id
    problem = result.error or failure(result.outputs)
    if problem is not None:
        raise ConfigError(f"{id}: {problem}") from result.error
    assert result.call is not None
    completions = [completion for output in result.outputs for completion in output.outputs]
    if result.call.params.output_kind is RequestOutputKind.DELTA:
        print(completions[0].text, end="\n" if completions[0].finished else "", flush=True)
        return
    for number, completion in enumerate(completions):
        label = id if len(completions) == 1 else f"{id}, {number}"
        print(f"[{label}] {completion.text}", flush=True)


@contextlib.contextmanager
def _progress(total: int, hidden: bool) -> Iterator[Any]:
    """show(summary): a bar of the items that are done."""
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, console=console, transient=True, disable=hidden) as view:
        task = view.add_task("generating", total=total, rate="")
        yield lambda summary: view.update(
            task, completed=summary.requests + summary.refused, rate=f"{summary.rate:.1f} tokens/s"
        )


def _print_summary(summary: Summary, phases: Mapping[str, float]) -> None:
    s = summary
    cached = f" ({s.cached_tokens} from the prefix cache)" if s.cached_tokens else ""
    console.print(
        f"{s.requests} requests, {s.prompt_tokens} prompt{cached} and {s.output_tokens} output tokens in "
        f"{s.ended - s.begun:.2f} s: {s.rate:.1f} tokens/s",
        highlight=False,
    )
    console.print("start-up, s: " + ", ".join(f"{name} {s:.2f}" for name, s in phases.items()), highlight=False)


def _print_failures(summary: Summary, output: Path | None) -> None:
    parts = []
    if summary.refused:
        parts.append(f"{summary.refused} could not run")
    if summary.failed:
        parts.append(f"the engine failed with {summary.failed}, run again to repeat those")
    total = summary.requests + summary.refused
    console.print(
        f"of {total} requests {'; '.join(parts)}: see their errors in {output}", markup=False, highlight=False
    )
