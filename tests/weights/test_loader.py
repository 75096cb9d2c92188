"""Loading: numbers against a naive reference, all misfits at once, memory within its bound, ties, random weights."""

from __future__ import annotations

import json
import queue
import struct
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from graphllm.ir.model import Model
from graphllm.ir.weight import Weight
from graphllm.weights.checkpoint.checkpoint import Checkpoint, WeightError
from graphllm.weights.loading import loader
from graphllm.weights.loading.loader import load_weights
from graphllm.weights.loading.random import random_weights
from graphllm.weights.loading.readers import Loading, Progress
from graphllm.weights.plan.evaluate import evaluate
from graphllm.weights.plan.expr import Each, Read, Slice, walk
from graphllm.weights.plan.plan import WeightPlan, make_plan
from graphllm.weights.plan.simplify import at_rank, simplify
from tests.artifacts import artifact_of
from tests.tiers import draws, thorough
from tests.waiting import until
from tests.weights.fakes import plan_of, small_reads

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def checkpoint_of(folder: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return Checkpoint.open(folder)


@st.composite
def a_weight(draw: st.DrawFn) -> tuple[Weight, dict[str, torch.Tensor], torch.Tensor]:
    """A weight of random parts, its checkpoint tensors, and what must come out in float64."""
    experts = draw(st.integers(1, 3)) if draw(st.booleans()) else None
    transpose = draw(st.booleans())
    width = draw(st.integers(1, 7))
    is_vector = experts is None and not transpose and draw(st.booleans())
    rows = draw(st.lists(st.integers(2, 9), min_size=1, max_size=3)) * (experts or 1)
    tail = () if is_vector else (width,)
    tensors: dict[str, torch.Tensor] = {}
    finished = []
    for i, n in enumerate(rows):
        part = torch.randint(-50, 50, (n, *tail), generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
        stored = part.T if transpose else part
        tensors[f"x{i}"] = stored.to(draw(st.sampled_from([*DTYPES.values(), torch.float64])))
        finished.append(part.double())
    whole = torch.cat(finished)
    names: tuple[str | tuple[str, ...], ...] = tuple(tensors)
    if experts is not None and len(rows) > 1:
        whole = whole.view(experts, -1, *tail)
    slice_rows = None
    if len(rows) == 1 and draw(st.booleans()):
        stored = tensors["x0"]
        a = draw(st.integers(0, stored.shape[0] - 1))
        slice_rows = (a, draw(st.integers(a + 1, stored.shape[0])))
        taken = stored[a : slice_rows[1]].double()
        whole = taken.T if transpose else taken
    if draw(st.booleans()):
        names = (("absent", cast(str, names[0])), *names[1:])
    segments = tuple(rows) if len(rows) > 1 else ()
    return Weight(tuple(whole.shape), names, segments, slice_rows, transpose), tensors, whole


NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])]


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=draws(50, 150), deadline=None)
@given(made=a_weight(), dtype=st.sampled_from(sorted(DTYPES)))
def test_against_a_naive_reference(
    tmp_path_factory: pytest.TempPathFactory,
    made: tuple[Weight, dict[str, torch.Tensor], torch.Tensor],
    dtype: str,
    device: str,
) -> None:
    weight, tensors, expected = made
    checkpoint = checkpoint_of(tmp_path_factory.getbasetemp(), tensors)
    with small_reads():
        loaded = load_weights(plan_of({"w": weight}, dtype), checkpoint, device)["embed.w"]
    assert loaded.device.type == device
    assert loaded.dtype == DTYPES[dtype]
    assert loaded.is_contiguous()
    torch.testing.assert_close(loaded.cpu().double(), expected, rtol=0, atol=0)


