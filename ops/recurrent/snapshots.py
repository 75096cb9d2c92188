"""What kernels of save_snapshots and load_snapshots ask of memory."""

from __future__ import annotations

from graphllm.ir import CallSite


def are_dense(site: CallSite) -> bool:
    """Whether the numbers of each state, its codes and its scales lie one after another."""
    state, rest, codes, scales, kept = (site.args[name] for name in ("state", "rest", "codes", "scales", "kept"))
    _, _, R, C = state.shape[2:]
    dense = state.stride()[3:] == codes.stride()[2:] == (R * C, C, 1)
    return dense and scales.stride()[2:] == (C, 1) and rest.stride(2) == kept.stride(1) == 1
