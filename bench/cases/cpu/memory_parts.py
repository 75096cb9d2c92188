"""What the resident memory of a process that serves one GGUF file on a CPU is made of, and llama.cpp's.

    python -m bench memory_parts ARTIFACT FILE.gguf [--sequences 8] [--length 1152] [--llama]

Each runs in a fresh process of its own, all that there is of it: prompts of token ids until every sequence is as long
as asked for, one after the other and then all at once, so that kernels and memory have met the largest steps. The cache
has room for the sequences, as llama.cpp's context has. Pages are counted where they lie (/proc/self/pagemap); the peak
is the kernel's (VmHWM). MB are 10^6 bytes.
"""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import Any

from bench.harness import Case, in_process

CASES = [("memory_parts", {"artifact": Path, "file": Path, "sequences": 8, "length": 1152, "llama": False})]
HELP = {
    "artifact": "compiled folder of the file",
    "file": "the GGUF file",
    "length": "tokens of a sequence, prompt and output",
    "llama": "llama.cpp too, through llama-cpp-python",
}
_PAGE = 4096


def status(field: str) -> float:
    """Of this process, MB."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / 1e6


def resident(places: list[tuple[int, int]]) -> float:
    """MB of these stretches (address, bytes) that lie in memory, each page once."""
    import numpy as np

    pages = np.unique(np.concatenate([np.arange(a // _PAGE, -(-(a + n) // _PAGE)) for a, n in places if n]))
    there = 0
    with open("/proc/self/pagemap", "rb", buffering=0) as table:
        for run in np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1):
            table.seek(int(run[0]) * 8)
            there += int((np.frombuffer(table.read(len(run) * 8), np.uint64) >> np.uint64(63)).sum())
    return there * _PAGE / 1e6


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(100_000) for _ in range(length)] for _ in range(count)]


def ours(artifact_path: str, file_path: str, sequences: int, length: int) -> dict[str, Any]:
    """In this process."""
    artifact, file = Path(artifact_path), Path(file_path)
    parts, last = {"interpreter": status("VmRSS")}, status("VmRSS")

    def part(name: str, less: float = 0.0) -> None:
        nonlocal last
        now = status("VmRSS") - less
        parts[name], last = round(now - last, 1), now

    import numpy as np  # noqa: F401 - to be counted by itself

    part("numpy")
    from graphllm.config import EngineArgs
    from graphllm.config.requests.sampling_params import SamplingParams
    from graphllm.entrypoints.llm import LLM
    from graphllm.loading.artifact.model import resolve_model
    from graphllm.loading.checkpoint.conversion import tokenizer_folder
    from graphllm.loading.core.load import load_core
    from graphllm.program.artifact import Artifact

    opened = Artifact.trusted(artifact)
    blocks = 2 + sequences * -(-length // opened.config.block_size)
    size = blocks * opened.memory.block
    args = EngineArgs(file, artifact=artifact, target="cpu", skip_tokenizer_init=True, kv_cache_memory_bytes=size)
    config = resolve_model(args).config
    part("graphllm's modules")
    from graphllm.engine.requests.text import Tokenizer

    tokenizer = Tokenizer.from_folder(tokenizer_folder(Path(config.model.model)))
    part("tokenizer")
    seconds: dict[str, float] = {}

    def phase(name: str, took: float) -> None:
        seconds[name] = round(took, 3)
        if name == "import torch":
            part("torch, and the cache's first memory")

    core = load_core(config, phase)
    llm, executor = LLM.from_core(core, tokenizer), core.executor
    main = executor._main
    states = {t.data_ptr() for t in executor.states.tensors.values()}
    weights = [(t.data_ptr(), t.nbytes) for t in main._outside.values() if t.data_ptr() not in states]
    cache = [(t.data_ptr(), t.nbytes) for t in executor.states._pool]
    arena = [(main._arena.data_ptr(), main._arena.nbytes)]
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    llm.generate(prompts(1, 16, 0), params)
    for number in range(sequences):
        llm.generate(prompts(1, length - 32, number + 1), params)
    llm.reset_prefix_cache()
    llm.generate(prompts(sequences, length - 32, 99), params)
    counted = {"weights": resident(weights), "cache": resident(cache), "activations": resident(arena)}
    whole, code = status("VmRSS"), status("RssFile")
    own = {"file": file.stat().st_size / 1e6, "resident": whole, "peak": status("VmHWM"), **counted}
    own["all else"] = whole - sum(counted.values())
    own["of it code of libraries and other files"] = code
    rounded = {name: round(value, 1) for name, value in own.items()}
    rounded["over the file"] = round(own["peak"] - own["file"], 1)
    rounded["over the file, without the cache"] = round(own["peak"] - own["file"] - own["cache"], 1)
    taken = {name: round(value, 1) for name, value in parts.items()}
    return {"MB": rounded, "MB taken by": taken, "seconds": seconds, "torch": "torch" in sys.modules}


def llama(path: str, sequences: int, length: int) -> dict[str, Any]:
    """In this process."""
    from bench.cpu.peer import Workload
    from bench.cpu.peers.llama_cpp import _Loaded

    config, file = {"vocab_size": 100_000}, Path(path)
    runner = _Loaded(file, Workload(file, file.parent, config, 2, length, sequences))
    for number in range(sequences):
        runner.run(prompts(1, length - 32, number + 1), 2)
    for number in range(2, 34, 8):  # its context holds all sequences; a step has as many tokens as one is long
        runner.run(prompts(sequences, length // sequences - 32, number), 32)
    size = file.stat().st_size / 1e6
    found = {"file": size, "resident": status("VmRSS"), "peak": status("VmHWM"), "of it files": status("RssFile")}
    found["over the file"] = found["peak"] - size
    return {"MB": {name: round(value, 1) for name, value in found.items()}}


def run(case: Case) -> dict[str, Any]:
    """MB of both, each in a process of its own."""
    found = {"graphllm": in_process(ours, case.artifact, case.file, case.sequences, case.length)}
    if case.llama:
        found["llama.cpp"] = in_process(llama, case.file, case.sequences, case.length)
    return found
