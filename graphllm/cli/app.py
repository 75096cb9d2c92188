"""The command table: compile, run, inspect, op. Each command's work is in a module of its own."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup
from typer.main import get_command

from graphllm.cli.bench.app import bench_app
from graphllm.cli.endings import endings
from graphllm.cli.late import call
from graphllm.cli.options import EngineCommand, engine_options, sampling_options, server_options
from graphllm.cli.run.inputs import Inputs
from graphllm.config import CompileConfig, ConfigError, EngineArgs, definitions
from graphllm.config.requests.pooling_params import PoolingParams
from graphllm.config.server import ServerConfig
from graphllm.config.vllm.server_names import FRONTEND_NAMES
from graphllm.version import __version__


class _Commands(TyperGroup):
    """Ends commands in graphllm's way; typer has its own ideas of interrupts and broken pipes."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with endings():
            return super().invoke(ctx)


app = typer.Typer(
    name="graphllm",
    cls=_Commands,
    help="An LLM inference engine: the compiler is the engine.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)
op_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="For kernel authors: list, test and time the ops."
)
app.add_typer(op_app, name="op")
app.add_typer(bench_app, name="bench")

_MODEL = "Checkpoint folder, or name on the Hugging Face hub; without it, the embedded model."
ModelArgument = Annotated[str | None, typer.Argument(help=_MODEL)]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help=_MODEL)]
_FILES = (  # that a compilation depends on
    "revision", "download_dir", "hf_token", "hf_config_path", "hf_overrides", "runner", "convert", "model_impl",
)  # fmt: skip
_CHAT_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"graphllm {__version__}")
        raise typer.Exit


@app.command("compile", cls=EngineCommand)
@engine_options(only=(*definitions(CompileConfig), "load_format", "speculative_model", *_FILES))
def compile_command(
    args: EngineArgs,
    model: ModelArgument = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Artifact folder; default: the cache.")] = None,
    bake_weights: Annotated[
        bool, typer.Option("--bake-weights", help="Store the finished weights in the artifact, too.")
    ] = False,
) -> None:
    """Compile a checkpoint into an artifact."""
    call("build:build", replace(args, model=model), output, bake_weights)


