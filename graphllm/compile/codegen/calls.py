"""The C++ through which Python calls kernels: many of them in one call, each with its arguments in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

_TYPES = {"ptr": "void*", "i64": "std::int64_t", "f64": "double"}

# What `graphllm.runtime.kernels.CpuKernels` lays out: a cell of 8 bytes for each argument, and calls one after another.
_ARGUMENT = """\
#include <cstdint>

union Argument { void* ptr; std::int64_t i64; double f64; };
"""
_RUN = """\
struct Call { void (*kernel)(const Argument*); const Argument* arguments; };

extern "C" {
std::int64_t graphllm_done = 0;  // kernels so far; one thread runs them, others may look

void graphllm_run(const Call* calls, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    calls[i].kernel(calls[i].arguments);
    __atomic_store_n(&graphllm_done, graphllm_done + 1, __ATOMIC_RELAXED);
  }
}
}
"""


def call_source(kernels: Mapping[str, Sequence[str]], run: bool = True) -> str:
    """A source of its own with ``call_<name>`` for every kernel, which takes its arguments from memory; and with
    ``graphllm_run`` and ``graphllm_done``. kernels: kinds of the arguments ("ptr", "i64", "f64") by name."""
    head = _ARGUMENT + _RUN if run else _ARGUMENT
    return "\n".join([head, *(_call(name, kinds) for name, kinds in sorted(kernels.items()))])


def has_calls(source: Path) -> bool:
    """Whether a hand-written source has ``call_<name>`` of its kernels itself, by GRAPHLLM_KERNEL of ops/cpu/calls.h:
    in it, or in a header of its folder."""
    files = (source, *source.parent.glob("*.h"))
    return any("GRAPHLLM_KERNEL(" in file.read_text() for file in files)


def _call(name: str, kinds: Sequence[str]) -> str:
    types, given = (", ".join(_TYPES[k] for k in kinds), ", ".join(f"a[{i}].{k}" for i, k in enumerate(kinds)))
    return f'extern "C" void {name}({types});\nextern "C" void call_{name}(const Argument* a) {{ {name}({given}); }}'
