"""MappedCopies: the ranks' side of `HostConnector`. The memory of another engine's rank is mapped for as long as a copy
takes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from graphllm.host.shared_memory import mapped, opened
from graphllm.runtime.tiers.peer_copies import Pairs, PeerCopies


class MappedCopies(PeerCopies):
    """Memory is named by a process that has it open ("pid") and by its descriptor there of each kind ("files")."""

    def get_handshake_metadata(self) -> dict[str, Any]:
        return {**super().get_handshake_metadata(), "pid": os.getpid(), "files": dict(self.memory.files)}

    def read(self, peer: Mapping[str, Any], pairs: Mapping[str, Pairs]) -> None:
        for kind, of in pairs.items():
            own, shape = opened(peer["pid"], peer["files"][kind]), peer["shapes"][kind]
            try:
                theirs = mapped(own, math.prod(shape)).reshape(shape)
            finally:
                os.close(own)
            mine = self.memory.pieces(kind)
            for to, at in of:
                mine[to] = theirs[at]
