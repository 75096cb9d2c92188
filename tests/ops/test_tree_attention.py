"""What a node of a tree of drafts sees: the same as if only its path had been said, token by token."""

from __future__ import annotations

import pytest
import torch

from graphllm.config.token_tree import token_tree
from graphllm.ops.attention.paged_attention import paged_attention
from graphllm.ops.attention.paged_attention.cpu import cpu_paged_attention
from graphllm.ops.attention.paged_attention.operands import Paged, Rows, Scores
from graphllm.ops.speculation.keep_path import keep_path
from graphllm.ops.speculation.keep_path.cpu import cpu_keep_path

H, K, E, P, START = 4, 2, 32, 8, 21
TREE = token_tree("[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (0, 1, 2)]")


def _said(attend: object, tokens: list[int], rows: dict[str, torch.Tensor], window: int) -> torch.Tensor:
    """What the last of the tokens, rows of ``rows``, gets when they are computed one after the other."""
    blocks = -(-len(tokens) // P)
    cache, table = torch.zeros(blocks, 2, K, P, E, dtype=torch.float64), torch.arange(blocks, dtype=torch.int32)[None]
    if attend is cpu_paged_attention:
        cache = cache.float()
    for i, token in enumerate(tokens):
        given = {f"{n}_{shape}": rows[n][token : token + 1] for n, shape in (("q", "THE"), ("k", "TKE"), ("v", "TKE"))}
        starts, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([i + 1], dtype=torch.int32)
        where = {"kv_cache": cache, "block_table": table, "query_start_loc": starts, "seq_lens": lengths}
        out = attend(rows=Rows(**given), paged=Paged(**where), scores=Scores(0.3, window))  # type: ignore[operator]
    return out[0]


@pytest.mark.parametrize("window", [0, 2, 3, 9])
@pytest.mark.parametrize("attend", [paged_attention, cpu_paged_attention], ids=["reference", "cpu"])
def test_nodes_see_their_path(attend: object, window: int) -> None:
    torch.manual_seed(1)
    nodes, dtype = len(TREE.parents), torch.float32 if attend is cpu_paged_attention else torch.float64
    rows = {n: torch.randn(START + nodes, h, E, dtype=dtype) for n, h in (("q", H), ("k", K), ("v", K))}
    blocks = -(-(START + nodes) // P)
    cache, table = torch.full((blocks, 2, K, P, E), torch.nan, dtype=dtype), torch.arange(blocks).int()[None]
    for part, length in ((slice(START), START), (slice(START, None), START + nodes)):
        given = {f"{n}_{shape}": rows[n][part] for n, shape in (("q", "THE"), ("k", "TKE"), ("v", "TKE"))}
        bits = torch.tensor(TREE.ancestors if length > START else [-1] * START)
        where = {
            "kv_cache": cache, "block_table": table, "query_start_loc": torch.tensor([0, len(bits)]).int(),
            "seq_lens": torch.tensor([length]).int(),
        }  # fmt: skip
        out = attend(rows=Rows(**given), paged=Paged(**where), scores=Scores(0.3, window), ancestors_T=bits)  # type: ignore[operator]
    for node in range(nodes):
        path, at = [START + node], node
        while at:
            at = TREE.parents[at]
            path.insert(0, START + at)
        own = _said(attend, [*range(START), *path], rows, window)
        torch.testing.assert_close(out[node], own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keep", [keep_path, cpu_keep_path], ids=["reference", "cpu"])
def test_kept_rows_are_where_they_would_have_been(keep: object) -> None:
    cache = torch.arange(6 * P, dtype=torch.float32).view(6, 1, 1, P, 1).expand(6, 2, K, P, E).contiguous()
    before = cache[:, 0, 0, :, 0].flatten().tolist()
    table = torch.tensor([[3, 1, 5, 2]], dtype=torch.int32)
    starts, lengths = torch.tensor([0, 9], dtype=torch.int32), torch.tensor([START + 9], dtype=torch.int32)
    path, kept = torch.tensor([[0, 1, 5, 8]], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    keep(cache, table, starts, lengths, path, kept)  # type: ignore[operator]

    def at(position: int) -> int:
        return int(table[0, position // P]) * P + position % P

    expected = list(before)
    for d, node in enumerate((0, 1, 5, 8)):
        expected[at(START + d)] = before[at(START + node)]
    assert cache[:, 0, 0, :, 0].flatten().tolist() == expected
    assert (cache == cache[:, :1, :1, :, :1]).all()
