"""Time the C++ CPU kernels: linear against aten and oneDNN with packed weights, attention, sampling, parallel regions.

    python -m bench cpu_kernels [--parts linear,quant,mm,attention,sample,regions]

Weights and caches rotate among 1.2 GB, in huge pages as an engine should hold them: every call reads
memory. Implementations, and what floors are made of, take turns of a millisecond or so, because a shared machine
changes its speed; figures are the median turn and the best. With OMP_NUM_THREADS=1 it is the thread's own processor
time that is measured. Needs an x86-64 CPU with AVX-512 for the measure of memory.

linear, quant: GB/s of weights (and scales), best and median. The plain read of as many bytes takes turns with the rest,
and so does a loop of products from the first-level cache. share: the longer of these two over what the kernel takes,
medians; of quant, the plain read of int8 over the kernel. torch's own products are left out where it has no kernel for
bfloat16. attention: heads are query heads, key/value heads, head size. The floor is what takes longer: a plain read of
the bytes of keys and values, or (bf16) their products. pages read: the speed of reading the cache's pages whole in the
order they have, over that of the plain read. regions: an empty parallel region by wait policy and gap since the last.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from bench.harness import Case, worker_environment
from bench.probe import POOL, huge, probe, reader, turns
from graphllm.ir.kernels import c_kernel
from graphllm.ir.testing import Maker
from graphllm.ops.attention.paged_attention.cpu import cpu_paged_attention
from graphllm.ops.attention.paged_attention.operands import Paged, Rows, Scores
from graphllm.ops.gemm.linear.cpu import streaming_linear
from graphllm.ops.gemm.quant_linear.cpu import streaming_quant_linear
from graphllm.ops.sampling.sample import sample
from graphllm.ops.sampling.sample.cases import CASES as SAMPLE_CASES
from graphllm.weights.formats.integers import INTEGERS

CASES = [("cpu_kernels", {"parts": ("linear", "quant", "mm", "attention", "sample", "regions")})]
HELP = {"parts": "kernels to time"}
READ = 64 << 20
PRODUCTS = 20000  # rounds of a loop of them
SHAPES = ((1152, 896), (896, 896), (9728, 896), (896, 4864), (151936, 896))  # Qwen2.5-0.5B: N, K
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
POLICIES = ("", "OMP_WAIT_POLICY=passive", "GOMP_SPINCOUNT=1000", "GOMP_SPINCOUNT=2000", "GOMP_SPINCOUNT=10000")


def bench_linear(pool: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Our kernel, a plain read, aten, and oneDNN with packed weights."""
    library, others = probe(), torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for N, K in SHAPES:
        copies = POOL // 2 // (N * K)
        weights = [pool[i * N * K : (i + 1) * N * K].view(N, K) for i in range(copies)]
        for M in ROWS:
            x = torch.randn(M, K).bfloat16()
            packed = [torch.ops.mkldnn._reorder_linear_weight(w, M) for w in weights if others]
            out = torch.empty(M, N, dtype=torch.bfloat16)
            streaming_linear(x, weights[0])  # builds the library; the engine calls its function as below
            kernel, places = c_kernel("graphllm_linear")._function, [w.data_ptr() for w in weights]
            assert kernel is not None
            ends = (None, out.data_ptr(), M, N, K, K, K)
            calls = [
                lambda i, kernel=kernel, x=x, p=places, ends=ends: kernel(x.data_ptr(), p[i % len(p)], *ends),
                reader(library, pool, N * K * 2),
                lambda i: library.probe_products(PRODUCTS),
            ]
            if others:
                calls += [
                    lambda i, x=x, w=weights: torch.nn.functional.linear(x, w[i % len(w)]),
                    lambda i, x=x, w=packed: torch.ops.mkldnn._linear_pointwise(x, w[i % len(w)], None, "none", [], ""),
                ]
            mine, plain, products, *others_s = turns(calls, max(1, (8 << 20) // (N * K)), 60)
            computed = products[1] * 2 * M * N * K / library.probe_products(PRODUCTS)
            share = max(plain[1], computed) / mine[1]
            names = ("graphllm_linear", "plain read", "aten", "oneDNN, packed weights")
            found = {n: rate(N * K * 2, *pair) for n, pair in zip(names, (mine, plain, *others_s), strict=False)}
            yield {f"linear {N} x {K}, {M} rows": {"share": round(share, 3), **gigabytes(found)}}
            del packed


def rate(nbytes: int, best: float, median: float) -> tuple[float, float]:
    """GB/s from seconds: of the median and of the best."""
    return round(nbytes / median / 1e9, 1), round(nbytes / best / 1e9, 1)


def gigabytes(rates: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Columns of rates."""
    medians = {f"{name}, GB/s": median for name, (median, _) in rates.items()}
    return medians | {f"{name}, best": best for name, (_, best) in rates.items()}


def bench_quant(pool: torch.Tensor) -> Iterator[dict[str, Any]]:
    """quant_linear and the bf16 linear of the same rows and shape: streaming up to 64 rows, aten from 128 on."""
    library = probe()
    base = pool.data_ptr()
    for N, K in SHAPES:
        weights = [pool[i * N * K : (i + 1) * N * K].view(N, K) for i in range(POOL // 2 // (N * K))]
        for M in (*ROWS, 1024):
            x, out = torch.randn(M, K).bfloat16(), torch.empty(M, N, dtype=torch.bfloat16)
            calls: list[Callable[[int], object]] = []
            sizes = []
            for name, encoding in INTEGERS.items():
                values, scales = (part.shape(N, K) for part in encoding.parts)
                split, nbytes = math.prod(values), math.prod(values) + 2 * math.prod(scales)
                some = torch.zeros(values, dtype=getattr(torch, encoding.parts[0].dtype))
                streaming_quant_linear(x[:1], some, torch.zeros(scales, dtype=torch.bfloat16), N)  # builds the library
                kernel = c_kernel(f"graphllm_quant_linear_{name}_bf16")._function
                assert kernel is not None
                places = [base + i * nbytes // 64 * 64 for i in range(POOL // nbytes)]
                rest = (None, out.data_ptr(), M, N, K, K, False)

                def call(i, kernel=kernel, x=x, places=places, split=split, rest=rest):  # type: ignore[no-untyped-def]
                    at = places[i % len(places)]
                    kernel(x.data_ptr(), at, at + split, *rest)

                calls.append(call)
                sizes.append(nbytes)
            plain = streaming_linear if M < 128 else torch.nn.functional.linear
            calls.append(lambda i, x=x, w=weights, plain=plain: plain(x, w[i % len(w)]))
            sizes.append(2 * N * K)
            calls.append(reader(library, pool, sizes[0]))
            few = 60 if M < 64 else 8
            count = max(1, (8 << 20) // (N * K) // max(1, M // 16))
            *figures, read = turns(calls, count, few if N < 100000 else few // 4)
            speed = sizes[0] / read[1]
            names = (*INTEGERS, "bf16")
            made = {n: rate(nbytes, *pair) for n, nbytes, pair in zip(names, sizes, figures, strict=True)}
            shares = {f"{n}, share": round(1e9 * found[0] / speed, 3) for n, found in made.items()}
            us = {f"{n}, us": round(median * 1e6) for n, (_, median) in zip(names, figures, strict=True)}
            rates = gigabytes({"plain read": rate(sizes[0], *read), **made})
            yield {f"quant {N} x {K}, {M} rows": {**shares, **us, **rates}}


def bench_mm(pool: torch.Tensor) -> Iterator[dict[str, Any]]:
    """aten's products of 1,024 rows in bf16, weights from memory."""
    for N, K in SHAPES[:4]:
        copies = POOL // 2 // (N * K)
        weights = [pool[i * N * K : (i + 1) * N * K].view(N, K) for i in range(copies)]
        x = torch.randn(1024, K).bfloat16()
        ((best, median),) = turns([lambda i: torch.nn.functional.linear(x, weights[i % copies])], min(copies, 10), 9)  # noqa: B023
        flops = 2048 * N * K / 1e12
        yield {f"mm {N} x {K}": {"TFLOP/s": round(flops / median, 2), "best": round(flops / best, 2)}}


def bench_attention(pool: torch.Tensor) -> Iterator[dict[str, Any]]:
    """paged_attention with pages of 16."""
    decode = {f"decode {S}, context {n:,}": [(1, n)] * S for S in (1, 8) for n in (128, 129, 1024, 8192)}
    prefill = {f"prefill {n:,}": [(n, n)] for n in (128, 1024, 8192)}
    others = {"256 more after 3,840": [(256, 4096)], "decode 8 + prefill 248": [(1, 512)] * 8 + [(248, 248)]}
    for dtype, H, K, E in (
        *((torch.bfloat16, *heads) for heads in ((14, 2, 64), (16, 8, 128), (32, 8, 128))),
        (torch.float32, 14, 2, 64),
    ):
        for name, sequences in (decode | prefill | others).items():
            for ordered in (True, False) if name in decode else (False,):
                row = attention_row(pool.view(dtype), sequences, H, K, E, ordered)
                order = "rising" if ordered else "random"
                yield {f"attention {name}, heads {H}/{K}/{E}, {str(dtype)[6:]}, {order} pages": row}


def attention_row(
    memory: torch.Tensor, sequences: list[tuple[int, int]], H: int, K: int, E: int, ordered: bool
) -> dict[str, float]:
    """One batch of (query tokens, length) with its cache in memory; the row's figures."""
    library, dtype = probe(), memory.dtype
    T, page = sum(n for n, _ in sequences), 2 * K * 16 * E
    pages = [-(-length // 16) for _, length in sequences]
    page_bytes = page * dtype.itemsize
    copies = max(1, min(4096, memory.numel() // page // sum(pages)))
    numbers = torch.arange(memory.numel() // page) if ordered else torch.randperm(memory.numel() // page)
    order = numbers[: copies * sum(pages)].int()
    cache = memory[: memory.numel() // page * page].view(-1, 2, K, 16, E)
    tables = torch.zeros(copies, len(pages), max(pages), dtype=torch.int32)
    for c, part in enumerate(order.view(copies, -1)):
        for s, mine in enumerate(part.split(pages)):
            tables[c, s, : len(mine)] = mine
    qkv = torch.randn(T, (H + 2 * K) * E).to(dtype)
    q, k, v = (x.unflatten(1, (-1, E)) for x in qkv.split([H * E, K * E, K * E], 1))
    starts = torch.tensor([sum(n for n, _ in sequences[:i]) for i in range(len(sequences) + 1)]).int()
    lengths = torch.tensor([length for _, length in sequences]).int()
    out = cpu_paged_attention(
        Rows(q, k, v), Paged(cache, tables[0], starts, lengths), Scores(0.1)
    )  # builds the library
    kernel = c_kernel(f"graphllm_paged_attention_{'bf16' if dtype == torch.bfloat16 else 'f32'}")._function
    assert kernel is not None
    first = [t.data_ptr() for t in (q, k, v, cache)]
    rest = [t.data_ptr() for t in (starts, lengths, out)] + [T, len(sequences), H, K, E, 16]
    rest += [stride for t in (q, k, v) for stride in t.stride()[:2]]
    rest += [*cache.stride()[:4], tables.stride(1), 0.1, 0, 0.0]
    places = [t.data_ptr() for t in tables]

    flops = 4 * H * E * sum(sum(range(length - n + 1, length + 1)) for n, length in sequences)
    held = sum(length for _, length in sequences) * 2 * K * E * dtype.itemsize
    count = max(1, min(64, int(4e-3 / max(held / 25e9, flops / 4e11, 1e-5))))
    listed = min(len(order), READ // page_bytes)
    seconds: list[float] = []
    plain: list[float] = []
    paged: list[float] = []
    products: list[float] = []
    at = read = 0
    for _ in range(9 if count > 1 else 5):
        for i in range(at, at + count):
            start = time.perf_counter()
            kernel(*first, places[i % copies], *rest)
            seconds.append(time.perf_counter() - start)
        at += count
        measures: tuple[tuple[list[float], Callable[[], float]], ...] = (
            (plain, functools.partial(library.probe_read, memory.data_ptr() + read, READ)),
            (paged, functools.partial(library.probe_pages, first[3], order.data_ptr(), listed, page_bytes)),
            (products, functools.partial(library.probe_products, PRODUCTS)),
        )
        for times, measure in measures:
            start = time.perf_counter()
            measure()
            times.append(time.perf_counter() - start)
        read = (read + READ) % (POOL // READ * READ)
    median, best = statistics.median(seconds), min(seconds)
    bandwidth, speed = READ / statistics.median(plain), library.probe_products(PRODUCTS) / statistics.median(products)
    by_page = listed * page_bytes / statistics.median(paged)
    floor = max(held / bandwidth, flops / speed)
    found = {
        "us": median * 1e6, "best us": best * 1e6, "GFLOP/s": flops / median / 1e9, "KV GB/s": held / median / 1e9,
        "plain read GB/s": bandwidth / 1e9, "pages read": by_page / bandwidth,
    }  # fmt: skip
    if dtype == torch.bfloat16 or len(sequences) == T:
        found |= {"floor us": floor * 1e6, "over floor": median / floor}
    return {name: round(value, 2) for name, value in found.items()}


def bench_sample(pool: torch.Tensor) -> Iterator[dict[str, Any]]:
    """sample over a vocabulary of 151,936 in bf16."""
    for case in SAMPLE_CASES:
        if case.size == "real" and not case.name.endswith("s256"):
            args = case.inputs(Maker(torch.Generator().manual_seed(0), torch.device("cpu"), torch.bfloat16))
            ((best, median),) = turns([lambda i, args=args: sample.impls["cpu"].fn(**args)], 3, 7)
            S = args["logits_SV"].shape[0]
            yield {f"sample {case.name}": {"us a row": round(median / S * 1e6), "best us": round(best / S * 1e6)}}


def bench_regions(pool: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Each policy in a process of its own: the OpenMP runtime reads the environment once."""
    code = (
        "import torch, sys; from bench.probe import probe; p = probe();"
        "print(*(round(p.probe_region(3000, gap) / 1000, 2) for gap in map(int, sys.argv[1:])))"
    )
    for policy in POLICIES:
        inherited = {k: v for k, v in worker_environment().items() if not k.startswith(("OMP_WAIT", "GOMP_"))}
        env = inherited | dict([policy.split("=")] if policy else [])

        def run(*gaps: int, env: dict[str, str] = env) -> list[str]:
            command = [sys.executable, "-c", code, *map(str, gaps)]
            return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.split()

        cells = run(0, 20, 100)
        other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        cells += run(100)
        other.kill()
        other.wait()
        gaps = ("no gap", "20 us", "100 us", "100 us, another process keeps a core busy")
        us = {f"gap {gap}, us": float(cell) for gap, cell in zip(gaps, cells, strict=True)}
        yield {f"regions {policy or 'default'}": us}


PARTS = {
    "linear": bench_linear,
    "quant": bench_quant,
    "mm": bench_mm,
    "attention": bench_attention,
    "sample": bench_sample,
    "regions": bench_regions,
}


def run(case: Case) -> Iterator[dict[str, Any]]:
    """The parts in turn, and the load of the machine before and after."""
    threads = torch.get_num_threads()
    yield {"machine": {"threads": threads, "load average at the beginning": round(os.getloadavg()[0], 1)}}
    with torch.no_grad():
        pool = huge(POOL) if {"linear", "quant", "mm", "attention"} & set(case.parts) else torch.empty(0)
        for name in case.parts:
            yield from PARTS[name](pool)
    yield {"machine, afterwards": {"load average": round(os.getloadavg()[0], 1)}}
