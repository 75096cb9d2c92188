"""Host memory that is registered in parts, with a library in the place of the CUDA driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stub_driver import run_with_driver

SCRIPT = """
import logging, sys
logging.disable()
import graphllm.runtime.cuda.registered_memory as registered
from graphllm.host.cuda_driver import CudaDriver
from graphllm.runtime.tiers.host_memory import HostMemory
registered.PART = 3 * 4096
memory = HostMemory({"blocks": 5, "snapshots": 4}, {"blocks": (2, 2048), "snapshots": (1, int(sys.argv[1]))})
found = registered.RegisteredMemory({kind: memory.pieces(kind) for kind in memory.kinds}, CudaDriver())
print(found.ready())
for blocks, snapshots in eval(sys.argv[2]):
    found.prepare({"blocks": blocks, "snapshots": snapshots}).result()
    print(found.ready())
found.close()
"""
ALL = "[(5, 4)]"


@pytest.mark.parametrize(("size", "parts"), [(8192, [8192] * 4), (100, [400])])
def test_parts_begin_at_pages(tmp_path: Path, size: int, parts: list[int]) -> None:
    printed, calls = run_with_driver(tmp_path, SCRIPT, str(size), ALL)
    assert printed == ["{'blocks': 0, 'snapshots': 0}", "{'blocks': 5, 'snapshots': 4}"]
    asked = [f"register {n}" for n in (3 * 4096, 2 * 4096, *parts)]
    assert calls == ["mine", *asked, *["unregister"] * len(asked)]


def test_only_what_is_wanted_is_registered(tmp_path: Path) -> None:
    printed, calls = run_with_driver(tmp_path, SCRIPT, "8192", "[(0, 1), (2, 1), (3, 0), (4, 2)]")
    counts = [(0, 0), (0, 1), (3, 1), (3, 1), (5, 2)]
    assert printed == [str({"blocks": blocks, "snapshots": snapshots}) for blocks, snapshots in counts]
    assert calls.count("unregister") == 4


def test_what_was_registered_before_a_refusal_can_be_used(tmp_path: Path) -> None:
    printed, calls = run_with_driver(tmp_path, SCRIPT, "8192", ALL, REGISTER=1)
    assert printed[-1] == "{'blocks': 3, 'snapshots': 0}"
    assert calls.count("unregister") == 1
