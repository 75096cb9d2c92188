"""SPECIALIZE and tuning without a GPU: rewritten pieces lower with every kernel and keep their sizes dynamic."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from bench.training import tuning_table
from graphllm.compile.codegen.example_inputs import example
from graphllm.compile.codegen.jobs import Candidate
from graphllm.compile.codegen.lower import lower
from graphllm.compile.codegen.objects import BuildError
from graphllm.compile.families import find_model
from graphllm.compile.layout import plan_layout
from graphllm.compile.link import Linked, link
from graphllm.compile.passes import PIPELINE
from graphllm.compile.pipeline import compile_model, run_passes
from graphllm.compile.row_order import require_row_orders
from graphllm.compile.specialize import specialize
from graphllm.compile.trace import trace_model, trace_unit
from graphllm.compile.tuning import known, tune
from graphllm.compile.tuning.workers import Workers
from graphllm.config import Bucket, CompileConfig, ConfigError, Target, default_buckets
from graphllm.config.compilation import check
from graphllm.ir import Cost, Op
from graphllm.ir.graph import GraphError, Shapes, TensorSpec
from graphllm.ir.graph_form import input_specs
from graphllm.ir.op import op_of
from graphllm.ir.registry import load_ops, load_passes
from graphllm.rewrite import ImplChoice, Unit, fake_values, site_key, site_of
from graphllm.weights.plan.plan import make_plan
from graphllm.weights.plan.shard import shard_plan

OPS = load_ops()
TARGET = Target("cuda", ("sm_90",))
QWEN = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 384, "vocab_size": 500, "head_dim": 64,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip
pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's kernels")


def _config() -> CompileConfig:
    buckets = default_buckets(TARGET, 40, 512)
    return CompileConfig(
        TARGET, buckets=buckets, max_model_len=256, max_num_seqs=40, max_num_batched_tokens=512, tune=True
    )


def _linked(config: CompileConfig) -> Linked:
    load_passes()
    model = find_model(QWEN)
    c, ranks = model.config(QWEN), config.tensor_parallel_size
    plan = shard_plan(make_plan(model, c, config.dtype), ranks)
    c = model.local(c, ranks, False)
    # Traced on the CPU, so that no GPU is needed; passes and kernels are those of the GPU.
    on_cpu = dataclasses.replace(config, target=Target("cpu", ()))
    layout = plan_layout(model, c, on_cpu)
    graphs = list(trace_model(layout))
    units = [u for g in graphs for u in g.units.values()]
    run_passes(units, plan, config, PIPELINE.units)
    return link(graphs, layout, config, PIPELINE.linked)


@pytest.fixture(scope="module")
def config() -> CompileConfig:
    return _config()


@pytest.fixture(scope="module")
def linked(config: CompileConfig) -> Linked:
    return _linked(config)


def _middle(linked: Linked) -> Any:
    """The piece between two attentions."""
    (piece,) = (p for p in linked.pieces.values() if p.label == "layer.full" and not p.boundary)
    return piece


def test_decode_of_a_layer_is_five_kernels(linked: Linked, config: CompileConfig) -> None:
    assert any(p.label == "paged_attention" for p in linked.pieces.values())
    unit, reports = specialize(_middle(linked).json, config.buckets[0], config, PIPELINE.pieces)
    assert [op.name for n in unit.graph.nodes if (op := op_of(n.target))] == ["fused_linear"] * 4
    assert [(r["pass"], r["changed"]) for r in reports] == [("fuse_linear", 4)]


def test_two_ranks_have_as_many_kernels_and_put_no_logits_together(config: CompileConfig) -> None:
    """Sums over ranks join the kernel that normalizes; tokens are sampled from each rank's share of the logits, but
    where all logits are wanted."""
    config = dataclasses.replace(config, tensor_parallel_size=2)
    linked = _linked(config)
    unit, _ = specialize(_middle(linked).json, config.buckets[1], config, PIPELINE.pieces)
    ops = [op.name for n in unit.graph.nodes if (op := op_of(n.target))]
    assert ops == ["linear_add_norm", "fused_linear"] * 2
    parts = {name: [linked.pieces[c.piece].label for c in p.calls] for name, p in linked.programs[0].items()}
    assert parts["plain"][-2:] == ["sample_shares", "record_tokens"]
    assert parts["full"][-5:] == ["all_gather", "process_logits", "sample", "record_tokens", "token_logprobs"]
    assert not any(label == "all_reduce" for labels in parts.values() for label in labels)


@pytest.mark.thorough
def test_deterministic_mode_has_one_order_in_all_buckets_of_a_gpu_that_it_was_shown_on(config: CompileConfig) -> None:
    wanted = dataclasses.replace(
        config, deterministic=True, buckets=default_buckets(TARGET, 40, 512, deterministic=True)
    )  # fmt: skip
    check(wanted)
    assert [b.name for b in wanted.buckets if b.kind == "mixed"] == ["mixed-2-256", "mixed-257-512"]
    pieces = _linked(wanted).pieces.values()
    require_row_orders(((p.json, bucket) for p in pieces for bucket in wanted.buckets), wanted, PIPELINE.pieces)
    other = dataclasses.replace(wanted, target=Target("cuda", ("sm_80", "sms_108")))
    jobs = [(p.json, bucket) for p in _linked(other).pieces.values() for bucket in other.buckets]
    with pytest.raises(ConfigError, match=r"no implementation of paged_attention for cuda.*depend on the others"):
        require_row_orders(jobs, other, PIPELINE.pieces)


@pytest.mark.thorough
def test_every_kernel_keeps_the_sizes_dynamic() -> None:
    """A launch constant made of a dynamic size would fix it, silently, at the size that was traced.

    In a process of its own: where tests run, Triton's interpreter takes the place of its compiler.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.compile.test_specialize"]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.stdout == "8 lowered\n", done.stderr[-3000:]


