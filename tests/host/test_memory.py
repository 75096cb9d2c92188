"""How much of the host's memory is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphllm.host import machine

V1 = "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"
V2 = "memory.max", "memory.current", "memory.stat"


@pytest.mark.parametrize("names", [V1, V2], ids=["v1", "v2"])
@pytest.mark.parametrize(
    ("most", "used", "left"),
    [(5_000_000, 2_000_000, 3_700_000), (1_000_000, 2_000_000, 0), (2**62, 2_000_000, None), ("max", 2_000_000, None)],
)
def test_control_groups_limit_memory(
    names: tuple[str, str, str], most: object, used: int, left: int | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "memory").mkdir()
    stat = "active_file 5\ninactive_file 700000\ntotal_inactive_file 9\n"
    for name, text in zip(names, (f"{most}\n", f"{used}\n", stat), strict=True):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "_memory", lambda which: 1 << 40)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.available_memory() == (1 << 40 if left is None else left)
