"""`graphllm run`: prompts from the command line, a file or stdin; text to the terminal or resumable JSONL."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress, TextColumn

from graphllm.chat.call import Call, Style, check_priority, write_out
from graphllm.chat.reading import failure
from graphllm.cli.build import build_errors, compile_progress, console
from graphllm.cli.endings import CommandError, signals_as_interrupts, stopped_status
from graphllm.cli.run.batch import Item, Items, PlainItem, digest_of
from graphllm.cli.run.inputs import Inputs
from graphllm.cli.run.results import JsonlSink
from graphllm.config import ConfigError, EngineArgs, SchedulerConfig
from graphllm.config.requests.sampling_params import RequestOutputKind, SamplingParams
from graphllm.engine.requests.outputs import OutputProcessor, RequestOutput
from graphllm.engine.requests.processor import ParsedRequest, Processor
from graphllm.engine.requests.request import Adapter
from graphllm.engine.requests.text import Tokenizer
from graphllm.entrypoints.adapters import AdapterFiles
from graphllm.entrypoints.driver import Driver
from graphllm.loading.artifact.build import POLICIES
from graphllm.loading.artifact.model import ResolvedModel, checkpoint_defaults, resolve_model
from graphllm.loading.artifact.resolve import compile_config
from graphllm.loading.checkpoint.source import find_source, find_tokenizer
from graphllm.loading.core.open_core import open_core
from graphllm.program import baked_table
from graphllm.program.artifact import Artifact
from graphllm.weights.adapters.adapters import adapter_digest
from graphllm.weights.loading.baked_on_host import sample

_AHEAD = 2  # completions in the engine, as a multiple of those in one step
# What changes answers, of what a model is compiled for.
_ANSWERS_DEPEND_ON = ("dtype", "quantization", "max_model_len")
_TEXT_FILES = (".json", ".jinja", ".model", ".txt")  # of a checkpoint: configs, tokenizer, template
_ADMITTED = 32  # lines read before each step at most, so that the device does not wait for the tokenizer


def run_with_form(
    args: EngineArgs,
    inputs: Inputs,
    sampling: dict[str, Any],
    form: tuple[str | None, str | None],
    quiet: bool,
    lora: Sequence[str],
) -> int:
    """`run` with answers of a form. form: a JSON schema, as a file or text, and a regular expression."""
    given, regex = form
    schema = None if given is None else read_schema(given)
    if schema or regex:
        sampling["structured_outputs"] = {"json": schema, "regex": regex}
    return run(args, inputs, sampling, quiet, lora)


def run(args: EngineArgs, inputs: Inputs, sampling: Mapping[str, Any], quiet: bool, lora: Sequence[str] = ()) -> int:
    """Generate for every input; the exit status: 1 when some have no answer. lora: adapters, as `parse_lora` reads
    them. Raises ConfigError for user mistakes, before anything is loaded where it can be known, and CommandError where
    a signal or a write error stops it."""
    started = time.perf_counter()
    items = Items(inputs)
    # Where nobody says how long: a plain line and a line of a batch file have defaults of their own.
    open_end = SamplingParams(max_tokens=None)
    adapters = parse_lora(lora)
    if adapters and not args.enable_lora:
        raise ConfigError(f"lora is {lora[0]!r:.80}: adapters run with --enable-lora; give it too")
    settings = "" if inputs.output is None else settings_of(args, sampling, open_end, adapters)
    wanted = [(item.id, digest_of(item, settings)) for item in items]
    if not wanted:
        raise ConfigError("no prompts: give --prompt, a file, or - to read stdin")
    if inputs.output is None and sampling.get("logprobs") is not None:
        raise ConfigError("logprobs: the terminal shows none; give --output FILE with --logprobs")
    sink = JsonlSink(inputs.output, wanted, inputs.file) if inputs.output else None
    finished = sink.finished if sink else set()
    if finished and not quiet:
        tell(f"{len(finished)} of {len(wanted)} are already in {inputs.output}; skipped")
    if sink and sink.moved:
        tell(f"{sink.moved} results of lines that are no longer in the input were moved to {sink.moved_to}")

    def left() -> Iterator[Item]:
        for place, (item, expected) in enumerate(itertools.zip_longest(items, wanted)):
            if item is None or expected != (item.id, digest_of(item, settings)):
                raise CommandError(f"{inputs.file} was changed while it was read; run again", 1)
            if place not in finished:
                yield item

    summary, phases = Summary(), dict[str, float]()
    try:
        with signals_as_interrupts():
            try:
                if todo := len(wanted) - len(finished):
                    _run(args, sampling, open_end, adapters, left(), todo, sink, quiet, summary, phases, started)
            finally:
                if sink:
                    sink.close()  # also when stopped: what waits for earlier lines is done
    except KeyboardInterrupt as stop:
        done = sink.done if sink else summary.requests + summary.refused
        how = "run the same command again to go on" if sink else "with --output FILE a stopped run can be continued"
        more = f": {done} of {len(wanted)} requests are done; {how}" if len(wanted) > 1 else ""
        raise CommandError(f"interrupted{more}", stopped_status(stop)) from stop
    if not quiet and summary.first:
        phases["first token"] = summary.first - started
        _print_summary(summary, phases)
    summary.refused += sink.refused if sink else 0
    if sink and (summary.refused or summary.failed):
        _print_failures(summary, len(wanted), sink.path)
    return 1 if summary.refused or summary.failed else 0


def _run(
    args: EngineArgs,
    sampling: Mapping[str, Any],
    open_end: SamplingParams,
    adapters: Mapping[str, str],
    items: Iterable[Item],
    todo: int,
    sink: JsonlSink | None,
    quiet: bool,
    summary: Summary,
    phases: dict[str, float],
    started: float,
) -> None:
    """Load the model, generate, and hand on the results."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with compile_progress(quiet) as progress, build_errors():
        resolved = resolve_model(args, progress, sampling, open_end)
    name = resolved.name
    phases["artifact"] = time.perf_counter() - started

    def clock(name: str, seconds: float) -> None:
        phases[name] = phases.get(name, 0.0) + seconds

    with contextlib.closing(_load(resolved, clock, adapters)) as engine:
        news = generate(engine, items, resolved.defaults, todo == 1 and sink is None, summary)
        with _progress(todo, quiet or sink is None) as show:
            for step in news:
                for result in step:
                    if sink:
                        sink.put(result.place, _row(result, name))
                    else:
                        _print(result)
                show(summary)


