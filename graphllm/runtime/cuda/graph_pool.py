"""GraphPool: launches captured as CUDA graphs. Importing this file imports torch, which a CPU may have no need of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

Launch: TypeAlias = Callable[[], Any]  # as in `graphllm.runtime.kernels`


class GraphPool:
    """Memory that graphs share, which never run at once."""

    def __init__(self) -> None:
        self._handle = torch.cuda.graph_pool_handle()

    def captured(self, segments: Sequence[tuple[bool, list[Launch]]]) -> list[Launch]:
        """The launches of a part, with graphs in place of the launches that may be captured. segments: each says
        whether its launches may be."""
        torch.cuda.current_stream().synchronize()
        return [launch for safe, ls in segments for launch in ([self._capture(ls)] if safe else ls)]

    def _capture(self, launches: Sequence[Launch]) -> Launch:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # Threads of libraries, as NCCL's that watches its collectives, may ask for events during the capture.
        with torch.cuda.graph(graph, pool=self._handle, stream=stream, capture_error_mode="thread_local"):
            for launch in launches:
                launch()
        return graph.replay
