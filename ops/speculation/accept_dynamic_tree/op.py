"""accept_dynamic_tree: which path of a tree of drafted tokens a step keeps, where each sequence has another tree."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.speculation.accept_tree.op import TreeRows, as_one_run, one_run_like


def _cost(tokens_R: Tensor, slots_S: Tensor, path_NL: Tensor, bits_SM: Tensor) -> Cost:
    nodes = bits_SM.numel()
    return Cost(6 * nbytes(tokens_R) + (6 + path_NL.shape[1]) * nbytes(slots_S) + 16 * nodes, nodes * bits_SM.shape[1])


@op(cost=_cost, mutates=("rejected_N", "path_NL"))
def accept_dynamic_tree(
    rows: TreeRows,
    rejected_N: Tensor,
    path_NL: Tensor,
    parents_SM: Tensor,
    bits_SM: Tensor,
    depths_SM: Tensor,
    levels: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`accept_tree` with a tree of M nodes for each sequence.

    parents_SM [S, M] int32: of each node the one before it, which comes first; of node 0, the root, anything. bits_SM
    [S, M] int64: bit j is set where node j is on the path to the node, its own one included. depths_SM [S, M] int32: of
    the root 0, at most levels, D. Of sequences that verify none these may be anything. The other arguments and what is
    returned and written are as for `accept_tree`.
    """
    tokens_R, row_slots_R, drafts_T, _, _, query_start_loc, row_start_loc, _ = rows
    R, T, M, scrap = tokens_R.shape[0], drafts_T.shape[0], parents_SM.shape[1], rejected_N.shape[0] - 1
    first_S, rows_S = row_start_loc[:-1].long(), (row_start_loc[1:] - row_start_loc[:-1]).long()
    # Rows and tokens after the last one are looked at, too.
    slots_R = torch.cat([row_slots_R, row_slots_R.new_full((1,), scrap)])
    sampled_R, draft_T = (torch.cat([t, t.new_full((1,), -1)]) for t in (tokens_R, drafts_T))
    tree_S = (rows_S > 1) & (slots_R[first_S] != scrap)
    node_M = torch.arange(M, device=tokens_R.device)
    parent_SM = parents_SM.long().clamp(0, M - 1)
    behind_SM = sampled_R[(first_S[:, None] + parent_SM).clamp(0, R)]
    draft_SM = draft_T[(query_start_loc[:-1].long()[:, None] + node_M).clamp(max=T)]
    inner_M = node_M > 0
    right_SM = (draft_SM == behind_SM) & (behind_SM >= 0) & inner_M
    earlier_SMM = right_SM[:, None, :] & (parent_SM[:, None, :] == parent_SM[:, :, None]) & (node_M < node_M[:, None])
    on_SM = (right_SM & ~earlier_SMM.any(-1)) | ~inner_M
    one_M = torch.ones_like(node_M) << node_M
    kept_SM = _all_set(bits_SM, on_SM, one_M) & tree_S[:, None]
    there_SM = _all_set(bits_SM, (draft_SM >= 0) | ~inner_M, one_M) & tree_S[:, None]
    kept_S = torch.where(tree_S, kept_SM.sum(-1), (rows_S > 0).long())
    drafted_S = torch.where(there_SM, depths_SM, 0).amax(-1).long()
    depth_D = torch.arange(levels + 1, device=tokens_R.device)
    at_SDM = kept_SM[:, None, :] & (depths_SM[:, None, :] == depth_D[:, None])
    path_SD = torch.where(at_SDM.any(-1), torch.where(at_SDM, node_M, 0).sum(-1), depth_D)
    return as_one_run(rows, rejected_N, path_NL, path_SD, tree_S, kept_S, drafted_S)


accept_dynamic_tree.fake(traceable=True)(one_run_like)


def _all_set(bits_SM: Tensor, which_SM: Tensor, one_M: Tensor) -> Tensor:
    """Whether all nodes on the path to each one are among those."""
    set_S = torch.where(which_SM, one_M, 0).sum(-1)
    return (bits_SM & set_S[:, None]) == bits_SM