def parse_lora(given: Sequence[str]) -> dict[str, str]:
    """Folders of adapters by name, "" for the one of prompts that name none, from "folder" and "name=folder". Raises
    ConfigError."""
    found: dict[str, str] = {}
    for text in given:
        name, _, path = text.rpartition("=")
        if not path or name in found:
            raise ConfigError(f"lora is {text!r:.80}: give a folder once, and others as name=folder")
        found[name] = path
    return found


def settings_of(
    args: EngineArgs,
    sampling: Mapping[str, Any] = {},
    open_end: SamplingParams | None = None,
    adapters: Mapping[str, str] = {},
) -> str:
    """All that answers depend on besides the items, as JSON: the weights, the other files of the model, how it is
    computed, and sampling parameters that items leave open."""
    source = find_source(args)
    defaults = SamplingParams.from_fields(sampling, checkpoint_defaults(args, source, open_end))
    made_of: object = sample(source.checkpoint) if source.checkpoint else args.load_format
    if args.artifact in POLICIES:
        computed = vars(compile_config(source.config, args))
    else:
        place = Path(args.artifact)
        computed = vars(Artifact.trusted(place).config)
        if source.absent is not None:
            made_of = baked_table.made_of(place)
    folders = dict.fromkeys((source.folder, find_tokenizer(args, source)))
    files = [f for folder in folders for f in sorted(folder.iterdir()) if f.suffix in _TEXT_FILES and f.is_file()]
    return json.dumps(
        [
            made_of,
            source.config,
            [(f.name, hashlib.sha256(f.read_bytes()).hexdigest()) for f in files],
            {name: computed[name] for name in _ANSWERS_DEPEND_ON},
            args.logits_processors,
            asdict(defaults),
            *([{name: adapter_digest(Path(folder)) for name, folder in adapters.items()}] if adapters else []),
        ],
        sort_keys=True,
        default=str,
    )


def read_schema(given: str) -> str:
    """A JSON schema, from a file or as it is. Raises ConfigError when it is neither."""
    if given.lstrip().startswith(("{", "true", "false")):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        raise ConfigError(f"json-schema: {given!r:.80} is no schema and no file of one ({reason})") from reason


