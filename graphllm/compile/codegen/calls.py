"""The C++ through which Python calls kernels: many of them in one call, each with its arguments in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_TYPES = {"ptr": "void*", "i64": "std::int64_t", "f64": "double"}

# What `graphllm.runtime.kernels.CpuKernels` lays out: a cell of 8 bytes for each argument, and calls one after another.
_RUN = """\
#include <cstdint>

union Argument { void* ptr; std::int64_t i64; double f64; };
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


def call_source(kernels: Mapping[str, Sequence[str]]) -> str:
    """A source of its own with ``graphllm_run``, ``graphllm_done`` and, for every kernel, ``call_<name>``, which takes
    its arguments from memory. kernels: kinds of the arguments ("ptr", "i64", "f64") by name."""
    return "\n".join([_RUN, *(_call(name, kinds) for name, kinds in sorted(kernels.items()))])


def _call(name: str, kinds: Sequence[str]) -> str:
    types, given = (", ".join(_TYPES[k] for k in kinds), ", ".join(f"a[{i}].{k}" for i, k in enumerate(kinds)))
    return f'extern "C" void {name}({types});\nextern "C" void call_{name}(const Argument* a) {{ {name}({given}); }}'
