"""From an empty cache to the end of a first answer on a CPU, again from what that left, and the change to own code.

    python -m bench first_answer [--models embedded,FILE.gguf] [--runs 3]

Each run is a new process that answers one prompt with 24 tokens, greedily. nothing: an empty cache, prebuilt kernels of
the package, no compiler on PATH. waiting: an empty cache, and the model's own code is compiled first (`--optimize
first`). again: what the run before has left. llama.cpp: a GGUF file with llama-cpp-python, where it is there. torch:
a process that only imports torch. speed: tokens/s of decoding 1 and 8 sequences and of a prompt of 960, prebuilt and
own code in turn, in processes of their own. taken: an engine answers a short request every 100 ms while its own code is
compiled behind it, which gets the time in between: the median meanwhile and afterwards, and the longest request around
the change. A model's own code rounds at other places, so
where two tokens are almost as likely, its text may go on otherwise; "same text" says so.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.harness import GRAPHLLM, Case, in_process, in_turn, worker_environment

CASES = [("first_answer", {"models": ("embedded",), "runs": 3})]
HELP = {"models": "names and files of models"}
PROMPT, TOKENS = "The capital of France is", 24
_EVERY = 0.1  # seconds
LLAMA = """
import sys
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_threads=int(sys.argv[2]), n_ctx=2048, verbose=False)
print(llm(sys.argv[3], max_tokens=int(sys.argv[4]), temperature=0)["choices"][0]["text"])
"""


def seconds_of(command: list[str], texts: set[str] | None = None, **environment: str) -> float:
    """Of a process that must succeed, from its start to its end. texts: gets what it printed."""
    begin = time.perf_counter()
    done = subprocess.run(command, env={**worker_environment(), **environment}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    if texts is not None:
        texts.add(done.stdout)
    return round(time.perf_counter() - begin, 3)


def run(case: Case) -> Iterator[dict[str, Any]]:
    """One model after the other."""
    rows: dict[str, Any] = {
        "torch": {"s": statistics.median(seconds_of([sys.executable, "-c", "import torch"]) for _ in range(case.runs))}
    }
    for model in case.models:
        name = Path(model).stem if model.endswith(".gguf") else model
        with tempfile.TemporaryDirectory() as place:
            rows[name] = {
                **starts(model, case.runs, Path(place), model if name != model else ""),
                "speed": speeds(model),
                "taken": taken(model, place),
            }
        yield rows


def starts(model: str, runs: int, place: Path, file: str = "") -> dict[str, Any]:
    """Medians of each kind of start. file: llama.cpp's, where there is one."""
    ask = [*GRAPHLLM, "run", f"--model={model}", f"--prompt={PROMPT}", f"--max-tokens={TOKENS}", "--temperature=0"]
    texts: dict[str, set[str]] = {"prebuilt": set(), "own code": set()}
    found: dict[str, list[float]] = {"nothing": [], "again": [], "waiting": []}
    for number in range(runs):
        own, soon = place / f"own{number}", place / f"soon{number}"
        found["waiting"].append(seconds_of([*ask, "--optimize=first"], texts["own code"], GRAPHLLM_CACHE=str(own)))
        shutil.copytree(own / "kernels", soon / "kernels") if (own / "kernels").is_dir() else soon.mkdir()
        for kind in ("nothing", "again"):
            command = [*ask, "--optimize=next_start"]
            found[kind].append(seconds_of(command, texts["prebuilt"], GRAPHLLM_CACHE=str(soon), PATH="/nonexistent"))
    for name, found_texts in texts.items():
        assert [len(text) > 20 for text in found_texts] == [True], f"the work is not real: {name} gave {found_texts}"
    if file and importlib.util.find_spec("llama_cpp"):
        threads = str(len(os.sched_getaffinity(0)))
        command = [sys.executable, "-c", LLAMA, file, threads, PROMPT, f"{TOKENS}"]
        found["llama.cpp"] = [seconds_of(command) for _ in range(runs)]
    rows: dict[str, Any] = {kind: {"s": round(statistics.median(s), 2), "runs": s} for kind, s in found.items()}
    return {**rows, "same text": {"of prebuilt and own code": texts["prebuilt"] == texts["own code"]}}


def speeds(model: str) -> dict[str, Any]:
    """Medians of turns, and the share of the own code's speed that prebuilt kernels have."""
    kinds = {"prebuilt": "prebuilt", "own code": "inductor"}
    turns: dict[str, list[Any]] = {name: [] for name in kinds}

    def measure(name: str) -> float:
        turns[name].append(in_process(speed, model, kinds[name]))
        return 0.0

    in_turn(3, kinds, measure, order="mirrored")
    rows = {
        name: {what: round(statistics.median(turn[what] for turn in found), 1) for what in found[0]}
        for name, found in turns.items()
    }
    share = {what: round(rows["prebuilt"][what] / rows["own code"][what], 3) for what in rows["prebuilt"]}
    return {**rows, "prebuilt over own code": share}


def speed(model: str, backend: str) -> dict[str, float]:
    """Tokens/s."""
    from graphllm import LLM, SamplingParams

    with LLM(model, backend=backend, target="cpu", max_model_len=1024, enable_prefix_caching=False) as llm:

        def seconds(count: int, length: int, out: int) -> float:
            prompts = [{"prompt_token_ids": [5 + (7 * i + 13 * n) % 900 for i in range(length)]} for n in range(count)]
            params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
            begin = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            texts = {tuple(o.outputs[0].token_ids) for o in outputs}
            assert out == 1 or count == 1 or len(texts) > 1, "the work is not real: all sequences have the same tokens"
            return time.perf_counter() - begin

        seconds(8, 16, 8)
        return {
            "decode 1": 64 / (seconds(1, 16, 65) - seconds(1, 16, 1)),
            "decode 8": 8 * 64 / (seconds(8, 16, 65) - seconds(8, 16, 1)),
            "prefill 960": 960 / min(seconds(1, 960, 1) for _ in range(2)),
        }


def taken(model: str, place: str) -> dict[str, Any]:
    """In a process of its own."""
    found: dict[str, Any] = in_process(change, model, env={"GRAPHLLM_CACHE": f"{place}/taken"})
    return found


def change(model: str) -> dict[str, Any]:
    """Short requests, one after the other, until the engine has its own code and has answered some with it."""
    import logging

    from graphllm import LLM, SamplingParams

    told: list[float] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "runs from here on" in record.getMessage():
                told.append(time.perf_counter())

    logging.getLogger("graphllm").addHandler(Listener())
    logging.getLogger("graphllm").setLevel(logging.INFO)
    asked: list[tuple[float, float]] = []
    texts = set()
    with LLM(model, target="cpu", optimize="behind", max_model_len=1024) as llm:
        begin, after = time.perf_counter(), 0
        while after < 20:
            start = time.perf_counter()
            output = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0]
            asked.append((start, time.perf_counter() - start))
            time.sleep(max(0.0, start + _EVERY - time.perf_counter()))
            texts.add(tuple(output.outputs[0].token_ids))
            after += bool(told)
    around = max(seconds for start, seconds in asked if abs(start - told[0]) < 2 * _EVERY)
    return {
        "after s": round(told[0] - begin, 1),
        "median before ms": round(1e3 * statistics.median(s for _, s in asked[:-20]), 1),
        "median ms": round(1e3 * statistics.median(s for _, s in asked[-20:]), 1),
        "longest around ms": round(1e3 * around, 1),
        "requests": len(asked),
        "texts": len(texts),
    }
