"""What a graph reads and writes, as data: the inputs of a step, states that outlive it, and outputs.

Models and ops declare them, `program.json` lists them, and whoever allocates or fills them follows that list. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from graphllm.config import ConfigError

Dim = int | str
BLOCK_TOKENS = "P"  # in the shape of a block state: the tokens of one block
_SCALE_BYTES = 4
LATENT_GROUP = 128  # numbers of a latent that share a scale

Axis = Literal["block", "slot", "item", "adapter", "token"]
Retention = Literal["full", "window", "last", "none"]


@dataclass(frozen=True)
class InputSpec:
    """An array of one step.

    shape: over T, S and R (tokens, sequences and sampled rows of the step).
    provider: the name of what fills it on the host (`graphllm.engine.step.providers`); inputs of every graph have none.
    neutral: the value of padding entries, where padding does not repeat the last one.
    ragged: of its rows and columns only the beginnings are filled.
    late: it is filled once logits are known.
    shareable: whether cached states of a prefix stay valid whatever this input holds for what follows the prefix.
    counts: its last dimension is T and it grows by one with each output token, so that what a verification step rejects
    is taken off on the device.
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: str = "int32"
    provider: str = ""
    neutral: float = 0
    padding: Literal["neutral", "last"] = "neutral"
    ragged: bool = False
    late: bool = False
    shareable: bool = True
    counts: bool = False


@dataclass(frozen=True)
class StateSpec:
    """Memory that outlives a step.

    axis: what indexes its first dimension, see below.
    shape: without the first dimension.
    dtype: of torch, or "model": the artifact's, "cache": `--kv-cache-dtype`, "recurrent": `--mamba-ssm-cache-dtype`.
    retention: what it keeps of a sequence, see below.
    window: tokens of the retention "window".
    plain: last numbers of a row that a cache of 8 bits has in bfloat16; the others have a scale for each
        `LATENT_GROUP` of them. 0: all numbers are alike.
    int8_over: the dimension, such as -2, whose numbers share a scale in snapshots of 8 bits; 0: those have it as it is.

    Axes: "block" (block ids; ``shape`` holds "P", the tokens of a block), "slot" (one entry for each running sequence
    and a scrap one), "item" (rows of encoded inputs and a scrap one), "adapter" (tables written while serving; entry 0
    is neutral), "token" (rows of the running step).

    Retentions: "full" and "window" for blocks. "last" for recurrent slot states, zeroed for a new sequence, rolled back
    with rejected tokens and copied to snapshots. "none" for states that only programs and host use between them.
    """

    name: str
    axis: Axis
    shape: tuple[Dim, ...]
    dtype: str = "model"
    retention: Retention = "full"
    window: int = 0
    plain: int = 0
    int8_over: int = 0

    def typed(self, dtypes: Mapping[str, str]) -> StateSpec:
        """With the names of torch dtypes for those of `CompileConfig.state_dtypes`. In a cache in int8, each row of the
        last dimension has a float32 scale, in four more bytes; for ``plain`` see above."""
        dtype = dtypes.get(self.dtype, self.dtype)
        if self.dtype != "cache" or dtype not in (("int8", "float8_e4m3fn") if self.plain else ("int8",)):
            return replace(self, dtype=dtype)
        *rows, width = self.shape
        numbers = width - self.plain if isinstance(width, int) else width
        if not isinstance(numbers, int) or numbers % _SCALE_BYTES:
            raise ConfigError(
                f"kv_cache_dtype is {dtype}: the model's heads have {numbers} numbers, no multiple of 4; "
                f"use {'auto' if self.plain else 'fp8'}"
            )
        scales = -(-numbers // LATENT_GROUP) if self.plain else 1
        return replace(self, dtype=dtype, shape=(*rows, numbers + _SCALE_BYTES * scales + 2 * self.plain))


@dataclass(frozen=True)
class OutputSpec:
    """What a program leaves.

    shape: over T, S and R.
    host: whether every step copies it to the host.
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: str
    host: bool = False


def plain(spec: Any) -> dict[str, Any]:
    """A spec as JSON, without what is as usual."""
    fields = type(spec).__dataclass_fields__
    return {n: getattr(spec, n) for n, f in fields.items() if getattr(spec, n) != f.default}
