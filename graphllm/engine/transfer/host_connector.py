"""HostConnector: blocks between engines of one host, which meet in a folder and map each other's host memory."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from graphllm.config import KVTransferConfig
from graphllm.engine.transfer.kv_connector import ConnectorSetup
from graphllm.engine.transfer.meeting_folder import (
    connect,
    engines_in,
    folder_secret,
    listen,
    meeting_folder,
    socket_of,
)
from graphllm.engine.transfer.peer_connector import Extra, PeerConnector
from graphllm.engine.transfer.peer_identity import Address
from graphllm.host.shared_memory import opened

_log = logging.getLogger(__name__)


class HostConnector(PeerConnector):
    """Further settings of kv_connector_extra_config, none of which must be given:

    folder: in which engines meet.
    ask_others: also requests without kv_transfer_params ask all engines that meet there, such as the other cores of a
        server.
    """

    worker = "graphllm.runtime.tiers.mapped_copies:MappedCopies"
    shares_memory = True
    one_host = True
    extra: ClassVar[Mapping[str, Extra]] = {
        "folder": Extra(lambda value: isinstance(value, str), "a path"),
        **PeerConnector.extra,
        "ask_others": Extra(lambda value: isinstance(value, bool), "true or false"),
    }

    def __init__(self, setup: ConnectorSetup) -> None:
        self._folder = meeting_folder(setup.config.kv_connector_extra_config)
        self._files = list[int]()
        super().__init__(setup)

    @classmethod
    def check(cls, config: KVTransferConfig) -> None:
        super().check(config)
        meeting_folder(config.kv_connector_extra_config)

    @classmethod
    def shared_secret(cls, config: KVTransferConfig) -> str | None:
        return folder_secret(meeting_folder(config.kv_connector_extra_config))

    def listen(self) -> tuple[Address, socket.socket]:
        engine_id, listener = listen(self._folder, self.config.engine_id)
        _log.info("engine %s meets others in %s", engine_id, self._folder)
        return Address(engine_id), listener

    def named(self, params: Mapping[str, Any]) -> Address:
        return Address(str(params.get("remote_engine_id")))

    def connect(self, called: Address, timeout: float) -> socket.socket:
        return connect(self._folder, called.engine_id, timeout)

    def others(self) -> list[Address]:
        return [Address(engine) for engine in engines_in(self._folder) if engine != self.address.engine_id]

    def descriptors(self, ranks: Sequence[Mapping[str, Any]]) -> list[int]:
        self._files += [opened(rank["pid"], fd) for rank in ranks for fd in rank["files"].values()]
        return self._files

    def close(self) -> None:
        socket_of(self._folder, self.address.engine_id).unlink(missing_ok=True)
        super().close()
        while self._files:
            os.close(self._files.pop())
