"""`graphllm run --task embed|classify|score`: vectors of texts, to the terminal, to resumable JSONL, or to an array."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save

from graphllm.cli.build import build_errors, compile_progress
from graphllm.cli.endings import CommandError, signals_as_interrupts, stopped_status
from graphllm.cli.run.batch import Items, PlainItem, digest_of
from graphllm.cli.run.inputs import Inputs
from graphllm.cli.run.results import JsonlSink
from graphllm.cli.run.run import settings_of, tell
from graphllm.config import ConfigError, EngineArgs
from graphllm.config.requests.pooling_params import PoolingParams
from graphllm.engine.requests.outputs import OutputProcessor
from graphllm.engine.requests.processor import Processor
from graphllm.engine.vectors.pooling import Pair, Pooling, PoolingRequest
from graphllm.entrypoints.driver import Driver
from graphllm.loading.artifact.model import resolve_model
from graphllm.loading.core.open_core import open_core

Task = Literal["embed", "classify", "score"]
_ARRAYS = (".npy", ".safetensors")
_AHEAD = 2  # requests in the engine, as a multiple of those in one step
_TEXTS = ("text", "prompt", "input")
_PAIRS = (("text_1", "text_2"), ("query", "document"), ("data_1", "data_2"))
_FIELDS = {"id", "custom_id", *_TEXTS, *(name for pair in _PAIRS for name in pair)}


def run_vectors(args: EngineArgs, task: Task, inputs: Inputs, params: PoolingParams, quiet: bool) -> int:
    """Make a vector, the classes or the score of every input; the exit status: 1 when some have none.

    A line is a text or, in JSONL, an object with ``text``; for scores ``text_1`` and ``text_2``, or ``query`` and
    ``document``. inputs.output: JSONL, which is continued; or .npy or .safetensors, an array [inputs, D] with NaN for
    those that could not run, made at the end of a JSONL file. Raises ConfigError and CommandError as `run`.
    """
    items = Items(inputs, lambda line, where, inputs: _read(line, where, task))
    if inputs.prompts and task == "score":
        raise ConfigError('prompt: a score is of two texts; give a file of {"text_1": ..., "text_2": ...}')
    settings = json.dumps([task, settings_of(args), vars(params)], default=str)
    wanted = [(item.id, digest_of(item, settings)) for item in items]
    if not wanted:
        raise ConfigError("no texts: give --prompt, a file, or - to read stdin")
    output = inputs.output
    array = output is not None and output.suffix in _ARRAYS
    journal = output.with_name(output.name + ".jsonl") if output is not None and array else output
    sink = JsonlSink(journal, wanted, inputs.file) if journal is not None else None
    finished = sink.finished if sink else set()
    if finished and not quiet:
        tell(f"{len(finished)} of {len(wanted)} are already in {journal}; skipped")
    refused = 0
    try:
        with signals_as_interrupts():
            try:
                if len(finished) < len(wanted):
                    left = (item for n, item in enumerate(items) if n not in finished and isinstance(item, PlainItem))
                    refused = _run(args, task, left, params, sink, quiet)
            finally:
                if sink:
                    sink.close()
    except KeyboardInterrupt as stop:
        done = f": {sink.done} of {len(wanted)} are done; run the same command again to go on" if sink else ""
        raise CommandError(f"interrupted{done}", stopped_status(stop)) from stop
    if output is not None and journal is not None and array:
        _write_array(journal, output)
    refused += sink.refused if sink else 0
    if refused and sink:
        tell(f"of {len(wanted)} inputs {refused} could not run: see their errors in {journal}")
    return 1 if refused else 0


def _run(
    args: EngineArgs, task: Task, items: Iterator[PlainItem], params: PoolingParams, sink: JsonlSink | None, quiet: bool
) -> int:
    """Load the model and run what is left; how many could not run."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with compile_progress(quiet) as progress, build_errors():
        resolved = resolve_model(args, progress)
    refused = tokens = count = 0
    with closing(open_core(resolved)[0]) as core:
        driver = Driver(core, Processor(resolved.tokenizer, core.info), OutputProcessor(resolved.tokenizer))
        pooling = Pooling(driver.processor, resolved.tokenizer, core.info, resolved.vectors)
        pooling.task(task, "task")
        begun = time.perf_counter()
        for place, (id, row) in enumerate(_rows(driver, pooling, task, items, params)):
            count += 1
            refused += "error" in row
            tokens += row.get("usage", {}).get("prompt_tokens", 0)
            if sink:
                sink.put(place, {"id": id, **row})
            else:
                print(json.dumps({"id": id, **row}, ensure_ascii=False), flush=True)
        if not quiet:
            seconds = time.perf_counter() - begun
            tell(f"{count} inputs, {tokens} tokens in {seconds:.2f} s: {tokens / max(seconds, 1e-9):.1f} tokens/s")
    return refused