def _lower_with_every_kernel() -> int:
    config = _config()
    piece, count = _middle(_linked(config)).json, 0
    for bucket in (b for b in config.buckets if b.hi <= 256):
        unit = specialize(piece, bucket, config, PIPELINE.pieces).unit
        for name in ("triton_tile", "cublas"):

            def pick(node: torch.fx.Node, op: Op, name: str = name, unit: Unit = unit) -> ImplChoice | None:
                assert unit.bucket is not None
                site = site_of(op, op.bind((), fake_values(node.kwargs)), unit.shapes, config, unit.bucket)
                return ImplChoice(name, op.impls[name].configs(site)[-1])

            lowered = lower(unit.graph, input_specs(piece), config, bucket, pick)
            assert all(f": {name}" in c for c in lowered.chosen)
            assert isinstance(lowered.shapes.symbols["T"], int) == bucket.static
            count += 1
    return count


def test_a_block_size_without_a_kernel_is_refused_before_anything_is_built(
    config: CompileConfig, tmp_path: Path
) -> None:
    small, stages = dataclasses.replace(config, block_size=8), list[str]()
    with pytest.raises(ConfigError, match=r"paged_attention: .* block_size 8: .* use a power of two from 16"):
        compile_model(QWEN, "", small, tmp_path / "artifact", progress=lambda stage, *_: stages.append(stage))
    assert stages == ["trace"]
    assert not (tmp_path / "artifact").exists()


def test_a_size_that_became_a_constant_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(x: Tensor) -> Tensor:
        """2 x"""
        return x + x

    made = Op("specialize_test_double", double, False, (), False, lambda x: Cost(1, 1))
    made.impl("fixed", device="cpu")(lambda x: x * (2 if int(x.shape[0]) else 3))
    monkeypatch.setitem(sys.modules["graphllm.ir.op"]._ops, made.name, made)
    spec = TensorSpec.contiguous("float32", "T", 4)
    unit = trace_unit("test", {"x": spec}, lambda v: (made(v["x"]),), Shapes("cpu"))
    with pytest.raises(GraphError, match=r"lowering for mixed-2-64 made T = 64 \(with specialize_test_double: fixed\)"):
        lower(unit.graph, [spec], CompileConfig(Target("cpu", ())), Bucket("mixed", 2, 64))


