"""What LoRA adapters cost on one GPU, with random weights of a real shape: steps with and without, and loading.

decode: ms of a step of 1 and 64 sequences, 128 tokens in and 128 out, in turn without adapters from an artifact without
tables ("plain") and from one with them ("none"), and with the adapters in turn on every linear layer ("adapters").
loading: the longest time between two tokens of any of 64 streams, by themselves, while requests come, and while
requests bring adapters with files that nobody has read. `--shape tiny` tries it out anywhere.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.driving import load
from bench.driving import run as drive
from bench.harness import Case
from bench.models import SHAPES, compile_to, write_config
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.requests.request import Adapter, EngineRequest

CASES = [("lora_gpu", {"shape": "llama3.1-8b", "adapters": 8, "rank": 16, "turns": 4, "compile": ""})]
HELP = {"compile": "more options for graphllm compile"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


def write_adapter(folder: Path, linears: Any, rank: int, seed: int) -> Adapter:
    """Random numbers for every linear layer, in bf16."""
    import torch
    from safetensors.torch import save_file

    from graphllm.weights.adapters.adapters import adapter_digest

    folder.mkdir()
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for linear in linears:
        for part, width in zip(linear.parts, linear.widths, strict=True):
            for which, shape in (("A", (rank, linear.inputs)), ("B", (width, rank))):
                name = f"base_model.model.{part.modules[0]}.lora_{which}.weight"
                tensors[name] = (torch.randn(shape, generator=draw) / 64).bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return Adapter(folder.name, str(folder), adapter_digest(folder))


def prompts(count: int, vocab: int, length: int = 128) -> list[list[int]]:
    """Random ones."""
    rng = np.random.default_rng(count)
    return [rng.integers(0, vocab, length).tolist() for _ in range(count)]


def with_adapters(core: Any, asked: list[list[int]], adapters: list[Adapter], limit: int, name: str = "") -> None:
    """Queue requests that have the adapters in turn."""
    for i, prompt in enumerate(asked):
        adapter = adapters[i % len(adapters)] if adapters else None
        core.add(
            EngineRequest(
                id=f"{name}{i}", prompt=prompt, params=GREEDY, stop_ids=[], limit=limit, seed=i, adapter=adapter
            )
        )


def step_ms(core: Any, size: int, vocab: int, adapters: list[Adapter]) -> float:
    """The median step of ``size`` requests that decode."""
    if not adapters:
        return drive(core, prompts(size, vocab), [128] * size, {"temperature": 0.0})["median step ms"]
    with_adapters(core, prompts(size, vocab), adapters, 128)
    steps = []
    while core.unfinished:
        begin = time.perf_counter()
        core.step()
        steps.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(steps)


def longest_pause(core: Any, vocab: int, running: list[Adapter], new: list[Adapter]) -> float:
    """Milliseconds between two tokens of any of 64 streams, at most, while others come with new adapters."""
    with_adapters(core, prompts(64, vocab), running, 300, "stream")
    last: dict[str, float] = {}
    longest, steps = 0.0, 0
    while core.unfinished:
        news = core.step()
        steps += 1
        now = time.perf_counter()
        for output in news:
            if output.id.startswith("stream") and output.tokens:
                if steps > 100:  # all of them decode
                    longest = max(longest, now - last.get(output.id, now))
                last[output.id] = now
        if new and steps in (120, 160, 200):
            with_adapters(core, prompts(1, vocab, 16), [new[steps // 40 - 3]], 8, f"new{steps}")
    return 1e3 * longest


def run(args: Case) -> dict[str, Any]:
    """Steps, then pauses; both engines lie on the GPU at once."""
    shape, found = SHAPES[args.shape], dict[str, Any]()
    with tempfile.TemporaryDirectory() as work:
        folder = write_config(Path(work, args.shape), args.shape)
        common = ("--load-format", "dummy", "--max-model-len", "1024", "--max-num-seqs", "80", *args.compile.split())
        tables = ("--enable-lora", "--max-loras", str(args.adapters + 3), "--max-lora-rank", str(args.rank))
        cores = {}
        for name, more in (("plain", ()), ("lora", tables)):
            begun = time.perf_counter()
            compile_to(Path(work, name), folder, *common, *more)
            found[f"compile s, {name}"] = round(time.perf_counter() - begun, 1)
            options: dict[str, Any] = {"kv_cache_memory_bytes": 8 << 30, **({"max_cpu_loras": 32} if more else {})}
            begun = time.perf_counter()
            cores[name] = load(Path(work, name), folder, **options)
            found[f"load s, {name}"] = round(time.perf_counter() - begun, 1)
        linears = cores["lora"].info.adapted
        adapters = [write_adapter(Path(work, f"adapter-{i}"), linears, args.rank, i) for i in range(args.adapters + 3)]
        known, new, vocab = adapters[: args.adapters], adapters[args.adapters :], shape["vocab_size"]
        given = {"plain": (cores["plain"], []), "none": (cores["lora"], []), "adapters": (cores["lora"], known)}
        rows: dict[str, list[float]] = {}
        for turn in range(args.turns + 1):
            for size in (1, 64):
                for name in given if turn % 2 else reversed(given):  # none always follows the same one
                    core, own = given[name]
                    ms = step_ms(core, size, vocab, own)
                    if turn:  # the first one captures
                        rows.setdefault(f"decode {size}, {name}", []).append(round(ms, 3))
        pauses = {
            "plain": ([], []), "adapters": (known, []), "three more come": (known, known[:3]),
            "three more come with new adapters": (known, new),
        }  # fmt: skip
        found["longest pause ms"] = {
            name: round(longest_pause(cores["lora"], vocab, *asked), 2) for name, asked in pauses.items()
        }
        for core in cores.values():
            core.close()
    return {**found, **{row: {"ms": statistics.median(ms), "runs": ms} for row, ms in rows.items()}}
