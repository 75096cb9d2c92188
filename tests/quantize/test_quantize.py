"""Quantized weights from the checkpoint to the logits, against the formulas of the format in numpy float64."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from graphllm.config import Bucket, ConfigError, EngineArgs
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.embedded import MODEL_DIR
from graphllm.entrypoints.llm import LLM
from graphllm.ir.weight import Weight
from graphllm.loading.artifact.resolve import compile_config
from graphllm.ops.activations.soft_cap import soft_cap
from graphllm.ops.gemm.quant_linear import quant_linear
from graphllm.ops.gemm.quant_linear.op import dequantize
from graphllm.program.artifact import Artifact
from graphllm.runtime.executor import Executor
from graphllm.runtime.memory.staging import ragged
from graphllm.weights.checkpoint.checkpoint import Checkpoint
from graphllm.weights.formats.integers import INTEGERS, pack
from graphllm.weights.loading import loader
from graphllm.weights.loading.loader import load_weights
from graphllm.weights.loading.random import random_weights
from graphllm.weights.plan.expr import Encode
from graphllm.weights.plan.plan import Entry, WeightPlan
from tests.artifacts import artifact_of, open_executor
from tests.tiers import draws, thorough
from tests.weights.test_loader import plan_of

GROUP = {"int8": 64, "int4": 32}


def rounded(weight: torch.Tensor, name: str) -> np.ndarray:
    """What a matrix is after it was quantized, by the definition of the format: bfloat16 scales of each group, integers
    of the group's own range. Floats: by torch, and by bitsandbytes."""
    if name == "fp8":
        scales = (weight.float().abs().amax(1, True) / 448).clamp(min=1e-30)
        return np.asarray(((weight.float() / scales).to(torch.float8_e4m3fn).double() * scales.double()).numpy())
    if name == "nf4":
        import bitsandbytes.functional as bnb

        rows, inner = weight.shape
        blocks = torch.nn.functional.pad(weight.float(), (0, -inner % 64)).view(-1, 64)
        back = bnb.dequantize_4bit(*bnb.quantize_4bit(blocks, blocksize=64, quant_type="nf4"))
        return np.asarray(back.view(rows, -1)[:, :inner].double().numpy())
    if name == "mxfp4":
        return _mxfp4(weight.double().numpy())
    w, size = weight.double().numpy(), GROUP[name]
    out = np.empty_like(w)
    for o in range(w.shape[0]):
        for start in range(0, w.shape[1], size):
            group = w[o, start : start + size]
            largest = group.max() if group.max() >= -group.min() else group.min()
            wide = np.float32(np.abs(largest)) / np.float32(127) if name == "int8" else np.float32(largest) / -8
            scale = torch.tensor(float(wide)).bfloat16().double().item()
            low, high = (-127, 127) if name == "int8" else (-8, 7)
            out[o, start : start + size] = np.clip(np.rint(group / scale), low, high) * scale if scale else 0.0
    return out


def unpacked(values: torch.Tensor, scales: torch.Tensor, rows: int, inner: int) -> np.ndarray:
    """The matrix that packed values stand for, one number at a time, as the op's documentation says."""
    v, s = values.numpy(), scales.double().numpy()
    size = v.shape[2] * (4 if v.dtype == np.int8 else 8)
    out = np.empty((rows, inner))
    for o in range(rows):
        for i in range(inner):
            (b, r), (g, c) = divmod(o, 16), divmod(i, size)
            if v.dtype == np.int8:
                n = int(v[b, g, c // 4, r, c % 4])
            else:
                byte = int(v[b, g, c // 8, r, c % 4])
                n = (byte >> 4 if c % 8 >= 4 else byte & 15) - 8
            out[o, i] = n * s[b, g, r]
    return out


def packed(weight: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    encoding = INTEGERS[name]
    values, scales = (torch.zeros(p.shape(*weight.shape), dtype=getattr(torch, p.dtype)) for p in encoding.parts)
    pack(weight, encoding, values, scales)
    return values, scales


def _mxfp4(w: np.ndarray) -> np.ndarray:
    """OCP Microscaling Formats 1.0: the nearest of eight numbers, the even code of two, times a power of two for 32."""
    numbers, groups = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]), w.reshape(w.shape[0], -1, 32)
    powers = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(groups).max(-1, keepdims=True), 1e-30))) - 2)
    away = np.abs(np.abs(groups / powers)[..., None] - numbers) + 1e-12 * (np.arange(8) % 2)
    return np.asarray((np.sign(groups) * numbers[away.argmin(-1)] * powers).reshape(w.shape))


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize(("rows", "inner"), [(1, 1), (16, 64), (17, 65), (5, 200), (50, 96), (33, 3000)])
def test_pack_and_unpack(name: str, rows: int, inner: int) -> None:
    """Every number of every group, at sizes that end inside a block and a group, and wide rows in several parts."""
    torch.manual_seed(rows)
    weight = torch.randn(rows, inner).bfloat16()
    values, scales = packed(weight, name)
    found = unpacked(values, scales, rows, inner)
    np.testing.assert_array_equal(found, rounded(weight, name))
    np.testing.assert_array_equal(dequantize(values, scales.double(), rows, inner).numpy(), found)
    assert torch.equal(dequantize(values, scales, rows, inner).double(), torch.from_numpy(found))  # exact in float32


