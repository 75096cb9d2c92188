"""The CPU benchmark's own arithmetic, tables and plot; that a GGUF file holds the checkpoint's numbers; its workers."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bench.cpu import report
from bench.cpu.cases import CASES, FIRST, PEAK, Case
from bench.cpu.checkpoint import make_checkpoint, qwen2_config, qwen2_tensors, words
from bench.cpu.gguf_checkpoint import gguf_name, write_gguf
from bench.cpu.machine import GEMM, IMPORT, READ
from bench.cpu.peer import Peer, Runner, Workload, find_peers
from bench.cpu.worker import Task

TINY = {
    **qwen2_config(2), "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 300,
}  # fmt: skip


class Fake(Peer):
    packages = ()
    modules = ("no_such_module", "json")

    def __init__(self, name: str, bits: int) -> None:
        self.name, self.bits = name, bits

    def prepare(self, model: Workload) -> None:
        raise AssertionError

    def load(self, model: Workload) -> Runner:
        raise AssertionError


def measured(figures: dict[str, tuple[int, list[float]]]) -> report.Measured:
    """Systems with one figure a round, the same for every column."""
    about = {"machine": "abacus", "threads": 2, "date": "today", "command": "c", "versions": {"x": "1"}, "system": "s"}
    made = report.Measured(about, report.Parameters(all=10**9, layers=5 * 10**8))
    made.machine = [{READ: 30.0, GEMM: 1.0, IMPORT: 2.0}, {READ: 50.0, GEMM: 3.0, IMPORT: 1.0}]
    for name, (bits, rounds) in figures.items():
        for value in rounds:
            made.add(Fake(name, bits), dict.fromkeys(report.COLUMNS, value))
    return made


def test_rates() -> None:
    decode = Case("d", 2, 10, 3)
    # The second prompt has its first token at 2.0; from then on three tokens come until 4.0.
    assert decode.rate(0.0, [[1.0, 2.0, 3.0], [2.0, 3.5, 4.0]]) == pytest.approx(3 / 2)
    assert Case("p", 1, 1000, 1).rate(5.0, [[5.5]]) == pytest.approx(2000)


def test_medians_and_floors() -> None:
    made = measured({"a": (16, [3.0, 1.0, 2.0]), "b": (4, [5.0, 6.0])})
    assert made.medians() == {"a": dict.fromkeys(report.COLUMNS, 2.0), "b": dict.fromkeys(report.COLUMNS, 5.5)}
    floors = made.floors()
    assert floors[16]["decode batch 1, tokens/s"] == pytest.approx(20)  # 2 GB at 40 GB/s
    assert floors[4]["decode batch 8, tokens/s"] == pytest.approx(640)
    assert floors[8]["prefill 1,024, tokens/s"] == pytest.approx(2000)  # a GFLOP a token at 2 TFLOP/s
    assert floors[8][FIRST] == 1.5


def test_tables() -> None:
    made = measured({"graphllm bf16": (16, [4.0]), "graphllm bf16, executor": (16, [8.0]),
                     "graphllm bf16, HTTP server": (16, [2.0]), "other": (4, [1234.5])})  # fmt: skip
    made.missing["third"] = "not installed"
    lines = report.to_markdown(made, "name").splitlines()
    assert "| graphllm bf16 | 4.00 | 4.00 | 4.00 | 4.00 | 4.00 |" in lines
    assert "| other | 1,234 | 1,234 | 1,234 | 1,234 | 1,234 |" in lines
    assert "| bf16, LLM: share | 0.50 | 0.50 | 0.50 |  |" in lines
    assert "| bf16, HTTP server: share | 0.25 | 0.25 | 0.25 |  |" in lines
    assert lines.index("## 16-bit weights") < lines.index("## 4-bit weights")
    assert "## 8-bit weights" not in lines
    assert "- third: not installed" in lines


def test_files(tmp_path: Path) -> None:
    made = measured({"graphllm bf16": (16, [4.0, 2.0, 6.0])})
    del made.figures["graphllm bf16"][0][PEAK]
    made.figures["graphllm bf16"] = [{n: v for n, v in r.items() if n != PEAK} for r in made.figures["graphllm bf16"]]
    report.write(tmp_path / "new", "result", made)
    plain = json.loads((tmp_path / "new" / "result.json").read_text())
    assert plain["systems"]["graphllm bf16"]["median"][CASES[0].name] == 4.0
    assert [r[FIRST] for r in plain["systems"]["graphllm bf16"]["rounds"]] == [4.0, 2.0, 6.0]
    assert plain["machine can"]["median"][READ] == 40.0
    assert (tmp_path / "new" / "result.md").exists()


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = measured({"graphllm bf16": (16, [4.0]), "slower": (8, [3.0]), "graphllm bf16, executor": (16, [5.0])})
    report.plot(made, tmp_path / "plot.svg")
    texts = [e.text for e in ElementTree.parse(tmp_path / "plot.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("slower") == texts.count("graphllm bf16") == 4
    assert {c.name for c in CASES} | {FIRST} <= set(texts)
    assert "graphllm bf16, executor" not in texts


def test_what_is_missing() -> None:
    assert Fake("f", 16).missing() == "no_such_module not installed"
    peers = find_peers()
    assert next(iter(peers)) == "graphllm bf16"
    assert {"transformers eager bf16", "llama.cpp Q4_0", "OpenVINO GenAI int8"} <= peers.keys()


def test_task_crosses_a_command_line(tmp_path: Path) -> None:
    task = Task("measure", "graphllm bf16", Workload(tmp_path / "a", tmp_path, {"x": 1}, 2, 64, 8), 1.5, 3)
    assert Task.from_json(task.to_json()) == task


def test_checkpoint_is_what_transformers_calls_a_qwen2(tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    make_checkpoint(tmp_path, TINY)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == dict(qwen2_tensors(TINY))
    assert AutoTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids(words(TINY)) == list(range(300))


def test_gguf_holds_the_checkpoints_numbers(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    import torch
    from safetensors.torch import load_file

    make_checkpoint(tmp_path, TINY)
    write_gguf(tmp_path, tmp_path / "model.gguf", TINY, words(TINY))
    found = {t.name: t for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    stored = load_file(tmp_path / "model.safetensors")
    assert found.keys() == {gguf_name(name, 2) for name in stored}
    for name, tensor in stored.items():
        data = torch.from_numpy(found[gguf_name(name, 2)].data.copy())
        numbers = data.view(torch.bfloat16) if tensor.ndim > 1 else data
        assert torch.equal(numbers.float(), tensor.float()), name
    assert found["blk.1.attn_k.weight"].shape.tolist() == [64, 32]  # llama.cpp's order: the inner size first
    assert gguf_name("model.layers.1.self_attn.q_proj.bias", 2) == "blk.1.attn_q.bias"
    with pytest.raises(KeyError):
        gguf_name("model.layers.1.router.weight", 2)
