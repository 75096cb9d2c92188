"""NixlReads: the ranks' side of `NixlConnector`, with NIXL's agents as endpoints. NIXL is imported here only."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from graphllm.config import ConfigError
from graphllm.runtime.tiers.remote_reads import Endpoint, Read, Region, RemoteReads

_LONGEST = 30.0  # seconds of one read
_PEERS = 64  # engines that an agent knows at a time
_POLL = 5e-5  # seconds between two looks at a read


class _Agent(Endpoint):
    """An agent of NIXL with memory of the host. Its name is NIXL's metadata of an agent."""

    def __init__(self, regions: Sequence[Region], backends: Sequence[str], num_threads: int) -> None:
        import nixl

        log = logging.getLogger("nixl")  # which writes to stdout by itself
        log.handlers.clear()
        log.propagate = True
        self._peers = dict[bytes, str]()  # names of agents, by metadata
        settings = nixl.nixl_agent_config(backends=list(backends), num_threads=num_threads)
        try:
            self._agent: Any = nixl.nixl_agent(secrets.token_hex(16), settings)
            missing = [name for name in backends if name not in self._agent.get_plugin_list()]
            if missing:
                raise LookupError(f"there are {', '.join(self._agent.get_plugin_list())}")
            self._agent.register_memory([(*region, 0, "") for region in regions], "DRAM")
        except Exception as failure:  # each of NIXL's errors is a class of its own
            raise ConfigError(
                f"kv_transfer_config: backends in kv_connector_extra_config is {list(backends)!r:.80}: NIXL cannot use "
                f"the host's memory with them ({failure}); give others, or leave it out for UCX"
            ) from failure

    @property
    def name(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def read(self, peer: Any, reads: Sequence[Read]) -> None:
        agent, deadline = self._agent, time.monotonic() + _LONGEST
        try:
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs([(read.local, read.nbytes, 0) for read in reads], "DRAM"),
                agent.get_xfer_descs([(read.remote, read.nbytes, 0) for read in reads], "DRAM"),
                self._known(peer),
            )
            state = agent.transfer(handle)
            while state == "PROC" and time.monotonic() < deadline:
                time.sleep(_POLL)
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
        except Exception as failure:  # each of NIXL's errors is a class of its own
            raise ConnectionError(f"NIXL: {failure}") from failure
        if state != "DONE":
            raise ConnectionError(f"NIXL: the read has not ended ({state}) after {_LONGEST:.0f} s at most")

    def _known(self, metadata: bytes) -> str:
        """The name of an agent, which is made known to this one."""
        if metadata not in self._peers:
            while len(self._peers) >= _PEERS:
                self._agent.remove_remote_agent(self._peers.pop(next(iter(self._peers))))
            name = self._agent.add_remote_agent(metadata)
            self._peers[metadata] = name.decode() if isinstance(name, bytes) else name
        return self._peers[metadata]

    def close(self) -> None:
        self._agent = None  # NIXL ends an agent's connections with the agent


class NixlReads(RemoteReads):
    """Copies with NIXL."""

    def open(self, regions: Sequence[Region], config: Mapping[str, Any]) -> Endpoint:
        return _Agent(regions, config.get("backends", ["UCX"]), config.get("num_threads", 0))
