"""What the tests share: a tiny random Llama with a tokenizer, artifacts of it, and the command line as a function.

Session fixtures live in one folder that all xdist workers share, each made by whoever comes first.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from graphllm.host.machine import detect_target
from graphllm.program.artifact import source_digest
from tests.tiers import ON_GPU, both_tiers
from tests.times import DURATIONS, unit_of
from tests.waiting import PATIENCE

if detect_target("auto").device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when a Triton kernel is defined, so before any test imports the ops
os.environ.setdefault("GRAPHLLM_OPTIMIZE", "first")  # tests of prebuilt kernels say otherwise
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # processes that tests start take as long as users' do

pytest_plugins = ["tests.recording"]
CACHE = Path(__file__).parents[1] / "build" / "test-cache"
CORPUS = ["hello world, the cat sat on the mat", "what is the answer to the question", "a list of words in a row"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|user|>", "<|system|>", "<|bot|>"]


logging.getLogger("torch.__trace").disabled = True  # pytest collects logs, and the compiler's fill pages


@dataclass(frozen=True)
class Done:
    """A finished command: exit status, both outputs."""

    code: int
    out: str
    err: str


def pytest_configure(config: pytest.Config) -> None:
    """Artifacts of other sources would only fill the disk."""
    tier = "test" if "not thorough" in config.getoption("markexpr") else "thorough"
    os.environ["GRAPHLLM_TEST_TIER"] = tier  # read by tiers.py
    if "PYTEST_XDIST_WORKER" not in os.environ and not config.getoption("collectonly"):
        sources, stamp = source_digest(), CACHE / "sources"
        if not stamp.exists() or stamp.read_text() != sources:
            shutil.rmtree(CACHE / "artifacts", ignore_errors=True)
            CACHE.mkdir(parents=True, exist_ok=True)
            stamp.write_text(sources)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``: a worker takes the longest file that is left, so that all end together. The ops of
    test_ops.py, which have nothing in common, are files of their own."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LongestFirst(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

        def _reschedule(self, node: Any) -> None:
            if node in self.registered_collections:  # else it has just begun in place of one that died
                super()._reschedule(node)

        def remove_node(self, node: Any) -> str | None:
            """A test that ended its worker has failed, and is not run again; others get the rest of its file."""
            units = self.assigned_work.pop(node)
            left = [test for unit in units.values() for test, done in unit.items() if not done]
            for unit in units.values() if left else ():
                unit |= {left[0]: True} if left[0] in unit else {}
            self.workqueue.update({name: unit for name, unit in units.items() if not all(unit.values())})
            for other in self.assigned_work:
                self._reschedule(other)
            return left[0] if left else None

    config.option.loadscopereorder = False  # by numbers of tests, which say little
    return LongestFirst(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--as-given", action="store_true", help="files in the order in which they are named")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The order in which workers take files: the longest first, as they were recorded; new ones before them."""
    if not config.getoption("as_given"):
        recorded = json.loads(DURATIONS.read_text())
        tier = recorded["test-all" if both_tiers() else "test"]
        names = {unit_of(item.nodeid) for item in items}
        seconds = {name: tier.get(name, 0.0 if name in recorded["test-all"] else 1e9) for name in names}
        items.sort(key=lambda item: -seconds[unit_of(item.nodeid)])


@pytest.fixture(scope="session", autouse=True)
def compiler(shared: Callable[[str, Callable[[Path], object]], Path]) -> Iterator[None]:
    """g++ compiles what is the same only once for all tests: see cached_compiler.py."""
    real = shutil.which("g++")

    def make(folder: Path) -> None:
        (folder / "objects").mkdir(parents=True)
        command = [sys.executable, "-IS", Path(__file__).with_name("cached_compiler.py"), real, folder / "objects"]
        script = folder / "g++"
        script.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, command))} "$@"\n')
        script.chmod(0o755)

    with pytest.MonkeyPatch.context() as patch:
        if real is not None:
            patch.setenv("PATH", str(shared("compiler", make)), prepend=os.pathsep)
        yield


