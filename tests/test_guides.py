"""The guides: their examples run, and what they name exists."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from graphllm.compile.passes import pipeline
from graphllm.compile.trace import trace_unit
from graphllm.config import CompileConfig, Target
from graphllm.ir.graph import Shapes, TensorSpec, target_name, verify
from graphllm.rewrite import Unit, passes
from graphllm.weights.plan.plan import WeightPlan
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PLAIN = {
    "architectures": ["PlainForCausalLM"], "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3,
    "max_position_embeddings": 64, "eos_token_id": None,
}  # fmt: skip


# --- adding-a-model.md


def _reference(tensors: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """The example's logits after the last token, in plain torch."""

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight

    T = len(ids)
    x = tensors["tokens.weight"][ids] + tensors["positions.weight"][:T]
    for i in range(3):
        h = norm(x, tensors[f"layers.{i}.norm.weight"])
        q, k, v = ((h @ tensors[f"layers.{i}.{p}.weight"].T).view(T, 4, 8).transpose(0, 1) for p in "qkv")
        scores = (q @ k.transpose(1, 2)) * 8**-0.5
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
        attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(T, 32)
        x = x + attended @ tensors[f"layers.{i}.o.weight"].T
    return norm(x[-1], tensors["norm.weight"]) @ tensors["tokens.weight"].T


@pytest.mark.thorough
def test_the_models_example(checkpoint: Path, tmp_path: Path) -> None:
    """Installed as a package, a checkpoint of the new family runs and gives what plain torch gives."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(checkpoint / "tokenizer.json", folder)
    (folder / "config.json").write_text(json.dumps(PLAIN | {"vocab_size": tokenizer.get_vocab_size()}))
    generator = torch.Generator().manual_seed(0)
    shapes = {"tokens.weight": (tokenizer.get_vocab_size(), 32), "positions.weight": (64, 32), "norm.weight": (32,)}
    for i in range(3):
        shapes |= {f"layers.{i}.{n}.weight": (32, 32) for n in "qkvo"} | {f"layers.{i}.norm.weight": (32,)}
    tensors = {n: torch.randn(shape, generator=generator) * 0.5 for n, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")

    target = tmp_path / "installed"
    source = shutil.copytree(DOCS / "examples" / "plugin_model", tmp_path / "source")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", target, source], check=True, timeout=PATIENCE)
    command = [sys.executable, "-c", "from graphllm.cli import main; main()", "run", "--model", folder, "--raw"]
    command += ["--backend", "eager", "--target", "cpu", "--prompt", "the cat sat", "--prompt", "hello", "--quiet"]
    command += ["--temperature", "0", "--max-tokens", "12", "--output", tmp_path / "out.jsonl"]
    environment = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr

    rows = {r["id"]: r["text"] for r in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    for name, prompt in (("prompt-0", "the cat sat"), ("prompt-1", "hello")):
        ids = tokenizer.encode(prompt).ids
        start = len(ids)
        for _ in range(12):
            ids.append(int(_reference(tensors, ids).argmax()))
        assert rows[name] == tokenizer.decode(ids[start:])


def test_without_the_package_the_family_is_unknown(cli: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text(json.dumps(PLAIN | {"vocab_size": 8}))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    done = cli("compile", tmp_path, "--backend", "eager", "--target", "cpu")
    assert done.code == 2
    assert "PlainForCausalLM" in done.err
    assert "docs/adding-a-model.md" in done.err
    assert (DOCS / "adding-a-model.md").exists()


# --- adding-a-pass.md


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The registered pass of the guide."""
    monkeypatch.setattr(passes, "_passes", {})
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "adding-a-pass.md").read_text(), flags=re.DOTALL)
    exec(compile(code, "adding-a-pass.md", "exec"), {"__name__": "guide"})
    return passes._passes["drop_unit_scale"]


def _unit(fn: Any, dtype: str = "float32") -> Unit:
    return trace_unit("test", {"x": TensorSpec.contiguous(dtype, "T", 4)}, lambda v: (fn(v["x"]),), Shapes("cpu"))


