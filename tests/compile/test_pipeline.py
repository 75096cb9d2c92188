"""The pipeline as a whole: distinct pieces, readable IR of every stage, exact memory, and what stands in the files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphllm.compile.families import find_model
from graphllm.compile.layout import plan_layout
from graphllm.compile.link import Linked, link
from graphllm.compile.passes import PIPELINE
from graphllm.compile.pipeline import compile_model, run_passes
from graphllm.compile.trace import trace_model
from graphllm.config import Bucket, CompileConfig, Target
from graphllm.ir.registry import load_ops, load_passes
from graphllm.loading.checkpoint.source import open_source
from graphllm.program.artifact import Artifact
from graphllm.runtime.executor import Executor
from graphllm.weights.loading.loader import load_weights
from graphllm.weights.plan.plan import WeightPlan, make_plan
from tests.tensor_memory import storages, storages_since

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GEMMA = LLAMA | {
    "architectures": ["Gemma2ForCausalLM"], "head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8,
    "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip
CONFIG = CompileConfig(
    Target("cpu", ("x86_64",)), backend="eager", dtype="float32",
    buckets=(Bucket("decode", 1, 1), Bucket("mixed", 2, 16)),
    max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, block_size=8,
)  # fmt: skip


def _link(hf: dict[str, Any]) -> Linked:
    load_ops()
    load_passes()
    model = find_model(hf)
    c = model.config(hf)
    layout = plan_layout(model, c, CONFIG)
    graphs = list(trace_model(layout))
    units = [u for g in graphs for u in g.units.values()]
    run_passes(units, make_plan(model, c, "float32"), CONFIG, PIPELINE.units)
    return link(graphs, layout, CONFIG)


@pytest.mark.parametrize("layers", [2, 3, 9])
def test_equal_layers_share_their_pieces(layers: int) -> None:
    """start, attention, end of a layer with the start of the next, end with head, and the sampling ops: as many pieces
    at any depth."""
    linked = _link(LLAMA | {"num_hidden_layers": layers})
    assert len(linked.pieces) == 4 + 2 + 2  # sample and record are the same in both programs; adjust, logprobs
    plain, full = linked.programs[0]["plain"].calls, linked.programs[0]["full"].calls
    assert [c.piece for c in plain[1:-2:2]] == [plain[1].piece] * layers
    assert len(plain) == 2 * layers + 3
    assert plain[:-2] == full[: len(plain) - 2]
    assert linked.pieces[plain[2].piece].label == "layer.full"
    names = {n for c in plain for n in c.inputs}
    assert {f"layers.{i}.qkv" for i in range(layers)} | {f"state.layers.{i}.kv" for i in range(layers)} <= names
    for calls in (plain, full):
        made = [n for c in calls for n in c.outputs]
        assert len(made) == len(set(made))
    assert plain[-1].outputs == ("tokens",)
    assert full[-1].outputs == ("scores",)
    assert linked.programs[0]["plain"].parts == {}
    assert linked.programs[0]["full"].parts == {
        "adjust": len(full) - 4,
        "sample": len(full) - 3,
        "logprobs": len(full) - 1,
    }


def test_two_kinds_of_layers_share_what_is_equal() -> None:
    kinds = ["sliding_attention", "full_attention"]
    counts = [len(_link(GEMMA | {"num_hidden_layers": 2 * n, "layer_types": kinds * n}).pieces) for n in (2, 5)]
    # The kinds differ in their attention only: start, two attentions, between layers, end with head, sampling.
    assert counts == [9, 9]


def test_layers_without_a_boundary_are_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a model whose layers the compiler makes whole: what is compiled does not grow with their number."""
    monkeypatch.setattr(load_ops()["paged_attention"], "boundary", False)
    few, many = (_link(LLAMA | {"num_hidden_layers": n}) for n in (3, 9))
    assert few.pieces.keys() == many.pieces.keys()
    plain = many.programs[0]["plain"].calls
    assert [c.piece for c in plain[1:9]] == [plain[1].piece] * 8  # the first has what comes before it
    assert len({c.piece for c in plain}) == len(plain) - 7
    mixed = _link(GEMMA | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2})
    calls = mixed.programs[0]["plain"].calls
    assert [c.piece for c in calls[1:4]] == [calls[1].piece, calls[2].piece, calls[1].piece]


def test_program_runs_in_order() -> None:
    """Every value is made before it is read, and what is read was made or comes from outside."""
    linked = _link(LLAMA | {"num_hidden_layers": 3})
    for program in linked.programs[0].values():
        made: set[str] = set()
        for call in program.calls:
            for name in call.inputs:
                outside = name.startswith(("step.", "state.", "embed.", "layers.", "head."))
                assert outside or name in made, name
            made |= set(call.outputs)
        assert {"logits", "tokens"} <= made


