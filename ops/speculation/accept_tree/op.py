"""accept_tree: which path of a tree of drafted tokens a step keeps, decided where its tokens were sampled."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


class TreeRows(NamedTuple):
    """What a step sampled: the arguments of `accept_drafts` of these names, for R rows, T tokens and S sequences."""

    tokens_R: Tensor
    row_slots_R: Tensor
    drafts_T: Tensor
    logits_indices_R: Tensor
    sequence_ids_T: Tensor
    query_start_loc: Tensor
    row_start_loc: Tensor
    slots_S: Tensor


def _cost(tokens_R: Tensor, slots_S: Tensor, path_NL: Tensor) -> Cost:
    return Cost(6 * nbytes(tokens_R) + (6 + path_NL.shape[1]) * nbytes(slots_S), 4 * tokens_R.numel())


@op(cost=_cost, mutates=("rejected_N", "path_NL"))
def accept_tree(
    rows: TreeRows, rejected_N: Tensor, path_NL: Tensor, parents: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Keep of each sequence the longest path from the root on which every draft is what the row before it sampled, and
    the token sampled after it.

    The arguments are as for `accept_drafts`. parents: of each node the one before it, -1 of node 0, the root; parents
    come first, and D is the longest path. A sequence verifies a tree where it has several rows and its first one has a
    slot; then row and token i of it are node i's: the root is the token last sampled, node i > 0 the draft there, and
    each row sampled what comes after its node with the random numbers of that place, the same for all nodes of one
    depth. So what is kept is what would be sampled without drafts, token by token. Of several children with the right
    token the first is taken. Of other sequences the last row is kept.

    Returns, as if the kept rows were the first ones of each tree: tokens_R and the rows that they come from, kept ones
    in their order; row_slots_R with the scrap slot but for each sequence's last kept row; the same with the slot in all
    kept rows; how many are kept [S], 0 for sequences without rows; how many drafts one after the other there were [S],
    up to the first depth without any; path [S, D + 1]: the node at each depth that is kept, from the root, and after
    these d at depth d. Written at slots_S: rejected_N [N], how many of D + 1 tokens are not kept, 0 without a tree;
    path_NL [N, D + 2], that path, and in the last column the place of the newest kept token in the step, or in the
    path. Of padding all are unspecified. Source: Cai et al. 2024 (Medusa), Miao et al. 2024 (SpecInfer).
    """
    tokens_R, row_slots_R, drafts_T, _, _, query_start_loc, row_start_loc, _ = rows
    R, T, nodes, scrap = tokens_R.shape[0], drafts_T.shape[0], len(parents), rejected_N.shape[0] - 1
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    levels, device = max(depths), tokens_R.device
    first_S, rows_S = row_start_loc[:-1].long(), (row_start_loc[1:] - row_start_loc[:-1]).long()
    # Rows and tokens after the last one are looked at, too.
    slots_R = torch.cat([row_slots_R, row_slots_R.new_full((1,), scrap)])
    sampled_R, draft_T = (torch.cat([t, t.new_full((1,), -1)]) for t in (tokens_R, drafts_T))
    tree_S = (rows_S > 1) & (slots_R[first_S] != scrap)
    node_N = torch.arange(nodes, device=device)
    sampled_SN = sampled_R[(first_S[:, None] + node_N).clamp(max=R)]
    draft_SN = draft_T[(query_start_loc[:-1].long()[:, None] + node_N).clamp(max=T)]
    kept, there, right = [tree_S], [tree_S], [tree_S]
    kept_S, drafted_S = (rows_S > 0).long(), torch.zeros_like(rows_S)
    path = [torch.zeros_like(rows_S)]
    for node in range(1, nodes):
        parent = parents[node]
        right.append((draft_SN[:, node] == sampled_SN[:, parent]) & (sampled_SN[:, parent] >= 0))
        on_S = kept[parent] & right[node]
        for other in range(1, node):
            if parents[other] == parent:
                on_S = on_S & ~right[other]
        kept.append(on_S)
        there.append(there[parent] & (draft_SN[:, node] >= 0))
    for depth in range(1, levels + 1):
        at = [node for node in range(nodes) if depths[node] == depth]
        any_S, drafts_S, node_S = kept[at[0]], there[at[0]], torch.full_like(rows_S, depth)
        for node in at:
            any_S, drafts_S = any_S | kept[node], drafts_S | there[node]
            node_S = torch.where(kept[node], node, node_S)
        kept_S, drafted_S = kept_S + any_S.long(), drafted_S + drafts_S.long()
        path.append(node_S)
    return as_one_run(rows, rejected_N, path_NL, torch.stack(path, -1), tree_S, kept_S, drafted_S)


@accept_tree.fake(traceable=True)
def one_run_like(
    tokens_R: Tensor, slots_S: Tensor, path_NL: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tensors such as `as_one_run` returns."""
    (R,), (S,), levels = tokens_R.shape, slots_S.shape, path_NL.shape[1] - 2
    from_R, newest_R, kept_R = (tokens_R.new_empty(R, dtype=torch.int32) for _ in range(3))
    kept_S, drafted_S = (slots_S.new_empty(S, dtype=torch.int32) for _ in range(2))
    return tokens_R.new_empty(R), from_R, newest_R, kept_R, kept_S, drafted_S, kept_S.new_empty(S, levels + 1)


def as_one_run(
    rows: TreeRows,
    rejected_N: Tensor,
    path_NL: Tensor,
    path_SD: Tensor,
    tree_S: Tensor,
    kept_S: Tensor,
    drafted_S: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `accept_tree` returns and writes, from the path that is kept, which sequences have a tree, and how many
    tokens are kept and drafts were there."""
    tokens_R, row_slots_R, _, logits_indices_R, sequence_ids_T, query_start_loc, row_start_loc, slots_S = rows
    R, levels, scrap = tokens_R.shape[0], path_SD.shape[1] - 1, rejected_N.shape[0] - 1
    first_S, rows_S = row_start_loc[:-1].long(), (row_start_loc[1:] - row_start_loc[:-1]).long()
    count_S = (query_start_loc[1:] - query_start_loc[:-1]).long()
    rejected_S = torch.where(tree_S, levels + 1 - kept_S, 0)
    place_S = torch.where(tree_S, kept_S - 1, count_S - 1).clamp(min=0)
    rejected_N.index_put_((slots_S.long(),), rejected_S.to(rejected_N.dtype))
    entry_SL = torch.cat([path_SD, place_S[:, None]], -1).to(path_NL.dtype)
    path_NL.index_put_((slots_S.long(),), entry_SL)

    sequence_R = sequence_ids_T.long()[logits_indices_R.long()]
    row_R = torch.arange(R, device=tokens_R.device)
    inner_R = row_R - first_S[sequence_R]
    node_R = path_SD[sequence_R, inner_R.clamp(0, levels)]
    on_path_R = tree_S[sequence_R] & (inner_R <= levels)
    from_R = torch.where(on_path_R, first_S[sequence_R] + node_R, row_R)
    from_R = torch.minimum(from_R, row_R.new_full((1,), R - 1)).clamp(min=0)  # of padding
    end_R = (first_S + torch.where(tree_S, kept_S, rows_S) - 1)[sequence_R]
    newest_R = torch.where(row_R == end_R, row_slots_R, scrap)
    kept_R = torch.where(row_R <= end_R, row_slots_R, scrap)
    int32 = torch.int32
    made = from_R.to(int32), newest_R.to(int32), kept_R.to(int32)
    return tokens_R[from_R], *made, kept_S.to(int32), drafted_S.to(int32), path_SD.to(int32)
