"""What a step would take on several GPUs: a model's ops as compiled for each rank, by their cost formulas, the rates of
one H200, and sums over ranks as measured. No GPU is needed, and nothing is compiled.

Rows begin with the measured points; then come GPUs that nobody has measured here.

A kernel takes the time that its bytes and its operations take, together: between the two lines of the roofline it
reaches neither, sqrt(read^2 + computed^2), and a moment to begin. In steps of few rows what lies between products is
part of them, as the pass fuse_linear makes it, and begins nothing. Four numbers are fitted to one GPU (the rows of
results/h200/gpu_table.json): the shares of bandwidth and arithmetic that are reached, that moment, and attention's rate
in prompts. Nothing is fitted to two and four GPUs. Their rows (gpu_table_tp2 of results/h200-x2, gpu_table_tp4 of
h200-x4) show how good this is.

Sums over two and four H200s are measured (all_reduce.json of results/h200-x2 and h200-x4). Sums of four that take two
trips are measured on H100s, with as fast links (results/h100-x4). They are taken with the norm that follows them in one
kernel, or in place where that is not done. Of more GPUs of one host nobody has measured them here: they are taken from
the sums of four, each byte as if it passed 2 (n - 1) / n times, and the begin half as long again for each doubling.
Ranks sample from their shares of the logits, so they exchange one sum of few numbers more. The rows of four H200s are
of a tree before that, where all logits were gathered. For these rows the model gathers, too, in the time that is
measured on four H100s. Between hosts the inputs of a stage go at a NIC's rate.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.harness import Case, Rows
from bench.models import SHAPES
from bench.record import read
from graphllm.compile.codegen.example_inputs import example
from graphllm.compile.families import find_model
from graphllm.compile.layout import plan_layout, with_added
from graphllm.compile.link import Linked, link
from graphllm.compile.passes import pipeline
from graphllm.compile.pipeline import run_passes
from graphllm.compile.rewrites.split_layers import split_layers
from graphllm.compile.trace import trace_model
from graphllm.config import CompileConfig, EngineArgs
from graphllm.config.compilation import Target
from graphllm.ir.graph import Shapes, TensorSpec
from graphllm.ir.op import op_of
from graphllm.ir.registry import load_ops, load_passes
from graphllm.loading.artifact.resolve import compile_config
from graphllm.rewrite import fake_values
from graphllm.weights.plan.plan import make_plan
from graphllm.weights.plan.schemes import as_quantized
from graphllm.weights.plan.shard import shard_plan

CASES = [("simulate_ranks", {})]
VOCABULARY = 128_256  # of the gathers that `all_reduce` measures
BANDWIDTH, ARITHMETIC = 4.27e12, 788e12  # of an H200, as measured
BETWEEN = 390e9  # bytes a second from one H200 to another, as measured
MEMORY = 141e9
FEW_ROWS = 16  # of a step in which products take in the ops between them
TOLD = 8 << 10  # bytes that ranks tell each other of their shares of the logits, at most, with up to 256 rows
NIC, NIC_BEGIN = 45e9, 10e-6  # 400 Gbit/s a GPU, as reached, and what a message takes to begin: assumed
PRODUCTS = ("linear", "fused_linear", "linear_add_norm", "fused_moe", "quant_linear", "scaled_linear", "quant_moe")
CONTEXT = 256  # mean length of sequences in the decode rows: 128 in, 256 out
MOE = {
    # DeepSeek-V3's sizes with plain attention of 16 heads of keys and values: there is no family with latent attention.
    "deepseek-v3-sizes": {
        **SHAPES["qwen3-30b-a3b"], "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 64, "head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "vocab_size": 129280, "intermediate_size": 18432,
    },
}  # fmt: skip
ALL_SHAPES: dict[str, dict[str, Any]] = {**SHAPES, **MOE}


class Kernel(NamedTuple):
    """One op of a step. kind: "product", "attention", "all_reduce", "all_gather", "tell" for what ranks sampling
    from shares exchange, or "between" for ops between products. bytes, flops: by its cost formula; of collectives
    bytes is one rank's part."""

    kind: str
    bytes: int
    flops: int
    begins: bool = True


