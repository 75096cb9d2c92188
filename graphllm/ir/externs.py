"""Extern routines: functions that an implementation calls by name, such as collectives and products of a library.

A package offers its routines under the entry point group ``graphllm.externs``. In an artifact a call is an instruction
of its own: what the routine writes, results and workspace alike, has its place in the memory plan.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any, cast

import torch

from graphllm.config import ConfigError
from graphllm.ir import routines

GROUP = "graphllm.externs"
EXTERN_NAMESPACE = "graphllm_extern"
_library = torch.library.Library(EXTERN_NAMESPACE, "FRAGMENT")


class Extern:
    """A routine that implementations call; tracers record one node for it.

    name: of the entry point. schema: of the arguments, as for `graphllm.ir.kernels.CKernel`: it returns nothing and
    marks every tensor that is written, so whoever calls it makes results and workspace by ``torch.empty``. The routine
    gets tensors for tensors and must not keep them; on a GPU it works on the current stream, without waiting for it.
    """

    def __init__(self, name: str, schema: str) -> None:
        self.name = name
        _library.define(name + schema)
        _library.impl(name, lambda *args: routine(name)(*args), "CompositeExplicitAutograd")
        torch.library.register_fake(f"{EXTERN_NAMESPACE}::{name}", lambda *args: None, lib=_library)
        self.overload: torch._ops.OpOverload = getattr(getattr(torch.ops, EXTERN_NAMESPACE), name).default

    def __call__(self, *args: Any) -> None:
        self.overload(*args)


@cache
def routine(name: str) -> Callable[..., Any]:
    """The function of that name, of graphllm or a package. Raises ConfigError where none offers it."""
    if own := getattr(routines, name, None):
        return cast(Callable[..., Any], own)
    for entry in entry_points(group=GROUP, name=name):
        return entry.load()
    raise ConfigError(f"the artifact calls the extern routine {name!r}, which no installed package offers; install it")