@app.command("quantize")
def quantize_command(
    output: Annotated[Path, typer.Option("--output", "-o", help="New checkpoint folder.")],
    scheme: Annotated[str, typer.Option(help="fp8, int8, w8a8, int4, int4-zeros, int3, int2 or mxfp4.")],
    model: ModelArgument = None,
    method: Annotated[str, typer.Option(help="rtn, gptq or awq; the last two need --calibration.")] = "rtn",
    calibration: Annotated[
        Path | None, typer.Option(help="Your text: a text file, or .jsonl of text, prompt or messages.")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Do not quantize modules of this name (* and ?, or re:); may be repeated."),
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Entries of a row that share one scale, for integer schemes.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Sequences of the calibration text.", min=2)] = 128,
    length: Annotated[int, typer.Option(help="Most tokens of a calibration sequence.", min=2)] = 512,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to compute.")] = "cpu",
) -> None:
    """Write a quantized checkpoint.

    It is one of compressed-tensors, which transformers and vLLM read, too.
    """
    wanted = (output, scheme, method, calibration, tuple(ignore or ()), group_size, samples, length, device)
    call("quantize:quantize_model", model, *wanted)


@app.command("merge")
def merge_command(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or name on the Hugging Face hub.")],
    adapters: Annotated[
        list[str], typer.Argument(metavar="ADAPTER[:WEIGHT]...", help="Folder of a LoRA adapter in PEFT's format.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="New checkpoint folder.")],
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Dtype of the new checkpoint; default: the base's."),
    ] = None,
) -> None:
    """Merge LoRA adapters into a checkpoint.

    DoRA, biases and whole modules included. Of several the sum is merged, each times its weight, which is 1 unless
    given.
    """
    call("merge:merge_adapters", model, adapters, output, dtype)


@app.command("run", cls=EngineCommand)
@engine_options(without=("seed", "dump", "max_num_queued_reqs", "otlp_traces_endpoint"))
@sampling_options(shown={"max_tokens": "256 for a plain prompt, OpenAI's for a line of a batch file"})
def run_command(
    sampling: dict[str, Any],
    args: EngineArgs,
    file: Annotated[
        str | None, typer.Argument(help="Prompts: .txt (one a line), .jsonl, or - for stdin (JSONL or text).")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")] = None,
    model: ModelOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write JSONL here, - is stdout; a file is continued.")
    ] = None,
    raw: Annotated[
        bool, typer.Option(help="Do not put prompts into the chat template. Without one, they are raw.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message for prompts.")] = None,
    json_schema: Annotated[str | None, typer.Option(help="Answer in JSON of this schema: a file, or text.")] = None,
    regex: Annotated[str | None, typer.Option(help="Answer in text that this matches.")] = None,
    task: Annotated[
        Literal["generate", "embed", "classify", "score"],
        typer.Option(help="Make text; or, with a model for it, vectors, classes, or scores of pairs."),
    ] = "generate",
    dimensions: Annotated[int | None, typer.Option(help="Keep this many numbers of an embedding.")] = None,
    truncate: Annotated[
        int | None, typer.Option(help="With --task: keep this many tokens of a text; -1 keeps all that fit.")
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(help="Folder of an adapter; or name=folder, for lines with that model; may be repeated."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary.")] = False,
) -> None:
    """Generate text offline, or make vectors of texts with --task.

    A checkpoint's generation_config.json comes before the defaults of sampling options, a line's own fields before all.
    Exit status: 0 every request has an answer, 1 some have none or results cannot be written, 2 a mistake in the
    command or its files, 130 stopped by Ctrl-C (143 by SIGTERM), 141 nobody reads the output any more.
    """
    inputs = Inputs(file, prompt or [], raw, system, Path("/dev/stdout") if output == Path("-") else output)
    args = replace(args, model=model)
    if task == "generate":
        form = json_schema, regex
        raise typer.Exit(call("run.run:run_with_form", args, inputs, sampling, form, quiet, lora or ()))
    others = {**sampling, "system": system, "regex": regex, "json_schema": json_schema, "lora": lora}
    if unfit := [name for name, value in others.items() if value is not None]:
        raise ConfigError(f"{unfit[0]}: not with --task {task}; leave it out")
    args = replace(args, runner="pooling") if args.runner == "auto" else args
    params = PoolingParams(dimensions=dimensions, truncate_prompt_tokens=truncate)
    raise typer.Exit(call("run.vectors:run_vectors", args, task, replace(inputs, raw=True, system=None), params, quiet))


class _ServeCommand(EngineCommand):
    others = FRONTEND_NAMES


@app.command("serve", cls=_ServeCommand)
@engine_options(without=("dump",), max_num_queued_reqs=2048)
@server_options()
def serve_command(server: ServerConfig, args: EngineArgs, context: typer.Context, model: ModelArgument = None) -> None:
    """Serve OpenAI's and Anthropic's APIs over HTTP, and a chat page."""
    raise typer.Exit(call("serve.start:start", server, replace(args, model=model), context.obj or []))


@app.command("route")
def route_command(
    prefill: Annotated[list[str], typer.Option(help="URL of a server that computes prompts; may be repeated.")],
    decode: Annotated[list[str], typer.Option(help="URL of a server that goes on with them; may be repeated.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 means every address of the machine.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free port.")] = 8000,
) -> None:
    """Divide prompts and answers among servers.

    The servers are started with --kv-transfer-config, see docs/disaggregated-prefill.md.
    """
    raise typer.Exit(call("route:route_requests", prefill, decode, host, port))


@app.command("chat")
@sampling_options(_CHAT_OPTIONS, shown=dict.fromkeys(_CHAT_OPTIONS, "the server's"))
def chat_command(
    sampling: dict[str, Any],
    url: Annotated[str, typer.Option(help="URL of a running server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="GRAPHLLM_API_KEY", help="API key of that server.")] = None,
    model: Annotated[str | None, typer.Option(help="Name of the model at the server; default: the first one.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
) -> None:
    """Talk to a running server in the terminal."""
    raise typer.Exit(call("chat:chat", url, api_key, system, sampling, model))


@app.command("inspect")
def inspect_command(
    artifact: Annotated[Path, typer.Argument(help="Artifact folder, or folder of a LoRA adapter.")],
    json: Annotated[bool, typer.Option("--json", help="Print the manifest, or the adapter's facts, as JSON.")] = False,
) -> None:
    """Show what an artifact holds, or what a LoRA adapter changes.

    Target, buckets, pieces, passes, kernels, memory; or modules, ranks, size.
    """
    call("inspect:inspect", artifact, json)


@app.command("doctor")
def doctor_command(
    artifact: Annotated[Path | None, typer.Argument(help="Artifact folder; without it, the machine only.")] = None,
) -> None:
    """Say what this machine and an artifact can do."""
    raise typer.Exit(call("doctor.doctor:doctor", artifact))


@op_app.command("list")
def op_list() -> None:
    """The registered ops with their facts and implementations."""
    call("ops:list_ops")


@op_app.command("test")
def op_test(name: Annotated[str | None, typer.Argument(help="Op; default: all.")] = None) -> None:
    """Check reference and implementations over every case; exit status 1 on a failure."""
    raise typer.Exit(0 if call("ops:test_ops", name) else 1)


@op_app.command("bench")
def op_bench(
    name: Annotated[str | None, typer.Argument(help="Op; default: all.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write JSON here.")] = None,
) -> None:
    """Time the implementations over the real-size cases and print bytes and flops per second."""
    call("ops:bench_ops", name, output)


@functools.cache
def command_line() -> Any:
    """The ``graphllm`` command: `app` as what reads a command line, made once in a process."""
    return get_command(app)
