"""Time the C++ CPU kernels: linear against aten and oneDNN with packed weights, attention, sampling, parallel regions.

    python bench/cpu_kernels.py [linear] [quant] [mm] [attention] [sample] [regions]    # all of them without a name

Prints Markdown. Weights and caches rotate among 1.2 GB, in huge pages as an engine should hold them: every call reads
memory. Implementations, and what floors are made of, take turns of a millisecond or so, because a shared machine
changes its speed; figures are the median turn and the best. With OMP_NUM_THREADS=1 it is the thread's own processor
time that is measured. Needs an x86-64 CPU with AVX-512 for the measure of memory.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from graphllm.host.compiler import compiler_command
from graphllm.host.hugepages import zeros
from graphllm.ir.kernels import c_kernel
from graphllm.ir.testing import Maker
from graphllm.ops.attention.paged_attention.cpu import cpu_paged_attention
from graphllm.ops.attention.paged_attention.operands import Paged, Rows, Scores
from graphllm.ops.gemm.linear.cpu import streaming_linear
from graphllm.ops.gemm.quant_linear.cpu import streaming_quant_linear
from graphllm.ops.sampling.sample import sample
from graphllm.ops.sampling.sample.cases import CASES as SAMPLE_CASES
from graphllm.weights.formats.integers import INTEGERS

POOL = 1200 << 20
READ = 64 << 20
PRODUCTS = 20000  # rounds of a loop of them
SHAPES = ((1152, 896), (896, 896), (9728, 896), (896, 4864), (151936, 896))  # Qwen2.5-0.5B: N, K
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
POLICIES = ("", "OMP_WAIT_POLICY=passive", "GOMP_SPINCOUNT=1000", "GOMP_SPINCOUNT=2000", "GOMP_SPINCOUNT=10000")


@functools.cache
def probe() -> ctypes.CDLL:
    """The library of cpu_probe.cpp."""
    library = Path(tempfile.mkdtemp()) / "probe.so"
    subprocess.run(compiler_command([Path(__file__).with_name("cpu_probe.cpp")], library), check=True)
    out = ctypes.CDLL(str(library))
    out.probe_read.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    out.probe_read.restype = ctypes.c_int64
    out.probe_pages.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    out.probe_pages.restype = ctypes.c_int64
    out.probe_products.argtypes = [ctypes.c_int64]
    out.probe_products.restype = ctypes.c_double
    out.probe_region.argtypes = [ctypes.c_int64, ctypes.c_int64]
    out.probe_region.restype = ctypes.c_double
    return out


def huge(nbytes: int) -> torch.Tensor:
    """Bytes in huge pages, filled with small random bf16 numbers."""
    pool = torch.from_numpy(zeros(nbytes)).view(torch.bfloat16)
    for part in pool.split(16 << 20):
        part.normal_(0, 0.05)
    return pool


def turns(calls: Sequence[Callable[[int], object]], count: int, rounds: int) -> list[tuple[float, float]]:
    """Best and median seconds of each call; every round runs each of them ``count`` times with increasing numbers."""
    seconds: list[list[float]] = [[] for _ in calls]
    at = 0
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for _ in range(rounds):
        for times, call in zip(seconds, calls, strict=True):
            start = now()
            for i in range(count):
                call(at + i)
            times.append((now() - start) / count)
            at += count
    return [(min(times), statistics.median(times)) for times in seconds]


def reader(library: ctypes.CDLL, pool: torch.Tensor, nbytes: int) -> Callable[[int], object]:
    """A call for `turns` that reads so many bytes."""
    nbytes, base = nbytes // 64 * 64, pool.data_ptr()
    return lambda i: library.probe_read(base + i % (POOL // nbytes) * nbytes, nbytes)


def read_ceiling(pool: torch.Tensor) -> float:
    """GB/s."""
    ((best, _),) = turns([reader(probe(), pool, POOL)], 1, 12)
    return POOL / best / 1e9


def bench_linear(pool: torch.Tensor) -> None:
    library, others = probe(), torch.ops.mkldnn._is_mkldnn_bf16_supported()
    print(f"""
## linear, {torch.get_num_threads()} threads

GB/s of weights: median (best); the plain read of as many bytes takes turns with the rest, and so does a loop of
products from the first-level cache. Share: the longer of these two over what the kernel takes, medians. torch's own
are left out where it has no kernel for bfloat16.

| N x K | rows | graphllm_linear | plain read | share | aten | oneDNN, packed weights |
|---|---|---|---|---|---|---|""")
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
            mine, plain, products, *beside = turns(calls, max(1, (8 << 20) // (N * K)), 60)
            computed = products[1] * 2 * M * N * K / library.probe_products(PRODUCTS)
            share = max(plain[1], computed) / mine[1]
            ours, read, *theirs = (rate(N * K * 2, *pair) for pair in (mine, plain, *beside))
            aten, onednn = theirs or ("-", "-")
            print(f"| {N} x {K} | {M} | {ours} | {read} | {share:.0%} | {aten} | {onednn} |", flush=True)
            del packed


def rate(nbytes: int, best: float, median: float) -> str:
    """GB/s from seconds."""
    return f"{nbytes / median / 1e9:.1f} ({nbytes / best / 1e9:.1f})"


def bench_quant(pool: torch.Tensor) -> None:
    """quant_linear beside the bf16 linear of the same rows and shape: streaming up to 64 rows, aten from 128 on."""
    library = probe()
    print(f"""
