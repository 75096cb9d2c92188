"""A model without an artifact begins with prebuilt kernels; its own code is compiled behind, taken between requests."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphllm import LLM, SamplingParams
from graphllm.config import ConfigError, EngineArgs, Env
from graphllm.embedded import ARTIFACT_DIR
from graphllm.host.build_lock import build_lock
from graphllm.loading.artifact.behind import Order, compile_behind, failure_of
from graphllm.loading.artifact.build import artifact_folder, begins_prebuilt, take_artifact
from graphllm.loading.artifact.resolve import compile_config
from graphllm.loading.checkpoint.source import Source, find_source
from graphllm.program.artifact import Artifact
from graphllm.runtime import graphs
from graphllm.runtime.binding import bind
from tests.artifacts import LIMITS, artifact_of
from tests.waiting import PATIENCE, until

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [3 + i, 7, 11 * (i + 1)]} for i in range(6)]
TAKEN, LATER = "runs from here on", "taken at the next start"


@pytest.fixture
def args(checkpoint: Path, prebuilt_artifact: Path, cache: Path) -> EngineArgs:
    """Of a model without an artifact, with kernels that were made for other tests."""
    _give_kernels(prebuilt_artifact, cache)
    return EngineArgs(str(checkpoint), target="cpu", optimize="behind", **LIMITS)


@pytest.fixture
def source(args: EngineArgs) -> Source:
    return find_source(args)


@pytest.fixture
def place(args: EngineArgs, source: Source) -> Path:
    """Where the model's own code will be."""
    return artifact_folder(source, compile_config(source.config, args), Env.read())


def _copied(artifact: Path, place: Path) -> None:
    """As a compile does: it is there whole, or not."""
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(artifact, place.with_name(".copied"))
    place.with_name(".copied").rename(place)


def _texts(llm: LLM, prompts: list[Any] = PROMPTS) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, GREEDY, use_tqdm=False)]


