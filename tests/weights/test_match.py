"""A checkpoint that does not fit is refused before anything is compiled, and compilers that run already are stopped."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphllm.compile import pipeline
from graphllm.config import EngineArgs, Env
from graphllm.loading.artifact.build import find_or_build
from graphllm.loading.artifact.resolve import compile_config
from graphllm.loading.checkpoint.source import open_source
from graphllm.weights.checkpoint.checkpoint import WeightError

GONE = "model.layers.1.self_attn.k_proj.weight"


def _without(tensors: dict[str, torch.Tensor]) -> str:
    del tensors[GONE]
    return f"{GONE}: missing"


def _reshaped(tensors: dict[str, torch.Tensor]) -> str:
    shape = tuple(tensors[GONE].shape)
    tensors[GONE] = tensors[GONE][:, 1:].contiguous()
    return f"{GONE}: shape {tuple(tensors[GONE].shape)}, the model needs {shape}"


def _packed(tensors: dict[str, torch.Tensor]) -> str:
    tensors[GONE] = tensors[GONE].to(torch.int8)
    return f"{GONE}: dtype I8 is not supported"


@pytest.mark.parametrize("spoil", [_without, _reshaped, _packed])
def test_before_anything_is_compiled(checkpoint: Path, tmp_path: Path, spoil: Any) -> None:
    """Although the kernels that most models need begin to compile before torch is imported."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    message = spoil(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source = open_source(folder)
    config = compile_config(source.config, EngineArgs(target="cpu", max_num_seqs=2))
    with mock.patch.object(pipeline, "compile_model") as compiled, pytest.raises(WeightError) as refused:
        find_or_build(source, config, Env(tmp_path / "cache"), "build", lambda *_: None)
    assert message in str(refused.value)
    compiled.assert_not_called()
    assert not list((tmp_path / "cache").rglob("*.o"))  # no compiler came to its end
    left = [p for p in (tmp_path / "cache" / "artifacts").glob("*") if p.is_dir()]
    assert left == []
