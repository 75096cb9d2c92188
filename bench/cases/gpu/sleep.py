"""An engine on one GPU that falls asleep and wakes up: seconds, what stays on the GPU, and cycles under load.

Real shapes, random weights, level 1. The first sleep allocates and registers the host's memory for the weights; later
ones find it. cycles: requests run, lose their places when the engine falls asleep, and go on; their tokens must be
those of an engine that never slept.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.driving import add, load, outputs
from bench.harness import Case, check_tokens, in_process, void_unless
from bench.models import SHAPES, compile_to, new_folder

CASES = [
    ("gpu_sleep", {"shapes": ("llama3.1-8b", "qwen3-30b-a3b"), "cache_gib": 16, "times": 5}),
    ("gpu_sleep_cycles", {"shapes": ("qwen3-0.6b",), "cache_gib": 4, "times": 200}),
]  # fmt: skip
HELP = {"shapes": "shapes of models", "cache_gib": "of the cache", "times": "how often it sleeps"}
_GREEDY = {"temperature": 0.0}
_STEPS = 3  # between two sleeps under load
_REQUESTS, _LIMIT = 16, 400
_RAGGED = 48 << 20  # bytes that a process may have more after all cycles


def _obey(core: Any, move: str, **fields: Any) -> None:
    from graphllm.engine.process.sleep_orders import SleepOrder, obey

    while (state := obey(core, SleepOrder(0, move, **fields))) is None:  # type: ignore[arg-type]
        core.step()
    if state.error is not None:
        raise RuntimeError(state.error)


def _sleep(core: Any) -> None:
    from graphllm.engine.process.sleep_orders import sleep_part

    part = sleep_part(core)
    assert part is not None
    part.pause("keep")
    _obey(core, "pause")
    _obey(core, "sleep", level=1, tags=["weights", "kv_cache"])


def _wake(core: Any) -> None:
    _obey(core, "wake", tags=["weights", "kv_cache"])
    _obey(core, "resume")


def _free() -> int:
    import torch

    return torch.cuda.mem_get_info()[0]


def _host() -> int:
    """Bytes of the process that are in memory."""
    return int(re.findall(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024


def _open(shape: str, folder: str, cache_gib: int) -> Any:
    return load(
        Path(folder, "artifact"), Path(folder), kv_cache_memory_bytes=cache_gib << 30, enable_sleep_mode=True
    )  # fmt: skip


def _tokens(prompts: list[list[int]], core: Any) -> list[list[int]]:
    return outputs(core, prompts, 16, _GREEDY)


def seconds(shape: str, folder: str, cache_gib: int, times: int) -> Any:
    """Of each sleep and each waking, with nothing to do."""
    import torch

    torch.zeros(1, device="cuda")
    begun = _free()
    core = _open(shape, folder, cache_gib)
    prompts = np.random.default_rng(0).integers(3, SHAPES[shape]["vocab_size"], (8, 128)).tolist()
    before = _tokens(prompts, core)
    awake, slept, woke, left = _free(), list[float](), list[float](), list[int]()
    for _ in range(times + 1):
        start = time.perf_counter()
        _sleep(core)
        slept.append(round(time.perf_counter() - start, 3))
        left.append(begun - _free())
        start = time.perf_counter()
        _wake(core)
        woke.append(round(time.perf_counter() - start, 3))
    after = _tokens(prompts, core)
    if after != before:
        raise RuntimeError("tokens differ after sleeping")
    core.close()
    return {
        "GB awake": round((begun - awake) / 1e9, 2), "first sleep, with the host's memory, s": slept[0],
        "sleep s": slept[1:], "wake up s": woke, "GiB left on the GPU": round(max(left) / 2**30, 3),
        **void_unless(check_tokens, before),
    }  # fmt: skip


def cycles(shape: str, folder: str, cache_gib: int, times: int) -> Any:
    """Many of them under load."""
    core = _open(shape, folder, cache_gib)
    rng, vocab = np.random.default_rng(0), SHAPES[shape]["vocab_size"]
    prompts = rng.integers(3, vocab, (_REQUESTS, 64)).tolist()
    found: list[list[int]] = [[] for _ in prompts]

    def take(answers: Any) -> None:
        for answer in answers:
            found[int(answer.id)] += answer.tokens

    plain = outputs(core, prompts, _LIMIT, _GREEDY)
    core.reset_prefix_cache()
    sizes, done, rounds = list[tuple[int, int]](), 0, list[list[list[int]]]()
    first = 0  # cycles until all requests ran once, with kernels that later ones find loaded
    begun = time.perf_counter()
    while done < times:
        add(core, prompts, [_LIMIT] * len(prompts), _GREEDY)
        while core.unfinished:
            for _ in range(_STEPS):
                take(core.step())
            if done < times and core.unfinished:
                _sleep(core)
                free = _free()
                _wake(core)
                done += 1
                sizes.append((free, _host()))
        rounds.append(found)
        first = first or done
        found = [[] for _ in prompts]
    spent = time.perf_counter() - begun
    early, late = sizes[min(first, len(sizes) // 2)], sizes[-1]
    same = [
        sum(a == b for a, b in zip(one, other, strict=True))
        for r in rounds
        for one, other in zip(plain, r, strict=True)
    ]
    core.close()
    leaks = early[0] - late[0] > _RAGGED or late[1] - early[1] > _RAGGED
    return {
        "cycles": done, "s": round(spent, 1),
        "free GiB asleep, early and late": [round(s[0] / 2**30, 3) for s in (early, late)],
        "host's GiB, early and late": [round(s[1] / 2**30, 3) for s in (early, late)], "leaks": leaks,
        "free GiB asleep, every 20th": [round(s[0] / 2**30, 3) for s in sizes[::20]],
        "host's GiB, every 20th": [round(s[1] / 2**30, 3) for s in sizes[::20]], "early, after cycles": first,
        "equal tokens": [sum(same), len(rounds) * _REQUESTS * _LIMIT],
        **void_unless(check_tokens, plain),
    }  # fmt: skip


def run(case: Case) -> Iterator[dict[str, Any]]:
    """Shape by shape, each in a process of its own."""
    for shape in case.shapes:
        folder = new_folder(shape)
        compile_to(
            folder / "artifact", folder, "--max-model-len", "4096", "--load-format", "dummy", "--max-num-seqs", "32"
        )
        what = cycles if case.case == "gpu_sleep_cycles" else seconds
        yield {shape: in_process(what, shape, folder, case.cache_gib, case.times)}
