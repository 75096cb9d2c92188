"""Memory while the weights of a large model are loaded: its peak, the model's own bytes and the largest tensor.

The shape is Llama-3 70B's, 80 layers unless fewer are asked for. Its checkpoint in bf16 is of files with holes, so it
takes no disk; a fresh process loads them as an engine does. Of a GPU's memory the peak is PyTorch's own count.
"""

from __future__ import annotations

import json
import math
import struct
import tempfile
from pathlib import Path
from typing import Any

from bench.harness import Case, in_process
from bench.models import compile_to, write_config

CASES = [("load_memory", {"layers": 80, "quantization": "int4", "target": "cpu"})]
HELP = {"layers": "layers of the model", "quantization": "format of the loaded weights", "target": "cpu or cuda"}


def tensors(layers: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes by name, by file: one for each layer, one for the rest."""
    D, F, V, KV = 8192, 28672, 128256, 1024
    files: dict[str, dict[str, tuple[int, ...]]] = {
        "rest.safetensors": {"model.embed_tokens.weight": (V, D), "lm_head.weight": (V, D), "model.norm.weight": (D,)}
    }
    for i in range(layers):
        at = f"model.layers.{i}."
        files[f"{i}.safetensors"] = {
            at + "self_attn.q_proj.weight": (D, D), at + "self_attn.k_proj.weight": (KV, D),
            at + "self_attn.v_proj.weight": (KV, D), at + "self_attn.o_proj.weight": (D, D),
            at + "mlp.gate_proj.weight": (F, D), at + "mlp.up_proj.weight": (F, D), at + "mlp.down_proj.weight": (D, F),
            at + "input_layernorm.weight": (D,), at + "post_attention_layernorm.weight": (D,),
        }  # fmt: skip
    return files


def write(folder: Path, layers: int) -> None:
    """The checkpoint; its numbers are zeros."""
    write_config(folder, "llama3-70b", num_hidden_layers=layers, max_position_embeddings=8192)
    index = {}
    for file, shapes in tensors(layers).items():
        header, end = {}, 0
        for name, shape in shapes.items():
            begin, end = end, end + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
            index[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def load(folder: str, artifact: str, device: str) -> dict[str, float]:
    """In this process: the peak and the model, in bytes."""
    import torch

    from graphllm.weights.checkpoint.checkpoint import Checkpoint
    from graphllm.weights.loading.loader import load_weights
    from graphllm.weights.plan.plan import WeightPlan

    def resident(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

    plan = WeightPlan.from_json(Path(artifact, "weights.json").read_text())
    before = resident("VmRSS")
    weights = load_weights(plan, Checkpoint.open(Path(folder)), device)
    found = {"host peak": float(resident("VmHWM") - before), "model": float(plan.total_bytes), "tensors": len(weights)}
    if device == "cuda":
        found["GPU peak"] = float(torch.cuda.max_memory_allocated())
    return found


def run(case: Case) -> dict[str, Any]:
    """Bytes of the peak, of the model and of the largest tensor."""
    with tempfile.TemporaryDirectory() as place:
        folder, artifact = Path(place) / "model", Path(place) / "artifact"
        write(folder, case.layers)
        options = ("--device", case.target, "--quantization", case.quantization, "--max-model-len", "512")
        compile_to(artifact, folder, *options)
        found = in_process(load, folder, artifact, case.target)
    largest = max(2 * math.prod(s) for shapes in tensors(1).values() for s in shapes.values())
    peak = found["GPU peak"] if case.target == "cuda" else found["host peak"]
    over = round((peak - found["model"]) / largest, 3)
    return {"largest tensor": largest, **found, "over the model, in largest tensors": over}
