"""Nodes of a Ray cluster for an engine's ranks. Ray finds them, keeps their devices for this engine, and starts a
process on each. Messages of the ranks go their own way (`graphllm.runtime.ranks.node`), not through Ray. The library is
an extra: only an engine that wants Ray imports this."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from graphllm.config import ConfigError, CoreConfig
from graphllm.loading.core.node_main import preparer
from graphllm.loading.core.place import node_count
from graphllm.loading.core.rank_main import COMMAND
from graphllm.program.artifact import Artifact
from graphllm.runtime.ranks.node import lead_node
from graphllm.runtime.ranks.node_messages import Hello

_PATIENCE = 600.0  # seconds for devices to become free
_REMINDER = 20.0  # seconds between two lines of the log while they are not
_EXPLAINING = 2.0  # seconds for Ray to know why a process is gone
_COPIED = ("NCCL_", "GLOO_")  # variables of the libraries that ranks speak through, which nodes get from here

_log = logging.getLogger(__name__)


class NodeProcess:
    """What Ray runs on each node."""

    def devices(self) -> list[str]:
        """The GPUs that Ray has given this process, as in CUDA_VISIBLE_DEVICES."""
        return [str(name) for name in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]

    def lead(self, host: str, port: int, number: int, secret: str, environment: Mapping[str, str]) -> None:
        """Be a node of the engine at that address, until it ends."""
        lead_node((host, port), Hello(number, secret, socket.gethostname()), COMMAND, preparer(None), environment)


class RayNodes:
    """The nodes of one engine, a context. count: how many. address: of this one, which has rank 0. Raises ConfigError
    where the cluster has not enough devices."""

    def __init__(self, config: CoreConfig, degree: int) -> None:
        compiled = Artifact.trusted(Path(config.load.artifact)).config
        self._resource = "CPU" if compiled.target.device == "cpu" else "GPU"
        self._began = not ray.is_initialized()
        if self._began:
            ray.init(log_to_driver=True, logging_level=logging.WARNING)
        self.address = ray.util.get_node_ip_address()
        self._processes: list[Any] = []
        self._lives: dict[int, Any] = {}
        self._group: Any = None
        try:
            sizes = [int(n["Resources"].get(self._resource, 0)) for n in ray.nodes() if n["Alive"]]
            self.count = node_count(
                degree, compiled.tensor_parallel_size, sizes, config.parallel.nnodes, self._resource
            )
            self._here = degree // self.count
            self._place()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: object, trace: TracebackType | None) -> None:
        self.close()

    def _place(self) -> None:
        """Keep devices for the engine, the same number on each node; this node has the first ranks."""
        bundle = {self._resource: float(self._here), "CPU": float(self._here if self._resource == "CPU" else 1)}
        own = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        self._group = placement_group(
            [bundle] * self.count,
            strategy="STRICT_SPREAD" if self.count > 1 else "STRICT_PACK",
            bundle_label_selector=[own, *({} for _ in range(1, self.count))],
        )
        begun, reminded = time.monotonic(), 0.0
        while not self._group.wait(1):
            waited = time.monotonic() - begun
            wanted = f"{self._here} {self._resource}s on each of {self.count} nodes, this one among them"
            free = {name: count for name, count in ray.available_resources().items() if name in ("CPU", "GPU")}
            if waited > _PATIENCE:
                raise ConfigError(
                    f"distributed_executor_backend is ray: the cluster has not had {wanted}, free within "
                    f"{_PATIENCE / 60:.0f} minutes (free in all: {free}); end what uses them, or add nodes"
                )
            if waited - reminded > _REMINDER:
                reminded = waited
                _log.info("waiting for %s; free in all: %s", wanted, free)
        for number in range(self.count):
            options = {
                "num_cpus": bundle["CPU"],
                "num_gpus": bundle.get("GPU", 0),
                "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, number),
            }
            self._processes.append(ray.remote(NodeProcess).options(**options).remote())
        if self._resource == "GPU":
            take_devices(ray.get(self._processes[0].devices.remote()))

    def start(self, port: int, secret: str) -> None:
        """Have the other nodes come to a port of this one."""
        environment = {name: value for name, value in os.environ.items() if name.startswith(_COPIED)}
        for number, process in enumerate(self._processes[1:], 1):
            self._lives[number] = process.lead.remote(self.address, port, number, secret, environment)

    def explain(self, node: int) -> str:
        """What Ray says of the end of a node, as an end of a sentence; "" where it knows nothing."""
        try:
            ray.get(self._lives[node], timeout=_EXPLAINING)
        except ray.exceptions.GetTimeoutError:
            return ""
        except Exception as cause:
            return f" ({' '.join(str(cause).split()):.300})"
        return ""

    def close(self) -> None:
        """End the processes, and give the devices back."""
        with contextlib.suppress(Exception):  # the cluster may be gone
            for process in self._processes:
                ray.kill(process)
            if self._group is not None:
                remove_placement_group(self._group)
        self._processes, self._group = [], None
        if self._began:
            self._began = False
            ray.shutdown()


def take_devices(names: Sequence[str]) -> None:
    """Let this process see no other GPUs than these. Raises ConfigError where it is too late for that."""
    torch: Any = sys.modules.get("torch")  # without it no GPU is in use
    if torch is not None and torch.cuda.is_initialized() and os.environ.get("CUDA_VISIBLE_DEVICES") != ",".join(names):
        raise ConfigError(
            f"distributed_executor_backend is ray: it gives this process the GPUs {', '.join(names)}, but GPUs are in "
            "use here already; make the engine first of all, or set CUDA_VISIBLE_DEVICES to these before the start"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)
