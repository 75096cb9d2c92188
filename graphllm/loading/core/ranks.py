"""Starting the ranks of an engine: this process is rank 0, the others have processes of their own, here and on other
nodes. All load their shares at the same time; then they meet (`graphllm.loading.core.loaders.join_ranks`). No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from graphllm.config import ConfigError, CoreConfig
from graphllm.loading.core.node_main import artifact_files, manifest_digest
from graphllm.loading.core.rank_main import COMMAND
from graphllm.runtime.ranks.all_ranks import AllRanks, RanksOfHost
from graphllm.runtime.ranks.node_messages import Begin
from graphllm.runtime.ranks.rank_failure import SharedFate
from graphllm.runtime.ranks.rank_processes import Orders, RankProcesses, WaitingRanks
from graphllm.runtime.ranks.remote_ranks import NodesDoor, RemoteRanks, listen, receive_nodes

if TYPE_CHECKING:
    from graphllm.loading.core.ray_nodes import RayNodes

_log = logging.getLogger(__name__)


class StartedRanks:
    """Ranks that load, and where they meet this process. config: with the number of nodes that there are."""

    def __init__(self, config: CoreConfig, degree: int, exits: bool, waiting: WaitingRanks | None) -> None:
        self.config, self.all = config, AllRanks(degree, SharedFate(exits))
        self.folder = Path(tempfile.mkdtemp(prefix="graphllm-ranks-"))
        self._undo = self.all.undo
        self._undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.listener: int | None = None
        self.meeting_url = f"file://{self.folder / 'meeting'}"
        try:
            remote = self._remote()
            here = self.config.parallel.ranks_of_node(degree)
            if waiting is not None and waiting.count != here - 1:
                waiting.close()
                waiting = None
            own: list[RanksOfHost] = []
            if here > 1:
                load = msgspec.to_builtins(self.config)
                orders = Orders(1, degree, str(self.folder), self.meeting_url, load)
                waiting = waiting or WaitingRanks(COMMAND, here - 1)
                own = [RankProcesses(waiting, orders, self.all.fate, self.all.hear)]
            self.all.begin([*own, *remote])
        except BaseException:
            self.all.close()
            raise

    def _remote(self) -> list[RemoteRanks]:
        """The ranks of other nodes, which are on their way."""
        parallel, degree, secret = self.config.parallel, self.all.degree, ""
        explain: Callable[[int], str] = _nothing_known
        host, port = parallel.master_addr, parallel.master_port
        nodes = None
        if parallel.distributed_executor_backend == "ray":
            nodes = self._undo.enter_context(_ray_nodes(self.config, degree))
            secret, explain, host, port = secrets.token_hex(16), nodes.explain, nodes.address, 0
            parallel = dataclasses.replace(parallel, nnodes=nodes.count)
            self.config = dataclasses.replace(self.config, parallel=parallel)
        if parallel.nnodes == 1:
            return []
        door = NodesDoor(self._undo.enter_context(listen(host, port)), secret)
        store = self._undo.enter_context(listen(host, 0))
        self.listener, address = store.fileno(), f"{host}:{store.getsockname()[1]}"
        self.meeting_url = f"tcp://{address}"
        here, load = parallel.ranks_of_node(degree), msgspec.to_builtins(self.config)
        artifact = Path(self.config.load.artifact)
        files, digest = functools.partial(artifact_files, artifact), manifest_digest(artifact)
        remote = [
            RemoteRanks(
                Begin(node, node * here, here, degree, address, load, digest),
                files, explain, self.all.fate, self.all.hear,
            )
            for node in range(1, parallel.nnodes)
        ]  # fmt: skip
        receive_nodes(door, remote, self.all.fate)
        if nodes is not None:
            nodes.start(door.port, secret)
        else:
            _log.info("waiting for %d nodes to come to %s", parallel.nnodes - 1, door.address)
        return remote


def _ray_nodes(config: CoreConfig, degree: int) -> RayNodes:
    """Raises ConfigError where there is no Ray, or the cluster has not enough devices."""
    try:
        library = importlib.import_module("graphllm.loading.core.ray_nodes")
    except ImportError:
        raise ConfigError(
            "distributed_executor_backend is ray: its library is not installed; `pip install graphllm[ray]`"
        ) from None
    nodes: RayNodes = library.RayNodes(config, degree)
    return nodes


def _nothing_known(node: int) -> str:
    """What somebody else says of the end of a node, where nobody does."""
    return ""


def start_ranks(
    config: CoreConfig, degree: int, undo: contextlib.ExitStack, exits: bool, waiting: WaitingRanks | None
) -> StartedRanks | None:
    """Have all ranks but 0 load; None where there are none. undo: ends them. exits: see `SharedFate`. waiting:
    processes that were started before it was known how many this machine has, and are used where it is as many."""
    if degree == 1:
        if waiting is not None:
            waiting.close()
        return None
    ranks = StartedRanks(config, degree, exits, waiting)
    undo.callback(ranks.all.close)
    return ranks
