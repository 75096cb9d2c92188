"""The command table: compile, run, inspect, op. Each command's work is in a module of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from graphllm import __version__

app = typer.Typer(
    name="graphllm",
    help="An LLM inference engine whose compiler is the engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
op_app = typer.Typer(no_args_is_help=True, help="For kernel authors: list, test and time the ops.")
app.add_typer(op_app, name="op")

Model = Annotated[Path | None, typer.Option("--model", "-m", help="Checkpoint folder; without it, the embedded model.")]
TargetName = Annotated[Literal["auto", "cpu", "cuda"], typer.Option("--target", help="Device to compile for.")]
BackendName = Annotated[
    Literal["inductor", "eager"], typer.Option("--backend", help="eager runs the reference ops: slow, always there.")
]
Dtype = Annotated[
    Literal["bfloat16", "float16", "float32"] | None, typer.Option(help="Compute dtype; default: the checkpoint's.")
]
Buckets = Annotated[str | None, typer.Option(help="Specializations, e.g. decode-1,decode-2-64,mixed-2-2048.")]
MaxLen = Annotated[int | None, typer.Option(help="Context length in tokens; default: the model's.")]
MaxSeqs = Annotated[int | None, typer.Option(help="Sequences in one step.")]
MaxTokens = Annotated[int | None, typer.Option("--max-num-batched-tokens", help="Tokens in one step.")]
PageSize = Annotated[int | None, typer.Option("--block-size", help="Tokens in one cache page.")]
Tune = Annotated[bool | None, typer.Option(help="Time more kernel variants while compiling (GPUs; minutes).")]
LoadFormat = Annotated[Literal["auto", "dummy"], typer.Option(help="dummy: random weights, for timing.")]
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
    buckets: Buckets = None,
    max_model_len: MaxLen = None,
    max_num_seqs: MaxSeqs = None,
    max_num_batched_tokens: MaxTokens = None,
    block_size: PageSize = None,
    tune: Tune = None,
    jobs: Jobs = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Artifact folder; default: the cache.")] = None,
    dump: Annotated[Path | None, typer.Option(help="Write the readable IR of every stage here.")] = None,
    load_format: LoadFormat = "auto",
) -> None:
    """Compile a checkpoint into an artifact."""
    from graphllm.cli.build import build
    from graphllm.prepare import Overrides, parse_buckets

    parsed = parse_buckets(buckets) if buckets else None
    wanted = Overrides(
        target, backend, dtype, parsed, max_model_len, max_num_seqs, max_num_batched_tokens, block_size, tune, jobs
    )
    build(model, wanted, output, dump, load_format == "dummy")


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
    buckets: Buckets = None,
    max_model_len: MaxLen = None,
    max_num_seqs: MaxSeqs = None,
    max_num_batched_tokens: MaxTokens = None,
    block_size: PageSize = None,
    tune: Tune = None,
    jobs: Jobs = 0,
    artifact: Annotated[
        str, typer.Option(help="build, use, require or rebuild; or the folder of an artifact.")
    ] = "build",
    kv_cache_memory: Annotated[str | None, typer.Option(help="Memory for the KV cache, e.g. 2GiB.")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the GPU's memory to use.")] = 0.9,
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Reuse the cache of beginnings that prompts share.")
    ] = True,
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], typer.Option(help="priority: a line's own; lower goes first.")
    ] = "fcfs",
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
        target, backend, dtype, parsed, max_model_len, max_num_seqs, max_num_batched_tokens, block_size, tune, jobs
    )
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
    loading = Loading(artifact, kv_cache_memory, gpu_memory_utilization, load_format == "dummy", options)
    raise typer.Exit(run(model, inputs, sampling, wanted, loading, quiet))


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
