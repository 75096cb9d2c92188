"""The command table: compile, run, inspect, op. Each command's work is in a module of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from graphllm import __version__
from graphllm.cli.bench.app import bench_app
from graphllm.cli.options import (
    Artifact,
    BakeWeights,
    GpuShare,
    KvMemory,
    MaxLen,
    MaxSeqs,
    MaxTokens,
    PageSize,
    PrefixCaching,
    Quantize,
    Threads,
)

app = typer.Typer(
    name="graphllm",
    help="An LLM inference engine whose compiler is the engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
op_app = typer.Typer(no_args_is_help=True, help="For kernel authors: list, test and time the ops.")
app.add_typer(op_app, name="op")
app.add_typer(bench_app, name="bench")

Model = Annotated[Path | None, typer.Option("--model", "-m", help="Checkpoint folder; without it, the embedded model.")]
TargetName = Annotated[Literal["auto", "cpu", "cuda"], typer.Option("--target", help="Device to compile for.")]
BackendName = Annotated[
    Literal["inductor", "eager"], typer.Option("--backend", help="eager runs the reference ops: slow, always there.")
]
Dtype = Annotated[
    Literal["bfloat16", "float16", "float32"] | None, typer.Option(help="Compute dtype; default: the checkpoint's.")
]
Buckets = Annotated[str | None, typer.Option(help="Specializations, e.g. decode-1,decode-2-64,mixed-2-2048.")]
Tune = Annotated[bool | None, typer.Option(help="Choose kernels by timing them while compiling (GPUs; on by default).")]
LoadFormat = Annotated[Literal["auto", "dummy"], typer.Option(help="dummy: random weights, for timing.")]
Policy = Annotated[Literal["fcfs", "priority"], typer.Option(help="priority: a request's own; lower goes first.")]
Jobs = Annotated[int, typer.Option(help="Parallel build processes; 0 chooses.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"graphllm {__version__}")
        raise typer.Exit


@app.command("compile")
def compile_command(
    model: Annotated[Path | None, typer.Argument(help="Checkpoint folder; without it, the embedded model.")] = None,
    target: TargetName = "auto",
    backend: BackendName = "inductor",
    dtype: Dtype = None,
    quantize: Quantize = None,
    buckets: Buckets = None,
    max_model_len: MaxLen = None,
    max_num_seqs: MaxSeqs = None,
    max_num_batched_tokens: MaxTokens = None,
    block_size: PageSize = None,
    tune: Tune = None,
    jobs: Jobs = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Artifact folder; default: the cache.")] = None,
    dump: Annotated[Path | None, typer.Option(help="Write the readable IR of every stage here.")] = None,
    bake_weights: BakeWeights = False,
    load_format: LoadFormat = "auto",
) -> None:
    """Compile a checkpoint into an artifact."""
    from graphllm.cli.build import build
    from graphllm.prepare import Overrides, parse_buckets

    parsed = parse_buckets(buckets) if buckets else None
    wanted = Overrides(
        target, backend, dtype, parsed, max_model_len, max_num_seqs, max_num_batched_tokens, block_size, tune, jobs,
        quantize,
    )  # fmt: skip
    build(model, wanted, output, dump, load_format == "dummy", bake_weights)


@app.command("run")
def run_command(
    file: Annotated[
        str | None, typer.Argument(help="Prompts: .txt (one a line), .jsonl, or - for stdin (JSONL or text).")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")] = None,
    model: Model = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write JSONL here; finished ids are skipped.")
    ] = None,
    raw: Annotated[bool, typer.Option(help="Do not put prompts into the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message for prompts.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens to generate; default: 256.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the most likely tokens of this mass.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = None,
    n: Annotated[int | None, typer.Option("--n", help="Completions of each prompt.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Off the logits of tokens in the output.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="The same, for each time they are there.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: fewer tokens that are there.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the text here; may be repeated.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="End at this token; may be repeated.")] = None,
    min_tokens: Annotated[int | None, typer.Option(help="No end before these.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after the end token.")] = False,
    logprobs: Annotated[int | None, typer.Option(help="Likeliest tokens at each position; in --output.")] = None,
    json_schema: Annotated[str | None, typer.Option(help="Answer in JSON of this schema: a file, or text.")] = None,
    regex: Annotated[str | None, typer.Option(help="Answer in text that this matches.")] = None,
    target: TargetName = "auto",
    backend: BackendName = "inductor",
    dtype: Dtype = None,
    quantize: Quantize = None,
    buckets: Buckets = None,
    max_model_len: MaxLen = None,
    max_num_seqs: MaxSeqs = None,
    max_num_batched_tokens: MaxTokens = None,
    block_size: PageSize = None,
    tune: Tune = None,
    jobs: Jobs = 0,
    artifact: Artifact = "build",
    kv_cache_memory: KvMemory = None,
    gpu_memory_utilization: GpuShare = 0.9,
    threads: Threads = None,
    enable_prefix_caching: PrefixCaching = True,
    scheduling_policy: Policy = "fcfs",
    load_format: LoadFormat = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary.")] = False,
) -> None:
    """Generate text offline."""
    from graphllm.cli.batch import Inputs
    from graphllm.cli.run import Loading, read_schema, run
    from graphllm.engine.options import EngineOptions
    from graphllm.prepare import Overrides, parse_buckets

    parsed = parse_buckets(buckets) if buckets else None
    wanted = Overrides(
        target, backend, dtype, parsed, max_model_len, max_num_seqs, max_num_batched_tokens, block_size, tune, jobs,
        quantize,
    )  # fmt: skip
    schema = read_schema(json_schema) if json_schema is not None else None
    constraint = {"json": schema, "regex": regex} if json_schema or regex else None
    sampling = {
        "n": n, "max_tokens": max_tokens, "min_tokens": min_tokens, "temperature": temperature, "top_k": top_k,
        "top_p": top_p, "min_p": min_p, "presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty, "seed": seed, "stop": stop, "stop_token_ids": stop_token_id,
        "ignore_eos": ignore_eos or None, "logprobs": logprobs, "structured_outputs": constraint,
    }  # fmt: skip
    options = EngineOptions(enable_prefix_caching=enable_prefix_caching, scheduling_policy=scheduling_policy)
    inputs = Inputs(file, prompt or [], raw, system, output)
    loading = Loading(artifact, kv_cache_memory, gpu_memory_utilization, load_format == "dummy", options, threads)
    raise typer.Exit(run(model, inputs, sampling, wanted, loading, quiet))


@app.command("serve")
def serve_command(
    model: Annotated[Path | None, typer.Argument(help="Checkpoint folder; without it, the embedded model.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    uds: Annotated[Path | None, typer.Option(help="Listen on this Unix socket instead.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Requests must bring it; may be repeated. Or GRAPHLLM_API_KEY.")
    ] = None,
    served_model_name: Annotated[list[str] | None, typer.Option(help="Name in requests; may be repeated.")] = None,
    allowed_origins: Annotated[
        list[str] | None, typer.Option("--allowed-origin", help="Pages of this origin may ask; may be repeated.")
    ] = None,
    max_body_size: Annotated[str, typer.Option(help="Of one request.")] = "32MiB",
    shutdown_timeout: Annotated[float, typer.Option(help="Seconds for requests in flight after SIGTERM.")] = 30.0,
    restart_engine: Annotated[bool, typer.Option("--restart-engine", help="Bring a broken engine back.")] = False,
    step_timeout: Annotated[
        float, typer.Option(help="Seconds of a step, without a kernel's end, before it counts as stuck.")
    ] = 8.0,
    tool_call_parser: Annotated[
        Literal["auto", "hermes", "llama3", "mistral", "none"], typer.Option(help="auto: by the chat template.")
    ] = "auto",
    reasoning_parser: Annotated[
        Literal["auto", "think", "none"], typer.Option(help="auto: by the chat template.")
    ] = "auto",
    log_format: Annotated[Literal["text", "json"], typer.Option(help="Of the log on stderr.")] = "text",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="info: a line for each request.")
    ] = "info",
    max_num_queued_reqs: Annotated[int, typer.Option(help="Waiting requests above which new ones get 429.")] = 2048,
    target: TargetName = "auto",
    backend: BackendName = "inductor",
    dtype: Dtype = None,
    quantize: Quantize = None,
    max_model_len: MaxLen = None,
    max_num_seqs: MaxSeqs = None,
    max_num_batched_tokens: MaxTokens = None,
    block_size: PageSize = None,
    artifact: Artifact = "build",
    kv_cache_memory: KvMemory = None,
    gpu_memory_utilization: GpuShare = 0.9,
    threads: Threads = None,
    enable_prefix_caching: PrefixCaching = True,
    long_prefill_token_threshold: Annotated[
        int, typer.Option(help="Tokens of one prompt in one step at most; 0: as many as fit.")
    ] = 0,
    scheduling_policy: Policy = "fcfs",
    logits_processor: Annotated[list[str] | None, typer.Option(help="package.module:name; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Of requests without one.")] = 0,
    load_format: LoadFormat = "auto",
) -> None:
    """Serve OpenAI's and Anthropic's APIs over HTTP, and a chat page."""
    from graphllm.engine.spawn import spawn

    child = spawn()  # first of all: what takes longest is its import of torch
    try:
        from graphllm.cli.serve import serve, start_log, started_at
        from graphllm.engine.load import EngineArgs
        from graphllm.prepare import parse_bytes
        from graphllm.server.launch import ServerOptions
        from graphllm.server.operations.engine_supervisor import SupervisorOptions

        start_log(log_format, log_level)
        args = EngineArgs(
            model=model,
            dtype=dtype or "auto",
            quantize=quantize,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            kv_cache_memory_bytes=parse_bytes("kv-cache-memory", kv_cache_memory) if kv_cache_memory else None,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            long_prefill_token_threshold=long_prefill_token_threshold,
            max_num_queued_reqs=max_num_queued_reqs,
            scheduling_policy=scheduling_policy,
            seed=seed,
            load_format=load_format,
            logits_processors=logits_processor or [],
            target=target,
            backend=backend,
            artifact=artifact,
            threads=threads,
        )
        options = ServerOptions(
            host=host,
            port=port,
            uds=uds,
            keys=api_key or (),
            origins=allowed_origins or (),
            names=served_model_name or (),
            shutdown_timeout=shutdown_timeout,
            max_body=parse_bytes("max-body-size", max_body_size),
            started=started_at(),
        )
        watched = SupervisorOptions(seed, restart_engine, step_timeout, tool_call_parser, reasoning_parser)
        raise typer.Exit(serve(args, options, watched, child))
    finally:
        child.kill()


@app.command("chat")
def chat_command(
    url: Annotated[str, typer.Option(help="Of a running server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="GRAPHLLM_API_KEY", help="Of that server.")] = None,
    model: Annotated[str | None, typer.Option(help="Its name at the server; default: the first there.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the most likely tokens of this mass.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most likely tokens.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Of one answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End an answer here; may be repeated.")] = None,
) -> None:
    """Talk to a running server in the terminal."""
    from graphllm.cli.chat import chat

    sampling = {
        "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "max_tokens": max_tokens,
        "seed": seed, "stop": stop,
    }  # fmt: skip
    raise typer.Exit(chat(url, api_key, system, sampling, model))


@app.command("inspect")
def inspect_command(
    artifact: Annotated[Path, typer.Argument(help="Artifact folder.")],
    json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Show what an artifact holds: target, buckets, pieces, passes, kernels, memory."""
    from graphllm.cli.inspect import inspect

    inspect(artifact, json)


@op_app.command("list")
def op_list() -> None:
    """The registered ops with their facts and implementations."""
    from graphllm.cli.ops import list_ops

    list_ops()


@op_app.command("test")
def op_test(name: Annotated[str | None, typer.Argument(help="Op; default: all.")] = None) -> None:
    """Check reference and implementations over every case; exit status 1 on a failure."""
    from graphllm.cli.ops import test_ops

    raise typer.Exit(0 if test_ops(name) else 1)


@op_app.command("bench")
def op_bench(
    name: Annotated[str | None, typer.Argument(help="Op; default: all.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write JSON here.")] = None,
) -> None:
    """Time the implementations over the real-size cases and print bytes and flops per second."""
    from graphllm.cli.ops import bench_ops

    bench_ops(name, output)
