"""`graphllm run --lora`: an adapter for all prompts, or by the lines' field ``model``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from graphllm.weights.checkpoint.checkpoint import read_header

SMALL = ("--backend", "eager", "--max-model-len", 96, "--max-num-seqs", 4, "--max-num-batched-tokens", 64)
GREEDY = ("--temperature", 0, "--max-tokens", 6, "--ignore-eos", "-q")


@pytest.fixture
def adapter(checkpoint: Path, tmp_path: Path) -> Path:
    """One that turns the model's output around: the last projections are taken away and added with the other sign."""
    tensors = {}
    header = read_header(checkpoint / "model.safetensors")
    torch.manual_seed(1)
    for name, info in header.items():
        if name.endswith("down_proj.weight"):
            module = name.removesuffix(".weight")
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(4, info.shape[1])
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(info.shape[0], 4)
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4}))
    return folder


def test_lines_name_adapters(cli: Any, checkpoint: Path, adapter: Path, tmp_path: Path) -> None:
    """The same text with one and without; a run goes on with the same adapter only."""
    lines, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"id": model or "none", "prompt": "hello world", "model": model} for model in ("", "odd", "other")]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ("run", lines, "--model", checkpoint, *SMALL, *GREEDY, "--raw", "--enable-lora", "-o", out)
    assert cli(*common, "--lora", f"odd={adapter}").code == 1
    answers = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert "no adapter has this name" in answers["other"]["error"]
    found = {id: answers[id]["text"] for id in ("none", "odd")}
    assert found["none"] != found["odd"]
    first = out.read_text()
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 4', '"lora_alpha": 8'))
    done = cli(*common, "--lora", f"odd={adapter}")
    assert (done.code, "changed" in done.err, out.read_text()) == (2, True, first)
    done = cli("run", "-p", "hello world", "--model", checkpoint, *SMALL, *GREEDY, "--raw", "--enable-lora",
               "--lora", adapter)  # fmt: skip
    assert done.code == 0
    assert done.out.strip() != found["none"].strip()


def test_mistakes(cli: Any, checkpoint: Path, adapter: Path, tmp_path: Path) -> None:
    common = ("run", "-p", "a", "--model", checkpoint, *SMALL)
    for options, told in (
        (("--lora", adapter), "adapters run with --enable-lora"),
        (("--enable-lora", "--lora", tmp_path / "x"), "No such file"),
        (("--enable-lora", "--lora", "a="), "give a folder once"),
        (("--enable-lora", "--max-lora-rank", 3, "--lora", adapter), "start with --max-lora-rank 4"),
    ):
        done = cli(*common, *options)
        assert (done.code, told in done.err) == (2, True), done.err


def test_inspect(cli: Any, checkpoint: Path, adapter: Path) -> None:
    done = cli("inspect", adapter)
    layers = [n for n in read_header(checkpoint / "model.safetensors") if n.endswith("down_proj.weight")]
    assert done.code == 0
    assert "--max-lora-rank 4" in done.out
    assert "served    yes" in done.out
    facts = json.loads(cli("inspect", adapter, "--json").out)
    (row,) = facts["modules"]
    assert row["module"] == "model.layers.*.mlp.down_proj"
    assert (row["count"], row["rank"], row["scale"]) == (len(layers), 4, 1.0)
    assert facts["parameters"] == len(layers) * 4 * (row["inputs"] + row["outputs"])
    assert facts["bytes"] == 4 * facts["parameters"]
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    assert "served" in (told := cli("inspect", adapter).out)
    assert "use_dora is True, which cannot be served; merge it" in " ".join(told.split())