def test_taken_between_requests(
    args: EngineArgs, place: Path, compiled_artifact: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Texts before and after are those of an engine that waits for its compiler."""
    caplog.set_level(logging.INFO)
    with build_lock(place):  # nobody else compiles
        llm = LLM(str(checkpoint), target="cpu", optimize="behind", **LIMITS)
    with llm, LLM(str(checkpoint), artifact=str(compiled_artifact)) as waited:
        assert not place.exists()
        before = _texts(llm)
        _copied(compiled_artifact, place)
        until(lambda: _texts(llm, PROMPTS[:1]) and TAKEN in caplog.text)
        assert before == _texts(llm) == _texts(waited)
        assert len({tuple(t) for t in before}) > 3
    with LLM(str(checkpoint), target="cpu", optimize="behind", **LIMITS) as again:  # it is there from the start
        assert _texts(again) == before
    assert caplog.text.count(TAKEN) == 1


def test_no_request_waits_for_the_programs_to_be_bound(
    args: EngineArgs,
    place: Path,
    compiled_artifact: Path,
    checkpoint: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread has them ready for what ran before; the requests around the change bind nothing."""
    caplog.set_level(logging.INFO)
    by: list[str] = []

    def noted(*given: Any) -> Any:
        by.append(threading.current_thread().name)
        return bind(*given)

    with build_lock(place):
        llm = LLM(str(checkpoint), target="cpu", optimize="behind", **LIMITS)
    with llm:
        _texts(llm, PROMPTS[:1])
        monkeypatch.setattr(graphs, "bind", noted)
        _copied(compiled_artifact, place)
        until(lambda: _texts(llm, PROMPTS[:1]) and TAKEN in caplog.text)
    assert set(by) == {"graphllm-successor"}


@pytest.mark.parametrize("optimize", ["next_start", "first"])
def test_not_taken_while_running(
    optimize: str, args: EngineArgs, place: Path, compiled_artifact: Path, checkpoint: Path
) -> None:
    if optimize == "first":
        _copied(compiled_artifact, place)
        assert take_artifact(find_source(args), replace_args(args, optimize), _quiet).artifact.folder == place
        return
    with build_lock(place):
        taken = take_artifact(find_source(args), replace_args(args, optimize), _quiet)
    assert (taken.artifact.config.backend, taken.successor) == ("prebuilt", None)


def replace_args(args: EngineArgs, optimize: str) -> EngineArgs:
    """The same, with another setting."""
    return EngineArgs(args.model, target="cpu", optimize=optimize, **LIMITS)


def test_an_artifact_that_does_not_fit_waits(
    args: EngineArgs, place: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with build_lock(place):
        llm = LLM(str(checkpoint), target="cpu", optimize="behind", **LIMITS)
    with llm:
        before = _texts(llm)
        _copied(artifact_of(checkpoint, backend="eager", **{**LIMITS, "max_num_seqs": 3}), place)
        until(lambda: LATER in caplog.text)
        assert _texts(llm) == before
    assert TAKEN not in caplog.text


def test_without_a_compiler(args: EngineArgs, cache: Path) -> None:
    """Nothing on PATH: the first answer needs none."""
    command = [
        sys.executable,
        "-m",
        "graphllm.cli",
        "run",
        "--model",
        args.model,
        "--prompt",
        "hello",
        "--max-tokens",
        "4",
    ]
    command += [word for name, value in LIMITS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    clean = {k: v for k, v in os.environ.items() if k != "GRAPHLLM_OPTIMIZE"} | {"PATH": str(cache)}
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    (only,) = (cache / "artifacts").iterdir()
    assert Artifact.open(only).config.backend == "prebuilt"


def test_a_compiler_that_fails_is_said_once(
    args: EngineArgs, source: Source, place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next start says why, and does not try again."""
    import msgspec

    config = compile_config(source.config, args)
    order = Order({"folder": str(tmp_path / "gone")}, "x", None, config, str(place))
    place.parent.mkdir(parents=True)
    command = [sys.executable, "-m", "graphllm.loading.artifact.behind"]
    done = subprocess.run(
        command, input=msgspec.json.encode(order, enc_hook=str), capture_output=True, timeout=PATIENCE
    )
    assert done.returncode == 1
    assert "is not a folder" in (failure_of(place) or "")
    take_artifact(source, args, _quiet)
    assert "the model's own code could not be compiled" in caplog.text
    assert "is not a folder" in caplog.text


def test_who_waits(args: EngineArgs, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    config, env = compile_config(source.config, args), Env.read()
    assert begins_prebuilt(source, config, env)
    assert not begins_prebuilt(source, replace(config, deterministic=True), env)
    assert not begins_prebuilt(source, replace(config, backend="eager"), env)
    monkeypatch.setenv("GRAPHLLM_OPTIMIZE", "sometimes")
    with pytest.raises(ConfigError, match=r"GRAPHLLM_OPTIMIZE is 'sometimes': give one of behind, next_start, first"):
        take_artifact(source, EngineArgs(args.model, target="cpu", **LIMITS), _quiet)


def test_who_compiles_takes_only_idle_time(args: EngineArgs, source: Source, place: Path) -> None:
    """Its priority counts only among processes of one session; Ctrl-C goes to a group that it is not in."""
    compile_behind(source, compile_config(source.config, args), Env.read(), place)
    children = [int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]
    (child,) = (
        pid for pid in children if b"graphllm.loading.artifact.behind" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    try:
        assert (os.getsid(child), os.getpgid(child)) == (os.getsid(0), child)
        until(lambda: os.sched_getscheduler(child) == os.SCHED_IDLE)
    finally:
        os.killpg(child, signal.SIGKILL)


@pytest.mark.thorough
def test_compiled_behind(args: EngineArgs, place: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By a real compiler, while requests are answered; the process ends by itself."""
    caplog.set_level(logging.INFO)
    with LLM(str(checkpoint), target="cpu", optimize="behind", **LIMITS) as llm:
        before = _texts(llm)
        until(lambda: _texts(llm, PROMPTS[:1]) and TAKEN in caplog.text)
        assert _texts(llm) == before
    manifest = json.loads((place / "manifest.json").read_text())
    assert json.loads(manifest["manifest"])["factors"]["compile"]["backend"] == "inductor"
    assert failure_of(place) is None


def _quiet(stage: str, done: int, total: int) -> None:
    """Nobody looks."""


def test_the_artifact_that_ships_is_of_this_tree(tmp_path: Path) -> None:
    """It is what the compiler makes now, and calls the kernels that are here now."""
    from bench.training.artifact import make

    made = make(tmp_path / "artifact")
    for file in ("program.json", "weights.json", *(f"pieces/{p.name}" for p in sorted((made / "pieces").iterdir()))):
        there = ARTIFACT_DIR / file
        fresh = there.exists() and there.read_text() == (made / file).read_text()
        assert fresh, f"{file}: run: python -m bench.training.artifact"


def test_the_embedded_model_needs_neither_compiler_nor_torch(cache: Path, prebuilt_artifact: Path) -> None:
    """Its first answer, with nothing in the cache and nothing on PATH."""
    _give_kernels(prebuilt_artifact, cache)
    program = (
        "import sys; from graphllm import LLM, SamplingParams; llm = LLM(target='cpu');"
        "print(llm.generate('What is 12 + 7?', SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids);"
        "print('torch' in sys.modules)"
    )
    clean = {k: v for k, v in os.environ.items() if k != "GRAPHLLM_OPTIMIZE"} | {"PATH": str(cache)}
    done = subprocess.run([sys.executable, "-c", program], env=clean, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
    assert not (cache / "artifacts").exists()


def _give_kernels(artifact: Path, cache: Path) -> None:
    """Those that were made for other tests, where the package has none of its own."""
    made = artifact.parents[1] / "kernels"
    if made.is_dir():
        shutil.copytree(made, cache / "kernels")
