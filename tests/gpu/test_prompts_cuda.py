"""Attention of prompts on a GPU where the cache holds anything: what no row sees may be NaN."""

from __future__ import annotations

import pytest
import torch

from graphllm.config import Bucket
from graphllm.host.machine import detect_target
from graphllm.ir.op import CallSite
from graphllm.ir.registry import load_ops
from graphllm.ir.testing.check import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SEQUENCES = [(1, 400), (0, 0), (130, 130), (2, 77), (300, 1025), (64, 64), (3, 700), (37, 300)]  # new tokens, length


def _step(P: int, heads: tuple[int, int, int], window: int) -> dict[str, object]:
    """A step whose cache is NaN wherever no token looks, and whose blocks before a window belong to nobody."""
    H, K, E = heads
    generator = torch.Generator("cuda").manual_seed(7)
    T, S = sum(n for n, _ in SEQUENCES), len(SEQUENCES)
    blocks = [-(-length // P) for _, length in SEQUENCES]
    draw = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    qkv = torch.randn(T, (H + 2 * K) * E, **draw)
    q, k, v = (x.unflatten(1, (-1, E)) for x in qkv.split([H * E, K * E, K * E], dim=1))
    cache = torch.full((sum(blocks) + 1, 2, K, P, E), float("nan"), device="cuda", dtype=torch.bfloat16)
    table = torch.zeros(S, max(blocks), dtype=torch.int32)
    free = iter((1 + torch.randperm(sum(blocks))).tolist())
    for s, (n, length) in enumerate(SEQUENCES):
        first = max(0, length - n - window + 1) if window else 0
        for i in range(first // P, blocks[s]):
            table[s, i] = next(free)
            begin = max(first, i * P)
            known = torch.arange(begin, max(begin, min(length - n, (i + 1) * P))) % P
            cache[int(table[s, i])][:, :, known] = torch.randn(2, K, len(known), E, **draw)
    starts = torch.tensor([0, *(n for n, _ in SEQUENCES)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return {
        "q_THE": q, "k_TKE": k, "v_TKE": v, "kv_cache": cache, "block_table": table.cuda(),
        "query_start_loc": starts.cuda(), "seq_lens": torch.tensor([n for _, n in SEQUENCES], dtype=torch.int32).cuda(),
        "scale": E**-0.5, "window": window,
    }  # fmt: skip


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("heads", [(8, 2, 128), (14, 2, 64), (4, 4, 128), (16, 2, 256)])
@pytest.mark.parametrize("P", [16, 64, 256])
def test_what_no_row_sees_may_be_anything(P: int, heads: tuple[int, int, int], window: int) -> None:
    op = load_ops()["paged_attention"]
    args = op.bind((), _step(P, heads, window))
    wide = {n: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in args.items()}
    expected = op.reference(**wide)
    assert not expected.isnan().any()
    site = CallSite(args, detect_target("cuda"), Bucket("mixed", 2, 1024))
    impls = [i for i in op.impls.values() if i.device == "cuda" and i.supports(site)]
    assert impls
    for impl in impls:
        for config in impl.configs(site):
            given = {n: v.clone() if n == "kv_cache" else v for n, v in args.items()}
            assert relative_error(impl.fn(**given, **config), expected) < 8e-3, (impl.name, config)
