"""Loading cubins, with a library in the place of the CUDA driver that writes down what it is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.stub_driver import run_with_driver

SCRIPT = """
import sys, threading
from pathlib import Path
from graphllm.host.cuda_driver import CudaError
from graphllm.runtime.cuda.functions import CudaFunctions
functions = CudaFunctions(Path(sys.argv[1]))
functions.begin()
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join()
for cubin in sys.argv[2:]:
    try:
        print(bool(functions.get({"cubin": cubin, "symbol": "f", "shared": 0})))
    except CudaError as failure:
        print(failure)
"""


@pytest.fixture
def pieces(tmp_path: Path) -> Path:
    folder = tmp_path / "pieces"
    folder.mkdir()
    for name in ("one", "two", "broken"):
        (folder / f"{name}.cubin").write_bytes(name.encode() + b"\0")
    for name, cubins in {"a": ("one.cubin", "two.cubin"), "b": ("one.cubin",)}.items():
        kernels = {cubin: {"cubin": cubin, "symbol": "f", "shared": 70000 * (cubin[0] == "t")} for cubin in cubins}
        (folder / f"{name}.json").write_text(json.dumps({"kernels": {**kernels, "of a CPU": {}}}))
    return folder


def _run(pieces: Path, *cubins: str, driver: bool = True, **said: int) -> tuple[list[str], list[str]]:
    return run_with_driver(pieces.parent, SCRIPT, str(pieces), *cubins, driver=driver, **said)


def test_all_are_loaded_once(pieces: Path) -> None:
    printed, calls = _run(pieces, "one.cubin", "two.cubin")
    assert printed == ["True", "True"]
    assert calls == ["init", "context", "f of one", "f of two", "8 70000"]


def test_what_is_broken_is_told_to_who_asks_for_it(pieces: Path) -> None:
    (pieces / "a.json").write_text(
        json.dumps({"kernels": {"k": {"cubin": "broken.cubin", "symbol": "f", "shared": 0}}})
    )
    printed, calls = _run(pieces, "one.cubin", "broken.cubin")
    assert printed == ["True", "cuModuleLoadData failed: the driver's words (code 200)"]
    assert calls == ["init", "context", "f of one"]


def test_nothing_is_said_without_a_gpu(pieces: Path) -> None:
    """By this: torch says it."""
    assert _run(pieces, INIT=100) == ([], ["init"])
    (pieces.parent / "libcuda.so.1").unlink()
    assert _run(pieces, driver=False) == ([], [])
