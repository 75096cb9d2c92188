"""Processes that find an empty cache compile an artifact once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from graphllm.host.build_lock import build_lock
from tests.waiting import PATIENCE

# Prints "compiling" when it begins to compile; goes on when the file "go" is there.
SCRIPT = """
import sys, time
from pathlib import Path
from graphllm.config import EngineArgs
from graphllm.loading.artifact.build import take_artifact
from graphllm.loading.checkpoint.source import open_source

def progress(stage, done, total):
    if stage == "trace":
        print("compiling", flush=True)
    while not Path(sys.argv[2]).exists():
        time.sleep(0.01)

args = EngineArgs(target="cpu", backend="eager", max_num_seqs=2, max_num_batched_tokens=16)
print(take_artifact(open_source(sys.argv[1]), args, progress)[0].folder, flush=True)
"""
WAITS = "another process compiles this artifact; waiting for it"


class Process:
    """A process that wants the artifact of a checkpoint."""

    def __init__(self, checkpoint: Path, cache: Path) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(checkpoint), str(cache / "go")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "GRAPHLLM_CACHE": str(cache)},
        )  # fmt: skip

    def says(self, text: str, error: bool = False) -> None:
        """Wait for a line."""
        pipe = self._popen.stderr if error else self._popen.stdout
        assert pipe is not None
        assert text in pipe.readline()

    def kill(self) -> None:
        """End it at once."""
        self._popen.send_signal(signal.SIGKILL)
        self._popen.wait()

    def end(self) -> list[str]:
        """All that it still prints."""
        out, error = self._popen.communicate(timeout=PATIENCE)
        assert self._popen.returncode == 0, error
        return out.splitlines()


def _one_waits(checkpoint: Path, folder: Path) -> tuple[Process, Process]:
    """A process that compiles, and may go on now, and one that waits for it."""
    first = Process(checkpoint, folder)
    first.says("compiling")
    second = Process(checkpoint, folder)
    second.says(WAITS, error=True)
    (folder / "go").touch()
    return first, second


def test_the_second_waits_and_takes_what_the_first_has_made(checkpoint: Path, tmp_path: Path) -> None:
    first, second = _one_waits(checkpoint, tmp_path)
    place = first.end()
    assert second.end() == place
    assert [f.name for f in (tmp_path / "artifacts").iterdir()] == [Path(place[0]).name]


@pytest.mark.thorough
def test_a_dead_process_holds_nobody_up(checkpoint: Path, tmp_path: Path) -> None:
    first, second = _one_waits(checkpoint, tmp_path)
    first.kill()
    assert second.end()[0] == "compiling"


def test_one_at_a_time(tmp_path: Path) -> None:
    """Whoever has waited holds the lock that others see, although its file is removed each time."""
    inside, most, runs = 0, 0, 0

    def work() -> None:
        nonlocal inside, most, runs
        for _ in range(20):
            with build_lock(tmp_path / "place"):
                inside += 1
                most = max(most, inside)
                time.sleep(0.001)
                inside -= 1
                runs += 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, runs) == (1, 80)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_writing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The build says what is wrong there."""
    (tmp_path / "file").touch()
    with build_lock(tmp_path / "file" / "place"):
        assert not caplog.records