@pytest.mark.parametrize("name", INTEGERS)
def test_groups_of_extremes(name: str) -> None:
    """Groups of zeros, of one number, with one outlier, of the smallest and largest magnitudes."""
    size = GROUP[name]
    groups = [torch.zeros(size), torch.full((size,), -3.0), torch.full((size,), 1e-30), torch.full((size,), 1e30)]
    outlier = torch.full((size,), 0.01)
    outlier[7] = -50.0
    weight = torch.cat([*groups, outlier]).repeat(2, 1)
    found = dequantize(*packed(weight, name), 2, weight.shape[1])
    np.testing.assert_array_equal(found.double().numpy(), rounded(weight, name))
    assert found.isfinite().all()
    error = (found - weight).abs() / weight.abs().clamp(min=1e-35)
    assert error[:, : 4 * size].max() < 5e-3  # groups of one number keep it to the rounding of their scale
    assert abs(float(found[0, 4 * size + 7]) + 50) < 0.2


def test_what_is_not_finite_stays_visible() -> None:
    weight = torch.ones(16, 64)
    weight[3, 5] = torch.nan
    _, scales = packed(weight, "int8")
    assert scales[0, 0, 3].isnan()
    assert scales[0, 0].isnan().sum() == 1


@settings(max_examples=draws(20, 60), deadline=None)
@given(
    name=st.sampled_from(sorted(INTEGERS)),
    rows=st.integers(1, 70),
    groups=st.integers(1, 3),
    cuts=st.lists(st.integers(0, 70), max_size=3),
)
def test_packing_in_parts_is_packing_at_once(name: str, rows: int, groups: int, cuts: list[int]) -> None:
    """Rows from any row on and groups from any group on, as a loader reads them."""
    encoding = INTEGERS[name]
    weight = torch.randn(rows, groups * encoding.block[1] + 5, generator=torch.Generator().manual_seed(rows))
    values, scales = packed(weight, name)
    parts = torch.zeros_like(values), torch.zeros_like(scales)
    edges = sorted({0, rows, *(c for c in cuts if c < rows)})
    for a, b in itertools.pairwise(edges):
        for entry in range(0, weight.shape[1], encoding.block[1]):
            pack(weight[a:b, entry : entry + encoding.block[1]], encoding, *parts, row=a, entry=entry)
    assert torch.equal(parts[0], values)
    assert torch.equal(parts[1], scales)


# ---- loading


def quantized_plan(weights: dict[str, Weight], names: tuple[str, ...], fmt: str) -> WeightPlan:
    """The plan of embed weights with some of them quantized."""
    plan = plan_of(weights, "bfloat16")
    for name in names:
        old = plan[f"embed.{name}"]
        parts = [
            Entry(f"{old.name}.{p.name}", p.shape(*old.shape), p.dtype, Encode(fmt, p.name, plan.expr_of(old.name)))
            for p in INTEGERS[fmt].parts
        ]
        plan = plan.replace(old.name, *parts)
    return WeightPlan.from_json(plan.to_json())