## quant_linear, {torch.get_num_threads()} threads

GB/s of weights and scales, median (best); a plain read of the int8 ones takes turns with the rest, and shares are of
its median. Microseconds are medians.

| N x K | rows | plain read | int8 | share | int4 | share | bf16 | share | µs int8 | int4 | bf16 |
|---|---|---|---|---|---|---|---|---|---|---|---|""")
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
            cells = [
                f"{rate(nbytes, *pair)} | {nbytes / pair[1] / speed:.0%}"
                for nbytes, pair in zip(sizes, figures, strict=True)
            ]
            times = " | ".join(f"{median * 1e6:.0f}" for _, median in figures)
            print(f"| {N} x {K} | {M} | {rate(sizes[0], *read)} | {' | '.join(cells)} | {times} |", flush=True)


def bench_mm(pool: torch.Tensor) -> None:
    print(
        "\n## aten products of 1,024 rows, bf16, weights from memory\n\n| N x K | TFLOP/s, best (median) |\n|---|---|"
    )
    for N, K in SHAPES[:4]:
        copies = POOL // 2 // (N * K)
        weights = [pool[i * N * K : (i + 1) * N * K].view(N, K) for i in range(copies)]
        x = torch.randn(1024, K).bfloat16()
        ((best, median),) = turns([lambda i: torch.nn.functional.linear(x, weights[i % copies])], min(copies, 10), 9)  # noqa: B023
        print(f"| {N} x {K} | {2048 * N * K / best / 1e12:.2f} ({2048 * N * K / median / 1e12:.2f}) |")


def bench_attention(pool: torch.Tensor) -> None:
    print("""
## paged_attention, page size 16

H/K/E are query heads, key/value heads, head size. The floor is what takes longer: a plain read of the bytes of keys
and values, or (bf16) their products at the speed of products from the first-level cache; both take turns with the op.
Pages read: the speed of reading the cache's pages whole in the order they have, over that of the plain read. Medians
(best).

| batch | H/K/E | dtype | pages | µs | GFLOP/s | KV GB/s | plain read GB/s | pages read | floor, µs | over floor |
|---|---|---|---|---|---|---|---|---|---|---|""")
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
                print(f"| {name} | {H}/{K}/{E} | {str(dtype)[6:]} | {order} | {row} |", flush=True)


def attention_row(memory: torch.Tensor, sequences: list[tuple[int, int]], H: int, K: int, E: int, ordered: bool) -> str:
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
    share = f"{floor * 1e6:.1f} | {median / floor:.2f}" if dtype == torch.bfloat16 or len(sequences) == T else "- | -"
    return (
        f"{median * 1e6:.1f} ({best * 1e6:.1f}) | {flops / median / 1e9:.0f} | {held / median / 1e9:.1f} "
        f"| {bandwidth / 1e9:.1f} | {by_page / bandwidth:.0%} | {share}"
    )


def bench_sample() -> None:
    print("\n## sample, vocabulary of 151,936, bf16 logits\n\n| case | µs a row, best (median) |\n|---|---|")
    for case in SAMPLE_CASES:
        if case.size == "real" and not case.name.endswith("s256"):
            args = case.inputs(Maker(torch.Generator().manual_seed(0), torch.device("cpu"), torch.bfloat16))
            ((best, median),) = turns([lambda i, args=args: sample.impls["cpu"].fn(**args)], 3, 7)
            S = args["logits_SV"].shape[0]
            print(f"| {case.name} | {best / S * 1e6:.0f} ({median / S * 1e6:.0f}) |", flush=True)


def bench_regions() -> None:
    """Each policy in a process of its own: the OpenMP runtime reads the environment once."""
    print("\n## An empty parallel region, by wait policy and gap since the last, median µs\n")
    print(
        "| environment | no gap | 20 µs | 100 µs | 100 µs, another process keeps one core busy |\n|---|---|---|---|---|"
    )
    code = (
        "import torch, sys; sys.path.insert(0, sys.argv[1]); from cpu_kernels import probe; p = probe();"
        "print(*(round(p.probe_region(3000, gap) / 1000, 2) for gap in map(int, sys.argv[2:])))"
    )
    for policy in POLICIES:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_WAIT", "GOMP_"))}
        env = inherited | dict([policy.split("=")] if policy else [])

        def run(*gaps: int, env: dict[str, str] = env) -> list[str]:
            command = [sys.executable, "-c", code, str(Path(__file__).parent), *map(str, gaps)]
            return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.split()

        cells = run(0, 20, 100)
        other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        cells += run(100)
        other.kill()
        other.wait()
        print(f"| {policy or 'default'} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    wanted = sys.argv[1:] or ["linear", "quant", "mm", "attention", "sample", "regions"]
    model = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "")
    print(f"{model.split(':')[-1].strip()}, {os.cpu_count()} cores, torch {torch.__version__}, "
          f"{torch.get_num_threads()} threads, load average {os.getloadavg()[0]:.1f}")  # fmt: skip
    with torch.no_grad():
        pool = huge(POOL) if {"linear", "quant", "mm", "attention"} & set(wanted) else torch.empty(0)
        for name in wanted:
            if name in ("sample", "regions"):
                {"sample": bench_sample, "regions": bench_regions}[name]()
            else:
                {"linear": bench_linear, "quant": bench_quant, "mm": bench_mm, "attention": bench_attention}[name](pool)
    print(f"\nLoad average at the end {os.getloadavg()[0]:.1f}.")


if __name__ == "__main__":
    main()