class Engine(NamedTuple):
    """A model that is loaded. adapters: by the name that prompts give as their model, "" for prompts without one."""

    driver: Driver
    tokenizer: Tokenizer
    scheduler: SchedulerConfig
    style: Style = Style()
    adapters: Mapping[str, Adapter] = {}

    def close(self) -> None:
        """Give back memory and threads."""
        self.driver.core.close()


def _load(resolved: ResolvedModel, phases: Callable[[str, float], None], adapters: Mapping[str, str] = {}) -> Engine:
    (core, grammar), tokenizer = open_core(resolved, phases), resolved.tokenizer
    assert tokenizer is not None
    files = AdapterFiles(core.info)
    try:
        opened = {name: files.open(name or folder, folder) for name, folder in adapters.items()}
    except ConfigError:
        core.close()
        raise
    return Engine(
        Driver(core, Processor(tokenizer, core.info, grammar), OutputProcessor(tokenizer)),
        tokenizer,
        resolved.config.scheduler,
        Style.of(tokenizer),
        opened,
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
    driver = engine.driver
    core = driver.core
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
        updates, outputs = driver.step() if core.unfinished else ([], [])
        summary.output_tokens += sum(len(update.tokens) for update in updates)
        if not summary.first and summary.output_tokens:
            summary.first = time.perf_counter()
        for output in outputs:
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
    driver.drain()  # the ends of requests that a stop string has ended
    summary.ended = time.perf_counter()


def _admit(engine: Engine, place: int, item: Item, defaults: SamplingParams, stream: bool) -> _Open:
    """Queue all requests of an item, or none."""
    call = item.call(defaults, chats=bool(engine.tokenizer.chat_template))
    if call.model and call.model not in engine.adapters and isinstance(item, PlainItem):
        raise ConfigError(f"model is {call.model!r:.80}: no adapter has this name; give it with --lora name=folder")
    check_priority(call, engine.scheduler)
    call, prompts = write_out(call, engine.tokenizer, engine.style)
    if stream and len(prompts) == call.params.n == 1:
        call = call._replace(params=replace(call.params, output_kind=RequestOutputKind.DELTA))
    adapter = engine.adapters.get(call.model, engine.adapters.get(""))
    options: dict[str, Any] = {"priority": call.priority, "cache_salt": call.cache_salt, "adapter": adapter}
    requests = []
    for i, prompt in enumerate(prompts):
        try:
            requests.append(engine.driver.processor.make(prompt, call.params, f"{place}.{i}", **options))
        except ConfigError as mistake:
            raise call.prompt_error(mistake, i, len(prompts)) from None
    engine.driver.submit(*requests)
    return _Open(place, item, call, requests, {})


def _row(result: Result, model: str) -> dict[str, Any]:
    if result.error is not None:
        return result.item.refused(result.error)
    assert result.call is not None
    return result.item.row(result.call, result.outputs, model)


def _print(result: Result) -> None:
    """Text to the terminal: one answer as it comes, several when each is done."""
    id = result.item.id
    broken = failure(result.outputs)
    problem = result.error or (None if broken is None else broken.message)
    if problem is not None:
        print(f"graphllm: {id}: {problem}", file=sys.stderr)
        return
    assert result.call is not None
    completions = [completion for output in result.outputs for completion in output.outputs]
    if result.call.params.output_kind is RequestOutputKind.DELTA:
        print(completions[0].text, end="\n" if completions[0].finished() else "", flush=True)
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
    tell(
        f"{s.requests} requests, {s.prompt_tokens} prompt{cached} and {s.output_tokens} output tokens in "
        f"{s.ended - s.begun:.2f} s: {s.rate:.1f} tokens/s"
    )
    tell("start-up, s: " + ", ".join(f"{name} {s:.2f}" for name, s in phases.items()))


def _print_failures(summary: Summary, total: int, output: Path) -> None:
    parts = []
    if summary.refused:
        parts.append(f"{summary.refused} could not run")
    if summary.failed:
        parts.append(f"the engine failed with {summary.failed}, run again to repeat those")
    tell(f"of {total} requests {'; '.join(parts)}: see their errors in {output}")


def tell(text: str) -> None:
    """A line for people, on stderr."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