@pytest.mark.thorough
def test_sites_to_tune(linked: Linked, config: CompileConfig, tmp_path: Path) -> None:
    """Each distinct linear layer and attention once a bucket, with every implementation among the candidates."""
    sites = tune.tunables([(p.json, b) for p in linked.pieces.values() for b in config.buckets], config)
    linear, attention = {"fused_linear", "linear_add_norm"}, {"paged_attention"}
    assert {s.op for s in sites.values()} == linear | attention
    found = {key: {c.impl for c in s.candidates} for key, s in sites.items() if s.op in attention}
    assert list(found.values()) == [{"triton_prefill"}]  # in decode there is nothing to choose among
    assert all(" mixed-" in key for key in found)
    ones = [s for key, s in sites.items() if " decode-1 " in key and s.op in linear]
    assert len(ones) == 5  # qkv, o, gate and up, down, head
    assert all({c.impl for c in s.candidates} == {"triton_row", "cublas", "triton_tile"} for s in ones)
    mixed = {s.tensors["x_TI"].shape[0] for key, s in sites.items() if " mixed-" in key and s.op in linear}
    assert mixed == {"R"}  # where few rows are sampled from, kernels for few rows serve long steps, too
    special = specialize(_middle(linked).json, config.buckets[1], config, PIPELINE.pieces)
    keys = [
        site_key(n, op, special.unit.shapes, config.buckets[1])
        for n in special.unit.graph.nodes
        if (op := op_of(n.target))
    ]
    assert len(keys) == 4
    assert set(keys) <= set(sites)

    found = {key: tune.Measured(s.candidates[-1], {"a": 1.5}) for key, s in sites.items()}
    file = tmp_path / "deep" / "tuned.json"
    assert tune.read_measured(file) == {}
    tune.write_measured(file, found)
    assert tune.read_measured(file) == found
    assert [f.name for f in file.parent.iterdir()] == ["tuned.json"]


@pytest.mark.thorough
def test_processes_find_the_same_sites(linked: Linked, config: CompileConfig) -> None:
    """In the same order, with the same arguments and candidates, without a GPU."""
    pieces = [(p.json, bucket) for p in linked.pieces.values() for bucket in config.buckets[1::2]]
    with Workers(dataclasses.replace(config, tune=True), 1) as workers:
        tuner = tune.Tuner(config, workers, lambda done, total: None, None)
        found = [tuner.find(piece, bucket) for piece, bucket in pieces]
        for (piece, bucket), sites in zip(pieces, found, strict=True):
            own = tune.tunables([(piece, bucket)], config)
            assert list(sites()) == list(own)
            assert sites() == own


