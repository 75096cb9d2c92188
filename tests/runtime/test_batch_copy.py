"""Many copies in one call, with a library in the place of the CUDA driver whose memory is the host's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stub_driver import run_with_driver

SCRIPT = """
import numpy as np
from graphllm.host.cuda_driver import CudaDriver, CudaError
from graphllm.runtime.cuda.batch_copy import ANY, BatchCopy
source, target = np.arange(40, dtype=np.uint8).reshape(5, 8), np.zeros((5, 8), dtype=np.uint8)
copy, row = BatchCopy(CudaDriver()), np.arange(5) * 8
try:
    copy.copy(target.ctypes.data + row[[4, 0, 2]], source.ctypes.data + row[[1, 3, 2]], 8, 0, ANY)
    copy.copy(row[:0], row[:0], 8, 0, ANY)
except CudaError as failure:
    print(failure)
print(target[:, 0].tolist(), (target[[4, 0, 2]] == source[[1, 3, 2]]).all())
"""


@pytest.mark.parametrize(
    ("old", "calls"), [(False, ["3 in order 3, 0 0 0 1"]), (True, ["one"] * 3)], ids=["batched", "old driver"]
)
def test_copies(tmp_path: Path, old: bool, calls: list[str]) -> None:
    printed, called = run_with_driver(tmp_path, SCRIPT, old=old)
    assert printed == ["[24, 0, 16, 0, 8] True"]
    assert called == calls


def test_a_refusal_is_told(tmp_path: Path) -> None:
    printed, _ = run_with_driver(tmp_path, SCRIPT, COPY=700)
    assert printed[0] == "cuMemcpyBatchAsync failed: the driver's words (code 700)"