@pytest.mark.parametrize("fmt", INTEGERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_loading(tmp_path: Path, fmt: str, dtype: torch.dtype) -> None:
    """Merged tensors of odd row counts, rows of a tensor, columns, a copy of a tied one; in many small reads."""
    torch.manual_seed(0)
    shapes = {"q": (21, 100), "k": (9, 100), "v": (10, 100), "rows": (40, 70), "columns": (150, 37), "e": (30, 64)}
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    save_file(tensors | {"lm_head.weight": tensors["e"].clone()}, tmp_path / "model.safetensors")
    weights = {
        "qkv": Weight((40, 100), sources=("q", "k", "v"), segments=(21, 9, 10)),
        "rows": Weight((33, 70), sources=("rows",), slice_rows=(5, 38)),
        "columns": Weight((37, 150), sources=("columns",), transpose=True),
        "tokens": Weight((30, 64), sources=("e",)),
        "head": Weight((30, 64), tie="embed.tokens"),
    }
    plan = quantized_plan(weights, ("qkv", "rows", "columns", "head"), fmt)
    seen: list[tuple[int, int]] = []
    with mock.patch.multiple(loader, _CHUNK=512, _STAGE=4096):
        w = load_weights(plan, Checkpoint.open(tmp_path), progress=lambda *at: seen.append(at))
    assert (
        seen[-1][0]
        == seen[-1][1]
        == sum(t.nbytes for t in tensors.values()) + tensors["e"].nbytes - 7 * 70 * (dtype.itemsize)
    )
    assert sum(t.nbytes for t in w.values()) == plan.total_bytes
    expected = {
        "qkv": torch.cat([tensors[n] for n in "qkv"]),
        "rows": tensors["rows"][5:38],
        "columns": tensors["columns"].T,
        "head": tensors["e"],
    }
    for name, weight in expected.items():
        found = unpacked(w[f"embed.{name}.values"], w[f"embed.{name}.scales"], *weight.shape)
        np.testing.assert_array_equal(found, rounded(weight, fmt), err_msg=name)
    assert torch.equal(w["embed.tokens"], tensors["e"].bfloat16())


@pytest.mark.parametrize("fmt", INTEGERS)
def test_random_weights(fmt: str) -> None:
    plan = quantized_plan({"w": Weight((3001, 700), sources=("w",))}, ("w",), fmt)
    w = random_weights(plan, seed=1)
    weight = dequantize(w["embed.w.values"], w["embed.w.scales"], 3001, 700)
    assert float(weight.std()) == pytest.approx(0.02, rel=0.02)
    assert abs(float(weight.mean())) < 1e-4
    assert all(torch.equal(t, random_weights(plan, seed=1)[n]) for n, t in w.items())


def test_what_was_tied_to_a_replaced_entry_inherits() -> None:
    weights = {
        "e": Weight((4, 4), sources=("e",)),
        "a": Weight((4, 4), tie="embed.e"),
        "b": Weight((4, 4), tie="embed.e"),
    }
    plan = quantized_plan(weights, ("e",), "int8")
    assert [e.name for e in plan] == ["embed.e.values", "embed.e.scales", "embed.a", "embed.b"]
    values = plan["embed.e.values"].expr
    assert isinstance(values, Encode)
    assert plan["embed.a"].expr == values.matrix
    assert plan["embed.b"].tie == "embed.a"


# ---- a whole model


def _artifact(folder: Path, quantize: Any, backend: str = "eager", **wanted: Any) -> Path:
    return artifact_of(folder, backend=backend, quantization=quantize, max_model_len=96, **wanted)


def _quantized(folder: Path, *settings: Any, **wanted: Any) -> Executor:
    return open_executor(folder, _artifact(folder, *settings, **wanted))


def _logits(executor: Executor, ids: list[int]) -> torch.Tensor:
    table = np.arange(1, 7, dtype=np.int32)[None]
    logits = executor.run(ragged([ids], [0], [table])).logits
    assert logits is not None
    return logits[0].float().clone()


IDS = [5, 80, 200, 17, 9, 33, 150, 61, 3]


@pytest.mark.parametrize(
    ("fmt", "backend"),
    [*((fmt, "eager") for fmt in (*INTEGERS, "fp8", "mxfp4", "nf4")), thorough("fp8", "inductor"),
     thorough("mxfp4", "inductor"), thorough("nf4", "inductor")],
)  # fmt: skip
def test_logits_are_those_of_the_rounded_checkpoint(checkpoint: Path, tmp_path: Path, fmt: str, backend: str) -> None:
    """transformers in float32 on a checkpoint whose linear layers and head were rounded by the formula."""
    executor = _quantized(checkpoint, fmt, backend)
    truth = _rounded_logits(checkpoint, tmp_path / "rounded", lambda name: fmt)
    with torch.inference_mode():
        exact = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)(torch.tensor([IDS])).logits[0, -1]
    found = _logits(executor, IDS)
    assert float((found - truth).norm() / truth.norm()) < 1e-5
    lost = float((found - exact).norm() / exact.norm())
    assert lost < {"int8": 0.05, "fp8": 0.2}.get(fmt, 0.7)  # wide random weights make much of 0.6 % in each layer


