"""help, version, compile, inspect, and the artifact policies of run."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import graphllm
from graphllm import __version__
from graphllm.program import artifact
from graphllm.program.artifact import Artifact
from tests.waiting import PATIENCE

SMALL = ("--backend", "eager", "--target", "cpu", "--max-num-seqs", 2, "--max-num-batched-tokens", 16)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *([name, "--help"] for name in ("run", "compile", "serve", "chat", "merge", "op", "bench")),
        ["--version"],
    ],
)
def test_help_and_version_import_no_torch(arguments: list[str]) -> None:
    script = (
        "import sys\nfrom graphllm.cli import main\n"
        "try:\n    main()\nfinally:\n    print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "[]"


def test_version(cli: Any) -> None:
    assert cli("--version").out == f"graphllm {__version__}\n"


def _commands() -> dict[str, Any]:

    from graphllm.cli.app import command_line

    command: Any = command_line()
    groups = {name: command.commands[name].commands for name in ("op", "bench")}
    return {**command.commands, **{f"{g} {n}": leaf for g, leaves in groups.items() for n, leaf in leaves.items()}}


def test_every_command_and_option_says_what_it_is_for() -> None:
    leaves = _commands()
    assert {"compile", "run", "serve", "chat", "inspect", "merge", "op list", "op test", "bench serve"} <= leaves.keys()
    for name, leaf in leaves.items():
        assert leaf.help, name
        for parameter in leaf.params:
            assert getattr(parameter, "help", None), f"{name} {parameter.name}"


def test_every_command_names_a_function_that_is_there() -> None:
    """`graphllm.cli.late.call` finds them by name."""
    folder = Path(graphllm.__file__).parent / "cli"
    named = {n for file in folder.rglob("*.py") for n in re.findall(r'\bcall\("([\w.]+:\w+)"', file.read_text())}
    assert len(named) > 15
    for target in named:
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(f"graphllm.cli.{module}"), name)), target


def test_help_is_whole_on_a_narrow_terminal(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name, leaf in _commands().items():
        text = cli(*name.split(), "--help").out
        assert max(map(len, text.splitlines())) <= 80
        names = [
            n
            for p in leaf.params
            if p.param_type_name == "option" and not p.hidden
            for n in (*p.opts, *p.secondary_opts)
        ]
        assert [n for n in names if not re.search(rf"{n}(?![\w-])", text)] == []
        assert "…" not in text
    listed = cli("--help").out
    assert "..." not in listed.removeprefix(listed.partition("\n")[0])
    words = " ".join(cli("run", "--help").out.split())
    assert "0 takes the most likely token. Default: 1.0." in words
    assert "Default: 256 for a plain prompt" in words


def test_compile_prints_where_the_artifact_is(cli: Any, checkpoint: Path, cache: Path, tmp_path: Path) -> None:
    done = cli("compile", checkpoint, *SMALL)
    assert done.code == 0
    place = Path(done.out.strip())
    assert place.parent == cache / "artifacts"
    manifest = Artifact.open(place).manifest
    assert place.name == f"{checkpoint.name}-{artifact.key_of(manifest.factors)[:16]}"
    assert re.search(r"compiled in [\d.]+ s: weights \d+\.\d kB, arena \S+ \S+, cache 512 bytes a token", done.err)
    assert cli("compile", checkpoint, *SMALL, "--output", tmp_path / "mine").out.strip() == str(tmp_path / "mine")


@pytest.mark.parametrize("broken", [None, "#!/bin/sh\necho cc1plus is missing >&2; exit 1", "no program"])
@pytest.mark.parametrize("command", [("run", "--prompt", "x", "--model"), ("compile",)])
def test_no_compiler(
    broken: str | None, command: tuple[str, ...], refused: Any, checkpoint: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Told before torch is imported."""
    if broken is not None:
        (tmp_path / "g++").write_text(broken)
        (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    done = refused(*command, checkpoint, "--target", "cpu")
    (line,) = done.err.splitlines()
    assert (done.code, done.out) == (2, "")
    assert line.startswith("graphllm: g++ is not installed or does not work (")
    assert "apt-get install g++" in line
    assert "cc1plus is missing" in line or broken is None or "exit" not in broken


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["NewForCausalLM"]}, "NewForCausalLM'] (model_type 'llama') is not supported. Known: "),
        ({"num_attention_heads": None}, "num_attention_heads is None"),
        ({"hidden_act": "sparkle"}, "hidden_act is 'sparkle', which is not supported"),
        (
            {"quantization_config": {"quant_method": "new"}},
            "quantization_config: quant_method is 'new', which",
        ),
    ],
)
def test_models_that_cannot_be_compiled(
    change: dict[str, Any], message: str, cli: Any, checkpoint: Path, cache: Path, tmp_path: Path
) -> None:
    config = json.loads((checkpoint / "config.json").read_text()) | change
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    os.symlink(checkpoint / "model.safetensors", tmp_path / "model" / "model.safetensors")
    done = cli("compile", tmp_path / "model", *SMALL)
    assert (done.code, done.out) == (2, "")
    last = done.err.strip().splitlines()[-1]
    assert last.startswith("graphllm: ")
    assert message in last
    assert "Traceback" not in done.err
    assert list(cache.glob("artifacts/*")) == []