INPUT = re.compile(r"input %\w+ \([\w.]+\): \w+\[[^\]]*\]( strides \[[^\]]*\])?")
VALUE = re.compile(
    r"%\w+: (\w+\[[^\]]*\]( strides \[[^\]]*\])?|int|\(.*\)) = (graphllm::\w+|aten::[\w.]+|getitem|mul)\(.*\)"
)
RETURN = re.compile(r"return \[%\w+(, %\w+)*\]")


def test_dump_is_readable(checkpoint: Path, tmp_path: Path) -> None:
    source = open_source(checkpoint)
    config = replace(CONFIG, dump=tmp_path / "dump")
    place = compile_model(source.config, source.tensors, config, tmp_path / "artifact")
    files = sorted(p.name for p in (tmp_path / "dump").iterdir())
    files.remove("weights.txt")
    weights = (tmp_path / "dump" / "weights.txt").read_text()
    assert (place / "graph" / "weights.txt").read_text() == weights
    assert [line.split()[0] for line in weights.splitlines()] == [
        e.name for e in WeightPlan.from_json((place / "weights.json").read_text())
    ]
    units = (
        "embed", "head", "layer.full", "logprobs", "process_logits", "resolve_token_ids", "sample", "sample_adjusted"
    )  # fmt: skip
    assert [f for f in files if not f.startswith("piece.")] == [
        f"{stage}.{unit}.txt"
        for stage in (
            "00-trace",
            "01-canonicalize",
            "02-shard",
            "03-add_adapters",
            "04-quantize_linear",
            "05-quantize_moe",
            "06-join_shared_expert",
            "07-align_linear",
            "08-widen_linear",
            "09-scale_cache",
            "10-attend_tree",
            "11-fuse_attention",
        )
        for unit in units
    ]
    assert sum(f.startswith("piece.") for f in files) == 8
    assert "layers.0.qkv  float32 [128, 64]  concat(" in (tmp_path / "dump" / "weights.txt").read_text()
    for file in (f for f in files if f != "weights.txt"):
        text = (tmp_path / "dump" / file).read_text()
        assert (place / "graph" / file).read_text() == text
        title, *body, last = text.splitlines()
        assert title.startswith("# ")
        assert RETURN.fullmatch(last), last
        for line in body:
            assert INPUT.fullmatch(line) or VALUE.fullmatch(line), line
    layer = (tmp_path / "dump" / "01-canonicalize.layer.full.txt").read_text()
    assert re.search(r"input %\w+ \(w\.qkv\): float32\[128, 64\]", layer)
    assert re.search(r"%\w+: float32\[T, 4, 16\] = graphllm::paged_attention\(", layer)
    assert not any("artifact" in f for f in files)


def test_lowered_graphs_of_a_compiled_artifact(compiled_artifact: Path) -> None:
    """One for each compiled piece and bucket, down to aten and kernel calls."""
    manifest = Artifact.open(compiled_artifact).manifest
    lowered = {p.name for p in (compiled_artifact / "graph").glob("lowered.*")}
    for label, buckets in manifest.pieces.items():
        piece = re.fullmatch(r".* \[(\w{16})\]", label)
        assert piece
        for bucket, chosen in buckets.items():
            assert chosen
            assert (f"lowered.{piece[1]}.{bucket}.txt" in lowered) == (chosen != ["all: reference"])
    text = "".join((compiled_artifact / "graph" / f).read_text() for f in lowered)
    assert "torch.ops.aten." in text
    assert "torch.ops.graphllm." not in text


def test_files_of_an_artifact(compiled_artifact: Path) -> None:
    program = json.loads((compiled_artifact / "program.json").read_text())
    manifest = Artifact.open(compiled_artifact).manifest
    buckets = manifest.factors.compile.buckets
    (graph,) = program["graphs"]
    calls = [call for p in graph["programs"].values() for call in p["calls"]]
    pieces = {call[0] for call in calls}
    assert {p.name for p in (compiled_artifact / "pieces").iterdir()} == {
        "kernels.so", *(f"{piece}-{b.name}.json" for piece in pieces for b in buckets)
    }  # fmt: skip
    for piece, inputs, outputs in calls:
        for b in buckets:
            bundle = json.loads((compiled_artifact / "pieces" / f"{piece}-{b.name}.json").read_text())
            assert (len(bundle["inputs"]), len(bundle["outputs"])) == (len(inputs), len(outputs))
            assert {i[0] for i in bundle["code"]} <= {"empty", "view", "kernel", "op", "call", "ir"}
            called = {i[1] for i in bundle["code"] if i[0] == "kernel"}
            assert called == set(bundle["kernels"])
    table = graph["inputs"]["block_table.0"]
    assert table["shape"] == ["S", 12]  # 96 tokens in blocks of 8
    assert table["provider"] == "block_table"
    assert b"pickle" not in b"".join(p.read_bytes() for p in compiled_artifact.rglob("*.json"))


