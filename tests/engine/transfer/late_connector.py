"""A connector from outside: HostConnector with copies that begin when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from graphllm.engine.transfer.host_connector import HostConnector
from graphllm.runtime.tiers.connector_worker import Entry
from graphllm.runtime.tiers.mapped_copies import MappedCopies
from tests.waiting import PATIENCE

BEGUN, GO = threading.Event(), threading.Event()


class LateCopies(MappedCopies):
    """The ranks' side."""

    def _copy(self, entries: Sequence[Entry], metadata: Any) -> None:
        BEGUN.set()
        assert GO.wait(PATIENCE)
        super()._copy(entries, metadata)


class LateConnector(HostConnector):
    """The core's side."""

    worker = "tests.engine.transfer.late_connector:LateCopies"
