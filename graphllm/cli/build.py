"""`graphllm compile`, and the progress view of compilation that `graphllm run` shows on first use."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from graphllm import prepare
from graphllm.config import ConfigError, Env

console = Console(stderr=True)


@contextlib.contextmanager
def compile_progress(quiet: bool = False) -> Iterator[prepare.Progress]:
    """A live view of the compile stages on stderr; shows nothing until the first stage reports."""
    if quiet:
        yield lambda stage, done, total: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
    )
    view = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    tasks: dict[str, TaskID] = {}

    def report(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = view.add_task(f"compiling: {stage}", total=total)
            view.start()
        view.update(tasks[stage], completed=done, total=total)

    try:
        yield report
    finally:
        if tasks:
            view.stop()


def embedded_or(model: Path | None) -> Path:
    """The given checkpoint folder, else the embedded model's."""
    if model is not None:
        return model
    from graphllm.embedded import MODEL_DIR

    return Path(MODEL_DIR)


def build(
    model: Path | None,
    wanted: prepare.Overrides,
    output: Path | None,
    dump: Path | None,
    random: bool = False,
    bake: bool = False,
) -> None:
    """Compile and say where the artifact is, what it took and what memory it needs."""
    started = time.perf_counter()
    source = prepare.open_source(embedded_or(model), random)
    config = replace(prepare.compile_config(source.config, wanted), dump=dump)
    with compile_progress() as progress, build_errors():
        place, manifest = prepare.find_or_build(source, config, Env.read(), "rebuild", progress, output, bake)
    memory = manifest["memory"]
    print(place)
    console.print(
        f"compiled in {time.perf_counter() - started:.1f} s: weights {memory['weights'] / 1e6:.1f} MB, "
        f"arena {memory['arena'] / 1e6:.1f} MB, cache {memory['cache bytes a token']} bytes a token"
    )


@contextlib.contextmanager
def build_errors() -> Iterator[None]:
    """Turn a failed compiler into a message instead of a traceback."""
    try:
        yield
    except RuntimeError as failure:
        raise ConfigError(f"compile failed: {failure}") from failure
