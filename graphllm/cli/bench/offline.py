"""`graphllm bench throughput` and `latency`: the engine in this process, without a server, on random prompts."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.progress import track

from graphllm.cli.bench import report
from graphllm.cli.bench.loads import Latency, Throughput
from graphllm.cli.bench.workload import Prompt, Span, random_prompts
from graphllm.cli.build import build_errors, console
from graphllm.config import ConfigError, EngineArgs
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.metrics.expert_load import imbalance
from graphllm.engine.requests.outputs import RequestOutput
from graphllm.engine.requests.request import Core, CoreInfo
from graphllm.entrypoints.llm import LLM
from graphllm.loading.artifact.model import resolve_model
from graphllm.loading.checkpoint.source import find_source, find_tokenizer
from graphllm.loading.core.load import load_core

_LATENCY_PERCENTILES = (10, 25, 50, 75, 90, 99)


class Loaded(NamedTuple):
    """A model ready to generate, and the core that does. seconds: by phase of loading it."""

    llm: LLM
    core: Core
    info: CoreInfo
    seconds: dict[str, float]


def bench_throughput(args: EngineArgs, work: Throughput, output: Path | None, quiet: bool) -> None:
    """Measure, show and write. Raises ConfigError."""
    report.check_output(output)
    sampling = SamplingParams(n=work.n, temperature=work.temperature, ignore_eos=True)
    spans = Span.parse("input-len", work.input_len), Span.parse("output-len", work.output_len)
    with _load(args, quiet) as loaded:
        longest = work.prefix_len + spans[0].high + spans[1].high
        _check_length(longest, loaded.info)
        warm_up, *prompts = random_prompts(
            1 + work.num_prompts, *spans, loaded.info.vocab, work.seed, work.prefix_len
        )  # fmt: skip
        generate(loaded.llm, [warm_up], sampling)
        begun = time.perf_counter()
        outputs = generate(loaded.llm, prompts, sampling, show=not quiet)
        seconds = time.perf_counter() - begun
        experts = expert_load(loaded.core)
    result = {**_about(args, loaded), "workload": work.__dict__, **rates(outputs, seconds), **experts}
    report.show(
        f"{result['model']}, {work.num_prompts} requests",
        [
            ("Requests", result["num_requests"]),
            ("Elapsed time (s)", result["elapsed_time"]),
            ("Prompt tokens", result["total_prompt_tokens"]),
            ("Output tokens", result["total_output_tokens"]),
            ("Requests per second", result["requests_per_second"]),
            ("Total tokens per second", result["tokens_per_second"]),
            ("Output tokens per second", result["output_tokens_per_second"]),
            *_experts_shown(experts),
        ],
    )
    report.write(output, result)


def bench_latency(args: EngineArgs, work: Latency, output: Path | None, quiet: bool) -> None:
    """Measure, show and write. Raises ConfigError."""
    report.check_output(output)
    with _load(args, quiet) as loaded:
        _check_length(work.input_len + work.output_len, loaded.info)
        if work.batch_size > loaded.info.max_num_seqs:
            raise ConfigError(
                f"batch-size is {work.batch_size}: a step holds {loaded.info.max_num_seqs} sequences; raise "
                "--max-num-seqs"
            )
        rounds = [_iteration(loaded, work, i) for i in track(
            range(work.num_iters_warmup + work.num_iters), "iterations", console=console, transient=True, disable=quiet
        )]  # fmt: skip
        experts = expert_load(loaded.core)
    result = {
        **_about(args, loaded), "workload": work.__dict__, **spread(rounds[work.num_iters_warmup :], work), **experts
    }  # fmt: skip
    rows: list[tuple[str, object]] = [("Mean (s)", result["avg_latency"])]
    rows += [(f"{p}% percentile (s)", value) for p, value in result["percentiles"].items()]
    rows += [
        ("Per output token (ms)", result["ms_per_output_token"]),
        ("To the first token (ms)", result["mean_ttft_ms"]),
        ("Per output token after the first (ms)", result["mean_tpot_ms"]),
        ("Output tokens per second", result["output_tokens_per_second"]),
        *_experts_shown(experts),
    ]
    report.show(f"{result['model']}, a batch of {work.batch_size}", rows)
    report.write(output, result)


class Iteration(NamedTuple):
    """Seconds of a batch: until it was done, until the last of its first tokens, and from there on."""

    total: float
    first: float
    rest: float


def _iteration(loaded: Loaded, work: Latency, number: int) -> Iteration:
    """Run one batch, of prompts that no cache has seen."""
    lengths = Span(work.input_len, work.input_len), Span(work.output_len, work.output_len)
    prompts = random_prompts(work.batch_size, *lengths, loaded.info.vocab, work.seed + number)
    begun = time.perf_counter()
    outputs = generate(loaded.llm, prompts, SamplingParams(temperature=0, ignore_eos=True))
    total = time.perf_counter() - begun
    first = max(o.metrics.first_token_time for o in outputs)
    last = max(o.metrics.last_token_time for o in outputs)
    return Iteration(total, total - (last - first), last - first)


def generate(
    llm: LLM, prompts: Sequence[Prompt], sampling: SamplingParams, show: bool = False
) -> list[RequestOutput]:  # fmt: skip
    """Exactly the tokens that the prompts ask for. Raises RuntimeError when the engine fails with one."""
    params = [replace(sampling, max_tokens=p.output_len) for p in prompts]
    outputs = llm.generate([p.token_ids for p in prompts], params, use_tqdm=show)
    for prompt, output in zip(prompts, outputs, strict=True):
        for completion in output.outputs:
            if len(completion.token_ids) != prompt.output_len:
                reason = completion.error or completion.finish_reason
                raise RuntimeError(f"{len(completion.token_ids)} of {prompt.output_len} tokens came: {reason}")
    return outputs


def rates(outputs: Sequence[RequestOutput], seconds: float) -> dict[str, Any]:
    """The figures of requests that took so long together."""
    prompt_tokens = sum(len(o.prompt_token_ids) for o in outputs)
    output_tokens = sum(len(c.token_ids) for o in outputs for c in o.outputs)
    return {
        "elapsed_time": seconds,
        "num_requests": len(outputs),
        "total_prompt_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "total_num_tokens": prompt_tokens + output_tokens,
        "requests_per_second": len(outputs) / seconds,
        "tokens_per_second": (prompt_tokens + output_tokens) / seconds,
        "output_tokens_per_second": output_tokens / seconds,
    }


def spread(rounds: Sequence[Iteration], work: Latency) -> dict[str, Any]:
    """The figures of iterations; the first token of a batch is there when all its requests have theirs."""
    latencies = [r.total for r in rounds]
    mean = statistics.fmean(latencies)
    after = 1e3 * statistics.fmean(r.rest for r in rounds) / (work.output_len - 1) if work.output_len > 1 else None
    return {
        "avg_latency": mean,
        "latencies": latencies,
        "percentiles": {str(p): float(np.percentile(latencies, p)) for p in _LATENCY_PERCENTILES},
        "ms_per_output_token": 1e3 * mean / work.output_len,
        "mean_ttft_ms": 1e3 * statistics.fmean(r.first for r in rounds),
        "mean_tpot_ms": after,
        "output_tokens_per_second": work.batch_size * work.output_len / mean,
    }


def expert_load(core: Core) -> dict[str, Any]:
    """Tokens of each layer's experts since the start, and each layer's busiest over the mean; empty where they are not
    counted."""
    counted = core.stats().expert_tokens
    return {"expert_tokens": counted, "expert_load_imbalance": imbalance(counted)} if counted else {}


def _experts_shown(load: Mapping[str, Any]) -> list[tuple[str, object]]:
    if not load:
        return []
    layer, most = max(load["expert_load_imbalance"].items(), key=lambda item: item[1])
    mean = statistics.fmean(load["expert_load_imbalance"].values())
    return [("Busiest expert over the mean, of all layers", mean), (f"The same in layer {layer}, the most", most)]


@contextlib.contextmanager
def _load(args: EngineArgs, quiet: bool) -> Iterator[Loaded]:
    """Compiled where needed; checkpoints without a tokenizer are fine. Closed in the end."""
    seconds: dict[str, float] = {}

    def clock(name: str, taken: float) -> None:
        seconds[name] = seconds.get(name, 0.0) + taken

    begun = time.perf_counter()
    status = contextlib.nullcontext() if quiet else console.status("loading, and compiling where that is needed")
    with status, build_errors():
        args = replace(args, optimize=args.optimize or "first")  # what is measured does not change meanwhile
        if not (find_tokenizer(args, find_source(args)) / "tokenizer.json").is_file():
            args = replace(args, skip_tokenizer_init=True)
        resolved = resolve_model(args)
        clock("artifact", time.perf_counter() - begun)
        core = load_core(resolved.config, clock, resolved.processors)
    info = core.info
    llm = LLM.from_core(core, resolved.tokenizer, resolved.defaults, core.grammars, args.seed)
    with contextlib.closing(llm):
        yield Loaded(llm, core, info, seconds)


def _check_length(longest: int, info: CoreInfo) -> None:
    if longest > info.max_model_len:
        raise ConfigError(
            f"input-len and output-len need {longest} tokens: the context is {info.max_model_len}; lower them or raise "
            "--max-model-len"
        )


def _about(args: EngineArgs, loaded: Loaded) -> dict[str, Any]:
    import torch

    info = loaded.info
    return {
        **report.about(info.device),
        "model": str(args.model),
        "engine": {
            name: getattr(args, name)
            for name in ("dtype", "load_format", "backend", "target", "enable_prefix_caching", "kv_cache_memory_bytes")
        }
        | {
            "max_model_len": info.max_model_len,
            "max_num_seqs": info.max_num_seqs,
            "max_num_batched_tokens": info.max_num_batched_tokens,
            "kv_cache_tokens": (info.num_blocks - 1) * info.block_size,
            "device": info.device,
            "threads": torch.get_num_threads(),
        },
        "load_seconds": {name: round(s, 4) for name, s in loaded.seconds.items()},
    }
