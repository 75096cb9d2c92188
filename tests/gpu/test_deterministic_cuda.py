"""Deterministic mode on a GPU: rows of products and attention that are bitwise equal in every batch, whatever bucket
serves it, and random batches of requests through the engine, on a model of real widths."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
from graphllm.config import Bucket, EngineArgs  # noqa: E402
from graphllm.host.machine import detect_target  # noqa: E402
from graphllm.ir.op import CallSite, Op  # noqa: E402
from graphllm.ir.registry import load_ops  # noqa: E402
from graphllm.ir.testing.check import relative_error  # noqa: E402
from tests.engine.harness import open_core  # noqa: E402
from tests.engine.test_deterministic import Cores, check  # noqa: E402

OPS = load_ops()
# Rows of a step, and the bucket that serves it.
STEPS = (
    (1030, Bucket("mixed", 1025, 8192)), (700, Bucket("mixed", 513, 1024)), (300, Bucket("mixed", 257, 512)),
    (200, Bucket("mixed", 2, 256)), (100, Bucket("decode", 65, 128)), (50, Bucket("decode", 33, 64)),
    (31, Bucket("decode", 17, 32)), (15, Bucket("decode", 2, 16)), (2, Bucket("decode", 2, 16)),
    (1, Bucket("decode", 1, 1)),
)  # fmt: skip
LAYERS = {  # of Llama-3.1-8B, Qwen3-0.6B and Qwen2.5-0.5B: the op, outputs, inputs, what joins
    "llama qkv": ("fused_linear", 6144, 4096, ""),
    "llama o": ("linear_add_norm", 4096, 4096, ""),
    "llama gate": ("fused_linear", 28672, 4096, "gated"),
    "llama down": ("linear_add_norm", 4096, 14336, ""),
    "qwen3 qkv": ("fused_linear", 4096, 1024, "norm_I"),
    "qwen3 o": ("linear_add_norm", 1024, 2048, ""),
    "qwen3 gate": ("fused_linear", 6144, 1024, "gated"),
    "qwen3 down": ("linear_add_norm", 1024, 3072, ""),
    "qwen2 qkv": ("fused_linear", 1152, 896, "bias_O"),
    "qwen2 down": ("fused_linear", 896, 4864, "residual_TN"),
}
HEADS = {  # query heads, KV heads, head size, and more arguments
    "llama": (32, 8, 128, {}),
    "qwen3": (16, 8, 128, {"norm": True}),
    "qwen2": (14, 2, 64, {}),
    "window": (32, 8, 128, {"window": 700}),
    "phi3": (32, 32, 96, {}),
    "softcap": (8, 4, 128, {"softcap": 30.0}),
}


def _site(op: Op, arguments: dict[str, Any], bucket: Bucket) -> CallSite:
    tokens = next(iter(arguments.values())).shape[0]

    def largest(size: int | torch.SymInt) -> int:
        return bucket.hi if size == tokens else int(size)

    return CallSite(op.bind((), arguments), detect_target("cuda"), bucket, largest, deterministic=True)


def _draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(torch.bfloat16)


def _wide(arguments: dict[str, Any]) -> dict[str, Any]:
    return {n: v.double() if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}


@pytest.mark.parametrize("layer", LAYERS)
def test_rows_of_products_are_those_of_any_other_batch(layer: str) -> None:
    """Rows alone, at other places, and by all launch constants that any bucket may choose."""
    name, out, inner, joined = LAYERS[layer]
    op, most = OPS[name], STEPS[0][0] + 37
    torch.manual_seed(0)
    x, weight = _draw(most, inner), _draw(out, inner, scale=inner**-0.5)
    residual, of_out, of_inner = _draw(most, out), _draw(out), _draw(inner)
    whole: tuple[torch.Tensor, ...] = ()
    tried = 0
    for (rows, bucket), first in ((step, first) for step in STEPS for first in (0, 37)):
        given: dict[str, Any] = {"x_TI": x[first : first + rows], "weight_OI": weight}
        if name == "linear_add_norm":
            given |= {"residual_TO": residual[first : first + rows], "norm_O": of_out, "eps": 1e-5}
        further = {"gated": True, "norm_I": of_inner, "bias_O": of_out, "residual_TN": residual[first : first + rows]}
        given |= {joined: further[joined]} if joined else {}
        given |= {"eps": 1e-6} if joined == "norm_I" else {}
        site = _site(op, given, bucket)
        found = [
            (impl, config)
            for impl in op.impls.values()
            if impl.device == "cuda" and impl.supports(site)
            for config in impl.configs(site)
            if impl.row_order(site, config)
        ]
        assert found
        for impl, config in found:
            made = impl.fn(**site.args, **config)
            made = made if isinstance(made, tuple) else (made,)
            if not whole:
                exact = op.reference(**_wide(dict(site.args)))
                for own, true in zip(made, exact if isinstance(exact, tuple) else (exact,), strict=True):
                    assert relative_error(own, true) < 8e-3
                whole = made
            same = [torch.equal(own[: len(w) - first], w[first : first + rows])
                    for own, w in zip(made, whole, strict=True)]  # fmt: skip
            assert all(same), (impl.name, dict(config), rows, first)
            tried += 1
    assert tried > 30


def test_products_that_start_early_read_their_own_weights() -> None:
    """Kernels as an artifact starts them, in a graph: each makes descriptors while programs of the last one still read
    by theirs. Also after a kernel of Inductor, which has Triton ask for memory that the last launch may have, too."""
    import triton

    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    torch.manual_seed(0)
    op, impl, bucket = OPS["fused_linear"], OPS["fused_linear"].impls["gluon_ordered"], Bucket("mixed", 257, 1024)
    x, weights = _draw(700, 1024), [_draw(out, 1024, scale=1024**-0.5) for out in (4096, 6144, 1024, 3072) * 3]
    sites = [_site(op, {"x_TI": x, "weight_OI": weight}, bucket) for weight in weights]

    def run() -> list[torch.Tensor]:
        return [impl.fn(**site.args, **impl.configs(site)[0]) for site in sites]

    alone = []
    for site in sites:
        alone.append(impl.fn(**site.args, **impl.configs(site)[0]))
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        together = run()
    for replay in range(100):
        graph.replay()
        for product, (own, first) in enumerate(zip(together, alone, strict=True)):
            differ = (own != first).nonzero()
            assert not len(differ), (replay, product, len(differ), differ.aminmax(dim=0))


def test_rows_are_sampled_as_in_any_other_batch() -> None:
    """Alone, and beside rows whose logits are edited, which makes them float32 for all."""
    torch.manual_seed(0)
    impl, S = OPS["sample"].impls["triton_sample"], 500
    logits = _draw(S, 32000, scale=3.0)
    ways = torch.tensor([(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.8, 0, 0.9, 0.0), (0.9, 40, 0.95, 0.0),
                         (1.1, 0, 1.0, 0.05)], device="cuda").repeat(S // 5, 1)  # fmt: skip
    number = torch.arange(S, device="cuda")
    settings = {"temperature_S": ways[:, 0], "top_k_S": ways[:, 1].int(), "top_p_S": ways[:, 2], "min_p_S": ways[:, 3],
                "seed_S": number, "sample_index_S": number.int()}  # fmt: skip

    def draw(rows: slice, dtype: torch.dtype) -> torch.Tensor:
        given = {n: t[rows].contiguous() for n, t in settings.items()}
        site = _site(OPS["sample"], {"logits_SV": logits[rows].to(dtype), **given}, Bucket("decode", 1, 512))
        return impl.fn(**site.args, **impl.configs(site)[0])

    whole = draw(slice(None), torch.bfloat16)
    assert torch.equal(draw(slice(None), torch.float32), whole)
    for first, count in ((0, 1), (2, 1), (3, 1), (4, 1), (7, 1), (100, 30), (401, 99)):
        assert torch.equal(draw(slice(first, first + count), torch.bfloat16), whole[first : first + count])


@pytest.mark.parametrize("heads", HEADS)
def test_rows_of_attention_are_those_of_any_other_batch(heads: str) -> None:
    """Prompts whole, divided at random, and their last tokens one by one, by one program or by several; and every step
    by all implementations that are said to give the same rows."""
    H, K, E, more = HEADS[heads]
    S, P, lengths = 2, 16, (2600, 1100)
    torch.manual_seed(0)
    q, k, v = (_draw(S, max(lengths), n, E) for n in (H, K, K))
    angle = torch.rand(S, max(lengths), E // 2, device="cuda") * 6
    norms = {"q_norm_E": _draw(E), "k_norm_E": _draw(E), "eps": 1e-6} if more.get("norm") else {}
    others = {n: value for n, value in more.items() if n != "norm"}
    op, columns = OPS["paged_attention"], 320  # a table that is longer than the contexts
    ranges = [impl for impl in op.impls.values() if impl.name.endswith("_ranges")]
    used: set[str] = set()

    def run(steps: list[list[tuple[int, int]]], number: int = 0, empty: int = 0) -> torch.Tensor:
        """Steps, each of so many tokens of sequences. number: of the launch constants. empty: sequences without a token
        in steps of single tokens."""
        cache = torch.zeros(S * columns, 2, K, P, E, dtype=torch.bfloat16, device="cuda")
        table = torch.randperm(S * columns, device="cuda").int().view(S, columns)
        out, done = torch.zeros_like(q), [0] * S
        for step in steps:
            single = all(n == 1 for _, n in step)
            none = empty if single else 0

            def rows(tensor: torch.Tensor, step: Any = step, none: int = none) -> torch.Tensor:
                parts = [tensor[s, done[s] : done[s] + n] for s, n in step]
                return torch.cat([*parts, tensor.new_zeros(none, *tensor.shape[2:])])

            def counts(numbers: list[int], none: int = none) -> torch.Tensor:
                return torch.tensor([*numbers, *[0] * none])

            starts = torch.cat([torch.zeros(1), counts([n for _, n in step]).cumsum(0)]).int().cuda()
            given = {
                "q_THE": rows(q), "k_TKE": rows(k), "v_TKE": rows(v), "kv_cache": cache,
                "block_table": table[counts([s for s, _ in step]).cuda()], "query_start_loc": starts,
                "seq_lens": counts([done[s] + n for s, n in step]).int().cuda(), "scale": E**-0.5,
                "cos_TF": rows(angle).cos(), "sin_TF": rows(angle).sin(), **norms, **others,
            }  # fmt: skip
            size = len(step) + none
            site = _site(op, given, Bucket("decode", min(size, 2), size) if single else Bucket("mixed", 2, 8192))
            tokens, results = [n for _, n in step], {}
            for impl in ranges:
                if impl.supports(site):
                    configs = impl.configs(site)
                    config = configs[number % len(configs)]
                    assert impl.row_order(site, config) == "ranges of 256, tiles of 64"
                    results[impl.name] = impl.fn(**site.args, **config)[: sum(tokens)]
            used.update(results)
            result = results["triton_ranges"]
            for name, own in results.items():
                differ = (own != result).flatten(1).any(1).nonzero().flatten().tolist()
                assert not differ, (name, step, differ[:9])
            for (s, n), part in zip(step, result.split(tokens), strict=True):
                out[s, done[s] : done[s] + n] = part
                done[s] += n
        return out

    draw = random.Random(0)
    whole = run([[(s, n)] for s, n in enumerate(lengths)])
    assert torch.equal(run([list(enumerate(lengths))], 1)[0], whole[0])
    for trial, empty in enumerate((0, 6, 100)):
        left, steps = [n - 12 for n in lengths], []
        while any(left):
            step = [(s, min(n, draw.choice((1, 3, 100, 513, 900)))) for s, n in enumerate(left) if n]
            steps.append(step)
            for s, n in step:
                left[s] -= n
        steps += [[(0, 1), (1, 1)]] * 5 + [[(0, 5)], [(1, 1)], [(1, 4)], [(0, 1)], [(0, 1), (1, 2)]]
        found = run(steps, trial, empty)
        for s, n in enumerate(lengths):
            differ = (found[s, :n] != whole[s, :n]).flatten(1).any(1).nonzero().flatten().tolist()
            assert not differ, (trial, s, differ[:9])
    assert ("gluon_ranges" in used) == (heads not in ("phi3", "softcap"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers as wide as those of Qwen3-0.6B."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=32000, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[False, True], ids=["", "tuned"])
def cores(request: pytest.FixtureRequest, wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cores]:
    from graphllm.compile.pipeline import compile_model
    from graphllm.loading.artifact.resolve import compile_config
    from graphllm.loading.checkpoint.source import open_source

    source = open_source(wide)
    wanted = EngineArgs(
        target="cuda", max_model_len=2048, max_num_seqs=40, max_num_batched_tokens=2048, deterministic=True,
        tune=request.param,
    )  # fmt: skip
    place = tmp_path_factory.mktemp("compiled") / "artifact"
    compile_model(source.config, source.tensors, compile_config(source.config, wanted), place)
    made = Cores(
        open_core(wide, place, pages=300, enable_prefix_caching=False),
        [open_core(wide, place, pages=pages, long_prefill_token_threshold=chunk)
         for pages, chunk in ((900, 0), (126, 0), (126, 61), (126, 211))],
    )  # fmt: skip
    yield made
    made.close()


def test_requests_get_what_they_get_alone_in_500_batches(cores: Cores) -> None:
    assert sum(check(cores, seed, 50, most=20, longest=1800) for seed in range(5))  # requests that were preempted