def _rows(
    driver: Driver, pooling: Pooling, task: Task, items: Iterator[PlainItem], params: PoolingParams
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The results in the order of the items, each with the item's id."""
    core = driver.core
    open_items: deque[tuple[str, Any, list[PoolingRequest], str]] = deque()
    found: dict[str, Any] = {}
    numbers, more = itertools.count(), True
    while more or open_items:
        while more and core.unfinished < _AHEAD * core.info.max_num_seqs:
            item = next(items, None)
            if item is None:
                more = False
                break
            made: list[PoolingRequest] = []
            try:
                scoring = (
                    pooling.scoring([item.prompt], [item.fields["second"]], _PAIRS[0]) if task == "score" else None
                )
                prompts: list[Any] = scoring.prompts if scoring else [item.prompt]
                for prompt in prompts:
                    text = prompt if isinstance(prompt, Pair) else pooling.instructed(prompt, None, params)
                    made.append(pooling.make(text, params, f"{next(numbers)}", task=task))
                driver.submit(*made)
                open_items.append((item.id, scoring, made, ""))
            except ConfigError as mistake:
                open_items.append((item.id, None, [], str(mistake)))
        if core.unfinished:
            found |= {o.id: o for o in driver.step()[0] if o.finish_reason is not None}
        while open_items and all(asked.id in found for asked in open_items[0][2]):
            id, scoring, made, refusal = open_items.popleft()
            if refusal:
                yield id, {"error": refusal}
                continue
            vectors = [pooling.result(asked, found.pop(asked.id)) for asked in made]
            yield id, _row(pooling, task, scoring, vectors, sum(len(asked.request.prompt) for asked in made))


def _row(pooling: Pooling, task: Task, scoring: Any, vectors: list[Any], tokens: int) -> dict[str, Any]:
    usage = {"prompt_tokens": tokens}
    if scoring is not None:
        return {"score": scoring.scores(vectors)[0], "usage": usage}
    (vector,) = vectors
    if task == "embed":
        return {"embedding": vector.tolist(), "usage": usage}
    labels, best = pooling.vectors.labels, int(vector.argmax())
    return {"label": labels[best] if best < len(labels) else None, "probs": vector.tolist(), "usage": usage}


def _read(line: str, where: str, task: Task) -> PlainItem:
    """An object of a JSONL file."""
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as damage:
        raise ConfigError(f"{where}: not valid JSON ({damage})") from damage
    choices: list[tuple[str, ...]] = [*_PAIRS] if task == "score" else [(name,) for name in _TEXTS]
    names = next((choice for choice in choices if _has(row, choice)), None)
    if names is None:
        wanted = "text_1 and text_2" if task == "score" else "text"
        raise ConfigError(f"{where}: give an object with {wanted}, as texts")
    if unknown := [name for name in row if name not in _FIELDS]:
        raise ConfigError(f"{where}: {unknown[0]:.80} is no field of a text; leave it out")
    id = str(row.get("id", row.get("custom_id", where.rsplit(":", 1)[-1])))
    first, *second = (row[name] for name in names)
    return PlainItem(id, first, None, None, {"second": second[0]} if second else {})


def _has(row: object, names: tuple[str, ...]) -> bool:
    return isinstance(row, Mapping) and all(isinstance(row.get(name), str) for name in names)


def _write_array(journal: Path, output: Path) -> None:
    """The vectors of a file of results as one array, NaN for what could not run."""
    rows = []
    with journal.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            value = row.get("embedding", row.get("probs", row.get("score")))
            rows.append(None if value is None else np.atleast_1d(np.asarray(value, np.float32)))
    size = next((len(row) for row in rows if row is not None), 1)
    array = np.stack([np.full(size, np.nan, np.float32) if row is None else row for row in rows])
    part = output.with_name(output.name + ".part")
    try:
        with part.open("wb") as file:
            if output.suffix == ".npy":
                np.save(file, array)
            else:
                file.write(save({"vectors": array}))
        os.replace(part, output)
    except OSError as reason:
        part.unlink(missing_ok=True)
        raise CommandError(f"cannot write {output}: {reason.strerror}; make room and run again", 1) from reason
