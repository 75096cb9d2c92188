"""What a GPU's engine begins while torch is imported, which takes longer: loading cubins, and reading weights. No
torch."""

from __future__ import annotations

from graphllm.loading.core.core_start import EarlyStart
from graphllm.loading.core.stored_weights import StoredWeights
from graphllm.program import baked_table
from graphllm.runtime.cuda.functions import CudaFunctions
from graphllm.weights.loading.early_reading import EarlyWeights
from graphllm.weights.loading.layout import BlockLayout, baked_layout, checkpoint_layout


def begin_early(stored: StoredWeights) -> EarlyStart:
    """Begin it in threads, on the first GPU; nothing for an engine of another device, or of several. What fails is left
    to who then loads it."""
    config, artifact = stored.config, stored.artifact
    degree = artifact.config.tensor_parallel_size * config.parallel.pipeline_parallel_size
    if artifact.device != "cuda" or degree > 1:
        return EarlyStart()

    def find() -> BlockLayout | None:
        if stored.is_baked:
            return baked_layout(artifact.folder / baked_table.DATA, baked_table.check(artifact.folder)["tensors"])
        if stored.tensors.checkpoint is None:
            return None
        return checkpoint_layout(stored.plan, stored.tensors.checkpoint)

    functions = CudaFunctions(artifact.pieces)
    functions.begin()
    # Engine cores that share experts each read others of them. Weights that sleep, or are offloaded, lie in memory of
    # their own.
    later = config.peers is not None or config.sleep.enable_sleep_mode or config.load.cpu_offload_gb > 0
    return EarlyStart(functions, None if later else EarlyWeights(find))