def _rounded_logits(checkpoint: Path, other: Path, format_of: Callable[[str], str | None]) -> torch.Tensor:
    """transformers' in float32, of a copy of a checkpoint with matrices that are rounded by the formula."""
    tensors = load_file(checkpoint / "model.safetensors")
    names = [n for n, t in tensors.items() if t.dim() == 2 and "embed" not in n]
    assert len(names) == 15  # 7 in each of two layers, and the head
    for name in names:
        if (fmt := format_of(name)) is not None:
            tensors[name] = torch.from_numpy(rounded(tensors[name], fmt)).float()
    other.mkdir()
    (other / "config.json").write_text((checkpoint / "config.json").read_text())
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
        found: torch.Tensor = model(torch.tensor([IDS])).logits[0, -1]
        return found


@pytest.mark.parametrize("quantize", ["int4", None])
def test_rules_for_single_layers(checkpoint: Path, tmp_path: Path, quantize: str | None, cli: Any) -> None:
    """Layers that are rounded in different ways stand beside each other; a head in 8 bits; merged matrices whole."""
    rules = "layers.1.*.down_proj=int8,layers.1.qkv=none,model.layers.0.*=none,lm_head=int8"
    executor = _quantized(checkpoint, quantize, quantization_rules=rules)

    def format_of(name: str) -> str | None:
        if name.startswith("lm_head") or "layers.1.mlp.down_proj" in name:
            return "int8"
        return None if "layers.0" in name or name.split(".")[-2] in ("q_proj", "k_proj", "v_proj") else quantize

    truth, found = _rounded_logits(checkpoint, tmp_path / "rounded", format_of), _logits(executor, IDS)
    assert float((found - truth).norm() / truth.norm()) < 1e-5
    shown = cli("inspect", _artifact(checkpoint, quantize, quantization_rules=rules)).out
    last = "o 1 int4" if quantize else "o 0..1 float32 32"
    for row in ("qkv 0..1 float32 32", "down 0 float32 32", "down 1 int8", last):
        assert re.search(r"layers\.\*\." + r"\W+".join(row.split()), shown), (row, shown)


@pytest.mark.thorough
def test_compiled_kernels_in_a_model(checkpoint: Path) -> None:
    """The C++ kernels, which round x too, inside a compiled artifact: prompts and decoding, int4."""
    buckets = (Bucket("mixed", 2, 32),)
    eager = _quantized(checkpoint, "int4")
    compiled = _quantized(checkpoint, "int4", "inductor", buckets=buckets)
    chosen = Artifact.open(_artifact(checkpoint, "int4", "inductor", buckets=buckets)).manifest.pieces.values()
    assert sum("quant_linear: cpu_stream" in ops for of in chosen for ops in of.values()) >= 2
    for ids in (IDS, IDS[:1]):
        truth = _logits(eager, ids)
        assert float((_logits(compiled, ids) - truth).norm() / truth.norm()) < 0.03


QUESTIONS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is 12 + 7?": "12 + 7 = 19.",
    "Sort these numbers: 41, 7, 99, 23": "7, 23, 41, 99",
}


