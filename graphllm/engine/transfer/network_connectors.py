"""NixlConnector and MooncakeConnector: blocks between engines of several machines, which a library moves.

Engines meet at a TCP port. The libraries are no dependencies of this package: the ranks' sides import them.
"""

from __future__ import annotations

import importlib
import logging
import secrets
import socket
from collections.abc import Mapping
from typing import Any, ClassVar

from graphllm.config import ConfigError, KVTransferConfig
from graphllm.config.vllm.kv_transfer import is_engine_id
from graphllm.engine.transfer.peer_connector import Extra, PeerConnector
from graphllm.engine.transfer.peer_identity import Address

_log = logging.getLogger(__name__)
_PORTS = 64  # from kv_port on, for the engine cores of one machine
_WAITING = 64  # connections that wait to be accepted


class NetworkConnector(PeerConnector):
    """An engine listens at kv_ip, on the first free port from kv_port on; 0 stands for any free port.

    library: the module to import.
    extra_name: what to install, as graphllm[extra_name].
    """

    library: ClassVar[str]
    extra_name: ClassVar[str]

    @classmethod
    def check(cls, config: KVTransferConfig) -> None:
        super().check(config)
        try:
            importlib.import_module(cls.library)
        except ImportError as missing:
            raise ConfigError(
                f"kv_transfer_config: kv_connector is {config.kv_connector!r:.80}: {cls.library} cannot be imported "
                f"({missing}); pip install 'graphllm[{cls.extra_name}]', with the system libraries that it names"
            ) from missing

    @classmethod
    def shared_secret(cls, config: KVTransferConfig) -> str | None:
        raise ConfigError(
            f"kv_transfer_config: kv_connector is {config.kv_connector!r:.80} without a cache_secret: engines find "
            "each other's blocks by it; give the same one to all"
        )

    def listen(self) -> tuple[Address, socket.socket]:
        host, first = self.config.kv_ip, self.config.kv_port
        family, why = socket.AF_INET6 if ":" in host else socket.AF_INET, ""
        for port in range(first, min(first + _PORTS, 1 << 16)):
            try:
                listener = socket.create_server((host, port), family=family, backlog=_WAITING)
            except (OSError, ValueError) as failure:
                why = str(failure)
                continue
            engine = self.config.engine_id or secrets.token_hex(8)
            address = Address(engine if port == first else f"{engine}-{port}", host, listener.getsockname()[1])
            _log.info("engine %s meets others at %s, port %d", *address)
            return address, listener
        raise ConfigError(
            f"kv_transfer_config: kv_ip is {host!r:.80} and kv_port is {first}: there is no place to listen ({why}); "
            "give an address of this machine and a free port"
        )

    def named(self, params: Mapping[str, Any]) -> Address:
        port = params.get("remote_port")
        host = str(params.get("remote_host"))
        return Address(str(params.get("remote_engine_id")), host, port if type(port) is int else 0)

    def connect(self, called: Address, timeout: float) -> socket.socket:
        if not is_engine_id(called.engine_id):
            raise ConnectionError("that is no id of an engine")
        try:
            return socket.create_connection((called.host, called.port), timeout)
        except (ValueError, OverflowError) as nonsense:
            raise ConnectionError(f"that is no address: {nonsense}") from nonsense


class NixlConnector(NetworkConnector):
    """NIXL. Further settings of kv_connector_extra_config, none of which must be given:

    backends: of NIXL, UCX by default.
    num_threads: of backends that have several.
    """

    library, extra_name = "nixl", "nixl"
    worker = "graphllm.runtime.tiers.nixl_reads:NixlReads"
    extra: ClassVar[Mapping[str, Extra]] = {
        **PeerConnector.extra,
        "backends": Extra(
            lambda value: isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value),
            "a list of NIXL's backends",
        ),
        "num_threads": Extra(lambda value: type(value) is int and value >= 0, "a number of threads"),
    }


class MooncakeConnector(NetworkConnector):
    """Mooncake's transfer engine. Further settings of kv_connector_extra_config, none of which must be given:

    mooncake_protocol: rdma by default, or tcp, or what else Mooncake has.
    device_name: devices that it uses; it finds them by itself by default.
    """

    library, extra_name = "mooncake.engine", "mooncake"
    worker = "graphllm.runtime.tiers.mooncake_reads:MooncakeReads"
    one_host = True  # every rank's name has kv_ip in it
    extra: ClassVar[Mapping[str, Extra]] = {
        **PeerConnector.extra,
        "mooncake_protocol": Extra(lambda value: isinstance(value, str) and bool(value), "rdma or tcp"),
        "device_name": Extra(lambda value: isinstance(value, str), "names of devices, with commas between them"),
    }

    def worker_config(self) -> dict[str, Any]:
        return {**super().worker_config(), "address": self.config.kv_ip}
