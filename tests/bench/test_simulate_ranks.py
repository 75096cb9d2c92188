"""The model of steps on several GPUs against figures measured on two and four H200s, to which nothing is fitted. On
four, ranks gathered all logits."""

from __future__ import annotations

import pytest

from bench.record import read
from graphllm.ir.registry import load_ops, load_passes
from tests.tiers import thorough


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    load_ops()
    load_passes()


@pytest.mark.parametrize(
    ("shape", "ranks", "count", "error"),
    [
        ("llama3.1-8b", 2, 6, 0.1),
        thorough("llama3-70b", 2, 3, 0.1),
        thorough("llama3.1-8b", 4, 6, 0.13),  # 32 and 64 rows; a layer's matrices are small there
        thorough("llama3-70b", 4, 4, 0.11),
    ],
)
def test_gpus_as_measured(shape: str, ranks: int, count: int, error: float) -> None:
    from bench.cases.host import simulate_ranks as simulation

    stored = read("xeon-avx512", "simulate_ranks")["rates"]
    rates = simulation.Rates(
        stored["bandwidth"], stored["arithmetic"], 1e-6 * stored["begin us"], 1e12 * stored["attention TFLOP/s"]
    )
    measured = read(f"h200-x{ranks}", f"gpu_table_tp{ranks}")
    model, sums = simulation.Model(shape, ranks, gathers=ranks == 4), simulation.Sums()
    rows = simulation.rows_of(f"{shape} tp{ranks}", measured)
    assert len(rows) == count
    for row, ms in rows.items():
        found = 1e3 * simulation.seconds(model, rates, sums, simulation.row_step(model, row))
        assert found == pytest.approx(ms, rel=error), row


def test_what_ranks_share() -> None:
    """Half of the weights but the norms on each of two; a sum after every o and down projection, and the embedding."""
    from bench.cases.host import simulate_ranks as simulation

    one, two = (simulation.Model("llama3.1-8b", ranks) for ranks in (1, 2))
    assert two.weights == pytest.approx(one.weights / 2, rel=1e-3)
    step = two.step(1, 64, 256)
    sums = [(kernel.bytes, n) for kernel, n in step.items() if kernel.kind == "all_reduce"]
    assert sums == [(2 * 64 * 4096, 65)]
    gathering = simulation.Model("llama3.1-8b", 2, gathers=True).step(1, 64, 256)
    of_logits = [
        {kernel.kind: (kernel.bytes, n) for kernel, n in made.items() if kernel.kind in ("tell", "all_gather")}
        for made in (step, gathering)
    ]
    assert of_logits == [{"tell": (simulation.TOLD, 1)}, {"all_gather": (2 * 64 * 128256 // 2, 1)}]
    flops = [sum(k.flops * n for k, n in m.step(1, 64, 256).items() if k.kind == "product") for m in (one, two)]
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336  # q, k, v; o; gate, up, down
    assert flops[0] == 2 * 64 * (32 * layer + 4096 * 128256)
    assert flops[1] == flops[0] / 2