@pytest.mark.parametrize("fmt", INTEGERS)
def test_the_embedded_model_answers(fmt: Any) -> None:
    """Tied embedding and head; eagerly, from EngineArgs to text."""
    llm = LLM(MODEL_DIR, quantization=fmt, backend="eager", target="cpu", max_model_len=128, max_num_seqs=3)
    try:
        chats: Any = [[{"role": "user", "content": q}] for q in QUESTIONS]
        said = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
        assert [o.outputs[0].text for o in said] == list(QUESTIONS.values())
    finally:
        llm.close()


# ---- what is refused, and what is shown


def test_refusals(cli: Any, checkpoint: Path) -> None:
    done = cli("compile", checkpoint, "--quantization", "int3")
    assert done.code == 2
    assert "int3" in done.err
    with pytest.raises(ConfigError, match=r"quantization is 'int3': use int8 or int4"):
        compile_config({}, EngineArgs(target="cpu", quantization=cast(Any, "int3")))
    with pytest.raises(ConfigError, match="quantization_rules: 'lm_head=int7' is not of the form PATTERN=none or"):
        compile_config({}, EngineArgs(target="cpu", quantization_rules=("lm_head=int7",)))
    done = cli("compile", checkpoint, "--quantization-rules", "layers.7.*=none")
    assert "quantization_rules: no weight is named 'layers.7.*'; there are embed.tokens" in done.err


def test_command_line(cli: Any, checkpoint: Path, tmp_path: Path) -> None:
    """--quantization makes another artifact; inspect and the manifest say so; a folder of another format is refused."""
    small = ("--backend", "eager", "--target", "cpu", "--max-num-seqs", 2, "--max-num-batched-tokens", 16)
    plain = Path(cli("compile", checkpoint, *small).out.strip())
    place = Path(cli("compile", checkpoint, *small, "--quantization", "int4").out.strip())
    assert place != plain
    manifest, before = Artifact.open(place).manifest, Artifact.open(plain).manifest
    assert manifest.factors.compile.quantization == "int4"
    assert manifest.memory.weights < 0.4 * before.memory.weights
    notes = {p["unit"]: p["notes"] for p in manifest.passes if p["pass"] == "quantize_linear" and p["changed"]}
    assert notes == {
        "layer.full": ["qkv: int4", "o: int4", "gate_up: int4", "down: int4"],
        "head": ["lm_head: int4"],
    }
    assert "weights int4" in cli("inspect", place).out
    refused = cli("run", "-p", "a", "--model", checkpoint, "--artifact", plain, *small, "--quantization", "int8", "-q")
    assert refused.code != 0
    assert "quantization is int8" in refused.err
    done = cli("run", "-p", "a", "--raw", "--max-tokens", 2, "--model", checkpoint, "--artifact", place, "-q")
    assert done.code == 0


def test_reference_is_exact_in_float64() -> None:
    """x times the exact weights, for every dtype: nothing of x is rounded in the specification."""
    weight = torch.randn(24, 100)
    values, scales = packed(weight, "int4")
    x, bias = torch.randn(3, 100, dtype=torch.float64), torch.randn(24, dtype=torch.float64)
    truth = x.numpy() @ rounded(weight, "int4").T + bias.numpy()
    found = quant_linear(x, values, scales, 24, bias)
    np.testing.assert_allclose(found.numpy(), truth, rtol=1e-12)
    half = quant_linear(x.bfloat16(), values, scales, 24, bias.bfloat16())
    assert half.dtype == torch.bfloat16
    capped = soft_cap(quant_linear(x, values, scales, 24, bias), 2.0)
    np.testing.assert_allclose(capped.numpy(), 2 * np.tanh(truth / 2), rtol=1e-12)


def test_the_plan_of_an_artifact_is_plain_json(checkpoint: Path) -> None:
    text = (_artifact(checkpoint, "int8") / "weights.json").read_text()
    entries = {e["name"]: e for e in json.loads(text)["entries"]}
    scales, values = (entries[f"layers.1.qkv.{part}"]["expr"] for part in ("scales", "values"))
    assert scales == values | {"part": "scales"}
    assert (values["op"], values["encoding"], values["part"]) == ("encode", "int8", "values")
    assert (values["matrix"]["op"], [p["op"] for p in values["matrix"]["parts"]]) == ("concat", ["read"] * 3)
    assert "layers.1.qkv" not in entries
