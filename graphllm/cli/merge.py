"""`graphllm merge`: writes a checkpoint with LoRA adapters merged into it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from graphllm.config import ConfigError, EngineArgs
from graphllm.loading.checkpoint.source import find_source
from graphllm.loading.checkpoint.tensors import stored_checkpoint
from graphllm.quantize.merge import merge


def merge_adapters(model: str, adapters: Sequence[str], output: Path, dtype: str | None) -> None:
    """Merge folders of adapters, each with ":weight" at its end or not, into a checkpoint folder or a name of the
    hub."""
    started = time.perf_counter()
    weighted = [_weighted(text) for text in adapters]
    source = find_source(EngineArgs(model=model))
    checkpoint = stored_checkpoint(source.files)
    made = merge(source.folder, checkpoint, weighted, output, dtype)
    print(f"{output}: {len(weighted)} adapter{'s' * (len(weighted) > 1)} merged, {made.tensors} tensors changed, "
          f"{made.nbytes / 1e6:,.1f} MB in {time.perf_counter() - started:.0f} s")  # fmt: skip


def _weighted(text: str) -> tuple[Path, float]:
    folder, colon, number = text.rpartition(":")
    if not colon or Path(text).exists():
        return Path(text).expanduser(), 1.0
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise ConfigError(f"adapter: the weight of {text!r:.200} is {number!r:.80}: give a number after the colon")
    return Path(folder).expanduser(), weight
