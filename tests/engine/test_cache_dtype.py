"""A cache in fp8 or int8 from the checkpoint to the tokens, against transformers with keys and values that are rounded
by the definitions of the formats in numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from graphllm.compile.pipeline import compile_model
from graphllm.config import CacheConfig, ConfigError, EngineArgs
from graphllm.loading.artifact.resolve import compile_config
from graphllm.loading.checkpoint.source import open_source
from graphllm.loading.memory import cache_counts
from graphllm.program import artifact
from graphllm.program.artifact import Artifact
from graphllm.runtime.memory.staging import ragged
from tests.artifacts import artifact_of, open_executor
from tests.engine.harness import finish, open_core, request

SCALES = {0: (0.013, 0.0021), 1: (0.4, 1.0)}  # of the layers' keys and values; some of the first are above 448
IDS = [5, 80, 200, 17, 9, 33, 150, 61, 3, 99, 12, 7, 45, 46, 47, 48, 210, 9, 5, 80]
Format = Literal["fp8", "int8"]


def rounded(x: torch.Tensor, fmt: Format, scale: float) -> torch.Tensor:
    """Rows [.., E] as they come back. E4M3: three bits behind a leading one, exponents from -6, at most 448."""
    rows = x.numpy()
    if fmt == "int8":
        step = np.abs(rows).max(-1, keepdims=True) / np.float32(127)
        return torch.from_numpy(np.rint(rows / step) * step)
    quotient = (rows / np.float32(scale)).astype(np.float64)
    unit = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(np.abs(quotient), 1e-30))), -6) - 3)
    return torch.from_numpy((np.clip(np.rint(quotient / unit) * unit, -448, 448) * scale).astype(np.float32))


def expected_logits(folder: Path, ids: list[int], fmt: Format, scales: dict[int, tuple[float, float]]) -> torch.Tensor:
    """transformers' logits behind every token."""
    plain = modeling_llama.eager_attention_forward

    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        k_scale, v_scale = scales.get(module.layer_idx, (1.0, 1.0))
        return plain(module, query, rounded(key, fmt, k_scale), rounded(value, fmt, v_scale), *args, **kwargs)

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with mock.patch.object(modeling_llama, "eager_attention_forward", attend), torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def scaled(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint with scales of keys and values beside its weights, under two of the names that there are."""
    folder.mkdir()
    for file in checkpoint.glob("*.json"):
        (folder / file.name).write_text(file.read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    names = ("k_proj.{}_scale", "v_proj.{}_scale"), ("attn.{}_scale", "attn.{}_scale")
    for layer, values in SCALES.items():
        for x, name, value in zip("kv", names[layer], values, strict=True):
            shape = [1] if layer else []
            tensors[f"model.layers.{layer}.self_attn.{name.format(x)}"] = torch.full(shape, value)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def compiled(folder: Path, fmt: str, backend: str = "eager", **wanted: Any) -> Path:
    return artifact_of(folder, backend=backend, kv_cache_dtype=fmt, max_model_len=128, dtype="float32", **wanted)


def logits(folder: Path, place: Path) -> list[torch.Tensor]:
    """Behind a prompt of all but the last two tokens, computed in two parts, and behind each of those two."""
    executor = open_executor(folder, place)
    table, found, done = np.arange(1, 9, dtype=np.int32)[None], [], 0
    for end in (11, len(IDS) - 2, len(IDS) - 1, len(IDS)):
        found.append(executor.run(ragged([IDS[done:end]], [done], [table])).logits[0].float().clone())
        done = end
    return found[1:]


def check_logits(folder: Path, place: Path, fmt: Format, scales: dict[int, tuple[float, float]]) -> None:
    expected, exact = (expected_logits(folder, IDS, fmt, s) for s in (scales, {}))
    for row, found in zip(range(len(IDS) - 3, len(IDS)), logits(folder, place), strict=True):
        error = (found - expected[row]).norm() / expected[row].norm()
        # A key that lies between two entries may be rounded otherwise where the sum before it is another one.
        assert error < 2e-3
        if scales:
            assert (found - exact[row]).norm() / exact[row].norm() > 10 * error


@pytest.mark.parametrize(("fmt", "with_scales"), [("fp8", False), ("fp8", True), ("int8", False)])
def test_logits(checkpoint: Path, tmp_path: Path, fmt: Format, with_scales: bool) -> None:
    folder = scaled(checkpoint, tmp_path / "scaled") if with_scales else checkpoint
    check_logits(folder, compiled(folder, fmt), fmt, SCALES if with_scales else {})


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["fp8", "int8"])
def test_compiled_kernels(checkpoint: Path, tmp_path: Path, fmt: Format) -> None:
    folder, scales = (scaled(checkpoint, tmp_path / "scaled"), SCALES) if fmt == "fp8" else (checkpoint, {})
    check_logits(folder, compiled(folder, fmt, "inductor"), fmt, scales)


@pytest.mark.parametrize("fmt", ["fp8", "int8"])
def test_prefix_cache(checkpoint: Path, tmp_path: Path, fmt: Format) -> None:
    """Tokens are the same whether the prompt's beginning is computed or found, or the whole is computed again because
    others took its blocks; and those of transformers."""
    place = compiled(checkpoint, fmt, max_num_seqs=4, max_num_batched_tokens=64)
    core = open_core(checkpoint, place, pages=20)
    prompts = [IDS + IDS, IDS + IDS[:15], IDS * 3]
    cold = [finish(core, [request("a", p)])["a"] for p in prompts]
    warm = [finish(core, [request("a", p)])["a"] for p in prompts]
    assert (cold[0].cached, [r.cached for r in warm]) == (0, [32, 32, 48])
    together = finish(core, [request(str(i), p) for i, p in enumerate(prompts * 2)])
    for i, prompt in enumerate(prompts):
        assert warm[i].tokens == cold[i].tokens == together[str(i)].tokens
        told = expected_logits(checkpoint, prompt + cold[i].tokens, fmt, {})[len(prompt) - 1 : -1]
        drawn = told.gather(1, torch.tensor(cold[i].tokens)[:, None])[:, 0]
        assert (told.max(1).values - drawn).max() < 2e-2


def test_memory_is_stated(checkpoint: Path, tmp_path: Path, cli: Any) -> None:
    """fp8 holds four times the tokens of float32; int8 has four bytes more for each head's keys and values."""
    config = json.loads((checkpoint / "config.json").read_text())
    K, L = config["num_key_value_heads"], config["num_hidden_layers"]
    E = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    sizes = {"auto": 4 * E, "float32": 4 * E, "fp8": E, "int8": E + 4}
    for fmt, size in sizes.items():
        place = compiled(checkpoint, fmt)
        opened = Artifact.open(place)
        memory = opened.memory
        assert memory.block == 16 * memory.token == 16 * 2 * K * size * L
        counts = cache_counts(opened.config, memory, CacheConfig(kv_cache_memory_bytes=1 << 20))
        assert counts.blocks == (1 << 20) // (16 * 2 * K * size * L)
    assert ", cache fp8," in cli("inspect", compiled(checkpoint, "fp8")).out
    keys = [artifact.key_of(Artifact.open(compiled(checkpoint, fmt)).manifest.factors) for fmt in sizes]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_refusals(checkpoint: Path, tmp_path: Path) -> None:
    source = open_source(checkpoint)
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'fp8_e5m2'"):
        EngineArgs(kv_cache_dtype="fp8_e5m2")
    assert EngineArgs(kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8"
    said = EngineArgs(target="cpu", kv_cache_dtype="bfloat16", dtype="float32")
    with pytest.raises(ConfigError, match="kv_cache_dtype is bfloat16: the model computes in float32; use auto"):
        compile_config(source.config, said)
    odd = dict(source.config) | {"head_dim": 18}
    config = compile_config(odd, EngineArgs(target="cpu", kv_cache_dtype="int8", backend="eager"))
    with pytest.raises(ConfigError, match="int8: the model's heads have 18 numbers, no multiple of 4; use fp8"):
        compile_model(odd, source.tensors, config, tmp_path / "odd")
    folder = scaled(checkpoint, tmp_path / "scaled")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.0.self_attn.k_proj.k_scale": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"k_proj.k_scale has shape \[2\]: a cache in fp8 has one scale a layer"):
        compiled(folder, "fp8")
