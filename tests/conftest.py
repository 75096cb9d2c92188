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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from graphllm.machine import detect_target

if detect_target("auto").device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when a Triton kernel is defined, so before any test imports the ops
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # processes that tests start take as long as users' do

CORPUS = ["hello world, the cat sat on the mat", "what is the answer to the question", "a list of words in a row"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|user|>", "<|system|>", "<|bot|>"]
# Small enough that prompts of a few tokens are chunked and the batch fills up; context 96 needs 12 pages.
LIMITS = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 8}


# What takes more than twenty seconds when the suite runs, the longest first.
LONGEST = (
    "tests/server/fronts/test_fronts.py",
    "tests/ops/test_cpu_kernels.py",
    "tests/models/test_parity.py",
    "tests/strange/test_strange.py",
    "tests/engine/test_draft_models.py",
    "tests/engine/test_embedded_engine.py",
    "tests/test_artifact.py",
    "tests/engine/test_lora.py",
    "tests/server/test_trouble.py",
    "tests/engine/test_process.py",
    "tests/cli/test_commands.py",
    "tests/compile/test_pipeline.py",
    "tests/ops/test_quant_linear_cpu.py",
    "tests/weights/test_baked.py",
    "tests/server/test_fuzz.py",
    "tests/test_plugin.py",
    "tests/engine/test_proposers.py",
    "tests/engine/test_drawn_drafts.py",
    "tests/runtime/test_executor.py",
    "tests/ops/test_ops.py:paged_attention",
    "tests/engine/test_embedded_drafts.py",
    "tests/models/test_encoders.py",
    "tests/engine/test_ranks.py",
    "tests/compile/test_workers.py",
    "tests/test_values.py",
    "tests/engine/test_verification.py",
    "tests/ops/test_gguf_cpu.py",
    "tests/weights/test_quantized_checkpoints.py",
    "tests/engine/test_draft_ranks.py",
    "tests/engine/test_moving_experts.py",
    "tests/engine/test_moe_lora.py",
    "tests/test_quantize.py",
    "tests/engine/test_dflash.py",
    "tests/engine/test_sharing_cores.py",
    "tests/server/test_adapters.py",
    "tests/server/pooling/test_pooling_routes.py",
)

logging.getLogger("torch.__trace").disabled = True  # pytest collects logs, and the compiler's fill pages


@dataclass(frozen=True)
class Done:
    """A finished command: exit status, both outputs, seconds."""

    code: int
    out: str
    err: str
    seconds: float = 0.0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``: a worker takes the longest file that is left, so that all end together. The ops of
    test_ops.py, which have nothing in common, are files of their own."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LongestFirst(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _unit_of(nodeid)

    config.option.loadscopereorder = False  # by numbers of tests, which say little
    return LongestFirst(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order in which workers take files."""
    rank = {unit: i for i, unit in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(_unit_of(item.nodeid), len(rank)))


def _unit_of(nodeid: str) -> str:
    """What one worker runs as a whole: a file, or one op of test_ops.py."""
    file, _, test = nodeid.partition("::")
    if file.endswith("/test_ops.py"):
        return f"{file}:{test.partition('[')[2].partition('-')[0].rstrip(']')}"
    return file


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


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has an artifact cache of its own."""
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
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
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


def _compile(checkpoint: Path, folder: Path, backend: Any) -> None:
    from graphllm.compile.pipeline import compile_model
    from graphllm.config import EngineArgs
    from graphllm.entrypoints.resolve import compile_config
    from graphllm.entrypoints.source import open_source

    source = open_source(checkpoint)
    config = compile_config(source.config, EngineArgs(target="cpu", backend=backend, **LIMITS))
    compile_model(source.config, source.tensors, config, folder)


@pytest.fixture(scope="session")
def eager_artifact(shared: Any, checkpoint: Path) -> Path:
    """The tiny Llama with the eager backend, LIMITS and default buckets. Do not write into it."""
    return shared("eager", lambda folder: _compile(checkpoint, folder, "eager"))


@pytest.fixture(scope="session")
def compiled_artifact(shared: Any, checkpoint: Path) -> Path:
    """The same compiled by Inductor. Do not write into it."""
    return shared("compiled", lambda folder: _compile(checkpoint, folder, "inductor"))


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
def process(cache: Path) -> Callable[..., Done]:
    """process(*arguments, **environment): the same in a fresh process, timed."""

    def call(*arguments: object, **environment: str) -> Done:
        script = "from graphllm.cli import main; main()"
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", script, *map(str, arguments)],
            capture_output=True, text=True, env={**os.environ, **environment}, timeout=300,
        )  # fmt: skip
        return Done(done.returncode, done.stdout, done.stderr, time.perf_counter() - begin)

    return call


@pytest.fixture
def refused(process: Callable[..., Done]) -> Callable[..., Done]:
    """refused(*arguments): a process that ended in less than a second, or on a slow or busy machine in less than half
    of the time in which another one imports torch; the first of some that did."""

    def call(*arguments: object) -> Done:
        for _ in range(4):
            done = process(*arguments)
            if done.seconds < 1:
                return done
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", "import torch"], check=True)
            if done.seconds < (time.perf_counter() - begin) / 2:
                return done
        raise AssertionError(f"{done.seconds:.2f} s: {done}")

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