def test_layers_ties_values_and_progress(tmp_path: Path) -> None:
    tensors = {f"l{i}.{p}": torch.randn(4, 3) for i in range(3) for p in "qk"} | {"e": torch.randn(8, 3)}
    save_file({n: t for n, t in tensors.items() if "q" in n}, tmp_path / "1.safetensors")
    save_file({n: t for n, t in tensors.items() if "q" not in n}, tmp_path / "2.safetensors")
    index = ",".join(f'"{n}": "{1 if "q" in n else 2}.safetensors"' for n in tensors)
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{index}}}}}')
    fake = SimpleNamespace(
        prefix="",
        layer_types=lambda c: ("any",) * 3,
        embed_weights=lambda c: {"tokens": Weight((8, 3), sources=("e",)), "scale": Weight((), value=(0.1,))},
        layer_weights=lambda c, kind: {"qk": Weight((8, 3), sources=("l{layer}.q", "l{layer}.k"), segments=(4, 4))},
        head_weights=lambda c: {"out": Weight((8, 3), tie="embed.tokens")},
        project_weights=lambda c: {},
    )
    plan = make_plan(cast(Model, SimpleNamespace(graphs=(fake,))), None, "float32")
    seen: list[tuple[int, int]] = []
    with small_reads():
        w = load_weights(plan, Checkpoint.open(tmp_path), progress=lambda done, total: seen.append((done, total)))
    assert list(w) == [e.name for e in plan]
    for i in range(3):
        assert torch.equal(w[f"layers.{i}.qk"], torch.cat([tensors[f"l{i}.q"], tensors[f"l{i}.k"]]))
    assert w["head.out"] is w["embed.tokens"]
    assert w["embed.scale"].shape == ()
    assert w["embed.scale"].item() == pytest.approx(0.1)
    assert all(t.data_ptr() % 64 == 0 for t in w.values())
    assert sum(t.nbytes for n, t in w.items() if n != "head.out") == plan.total_bytes
    total = sum(t.nbytes for t in tensors.values())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)


def test_one_source_may_serve_several_parameters(tmp_path: Path) -> None:
    x = torch.randn(6, 4)
    plan = plan_of(
        {"a": Weight((2, 4), sources=("x",), slice_rows=(0, 2)), "b": Weight((4, 4), sources=("x",), slice_rows=(2, 6))}
    )
    w = load_weights(plan, checkpoint_of(tmp_path, {"x": x}))
    assert torch.equal(torch.cat([w["embed.a"], w["embed.b"]]), x)


def test_all_problems_at_once_and_nothing_allocated(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(
        tmp_path,
        {
            "shaped": torch.ones(3, 2),
            "short": torch.ones(3, 2),
            "typed": torch.ones(2, 2, dtype=torch.int8),
            "extra.weight": torch.ones(1),
            "lm_head.weight": torch.ones(1),
        },
    )
    plan = plan_of(
        {
            "big": Weight((1 << 40, 1 << 10), sources=("big",)),
            "gone": Weight((2, 2), sources=(("gone.new", "gone.old"),)),
            "shaped": Weight((2, 3), sources=("shaped",)),
            "short": Weight((2, 2), sources=("short",), slice_rows=(2, 4)),
            "typed": Weight((2, 2), sources=("typed",)),
        }
    )
    with pytest.raises(WeightError) as e:
        load_weights(plan, checkpoint)
    assert set(e.value.problems) == {
        "big: missing",
        "gone.new or gone.old: missing",
        "shaped: shape (3, 2), the model needs (2, 3)",
        "short: shape (3, 2), the model needs rows 2 to 4 of ('*', 2)",
        "typed: dtype I8 is not supported; use a checkpoint in BF16, F16, F32, F64",
        "extra.weight: not used by the model; is the config.json of another one?",
        "lm_head.weight: not used by the model; is the config.json of another one?",
    }
    assert all(p in str(e.value) for p in e.value.problems)


def test_many_alike_share_a_line(tmp_path: Path) -> None:
    extra = {f"model.layers.{i}.mlp.{p}": torch.ones(1) for i in range(12) for p in ("up", "down")}
    with pytest.raises(WeightError) as e:
        load_weights(plan_of({}), checkpoint_of(tmp_path, extra))
    assert len(e.value.problems) == 2
    assert "model.layers.*.mlp.up (12 tensors, first model.layers.0.mlp.up): not used" in str(e.value)


def test_known_leftovers_are_no_problem(tmp_path: Path) -> None:
    of_layers = ("h.0.attn.bias", "h.0.attn.masked_bias", "h.0.attn.causal_mask", "h.0.attn.attention.masked_bias")
    names = (*of_layers, "model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight")
    plan = plan_of({"x": Weight((2,), sources=("x",)), "y": Weight((2,), tie="embed.x")})
    w = load_weights(plan, checkpoint_of(tmp_path, {n: torch.ones(2) for n in (*names, "x")}))
    assert w["embed.y"] is w["embed.x"]


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, {"x": torch.ones(100), "y": torch.ones(100)})
    with open(tmp_path / "model.safetensors", "r+b") as f:
        f.truncate(500)
    with pytest.raises(WeightError, match=r"model.safetensors: ends too early"), small_reads():
        load_weights(plan_of({"x": Weight((100,), sources=("x",)), "y": Weight((100,), sources=("y",))}), checkpoint)


