"""C++ compiled in the background while Python goes on, and objects kept by content for later compiles."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from graphllm.compile import inductor
from graphllm.ir.kernels import HEADERS, compiler_command
from graphllm.machine import compiler_version, detect_target, usable_cores, versions

_MOST_UNITS = 4  # of generated kernels; each reads the large header


class BuildError(RuntimeError):
    """A compiler failed. The message holds the end of what it printed."""


class Objects:
    """The objects of one library, compiled by g++ for this machine.

    Hand-written kernels are compiled from the moment they are asked for. The compilers of generated ones are started
    before there is any: they read torch's header, which takes longer than the kernels do, and wait.

    scratch: a folder for sources, and for objects unless ``kept`` is the folder where they stay for later compiles,
    named by a digest of everything they depend on. seconds: of each compiler that has run, by its source.
    """

    def __init__(self, scratch: Path, kept: Path | None = None) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        self._scratch, self._folder = scratch, kept or scratch
        self._folder.mkdir(parents=True, exist_ok=True)
        self._pool = concurrent.futures.ThreadPoolExecutor(usable_cores())
        self._own: dict[Path, concurrent.futures.Future[Path]] = {}
        self._waiting: list[_Waiting] = []
        target = detect_target("cpu")
        self._machine = [compiler_version(), target.name, target.arch, versions(target)]
        self._headers = b"".join(h.read_bytes() for h in sorted(HEADERS.glob("*.h")))
        self.seconds: dict[str, float] = {}

    def begin(self) -> None:
        """Start the compilers of generated kernels: one for each core beside the one that generates."""
        for i in range(max(1, min(usable_cores() - 1, _MOST_UNITS))):
            unit = self._scratch / f"generated{i}.cpp"
            self._waiting.append(_Waiting(unit, self._partial(unit.stem)))

    def add(self, source: Path) -> None:
        """Compile a hand-written source, unless that was asked for before."""
        if source not in self._own:
            self._own[source] = self._pool.submit(self._compile, source)

    def link(self, kernels: Sequence[str], output: Path) -> None:
        """The library of what was added and of the generated ``kernels``. Raises BuildError when a compiler fails."""
        if not self._waiting:
            self.begin()
        texts = sorted(kernels)
        shares = [inductor.join_cpp(texts[i :: len(self._waiting)]) for i in range(len(self._waiting))]
        generated = list(self._pool.map(self._finish, self._waiting, shares))
        own = [future.result() for future in self._own.values()]
        start = time.perf_counter()
        _checked(compiler_command([*sorted(own), *generated], output))
        self._took("link", start)

    def close(self) -> None:
        """Stop what still runs and remove the scratch folder's files."""
        for waiting in self._waiting:
            waiting.stop()
        self._pool.shutdown(cancel_futures=True)
        for file in self._scratch.iterdir():
            file.unlink()
        self._scratch.rmdir()

    def _compile(self, source: Path) -> Path:
        made = self._place(source, compiler_command([source], source, link=False), self._headers + source.read_bytes())
        if not made.exists():
            start, partial = time.perf_counter(), self._partial(made.stem)
            _checked(compiler_command([source], partial, link=False))
            partial.replace(made)
            self._took(f"{source.parent.name}/{source.name}", start)
        return made

    def _finish(self, waiting: _Waiting, text: str) -> Path:
        made = self._place(waiting.unit, waiting.command, text.encode())
        if made.exists():
            waiting.stop()
        else:
            start = time.perf_counter()
            waiting.finish(text).replace(made)
            self._took(waiting.unit.name, start)
        return made

    def _place(self, source: Path, command: Sequence[str], content: bytes) -> Path:
        """Where the object of a source is kept. Where files lie does not matter, but objects hold the source's name."""
        words = [w for w in command if not w.startswith(("-I", "/"))]
        known = json.dumps([*self._machine, source.name, words]).encode()
        return self._folder / f"{hashlib.sha256(known + content).hexdigest()[:32]}.o"

    def _partial(self, name: str) -> Path:
        return self._folder / f".{os.getpid()}-{name}.o"

    def _took(self, name: str, start: float) -> None:
        self.seconds[name] = round(time.perf_counter() - start, 3)


class _Waiting:
    """A compiler that reads the header of generated kernels and then waits on its standard input for their text."""

    def __init__(self, unit: Path, output: Path) -> None:
        unit.write_text(f'{inductor.CPP_HEADER}\n#include "/dev/stdin"\n')
        command = inductor.cpp_compile_command(unit, output)
        self.unit, self.command, self._output = unit, command, output
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        except FileNotFoundError as missing:
            raise _not_installed(command) from missing

    def finish(self, text: str) -> Path:
        """Give the text; the object, when it is done."""
        _, problem = self._process.communicate(text)
        if self._process.returncode:
            raise _failed(self.command, problem)
        return self._output

    def stop(self) -> None:
        """It is not needed, or no longer: it removes its own temporary files."""
        self._process.terminate()
        for stream in (self._process.stdin, self._process.stderr):
            if stream is not None:
                stream.close()
        self._process.wait()
        self._output.unlink(missing_ok=True)


def _checked(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as missing:
        raise _not_installed(command) from missing
    if done.returncode:
        raise _failed(command, done.stderr)


def _not_installed(command: list[str]) -> BuildError:
    return BuildError(f"{command[0]} is not installed; compiling for a CPU needs it (running does not)")


def _failed(command: list[str], printed: str) -> BuildError:
    return BuildError(f"{' '.join(command)}\n{printed[-4000:]}")
