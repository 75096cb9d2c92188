"""Memory while the weights of a large model are loaded: its peak beside the model's own bytes and the largest tensor.

    python bench/load_memory.py [--layers 16] [--quantization int4] [--device cpu] [--out FILE.json]

The shape is Llama-3 70B's, 80 layers unless fewer are asked for. Its checkpoint in bf16 is of files with holes, so it
takes no disk; a fresh process loads them as an engine does. Of a GPU's memory the peak is PyTorch's own count.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 28672,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


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
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
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


def load(folder: Path, artifact: Path, device: str) -> dict[str, float]:
    """In this process: the peak and the model, in bytes."""
    import torch

    from graphllm.weights.checkpoint.checkpoint import Checkpoint
    from graphllm.weights.loading.loader import load_weights
    from graphllm.weights.plan.plan import WeightPlan

    def resident(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

    plan = WeightPlan.from_json((artifact / "weights.json").read_text())
    before = resident("VmRSS")
    weights = load_weights(plan, Checkpoint.open(folder), device)
    found = {"host peak": float(resident("VmHWM") - before), "model": float(plan.total_bytes), "tensors": len(weights)}
    if device == "cuda":
        found["GPU peak"] = float(torch.cuda.max_memory_allocated())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--load", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load(*args.load, args.device)))
        return
    with tempfile.TemporaryDirectory() as place:
        folder, artifact = Path(place) / "model", Path(place) / "artifact"
        folder.mkdir()
        write(folder, args.layers)
        command = [sys.executable, "-m", "graphllm.cli", "compile", str(folder), "-o", str(artifact), "--device",
                   args.device, "--quantization", args.quantization, "--max-model-len", "512"]  # fmt: skip
        subprocess.run(command, check=True)
        words = [sys.executable, __file__, "--device", args.device, "--load", str(folder), str(artifact)]
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    largest = max(2 * math.prod(s) for shapes in tensors(1).values() for s in shapes.values())
    found = {"command": " ".join(sys.argv), "machine": platform.processor() or platform.machine(),
             "largest tensor": largest, **json.loads(done.stdout.splitlines()[-1])}  # fmt: skip
    peak = found["GPU peak"] if args.device == "cuda" else found["host peak"]
    found["over the model, in largest tensors"] = round((peak - found["model"]) / largest, 3)
    print(json.dumps(found, indent=1))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
