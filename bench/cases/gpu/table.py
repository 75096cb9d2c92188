"""The table of targets on one GPU: every row of a shape with its target, its floor and the share of the floor reached.

    python -m bench gpu_table [--shapes llama3.1-8b,qwen3-0.6b] [--runs 3] [--startup]
    python -m bench gpu_table --shapes llama3.1-8b --tensor-parallel-size 2 --startup [--out FOLDER]
    python -m bench paired OTHER     an older tree and this one on the same machine, both loaded, asked in turn

Real shapes, random bf16 weights, greedy, through the engine core; each figure is the median of the runs. decode: that
many requests at once, 128 tokens in and 256 out, median step. TTFT: one prompt of 8,192 tokens. mixed: 1,000 requests
of 100 to 1,024 tokens in and out, all queued at the beginning. startup: a fresh process reads the weights from a
safetensors file in the page cache.

The floor counts what no engine can avoid on this GPU: weights read once a step or their products, whichever takes
longer, and every cached key and value read once for every token that attends to it, at the rates measured on it (RATES;
targets are of an H200). Of latents, prompts make keys and values of heads, and single tokens attend to them as they
are, by reading or by arithmetic. Attention and products are counted one after the other, as they run. Of experts, as
many are read as tokens that choose at random would choose. With several ranks each has its share of both, and the
layers' sums take what they take on two H200s of one host, in a graph.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.driving import COMPILERS, add, load, outputs, profiled
from bench.driving import run as drive
from bench.harness import Case, check_experts, check_tokens, in_process, void_unless
from bench.models import SHAPES, compile_to, new_folder, write_checkpoint
from bench.vllm_figures import VLLM

CASES = [
    ("gpu_table", {"shapes": ("llama3.1-8b", "qwen3-0.6b"), "runs": 3, "startup": False, "tensor_parallel_size": 1,
                   "compile": "--max-model-len 8320", "rows": "", "trace": "", "no_experts": False}),
    ("gpu_table_experts", {"shapes": ("qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-20b-mxfp4"), "runs": 3, "startup": False,
                           "tensor_parallel_size": 1, "compile": "--max-model-len 8320", "rows": "", "trace": "",
                           "no_experts": False}),
    ("gpu_table_quantized", {"shapes": ("llama3.1-8b-fp8", "llama3.1-8b-awq"), "runs": 3, "startup": False,
                             "tensor_parallel_size": 1, "compile": "--max-model-len 8320", "rows": "", "trace": "",
                             "no_experts": False}),
    ("gpu_table_recurrent", {"shapes": ("qwen3-next-12", "mamba2-7b"), "runs": 3, "startup": False,
                             "tensor_parallel_size": 1, "compile": "--max-model-len 8320 --max-num-seqs 128",
                             "rows": "", "trace": "", "no_experts": False}),
    ("gpu_table_latent", {"shapes": ("deepseek-v2-lite", "deepseek-v3-6"), "runs": 3, "startup": False,
                          "tensor_parallel_size": 1, "compile": "--max-model-len 8320 --max-num-seqs 128",
                          "rows": "", "trace": "", "no_experts": False}),
    ("gpu_table_tp2", {"shapes": ("llama3.1-8b", "llama3-70b"), "runs": 2, "startup": False, "tensor_parallel_size": 2,
                       "compile": "--max-model-len 8320", "rows": "", "trace": "", "no_experts": False}),
    ("gpu_table_tp4", {"shapes": ("llama3.1-8b", "llama3-70b"), "runs": 2, "startup": False, "tensor_parallel_size": 4,
                       "compile": "--max-model-len 8320", "trace": "", "no_experts": False,
                       "rows": "decode 1,decode 32,decode 64,decode 128,decode 256,TTFT 8192"}),
]  # fmt: skip
HELP = {
    "shapes": "shapes of models",
    "runs": "runs of a row",
    "startup": "measure the start of a process, too",
    "tensor_parallel_size": "ranks, one GPU each",
    "compile": "options of graphllm compile",
    "rows": 'only these rows, such as "decode 1,TTFT 8192"; empty for all',
    "trace": "batches for which a step's kernels are listed, such as 1,64",
    "no_experts": "do not count distinct experts",
}
RATES = {"H200": (4.27e12, 788e12), "H100": (3.11e12, 803e12)}  # bytes read and bf16 operations a second, measured
# Target and the next one: ms a step by batch, ms to the first token, output tokens/s, seconds.
TARGETS: dict[str, dict[str, tuple[float, float]]] = {
    "llama3.1-8b": {"decode 1": (4.2, 3.7), "decode 32": (5.0, 4.3), "decode 64": (5.5, 4.7), "decode 128": (6.0, 5.8),
                    "decode 256": (9.2, 8.8), "TTFT 8192": (210, 206), "prefill 32x1024": (42000, 46000),
                    "mixed": (13300, 13800), "startup": (5.3, 4.5)},
    "qwen3-0.6b": {"decode 1": (0.62, 0.6), "decode 64": (1.3, 1.15), "decode 256": (2.9, 2.7),
                   "mixed": (33000, 34000)},
    "qwen3-30b-a3b": {"decode 1": (2.6, 2.3), "decode 32": (14.5, 14.2), "decode 128": (17, 16.5),
                      "TTFT 8192": (150, 138), "startup": (20, 12)},
    "gpt-oss-20b": {"decode 1": (2.4, 2.2)},
    "llama3.1-8b-fp8": {"decode 1": (2.6, 2.4), "decode 64": (3.6, 3.4), "TTFT 8192": (154, 144)},
    "llama3.1-8b-awq": {"decode 1": (2.0, 1.8), "decode 64": (4.3, 3.8)},
    "gpt-oss-20b-mxfp4": {"decode 1": (1.75, 1.5), "decode 32": (4.8, 4.3)},
    "qwen3-next-12": {"decode 1": (0.95, 0.75), "decode 32": (5.3, 5.0), "decode 128": (10.1, 9.6),
                      "TTFT 8192": (45, 40)},
    "deepseek-v2-lite": {"decode 1": (2.0, 1.6), "decode 32": (9.1, 8.3), "decode 128": (9.7, 9.0),
                         "TTFT 8192": (81, 75)},
    "deepseek-v3-6": {"decode 1": (1.75, 1.5), "decode 32": (13.0, 11.5), "decode 128": (19.4, 17.0)},
    "mamba2-7b": {"decode 1": (4.1, 3.8), "decode 64": (8.5, 8.0), "TTFT 8192": (210, 190)},
    "llama3.1-8b tp2": {"decode 1": (2.7, 2.5), "decode 32": (3.1, 3.0), "decode 64": (3.4, 3.2),
                        "decode 128": (4.3, 4.1), "decode 256": (6.1, 5.8), "TTFT 8192": (122, 118),
                        "mixed": (22000, 23000), "startup": (8, 5)},
    "llama3-70b tp2": {"decode 1": (19.2, 18.6), "decode 64": (22.3, 21.5), "TTFT 8192": (1000, 970)},
}  # fmt: skip
# An all-reduce of two ranks: seconds by bytes up to 1 MB, and the rate beyond.
ALL_REDUCE, BETWEEN = ((0, 8 << 10, 64 << 10, 256 << 10, 1 << 20), (6.2e-6, 6.2e-6, 7.3e-6, 7.5e-6, 9.9e-6)), 390e9
SAMPLED = ("gpt-oss-20b-mxfp4",)  # at temperature 1: greedy, random weights send all tokens to few experts
# Bytes of a weight of a layer that is encoded, by quant_method, with its scales; of GPT-OSS only experts are.
ENCODED = {"fbgemm_fp8": 1.0, "fp8": 1.0, "awq": 0.5 + 4 / 128, "mxfp4": 0.5 + 1 / 32}
TRACED = {"qwen3-0.6b": "1,64,256"}  # batches with traced steps: where steps are short
UP = ("mixed", "prefill 32x1024")  # rows where more is better


class Floor:
    """Least seconds of a shape's work, shared among ranks."""

    def __init__(self, c: dict, ranks: int = 1, gpu: str = "H200") -> None:
        """gpu: a key of RATES."""
        self.ranks, self.sums, self.width = ranks, 2 * c["num_hidden_layers"], c["hidden_size"]
        D, L, F = c["hidden_size"], c["num_hidden_layers"], c.get("intermediate_size", 0)
        counts = (c[n] for n in ("num_experts", "num_local_experts", "n_routed_experts") if n in c)
        self.N, self.A, first = next(counts, 1), c.get("num_experts_per_tok", 1), c.get("first_k_dense_replace", 0)
        width = c.get("moe_intermediate_size", F)
        shared = c.get("shared_expert_intermediate_size", c.get("n_shared_experts", 0) * width)
        self.expert = (L - first) * 3 * D * width
        mixer, self.state, recurrent = recurrent_layers(c)
        attends = L - recurrent
        attention, cached, pair, attended = (attends * n for n in attention_layer(c))
        self.dense = attention + recurrent * mixer + 3 * D * (first * F + (L - first) * shared)
        self.head = c["vocab_size"] * D
        self.bandwidth, self.arithmetic = (ranks * rate for rate in RATES[gpu])
        self.layers = self.dense + self.A * self.expert  # weights that a token is multiplied with
        method = c.get("quantization_config", {}).get("quant_method")
        self.expert_bytes = self.expert * ENCODED.get(method, 2.0)
        self.dense_bytes = self.dense * (2.0 if method == "mxfp4" else ENCODED.get(method, 2.0))
        self.attention = pair  # operations
        self.attended = max(cached / self.bandwidth, attended / self.arithmetic)  # seconds of a token before

    def products(self, tokens: int, sampled: int) -> float:
        """Of one step."""
        flops = 2 * (self.layers * tokens + self.head * sampled)
        distinct = self.N * (1 - (1 - self.A / self.N) ** tokens)
        read = self.dense_bytes + self.expert_bytes * distinct + 2 * self.head
        return max(read / self.bandwidth, flops / self.arithmetic) + self.collectives(tokens)

    def collectives(self, tokens: int) -> float:
        """The sums of one step's layers."""
        if self.ranks == 1:
            return 0.0
        nbytes = 2 * tokens * self.width
        known, seconds = ALL_REDUCE
        return self.sums * (float(np.interp(nbytes, known, seconds)) + max(0, nbytes - known[-1]) / BETWEEN)

    def decode(self, batch: int, context: float) -> float:
        """Of one step at that mean context."""
        return self.products(batch, batch) + batch * (context * self.attended + self.state / self.bandwidth)

    def prefill(self, lengths: list[int]) -> float:
        """Of prompts, causal, in one step."""
        pairs = sum(n * (n + 1) / 2 for n in lengths)
        return self.products(sum(lengths), len(lengths)) + pairs * self.attention / self.arithmetic

    def mixed(self, lengths: np.ndarray) -> float:
        """Of all requests (prompt and output lengths), in steps so large that products are bound by arithmetic."""
        prompts, outputs = lengths.astype(float)
        flops = 2 * (self.layers * (prompts + outputs).sum() + self.head * outputs.sum())
        flops += self.attention * (prompts * (prompts + 1) / 2).sum()
        read = (outputs * prompts + outputs * (outputs + 1) / 2).sum() * self.attended
        return float(flops / self.arithmetic + read)