def test_the_passes_example(example: Any) -> None:
    assert (example.numerics, example.after) == ("bitwise", "canonicalize")

    def run(unit: Unit) -> tuple[int, list[str]]:
        report = example(unit, WeightPlan(()), CompileConfig(Target("cpu", ())))
        verify(unit.graph, "after")
        return report.changed, [target_name(n.target) for n in unit.graph.nodes if n.op == "call_function"]

    assert [p.name for p in pipeline().units][:2] == ["canonicalize", "drop_unit_scale"]
    unit = _unit(lambda x: (x * 1 + 3) * 1.0)
    x = torch.randn(3, 4)
    assert run(unit) == (2, ["aten::add.Tensor"])
    assert torch.equal(torch.fx.GraphModule(torch.nn.Module(), unit.graph)(x)[0], x + 3)
    assert run(_unit(lambda x: x * 2)) == (0, ["aten::mul.Tensor"])
    assert run(_unit(lambda x: x * 1.0, "int32"))[0] == 0  # makes floats of integers


# --- all of them


def _guides() -> list[Path]:
    return [*sorted(DOCS.glob("*.md")), ROOT / "README.md"]


def test_examples_in_the_guides_are_the_files() -> None:
    for name, file in (("adding-a-model.md", "plugin_model.py"), ("adding-a-model.md", "pyproject.toml")):
        assert (DOCS / "examples" / "plugin_model" / file).read_text() in (DOCS / name).read_text()
    _, relative, *_ = re.findall(r"```python\n(.*?)```", (DOCS / "adding-a-model.md").read_text(), re.DOTALL)
    assert (ROOT / "model_defs" / "phi3.py").read_text().endswith("\n" + relative)


def test_the_description_of_the_artifact_is_complete(compiled_artifact: Path) -> None:
    """Every name in the files is explained, and every number is the code's."""
    from graphllm.loading.artifact.build import POLICIES
    from graphllm.program import artifact, linking
    from graphllm.runtime.memory import padding

    text = (DOCS / "artifact.md").read_text()
    manifest = artifact.read_json(compiled_artifact)
    names = [*manifest, *manifest["factors"], *json.loads((compiled_artifact / "program.json").read_text()), *POLICIES]
    assert [n for n in names if f"`{n}`" not in text] == []
    kinds = set()
    for file in (compiled_artifact / "pieces").glob("*.json"):
        bundle = json.loads(file.read_text())
        assert bundle.keys() - {"ir"} == {"inputs", "outputs", "code", "kernels"}
        kinds |= {instruction[0] for instruction in bundle["code"]}
        for kernel in bundle["kernels"].values():
            assert kernel.keys() <= {"args", "c"}
            assert set(kernel["args"]) <= {"ptr", "i64", "f64"}
    assert {"empty", "view", "kernel"} <= kinds
    assert [k for k in kinds | {"op"} if f'`["{k}", ' not in text] == []
    assert f"now {artifact.FORMAT}." in text
    assert f"multiples of {linking._ALIGN} bytes" in text
    assert f"up to {padding.GRAPH_SIZES[-1]:,}\ntokens ({padding.MIXED_CAPTURED} with prompts)" in text
    assert f"a multiple of {padding._MIXED_STEP} " in text


@pytest.mark.parametrize("guide", _guides(), ids=lambda p: p.name)
def test_files_and_links_in_the_guides_exist(guide: Path) -> None:
    text = guide.read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in link:
            assert (guide.parent / link).exists(), link
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for name in re.findall(r"`((?:graphllm|ops|passes|model_defs|tests|bench|docs)/[\w./-]+)`", prose):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("guide", _guides(), ids=lambda p: p.name)
def test_options_in_the_guides_exist(guide: Path) -> None:

    from graphllm.cli.app import command_line
    from graphllm.config.vllm.names import VLLM_NAMES

    command: Any = command_line()
    for line in re.findall(r"graphllm ((?:compile|run|inspect|op)\b[^`#\n]*)", guide.read_text()):
        words = line.split()
        leaf = command.commands[words[0]]
        if words[0] == "op" and len(words) > 1:
            leaf = leaf.commands[words[1]]
        known = (
            {o for p in leaf.params for o in (*p.opts, *p.secondary_opts)} if words[0] != "op" else {"-o", "--output"}
        )
        if any(p.name == "vllm_name" for p in leaf.params):
            known |= {f"--{name.replace('_', '-')}" for name, entry in VLLM_NAMES.items() if entry.means}
        assert [w for w in words if w.startswith("-") and w not in ("-",) and w not in known] == [], line