Step = Counter[Kernel]  # how often a step has each of them


class Rates(NamedTuple):
    """What of a GPU is reached. attention: operations a second in prompts."""

    bandwidth: float
    arithmetic: float
    begin: float
    attention: float

    def seconds(self, kernel: Kernel) -> float:
        """Of one that needs no other GPU."""
        read = kernel.bytes / (self.bandwidth * BANDWIDTH)
        if kernel.kind == "attention":
            return self.begin + read + kernel.flops / self.attention
        return self.begin * kernel.begins + math.hypot(read, kernel.flops / (self.arithmetic * ARITHMETIC))


class Model:
    """A shape as compiled for one of ``ranks`` H200s. gathers: all logits, instead of sampling from shares."""

    def __init__(self, shape: str, ranks: int, gathers: bool = False) -> None:
        described = ALL_SHAPES[shape]
        args = EngineArgs(
            "shape", target="cpu", dtype="bfloat16", tensor_parallel_size=ranks, max_model_len=8320, max_num_seqs=256,
        )  # fmt: skip
        config = dataclasses.replace(compile_config(described, args), target=Target("cuda", ("sm_90", "sms_132")))
        self.ranks, self.width = ranks, int(described["hidden_size"])
        self.linked, self.shapes, self.weights = _linked(described, config, gathers)

    def step(self, queries: int, sequences: int, length: int) -> Step:
        """Of a step of ``sequences``, each with ``queries`` new tokens and ``length`` in all."""
        sizes = {"T": queries * sequences, "S": sequences, "R": sequences}
        starts = torch.arange(sequences + 1) * queries
        lengths = torch.full((sequences,), length)
        costs: dict[str, list[Kernel]] = {}
        found: Step = Counter()
        for call in self.linked.programs[0]["plain"].calls:
            if call.piece not in costs:
                piece = self.linked.pieces[call.piece]
                costs[call.piece] = [*_kernels(piece.graph, self.shapes, sizes, starts, lengths, self.ranks)]
            found.update(costs[call.piece])
        return found


def _linked(described: dict[str, Any], config: CompileConfig, gathers: bool) -> tuple[Linked, Shapes, int]:
    """A model as far as nothing has to be compiled, and the bytes of a rank's weights."""
    model = find_model(described)
    c = model.config(described)
    plan = as_quantized(make_plan(model, c, config.dtype), described, None)
    plan = shard_plan(plan, config.tensor_parallel_size, config.enable_expert_parallel)
    c = model.local(c, config.tensor_parallel_size, config.enable_expert_parallel)
    layout = plan_layout(model, c, config)
    graphs = [split_layers(graph, plan, config) for graph in trace_model(layout)]
    units = [unit for graph in graphs for unit in graph.units.values()]
    traced = run_passes(units, plan, config, pipeline().units)
    weights = sum(entry.nbytes for entry in traced.plan if not entry.tie)
    layout = with_added(layout, traced.added, config)
    return link(graphs, layout, config, () if gathers else pipeline().linked), units[0].shapes, weights


