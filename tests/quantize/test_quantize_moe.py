"""int8 and int4 experts from the checkpoint to the logits, in each form in which checkpoints store experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from graphllm.config import Bucket
from graphllm.program.artifact import Artifact
from graphllm.runtime.executor import Executor
from graphllm.runtime.memory.staging import ragged
from graphllm.weights.encodings import encoding_of
from graphllm.weights.formats.integers import INTEGERS
from graphllm.weights.loading.random import random_weights
from graphllm.weights.plan.plan import WeightPlan
from tests.artifacts import artifact_of, open_executor
from tests.tiers import thorough

COMMON = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.15,
    "num_local_experts": 5, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
# A tensor for each expert's gate, up and down; stacked ones; stacked, transposed ones with gates and ups by turns.
FAMILIES = ("Qwen3Moe", "GraniteMoe", "GptOss")
IDS = [5, 80, 2, 17, 9, 33, 15, 61, 3]


def _checkpoint(family: str, folder: Path) -> transformers.PreTrainedModel:
    torch.manual_seed(2)
    config = getattr(transformers, f"{family}Config")(**COMMON)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p += 0.2 * torch.randn(p.shape)
    model.save_pretrained(folder)
    return model


def _executor(folder: Path, fmt: Any, backend: Any = "eager", **more: Any) -> tuple[Executor, Path]:
    place = artifact_of(folder, backend=backend, quantization=fmt, max_model_len=96, dtype="float32", **more)
    return open_executor(folder, place), place


def _logits(executor: Executor, ids: list[int]) -> torch.Tensor:
    logits = executor.run(ragged([ids], [0], [np.arange(1, 7, dtype=np.int32)[None]])).logits
    assert logits is not None
    return logits[0].float().clone()


def _round(tensors: dict[str, torch.Tensor], family: str, fmt: str) -> None:
    """Every matrix that is quantized, by itself: of stacked ones each expert's, as the product reads them."""
    encoding = INTEGERS[fmt] if fmt in INTEGERS else encoding_of("nf4_rows")

    def rounded(matrix: torch.Tensor) -> torch.Tensor:
        return encoding.decode(encoding.encoded(matrix), *matrix.shape).float().contiguous()

    for name, t in tensors.items():
        if "embed" in name or "bias" in name or "router" in name or name.endswith("mlp.gate.weight"):
            continue
        if t.dim() == 2:
            tensors[name] = rounded(t)
        elif t.dim() == 3 and family == "GptOss":
            tensors[name] = torch.stack([rounded(m.T.contiguous()).T for m in t]).contiguous()
        elif t.dim() == 3:
            tensors[name] = torch.stack([rounded(m) for m in t])


@pytest.mark.parametrize(
    ("family", "fmt"),
    [*((f, "int8") for f in FAMILIES), ("GptOss", "int4"), ("Qwen3Moe", "nf4"), thorough("GptOss", "nf4")],
)
def test_logits_are_those_of_the_rounded_checkpoint(tmp_path: Path, family: str, fmt: str) -> None:
    model = _checkpoint(family, tmp_path)
    executor, place = _executor(tmp_path, fmt)
    plan = WeightPlan.from_json((place / "weights.json").read_text())
    if fmt != "nf4":  # which no op reads
        assert plan["layers.1.gate_up.values"].shape[0] == plan["layers.0.down.scales"].shape[0] == 5
    (router,) = (e for e in plan if e.name in ("layers.0.router", "layers.0.router.padded"))
    assert router.dtype == "float32"
    tensors = load_file(tmp_path / "model.safetensors")
    _round(tensors, family, fmt)
    other = tmp_path / "rounded"
    other.mkdir()
    (other / "config.json").write_text((tmp_path / "config.json").read_text())
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with torch.inference_mode():
        exact = model(torch.tensor([IDS])).logits[0, -1]
        truth = type(model).from_pretrained(other)(torch.tensor([IDS])).logits[0, -1]
    found = _logits(executor, IDS)
    assert float((found - truth).norm() / truth.norm()) < 1e-5
    assert float((found - exact).norm() / exact.norm()) > 1e-4  # so it was rounded


def test_random_experts(tmp_path: Path) -> None:
    """The same numbers for all parts of a matrix, in memory of the plan's shapes."""
    _checkpoint("Qwen3Moe", tmp_path)
    _, place = _executor(tmp_path, "int8")
    weights = random_weights(WeightPlan.from_json((place / "weights.json").read_text()))
    parts = {p.name: weights[f"layers.0.gate_up.{p.name}"][3] for p in INTEGERS["int8"].parts}
    assert float(INTEGERS["int8"].decode(parts, 64, 48).std()) == pytest.approx(0.02, rel=0.1)


@pytest.mark.slow
def test_compiled_kernels_in_a_model(tmp_path: Path) -> None:
    """The C++ kernels, which round x too, inside a compiled artifact: prompts and decoding, int4."""
    _checkpoint("GptOss", tmp_path)
    eager, _ = _executor(tmp_path, "int4")
    compiled, place = _executor(tmp_path, "int4", "inductor", buckets=(Bucket("mixed", 2, 32),))
    chosen = Artifact.open(place).manifest.pieces.values()
    assert any("quant_moe: cpu_experts" in ops for of in chosen for ops in of.values())
    for ids in (IDS, IDS[:1]):
        truth = _logits(eager, ids)
        assert float((_logits(compiled, ids) - truth).norm() / truth.norm()) < 0.03
