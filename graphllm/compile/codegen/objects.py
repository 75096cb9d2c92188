"""C++ compiled in the background while Python goes on, and objects kept by content for later compiles.

Imports nothing heavy: the first compilers run while torch is imported.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from graphllm.host.compiler import compiler_command
from graphllm.host.kernel_sources import content, link_command, sources
from graphllm.host.machine import compiler_version, detect_target, usable_cores, versions

_KERNELS_A_UNIT = 24  # generated kernels: their header takes a compiler as long as this many kernels


class BuildError(RuntimeError):
    """A compiler failed. The message holds the end of what it printed."""


class Objects:
    """The objects of one library, compiled by g++ for this machine. A context manager: its end stops what still runs,
    an error kills it.

    folder: where objects stay for later compiles, named by a digest of everything they depend on; None, or one that
    cannot be written to, keeps none.
    seconds: of each compiler that has run, by its source; they run at the same time, while Python goes on.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="graphllm-objects-")
        self._folder = folder if folder and _writable(folder) else Path(self._scratch.name)
        for partial in self._folder.glob(".*.o"):
            if not Path(f"/proc/{partial.name[1:].split('-')[0]}").exists():
                partial.unlink(missing_ok=True)
        target = detect_target("cpu")
        self._known = [compiler_version(), target.name, target.arch, versions(target)]
        self._cores = usable_cores()
        self._pool = concurrent.futures.ThreadPoolExecutor(max(1, self._cores - 1))  # Python needs a core, too
        self._own: dict[Path, concurrent.futures.Future[Path]] = {}
        self._compilers = _Compilers()
        self.seconds: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: object, trace: TracebackType | None) -> None:
        if kind is not None:  # nobody waits for what an error made useless
            self._compilers.kill()
        self._pool.shutdown(cancel_futures=True)
        self._scratch.cleanup()

    def guess(self) -> None:
        """Compile the kernels of the ops that come with graphllm, the longest first: most models need most of them."""
        for source in sources():
            self.add(source)

    def expect(self, sources: Collection[Path]) -> None:
        """Compile these, and none of the others that have not begun."""
        for source in [s for s, future in self._own.items() if s not in sources and future.cancel()]:
            del self._own[source]
        for source in sources:
            self.add(source)

    def add(self, source: Path) -> None:
        """Compile a hand-written source, unless that was asked for before."""
        if source not in self._own:
            self._own[source] = self._pool.submit(self._compile, source)

    def link(
        self,
        sources: Collection[Path],
        kernels: Collection[str],
        header: str,
        command: Callable[[Path, Path], list[str]],
        calls: str,
        output: Path,
    ) -> None:
        """The library of hand-written ``sources`` and generated ``kernels``. Raises BuildError when a compiler fails.

        header: what stands above generated kernels.
        command: how to compile a source of them to an object.
        calls: a source that needs neither.
        """
        for source in sources:
            self.add(source)
        texts = sorted(kernels)
        count = max(1, min(self._cores, len(texts) // _KERNELS_A_UNIT))
        with concurrent.futures.ThreadPoolExecutor(count + 1) as pool:
            plain = pool.submit(self._compile_text, "calls", calls, _plain_command)
            units = [(f"generated{i}", "\n".join([header, *texts[i::count]])) for i in range(count)]
            generated = [pool.submit(self._compile_text, name, text, command) for name, text in units]
        objects = [future.result() for future in (plain, *generated, *(self._own[s] for s in sources))]
        start = time.perf_counter()
        self._compilers.run(compiler_command(sorted(objects), output))
        self._took("link", start)

    def library(self, source: Path, output: Path, calls: str = "") -> None:
        """A library of one hand-written source. calls: a source that has how its kernels are called, where it does not
        say so itself. Raises BuildError when a compiler fails."""
        self.add(source)
        objects = [self._own[source].result()]
        if calls:
            objects.append(self._compile_text(f"calls-{output.stem}", calls, _plain_command))
        output.parent.mkdir(parents=True, exist_ok=True)
        partial = output.with_name(f".{os.getpid()}-{output.name}")
        self._compilers.run(link_command(objects, partial))
        partial.replace(output)

    def _compile(self, source: Path) -> Path:
        return self._made(f"{source.parent.name}/{source.name}", content(source), lambda to: _plain_command(source, to))

    def _compile_text(self, name: str, text: str, command: Callable[[Path, Path], list[str]]) -> Path:
        unit = Path(self._scratch.name) / f"{name}.cpp"
        unit.write_text(text)
        return self._made(unit.name, text.encode(), lambda to: command(unit, to))

    def _made(self, name: str, content: bytes, command: Callable[[Path], list[str]]) -> Path:
        """The object of a source, compiled unless it is there. Where files lie is not part of its name."""
        words = [w for w in command(Path("/")) if not w.startswith(("/", "-I"))]
        known = json.dumps([*self._known, name, words]).encode()
        made = self._folder / f"{hashlib.sha256(known + content).hexdigest()[:32]}.o"
        if not made.exists():
            start, partial = time.perf_counter(), self._folder / f".{os.getpid()}-{made.name}"
            self._compilers.run(command(partial))
            partial.replace(made)
            self._took(name, start)
        return made

    def _took(self, name: str, start: float) -> None:
        self.seconds[name] = round(time.perf_counter() - start, 3)


def _plain_command(source: Path, output: Path) -> list[str]:
    return compiler_command([source], output, link=False)


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


class _Compilers:
    """Compilers that run, each the leader of a process group."""

    def __init__(self) -> None:
        self._lock, self._killed = threading.Lock(), False
        self._running: set[subprocess.Popen[str]] = set()

    def run(self, command: Sequence[str]) -> None:
        """Run one to its end. Raises BuildError when it fails, or when all were killed."""
        with self._lock:
            if self._killed:
                raise BuildError("stopped")
            try:
                compiler = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
                )
            except FileNotFoundError as missing:
                raise BuildError(
                    f"{command[0]} is not installed; compiling for a CPU needs it (running does not)"
                ) from missing
            self._running.add(compiler)
        _, said = compiler.communicate()
        with self._lock:
            self._running.discard(compiler)
        if compiler.returncode:
            raise BuildError(f"{' '.join(command)}\n{said[-4000:]}")

    def kill(self) -> None:
        """Kill those that run, and let none begin."""
        with self._lock:
            self._killed = True
            for compiler in self._running:
                if compiler.poll() is None:
                    os.killpg(compiler.pid, signal.SIGTERM)  # so that it deletes its own temporary files
