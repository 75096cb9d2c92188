"""`StoredWeights`: what a core's parameters are made of. Each process finds that out once, and hands it on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from graphllm.config import CoreConfig
from graphllm.loading.checkpoint.model_files import ModelFiles
from graphllm.loading.checkpoint.tensors import Tensors, open_tensors
from graphllm.program.artifact import Artifact
from graphllm.weights.plan.plan import WeightPlan


@dataclass(frozen=True)
class StoredWeights:
    """The parameters of an artifact, as they are stored. What is read here is read when it is first asked for.

    config: names the checkpoint.
    artifact: has the weight plan, and maybe the finished parameters.
    """

    config: CoreConfig
    artifact: Artifact

    @cached_property
    def is_baked(self) -> bool:
        """Whether the artifact holds the finished parameters."""
        return self.artifact.is_baked

    @cached_property
    def plan(self) -> WeightPlan:
        """The weight plan. Raises ConfigError for a damaged one."""
        return WeightPlan.from_json(self.artifact.weights)

    @cached_property
    def tensors(self) -> Tensors:
        """The headers of the checkpoint's tensors. Raises ConfigError for damaged files."""
        model = self.config.model
        folder, draft = Path(model.model), model.speculative_model
        files = ModelFiles.read(folder)
        drafter = None
        if draft is not None:
            drafter = files if Path(draft) == folder else ModelFiles.read(Path(draft))
        return open_tensors(files, self.config.load.load_format, drafter)
