"""Options that several commands have: of an engine, its memory and its artifact. Imports nothing heavy."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

MaxLen = Annotated[int | None, typer.Option(help="Context length in tokens; default: the model's.")]
MaxSeqs = Annotated[int | None, typer.Option(help="Sequences in one step.")]
MaxTokens = Annotated[int | None, typer.Option("--max-num-batched-tokens", help="Tokens in one step.")]
KvMemory = Annotated[str | None, typer.Option(help="Memory for the KV cache, e.g. 2GiB.")]
PrefixCaching = Annotated[bool, typer.Option(help="Reuse the cache of beginnings that prompts share.")]
Artifact = Annotated[str, typer.Option(help="build, use, require or rebuild; or the folder of an artifact.")]
Quantize = Annotated[
    Literal["int8", "int4"] | None, typer.Option(help="Round the weights of linear layers to so few bits (CPU).")
]
BakeWeights = Annotated[bool, typer.Option("--bake-weights", help="Store the finished weights in the artifact, too.")]
PageSize = Annotated[int | None, typer.Option("--block-size", help="Tokens in one cache page.")]
GpuShare = Annotated[float, typer.Option(help="Share of the GPU's memory to use.")]
Threads = Annotated[int | None, typer.Option(help="Threads of a CPU's kernels; default: all CPUs there are for it.")]
