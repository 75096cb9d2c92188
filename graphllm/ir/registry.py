"""Finds ops, passes and models: every module of the three folders, then the ``graphllm.plugins`` entry points."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points

from graphllm.host.machine import PLUGIN_GROUP
from graphllm.ir.model import Model, all_models
from graphllm.ir.op import Op, all_ops


def load_ops() -> dict[str, Op]:
    """Import every op folder and every plugin; the registered ops by name, sorted."""
    _load("graphllm.ops", depth=2)  # families of ops
    return dict(sorted(all_ops().items()))


def load_models() -> dict[str, Model]:
    """Import every model file and every plugin; the registered families by architecture name, sorted."""
    _load("graphllm.model_defs")
    return dict(sorted(all_models().items()))


def load_passes() -> None:
    """Import every pass file and every plugin."""
    _load("graphllm.passes")


def _load(package: str, depth: int = 1) -> None:
    _import_all(package, depth)
    for plugin in entry_points(group=PLUGIN_GROUP):
        plugin.load()


def _import_all(package: str, depth: int) -> None:
    """Import a package and what lies in it, ``depth`` levels deep."""
    root = importlib.import_module(package)
    for module in pkgutil.iter_modules(root.__path__) if depth else ():
        if module.ispkg:
            _import_all(f"{package}.{module.name}", depth - 1)
        else:
            importlib.import_module(f"{package}.{module.name}")
