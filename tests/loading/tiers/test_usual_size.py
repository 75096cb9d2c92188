"""Host memory of the cache where the user says nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from graphllm.loading.tiers import usual_size as module
from graphllm.loading.tiers.usual_size import usual_size
from graphllm.program.schema import CacheGroup, CacheLayout

GIB = 1 << 30
GROUPS = (CacheGroup("full", 0, 16),)


def executor(device: str = "cuda", shareable: bool = True, blocks: int = 1024, **layout: Any) -> Any:
    given = {"groups": GROUPS, **layout}
    return SimpleNamespace(
        device=SimpleNamespace(type=device), shareable=shareable, layout=CacheLayout(num_blocks=blocks, **given),
        block_bytes=[3 << 20, 1 << 20], snapshot_bytes=[1 << 20, 1 << 20],
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: 96 * GIB)


@pytest.mark.parametrize(
    ("blocks", "cores", "size"),
    [(1024, 1, 16 * GIB), (1 << 20, 1, 24 * GIB), (1 << 20, 3, 8 * GIB), (2048, 2, 12 * GIB)],
)
def test_a_share_of_what_is_free(blocks: int, cores: int, size: int) -> None:
    assert usual_size(executor(blocks=blocks), True, cores) == size


def test_snapshots_count() -> None:
    found = usual_size(executor(recurrent=True, num_snapshots=512), True, 1)
    assert found == 4 * (4 * GIB + GIB)


@pytest.mark.parametrize(
    ("given", "caching"),
    [
        ({"device": "cpu"}, True),
        ({}, False),
        ({"shareable": False}, True),
        ({"recurrent": True}, True),
        ({"groups": ()}, True),
    ],
)
def test_none_where_it_is_of_no_use(given: dict[str, Any], caching: bool) -> None:
    assert usual_size(executor(**given), caching, 1) == 0


def test_none_where_the_host_has_nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: 9 << 20)
    assert usual_size(executor(), True, 1) == 0
