"""What the table of targets does not show, on one GPU: no compiler after the start, planned memory, logits, attention.

    python -m bench gpu_proofs [--parts fuzz,memory,logits,attention]

Each part runs in processes of its own. fuzz: after start-up nothing compiles. 2,000 requests of random shapes and
sampling with every compiler's entry watched, the caches of Triton and Inductor unwritable and no program on PATH; the
first request's time to its first token, and the median of the following ones. memory: the planned memory against the
most that is used, over 24 configurations. logits: the 8B shape's, prefill and decode, and transformers' in float32 and
bfloat16 on the same weights. attention: the paged kernels against scaled_dot_product_attention and flex_attention on
contiguous keys and values.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.cases.gpu.table import RATES, this_gpu
from bench.driving import COMPILERS, add, load
from bench.harness import Case, in_process
from bench.models import compile_to, write_checkpoint, write_config

CASES = [("gpu_proofs", {"parts": ("fuzz", "memory", "logits", "attention")})]
PACKAGES = ("transformers",)
GIB = 2**30
_CALLS = 8  # in one graph
# Shape, then --kv-cache-memory-bytes or --gpu-memory-utilization.
MEMORY: list[tuple[str, dict[str, Any]]] = [
    *(("qwen3-0.6b", {"kv_cache_memory_bytes": n * GIB}) for n in (1, 2, 4, 8, 16, 32, 64)),
    *(("qwen3-0.6b", {"gpu_memory_utilization": u}) for u in (0.2, 0.4, 0.6, 0.8, 0.9, 0.95)),
    *(("llama3.1-8b", {"kv_cache_memory_bytes": n * GIB}) for n in (2, 8, 32)),
    *(("llama3.1-8b", {"gpu_memory_utilization": u}) for u in (0.3, 0.6, 0.9, 0.95)),
    *(("qwen3-30b-a3b", options) for options in ({"kv_cache_memory_bytes": 8 * GIB}, {"gpu_memory_utilization": 0.9})),
    *(("gpt-oss-20b", options) for options in ({"kv_cache_memory_bytes": 8 * GIB}, {"gpu_memory_utilization": 0.9})),
]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.1}, {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "min_p": 0.1, "logit_bias": {3: 1.0}},
]  # fmt: skip


def prepared(shape: str, weights: bool = False) -> tuple[Path, Path]:
    """The folder of a shape with its config, or a checkpoint too, and its artifact."""
    folder = Path(tempfile.gettempdir()) / f"graphllm-{shape}{'-weights' if weights else ''}"
    write_config(folder, shape)
    if weights and not (folder / "model.safetensors.index.json").exists():
        write_checkpoint(folder)
    artifact = folder / "artifact"
    if not artifact.exists():
        options = ["--max-model-len", "4096", *([] if weights else ["--load-format", "dummy", "--no-tune"])]
        compile_to(artifact, folder, *options)
    return folder, artifact


def finish(core: Any) -> None:
    while core.unfinished:
        core.step()


def fuzz() -> dict[str, Any]:
    """In this process, which is spoilt for anything else."""
    folder, artifact = prepared("qwen3-0.6b")
    nowhere = "/proc/graphllm-nowhere"  # neither there nor to be made
    os.environ |= {"PATH": nowhere, "TRITON_CACHE_DIR": nowhere, "TORCHINDUCTOR_CACHE_DIR": nowhere}
    events: list[str] = []
    ready = False

    def watch(event: str, args: tuple[Any, ...]) -> None:
        started = event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system", "os.fork")
        compiler = event == "import" and str(args[0]).startswith(COMPILERS)
        if ready and (started or compiler):
            events.append(f"{event} {args[0]}")

    sys.addaudithook(watch)
    core = load(artifact, folder)
    ready = True
    rng = np.random.default_rng(0)

    def prompt(n: int) -> list[int]:
        return rng.integers(0, 151936, n).tolist()

    def first_token() -> float:
        tokens = prompt(128)
        start = time.perf_counter()
        add(core, [tokens], [4], {"temperature": 0.0})
        while not core.step():
            pass
        taken = time.perf_counter() - start
        finish(core)
        return 1e3 * taken

    first = first_token()
    steady = statistics.median(first_token() for _ in range(50))
    before, added = time.perf_counter(), 0
    while added < 2000 or core.unfinished:
        if added < 2000 and rng.random() < 0.5:
            for _ in range(int(rng.integers(1, min(41, 2001 - added)))):
                length, limit = int(rng.integers(1, 1500)), int(rng.integers(1, 60))
                add(core, [prompt(length)], [limit], SAMPLING[added % len(SAMPLING)], added)
                added += 1
        core.step()
    return {
        "first request, ms to its first token": round(first, 2), "median of 50 after it": round(steady, 2),
        "ratio": round(first / steady, 2), "requests": added, "seconds": round(time.perf_counter() - before, 1),
        "compiler modules loaded": [m for m in COMPILERS if m in sys.modules], "processes or compilers started": events,
    }  # fmt: skip


def memory(index: int) -> dict[str, Any]:
    """Of one configuration: full steps of every kind, so that everything is loaded, captured and allocated."""
    import torch

    from graphllm.loading.memory import gpu_bytes
    from graphllm.program.artifact import Artifact

    shape, options = MEMORY[index]
    folder, artifact = prepared(shape)
    torch.zeros(1, device="cuda")
    before, _ = torch.cuda.mem_get_info()
    core = load(artifact, folder, **options)
    planned = gpu_bytes(Artifact.open(artifact).memory, core.info.num_blocks)
    started = before - torch.cuda.mem_get_info()[0]
    rng = np.random.default_rng(0)
    for count in (1, 3, 9, 17, 40, 100, 300, 700):
        add(core, rng.integers(0, 1000, (count, 100)).tolist(), [6] * count, SAMPLING[count % len(SAMPLING)])
        finish(core)
    used = before - torch.cuda.mem_get_info()[0]
    return {
        "shape": shape, **options, "planned MB": round(planned / 1e6, 1), "after start MB": round(started / 1e6, 1),
        "most MB": round(used / 1e6, 1), "most / planned": round(used / planned, 4),
        "torch reserved MB": round(torch.cuda.memory_reserved() / 1e6, 1),
    }  # fmt: skip


def logits() -> dict[str, Any]:
    """Relative errors against float32, of the last prompt token's and 16 decode steps' logits."""
    import torch
    from transformers import AutoModelForCausalLM

    from graphllm.loading.checkpoint.source import open_source
    from graphllm.program.artifact import Artifact
    from graphllm.runtime.executor import Executor
    from graphllm.runtime.memory.staging import ragged
    from graphllm.weights.loading.loader import load_weights
    from graphllm.weights.plan.plan import WeightPlan

    folder, artifact = prepared("llama3.1-8b", weights=True)
    opened, source = Artifact.open(artifact), open_source(folder)
    plan = WeightPlan.from_json(opened.weights)
    assert source.checkpoint is not None
    executor = Executor(opened, load_weights(plan, source.checkpoint, "cuda"), 512)
    ids = np.random.default_rng(0).integers(0, 128256, 600).astype(np.int32)
    blocks = np.arange(1, 40, dtype=np.int32)[None]

    def step(start: int, end: int) -> Any:
        found = executor.run(ragged([ids[start:end]], [start], [blocks[:, : -(-end // 16)]]))
        assert found.logits is not None
        return found.logits[0].float().clone()

    ours = torch.stack([step(0, 584), *(step(i, i + 1) for i in range(584, 600))])
    errors: dict[str, Any] = {}
    exact = None
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda().eval()
        with torch.no_grad():
            found = model(torch.tensor(ids[None], device="cuda", dtype=torch.long)).logits[0, 583:].float()
        del model
        torch.cuda.empty_cache()
        if exact is None:
            exact = found
        else:
            errors[f"transformers {name}"] = ((found - exact).norm(dim=1) / exact.norm(dim=1)).tolist()
    assert exact is not None
    errors["graphllm"] = ((ours - exact).norm(dim=1) / exact.norm(dim=1)).tolist()
    same = int((ours.argmax(1) == exact.argmax(1)).sum())
    return {
        **{f"{n}: mean, largest": [round(float(np.mean(e)), 5), round(max(e), 5)] for n, e in errors.items()},
        "prefill": {n: round(e[0], 5) for n, e in errors.items()},
        "same first choice as float32, of 17": same,
    }


def attention() -> dict[str, Any]:
    """8B heads: 32 query and 8 key and value heads of 128; ours from shuffled pages of 16, and storing the new keys."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torch.nn.functional import scaled_dot_product_attention

    from graphllm.compile.tuning.tune import microseconds
    from graphllm.config import Bucket
    from graphllm.host.machine import detect_target
    from graphllm.ir.op import CallSite
    from graphllm.ops.attention.paged_attention import paged_attention

    H, K, E, P = 32, 8, 128, 16
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    flex = torch.compile(flex_attention, dynamic=False)
    result = {}
    for name, S, new, context in (
        ("decode, 1 x 1,024", 1, 1, 1024), ("decode, 1 x 8,192", 1, 1, 8192), ("decode, 32 x 1,024", 32, 1, 1024),
        ("decode, 256 x 1,024", 256, 1, 1024), ("prefill, 1 x 8,192", 1, 8192, 8192),
        ("prefill, 8 x 1,024", 8, 1024, 1024),
    ):  # fmt: skip
        width, T = context // P, S * new
        q, k, v = (torch.randn(T, heads, E, **made) for heads in (H, K, K))
        table = torch.randperm(S * width, device="cuda").int().view(S, width)
        args = {
            "q_THE": q, "k_TKE": k, "v_TKE": v, "kv_cache": torch.randn(S * width, 2, K, P, E, **made),
            "block_table": table, "query_start_loc": torch.arange(S + 1, device="cuda", dtype=torch.int32) * new,
            "seq_lens": torch.full((S,), context, device="cuda", dtype=torch.int32), "scale": E**-0.5,
        }  # fmt: skip
        bucket = Bucket("decode" if new == 1 else "mixed", T if new == 1 else 2, max(T, 2) if new > 1 else T)
        impl = paged_attention.impls["triton_decode" if new == 1 else "triton_prefill"]
        site = CallSite(paged_attention.bind((), args), detect_target("cuda"), bucket)
        ours = functools.partial(impl.at(site), **site.args)
        row = {"graphllm, paged": microseconds([ours] * _CALLS)}
        q4, k4, v4 = (torch.randn(S, heads, n, E, **made) for heads, n in ((H, new), (K, context), (K, context)))
        causal = new > 1
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
            try:
                with sdpa_kernel(backend):
                    row[f"SDPA, {backend.name.lower()}"] = microseconds(
                        [functools.partial(scaled_dot_product_attention, q4, k4, v4, is_causal=causal, enable_gqa=True)]
                        * _CALLS
                    )
            except RuntimeError as refused:
                print(name, backend.name, str(refused).splitlines()[0], file=sys.stderr)
        try:
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, new, context) if causal else None
            row["flex_attention, compiled"] = microseconds(
                [functools.partial(flex, q4, k4, v4, block_mask=mask, enable_gqa=True)] * _CALLS
            )
        except Exception as failed:
            print(name, "flex_attention", repr(failed)[:300], file=sys.stderr)
        row = {n: round(t, 1) for n, t in row.items()}
        if causal:
            row["TFLOP/s"] = {n: round(4 * S * H * E * (new * (new + 1) / 2) / t / 1e6) for n, t in row.items()}
        else:
            least = S * context * 2 * K * E * 2 / RATES[this_gpu()][0] * 1e6
            row["share of the floor"] = {n: round(least / t, 2) for n, t in row.items()}
        result[name] = row
        del q, k, v, args, ours, q4, k4, v4
        torch.cuda.empty_cache()
    return result


PARTS = {"fuzz": fuzz, "logits": logits, "attention": attention}


def run(case: Case) -> Iterator[dict[str, Any]]:
    """The parts, each in a process of its own; of memory each configuration."""
    for name in case.parts:
        if name == "memory":
            for shape in {shape for shape, _ in MEMORY}:
                prepared(shape)
            yield {name: [in_process(memory, index) for index in range(len(MEMORY))]}
        else:
            yield {name: in_process(PARTS[name])}
