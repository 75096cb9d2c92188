"""Attention of prompts on one GPU: every implementation with each of its launch constants, and torch's routines.

32 query heads over 8 of keys and values, 128 numbers each, bf16. Ours store keys and values in the cache and attend
over its blocks. Torch's read them where the projection left them and know neither windows nor a cached prefix: there
the product with the prefix and that within the new tokens are two calls, which nobody joins here. Each figure is the
least median of rounds in turns, of calls in a CUDA graph. TFLOP/s count the pairs that the mask lets through; errors
are of some rows, against float32.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.harness import Case, in_turn
from graphllm.config import Bucket
from graphllm.host.machine import detect_target
from graphllm.ir.op import CallSite
from graphllm.ops.attention.paged_attention import paged_attention

H, K, E = 32, 8, 128
SHAPES = {  # new tokens, length, window
    "8192": (8192, 8192, 0), "32768": (32768, 32768, 0), "4096 after 4096": (4096, 8192, 0),
    "32768 window 4096": (32768, 32768, 4096), "1024": (1024, 1024, 0),
}  # fmt: skip
CASES = [
    ("gpu_prompts", {"shapes": ("8192", "32768", "4096 after 4096", "32768 window 4096", "1024"), "block_size": 16,
                     "rounds": 3}),
]  # fmt: skip
HELP = {"shapes": "names of SHAPES: new tokens, cached tokens, window"}


def step(new: int, length: int, window: int, P: int) -> dict[str, Any]:
    """Arguments of the op for one sequence in scattered blocks."""
    blocks = -(-length // P)
    qkv = torch.randn(new, (H + 2 * K) * E, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.unflatten(1, (-1, E)) for x in qkv.split([H * E, K * E, K * E], dim=1))
    given = {
        "q_THE": q, "k_TKE": k, "v_TKE": v,
        "kv_cache": torch.randn(blocks, 2, K, P, E, device="cuda", dtype=torch.bfloat16),
        "block_table": torch.randperm(blocks, device="cuda").to(torch.int32)[None],
        "query_start_loc": torch.tensor([0, new], device="cuda", dtype=torch.int32),
        "seq_lens": torch.tensor([length], device="cuda", dtype=torch.int32), "scale": E**-0.5, "window": window,
    }  # fmt: skip
    return paged_attention.bind((), given)


def ours(args: dict[str, Any]) -> dict[str, Callable[[], Tensor]]:
    """Calls of the implementations that serve the step."""
    new = len(args["q_THE"])
    site = CallSite(args, detect_target("cuda"), Bucket("mixed", 2, new))
    return {
        " ".join([impl.name, *(f"{name}={value}" for name, value in config.items())]): functools.partial(
            impl.fn, **args, **config
        )
        for impl in paged_attention.impls.values()
        if impl.device == "cuda" and impl.supports(site)
        for config in impl.configs(site)
    }


def theirs(args: dict[str, Any], length: int) -> dict[str, Callable[[], Any]]:
    """Calls of torch's routines over the new tokens, and over a prefix."""
    q, k, v = (args[n].transpose(0, 1)[None] for n in ("q_THE", "k_TKE", "v_TKE"))
    prefix = length - q.shape[2]
    if args["window"]:
        return {}

    def within(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    if not prefix:
        cases = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention 2": SDPBackend.FLASH_ATTENTION}
        return {name: functools.partial(within, backend) for name, backend in cases.items()}
    keys, values = torch.randn(2, 1, K, prefix, E, device="cuda", dtype=torch.bfloat16)
    over = torch.ops.aten._scaled_dot_product_cudnn_attention  # with the sums that a join would need

    def both() -> None:
        for k_given, v_given, causal in ((k, v, True), (keys, values, False)):
            over(q, k_given, v_given, None, True, 0.0, causal, False)

    return {"cuDNN, two calls": both}


def error(out: Tensor, args: dict[str, Any], length: int, rows: int = 32) -> float:
    """Of some rows, against float32 on what lies in the cache."""
    new, window = len(out), args["window"]
    row = torch.linspace(0, new - 1, rows).long().cuda()
    found = args["kv_cache"][args["block_table"][0].long()].transpose(2, 3).transpose(0, 1).flatten(1, 2)
    keys, values = (t[:length].float().repeat_interleave(H // K, 1) for t in found)
    position, at = length - new + row, torch.arange(length, device="cuda")
    seen = at <= position[:, None]
    if window:
        seen &= at > position[:, None] - window
    scores = torch.einsum("the,lhe->htl", args["q_THE"][row].float(), keys) * args["scale"]
    expected = torch.einsum("htl,lhe->the", scores.masked_fill(~seen, -math.inf).softmax(-1), values)
    return float((out[row].float() - expected).norm() / expected.norm())


def microseconds(call: Callable[[], Any], calls: int, replays: int = 5) -> float:
    """Median of a call's time."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    taken = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(1e3 * begin.elapsed_time(end) / calls)
    return statistics.median(taken)


def run(case: Case) -> Iterator[dict[str, Any]]:
    """A row for each shape and implementation."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in case.shapes:
        new, length, window = SHAPES[name]
        args = step(new, length, window, case.block_size)
        pairs = sum(min(p + 1, window or length) for p in range(length - new, length))
        own = ours(args)
        errors = {label: error(call(), args, length) for label, call in own.items()}
        calls = {**own, **theirs(args, length)}
        count = max(1, 40 * 8192 // length // max(1, new // 2048))
        taken = in_turn(case.rounds, calls, lambda label, calls=calls, count=count: microseconds(calls[label], count))  # type: ignore[misc]
        yield {
            f"{name}, {label}": {
                "microseconds": round(min(t), 1), "teraflops": round(4 * H * E * pairs / min(t) / 1e6, 1),
                "error": errors.get(label),
            }
            for label, t in taken.items()
        }  # fmt: skip
