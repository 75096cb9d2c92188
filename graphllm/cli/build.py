"""`graphllm compile`, and the progress view of compilation that `graphllm run` shows on first use."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from graphllm.config import CompileConfig, ConfigError, EngineArgs, Env
from graphllm.config.setting import size_text
from graphllm.loading.artifact.build import Progress as BuildProgress
from graphllm.loading.artifact.build import find_or_build, fitting
from graphllm.loading.checkpoint.source import find_source
from graphllm.program.artifact import Artifact

console = Console(stderr=True)


@contextlib.contextmanager
def compile_progress(quiet: bool = False) -> Iterator[BuildProgress]:
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


def build(args: EngineArgs, output: Path | None, bake: bool = False) -> None:
    """Compile and say where the artifact is, what it took and what memory it needs."""
    started = time.perf_counter()
    source = find_source(args)
    env = Env.read()
    with compile_progress() as progress, build_errors():

        def take(config: CompileConfig, room: int) -> Artifact:
            return find_or_build(source, config, env, "rebuild", progress, output, bake, room)

        artifact = fitting(source, args, env, take)
    memory = artifact.memory
    print(artifact.folder)
    console.print(
        f"compiled in {time.perf_counter() - started:.1f} s: weights {size_text(memory.weights)}, "
        f"arena {size_text(memory.arena)}, cache {memory.token} bytes a token"
    )


@contextlib.contextmanager
def build_errors() -> Iterator[None]:
    """Turn a failed compiler into a message instead of a traceback."""
    try:
        yield
    except RuntimeError as failure:
        raise ConfigError(f"compile failed: {failure}") from failure
