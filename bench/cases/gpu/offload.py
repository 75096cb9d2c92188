"""Weights that lie in the host's memory: a shape of 70 billion parameters in 4 bits on a part of one GPU's memory.

The GPU's memory is limited by settings, and what the process took is read from the driver, at its most. Its speed
stands beside the link's rate, which one large copy shows. The tokens must be those of an engine that has all weights on
the GPU.
"""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.driving import add, load, outputs
from bench.harness import Case, check_tokens, in_process, void_unless
from bench.models import SHAPES, compile_to, new_folder

CASES = [
    ("gpu_offload", {"shapes": ("llama3-70b-awq",), "offload_gib": 21.0, "limit_gb": 24.0, "batches": (1, 16),
                     "steps": 6, "compile": "--no-tune"}),
]  # fmt: skip
HELP = {
    "shapes": "shapes of models",
    "offload_gib": "of weights on the host",
    "limit_gb": "GB of the GPU's memory that the engine may take",
    "batches": "sequences that decode",
    "steps": "that are timed",
    "compile": "more options for graphllm compile",
}
_PROMPT, _ANSWER = 64, 8  # tokens
_GREEDY = {"temperature": 0.0}
_COPY = 1 << 30  # bytes


def measure(shape: str, folder: str, offload_gib: float, limit_gb: float, batches: list[int], steps: int) -> Any:
    """Of one engine, in a process of its own. offload_gib: 0: all weights are on the GPU, and nothing is limited."""
    import torch

    others = _used()
    torch.zeros(1, device="cuda")
    most, ended = [0], threading.Event()
    total = torch.cuda.mem_get_info()[1]

    def watch() -> None:
        while not ended.wait(0.02):
            free, _ = torch.cuda.mem_get_info()
            most[0] = max(most[0], total - free - others)

    watcher = threading.Thread(target=watch)
    watcher.start()
    options: dict[str, Any] = {"kv_cache_memory_bytes": 2 << 30}
    if offload_gib:
        options = {"cpu_offload_gb": offload_gib, "gpu_memory_utilization": min(1.0, (others + limit_gb * 1e9) / total)}
    begun = time.perf_counter()
    core = load(Path(folder, "artifact"), Path(folder), **options)
    found: dict[str, Any] = {"start s": round(time.perf_counter() - begun, 1)}
    held = sum(w.nbytes for w in core.executor.worker.weights.values() if w.device.type == "cpu")
    rng, vocab = np.random.default_rng(0), SHAPES[shape]["vocab_size"]
    tokens = {}
    for batch in batches:
        prompts = rng.integers(3, vocab, (batch, _PROMPT)).tolist()
        tokens[str(batch)] = outputs(core, prompts, _ANSWER, _GREEDY)
        add(core, prompts, [_ANSWER + steps] * batch, _GREEDY)
        taken, times = 0, []
        while core.unfinished:
            start = time.perf_counter()
            taken += sum(len(answer.tokens) for answer in core.step())
            times.append(time.perf_counter() - start)
        seconds = statistics.median(times[-steps - 1 : -1])
        row: dict[str, Any] = {"ms": round(1e3 * seconds, 2), "tokens/s": round(batch / seconds, 2)}
        if held:
            row |= {"host's weights GB/s": round(held / seconds / 1e9, 2)}
        found[f"decode {batch}"] = row
    core.close()
    ended.set()
    watcher.join()
    found |= {"GB on the host": round(held / 1e9, 2), "GPU's GB, at most": round(most[0] / 1e9, 2)}
    if offload_gib:
        found |= {"within the limit": most[0] <= limit_gb * 1e9, "link GB/s": _link()}
    return {"figures": found | void_unless(check_tokens, tokens[str(max(batches))]), "tokens": tokens}


def _used() -> int:
    """Bytes of the GPU that are in use, before this process uses it; 0 where the driver's tool is not there."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return int(found.split()[0]) << 20
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return 0


def _link() -> float:
    """GB/s of one large copy from registered memory."""
    import torch

    source = torch.empty(_COPY, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_COPY, dtype=torch.uint8, device="cuda")
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(4):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return round(4 * _COPY / (time.perf_counter() - begun) / 1e9, 2)


def run(case: Case) -> Iterator[dict[str, Any]]:
    """Shape by shape: offloaded, then with all weights on the GPU."""
    for shape in case.shapes:
        folder, most = new_folder(shape), max(case.batches)
        buckets = ",".join(["decode-1", *([f"decode-2-{most}"] if most > 1 else []), "mixed-2-512"])
        start = time.perf_counter()
        compile_to(
            folder / "artifact", folder, "--max-model-len", "2048", "--load-format", "dummy", "--buckets", buckets,
            "--max-num-seqs", str(most), *case.compile.split(),
        )  # fmt: skip
        compiled = round(time.perf_counter() - start, 1)
        given = (list(case.batches), case.steps)
        offloaded = in_process(measure, shape, folder, case.offload_gib, case.limit_gb, *given)
        yield {shape: {"compile s": compiled, **offloaded.get("figures", offloaded)}}
        plain = in_process(measure, shape, folder, 0, 0, *given)
        same = "figures" in plain and "figures" in offloaded and plain["tokens"] == offloaded["tokens"]
        yield {f"{shape}, all on the GPU": {**plain.get("figures", plain), "equal tokens": same}}