@pytest.fixture(scope="session", autouse=True)
def _shared_cache() -> Iterator[None]:
    """One artifact cache for all tests and runs; what other sources made was removed as the run began."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHLLM_CACHE", str(CACHE))
        yield


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty artifact cache, for tests of what is there and what is not; all others share one (`_shared_cache`)."""
    monkeypatch.setenv("GRAPHLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """shared(name, make): the folder ``name`` that ``make`` filled, once for all workers of this run."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    root.mkdir(exist_ok=True)

    def get(name: str, make: Callable[[Path], object]) -> Path:
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            ready = root / f"{name}.ready"
            if not ready.exists():
                make(root / name)
                ready.touch()
        return root / name

    return get


_registered_outside: dict[str, dict[str, Any]] = {}


@pytest.fixture(scope="module")
def own_registries() -> Iterator[pytest.MonkeyPatch]:
    """What a module's tests register, by importing packages from outside, is there for such modules only. It is kept
    for the next one with the imported packages, since torch does not let an op be defined twice. The patch that undoes
    it."""
    from graphllm.ir.registry import load_models, load_ops
    from graphllm.weights import encodings

    load_ops()
    load_models()
    encodings.is_encoding("")  # all of graphllm's
    with pytest.MonkeyPatch.context() as patch:
        for of, name in (("ir.model", "_models"), ("ir.op", "_ops"), ("weights.encodings", "_encodings")):
            registry = importlib.import_module(f"graphllm.{of}")
            patch.setattr(registry, name, getattr(registry, name) | _registered_outside.get(name, {}))
            _registered_outside[name] = getattr(registry, name)
        yield patch


def make_llama(folder: Path, layers: int = 2) -> None:
    """A Llama of random float32 weights whose likeliest tokens are plain ASCII text, saved by transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from tests.engine.byte_tokenizer import byte_pairs

    backend = byte_pairs(CORPUS, SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=backend.get_vocab_size(),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.15,
            bos_token_id=0,
            eos_token_id=1,
            tie_word_embeddings=False,
        )
    )
    texts = [backend.decode([i]) for i in range(backend.get_vocab_size())]
    odd = [i for i, text in enumerate(texts) if not (text.isascii() and text.isprintable() and text)]
    with torch.no_grad():
        model.lm_head.weight[odd] = 0.0  # a logit of 0 is never the largest
    model.save_pretrained(folder)


@pytest.fixture(scope="session")
def checkpoint(shared: Any) -> Path:
    """The tiny Llama's folder. Do not write into it."""
    return shared("llama", make_llama)


@pytest.fixture(scope="session")
def eager_artifact(checkpoint: Path) -> Path:
    """The tiny Llama with the eager backend, LIMITS and default buckets. Do not write into it."""
    from tests.artifacts import LIMITS, artifact_of

    return artifact_of(checkpoint, backend="eager", **LIMITS)


@pytest.fixture(scope="session")
def compiled_artifact(checkpoint: Path) -> Path:
    """The same compiled by Inductor. Do not write into it."""
    from tests.artifacts import LIMITS, artifact_of

    return artifact_of(checkpoint, **LIMITS)


@pytest.fixture(scope="session")
def prebuilt_artifact(checkpoint: Path) -> Path:
    """The same of prebuilt kernels. Do not write into it."""
    from tests.artifacts import LIMITS, artifact_of

    return artifact_of(checkpoint, backend="prebuilt", **LIMITS)


@pytest.fixture(scope="module", autouse=ON_GPU)
def cores_of_worker() -> Iterator[None]:
    """On a machine with a GPU each worker has its share of the cores, for transformers' models too: every process that
    compiles takes 0.5 GB of the one GPU, and there are as many as cores."""
    import torch

    cores, worker = sorted(os.sched_getaffinity(0)), os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    os.sched_setaffinity(0, cores[int(worker.removeprefix("gw")) % len(cores) :: count])
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, len(os.sched_getaffinity(0))))  # more would wait for each other at every step
    yield
    torch.set_num_threads(threads)
    os.sched_setaffinity(0, cores)


@pytest.fixture(
    scope="session",
    params=["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if ON_GPU else [])],
)
def device(request: pytest.FixtureRequest) -> str:
    """For tests of both: the CPU, and the GPU where there is one. `tests.artifacts.ON` has the settings of each."""
    return request.param


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """cli(*arguments, stdin=""): the graphllm command inside this process."""
    from graphllm.cli import main

    def call(*arguments: object, stdin: str = "") -> Done:
        import io

        monkeypatch.setattr(sys, "argv", ["graphllm", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capfd.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return Done(code, *capfd.readouterr())

    return call


@pytest.fixture
def process() -> Callable[..., Done]:
    """process(*arguments, script="", **environment): the same in a fresh process, after that script."""

    def call(*arguments: object, script: str = "", **environment: str) -> Done:
        script += "from graphllm.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", script, *map(str, arguments)],
            capture_output=True, text=True, env={**os.environ, **environment}, timeout=PATIENCE,
        )  # fmt: skip
        return Done(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture
def refused(process: Callable[..., Done], tmp_path: Path) -> Callable[..., Done]:
    """refused(*arguments): a process that ended before it imported torch, which takes longer than all else."""
    imported = tmp_path / "imported"
    script = f"import atexit, sys; atexit.register(lambda: open({str(imported)!r}, 'w').write(' '.join(sys.modules)));"

    def call(*arguments: object) -> Done:
        done = process(*arguments, script=script)
        assert "torch" not in imported.read_text().split()
        return done

    return call


@pytest.fixture
def resign() -> Callable[[Path, Callable[[dict[str, Any]], None]], None]:
    """resign(artifact, edit): edit the manifest and put the right digest on it, as its writer would have."""
    import hashlib

    def apply(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
        path = folder / "manifest.json"
        manifest = json.loads(json.loads(path.read_text())["manifest"])
        edit(manifest)
        text = json.dumps(manifest)
        path.write_text(json.dumps({"digest": hashlib.sha256(text.encode()).hexdigest(), "manifest": text}))

    return apply


@pytest.fixture
def listing() -> Callable[[Path], dict[str, tuple[int, int]]]:
    """listing(folder): size and modification time of everything in it."""

    def take(folder: Path) -> dict[str, tuple[int, int]]:
        def entries() -> Iterator[Path]:
            yield folder
            yield from sorted(folder.rglob("*"))

        return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in entries()}

    return take
