"""DFlash on the GPU, compiled and captured, beside modules of transformers: its drafts in every step, and the text of
plain decoding."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from test_dflash import dflash, made_model
from test_draft_models import _open, _run, _texts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("kind", ["", "sliding"])
def test_drafts(kind: str, tmp_path: Path) -> None:
    model = made_model()
    fields = {"target": "cuda", "tune": False, "block_size": 16}
    opened = _open(model, dflash(model, kind), tmp_path, "inductor", **fields)
    texts = _texts(model, 1, (40, 31, 8, 39, 16, 52, 1))
    assert _run(opened, model, texts) > 10
    assert _run(opened, model, texts[3:] + texts[:2]) > 5
    stats = opened.core.stats()
    print(f"{stats.drafts} times, accepted by place {stats.accepted_tokens}")
    assert stats.prefix_hits > 0
    assert stats.accepted_tokens[0] > 0
    opened.core.close()
