"""The command table of `graphllm bench`; each command's work is in a module of its own."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from graphllm.cli.bench.loads import Latency, Throughput, Traffic
from graphllm.cli.late import call
from graphllm.cli.options import EngineCommand, engine_options
from graphllm.config import EngineArgs
from graphllm.embedded import SHIPPED

bench_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure a running server, the engine without one, or a start.",
)

ModelName = Annotated[
    str, typer.Option("--model", "-m", help=f"Checkpoint folder, hub name, or one of {', '.join(SHIPPED)}.")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write all figures here as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
InputLen = Annotated[str, typer.Option(help="Tokens of a random prompt, or a range such as 100-1024.")]
OutputLen = Annotated[str, typer.Option(help="Tokens to generate, or a range.")]
PrefixLen = Annotated[int, typer.Option(min=0, help="Tokens that all prompts begin with, before --input-len.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 is greedy.")]
Seed = Annotated[int, typer.Option(min=0, help="Of prompts and arrivals.")]
# Random prompts have a seed of their own, and none of them waits for others.
_MEANINGLESS = ("seed", "dump", "max_num_queued_reqs", "scheduling_policy", "otlp_traces_endpoint")


@bench_app.command("serve")
def serve_command(
    url: Annotated[str, typer.Option(help="The server, with any OpenAI API.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="GRAPHLLM_API_KEY", help="Sent as a bearer token.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Name; default: the first it serves.")] = None,
    endpoint: Annotated[Literal["completions", "chat"], typer.Option(help="Which to send to.")] = "completions",
    dataset: Annotated[
        Path | None, typer.Option(help="JSONL with prompt or messages, instead of random token ids.")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, max=10**7, help="Requests; default: 1000, or the lines of the dataset.")
    ] = None,
    request_rate: Annotated[float, typer.Option(help="Requests sent per second; inf: all at once.")] = math.inf,
    burstiness: Annotated[
        float, typer.Option(help="Of the arrivals: 1 is a Poisson process, less comes in bursts, more is steadier.")
    ] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Requests in flight; others wait.")] = None,
    input_len: InputLen = "512",
    output_len: OutputLen = "128",
    prefix_len: PrefixLen = 0,
    vocab_size: Annotated[int, typer.Option(min=1, help="Random token ids are below this.")] = 1000,
    temperature: Temperature = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="With --dataset: always --output-len tokens; random prompts always do.")
    ] = False,
    seed: Seed = 0,
    goodput: Annotated[
        list[str] | None, typer.Option(help="Limits of a good request in ms, e.g. 'ttft:200 tpot:50'; also e2el.")
    ] = None,
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests before those that are measured.")] = 1,
    request_timeout: Annotated[float, typer.Option(help="Seconds after which a request has failed.")] = 3600.0,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """Send requests to a server and measure throughput and latencies; exit status 1 when requests failed."""
    load = Traffic(
        url, api_key, model, endpoint, dataset, num_prompts, request_rate, burstiness, max_concurrency, input_len,
        output_len, prefix_len, vocab_size, temperature, ignore_eos, seed, goodput or (), num_warmups, request_timeout,
    )  # fmt: skip
    raise typer.Exit(call("bench.serve:bench_serve", load, output, quiet))


@bench_app.command("throughput", cls=EngineCommand)
@engine_options(without=_MEANINGLESS)
def throughput_command(
    args: EngineArgs,
    model: ModelName = "embedded",
    num_prompts: Annotated[int, typer.Option(min=1, max=10**7, help="Requests, all at once.")] = 1000,
    input_len: InputLen = "512",
    output_len: OutputLen = "128",
    prefix_len: PrefixLen = 0,
    n: Annotated[int, typer.Option("--n", min=1, help="Completions of each prompt.")] = 1,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """Requests and tokens per second of the engine, without a server."""
    work = Throughput(num_prompts, input_len, output_len, prefix_len, n, temperature, seed)
    call("bench.offline:bench_throughput", replace(args, model=model), work, output, quiet)


@bench_app.command("latency", cls=EngineCommand)
@engine_options(without=_MEANINGLESS)
def latency_command(
    args: EngineArgs,
    model: ModelName = "embedded",
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that run together.")] = 8,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each random prompt.")] = 32,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens to generate for each.")] = 128,
    num_iters: Annotated[int, typer.Option(min=1, help="Batches, one after the other.")] = 30,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Batches before those that are measured.")] = 10,
    seed: Seed = 0,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """Seconds that a batch of requests takes which begin and end together."""
    work = Latency(batch_size, input_len, output_len, num_iters, num_iters_warmup, seed)
    call("bench.offline:bench_latency", replace(args, model=model), work, output, quiet)


@bench_app.command("startup")
def startup_command(
    serve_options: Annotated[
        list[str] | None, typer.Argument(help="Options of graphllm serve, after --", metavar="[-- OPTIONS]")
    ] = None,
    model: ModelName = "embedded",
    runs: Annotated[int, typer.Option(min=1, help="Starts, after an untimed one that may compile.")] = 5,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a start has failed.")] = 1800.0,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """Seconds from process start until graphllm serve lives, is ready, and has streamed a token."""
    call("bench.startup:bench_startup", model, serve_options or [], runs, timeout, output, quiet)
