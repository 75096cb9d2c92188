"""`graphllm serve` on one GPU as its clients see it: `graphllm bench serve` against real shapes with random weights.

decode: 128 tokens in, 256 out, all requests at once. mixed: 1,000 requests of 100 to 1,024 tokens in and
out, all at once. The tokenizer is the embedded model's, padded to the shape's vocabulary, so that text is really
decoded. Rows have the figures of vLLM 0.26 on the same kind of GPU, without HTTP, where it was measured.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.harness import GRAPHLLM, Case
from bench.models import SHAPES, compile_to, new_folder
from bench.vllm_figures import VLLM
from graphllm.cli.bench.server import ServerProcess
from graphllm.embedded import MODEL_DIR

CASES = [("gpu_serve", {"shapes": ("llama3.1-8b", "qwen3-0.6b")})]
HELP = {"shapes": "shapes of models"}
FIGURES = (
    "completed", "failed", "duration", "output_throughput", "tokens_per_chunk", "median_ttft_ms", "p99_ttft_ms",
    "median_tpot_ms", "p99_tpot_ms", "median_itl_ms", "p99_itl_ms", "client_cpu_share",
)  # fmt: skip


def checkpoint(shape: str) -> Path:
    """A folder with the shape's config and a tokenizer of its size."""
    folder = new_folder(shape)
    tokenizer = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    known = tokenizer["model"]["vocab"]
    known |= {f"word{i}": i for i in range(len(known) + len(tokenizer["added_tokens"]), SHAPES[shape]["vocab_size"])}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def ask(server: ServerProcess, *options: object) -> dict[str, Any]:
    """The figures of one run of `graphllm bench serve`, and the CPU time of the process that speaks HTTP."""
    url, before = f"http://127.0.0.1:{server.port}", front_seconds(server)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [*GRAPHLLM, "bench", "serve", "--url", url, "--ignore-eos", "--quiet", "--output", file.name]
        subprocess.run([*command, *map(str, options)], check=True, stdout=subprocess.DEVNULL)
        found = json.load(file)
    spent = front_seconds(server) - before
    figures = {name: round(found[name], 3) for name in FIGURES}
    return figures | {"front us a token": round(1e6 * spent / found["total_output_tokens"], 1)}


def front_seconds(server: ServerProcess) -> float:
    """CPU time so far."""
    line = re.search(r"^process_cpu_seconds_total (\S+)$", server.get("/metrics"), re.MULTILINE)
    assert line is not None
    return float(line[1])


def measure(shape: str) -> dict[str, Any]:
    """One shape, all cases."""
    folder = checkpoint(shape)
    artifact = folder / "artifact"
    begin = time.perf_counter()
    compile_to(artifact, folder, "--max-model-len", "4096", "--load-format", "dummy")
    result: dict[str, Any] = {"compile s": round(time.perf_counter() - begin, 1), "decode": {}}
    options = [str(folder), "--artifact", str(artifact), "--load-format", "dummy"]
    with ServerProcess(options) as server:
        result["ready s"] = round(server.wait_for("/health/ready", 300), 2)
        for size in (1, 32, 64, 128, 256):
            ask(server, "--num-prompts", size, "--input-len", 128, "--output-len", 8)  # captures
            # Other prompts than those before: none is found in the prefix cache.
            given = ("--num-prompts", 2 * size, "--max-concurrency", size, "--input-len", 128, "--output-len", 256)
            found = ask(server, *given, "--seed", 1)
            peer = VLLM.get(shape, {}).get(f"decode {size}")
            result["decode"][size] = found | ({"vLLM 0.26 step ms": peer} if peer else {})
        given = ("--num-prompts", 1000, "--input-len", "100-1024", "--output-len", "100-1024", "--seed", 2)
        result["mixed, 1000 requests"] = ask(server, *given) | {"vLLM 0.26 tokens/s": VLLM.get(shape, {}).get("mixed")}
        print("\n".join(server.log.splitlines()[:4]), file=sys.stderr)
    return result


def run(case: Case) -> Iterator[dict[str, Any]]:
    """Shape by shape."""
    for shape in case.shapes:
        yield {shape: measure(shape)}