def test_who_stops_waiting_stops_the_readers() -> None:
    """Whatever ends the start while weights are read waits little; what fails in reading is raised at the end of it."""
    readers: queue.Queue[threading.Thread] = queue.Queue()

    def read(report: Progress) -> None:
        readers.put(threading.current_thread())
        while True:
            report(0, 1)

    with Loading({}, read):
        reader = readers.get()
    until(lambda: not reader.is_alive())

    def fail(report: Progress) -> None:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"), Loading({}, fail) as loading:
        loading.finish()


def test_an_interrupt_ends_the_readers(tmp_path: Path) -> None:
    readers = list[threading.Thread]()

    def read(jobs: object, device: object, report: Progress) -> None:
        readers.append(threading.current_thread())
        while True:
            report(0, 1)

    checkpoint = checkpoint_of(tmp_path, {"x": torch.ones(2)})
    with (
        mock.patch.object(loader, "read_all", read),
        mock.patch.object(Loading, "finish", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        load_weights(plan_of({"x": Weight((2,), sources=("x",))}), checkpoint)
    until(lambda: not any(reader.is_alive() for reader in readers))


@pytest.mark.parametrize("device", DEVICES)
def test_random_weights(device: str) -> None:
    weights = {
        "tokens": Weight((3000, 700), sources=("e",)),
        "norm": Weight((700,), sources=("n",)),
        "bias": Weight((700,), sources=("b",)),
        "inv_freq": Weight((2,), value=(1.0, 0.25), dtype="float32"),
        "out": Weight((3000, 700), tie="embed.tokens"),
        "decay": Weight((700,), expr=Each("-exp", Read(("d",), (700,))), dtype="float32"),
    }
    plan = plan_of(weights, "bfloat16")
    w = random_weights(plan, device, seed=1)
    tokens = w["embed.tokens"].float()
    assert abs(tokens.mean()) < 1e-4
    assert float(tokens.std()) == pytest.approx(0.02, rel=0.01)
    assert len({tuple(row) for row in tokens[:, :4].tolist()}) == 3000  # rows differ
    assert w["embed.norm"].tolist() == [1.0] * 700
    assert 0.01 < w["embed.bias"].float().std() < 0.03
    assert w["embed.inv_freq"].tolist() == [1.0, 0.25]
    assert w["embed.out"] is w["embed.tokens"]
    decays = w["embed.decay"]
    assert float(decays.mean()) == pytest.approx(-1.0, abs=0.01)  # states shrink, and do not explode
    assert 0.01 < decays.std() < 0.03
    again, other = random_weights(plan, device, seed=1), random_weights(plan, device, seed=2)
    assert all(torch.equal(w[n], again[n]) for n in w)
    assert not torch.equal(w["embed.tokens"], other["embed.tokens"])


def test_random_weights_of_ranks(checkpoint: Path) -> None:
    """Each rank draws what it has of its own, and has the same of the rest; what the plan computes is computed."""
    place = artifact_of(checkpoint, backend="eager", tensor_parallel_size=2)
    plan = WeightPlan.from_json((place / "weights.json").read_text())
    first, second = (random_weights(plan, rank=rank) for rank in range(2))
    computed = [e for e in plan if not e.tie and not any(isinstance(part, Read) for part in walk(e.expr))]
    for e in computed:
        for rank, found in enumerate((first, second)):
            wanted = evaluate(simplify(at_rank(e.expr, rank)), lambda region: torch.empty(0))
            torch.testing.assert_close(found[e.name].double(), wanted.double(), msg=e.name)
    assert any(not torch.equal(first[e.name], second[e.name]) for e in computed), "ranks begin at other tokens"
    for e in plan:
        if e in computed or e.tie or "norm" in e.name:
            continue
        divided = any(isinstance(part, Slice) and part.per_rank for part in walk(e.expr))
        assert torch.equal(first[e.name], second[e.name]) != divided, e.name


_MEASURE = """
import sys
import queue
import threading
from graphllm.weights.checkpoint.checkpoint import Checkpoint
from graphllm.weights.loading.loader import load_weights
from graphllm.weights.plan.plan import WeightPlan

def memory(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) << 10

plan = WeightPlan.from_json(open(sys.argv[1] + "/weights.json").read())
checkpoint = Checkpoint.open(sys.argv[1])
before = memory("VmRSS")
weights = load_weights(plan, checkpoint)
print(memory("VmHWM") - before, plan.total_bytes)
heavy = {"transformers", "triton", "torch._dynamo", "torch._inductor", "graphllm.model_defs", "graphllm.passes"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert not any(float(w.view(-1)[-1]) != 1 for w in weights.values())
"""


@pytest.mark.parametrize("dtype", ["bfloat16", thorough("float32")])
def test_peak_memory_and_imports_of_a_fresh_process(tmp_path: Path, dtype: str) -> None:
    """600 MB in two shards, read as they are and cast from float32: the model and no more than one tensor of 25 MB."""
    rows, width, layers = 2048, 3072, 24
    shards: list[dict[str, Any]] = [{}, {}]
    nbytes = rows * width * DTYPES[dtype].itemsize
    for i in range(layers):
        for p in "qk":
            shard = shards[i % 2]
            at = len(shard) * nbytes
            tag = "BF16" if dtype == "bfloat16" else "F32"
            shard[f"l{i}.{p}"] = {"dtype": tag, "shape": [rows, width], "data_offsets": [at, at + nbytes]}
    for i, shard in enumerate(shards):
        header = json.dumps(shard).encode()
        with open(tmp_path / f"{i}.safetensors", "wb") as f:  # with holes, so that it takes neither time nor disk
            f.write(struct.pack("<Q", len(header)) + header)
            for t in shard.values():
                f.seek(8 + len(header) + t["data_offsets"][1] - 4)
                f.write(b"\x80\x3f\x80\x3f")  # the last number is 1.0, in both dtypes
    index = {name: f"{i}.safetensors" for i, shard in enumerate(shards) for name in shard}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    segments = (rows, rows)
    plan = plan_of(
        {f"w{i}": Weight((2 * rows, width), (f"l{i}.q", f"l{i}.k"), segments) for i in range(layers)}, "bfloat16"
    )
    (tmp_path / "weights.json").write_text(plan.to_json())
    run = subprocess.run([sys.executable, "-c", _MEASURE, str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    peak, model = map(int, run.stdout.split())
    assert model == plan.total_bytes == layers * 2 * rows * width * 2
    assert peak < model + 2 * rows * width * 2
