"""`graphllm serve` on one GPU as its clients see it: `graphllm bench serve` against real shapes with random weights.

    python bench/gpu_serve.py [--shapes qwen3-0.6b,llama3.1-8b] [--out FILE.json]

decode: 128 tokens in, 256 out, as many requests at once as said. mixed: 1,000 requests of 100 to 1,024 tokens in and
out, all at once. The tokenizer is the embedded model's, padded to the shape's vocabulary, so that text is really
decoded. Figures of vLLM 0.26 on the same kind of GPU, measured without HTTP, stand beside those that have one.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from gpu_engine import MIXED
from gpu_step import SHAPES, VLLM

from graphllm.cli.bench.server import ServerProcess
from graphllm.embedded import MODEL_DIR

GRAPHLLM = (sys.executable, "-m", "graphllm.cli")
FIGURES = (
    "completed", "failed", "duration", "output_throughput", "tokens_per_chunk", "median_ttft_ms", "p99_ttft_ms",
    "median_tpot_ms", "p99_tpot_ms", "median_itl_ms", "p99_itl_ms", "client_cpu_share",
)  # fmt: skip


def checkpoint(shape: str) -> Path:
    """A folder with the shape's config and a tokenizer of its size."""
    folder = Path(tempfile.mkdtemp(prefix=f"{shape}-"))
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    tokenizer = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    known = tokenizer["model"]["vocab"]
    known |= {f"word{i}": i for i in range(len(known) + len(tokenizer["added_tokens"]), SHAPES[shape]["vocab_size"])}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def ask(server: ServerProcess, *options: object) -> dict:
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


def measure(shape: str) -> dict:
    """One shape, all cases."""
    folder = checkpoint(shape)
    artifact = folder / "artifact"
    begin = time.perf_counter()
    subprocess.run(
        [*GRAPHLLM, "compile", str(folder), "-o", str(artifact), "--max-model-len", "4096", "--load-format", "dummy"],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    result: dict = {"compile s": round(time.perf_counter() - begin, 1), "decode": {}}
    options = [str(folder), "--artifact", str(artifact), "--load-format", "dummy"]
    with ServerProcess(options) as server:
        result["ready s"] = round(server.wait_for("/health/ready", 300), 2)
        for size in (1, 32, 64, 128, 256):
            ask(server, "--num-prompts", size, "--input-len", 128, "--output-len", 8)  # captures
            # Other prompts than those before: none is found in the prefix cache.
            given = ("--num-prompts", 2 * size, "--max-concurrency", size, "--input-len", 128, "--output-len", 256)
            found = ask(server, *given, "--seed", 1)
            peer = VLLM.get((shape, size))
            result["decode"][size] = found | ({"vLLM 0.26 step ms": peer} if peer else {})
        given = ("--num-prompts", 1000, "--input-len", "100-1024", "--output-len", "100-1024", "--seed", 2)
        result["mixed, 1000 requests"] = ask(server, *given) | {"vLLM 0.26 tokens/s": MIXED[shape]}
        print("\n".join(server.log.splitlines()[:4]), file=sys.stderr)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import torch

    result: dict = {"machine": torch.cuda.get_device_name(), "versions": {p: version(p) for p in ("torch", "triton")},
                    "command": " ".join(sys.argv)}  # fmt: skip
    for shape in args.shapes.split(","):
        result[shape] = measure(shape)
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
