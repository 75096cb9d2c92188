"""Time the C++ kernels of recurrent layers beside the functions of transformers that compute the same in torch.

    python -m bench cpu_recurrent [--dtypes float32,bfloat16] [--turns 7]

A layer of published sizes: Mamba-2.8B's scan, Mamba2's of 24 heads (130M), Qwen3-Next's delta net, and a convolution of
8,192 channels. prompt: 1,024 tokens of one sequence; decode: a token of each of 8 sequences, which go on from states
that a prompt has left. ms: medians, both in turn. The work is real: results agree, and states are no zeros.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.harness import Case
from graphllm.ops.recurrent.causal_conv import causal_conv
from graphllm.ops.recurrent.gated_delta import gated_delta
from graphllm.ops.recurrent.selective_scan import selective_scan
from graphllm.ops.recurrent.slots import Slots
from graphllm.ops.recurrent.ssd_scan import ssd_scan

CASES = [("cpu_recurrent", {"dtypes": ("float32", "bfloat16"), "turns": 7, "tokens": 1024, "sequences": 8})]
HELP = {"tokens": "of a prompt", "sequences": "that decode"}
PACKAGES = ("transformers",)
D, N = 5120, 16  # Mamba-2.8B
H, P, STATE = 24, 64, 128  # Mamba2-130M
G, VALUES, HEAD = 16, 32, 128  # Qwen3-Next
CHANNELS, TAPS = 8192, 4
_CLOSE = 0.05  # relative, of bfloat16 results


class Kind(NamedTuple):
    """An op's work for rows of inputs.

    inputs: drawn for so many rows.
    state: of a sequence.
    ours: takes inputs, state and slots.
    theirs: takes inputs [1, T, ...] and a state of each sequence, or none for zeros, and gives [T, ...].
    """

    inputs: Callable[[int, torch.dtype], dict[str, Tensor]]
    state: tuple[int, ...]
    ours: Callable[[dict[str, Tensor], Tensor, Slots], Tensor]
    theirs: Callable[[dict[str, Tensor], Tensor | None], Tensor]


def kinds() -> dict[str, Kind]:
    """Of each op."""
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan, mamba2_selective_state_update
    from transformers.models.qwen3_next.modeling_qwen3_next import (
        torch_chunk_gated_delta_rule,
        torch_recurrent_gated_delta_rule,
    )

    conv, ssd, delta, scan = (op.impls["cpu"].fn for op in (causal_conv, ssd_scan, gated_delta, selective_scan))

    def conv_theirs(a: dict[str, Tensor], state: Tensor | None) -> Tensor:
        rows = a["x"].T[None] if state is None else torch.cat([state.to(a["x"]).mT, a["x"][..., None]], -1)
        pad = TAPS - 1 if state is None else 0
        found = torch.nn.functional.conv1d(rows, a["weight"][:, None], groups=CHANNELS, padding=pad)
        found = torch.nn.functional.silu(found)
        return found[0, :, : len(a["x"])].T if state is None else found[..., 0]

    def scan_theirs(a: dict[str, Tensor], state: Tensor | None) -> Tensor:
        given = {n: a[n].float() for n in ("x", "dt", "B", "C")}
        if state is None:
            rows = [given[n].T[None] for n in ("x", "dt")]
            y = mamba_selective_scan(
                *rows, a["A"], given["B"].T[None], given["C"].T[None], D=a["D"], delta_softplus=True
            )
            return y[0].T
        dt = torch.nn.functional.softplus(given["dt"])
        state = state * torch.exp(dt[..., None] * a["A"]) + (dt * given["x"])[..., None] * given["B"][:, None]
        return (state * given["C"][:, None]).sum(-1) + a["D"] * given["x"]

    def ssd_theirs(a: dict[str, Tensor], state: Tensor | None) -> Tensor:
        if state is None:
            rows = (a[n][None] for n in ("B", "C"))
            return mamba2_chunk_scan(a["x"][None], a["dt"][None], a["A"], *rows, 256, D=a["D"], dt_softplus=True)[0]
        wide = [a["dt"][..., None].expand(-1, -1, P), a["A"][:, None, None].expand(-1, P, STATE)]
        return mamba2_selective_state_update(
            state.clone(), a["x"], *wide, a["B"], a["C"], a["D"][:, None].expand(-1, P), dt_softplus=True
        )

    def delta_theirs(a: dict[str, Tensor], state: Tensor | None) -> Tensor:
        one = state is not None
        rule = torch_recurrent_gated_delta_rule if one else torch_chunk_gated_delta_rule
        names = ("q", "k", "v", "g", "beta")
        q, k, v, g, beta = ((a[n][:, None] if one else a[n][None]) for n in names)
        q, k = (x.repeat_interleave(VALUES // G, 2) for x in (q, k))
        initial = None if state is None else state.mT
        found = rule(q, k, v, g=g, beta=beta, initial_state=initial, output_final_state=False,
                     use_qk_l2norm_in_kernel=True)[0]  # fmt: skip
        return found[:, 0] if one else found[0]

    def drawn(shapes: dict[str, tuple[int, ...]]) -> Callable[[int, torch.dtype], dict[str, Tensor]]:
        return lambda T, dtype: {
            n: torch.randn([T if s == -1 else s for s in shape]).to(dtype) for n, shape in shapes.items()
        }

    def with_rates(make: Callable[[int, torch.dtype], dict[str, Tensor]], *shape: int) -> Any:
        return lambda T, dtype: make(T, dtype) | {"A": -torch.exp(torch.randn(shape)), "D": torch.randn(shape[0])}

    def of_delta(T: int, dtype: torch.dtype) -> dict[str, Tensor]:
        made = drawn({"q": (-1, G, HEAD), "k": (-1, G, HEAD), "v": (-1, VALUES, HEAD)})(T, dtype)
        return made | {"g": -torch.rand(T, VALUES) / 8, "beta": torch.rand(T, VALUES)}

    heads = {"x": (-1, H, P), "dt": (-1, H), "B": (-1, 1, STATE), "C": (-1, 1, STATE)}
    channels = {"x": (-1, D), "dt": (-1, D), "B": (-1, N), "C": (-1, N)}
    return {
        "causal_conv": Kind(
            drawn({"x": (-1, CHANNELS), "weight": (CHANNELS, TAPS)}), (TAPS - 1, CHANNELS),
            lambda a, state, at: conv(
                x_TD=a["x"], weight_DW=a["weight"], state=state, **at._asdict(), bias_D=None, activation="silu"
            ),
            conv_theirs,
        ),
        "selective_scan": Kind(
            with_rates(drawn(channels), D, N), (D, N),
            lambda a, state, at: scan(
                x_TD=a["x"], dt_TD=a["dt"], A_DN=a["A"], B_TN=a["B"], C_TN=a["C"], D_D=a["D"], dt_bias_D=None,
                state=state, **at._asdict(),
            ),
            scan_theirs,
        ),
        "ssd_scan": Kind(
            with_rates(drawn(heads), H), (H, P, STATE),
            lambda a, state, at: ssd(
                x_THP=a["x"], dt_TH=a["dt"], A_H=a["A"], B_TGN=a["B"], C_TGN=a["C"], D_H=a["D"], dt_bias_H=None,
                dt_min=0.0, dt_max=0.0, state=state, **at._asdict(),
            ),
            ssd_theirs,
        ),
        "gated_delta": Kind(
            of_delta, (VALUES, HEAD, HEAD),
            lambda a, state, at: delta(
                q_TGK=a["q"], k_TGK=a["k"], v_THV=a["v"], g=a["g"], beta_TH=a["beta"], state=state, **at._asdict(),
                scale=HEAD**-0.5, norm_eps=1e-6,
            ),
            delta_theirs,
        ),
    }  # fmt: skip


def at(sequences: int, tokens: int) -> Slots:
    """The first entries of a state, with so many tokens each."""
    starts = torch.arange(0, sequences * tokens + 1, tokens, dtype=torch.int32)
    return Slots(starts, torch.arange(sequences, dtype=torch.int32), torch.zeros(sequences, dtype=torch.int32))


def timed(
    kind: Kind, given: dict[str, Tensor], state: Tensor, where: Slots, before: Tensor | None, turns: int
) -> dict[str, float]:
    """Medians in ms, in turn. before: the states that transformers begins with."""
    calls = {"ours": lambda: kind.ours(given, state, where), "transformers": lambda: kind.theirs(given, before)}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if turn:
                taken[name].append((time.perf_counter() - begin) * 1e3)
    return {f"{name} ms": round(statistics.median(values), 3) for name, values in taken.items()}


@torch.no_grad()
def run(case: Case) -> Iterator[dict[str, Any]]:
    """Op by op."""
    for name, kind in kinds().items():
        for dtype in (getattr(torch, dtype) for dtype in case.dtypes):
            kept = dtype if name == "causal_conv" else torch.float32
            state = torch.zeros(case.sequences + 1, 1, *kind.state, dtype=kept)
            prompt = kind.inputs(case.tokens, dtype)
            check(kind.ours(prompt, state, at(1, case.tokens)), kind.theirs(prompt, None), dtype)
            state[:] = state[0].clone()
            assert state.float().std() > 0, "the work is not real: the state is zeros"
            step = kind.inputs(case.sequences, dtype)
            if name == "causal_conv":
                step["weight"] = prompt["weight"]
            before = state[: case.sequences, 0].clone()
            check(kind.ours(step, state.clone(), at(case.sequences, 1)), kind.theirs(step, before), dtype)
            rows = {
                "prompt": timed(kind, prompt, state, at(1, case.tokens), None, case.turns),
                "decode": timed(kind, step, state, at(case.sequences, 1), before, case.turns),
            }
            for row in rows.values():
                row["times as fast"] = round(row["transformers ms"] / row["ours ms"], 1)
            yield {name: {str(dtype).removeprefix("torch."): rows}}


def check(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    """Both are of the same work."""
    ours, theirs = ours.float(), theirs.float()
    off = float((ours - theirs).norm() / theirs.norm())
    assert off < (_CLOSE if dtype == torch.bfloat16 else 1e-3), f"the work is not the same: off by {off:.2g}"
