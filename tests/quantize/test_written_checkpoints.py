"""Checkpoints that `graphllm quantize` writes: transformers with compressed-tensors and our engine read the
same numbers in them, calibration pays, and what cannot be done is refused without a trace."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from graphllm.cli.app import app
from graphllm.compile.families import find_model
from graphllm.config import ConfigError
from graphllm.embedded import MODEL_DIR, MOE_DIR
from graphllm.loading.checkpoint.source import open_source
from graphllm.quantize.awq import Fold, channels_of, fold, folds_of
from graphllm.quantize.gptq import gptq
from graphllm.quantize.run import Made, Request, quantize
from graphllm.quantize.schemes import SCHEMES, grid_of, scheme_of
from graphllm.weights.checkpoint.checkpoint import Checkpoint
from graphllm.weights.loading.loader import load_weights
from graphllm.weights.plan.plan import make_plan
from graphllm.weights.plan.schemes import as_quantized

# The least relative error that normal numbers can have, and some: uniform levels cost step / sqrt(12).
ERRORS = {
    "fp8": 0.03,
    "int8": 0.01,
    "w8a8": 0.01,
    "int4": 0.12,
    "int4-zeros": 0.1,
    "int3": 0.23,
    "int2": 0.5,
    "mxfp4": 0.13,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in float32 whose query heads share key-value heads, with the embedded model's tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:  # norms of a trained model differ from channel to channel
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.copy_(torch.rand(64).exp())
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((MODEL_DIR / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    words = ["the", "river", "runs", "to", "sea", "and", "a", "boat", "goes", "with", "it", "while", "people", "sing"]
    lines = [" ".join(words[i * j % len(words)] for j in range(1, 60)) for i in range(1, 13)]
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return file


def _quantized(folder: Path, output: Path, scheme: str, **wanted: Any) -> Made:
    groups = 32 if SCHEMES[scheme].format == "pack-quantized" and SCHEMES[scheme].group else None
    given = {"group_size": groups, "length": 64, **wanted}
    return quantize(folder, Checkpoint.open(folder), Request(output, scheme, **given), lambda line: None)


def _ours(folder: Path) -> dict[str, Tensor]:
    source = open_source(folder)
    assert source.checkpoint is not None
    model = find_model(source.config)
    plan = make_plan(model, model.config(source.config), "float32")
    return load_weights(as_quantized(plan, source.config, source.checkpoint.tensors), source.checkpoint)


def _theirs(folder: Path) -> Any:
    config = CompressedTensorsConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32).eval()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_and_the_engine_read_the_same_numbers(scheme: str, llama: Path, tmp_path: Path) -> None:
    made = _quantized(llama, tmp_path / "new", scheme)
    ours, theirs = _ours(tmp_path / "new"), _theirs(tmp_path / "new").state_dict()
    before = load_file(llama / "model.safetensors")
    assert made.matrices == 14
    for i in range(2):
        for own, names in (("o", ("self_attn.o_proj",)), ("down", ("mlp.down_proj",)),
                           ("qkv", tuple(f"self_attn.{n}_proj" for n in "qkv"))):  # fmt: skip
            found = torch.cat([theirs[f"model.layers.{i}.{n}.weight"] for n in names])
            torch.testing.assert_close(ours[f"layers.{i}.{own}"], found, rtol=1e-6, atol=0)
            first = torch.cat([before[f"model.layers.{i}.{n}.weight"] for n in names])
            assert float((found - first).norm() / first.norm()) < ERRORS[scheme]


@torch.no_grad()
def test_logits(llama: Path, text: Path, tmp_path: Path) -> None:
    """Of a model whose every step has changed something: norms folded, queries sharing keys, groups of integers."""
    _quantized(llama, tmp_path / "new", "int4-zeros", method="awq", calibration=text)
    from tests.models import driver

    runner = driver.Driver(tmp_path / "new", "eager")
    prompt = torch.randint(0, 4096, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    logits, _ = runner.generate([prompt], 1)
    expected = _theirs(tmp_path / "new")(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(logits[0], expected, atol=2e-4, rtol=0)


@torch.no_grad()
def test_awq_changes_the_model_by_rounding_only(llama: Path, text: Path, tmp_path: Path) -> None:
    """In 8 bits next to nothing: a scale that is not divided by elsewhere would be seen."""
    _quantized(llama, tmp_path / "new", "int8", method="awq", calibration=text)
    norm = "model.layers.0.input_layernorm.weight"
    old, new = (load_file(f / "model.safetensors")[norm] for f in (llama, tmp_path / "new"))
    assert not torch.allclose(old, new, rtol=0.01)
    ids = torch.randint(0, 4096, (1, 40), generator=torch.Generator().manual_seed(1))
    before = LlamaForCausalLM.from_pretrained(llama)(ids).logits
    after = _theirs(tmp_path / "new")(ids).logits
    assert float((after - before).norm() / before.norm()) < 0.01


def test_heads_that_share_values_are_scaled_alike() -> None:
    """Four query heads of three entries read two key-value heads."""
    assert channels_of(6, 12, 3).tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]
    generator = torch.Generator().manual_seed(2)
    make, read = (torch.randn(shape, generator=generator) for shape in ((6, 8), (5, 12)))
    x, scales = torch.randn(7, 8, generator=generator), torch.rand(6, generator=generator) + 0.5
    channels = channels_of(6, 12, 3)
    new = fold({"m.weight": make, "r.weight": read}, Fold("m", ("r",)), scales, channels, torch.float32)
    expected = (x @ make.T)[:, channels] @ read.T
    torch.testing.assert_close((x @ new["m.weight"].T)[:, channels] @ new["r.weight"].T, expected)


@pytest.mark.parametrize("scheme", ["int4", "int4-zeros", "int3", "mxfp4", "fp8"])
def test_gptq_has_less_error_than_rounding(scheme: str) -> None:
    """In float64, of outputs for inputs whose entries depend on each other."""
    generator = torch.Generator().manual_seed(4)
    mix = torch.randn(128, 128, generator=generator) * torch.linspace(0.1, 3, 128)
    x, weight = torch.randn(600, 128, generator=generator) @ mix, torch.randn(48, 128, generator=generator)
    grid = grid_of(weight, scheme_of(scheme, 32 if scheme.startswith("int") else None), torch.bfloat16)
    exact = x.double() @ weight.double().T

    def error(numbers: Tensor) -> float:
        return float((x.double() @ numbers.double().T - exact).norm() / exact.norm())

    levels, numbers = gptq(weight, x.T @ x, grid)
    torch.testing.assert_close(numbers, (levels - grid.zeros.repeat_interleave(grid.group, 1))
                               * grid.scales.repeat_interleave(grid.group, 1))  # fmt: skip
    assert error(numbers) < 0.7 * error(grid.rounded(weight)[1])


def test_experts(tmp_path: Path) -> None:
    """Stored one by one, as vLLM reads them; routers as they were."""
    made = _quantized(MOE_DIR, tmp_path / "new", "fp8")
    config = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    assert r"re:.*\.(gate|router|shared_expert_gate)$" in config["ignore"]
    new, old = (load_file(f / "model.safetensors") for f in (tmp_path / "new", MOE_DIR))
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    numbers = new[name].float() * new[f"{name}_scale"].float()
    assert float((numbers - old[name].float()).norm() / old[name].float().norm()) < 0.03
    torch.testing.assert_close(_ours(tmp_path / "new")["layers.1.down"][3], numbers, rtol=1e-6, atol=0)
    assert torch.equal(new["model.layers.1.mlp.gate.weight"], old["model.layers.1.mlp.gate.weight"])
    assert made.fit.same > 0.9


def test_modules_that_are_ignored(llama: Path, tmp_path: Path) -> None:
    ignore = ("*.layers.0.*", "re:.*up_proj$")
    made = _quantized(llama, tmp_path / "new", "int4", ignore=ignore)
    assert made.matrices == 6
    new, old = (load_file(f / "model.safetensors") for f in (tmp_path / "new", llama))
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        assert torch.equal(new[name], old[name])
        torch.testing.assert_close(_theirs(tmp_path / "new").state_dict()[name], old[name])
    assert "model.layers.1.mlp.down_proj.weight" not in new


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"scheme": "int5"}, "scheme is 'int5': use fp8, int8"),
        ({"scheme": "int4", "method": "obq"}, "method is 'obq': use rtn, gptq, awq"),
        ({"scheme": "int4", "method": "gptq"}, "method is gptq: it needs a text; give --calibration FILE"),
        ({"scheme": "int4"}, "704 inner entries of model.layers.0.mlp.down_proj; give --group-size 64"),
        ({"scheme": "fp8", "group_size": 32}, "group_size is 32: scheme fp8 has groups of a row; leave it out"),
        ({"scheme": "int8", "ignore": ("*",)}, "ignore: give fewer patterns; no linear layer of llama layers is left"),
        ({"scheme": "int8", "calibration": Path("nowhere.txt")}, "calibration: nowhere.txt cannot be read"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_leaves_nothing(wanted: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        quantize(MODEL_DIR, Checkpoint.open(MODEL_DIR), Request(tmp_path / "new", **wanted), lambda line: None)
    assert words in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_other_refusals(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "one"}\n{"words": 2}\n')
    with pytest.raises(ConfigError, match=r"line 2 of .* is not an object with text, prompt or messages"):
        _quantized(MODEL_DIR, tmp_path / "new", "int8", calibration=bad)
    good = tmp_path / "good.txt"
    good.write_text("one two three four five " * 40)
    with pytest.raises(ConfigError, match=r"method is gptq: .*experts.* is an expert's"):
        _quantized(MOE_DIR, tmp_path / "new", "fp8", method="gptq", calibration=good)
    with pytest.raises(ConfigError, match="method is awq: what makes the activations of 'gemma' models is not known"):
        folds_of("gemma")
    _quantized(MODEL_DIR, tmp_path / "made", "w8a8")
    with pytest.raises(ConfigError, match="made is there already; give a new folder"):
        _quantized(MODEL_DIR, tmp_path / "made", "w8a8")
    with pytest.raises(ConfigError, match=r"its config.json has a quantization_config"):
        _quantized(tmp_path / "made", tmp_path / "new", "w8a8")
    assert {p.name for p in tmp_path.iterdir()} == {"bad.jsonl", "good.txt", "made"}


def test_the_command(tmp_path: Path) -> None:
    command = ["quantize", "-o", str(tmp_path / "new"), "--scheme", "int8"]
    made = CliRunner().invoke(app, command, catch_exceptions=False)
    assert made.exit_code == 0
    assert "int8 by rtn, 56 matrices of 8 layers, 8.05 bits a weight; 13.9 MB became 8.0 MB" in made.stdout
    told = re.search(r"perplexity (\S+) before, (\S+) after; the same likeliest next token (\S+)%", made.stdout)
    assert told is not None, made.stdout
    before, after, same = map(float, told.groups())
    assert after == pytest.approx(before, rel=0.02)
    assert 90 < same <= 100  # 8 bits change little
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == (MODEL_DIR / "tokenizer.json").read_bytes()
