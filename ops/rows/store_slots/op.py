"""store_slots: a row of each sequence that a later run reads by its slot."""

from __future__ import annotations

from torch import Tensor

from graphllm.ir import Cost, nbytes, op


@op(cost=lambda rows_SD: Cost(2 * nbytes(rows_SD), 0), mutates=("state_ND",))
def store_slots(rows_SD: Tensor, slots_S: Tensor, state_ND: Tensor) -> None:
    """Write rows_SD [S, D], or numbers [S], to state_ND [N, D] or [N], in its dtype, at the slots slots_S [S]. They
    differ but for the last one, the scrap one of padding, in which it is unspecified what stands."""
    state_ND.index_put_((slots_S.long(),), rows_SD.to(state_ND.dtype))
