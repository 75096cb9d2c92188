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


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("cache", ["auto", "fp8"])
@torch.no_grad()
def test_text_in_bfloat16(tree: str | None, cache: str, tmp_path: Path) -> None:
    """Latents of 512 numbers and 16 heads: the kernels of DeepSeek's own sizes."""
    fields = {**ON_GPU, "dtype": "bfloat16", "block_size": 64, "kv_cache_dtype": cache}
    del fields["pages"]
    routed.check_text(tmp_path, tree, **fields)


@torch.no_grad()
def test_hybrids(tmp_path: Path) -> None:
    hybrids.check_drafts("qwen3_next", tmp_path, **ON_GPU)
