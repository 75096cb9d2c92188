"""From an empty cache to a first token on a GPU: a process that compiles, loads and answers, and one more after it.

    python -m bench gpu_first_answer [--shapes llama3.1-8b,llama3.1-8b-awq] [--options '{"kv_cache_dtype": "fp8"}']

Real shapes, random weights. Every cache is a new folder: graphllm's, Triton's, Inductor's. nothing: seconds from the
start of the process to its first token, with the stages of the compile, how many sites the table of fast kernels did
not know, and when jobs of the build processes began and ended. again: the same command after it. untabled: as nothing,
as if the package had no table for this GPU.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.harness import Case, in_process
from bench.models import write_config

CASES = [
    ("gpu_first_answer", {"shapes": ("llama3.1-8b", "qwen3-0.6b", "llama3.1-8b-awq", "llama3.1-8b-fp8",
                                     "gpt-oss-20b-mxfp4", "qwen3-30b-a3b"),
                          "options": "{}", "untabled": False}),
]  # fmt: skip
HELP = {
    "shapes": "shapes of models",
    "options": "settings of EngineArgs, as JSON",
    "untabled": "once more with every candidate timed",
}


def first_token(folder: str, settings: dict[str, Any], begun: float) -> dict[str, Any]:
    """In a process of its own. begun: the clock when it was started."""
    from graphllm import LLM, SamplingParams
    from graphllm.compile.tuning.workers import Workers

    jobs: dict[str, list[tuple[float, float]]] = {}
    plain = Workers._run

    def noted(self: Workers, crew: Any, job: Any) -> Any:
        start = time.time() - begun
        try:
            return plain(self, crew, job)
        finally:
            jobs.setdefault(type(job).__name__, []).append((start, time.time() - begun))

    Workers._run = noted  # type: ignore[method-assign]
    llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, **settings)
    loaded = time.time()
    prompts = [{"prompt_token_ids": [7 * i + 1 for i in range(128)]}]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    done = time.time()
    many = [{"prompt_token_ids": [13 * n + i for i in range(64)]} for n in range(8)]
    outputs = llm.generate(many, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    texts = {tuple(output.outputs[0].token_ids) for output in outputs}
    assert len(texts) > 1, "the work is not real: all sequences have the same tokens"
    llm.close()
    found = {
        f"jobs {name}": {
            "count": len(spans), "first begins s": round(min(a for a, _ in spans), 2),
            "first ends s": round(min(b for _, b in spans), 2), "last ends s": round(max(b for _, b in spans), 2),
            "in all s": round(sum(b - a for a, b in spans), 1), "longest s": round(max(b - a for a, b in spans), 2),
        }
        for name, spans in jobs.items()
    }  # fmt: skip
    return {"s": round(done - begun, 2), "loaded s": round(loaded - begun, 2), **found}


def run(case: Case) -> Iterator[dict[str, Any]]:
    """Shape by shape."""
    settings = json.loads(case.options)
    kinds = {"nothing": {}, "again": {}} | ({"untabled": {"tune_all": True}} if case.untabled else {})
    for shape in case.shapes:
        rows: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as place:
            folder = write_config(Path(place) / "model", shape)
            for kind, more in kinds.items():
                cache = Path(place) / ("untabled" if kind == "untabled" else "cache")
                caches = {"GRAPHLLM_CACHE": cache, "TRITON_CACHE_DIR": cache / "triton",
                          "TORCHINDUCTOR_CACHE_DIR": cache / "inductor"}  # fmt: skip
                environment = {name: str(value) for name, value in caches.items()}
                rows[kind] = in_process(first_token, folder, settings | more, time.time(), env=environment)
                if kind != "again":
                    rows[kind] |= compiled(cache)
                yield {shape: rows}


def compiled(cache: Path) -> dict[str, Any]:
    """What the one artifact of a cache says of its compile."""
    from graphllm.program.artifact import Artifact

    manifests = [Artifact.trusted(folder).manifest for folder in sorted((cache / "artifacts").glob("*"))]
    return {"stages": manifests[0].seconds, "tuning": manifests[0].tuning} if manifests else {}
