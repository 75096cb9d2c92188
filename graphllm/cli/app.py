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
from graphllm.cli.options import engine_options, sampling_options
from graphllm.cli.vllm_flags import EngineCommand
from graphllm.config import CompileConfig, ConfigError, EngineArgs, definitions, parse_bytes
from graphllm.server.frontend_names import FRONTEND_NAMES
from graphllm.version import __version__


class _Commands(TyperGroup):
    """Told here how commands end, because typer has its own ideas of interrupts and broken pipes."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with endings():
            return super().invoke(ctx)


app = typer.Typer(
    name="graphllm",
    cls=_Commands,
    help="An LLM inference engine whose compiler is the engine.",
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
    "revision", "download_dir", "hf_token", "hf_config_path", "hf_overrides", "runner", "convert",
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
    from graphllm.cli.build import build

    build(replace(args, model=model), output, bake_weights)


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
        list[str] | None, typer.Option(help="Leave modules of this name alone (* and ?, or re:); may be repeated.")
    ] = None,
    group_size: Annotated[int | None, typer.Option(help="Entries of a row with one scale, of integers.")] = None,
    samples: Annotated[int, typer.Option(help="Sequences of the calibration text.", min=2)] = 128,
    length: Annotated[int, typer.Option(help="Tokens of one, at most.", min=2)] = 512,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to compute.")] = "cpu",
) -> None:
    """Write a quantized checkpoint.

    It is one of compressed-tensors, which transformers and vLLM read, too.
    """
    from graphllm.cli.quantize import quantize_model
    from graphllm.quantize.run import Request

    wanted = (output, scheme, method, calibration, tuple(ignore or ()), group_size, samples, length, device)
    quantize_model(model, Request(*wanted))


@app.command("merge")
def merge_command(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or name on the Hugging Face hub.")],
    adapters: Annotated[
        list[str], typer.Argument(metavar="ADAPTER[:WEIGHT]...", help="Folder of a LoRA adapter in PEFT's format.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="New checkpoint folder.")],
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None, typer.Option(help="Of the new one; default: the base's.")
    ] = None,
) -> None:
    """Merge LoRA adapters into a checkpoint.

    DoRA, biases and whole modules included. Of several the sum is merged, each times its weight, which is 1 unless
    given.
    """
    from graphllm.cli.merge import merge_adapters

    merge_adapters(model, adapters, output, dtype)


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
    raw: Annotated[bool, typer.Option(help="Do not put prompts into the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message for prompts.")] = None,
    json_schema: Annotated[str | None, typer.Option(help="Answer in JSON of this schema: a file, or text.")] = None,
    regex: Annotated[str | None, typer.Option(help="Answer in text that this matches.")] = None,
    task: Annotated[
        Literal["generate", "embed", "classify", "score"],
        typer.Option(help="Text, or vectors, classes or scores of pairs, of a model that gives them."),
    ] = "generate",
    dimensions: Annotated[int | None, typer.Option(help="Keep so many numbers of an embedding.")] = None,
    truncate: Annotated[
        int | None, typer.Option(help="With --task: keep so many tokens of a text; -1: what fits.")
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(help="Folder of an adapter; or name=folder, for lines whose model is that name; may be repeated."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary.")] = False,
) -> None:
    """Generate text offline, or make vectors of texts with --task.

    A checkpoint's generation_config.json comes before the defaults of sampling options, a line's own fields before all.
    Exit status: 0 every request has an answer, 1 some have none or results cannot be written, 2 a mistake in the
    command or its files, 130 stopped by Ctrl-C (143 by SIGTERM), 141 nobody reads the output any more.
    """
    from graphllm.cli.run.batch import Inputs
    from graphllm.cli.run.run import read_schema, run

    if output == Path("-"):
        output = Path("/dev/stdout")
    if task != "generate":
        from graphllm.cli.run.vectors import run_vectors
        from graphllm.config.requests.pooling_params import PoolingParams

        others = {**sampling, "system": system, "regex": regex, "json_schema": json_schema, "lora": lora}
        if given := [name for name, value in others.items() if value is not None]:
            raise ConfigError(f"{given[0]}: not with --task {task}; leave it out")
        args = replace(args, model=model, runner="pooling" if args.runner == "auto" else args.runner)
        params = PoolingParams(dimensions=dimensions, truncate_prompt_tokens=truncate)
        raise typer.Exit(run_vectors(args, task, Inputs(file, prompt or [], True, None, output), params, quiet))
    schema = read_schema(json_schema) if json_schema is not None else None
    if json_schema or regex:
        sampling["structured_outputs"] = {"json": schema, "regex": regex}
    inputs = Inputs(file, prompt or [], raw, system, output)
    raise typer.Exit(run(replace(args, model=model), inputs, sampling, quiet, lora or ()))


class _ServeCommand(EngineCommand):
    others = FRONTEND_NAMES


@app.command("serve", cls=_ServeCommand)
@engine_options(without=("dump",), max_num_queued_reqs=2048)
def serve_command(
    args: EngineArgs,
    context: typer.Context,
    model: ModelArgument = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    uds: Annotated[Path | None, typer.Option(help="Listen on this Unix socket instead.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Requests must bring it; may be repeated. Or GRAPHLLM_API_KEY.")
    ] = None,
    served_model_name: Annotated[list[str] | None, typer.Option(help="Name in requests; may be repeated.")] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            help="A model beside the first, such as one that gives vectors: folder or name, or JSON with model, "
            "served_model_name and its settings; may be repeated."
        ),
    ] = None,
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(help="An adapter as name=path, which requests give as their model; may be repeated."),
    ] = None,
    lora_dir: Annotated[
        str | None, typer.Option(help="Requests may load and unload adapters of this folder (/v1/load_lora_adapter).")
    ] = None,
    admin_api_key: Annotated[
        list[str] | None, typer.Option(help="For /server_info, /reset_prefix_cache and the like; may be repeated.")
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option("--allowed-origin", "--allowed-origins", help="Pages of this origin may ask; may be repeated."),
    ] = None,
    allowed_methods: Annotated[list[str] | None, typer.Option(help="Of these pages; default: all.")] = None,
    allowed_headers: Annotated[list[str] | None, typer.Option(help="Of these pages; default: all.")] = None,
    allow_credentials: Annotated[
        bool, typer.Option("--allow-credentials", help="These pages may send the browser's credentials.")
    ] = False,
    rate_limit_token: Annotated[
        int | None, typer.Option(help="Requests of one key, or one address, in --rate-limit-interval.")
    ] = None,
    rate_limit_interval: Annotated[float, typer.Option(help="Seconds.")] = 60.0,
    root_path: Annotated[str, typer.Option(help="Of this server at the proxy before it, such as /models/chat.")] = "",
    ssl_certfile: Annotated[Path | None, typer.Option(help="Certificate in PEM: serve HTTPS.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its key; default: in the same file.")] = None,
    ssl_ca_certs: Annotated[Path | None, typer.Option(help="Of who signs the certificates of clients.")] = None,
    ssl_cert_reqs: Annotated[int, typer.Option(help="Of clients: 0 none, 1 may have one, 2 must.")] = 0,
    headless: Annotated[
        bool,
        typer.Option(
            "--headless",
            help="Speak no HTTP: lend this machine, --node-rank of --nnodes, to the engine at --master-addr.",
        ),
    ] = False,
    api_server_count: Annotated[int, typer.Option(help="Processes that speak HTTP, of one engine.")] = 1,
    data_parallel_multi_port_external_lb: Annotated[
        bool,
        typer.Option(
            "--data-parallel-multi-port-external-lb",
            help="A server for each of the data_parallel_size ranks, on --port and the ports behind it, for a load "
            "balancer of yours.",
        ),
    ] = False,
    data_parallel_supervisor_port: Annotated[int, typer.Option(help="Where the health of these is told.")] = 9256,
    dp_supervisor_probe_interval_s: Annotated[float, typer.Option(help="Seconds between looks at each of them.")] = 5.0,
    dp_supervisor_probe_timeout_s: Annotated[float, typer.Option(help="Seconds for their answer.")] = 5.0,
    dp_supervisor_probe_failure_threshold: Annotated[
        int, typer.Option(help="Failures in a row after which one counts as unhealthy.")
    ] = 3,
    max_body_size: Annotated[str, typer.Option(help="Of one request.")] = "32MiB",
    sse_keep_alive_interval: Annotated[
        float, typer.Option(help="Seconds of silence in a stream before a sign of life; 0: none.", min=0)
    ] = 15.0,
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
    chat_template: Annotated[
        str | None, typer.Option(help="In place of the checkpoint's: a file, or the template itself.")
    ] = None,
    default_chat_template_kwargs: Annotated[
        str | None, typer.Option(help="Variables of chat templates where a request has none, as JSON.")
    ] = None,
    trust_request_chat_template: Annotated[
        bool, typer.Option("--trust-request-chat-template", help="Requests may bring a template of their own.")
    ] = False,
    response_role: Annotated[str, typer.Option(help="Of answers of /v1/chat/completions.")] = "assistant",
    strict_fields: Annotated[
        bool, typer.Option("--strict-fields", help="Refuse fields that would be ignored, such as user and store.")
    ] = False,
    return_tokens_as_token_ids: Annotated[
        bool, typer.Option("--return-tokens-as-token-ids", help="In log-probabilities, tokens are token_id:ID.")
    ] = False,
    enable_force_include_usage: Annotated[
        bool, typer.Option("--enable-force-include-usage", help="Every stream ends with its usage.")
    ] = False,
    disable_fastapi_docs: Annotated[
        bool, typer.Option("--disable-fastapi-docs", help="No /docs and no /openapi.json.")
    ] = False,
    disable_uvicorn_access_log: Annotated[
        bool, typer.Option("--disable-uvicorn-access-log", help="No line for each request.")
    ] = False,
    disable_access_log_for_endpoints: Annotated[
        str | None, typer.Option(help="Paths without such lines, behind commas.")
    ] = None,
    uvicorn_log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="Of the HTTP library.")
    ] = "warning",
    log_format: Annotated[Literal["text", "json"], typer.Option(help="Of the log on stderr.")] = "text",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="info: a line for each request.")
    ] = "info",
) -> None:
    """Serve OpenAI's and Anthropic's APIs over HTTP, and a chat page."""
    from graphllm.config.parallel import ParallelConfig, check_parallel
    from graphllm.config.setting import assemble
    from graphllm.engine.process.spawn import Child, end, spawn, spawn_cores

    alone, gpus = args.data_parallel_rank is not None, (args.tensor_parallel_size or 1) * args.pipeline_parallel_size
    parallel = assemble(ParallelConfig, vars(args))
    check_parallel(parallel, gpus)
    early: list[Child] = context.obj or []
    if headless:
        end(early)
        from graphllm.cli.serve.node import serve_headless

        raise typer.Exit(serve_headless(args, model, log_format, log_level))
    if data_parallel_multi_port_external_lb and not alone:
        end(early)
        from graphllm.cli.serve.ranks import serve_ranks
        from graphllm.server.process.ranks.options import RankOptions

        if uds is not None:
            raise ConfigError(f"uds is {str(uds)!r}: each rank has a port of its own; leave it out")
        ranks = RankOptions(
            ranks=args.data_parallel_size,
            gpus=gpus,
            host=host,
            port=port,
            supervisor_port=data_parallel_supervisor_port,
            tls=ssl_certfile is not None,
            restart=restart_engine,
            shutdown_timeout=shutdown_timeout,
            probe_interval=dp_supervisor_probe_interval_s,
            probe_timeout=dp_supervisor_probe_timeout_s,
            probe_failure_threshold=dp_supervisor_probe_failure_threshold,
        )
        raise typer.Exit(serve_ranks(args, ranks, log_format, log_level))
    # First of all: what takes longest is their import of torch.
    # A cluster says later which devices ranks have.
    here = 1 if args.distributed_executor_backend == "ray" else parallel.ranks_of_node(gpus)
    children = spawn_cores(1 if alone else args.data_parallel_size, here, early)
    end(early)
    others = [spawn() for _ in also or ()]
    try:
        from graphllm.chat.call import Rules
        from graphllm.cli.serve import serve as told
        from graphllm.server.http.access import Access
        from graphllm.server.process.options import ServerOptions
        from graphllm.server.service.adapters import parse_modules
        from graphllm.server.supervision.engine_view import SupervisorOptions
        from graphllm.server.supervision.logs import LogOptions, start_log

        log = LogOptions(log_format, log_level, uvicorn_log_level, not disable_uvicorn_access_log)
        start_log(log, f"rank-{args.data_parallel_rank}" if alone else "")
        if data_parallel_multi_port_external_lb:
            told.end_with_supervisor()
        access = Access(
            keys=api_key or (),
            admin_keys=admin_api_key or (),
            origins=told.words(allowed_origins),
            methods=told.words(allowed_methods, ("*",)),
            headers=told.words(allowed_headers, ("*",)),
            credentials=allow_credentials,
            rate=told.rate_limit(rate_limit_token, rate_limit_interval),
            root_path=told.root_path(root_path),
            docs=not disable_fastapi_docs,
            quiet=told.words([disable_access_log_for_endpoints] if disable_access_log_for_endpoints else None),
        )
        rules = Rules(
            strict=strict_fields,
            templates=trust_request_chat_template,
            template_kwargs=told.read_kwargs(default_chat_template_kwargs),
            tokens_as_ids=return_tokens_as_token_ids,
            usage=enable_force_include_usage,
            role=response_role,
        )
        options = ServerOptions(
            host=host,
            port=port,
            uds=uds,
            access=access,
            rules=rules,
            names=served_model_name or (),
            shutdown_timeout=shutdown_timeout,
            max_body=parse_bytes("max-body-size", max_body_size),
            keep_alive=sse_keep_alive_interval,
            certfile=ssl_certfile,
            keyfile=ssl_keyfile,
            ca_certs=ssl_ca_certs,
            cert_reqs=ssl_cert_reqs,
            traces=args.otlp_traces_endpoint,
            adapters=parse_modules(lora_modules or (), served_model_name or ()),
            lora_dir=told.lora_dir(lora_dir),
            fronts=told.front_count(api_server_count),
            rank=args.data_parallel_rank or 0,
            log=log,
            started=told.started_at(),
        )
        watched = SupervisorOptions(
            args.seed,
            restart_engine,
            step_timeout,
            tool_call_parser,
            reasoning_parser,
            chat_template=told.read_template(chat_template),
        )
        beside = told.parse_also(also or (), args)
        raise typer.Exit(told.serve(replace(args, model=model), beside, options, watched, children, others))
    finally:
        end([*children, *others])


@app.command("chat")
@sampling_options(_CHAT_OPTIONS, shown=dict.fromkeys(_CHAT_OPTIONS, "the server's"))
def chat_command(
    sampling: dict[str, Any],
    url: Annotated[str, typer.Option(help="Of a running server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="GRAPHLLM_API_KEY", help="Of that server.")] = None,
    model: Annotated[str | None, typer.Option(help="Its name at the server; default: the first there.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
) -> None:
    """Talk to a running server in the terminal."""
    from graphllm.cli.chat import chat

    raise typer.Exit(chat(url, api_key, system, sampling, model))


@app.command("inspect")
def inspect_command(
    artifact: Annotated[Path, typer.Argument(help="Artifact folder, or folder of a LoRA adapter.")],
    json: Annotated[bool, typer.Option("--json", help="Print the manifest, or the adapter's facts, as JSON.")] = False,
) -> None:
    """Show what an artifact holds, or what a LoRA adapter changes.

    Target, buckets, pieces, passes, kernels, memory; or modules, ranks, size.
    """
    from graphllm.cli.inspect import inspect
    from graphllm.cli.inspect_adapter import inspect_adapter, is_adapter

    (inspect_adapter if is_adapter(artifact) else inspect)(artifact, json)


@app.command("doctor")
def doctor_command(
    artifact: Annotated[Path | None, typer.Argument(help="Artifact folder; without it, the machine only.")] = None,
) -> None:
    """Say what this machine and an artifact can do."""
    from graphllm.cli.doctor import doctor

    raise typer.Exit(doctor(artifact))


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


@functools.cache
def command_line() -> Any:
    """The ``graphllm`` command: `app` as what reads a command line, made once in a process."""
    return get_command(app)