def test_memory_table_is_exact(compiled_artifact: Path, checkpoint: Path) -> None:
    """Against what the loaded parameters and the allocated caches really occupy."""
    manifest = Artifact.open(compiled_artifact).manifest
    memory = manifest.memory
    source = open_source(checkpoint).checkpoint
    assert source is not None
    weights = load_weights(WeightPlan.from_json((compiled_artifact / "weights.json").read_text()), source)
    assert memory.weights == sum({t.data_ptr(): t.nbytes for t in weights.values()}.values())
    before = storages()
    executor = Executor(Artifact.open(compiled_artifact), weights, 3)
    allocated = [storage.nbytes() for storage in storages_since(before)]
    pool = executor.states._pool
    assert len(pool) == 2
    assert 3 * memory.block == sum(t.nbytes for t in pool)
    assert memory.unused_of_block == 0
    for name, tensor in executor.states.tensors.items():
        if name.endswith(".kv"):
            assert tensor.shape == (3, 2, 2, 8, 16)
            assert tensor.is_contiguous()
    assert memory.arena == max(memory.arenas.values())
    assert set(memory.arenas) == {
        f"{b} {p}" for b in ("decode-1", "decode-2-4", "mixed-2-32") for p in ("plain", "full")
    }
    assert allocated.count(memory.arena) == 1
    own = [t for n, t in executor.states.tensors.items() if not n.endswith(".kv")]
    assert sum(t.nbytes for t in own) == memory.state


def test_manifest_says_what_happened(compiled_artifact: Path) -> None:
    manifest = Artifact.open(compiled_artifact).manifest
    assert [(p["pass"], p["unit"]) for p in manifest.passes] == [
        (name, unit)
        for name in (
            "canonicalize",
            "shard",
            "add_adapters",
            "quantize_linear",
            "quantize_moe",
            "join_shared_expert",
            "align_linear",
            "widen_linear",
            "scale_cache",
            "attend_tree",
            "fuse_attention",
        )
        for unit in (
            "resolve_token_ids",
            "embed",
            "layer.full",
            "head",
            "sample",
            "process_logits",
            "sample_adjusted",
            "logprobs",
        )
    ] + [("select_early", "layer.full + head mixed-2-32")]
    for entry in manifest.passes[:-1]:  # a pass says that it changed what it has changed, and nothing else
        (now,) = (compiled_artifact / "graph").glob(f"??-{entry['pass']}.{entry['unit']}.txt")
        (before,) = (compiled_artifact / "graph").glob(f"{int(now.name[:2]) - 1:02}-*.{entry['unit']}.txt")
        was, became = (file.read_text().partition("\n")[2] for file in (before, now))
        assert (entry["changed"] > 0) == (was != became), entry
    assert list(manifest.seconds) == [
        "assemble", "build", "import backend", "link", "package", "passes", "trace", "tune"
    ]  # fmt: skip
    assert sum(manifest.seconds.values()) > 0.1
    assert manifest.made_with.keys() == {"g++", "machine"}
    assert manifest.factors.compile.target.device == "cpu"


@pytest.mark.thorough
def test_inductor_is_imported_late() -> None:
    """Not by what traces, tunes, and refuses models; building needs it."""
    modules = ("pipeline", "tuning.tune", "tuning.workers", "building", "codegen.cuda", "cost")
    told = "print('torch._inductor.compile_fx' in sys.modules)"
    early = [f"import graphllm.compile.{module}" for module in modules]
    late = "; ".join(["import sys", *early, told, "import graphllm.compile.codegen.backends", told])
    done = subprocess.run([sys.executable, "-c", late], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_tied_weights_are_counted_once() -> None:
    tied = LLAMA | {"num_hidden_layers": 1, "tie_word_embeddings": True}
    model = find_model(tied)
    untied_bytes, tied_bytes = (
        make_plan(model, model.config(hf), "float32").total_bytes
        for hf in (tied | {"tie_word_embeddings": False}, tied)
    )
    assert untied_bytes - tied_bytes == 50 * 32 * 4


def test_a_dump_or_the_number_of_jobs_changes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    source = open_source(checkpoint)
    one = compile_model(source.config, source.tensors, CONFIG, tmp_path / "one")
    two = compile_model(source.config, source.tensors, replace(CONFIG, dump=tmp_path / "d", jobs=1), tmp_path / "two")
    sums = [Artifact.open(p).manifest.files for p in (one, two)]
    assert sums[0] == sums[1]


def test_progress_is_reported(checkpoint: Path, tmp_path: Path) -> None:
    source = open_source(checkpoint)
    seen: list[tuple[str, int, int]] = []
    compile_model(source.config, source.tensors, CONFIG, tmp_path / "a", lambda *stage: seen.append(stage))
    assert seen[0] == ("trace", 0, 1)
    assert [s for s in seen if s[0] == "build"] == [("build", i, 16) for i in range(16)]
