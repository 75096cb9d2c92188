"""MooncakeReads: the ranks' side of `MooncakeConnector`, with Mooncake's transfer engines as endpoints. Mooncake is
imported here only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphllm.config import ConfigError
from graphllm.runtime.tiers.remote_reads import Endpoint, Read, Region, RemoteReads

_AT_ONCE = 256  # reads of one call: Mooncake refuses calls with more than its queues hold, which are some thousands


class _TransferEngine(Endpoint):
    """A transfer engine with memory of the host. Its name is host:port."""

    def __init__(self, regions: Sequence[Region], host: str, protocol: str, device: str) -> None:
        from mooncake.engine import TransferEngine

        self._engine: Any = TransferEngine()
        failed = self._engine.initialize(host, "P2PHANDSHAKE", protocol, device)
        if failed or any(self._engine.register_memory(*region) for region in regions):
            raise ConfigError(
                f"kv_transfer_config: mooncake_protocol in kv_connector_extra_config is {protocol!r:.80}: Mooncake "
                f"cannot use it at the address {host} (its messages are on stderr); give another one, such as tcp"
            )
        self._name = f"{host}:{self._engine.get_rpc_port()}"

    @property
    def name(self) -> str:
        return self._name

    def read(self, peer: Any, reads: Sequence[Read]) -> None:
        for begin in range(0, len(reads), _AT_ONCE):
            local, remote, nbytes = zip(*reads[begin : begin + _AT_ONCE], strict=True)
            if self._engine.batch_transfer_sync_read(peer, list(local), list(remote), list(nbytes)):
                raise ConnectionError(f"Mooncake: the read from {peer} has failed")

    def close(self) -> None:
        self._engine = None  # Mooncake ends an engine's connections with the engine


class MooncakeReads(RemoteReads):
    """Copies with Mooncake."""

    def open(self, regions: Sequence[Region], config: Mapping[str, Any]) -> Endpoint:
        protocol, device = config.get("mooncake_protocol", "rdma"), config.get("device_name", "")
        return _TransferEngine(regions, config["address"], protocol, device)
