"""Artifacts that tests share: each is compiled once, keyed by all that shapes it, and kept for later runs.

They lie in the cache that conftest.py names in GRAPHLLM_CACHE; a changed source gives another key. Nobody writes into
them. Tests of the cache itself, and of compiling, have one of their own (the fixture ``cache``).
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphllm.config import EngineArgs, Env
from graphllm.host.build_lock import build_lock
from graphllm.loading.artifact.build import artifact_folder
from graphllm.loading.artifact.resolve import compile_config
from graphllm.loading.checkpoint.source import Source, open_source
from graphllm.program.artifact import Artifact
from graphllm.runtime.executor import Executor
from graphllm.weights.loading.loader import load_weights
from graphllm.weights.plan.plan import WeightPlan
from tests.waiting import PATIENCE

# Small enough that prompts of a few tokens are chunked and the batch fills up; context 96 needs 12 blocks.
LIMITS = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 8}
ON: dict[str, dict[str, Any]] = {  # settings by device: the block size is the least that its kernels take
    "cpu": {"target": "cpu", "backend": "eager", "block_size": 8},
    "cuda": {"target": "cuda", "dtype": "float32", "block_size": 16, "tune": False},
}


def flags(settings: dict[str, Any]) -> list[str]:
    """Settings as the options of a command, which finds what `artifact_of` has made with them."""
    return [
        word
        for name, value in settings.items()
        for word in (f"--{name.replace('_', '-')}", str(value))[: 1 if value is True else 2]
    ]


def compiled_twice(cache: Path, *words: object) -> Path:
    """The only artifact that two runs of one compile command, at the same time, leave in an empty cache."""
    command = [sys.executable, "-m", "graphllm.cli", "compile", *map(str, words)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for compiling in both:
        _, problem = compiling.communicate(timeout=PATIENCE)
        assert compiling.returncode == 0, problem
    (made,) = (cache / "artifacts").iterdir()
    return made


def artifact_of(model: Path | Source | None, replaced: dict[str, Any] | None = None, **settings: Any) -> Path:
    """Of a checkpoint's folder, the embedded model's if None. settings: of `EngineArgs`; on the CPU unless they say
    otherwise. replaced: fields of the compile config that no setting has so. Weights are not looked at, nor whether the
    model was made for so many positions."""
    from graphllm.compile.building import Tools
    from graphllm.compile.codegen.objects import Objects
    from graphllm.compile.pipeline import compile_model

    args, env = EngineArgs(**{"target": "cpu", **settings}), Env.read()
    source = model if isinstance(model, Source) else open_source(model, runner=args.runner)
    config = compile_config(source.config, args)
    config = replace(config, **replaced or {})
    place, stored = artifact_folder(source, config, env), source.checkpoint and source.checkpoint.tensors
    with build_lock(place):
        if (place / "manifest.json").exists():
            return place
        native = (config.target.device, config.backend) == ("cpu", "inductor")
        with Objects(env.cache_dir / "objects") if native else contextlib.nullcontext() as objects:
            tools = Tools(objects, tuned=env.cache_dir / "tuned")
            compile_model(source.config, source.tensors, config, place, tools=tools, stored=stored)
    return place


def open_executor(model: Path | Source, place: Path, num_blocks: int = 16, device: str = "cpu") -> Executor:
    """The executor of an artifact with a checkpoint's weights."""
    source = model if isinstance(model, Source) else open_source(model)
    assert source.checkpoint is not None
    plan = WeightPlan.from_json((place / "weights.json").read_text())
    return Executor(Artifact.open(place), load_weights(plan, source.checkpoint, device), num_blocks)
