"""`graphllm run` stopped in the middle, as real processes: what is done stays, and the same command goes on."""

from __future__ import annotations

import json
import os
import random
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import thorough
from tests.waiting import PATIENCE, until

COMMAND = [sys.executable, "-c", "from graphllm.cli import main; main()"]


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def _write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


def _requests(count: int) -> list[dict[str, Any]]:
    """Lines of both forms; some cannot run, half are sampled."""
    lines: list[dict[str, Any]] = []
    for i in range(count):
        text = f"{i} cats \u2028 sat"
        params = {"max_tokens": 5 + i % 30, "ignore_eos": True, "temperature": -1 if i % 17 == 5 else i % 2, "seed": i}
        if i % 3:
            body = {"model": "any", "messages": [{"role": "user", "content": text}], **params}
            lines.append({"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body})
        else:
            lines.append({"id": f"r{i}", "prompt": text, **params})
    return lines


def _answers(path: Path) -> list[tuple[str, object]]:
    """Ids and results without what differs between two runs."""
    found: list[tuple[str, object]] = []
    for row in _rows(path):
        if "custom_id" in row:
            body = {k: v for k, v in row["response"]["body"].items() if k not in ("id", "created", "usage")}
            found.append((row["custom_id"], (row["response"]["status_code"], body)))
        else:
            found.append((row["id"], {k: v for k, v in row.items() if k != "usage"}))
    return found


def _begin(limit: int) -> None:
    """In a process to be stopped: no file beyond ``limit`` bytes, and who looks at its file goes first on a busy
    machine, lest it ends in the meantime. Ctrl-C stops it, also where a shell started the tests in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    os.nice(15)


def _lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize(
    ("count", "ways"),
    [
        (60, ["INT"]),  # so many that the first ones are written well before the last
        thorough(160, ["INT", "full"]),
        pytest.param(400, ["INT", "TERM", "KILL", "full", "edited"], marks=pytest.mark.slow),
    ],
)
def test_stopped_and_continued(
    count: int, ways: list[str], cli: Any, checkpoint: Path, eager_artifact: Path, tmp_path: Path
) -> None:
    """Whatever stops a batch, in the end every request has the result it has without that, once and in order."""
    lines = _requests(count)
    file, out = _write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"

    def arguments(source: Path, output: Path) -> list[str]:
        model = ("--model", checkpoint, "--artifact", eager_artifact)
        return [*map(str, ("run", source, *model, "-q", "-o", output))]

    for number, way in enumerate(ways, 1):
        before, enough = _lines_in(out), number * count // (len(ways) + 2)
        limit = out.stat().st_size + 300 * (enough - before) if way == "full" else resource.RLIM_INFINITY
        process = subprocess.Popen(
            [*COMMAND, *arguments(file, out)], stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda limit=limit: _begin(limit),
        )  # fmt: skip
        if way != "full":
            until(lambda p=process, n=enough: p.poll() is not None or _lines_in(out) >= n)
            process.send_signal(getattr(signal, f"SIG{way}", signal.SIGINT))
        _, said = process.communicate(timeout=PATIENCE)
        done = _lines_in(out)
        assert before < done < count
        expected = {"INT": 130, "TERM": 143, "KILL": -9, "full": 1, "edited": 130}[way]
        assert process.returncode == expected, said
        if way == "KILL":
            continue
        (told,) = said.splitlines()
        reason = f"cannot write {out}: File too large; " if way == "full" else "interrupted: "
        assert told.startswith(f"graphllm: {reason}{done} of {count} requests are done")
        assert "run the same command again to go on" in told
        if way == "edited":
            changed = dict(_answers(out))
            lines = [{"id": "new", "prompt": "on top", "max_tokens": 4, "temperature": 0}, *lines]
            lines[5] |= {"id": "r4 renamed"} if "id" in lines[5] else {"custom_id": "r4 renamed"}
            lines[1]["max_tokens"] += 1
            del lines[10]
            lines[20:40] = random.Random(0).sample(lines[20:40], 20)
            _write(file, lines)
            assert {"r0", "r4", "r9"} <= changed.keys()
    done = cli(*arguments(file, out))
    whole = tmp_path / "whole.jsonl"
    assert done.code == cli(*arguments(file, whole)).code == 1  # some cannot run
    assert [id for id, _ in _answers(out)] == [str(line.get("custom_id", line.get("id"))) for line in lines]
    assert _answers(out) == _answers(whole)
    old = tmp_path / "out.jsonl.old"
    assert [id for id, _ in _answers(old)] == ["r0", "r9"] if "edited" in ways else not old.exists()


@pytest.fixture
def shell(checkpoint: Path, eager_artifact: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """shell(script): bash, in which RUN is `graphllm run` of 20 prompts, in a folder of its own."""
    _write(tmp_path / "in.jsonl", [{"id": f"r{i}", "prompt": f"hello {i}"} for i in range(20)])
    model = ("--model", checkpoint, "--artifact", eager_artifact, "--temperature", 1.5, "--max-tokens", 4)
    start = shlex.join(map(str, (*COMMAND, "run", *model, "-q")))

    def call(script: str) -> subprocess.CompletedProcess[str]:
        text = f'RUN() {{ {start} "$@"; }}; set -o pipefail; ulimit -v 16000000; {script}'
        return subprocess.run(["bash", "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)

    return call


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "status", "out", "err"),
    [
        ("RUN in.jsonl -o /dev/full", 1, "", "graphllm: cannot write /dev/full: No space left on device; 0 of 20"),
        ("RUN in.jsonl > /dev/full", 1, "", "graphllm: cannot write the output: No space left on device"),
        ("RUN in.jsonl -o /dev/null", 0, "", ""),
        ("mkfifo f; cat f | wc -l & RUN in.jsonl -o f && wait", 0, "20\n", ""),
        ("RUN in.jsonl -o /dev/stdout | wc -l", 0, "20\n", ""),
        ("RUN in.jsonl | head -n 0", 141, "", ""),
        ("RUN in.jsonl -o - | head -n 1 | cut -c 1-11", 141, '{"id": "r0"\n', ""),
        ("RUN in.jsonl -o in.jsonl; RUN - -o in.jsonl < in.jsonl; wc -l < in.jsonl", 0, "20\n", "is the input file"),
        ("ln in.jsonl h; ln -s h s; RUN in.jsonl -o s", 2, "", "graphllm: output: s is the input file"),
        ("LC_ALL=C PYTHONIOENCODING=ascii RUN in.jsonl -p é > out; test $(wc -l < out) -gt 20", 0, "", ""),
    ],
)
def test_where_output_goes(script: str, status: int, out: str, err: str, shell: Any) -> None:
    done = shell(script)
    assert (done.returncode, done.stdout) == (status, out), done.stderr
    assert err in done.stderr if err else not done.stderr
    assert "Traceback" not in done.stderr
