"""A library in the place of the CUDA driver: it writes down what it is asked for, and its memory is the host's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static void say(const char* what) {
  FILE* f = fopen(getenv("CALLS"), "a");
  fprintf(f, "%s\n", what);
  fclose(f);
}
static int set(const char* name) { return getenv(name) ? atoi(getenv(name)) : 0; }
int cuInit(unsigned flags) { say("init"); return set("INIT"); }
int cuDeviceGet(int* device, int number) { *device = number; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = "context"; return 0; }
int cuCtxSetCurrent(void* context) { say(context); return 0; }
int cuCtxSynchronize(void) { return 0; }
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
int cuMemAlloc_v2(void** address, size_t size) {
  *address = malloc(size);
  if (*address) memset(*address, 1, size);
  return set("ALLOC");
}
int cuMemFree_v2(void* address) { say("free"); free(address); return 0; }
int cuMemsetD8_v2(void* address, unsigned char value, size_t size) { memset(address, value, size); return 0; }
int cuMemHostAlloc(void** memory, size_t size, unsigned flags) { *memory = malloc(size); return 0; }
int cuMemFreeHost(void* memory) { free(memory); return 0; }
int cuStreamCreate(void** stream, unsigned flags) { *stream = malloc(1); return 0; }
int cuStreamDestroy_v2(void* stream) { free(stream); return 0; }
int cuStreamSynchronize(void* stream) { return 0; }
int cuMemcpyHtoD_v2(void* to, const void* from, size_t size) { memcpy(to, from, size); return 0; }
int cuCtxGetCurrent(void** context) { *context = "mine"; return 0; }
int cuMemHostRegister_v2(void* address, size_t size, unsigned flags) {
  char told[99];
  sprintf(told, "register %zu", size);
  say(told);
  return set("REGISTER") && size < 9000 ? 2 : 0;
}
int cuMemHostUnregister(void* address) { say("unregister"); return 0; }
int cuMemcpyAsync(void* to, const void* from, size_t size, void* stream) {
  say("one");
  memcpy(to, from, size);
  return set("COPY");
}
#ifndef OLD
struct attributes { int order, source[2], target[2]; unsigned flags; };
int cuMemcpyBatchAsync(void** to, void** from, size_t* sizes, size_t count, struct attributes* given,
                       size_t* first, size_t number, size_t* failed, void* stream) {
  char told[99];
  sprintf(told, "%zu in order %d, %d %d %zu %zu", count, given->order, given->source[0], given->flags, *first, number);
  say(told);
  for (size_t i = 0; i < count; ++i) memcpy(to[i], from[i], sizes[i]);
  return set("COPY");
}
#endif
int cuMemcpyHtoDAsync_v2(void* to, const void* from, size_t size, void* stream) {
  memcpy(to, from, size);
  return set("COPY");
}
"""


def run_with_driver(
    place: Path, script: str, *words: str, driver: bool = True, old: bool = False, **said: int
) -> tuple[list[str], list[str]]:
    """What a script prints in a process with this library, and what the library was asked for. place: a folder to work
    in. said: codes that INIT, ALLOC and COPY return; 0 is success. driver: whether there is one at all. old: one before
    CUDA 12.8."""
    calls = place / "calls"
    calls.write_text("")
    if driver:
        source = place / "driver.c"
        source.write_text(_SOURCE)
        command = [
            "gcc",
            "-shared",
            "-fPIC",
            "-w",
            *(["-DOLD"] if old else []),
            "-o",
            str(place / "libcuda.so.1"),
            str(source),
        ]
        subprocess.run(command, check=True)
    env = {**os.environ, "LD_LIBRARY_PATH": str(place), "CALLS": str(calls), **{n: str(v) for n, v in said.items()}}
    command = [sys.executable, "-c", script, *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines(), calls.read_text().splitlines()