def test_inspect(cli: Any, compiled_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    done = cli("inspect", compiled_artifact)
    assert done.code == 0
    manifest = Artifact.open(compiled_artifact).manifest
    for part in (
        artifact.key_of(manifest.factors)[:16], "cpu: ", f"graphllm {__version__}", "torch ",
        "LlamaForCausalLM, float32",
        "96 tokens of context, 4 sequences and 32 tokens a step, blocks of 8", "decode 2..4", "mixed 2..32",
        "paged_attention: cpu", "swiglu: compiled by Inductor", "canonicalize",
        f"{manifest.memory.arena:,}", f"{manifest.memory.block:,}",
        f"{len(manifest.files)} files",
    ):  # fmt: skip
        assert part in done.out, part
    as_json = cli("inspect", compiled_artifact, "--json")
    assert json.loads(as_json.out) == artifact.read_json(compiled_artifact)


def test_inspect_needs_no_torch(compiled_artifact: Path) -> None:
    script = (
        "import sys; from graphllm.cli import main\n"
        "try: main()\nfinally: assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "inspect", compiled_artifact], capture_output=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr


def test_inspect_of_something_else(cli: Any, tmp_path: Path) -> None:
    done = cli("inspect", tmp_path)
    assert (done.code, done.out) == (2, "")
    assert "is no artifact: it has no manifest.json; make one with `graphllm compile`" in done.err


# --- policies


@pytest.fixture
def run(cli: Any, checkpoint: Path) -> Callable[..., Any]:
    """run(policy): one token with the cache."""

    def call(policy: str, *more: object) -> Any:
        fixed = ("--model", checkpoint, "--prompt", "hello", "--max-tokens", 1, "--temperature", 0, "--quiet")
        return cli("run", *fixed, "--artifact", policy, *(more or SMALL))

    return call


def test_build_makes_one_and_then_uses_it(run: Any, cache: Path, listing: Any) -> None:
    first = run("build")
    assert first.code == 0
    (made,) = (cache / "artifacts").iterdir()
    before = listing(cache)
    assert run("build").out == first.out
    assert listing(cache) == before
    assert run("build", *SMALL, "--block-size", 4).code == 0
    assert len(list((cache / "artifacts").iterdir())) == 2
    assert made.exists()


def test_require(run: Any, cache: Path, listing: Any) -> None:
    done = run("require")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("graphllm: --artifact require: there is none at ")
    assert "make it with `graphllm compile`" in done.err
    assert not cache.exists()
    built = run("build")
    before = listing(cache)
    assert run("require").out == built.out
    assert listing(cache) == before


def test_use_runs_eagerly_without_one(run: Any, cache: Path) -> None:
    inductor = ("--target", "cpu", *SMALL[4:])
    done = run("use", *inductor)
    assert done.code == 0
    (made,) = (cache / "artifacts").iterdir()
    assert Artifact.open(made).config.backend == "eager"
    assert run("require", *inductor).code == 2  # the compiled one is still not there


def test_rebuild(run: Any, cache: Path, listing: Any) -> None:
    run("build")
    before = listing(cache)
    assert run("rebuild").code == 0
    after = listing(cache)
    assert after.keys() == before.keys()
    assert all(after[f][1] > before[f][1] for f in after if f.endswith(".json"))


@pytest.mark.thorough
def test_damaged_artifact_in_the_cache(run: Any, cache: Path) -> None:
    """It is refused by name rather than replaced in silence; rebuild repairs it."""
    run("build")
    (program,) = cache.glob("artifacts/*/program.json")
    content = program.read_text()
    program.write_text(content.replace("tokens", "nekots"))
    for policy in ("build", "require"):
        done = run(policy)
        assert done.code == 2
        assert f"{program} does not match its checksum" in done.err
    assert run("rebuild").code == 0
    assert program.read_text() == content


def test_other_model_with_the_same_name(
    run: Any, cli: Any, checkpoint: Path, eager_artifact: Path, tmp_path: Path
) -> None:
    """An artifact given by its folder must fit the checkpoint."""
    config = json.loads((checkpoint / "config.json").read_text())
    folder = tmp_path / "llama"
    folder.mkdir()
    for file in checkpoint.iterdir():
        os.symlink(file, folder / file.name)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))
    done = cli("run", "--model", folder, "--artifact", eager_artifact, "--prompt", "x")
    assert done.code == 2
    assert f"config.json.rms_norm_eps: artifact has {config['rms_norm_eps']}, here it is 0.25" in done.err


# --- op


@pytest.mark.parametrize("command", ["test", "bench"])
def test_unknown_op(command: str, cli: Any) -> None:
    done = cli("op", command, "flux_capacitor")
    assert (done.code, done.out) == (2, "")
    expected = r"graphllm: op: 'flux_capacitor' is not registered; there are accept_drafts, .*swiglu.*\n"
    assert re.fullmatch(expected, done.err)


def test_op_list_shows_facts(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    rows = [[c.strip() for c in line.strip("│").split("│")] for line in cli("op", "list").out.splitlines()]
    (attention,) = (i for i, row in enumerate(rows) if row[0] == "paged_attention")
    assert rows[attention][1] == "boundary"
    assert rows[attention + 1][1] == "writes kv_cache"
    assert "Causal attention of T new tokens" in rows[attention][4]
