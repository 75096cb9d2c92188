"""Quantized checkpoints of other programs: every format gives exactly the numbers that it stands for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from quantized import FORMATS, write
from safetensors.torch import load_file, save_file

from graphllm.compile.pipeline import find_model
from graphllm.config import ConfigError
from graphllm.entrypoints.source import open_source
from graphllm.weights.loader import load_weights
from graphllm.weights.plan import WeightPlan, make_plan
from graphllm.weights.schemes import as_quantized


def _plan(folder: Path) -> WeightPlan:
    source = open_source(folder)
    assert source.checkpoint is not None
    model = find_model(source.config)
    plan = make_plan(model, model.config(source.config), "float32")
    return as_quantized(plan, source.config, source.checkpoint.tensors)


@pytest.mark.parametrize("name", FORMATS)
def test_numbers(name: str, tmp_path: Path) -> None:
    model = write(tmp_path, FORMATS[name])
    source = open_source(tmp_path)
    assert source.checkpoint is not None
    weights = load_weights(_plan(tmp_path), source.checkpoint)
    stored = model.state_dict()
    for i in range(2):
        at = f"model.layers.{i}."
        qkv = torch.cat([stored[f"{at}self_attn.{n}_proj.weight"] for n in "qkv"])
        torch.testing.assert_close(weights[f"layers.{i}.qkv"], qkv, rtol=1e-6, atol=0)
        down = stored[f"{at}mlp.down_proj.weight"]
        torch.testing.assert_close(weights[f"layers.{i}.down"], down, rtol=1e-6, atol=0)
