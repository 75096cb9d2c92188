"""The outside package's models on the GPU, compiled: what tests/strange has on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
sys.path.insert(0, str(Path(__file__).parents[1] / "strange"))
from test_strange import FEATURES, Strange, _every_way, site, test_draft_head, test_pooled  # noqa: E402, F401


@pytest.mark.parametrize("feature", FEATURES)
def test_alone(feature: str, tmp_path: Path) -> None:
    _every_way(Strange([feature], tmp_path / "model"), "inductor")


def test_all_together(tmp_path: Path) -> None:
    _every_way(Strange(FEATURES, tmp_path / "model"), "inductor")
