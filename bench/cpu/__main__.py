"""`python -m bench cpu`: graphllm beside every system it finds installed, on one model, in turn.

Writes a checkpoint of random weights in the shape of Qwen2.5-0.5B and converts it for each system. Then every round
starts each system once in a fresh process and measures it: first token, decode, prefill. Medians over the rounds go
to OUT/NAME.json, OUT/NAME.md and OUT/NAME.svg. `pip install "graphllm[bench-cpu]"` installs the others.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

from bench.cpu import report
from bench.cpu.checkpoint import make_checkpoint, qwen2_config
from bench.cpu.peer import Peer, Workload, find_peers
from bench.cpu.worker import Task
from bench.real_size import cpu_name

_MAX_LEN, _BATCH = 1152, 8
_LIMIT = 600.0  # seconds of one process
_TURN = 150.0  # seconds after which a turn with the machine ends
_TAIL = 400  # characters of a failed process's output


def main() -> None:
    """Prepare, measure, report."""
    parser = argparse.ArgumentParser(
        prog="python -m bench cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--name", default="cpu_peers", help="of the result files")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--layers", type=int, help="fewer than the shape has, to try things out")
    parser.add_argument("--only", help="only systems whose name has one of these words, separated by commas")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "graphllm-bench-cpu")
    parser.add_argument("--lock", type=Path, help="hold this file's lock while a process is measured")
    args = parser.parse_args()
    config = qwen2_config(args.layers)
    work = args.work / f"{config['num_hidden_layers']}-layers"
    model = Workload(work / "checkpoint", work, config, args.threads, _MAX_LEN, _BATCH)
    make_checkpoint(model.checkpoint, config)
    lock = Lock(args.lock)
    wanted = args.only.lower().split(",") if args.only else [""]
    peers = [p for p in find_peers().values() if any(w in p.name.lower() for w in wanted)]
    measured = report.Measured(
        about={"machine": cpu_name(), "system": platform.platform(), "threads": args.threads, "rounds": args.rounds,
               "layers": config["num_hidden_layers"], "command": command(args),
               "date": time.strftime("%Y-%m-%d"), "versions": versions(peers)},
        parameters=report.count_parameters(config),
    )  # fmt: skip
    ready = []
    for peer in peers:
        print(f"{peer.name}: preparing", file=sys.stderr, flush=True)
        reason = peer.missing() or prepare(peer, model, lock)
        if reason is None:
            ready.append(peer)
        else:
            print(f"{peer.name}: not available, {reason}", file=sys.stderr, flush=True)
            measured.missing[peer.name] = reason
    for number in range(args.rounds):
        warm(model.work)
        measured.machine.append(probe(args.threads, lock))
        for peer in ready:
            if peer.name in measured.missing:
                continue
            try:
                figures = run_worker(Task("measure", peer.name, model, 0.0, number), lock)
            except ProcessFailedError as failure:
                measured.missing[peer.name] = f"failed: {failure}"
            else:
                measured.add(peer, figures)
                print(f"round {number + 1}, {peer.name}: {figures}", file=sys.stderr, flush=True)
        measured.machine.append(probe(args.threads, lock))
        lock.release()
        report.write(args.out, args.name, measured)


def command(args: argparse.Namespace) -> str:
    """What to type to measure the same again."""
    parts = {"out": args.out, "rounds": args.rounds, "threads": args.threads, "layers": args.layers, "only": args.only}
    return " ".join(["python -m bench cpu", *(f"--{n} {v}" for n, v in parts.items() if v is not None)])


def probe(threads: int, lock: Lock) -> dict[str, float]:
    """What the machine can do right now; shared ones differ from minute to minute."""
    figures: dict[str, float] = json.loads(fresh([sys.executable, "-m", "bench.cpu.machine", str(threads)], lock))
    return figures


class ProcessFailedError(RuntimeError):
    """A process that ended badly; the message is the end of what it printed."""


class Lock:
    """A file's lock, with which several users of a machine take turns; None takes no turns. It is held over several
    processes, because waiting for it may take long, but a new one is not started after some time."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._handle: IO[str] | None = None
        self._since = 0.0

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold it while one process runs."""
        if self._handle is not None and time.monotonic() - self._since > _TURN:
            self.release()
        if self._file is not None and self._handle is None:
            self._handle = self._file.open("a")
            fcntl.flock(self._handle, fcntl.LOCK_EX)
            self._since = time.monotonic()
        yield

    def release(self) -> None:
        """Let others have it."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None
            time.sleep(1)  # for those who wait


def prepare(peer: Peer, model: Workload, lock: Lock) -> str | None:
    """Convert the checkpoint for it; why that failed."""
    try:
        run_worker(Task("prepare", peer.name, model, 0.0, 0), lock)
    except ProcessFailedError as failure:
        return f"preparation failed: {failure}"
    return None


def run_worker(task: Task, lock: Lock) -> dict[str, float]:
    """What the task gave. Raises ProcessFailedError."""
    threads = {"OMP_NUM_THREADS": str(task.model.threads)}

    def arguments() -> list[str]:
        started = dataclasses.replace(task, begun=time.perf_counter())
        return [sys.executable, "-m", "bench.cpu.worker", started.to_json()]

    figures: dict[str, float] = json.loads(fresh(arguments, lock, threads))
    return figures


def fresh(command: Sequence[str] | Callable[[], Sequence[str]], lock: Lock, env: dict[str, str] | None = None) -> str:
    """The last line that a process printed. command: its arguments, or what gives them right before it starts. Raises
    ProcessFailedError."""
    with lock.held(), tempfile.TemporaryFile("w+") as errors:
        arguments = command() if callable(command) else command
        try:
            done = subprocess.run(
                arguments,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                timeout=_LIMIT,
                env={**os.environ, **(env or {})},
            )
        except subprocess.TimeoutExpired as late:
            raise ProcessFailedError(f"no end within {_LIMIT:g} s") from late
        errors.seek(0)
        if done.returncode:
            raise ProcessFailedError(f"status {done.returncode}: {errors.read()[-_TAIL:].strip()}")
        return done.stdout.strip().splitlines()[-1]


def warm(folder: Path) -> None:
    """Have all files in the page cache."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb", buffering=0) as handle:
                while handle.read(1 << 24):
                    pass


def versions(peers: list[Peer]) -> dict[str, str]:
    """Of all packages that are installed."""
    found = {"python": platform.python_version()}
    for package in sorted({name for peer in peers for name in peer.packages}):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


if __name__ == "__main__":
    main()