def _kernels(
    graph: torch.fx.Graph, shapes: Shapes, sizes: dict[str, int], starts: Any, lengths: Any, ranks: int
) -> Any:
    def sized(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        spec = shapes.spec(value)
        assert isinstance(spec, TensorSpec)
        return example(spec, sizes, "meta")

    for node in graph.nodes:
        if (op := op_of(node.target)) is None or (ranks > 1 and op.name == "rms_norm"):  # it is part of a sum
            continue
        args, kwargs = fake_values((node.args, node.kwargs))
        bound = {name: sized(value) for name, value in op.bind(args, kwargs).items()}
        if "seq_lens" in bound:
            cost = op.cost(**bound | {"query_start_loc": starts, "seq_lens": lengths})
            yield Kernel("attention", cost.bytes, cost.flops)
        elif op.name == "sample_shares":
            cost = op.cost(**bound)
            yield Kernel("between", cost.bytes, cost.flops, sizes["T"] > FEW_ROWS)
            yield Kernel("tell", TOLD, 0)
        elif op.collective:
            yield Kernel(op.name, bound["x"].numel() * bound["x"].element_size(), 0)
        else:
            cost = op.cost(**bound)
            product = op.name in PRODUCTS
            yield Kernel("product" if product else "between", cost.bytes, cost.flops, product or sizes["T"] > FEW_ROWS)


class Sums:
    """Seconds of a sum or a gather over GPUs of one host, by the bytes of each."""

    def __init__(self) -> None:
        self._gathers = {2: _gathers("h200-x2", 2), 4: _gathers("h100-x4", 4)}
        self._measured = {
            2: _sums("h200-x2"),
            4: _sums("h200-x4", "h100-x4"),
        }

    def seconds(self, nbytes: int, ranks: int) -> float:
        """Of one sum."""
        of = max(n for n in self._measured if n <= ranks)
        sizes, times = self._measured[of]
        begin, passes = times[0], 2 * (of - 1) / of
        if nbytes <= sizes[-1]:
            whole = float(np.interp(nbytes, sizes, times))
        else:
            whole = times[-1] + (nbytes - sizes[-1]) * passes / BETWEEN
        more = 2 * (ranks - 1) / ranks / passes
        return begin * (1 + math.log2(ranks / of) / 2) + (whole - begin) * more

    def gather(self, nbytes: int, ranks: int) -> float:
        """Of one gather, of two or four ranks and no more bytes than are measured."""
        sizes, times = self._gathers[ranks]
        return float(np.interp(nbytes, sizes, times))


def _gathers(machine: str, ranks: int) -> tuple[list[int], list[float]]:
    """Bytes, and the seconds of the gathers that engines used for them."""
    rows = read(machine, "all_reduce").items()
    found = {int(name.split()[1]): row["used"] for name, row in rows if name.startswith("gather")}
    return [2 * n * VOCABULARY // ranks for n in found], [1e-6 * us for us in found.values()]


def _sums(*machines: str) -> tuple[list[int], list[float]]:
    """Bytes, and the seconds of their sums, of the machine where they are fastest."""
    found: dict[int, float] = {}
    for machine in machines:
        for name, row in read(machine, "all_reduce").items():
            if name.endswith("KB"):
                size, us = int(name.split()[0]) << 10, row.get("norm fused", row["in place"])
                found[size] = min(found.get(size, math.inf), 1e-6 * us)
    return list(found), list(found.values())


def seconds(model: Model, rates: Rates, sums: Sums, step: Step) -> float:
    """Of one step of a model without stages."""
    total = 0.0
    for kernel, count in step.items():
        if kernel.kind in ("all_reduce", "tell"):
            total += count * sums.seconds(kernel.bytes, model.ranks)
        elif kernel.kind == "all_gather":
            total += count * sums.gather(kernel.bytes, model.ranks)
        else:
            total += count * rates.seconds(kernel)
    return total


def rows_of(name: str, found: Rows) -> dict[str, float]:
    """Measured rows of one step, in ms."""
    rows = {place.removeprefix(f"{name}, "): row for place, row in found.items() if place.startswith(f"{name}, ")}
    return {row: rows[row]["median"] for row in rows if row.startswith(("decode", "TTFT"))}


def row_step(model: Model, row: str) -> Step:
    kind, size = row.split()
    return model.step(1, int(size), CONTEXT) if kind == "decode" else model.step(int(size), 1, int(size))


def fitted(points: list[tuple[Model, Step, float]], sums: Sums) -> Rates:
    """The rates that come closest to all points, by the mean of squared relative errors."""

    def error(rates: Rates) -> float:
        return sum((seconds(model, rates, sums, step) / wanted - 1) ** 2 for model, step, wanted in points)

    grid = itertools.product((0.85, 0.9, 0.95, 1.0), (0.75, 0.85, 0.95), (1e-6, 2e-6, 4e-6), (350e12, 477e12, 600e12))
    best = min((Rates(*choice) for choice in grid), key=error)
    for _ in range(6):  # finer and finer around it
        for scale in (0.1, 0.03, 0.01):
            near = itertools.product((1 - scale, 1.0, 1 + scale), repeat=4)
            best = min((Rates(*(v * f for v, f in zip(best, factors, strict=True))) for factors in near), key=error)
    return best


class Layout(NamedTuple):
    """GPUs of a prediction: ranks of a stage, and stages, each on a host of its own."""

    shape: str
    ranks: int
    stages: int = 1


PREDICTED = (
    Layout("llama3-70b", 2), Layout("llama3-70b", 4), Layout("llama3-70b", 8), Layout("llama3-70b", 8, 8),
    Layout("deepseek-v3-sizes", 8, 2), Layout("deepseek-v3-sizes", 8, 8),
)  # fmt: skip
BATCHES = (1, 64, 256)


def predicted(layout: Layout, rates: Rates, sums: Sums) -> dict[str, Any]:
    """Of one layout: ms a step, and tokens a second, with stages also with a batch in each stage, which the engine
    does not have yet. Stages follow each other, so a step takes the kernels and sums of all."""
    model = Model(layout.shape, layout.ranks)
    found: dict[str, Any] = {"GPUs": layout.ranks * layout.stages, "weights GB a GPU":
                             round(model.weights / layout.stages / 1e9, 1)}  # fmt: skip
    found["fits"] = model.weights / layout.stages < 0.9 * MEMORY
    for row in (*(f"decode {batch}" for batch in BATCHES), "TTFT 8192"):
        step = row_step(model, row)
        kind, size = row.split()
        tokens = int(size)
        between = (layout.stages - 1) * (NIC_BEGIN + 2 * tokens * model.width / layout.ranks / NIC)
        whole = seconds(model, rates, sums, step) + between
        summed = sum(n * sums.seconds(k.bytes, layout.ranks) for k, n in step.items() if k.kind == "all_reduce")
        found[row] = {"ms": round(1e3 * whole, 2), "sums ms": round(1e3 * summed, 2)}
        if kind == "decode":
            found[row]["tokens/s"] = round(tokens / whole)
            if layout.stages > 1:
                found[row]["tokens/s, a batch in each stage"] = round(layout.stages * tokens / whole)
    return found


def run(case: Case) -> Iterator[dict[str, Any]]:
    """The rates, the measured rows with the model's figures, and the predictions."""
    load_ops()
    load_passes()
    sums, one = Sums(), read("h200", "gpu_table")
    cases = [(Model(name, 1), name, rows_of(name, one)) for name in ("llama3.1-8b", "qwen3-0.6b")]
    points = [(model, row_step(model, row), 1e-3 * ms) for model, _, rows in cases for row, ms in rows.items()]
    rates = fitted(points, sums)
    for name, ranks in itertools.product(("llama3.1-8b", "llama3-70b"), (2, 4)):
        several = read(f"h200-x{ranks}", f"gpu_table_tp{ranks}")
        cases.append(
            (Model(name, ranks, gathers=ranks == 4), f"{name} tp{ranks}", rows_of(f"{name} tp{ranks}", several))
        )
    reached = {
        "bandwidth": round(rates.bandwidth, 3),
        "arithmetic": round(rates.arithmetic, 3),
        "begin us": round(1e6 * rates.begin, 2),
        "attention TFLOP/s": round(rates.attention / 1e12),
    }
    yield {"rates": reached}
    print(json.dumps(reached))
    for model, name, rows in cases:
        for row, ms in rows.items():
            found = 1e3 * seconds(model, rates, sums, row_step(model, row))
            error = f"{found / ms - 1:+.1%}"
            yield {"measured": {f"{name}, {row}": {"measured ms": ms, "model ms": round(found, 2), "error": error}}}
            print(f"{name:16} {row:12} measured {ms:8.2f}  model {found:8.2f}  {error}", flush=True)
    for layout in PREDICTED:
        name = f"{layout.shape}, {layout.ranks} x {layout.stages}"
        yield {"predicted": {name: predicted(layout, rates, sums)}}