def test_attention_is_tuned_on_a_step_as_they_are(linked: Linked, config: CompileConfig) -> None:
    """Every token lies in a block of its own sequence, the step is full, and copies do not share a cache."""
    pieces = [p.json for p in linked.pieces.values() if p.label == "paged_attention"]
    (site,) = tune.tunables([(piece, config.buckets[-1]) for piece in pieces], config).values()
    args, other = tune.inputs_of(site, 2, "cpu")
    T, S = site.sizes["T"], site.sizes["S"]
    starts, lengths, table = (args[n].tolist() for n in ("query_start_loc", "seq_lens", "block_table"))
    queries = [b - a for a, b in itertools.pairwise(starts)]
    assert (len(queries), sum(queries), args["q_THE"].shape[0]) == (S, T, T)
    assert all(n <= length <= config.max_model_len for n, length in zip(queries, lengths, strict=True))
    used = [b for row, length in zip(table, lengths, strict=True) for b in row[: -(-length // config.block_size)]]
    assert len(set(used)) == len(used) == args["kv_cache"].shape[0]
    before = args["kv_cache"].clone()
    OPS["paged_attention"](**args)
    assert not torch.equal(before, args["kv_cache"])
    assert torch.equal(before, other["kv_cache"])


def test_what_was_found_is_not_for_a_deterministic_model(
    linked: Linked, config: CompileConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what a compile has kept nor a table: its candidates are some of all, and must stay the only ones."""
    bucket = config.buckets[1]
    alike = dataclasses.replace(config, deterministic=True)
    every = tune.tunables([(p.json, bucket) for p in linked.pieces.values()], config)
    some = tune.tunables([(p.json, bucket) for p in linked.pieces.values()], alike)
    few = {
        key: some[key]
        for key in some.keys() & every
        if any(c not in some[key].candidates for c in every[key].candidates)
    }
    assert few
    assert tune.fingerprint(config) != tune.fingerprint(alike)
    wrong = {key: next(c for c in every[key].candidates if c not in site.candidates) for key, site in few.items()}
    monkeypatch.setattr(tune, "fingerprint", lambda config: "one")
    tune.write_measured(tmp_path / "one.json", {key: tune.Measured(choice, {}) for key, choice in wrong.items()})
    rows = [known.known_site(every[key], choice) for key, choice in wrong.items()]
    monkeypatch.setattr(tune, "table_of", lambda target: known.Table.of(rows))
    tuner = tune.Tuner(alike, None, lambda done, total: None, tmp_path)
    assert tuner.add(few) == set(few)
    back = known.Table.of([known.known_site(site, site.candidates[0]) for site in few.values()])
    assert all(back.chosen(every[key]) is None and back.likely(every[key]) == every[key].candidates for key in few)


@pytest.mark.thorough
def test_what_was_found_is_kept(
    linked: Linked, config: CompileConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second compile measures nothing; one with further buckets only those. What cannot run is not chosen."""
    timed: list[tune.Tunable] = []

    def measure(site: tune.Tunable, candidates: list[ImplChoice]) -> tuple[tune.Measured | None, list[str]]:
        timed.append(site)
        assert candidates == site.candidates
        return tune.Measured(candidates[-1], {"last": 1.0}), ["cublas: no room"]

    monkeypatch.setattr(tune, "measure", measure)
    monkeypatch.setattr(tune, "fingerprint", lambda config: "here")
    pieces = [(p.json, bucket) for bucket in config.buckets for p in linked.pieces.values()]
    few = [(piece, bucket) for piece, bucket in pieces if bucket == config.buckets[1]]
    told: list[tuple[int, int]] = []

    def tuned(given: list[Any], folder: Path) -> tune.Tuner:
        tuner = tune.Tuner(config, None, lambda done, total: told.append((done, total)), folder)
        keys = {key for piece, bucket in given for key in tuner.add(tuner.find(piece, bucket)())}
        assert set(tuner.results()) == keys
        return tuner

    first = tuned(few, tmp_path)
    assert len(timed) == len(first.measured) == len(tune.tunables(few, config)) == len(told)
    assert first.counts == {"sites": len(timed), "timed": len(timed), "candidates": told[0][1]}
    assert [done for done, _ in told] == [sum(len(s.candidates) for s in timed[:i]) for i in range(len(timed))]
    written = (tmp_path / "here.json").stat().st_mtime_ns
    again = tuned(few, tmp_path)
    assert (tmp_path / "here.json").stat().st_mtime_ns == written
    assert again.measured == first.measured
    assert again.counts == {"sites": 0, "timed": 0, "candidates": 0}
    more = tuned(pieces, tmp_path)
    assert len(more.measured) == len(tune.tunables(pieces, config))
    assert len(timed) == len(first.measured) + more.counts["timed"]
    assert first.measured.items() <= more.measured.items()
    assert [f.name for f in tmp_path.iterdir()] == ["here.json"]
    monkeypatch.setattr(tune, "measure", lambda site, candidates: (None, [f"{c.impl}: no room" for c in candidates]))
    with pytest.raises(BuildError, match=r"no implementation of \w+ runs on this GPU with .*: \w+: no room"):
        tuned(few, tmp_path / "other")


def _stretched(site: tune.Tunable) -> tune.Tunable:
    """Another site of the same kind: longer rows."""
    longer = {
        name: dataclasses.replace(spec, shape=tuple(d + 8 if isinstance(d, int) else d for d in spec.shape))
        for name, spec in site.tensors.items()
    }
    return site._replace(tensors=longer)


class Compiler:
    """Stands for processes that compile; some choices cannot be compiled."""

    turns = None

    def __init__(self, fails: Sequence[ImplChoice] = ()) -> None:
        self.fails, self.asked = fails, list[Candidate]()

    def problem(self, candidate: Candidate) -> concurrent.futures.Future[str]:
        self.asked.append(candidate)
        done: concurrent.futures.Future[str] = concurrent.futures.Future()
        done.set_result("no room" if candidate.choice in self.fails else "")
        return done


def test_what_a_table_knows_is_not_timed(
    linked: Linked, config: CompileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At sites that are like some of the table, what was the fastest there is timed, and the first candidate."""
    pieces = [(p.json, bucket) for bucket in config.buckets for p in linked.pieces.values()]
    sites = tune.tunables(pieces, config)
    chosen = {key: site.candidates[-1] for key, site in sites.items()}
    same, like, gone, other = (
        known.Table.of([known.known_site(change(s), pick(s)) for s in sites.values()])
        for change, pick in (
            (lambda s: s, lambda s: s.candidates[-1]),
            (_stretched, lambda s: s.candidates[-1]),
            (lambda s: s, lambda s: ImplChoice("gone", {})),
            (lambda s: s._replace(op="other"), lambda s: s.candidates[-1]),
        )
    )
    for site in sites.values():
        first, last = site.candidates[0], site.candidates[-1]
        assert (same.chosen(site), like.chosen(site), gone.chosen(site), other.chosen(site)) == (last, None, None, None)
        few = like.likely(site)
        assert few[0] == first
        assert last in few
        assert len(few) <= 4  # of three neighbours
        assert gone.likely(site) == other.likely(site) == site.candidates

    timed: list[tune.Tunable] = []

    def measure(site: tune.Tunable, candidates: list[ImplChoice]) -> tuple[tune.Measured | None, list[str]]:
        timed.append(site)
        return (tune.Measured(candidates[-1], {"a": 1.0}) if candidates else None), []

    def tuned(table: known.Table, compiler: Any = None) -> tune.Tuner:
        monkeypatch.setattr(tune, "table_of", lambda target: table)
        tuner = tune.Tuner(config, compiler, lambda done, total: None, None)
        timed.clear()
        assert tuner.add(sites) == set(sites) == set(tuner.results())
        return tuner

    monkeypatch.setattr(tune, "measure", measure)
    assert {key: m.choice for key, m in tuned(same).measured.items()} == chosen
    assert timed == []
    assert tuned(same).counts["timed"] == 0
    likely, all_of_them = tuned(like).counts, tuned(other).counts
    assert likely["timed"] == all_of_them["timed"] == len(timed)
    assert likely["candidates"] < all_of_them["candidates"]
    # It is compiled before whoever builds asks for it; where that fails, the others are timed.
    compiler = Compiler()
    tuned(same, compiler)
    assert {str(c.choice) for c in compiler.asked} == {str(choice) for choice in chosen.values()}
    compiler = Compiler(fails=[choice for choice in chosen.values() if choice.config])
    tuner = tuned(same, compiler)
    assert timed
    assert all(m.choice not in compiler.fails for m in tuner.measured.values())
    monkeypatch.setattr(tune, "table_of", lambda target: same)
    every = tune.Tuner(dataclasses.replace(config, tune_all=True), None, lambda done, total: None, None)
    assert every.add(sites) == set(sites)


def test_tables_are_made_of_what_was_timed(
    linked: Linked, config: CompileConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all sites, once each; those that are there stay."""
    monkeypatch.setattr(tune, "fingerprint", lambda config: "here")
    monkeypatch.setattr(tune, "measure", lambda site, candidates: (tune.Measured(candidates[-1], {"a": 1.0}), []))
    every = dataclasses.replace(config, tune_all=True)
    sites = dict[str, tune.Tunable]()
    for bucket in config.buckets:
        tuner = tune.Tuner(every, None, lambda done, total: None, tmp_path / "tuned")
        for piece in linked.pieces.values():
            sites |= (found := tuner.find(piece.json, bucket)())
            tuner.add(found)
        assert list(tuner.results())
    monkeypatch.setattr(tuning_table, "TABLES", tmp_path / "tables")
    monkeypatch.setattr(known, "TABLES", tmp_path / "tables")
    monkeypatch.setattr(tuning_table, "detect_target", lambda device: config.target)
    monkeypatch.setattr(sys, "argv", ["tuning_table", str(tmp_path)])
    tuning_table.main()
    tuning_table.main()
    table = known.table_of(config.target)
    assert set(table.exact) == {known.digest_of(site) for site in sites.values()}
    assert all(table.chosen(site) == site.candidates[-1] for site in sites.values())
    assert known.table_of(dataclasses.replace(config.target, name="another")) == known.NOTHING


def test_equal_calls_are_timed_once(config: CompileConfig, linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long step samples from as many rows as the largest step of decode has: what follows is timed there alone. Both
    sites get what was found."""
    full = dataclasses.replace(
        config,
        buckets=(Bucket("decode", 2, config.max_num_seqs), Bucket("mixed", 2, config.max_num_batched_tokens)),
    )
    tuner = tune.Tuner(full, None, lambda done, total: None, None)
    keys = {k for p in linked.pieces.values() for b in full.buckets for k in tuner.add(tuner.find(p.json, b)())}
    monkeypatch.setattr(
        tune, "measure", lambda site, candidates: (tune.Measured(candidates[-1], {site.op: len(candidates)}), [])
    )
    assert sorted(tuner.results()) == sorted(keys)
    counts = tuner.counts
    assert counts["sites"] == len(keys) > counts["timed"]
    rows = QWEN["vocab_size"]
    of_head = [m for key, m in tuner.measured.items() if f"({rows}, " in key or f"[{rows}, " in key]
    assert len(of_head) >= 2
    assert len({str(m) for m in of_head}) == 1


@pytest.mark.thorough
def test_sites_are_timed_as_their_candidates_are_compiled(
    config: CompileConfig, linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever times does not wait for the first site while others are compiled."""
    compiled: list[tuple[str, concurrent.futures.Future[str]]] = []

    class Slow:
        turns = None

        def problem(self, candidate: Candidate) -> concurrent.futures.Future[str]:
            compiled.append((candidate.site.op, concurrent.futures.Future()))
            return compiled[-1][1]

    tuner = tune.Tuner(config, cast(Workers, Slow()), lambda done, total: None, None)
    tuner.add(tune.tunables([(p.json, config.buckets[-1]) for p in linked.pieces.values()], config))
    monkeypatch.setattr(tune, "measure", lambda site, candidates: (tune.Measured(candidates[-1], {site.op: 1.0}), []))
    first = compiled[0][0]
    for op, future in compiled:
        if op != first:
            future.set_result("")
    slow = threading.Timer(1.0, lambda: [future.set_result("") for op, future in compiled if op == first])
    slow.start()
    found = list(tuner.results())
    assert len(set(found)) == len(found) == tuner.counts["sites"]
    ops = [next(iter(tuner.measured[key].microseconds)) for key in found]
    assert first not in (kept := ops[: -ops.count(first)])
    assert kept


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8"])
def test_inputs_to_run_on(dtype: str) -> None:
    """Of every dtype that a tensor may have: numbers that differ, and zeros where they are ids."""
    made = example(TensorSpec(dtype, ("T", 4, 64), (256, 64, 1)), {"T": 3}, "cpu").float()
    assert made.shape == (3, 4, 64)
    assert (made.std() > 0.01) == (dtype != "int8")


if __name__ == "__main__":
    print(_lower_with_every_kernel(), "lowered")
