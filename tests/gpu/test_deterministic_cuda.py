"""Deterministic mode on a GPU: rows of products and attention that are bitwise equal in every batch, and random batches
of requests through the engine, on a model of real widths."""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from harness import open_core  # noqa: E402
from test_deterministic import Cores, check  # noqa: E402

from graphllm.config import Bucket, EngineArgs  # noqa: E402
from graphllm.ir.op import CallSite  # noqa: E402
from graphllm.machine import detect_target  # noqa: E402
from graphllm.ops.fused_linear import fused_linear  # noqa: E402
from graphllm.ops.linear_add_norm import linear_add_norm  # noqa: E402
from graphllm.ops.paged_attention import paged_attention  # noqa: E402

ROWS = (1, 2, 7, 16, 33, 64, 129, 256, 300, 1024)


def _site(op: Any, arguments: dict[str, Any], bucket: Bucket) -> CallSite:
    return CallSite(op.bind((), arguments), detect_target("cuda"), bucket, deterministic=True)


def _draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(torch.bfloat16)


@pytest.mark.parametrize("op", [fused_linear, linear_add_norm], ids=lambda op: op.name)
@pytest.mark.parametrize(("out", "inner"), [(1024, 2048), (2048, 6144), (4096, 896), (4104, 4096)])
def test_rows_of_products_with_one_order_are_equal(op: Any, out: int, inner: int) -> None:
    """All launch constants, at all numbers of rows, that say that they sum in the same order."""
    torch.manual_seed(0)
    x, weight, residual = _draw(max(ROWS), inner), _draw(out, inner, scale=inner**-0.5), _draw(max(ROWS), out)
    impl, found = op.impls["triton_tile"], defaultdict(list)
    for rows in ROWS:
        given: dict[str, Any] = {"x_TI": x[:rows], "weight_OI": weight}
        if op is linear_add_norm:
            given |= {"residual_TO": residual[:rows], "norm_O": weight[:, 0].contiguous(), "eps": 1e-6}
        site = _site(op, given, Bucket("mixed", rows, rows))
        for config in impl.configs(site):
            results = impl.fn(**site.args, **config)
            results = results if isinstance(results, tuple) else (results,)
            found[impl.row_order(site, config)].append((rows, config, results))
    assert len(found) > 1
    for order, made in found.items():
        longest = max(made, key=lambda m: m[0])[2]
        for rows, config, results in made:
            for result, whole in zip(results, longest, strict=True):
                assert torch.equal(result, whole[:rows]), (order, rows, config)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (700, 0.0), (0, 30.0)])
def test_rows_of_attention_are_equal(window: int, softcap: float) -> None:
    """A prompt whole, divided at random, and its last tokens one by one, by one program or by several."""
    torch.manual_seed(0)
    H, K, E, P, lengths = 32, 8, 128, 16, (3000, 1500)
    S, L = len(lengths), max(lengths)
    q, k, v = (_draw(S, L, heads, E) for heads in (H, K, K))
    blocks = -(-L // P)
    impl = paged_attention.impls["triton_prefill"]

    def run(steps: list[list[tuple[int, int]]]) -> torch.Tensor:
        cache = torch.zeros(S * blocks, 2, K, P, E, dtype=torch.bfloat16, device="cuda")
        table = torch.randperm(S * blocks, device="cuda").int().view(S, blocks)
        out, done = torch.zeros_like(q), [0] * S
        for step in steps:
            parts = [torch.cat([t[s, done[s] : done[s] + n] for s, n in step]) for t in (q, k, v)]
            starts = torch.tensor([0, *(n for _, n in step)]).cumsum(0).int().cuda()
            ends = torch.tensor([done[s] + n for s, n in step]).int().cuda()
            own = table[[s for s, _ in step]].contiguous()
            names = ("q_THE", "k_TKE", "v_TKE", "kv_cache", "block_table", "query_start_loc", "seq_lens")
            given = dict(zip(names, (*parts, cache, own, starts, ends), strict=True))
            given |= {"scale": E**-0.5, "window": window, "softcap": softcap}
            decode = all(n == 1 for _, n in step)
            bucket = Bucket("decode", len(step), len(step)) if decode else Bucket("mixed", 2, 4096)
            site = _site(paged_attention, given, bucket)
            result = impl.fn(**site.args, **impl.configs(site)[0])
            for (s, n), rows in zip(step, result.split([n for _, n in step]), strict=True):
                out[s, done[s] : done[s] + n] = rows
                done[s] += n
        return out

    draw = random.Random(0)
    whole = run([[(s, n)] for s, n in enumerate(lengths)])
    for _ in range(4):
        left, steps = [n - 20 for n in lengths], []
        while any(left):
            step = [(s, min(n, draw.choice((1, 3, 100, 900)))) for s, n in enumerate(left) if n]
            steps.append(step)
            for s, n in step:
                left[s] -= n
        steps += [[(0, 1), (1, 1)]] * 15 + [[(0, 5)], [(1, 1)], [(1, 4)]]
        found = run(steps)
        for s, n in enumerate(lengths):
            assert torch.equal(found[s, :n], whole[s, :n])


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers as wide as real ones."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=32000, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tune", [False, True])
def test_requests_get_what_they_get_alone(tune: bool, wide: Path, tmp_path: Path) -> None:
    from graphllm.compile.pipeline import compile_model
    from graphllm.entrypoints.resolve import compile_config
    from graphllm.entrypoints.source import open_source

    source = open_source(wide)
    wanted = EngineArgs(
        target="cuda", max_model_len=256, max_num_seqs=16, max_num_batched_tokens=1024, deterministic=True, tune=tune
    )
    place = tmp_path / "artifact"
    compile_model(source.config, source.tensors, compile_config(source.config, wanted), place)
    cores = Cores(
        open_core(wide, place, pages=200, enable_prefix_caching=False),
        [open_core(wide, place, pages=pages, long_prefill_token_threshold=chunk)
         for pages, chunk in ((400, 0), (25, 0), (25, 7), (400, 3))],
    )  # fmt: skip
    try:
        for seed in range(5):
            check(cores, seed, 20)
    finally:
        cores.close()