def attention_layer(c: dict) -> tuple[int, int, int, int]:
    """Of one layer with attention: weights, bytes that a token leaves in the cache, operations of two tokens of a
    prompt, and those of a single token for one in the cache."""
    D, H, K, E = (c.get(n, 0) for n in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    if "kv_lora_rank" in c:
        Q, L = c["q_lora_rank"], c["kv_lora_rank"]
        N, R, V = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        queries = (D + H * (N + R)) * Q if Q else D * H * (N + R)
        weights = queries + D * (L + R) + L * H * (N + V) + H * V * D
        return weights, 2 * (L + R), 2 * H * (N + R + V), 2 * H * (2 * L + R)
    gate = H if "full_attention_interval" in c else 0  # of what attention gives
    return D * (H + gate + 2 * K) * E + H * E * D, 4 * K * E, 4 * H * E, 4 * H * E


def recurrent_layers(c: dict) -> tuple[int, float, int]:
    """Weights of one such layer, bytes of states that a step of one token reads and writes in all, and how many layers
    are recurrent."""
    D, L = c["hidden_size"], c["num_hidden_layers"]
    if c["model_type"] == "mamba2":
        H, P, N = c["num_heads"], c["head_dim"], c["state_size"]
        return D * (3 * H * P + 2 * c["n_groups"] * N + H), 2 * 4.0 * L * H * P * N, L
    if "full_attention_interval" in c:
        G, H = c["linear_num_key_heads"], c["linear_num_value_heads"]
        K, V = c["linear_key_head_dim"], c["linear_value_head_dim"]
        count = L - L // c["full_attention_interval"]
        return D * (2 * G * K + 3 * H * V + 2 * H), 2 * 4.0 * count * H * K * V, count
    if "linear_attn_config" in c:
        delta = c["linear_attn_config"]
        H, E, count = delta["num_heads"], delta["head_dim"], len(delta["kda_layers"])
        return D * (4 * H * E + H + 2 * E) + 2 * E * H * E, 2 * 4.0 * count * H * E * E, count
    return 0, 0.0, 0


def state_bytes(artifact: str) -> int:
    """Of a number of a recurrent state."""
    from graphllm.program.artifact import Artifact
    from graphllm.weights.dtypes import ITEMSIZE

    return ITEMSIZE[Artifact.open(Path(artifact)).config.state_dtypes["recurrent"]]


def this_gpu() -> str:
    """Its key in RATES; an H200's where it has none."""
    import torch

    return next((gpu for gpu in RATES if gpu in torch.cuda.get_device_name()), "H200")


def case_of(shape: str, ranks: int) -> str:
    """The name of a shape's targets."""
    return shape if ranks == 1 else f"{shape} tp{ranks}"


def measure(shape: str, artifact: str, folder: str, runs: int, only: str = "", ranks: int = 1) -> dict[str, Any]:
    """Every row of a shape but start-up, from a finished artifact, in this process, which is rank 0. only: the rows,
    between commas."""
    core = load(Path(artifact), Path(folder))
    rng, vocab, floor = np.random.default_rng(0), SHAPES[shape]["vocab_size"], Floor(SHAPES[shape], ranks, this_gpu())
    floor.state *= state_bytes(artifact) / 4

    def prompts(lengths: Any) -> list[list[int]]:
        return [rng.integers(0, vocab, n).tolist() for n in lengths]

    greedy = {"temperature": 1.0 if shape in SAMPLED else 0.0}
    found: dict[str, list[float]] = {}
    floors: dict[str, float] = {}
    lengths = rng.integers(100, 1025, (2, 1000))
    if not floor.state:
        drive(core, prompts(lengths[0][:300]), [20] * 300, greedy)
    host: dict[str, Any] = {}
    for turn in range(runs):
        for row in only.split(",") if only else TARGETS[case_of(shape, ranks)]:
            kind, _, size = row.partition(" ")
            if kind == "decode":
                if turn == 0:
                    drive(core, prompts([128] * int(size)), [8] * int(size), greedy)
                value = drive(core, prompts([128] * int(size)), [256] * int(size), greedy)["median step ms"]
                floors[row] = 1e3 * floor.decode(int(size), 256)
            elif kind == "TTFT":
                if turn == 0:
                    drive(core, prompts([int(size)]), [1], greedy)
                value = 1e3 * drive(core, prompts([int(size)]), [1], greedy)["first s"]
                floors[row] = 1e3 * floor.prefill([int(size)])
            elif kind == "prefill":
                value = 32 * 1024 / drive(core, prompts([1024] * 32), [1] * 32, greedy)["s"]
                floors[row] = 32 * 1024 / floor.prefill([1024] * 32)
            elif kind == "mixed":
                before = padding(core)
                result = drive(core, prompts(lengths[0]), lengths[1].tolist(), greedy)
                value, floors[row] = result["tokens/s"], lengths[1].sum() / floor.mixed(lengths)
                host["mixed run"] = {k: round(v, 3) for k, v in result.items()}
                host["padding by bucket"] = {
                    name: round((wasted - before.get(name, (0, 0))[1]) / max(1, rows - before.get(name, (0, 0))[0]), 3)
                    for name, (rows, wasted) in padding(core).items()
                }
            else:
                continue
            found.setdefault(row, []).append(value)
            print(shape, turn, row, round(value, 3), file=sys.stderr, flush=True)
    host |= void_unless(check_tokens, outputs(core, prompts([128] * 8), 16, greedy))
    if floor.state:
        add(core, prompts([128] * 8), [64] * 8, greedy)
        for _ in range(40):
            core.step()
        host |= void_unless(check_states, core)
    core.close()
    return {"rows": {row: {"runs": [round(v, 3) for v in values], "floor": round(floors[row], 3)}
                     for row, values in found.items()}, **host}  # fmt: skip


def distinct_experts(artifact: str, folder: str, sizes: list[int]) -> dict[str, Any]:
    """By batch: how many of a layer's experts one decode step reads, for each layer. The artifact counts them."""
    core, config = load(Path(artifact), Path(folder)), json.loads(Path(folder, "config.json").read_text())
    rng, vocab = np.random.default_rng(0), config["vocab_size"]
    found: dict[str, list[int]] = {}
    for size in sizes:
        add(core, [rng.integers(0, vocab, 128).tolist() for _ in range(size)], [64] * size, {"temperature": 0.0})
        steps = core.stats().steps
        while core.stats().steps < steps + 40:  # all of them decode by then
            before, _ = np.array(core.stats().expert_tokens), core.step()
        found[str(size)] = ((np.array(core.stats().expert_tokens) - before) > 0).sum(axis=1).tolist()
        while core.unfinished:
            core.step()
    core.close()
    return {**found, **void_unless(check_experts, found, config["num_experts_per_tok"])}


def check_states(core: Any) -> None:
    """Raises AssertionError where recurrent states of two sequences that decode are zeros, the same, or not finite."""
    import torch

    slots = [state.slot for state in core.scheduler.requests.by_slot if state is not None][:2]
    for name, tensor in core.executor.states.tensors.items():
        if tensor.dtype.is_floating_point and name.split(".")[-1] in ("delta", "ssm"):
            first, second = (tensor[slot, 0].float() for slot in slots)
            if not (first.isfinite().all() and first.abs().mean() > 1e-7 and not torch.equal(first, second)):
                raise AssertionError(f"the work is not real: {name} of two sequences {first.abs().mean():.3g}")


def padding(core: Any) -> dict[str, tuple[int, int]]:
    """By bucket: rows computed, and how many of them were padding."""
    return {name: (b.tokens + b.padding, b.padding) for name, b in core.stats().buckets.items()}


def traced(artifact: str, folder: str, size: int, greedy: bool) -> dict[str, Any]:
    """`profiled` of decode steps of ``size`` requests."""
    core = load(Path(artifact), Path(folder))
    rng, vocab = np.random.default_rng(0), json.loads(Path(folder, "config.json").read_text())["vocab_size"]
    prompts = [rng.integers(0, vocab, 128).tolist() for _ in range(size)]
    add(core, prompts, [200] * size, {"temperature": 0.0 if greedy else 1.0})
    for _ in range(60):
        core.step()
    found = profiled(core, 40)
    core.close()
    return found


def first_token(folder: str, artifact: str, begun: float) -> dict[str, Any]:
    """Load the engine and give one token; seconds since ``begun``, the clock when this process was started."""
    phases = {"interpreter and imports": time.time() - begun}
    from graphllm.config import EngineArgs
    from graphllm.loading.artifact.model import resolve_model
    from graphllm.loading.core.load import load_core

    core = load_core(
        resolve_model(EngineArgs(Path(folder), artifact=Path(artifact), skip_tokenizer_init=True)).config,
        phases.__setitem__,
    )
    before = time.time()
    drive(core, [[1] * 128], [1], {"temperature": 0.0})
    phases["first token"] = time.time() - before
    seconds, compilers = time.time() - begun, [m for m in COMPILERS if m in sys.modules]
    for rank, seconds in enumerate(getattr(core.executor, "rank_seconds", []), 1):
        phases |= {f"rank {rank}: {name}": s for name, s in seconds.items()}
    core.close()
    return {"s": seconds, "phases": phases, "compiler modules": compilers}


def startup(folder: Path, options: list[str], runs: int) -> dict[str, Any]:
    """Seconds from the start of a process to its first token, weights from the page cache; phases of the last run."""
    write_checkpoint(folder)
    artifact = folder / "with-weights"
    compile_to(artifact, folder, *options)
    tried = [in_process(first_token, folder, artifact, time.time()) for _ in range(runs)]
    starts = [s for s in tried if "failed" not in s]
    if not starts:
        return {"rows": {}}
    return {
        "rows": {"startup": {"runs": [round(s["s"], 2) for s in starts], "floor": None}},
        "startup phases s": {k: round(v, 3) for k, v in starts[-1]["phases"].items()},
        "start-up": {"compiler modules": starts[-1]["compiler modules"]},
    }


def table(shape: str, rows: dict[str, Any]) -> str:
    """Markdown."""
    targets = TARGETS.get(shape, {})
    lines = [
        f"| {shape} | measured | target | next | vLLM 0.26 | floor | share of the floor |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        value, (target, goal) = row["median"], targets.get(name, ("", ""))
        met = target == "" or (value >= target if name in UP else value <= target)
        peer = VLLM.get(shape, {}).get(name)
        floor = row["floor"]
        share = "" if not floor else f"{(value / floor if name in UP else floor / value):.0%}"
        cells = [name, f"{value:g}{'' if met else ' (missed)'}", target, goal, peer or "", floor or "", share]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def run(case: Case) -> Iterator[dict[str, Any]]:
    """Shape by shape; every part of a shape runs in a process of its own."""
    options = [*case.compile.split(), "--tensor-parallel-size", str(case.tensor_parallel_size)]
    dummy = ("--load-format", "dummy", *options)
    for shape in case.shapes:
        name, folder = case_of(shape, case.tensor_parallel_size), new_folder(shape)
        artifact = folder / "artifact"
        begin = time.perf_counter()
        compile_to(artifact, folder, *dummy)
        found: dict[str, Any] = {"compile s": round(time.perf_counter() - begin, 1)}
        parts = [in_process(measure, shape, artifact, folder, case.runs, case.rows, case.tensor_parallel_size)]
        found["traced"] = {
            n: in_process(traced, artifact, folder, int(n), shape not in SAMPLED)
            for n in (case.trace or TRACED.get(shape, "")).split(",")
            if n
        }
        if "num_experts_per_tok" in SHAPES[shape] and not case.no_experts:
            counting = folder / "counting"
            compile_to(counting, folder, *dummy, "--count-expert-tokens")
            distinct = in_process(distinct_experts, counting, folder, (1, 32, 128))
            found["distinct experts of each layer, by batch"] = distinct
        if case.startup and "startup" in TARGETS.get(name, {}):
            parts.append(startup(folder, options, case.runs))
        rows = {}
        for part in parts:
            measured = part.pop("rows", {})
            rows |= {n: {"median": round(statistics.median(r["runs"]), 3), **r} for n, r in measured.items()}
            found |= part
        print(table(name, rows), flush=True)
        yield {name: {**found, **rows}}
