"""MTP layers as drafts on the GPU, compiled and captured, in float32: the drafts are those of transformers' layers, and
the text is that of plain decoding; over latents by runs and by trees, and over recurrent states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.drafts import test_mtp_of_hybrids as hybrids
from tests.engine.drafts import test_mtp_of_routed as routed
from tests.engine.drafts.test_draft_models import TREE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
ON_GPU: dict[str, Any] = {"target": "cuda", "backend": "inductor", "block_size": 16, "tune": False, "pages": 9}


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@torch.no_grad()
def test_routed(family: str, tmp_path: Path) -> None:
    routed.check_drafts(family, tmp_path, **ON_GPU)


@pytest.mark.parametrize("tree", [TREE, routed.GROWING])
@torch.no_grad()
def test_trees_over_latents(tree: str, tmp_path: Path) -> None:
    routed.check_trees("deepseek_v3", tree, tmp_path, **ON_GPU)


@torch.no_grad()
def test_hybrids(tmp_path: Path) -> None:
    hybrids.check_drafts("qwen3_next", tmp_path, **ON_GPU)
