"""Loading cubins, with a library in the place of the CUDA driver that writes down what it is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static void say(const char* what) {
  FILE* f = fopen(getenv("CALLS"), "a");
  fprintf(f, "%s\n", what);
  fclose(f);
}
int cuInit(unsigned flags) { say("init"); return atoi(getenv("INIT")); }
int cuDeviceGet(int* device, int number) { *device = number; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = "context"; return 0; }
int cuCtxSetCurrent(void* context) { say(context); return 0; }
int cuModuleLoadData(void** module, const char* image) {
  *module = strdup(image);
  return strcmp(image, "broken") ? 0 : 200;
}
int cuModuleGetFunction(void** function, char* module, const char* symbol) {
  char told[99];
  sprintf(told, "%s of %s", symbol, module);
  say(told);
  *function = module;
  return 0;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  char told[99];
  sprintf(told, "%d %d", attribute, value);
  say(told);
  return 0;
}
int cuGetErrorString(int code, const char** text) { *text = "the driver's words"; return 0; }
"""
SCRIPT = """
import sys, threading
from pathlib import Path
from graphllm.runtime.cuda_functions import CudaError, CudaFunctions
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


def _run(pieces: Path, *cubins: str, init: int = 0, driver: bool = True) -> tuple[list[str], list[str]]:
    """What the script prints, and what the driver was asked for."""
    place, calls = pieces.parent, pieces.parent / "calls"
    calls.write_text("")
    if driver:
        (place / "driver.c").write_text(DRIVER)
        library = str(place / "libcuda.so.1")
        subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", library, str(place / "driver.c")], check=True)
    env = {**os.environ, "LD_LIBRARY_PATH": str(place), "CALLS": str(calls), "INIT": str(init)}
    command = [sys.executable, "-c", SCRIPT, str(pieces), *cubins]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines(), calls.read_text().splitlines()


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
    assert _run(pieces, init=100) == ([], ["init"])
    (pieces.parent / "libcuda.so.1").unlink()
    assert _run(pieces, driver=False) == ([], [])
