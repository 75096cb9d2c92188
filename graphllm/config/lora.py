"""Settings of LoRA adapters that matter while an engine runs; `CompileConfig` has those of the tables."""

from __future__ import annotations

from dataclasses import dataclass

from graphllm.config.setting import setting

_RUNNING = "read while an engine runs; the compiled programs are the same"


@dataclass(frozen=True)
class LoRAConfig:
    """Of --enable-lora."""

    max_cpu_loras: int | None = setting(
        None,
        help="Adapters that are kept in the host's memory, at least max_loras; None: as many as that.",
        key=_RUNNING,
        ge=1,
    )
