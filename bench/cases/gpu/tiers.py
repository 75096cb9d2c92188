"""The cache's host memory on one GPU: its copies, a long prompt that is found there, and agents whose conversations
need more than the device holds.

Real shapes, random weights. copies: one way and both ways at once, of blocks as they lie. prompt: the time to the first
token, computed, found on the device, and found in host memory. agents: with the tier and without it, the same requests;
how many of their tokens are equal is told. at 0 %: prompts that share nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.agents import Found, Sizes, serve_agents
from bench.driving import load, outputs
from bench.driving import run as drive
from bench.harness import Case, check_tokens, in_process, void_unless
from bench.models import SHAPES, compile_to, new_folder

CASES = [
    ("gpu_tiers", {"shapes": ("llama3.1-8b",), "device_gib": 20, "host_gib": 80, "conversations": 6, "turns": 30,
                   "answer": 900, "at_once": 3, "seconds": (60, 330), "rounds": 4}),
]  # fmt: skip
HELP = {
    "shapes": "shapes of models", "device_gib": "of the device's cache", "host_gib": "of host memory",
    "conversations": "agents", "turns": "of each agent",
    "answer": "tokens of an answer",
    "at_once": "agents whose turns run together",
    "seconds": "after which no turn begins, without and with the tier",
    "rounds": "by turns, at 0 %; 0: none",
}  # fmt: skip
_PROMPT = 32_000  # tokens
_COPIED = 1000  # blocks
_TICKET = 1 << 40  # beyond the engine's own


def _copies(core: Any) -> dict[str, Any]:
    from graphllm.runtime.commands.tiers import EndedCopies, LoadEntries, StoreEntries

    executor, nbytes = core.executor, sum(core.executor.block_bytes)
    count = min(_COPIED, executor.layout.num_blocks // 2 - 1)
    pairs = [(1 + i, i) for i in range(count)]
    commands = {
        "to the host": [StoreEntries({"blocks": pairs}, _TICKET, False, True)],
        "from the host": [LoadEntries({"blocks": [(i, block) for block, i in pairs]}, _TICKET, 0)],
        "both ways": [
            StoreEntries({"blocks": pairs}, _TICKET, False, True),
            LoadEntries({"blocks": [(count + i, count + block) for block, i in pairs]}, _TICKET + 1, 0),
        ],
    }
    found: dict[str, Any] = {"bytes of a block": nbytes}
    for name, given in commands.items():
        rates = []
        for _ in range(4):
            begun, left = time.perf_counter(), len(given)
            for command in given:
                executor.do(command)
            issued = time.perf_counter() - begun
            while left:
                time.sleep(1e-4)  # a thread that never rests keeps the ones that copy from Python
                left -= len(executor.ask(EndedCopies())[0].value)
            rates.append(len(given) * count * nbytes / (time.perf_counter() - begun))
        found[f"{name}, GB/s"] = round(max(rates) / 1e9, 1)
        found[f"{name}, ms of the host"] = round(1e3 * issued, 2)
    return found


def _prompt(core: Any, vocab: int) -> dict[str, Any]:
    rng, greedy = np.random.default_rng(1), {"temperature": 0.0}
    prompts = [rng.integers(3, vocab, _PROMPT).tolist() for _ in range(2)]
    filler = core.info.num_blocks * core.info.block_size // _PROMPT + 1
    found: dict[str, Any] = {}
    drive(core, [prompts[1]], [1], greedy)  # captures
    for name in ("computed", "on the device", "on the device"):  # the first step of its size is captured
        found[f"{name}, ms"] = round(1e3 * drive(core, [prompts[0]], [1], greedy)["first s"], 1)
    for _ in range(filler):
        drive(core, [rng.integers(3, vocab, _PROMPT).tolist()], [1], greedy)
    before = core.stats().tiers["host"].hit_tokens
    found["in host memory, ms"] = round(1e3 * drive(core, [prompts[0]], [1], greedy)["first s"], 1)
    found["tokens that came"] = core.stats().tiers["host"].hit_tokens - before
    found["computed / in host memory"] = round(found["computed, ms"] / found["in host memory, ms"], 1)
    return found


def _until_ready(core: Any) -> float:
    """Have all of host memory ready, and wait for it; seconds."""
    from graphllm.engine.parts.tiers import Tiers

    begun = time.perf_counter()
    while not core.part(Tiers).preparing.all():
        time.sleep(0.01)
    return round(time.perf_counter() - begun, 2)


def _at_nothing(cores: dict[str, Any], vocab: int, rounds: int) -> dict[str, Any]:
    """Prompts that share nothing, the same for each engine, by turns."""
    rng, greedy = np.random.default_rng(2), {"temperature": 0.0}
    rates: dict[str, list[float]] = {name: [] for name in cores}
    for turn in range(rounds + 1):
        apart = rng.integers(3, vocab, (64, 2000)).tolist()
        for name, core in cores.items():
            rate = drive(core, apart, [128] * len(apart), greedy)["tokens/s"]
            if turn:  # the first one captures
                rates[name].append(round(rate, 1))
    plain, tiered = rates.values()
    return {**rates, "no tier / host memory": round(float(np.median(np.divide(plain, tiered))), 4)}


def measure(shape: str, folder: str, case: dict[str, Any]) -> Any:
    """One shape, all rows, from the artifact in its folder. case: the settings."""
    vocab, cores, served = SHAPES[shape]["vocab_size"], dict[str, Any](), dict[str, Found]()
    for name, size in (("no tier", 0), ("host memory", case["host_gib"] << 30)):
        cores[name] = load(
            Path(folder, "artifact"),
            Path(folder),
            kv_cache_memory_bytes=case["device_gib"] << 30,
            kv_offloading_size=size,
        )
    tiered = cores["host memory"]
    result: dict[str, Any] = {"s until host memory is registered": _until_ready(tiered)}
    _say(result)
    if case["rounds"]:
        result["output tokens/s at 0 %"] = _at_nothing(cores, vocab, case["rounds"])
        _say(result)
    tiered.reset_prefix_cache()
    result["copies"] = _copies(tiered)
    _say(result)
    tiered.reset_prefix_cache()  # what lies there now is another's
    result["prompt"] = _prompt(tiered, vocab)
    _say(result)
    for (name, core), most in zip(cores.items(), case["seconds"], strict=True):
        core.reset_prefix_cache()
        sizes = Sizes(out=case["answer"])
        served[name] = serve_agents(core, sizes, case["conversations"], case["turns"], case["at_once"], vocab, most)
        result[f"agents, {name}"] = served[name].figures()
        _say(result)
    result["tier"] = {k: getattr(tiered.stats().tiers["host"], k) for k in ("used_bytes", "hit_tokens")}
    prompts = np.random.default_rng(3).integers(3, vocab, (8, 128)).tolist()
    void = void_unless(check_tokens, outputs(tiered, prompts, 16, {"temperature": 0.0}))
    texts = zip(served["no tier"].texts, served["host memory"].texts, strict=True)
    same = [sum(a == b for a, b in zip(one, other, strict=False)) for one, other in texts]
    result["tokens of agents that are equal"] = sum(same), sum(map(len, served["no tier"].texts))
    for core in cores.values():
        core.close()
    return {**result, **void}


def _say(result: dict[str, Any]) -> None:
    print(result, file=sys.stderr, flush=True)


def run(case: Case) -> Iterator[dict[str, Any]]:
    """Shape by shape, each in a process of its own."""
    for shape in case.shapes:
        folder = new_folder(shape)
        compile_to(
            folder / "artifact", folder, "--max-model-len", "131072", "--load-format", "dummy", "--max-num-seqs", "64"
        )
        found = in_process(measure, shape, folder, {name: getattr(case, name) for name in case.settings})
        yield {shape: found}
