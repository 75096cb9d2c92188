"""What stages of a pipeline gain when each works on other requests: tokens a second with one step in flight and with as
many as there are stages, in the same engine, and of one process that has all layers.

    python -m bench pipeline [--requests 1,8,32]               CPUs: a thread for each process; two CPUs or more
    python -m bench pipeline_gpu [--shape llama3.1-8b]         two GPUs of one host

Nothing else should run. One request shows what stages cost, as only one of them can work at a time. Several show what
they gain: most where a step takes as long as it has rows, as of prompts; little where it reads the weights however few
rows it has.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench.driving import busy_time
from bench.harness import Case, check_tokens
from bench.models import SHAPES
from graphllm import LLM, SamplingParams

CASES = [
    ("pipeline", {"target": "cpu", "requests": (1, 4, 8, 32), "single": True, "profile": False}),
    ("pipeline_gpu", {"target": "cuda", "requests": (1, 32, 64, 128, 256), "shape": "llama3.1-8b", "single": False,
                      "profile": False}),
]  # fmt: skip
HELP = {
    "requests": "requests at once",
    "single": "one process with all layers, too; on a GPU it takes another half a minute",
    "profile": "print which kernels the first stage ran, and how long it ran none",
}
CPU_SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 4096, "vocab_size": 8192, "head_dim": 64,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "dtype": "bfloat16", "attention_bias": False,
}  # fmt: skip


class Cases(NamedTuple):
    """What is measured.

    counts: requests that answer at once
    answer: tokens of an answer
    prompts: how many prompts
    length: tokens of a prompt
    """

    counts: list[int]
    answer: int
    prompts: int
    length: int
    options: dict[str, Any]


def cases_of(target: str, counts: list[int]) -> Cases:
    common: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": max(counts),
                              "target": target, "enable_prefix_caching": False}  # fmt: skip
    if target == "cpu":
        options = {**common, "max_model_len": 256, "max_num_batched_tokens": 512}
        return Cases(counts, 64, 16, 192, options)
    options = {**common, "max_model_len": 2048, "max_num_batched_tokens": 2048, "tune": False}
    return Cases(counts, 64, 32, 1024, options)


def one_step_in_flight(llm: LLM) -> Callable[[], None]:
    """Have the engine run one step after the other, as without stages; returns a call that undoes it."""
    core: Any = llm.llm_engine.core
    scheduler, depth = core.scheduler, core._depth
    limits = scheduler._limits

    def back() -> None:
        scheduler._limits, core._depth = limits, depth

    scheduler._limits, core._depth = limits._replace(pipeline_depth=1), 1
    return back


def rates(llm: LLM, cases: Cases, vocab: int) -> dict[str, float]:
    """Tokens a second by case, each after one round to warm up."""

    def timed(requests: int, length: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": [(7 * i + k) % vocab for i in range(length)]} for k in range(requests)]
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        llm.generate(prompts, params)
        begun = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - begun
        if tokens > 1:
            check_tokens([output.outputs[0].token_ids for output in outputs])
        return seconds

    found = {}
    for requests in cases.counts:
        # Without the prompts' time, which a round of one token has.
        seconds = timed(requests, 16, cases.answer + 1) - timed(requests, 16, 1)
        found[f"{requests} requests, tokens of answers"] = requests * cases.answer / seconds
    seconds = timed(cases.prompts, cases.length, 1)
    found[f"{cases.prompts} prompts, their tokens"] = cases.prompts * cases.length / seconds
    return found


def profile(llm: LLM, requests: int, vocab: int) -> None:
    """Print what this process's GPU did in answers to ``requests`` requests, by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    prompts = [{"prompt_token_ids": [(7 * i + k) % vocab for i in range(16)]} for k in range(requests)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with profiled(activities=[ProfilerActivity.CUDA]) as seen:
        llm.generate(prompts, params)
    kernels = [e for e in seen.events() if e.device_type.name == "CUDA"]
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in kernels)
    begin = spans[len(spans) // 2][0]  # of the second half, in which all decode
    by_name: dict[str, float] = defaultdict(float)
    decoding = [span for span in spans if span[0] >= begin]
    for start, end, name in decoding:
        by_name[name[:70]] += end - start
    busy = busy_time([(start, end) for start, end, name in decoding if "nccl" not in name.lower()])
    whole = max(end for _, end, _ in spans) - begin
    print(f"  the first stage's GPU: {busy / whole:.1%} of {whole / 1e3:.1f} ms in kernels other than NCCL's")
    for name, micros in sorted(by_name.items(), key=lambda item: -item[1])[:14]:
        print(f"    {micros / 1e3:8.2f} ms  {name}")


def run(args: Case) -> dict[str, Any]:
    """A row for each number of requests, and one for prompts."""
    on_cpu = args.target == "cpu"
    shape = CPU_SHAPE if on_cpu else SHAPES[args.shape]
    counts = list(args.requests)
    cases, vocab = cases_of(args.target, counts), shape["vocab_size"]
    columns: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "config.json").write_text(json.dumps(shape))

        def threads(count: int) -> dict[str, int]:
            return {"threads": count} if on_cpu else {}

        begun = time.perf_counter()
        with LLM(folder, pipeline_parallel_size=2, **cases.options, **threads(2)) as llm:
            print(f"started in {time.perf_counter() - begun:.1f} s", flush=True)
            columns["two steps in flight"] = rates(llm, cases, vocab)
            if args.profile:
                profile(llm, max(counts), vocab)
            back = one_step_in_flight(llm)
            columns["one"] = rates(llm, cases, vocab)
            if args.profile:
                profile(llm, max(counts), vocab)
            back()
        if args.single:
            with LLM(folder, **cases.options, **threads(1)) as llm:
                columns["one process"] = rates(llm, cases, vocab)
    return {
        case: {name: round(column[case], 1) for name, column in columns.items()}
        | {f"{name}, ratio": round(column[case] / rate, 2) for name, column in columns.items() if name != "one"}
        for case, rate in columns["one"].items()
    }
