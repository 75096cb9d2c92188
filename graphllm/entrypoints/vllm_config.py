"""`EngineArgs` of users, with `EngineArgs.create_engine_config`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graphllm import config
from graphllm.config.vllm.view import VllmConfig, vllm_view
from graphllm.loading.artifact.build import POLICIES
from graphllm.loading.artifact.resolve import compile_config
from graphllm.loading.checkpoint.source import find_source
from graphllm.program.artifact import Artifact


def vllm_config(args: config.EngineArgs) -> VllmConfig:
    """Finds the model; nothing is loaded or compiled. Raises ConfigError."""
    source = find_source(args)
    compiled = compile_config(source.config, args)
    if args.artifact not in POLICIES:  # then its folder says what was compiled
        compiled = Artifact.trusted(Path(args.artifact)).config
    return vllm_view(args, vars(compiled), source.config, source.name, str(source.folder))


class EngineArgs(config.EngineArgs):
    """As `graphllm.config.EngineArgs`, for users."""

    def create_engine_config(self, usage_context: Any = None, headless: bool = False) -> VllmConfig:
        """The settings that an engine of these would have. The arguments change nothing. Raises ConfigError."""
        return vllm_config(self)


EngineArgs.__doc__ = config.EngineArgs.__doc__
