"""The CPU benchmark's own arithmetic and rows; its turns and processes; that a GGUF file holds the checkpoint's
numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.cpu import report
from bench.cpu.cases import CASES, FIRST, PEAK, Case
from bench.cpu.checkpoint import config_of, make_checkpoint, tensors_of, words
from bench.cpu.gguf_checkpoint import gguf_name, write_gguf
from bench.cpu.lock import Lock
from bench.cpu.machine import IMPORT, PRODUCTS, READ
from bench.cpu.peer import Peer, Runner, Times, Workload, find_peers
from bench.cpu.report import MACHINE, Turn
from bench.cpu.turns import take_round
from bench.cpu.worker import Task, make_prompts, measure
from bench.process import Commands, Process, ProcessFailedError
from tests.tiers import thorough
from tests.waiting import PATIENCE, until

_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
}  # fmt: skip
TINY = config_of("qwen2.5-0.5b", 2) | _SIZES
TINY_MOE = config_of("qwen3-moe-1.2b", 2) | _SIZES | {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 12}
BOTH = pytest.mark.parametrize("tiny", [TINY, TINY_MOE], ids=["dense", "experts"])


class Absent(Peer):
    name = "absent"
    modules = ("no_such_module", "json")

    def prepare(self, model: Workload) -> None:
        raise AssertionError

    def files(self, model: Workload) -> list[Path]:
        raise AssertionError

    def load(self, model: Workload) -> Runner:
        raise AssertionError


def empty() -> report.Measured:
    return report.Measured(report.Parameters(all=10**9, layers=5 * 10**8))


def measured(
    figures: dict[str, tuple[int, list[float]]], reads: tuple[float, ...] = (30.0, 40.0, 50.0)
) -> report.Measured:
    """Systems with one figure a turn, the same for every column, and as many rounds of one turn."""
    made = empty()
    made.starts[MACHINE] = [{PRODUCTS: 1.0, IMPORT: 2.0}, {PRODUCTS: 3.0, IMPORT: 1.0}]
    for name, (bits, values) in figures.items():
        made.bits[name] = bits
        made.starts[name] = [{FIRST: value, PEAK: value} for value in values]
    for i, read in enumerate(reads):
        for bits in report.BITS:
            now = {n: v[i] for n, (b, v) in figures.items() if b == bits and i < len(v)}
            around = {c.name: dict.fromkeys(now, read / 2) for c in CASES}
            made.turns.append(Turn(bits, i, 0, {c.name: {MACHINE: read, **now} for c in CASES}, around))
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


def test_systems_are_compared_within_a_turn() -> None:
    # The medians are 3 and 2.5: their ratio would say 1.2.
    made = measured({"graphllm bf16": (16, [3.0, 1.0, 8.0]), "other": (16, [2.5, 2.0, 10.0])})
    assert made.ratios(CASES[1].name, "graphllm bf16", "other") == pytest.approx([1.2, 0.5, 0.8])
    rows = report.rows(made)
    # 2 GB a token: 6 of the 15, 2 of 20 and 16 of 25 GB/s around it; 5 of 15, 4 of 20 and 20 of 25.
    share = "batch 1: share of the memory speed around it"
    assert rows["16 bits, graphllm bf16"][share] == pytest.approx(0.4)
    assert rows["16 bits, other"][share] == pytest.approx(1 / 3, abs=1e-4)
    cases = ("decode batch 1", "decode batch 8", "prefill 1,024")
    assert rows["graphllm bf16 over other"] == dict.fromkeys(cases, "0.80, ahead in 1 of 3")


def test_a_system_without_all_cases_is_not_in_the_tables() -> None:
    made = measured({"graphllm bf16": (16, [3.0]), "broken": (16, [2.0])})
    for turn in made.turns:
        turn.figures[CASES[2].name].pop("broken", None)
    made.bits["never started"] = 8
    assert made.medians().keys() == {"graphllm bf16"}
    rows = report.rows(made)
    assert "16 bits, broken" not in rows
    assert rows["each turn, broken"][CASES[0].name] == [2.0]
    assert "8 bits, never started" not in rows


def test_rows() -> None:
    made = measured({"graphllm bf16": (16, [4.0]), "graphllm bf16, executor": (16, [8.0]),
                     "graphllm bf16, HTTP server": (16, [2.0]), "other": (4, [1234.5])})  # fmt: skip
    made.missing["third"] = "not installed"
    rows = report.rows(made)
    assert {rows["16 bits, graphllm bf16"][column] for column in report.COLUMNS} == {4.0}
    assert {rows["4 bits, other"][column] for column in report.COLUMNS} == {1234.5}
    assert set(rows["bf16, LLM, share of the executor's speed"].values()) == {0.5}
    assert set(rows["bf16, HTTP server, share of the executor's speed"].values()) == {0.25}
    names = list(rows)
    assert names.index("16 bits, floor") < names.index("4 bits, floor")
    assert not [name for name in names if name.startswith("8 bits")]
    assert rows["not available"] == {"third": "not installed"}


def test_rows_of_single_turns() -> None:
    made = measured({"graphllm bf16": (16, [4.0, 2.0, 6.0])})
    for figures in made.starts["graphllm bf16"]:
        del figures[PEAK]
    rows = report.rows(made)
    assert rows["16 bits, graphllm bf16"][CASES[0].name] == 4.0
    assert rows["each turn, graphllm bf16"] == {c.name: [4.0, 2.0, 6.0] for c in CASES} | {FIRST: [4.0, 2.0, 6.0]}
    spread = {"least read": 30.0, "most read": 50.0}
    assert rows["machine"] == {READ: 40.0, PRODUCTS: 2.0, IMPORT: 1.5, **spread}
    # In each of three turns the probe runs for 16, 8 and 4 bits.
    assert rows["each turn, machine"][CASES[0].name] == [30.0] * 3 + [40.0] * 3 + [50.0] * 3


def test_what_is_missing() -> None:
    assert Absent().missing() == "no_such_module not installed"
    peers = find_peers()
    assert next(iter(peers)) == "graphllm bf16"
    assert {"transformers eager bf16", "llama.cpp Q4_0", "OpenVINO GenAI int8"} <= peers.keys()


def test_task_crosses_a_command_line(tmp_path: Path) -> None:
    task = Task("measure", "graphllm bf16", Workload(tmp_path / "a", tmp_path, {"x": 1}, 2, 64, 8), 1.5, "3")
    assert Task.from_json(task.to_json()) == task


def test_prompts_are_the_same_for_all_systems_and_begin_differently_otherwise() -> None:
    assert make_prompts(CASES[1], 1000, "0 1") == make_prompts(CASES[1], 1000, "0 1")
    prompts = [p for case in CASES for seed in ("0", "0 1", "1 0") for p in make_prompts(case, 1000, seed)]
    assert len({tuple(p[:16]) for p in prompts}) == len(prompts)
    assert [len(p) for p in make_prompts(CASES[1], 1000, "0")] == [128] * 8


class Counting(Runner):
    """Notes what it is asked for; a token comes every tenth of a second."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.prompts: list[tuple[int, ...]] = []
        self.closed, self.first = 0, 0.0

    def run(self, prompts: Sequence[list[int]], count: int) -> Times:
        assert not self.closed
        self.asked.append((len(prompts), len(prompts[0]), count))
        self.prompts += map(tuple, prompts)
        now = time.perf_counter()
        self.first = self.first or now + 0.1
        return [[now + 0.1 * (i + 1) for i in range(count)] for _ in prompts]

    def close(self) -> None:
        self.closed += 1


class Asked(Commands):
    """Commands from a list."""

    def __init__(self, commands: list[dict[str, str]]) -> None:
        self.commands, self.answers = commands, []  # type: ignore[var-annotated]

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(self.commands)

    def answer(self, answer: object) -> None:
        self.answers.append(answer)


def test_a_worker_warms_up_once_and_runs_what_is_asked(tmp_path: Path) -> None:
    runner = Counting()
    asked = [CASES[1], CASES[0], CASES[1], CASES[2]]
    commands = Asked([{"case": case.name, "seed": f"0 {i}"} for i, case in enumerate(asked)])
    task = Task("measure", "any", Workload(tmp_path, tmp_path, {"vocab_size": 1000}, 2, 64, 8), 0.0, "0")
    begun = time.perf_counter()
    measure(runner, dataclasses.replace(task, begun=begun - 10), commands)
    single, batch, long = ((1, 128, 4), (1, 128, 64)), ((8, 128, 4), (8, 128, 64)), ((1, 1024, 1), (1, 1024, 1))
    assert runner.asked == [(1, 16, 1), *batch, *single, batch[1], *long]
    assert len(set(runner.prompts)) == len(runner.prompts)
    first, *rates, last = commands.answers
    assert first[FIRST] == pytest.approx(runner.first - begun + 10)
    assert rates == pytest.approx([80, 10, 80, 10240], rel=0.02)
    assert 0.01 < last[PEAK] < 100
    assert runner.closed == 1
    commands.commands = [{"case": "none", "seed": ""}]
    failing = Counting()
    with pytest.raises(StopIteration):
        measure(failing, task, commands)
    assert failing.closed == 1


# A system that notes when it starts, runs a case and ends, with a child in a session of its own. bad: where it fails.
SYSTEM = """
import os, subprocess, sys, time
from bench.process import Commands
name, log, bad = sys.argv[1:]
def note(what):
    with open(log, "a") as file:
        print(os.getpid(), name, *what, sep=",", file=file)
    if bad == what[0]:
        sys.exit("broken " + bad)
    if bad == what[0] + " hangs":
        time.sleep(1000)
commands = Commands()
silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
child = subprocess.Popen(["tail", "-F", log], start_new_session=True, **silent)
os.system("echo to stdout")
note(["start"])
commands.answer({"start to first token, s": 1.0})
for command in commands:
    note(["run", command["case"].split(",")[0], command["seed"]])
    commands.answer(5.0)
note(["end"])
commands.answer({"peak memory, GB": 2.0})
"""


def start(name: str, log: Path, bad: str = "") -> Process:
    return Process(
        [sys.executable, "-c", SYSTEM, name, str(log), bad],
        {"PYTHONPATH": os.getcwd()},
        limit=5.0 if bad == "run hangs" else PATIENCE,
    )


def left(log: Path) -> list[bytes]:
    """Command lines of the systems that note there, and of their children."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(file.read_bytes())
    return [line for line in found if str(log).encode() in line]


def test_systems_take_turns_side_by_side(tmp_path: Path) -> None:
    log, made = tmp_path / "log", empty()
    names = ["a", "b", "c", MACHINE]
    take_round(16, {n: partial(start, n, log) for n in names}, 7, 3, Lock(tmp_path / "lock"), made)
    noted = [line.split(",") for line in log.read_text().splitlines()]
    single, noted = noted[:4], noted[4:]
    assert sorted(tuple(what) for _, *what in single) == sorted((name, "start") for name in names)
    assert [what for _, _, what, *_ in noted] == ["start"] * 4 + ["run"] * 7 * len(CASES) * 3 + ["end"] * 4
    assert len({pid for pid, *_ in noted}) == 4  # each stays loaded
    assert not {pid for pid, *_ in noted} & {pid for pid, *_ in single}
    groups = [noted[i : i + 7] for i in range(4, len(noted) - 4, 7)]
    assert [{tuple(rest) for _, _, _, *rest in g} for g in groups] == [
        {(c.name.split(",")[0], f"7 {turn}")} for turn in range(3) for c in CASES
    ]
    assert all({name for _, name, *_ in g[::2]} == {MACHINE} for g in groups)  # before and after each
    orders = [(*(name for _, name, *_ in g[1::2]), MACHINE) for g in groups]
    assert all(sorted(order) == sorted(names) for order in orders)
    assert len(set(orders)) > 4
    assert [(t.bits, t.round, t.index) for t in made.turns] == [(16, 7, 0), (16, 7, 1), (16, 7, 2)]
    assert [tuple(f) for t in made.turns for f in t.figures.values()] == orders
    assert made.starts == {n: [{FIRST: 1.0, PEAK: 2.0}] for n in names}
    assert made.missing == {}


@pytest.mark.parametrize("bad", ["start", "run", thorough("run hangs"), "end"])
def test_a_system_that_fails_is_out_and_leaves_nothing(tmp_path: Path, bad: str) -> None:
    log, made = tmp_path / "log", empty()
    systems = {"good": partial(start, "good", log), "bad": partial(start, "bad", log, bad),
               MACHINE: partial(start, MACHINE, log)}  # fmt: skip
    take_round(8, systems, 0, 2, Lock(None), made)
    why = "no answer within 5 s" if bad == "run hangs" else f"status 1: to stdout\nbroken {bad}"
    assert made.missing == {"bad": f"failed: {why}"}
    assert [set(f) - {"bad"} for t in made.turns for f in t.figures.values()] == [{"good", MACHINE}] * 2 * len(CASES)
    assert made.starts["good"] == [{FIRST: 1.0, PEAK: 2.0}]
    assert left(log) == []


def test_a_probe_that_fails_ends_it_and_leaves_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    systems = {"a": partial(start, "a", log), MACHINE: partial(start, MACHINE, log, "run")}
    with pytest.raises(ProcessFailedError, match="broken run"):
        take_round(8, systems, 0, 2, Lock(None), empty())
    assert left(log) == []


def test_a_process_ends_when_there_will_be_no_commands(tmp_path: Path) -> None:
    """As when the benchmark itself is killed; what it started is left to whoever leaves ``with``."""
    log = tmp_path / "log"
    with start("a", log) as process:
        process.started()
        assert len(process.pids()) == 2
        assert process.end() == {PEAK: 2.0}
        until(lambda: len(process.pids()) == 1)
        assert left(log) == [b"\0".join([b"tail", b"-F", str(log).encode(), b""])]
    assert left(log) == []


@BOTH
def test_checkpoint_is_what_transformers_reads(tmp_path: Path, tiny: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_checkpoint(tmp_path, tiny)
    _, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values()), found  # nothing is missing, unexpected or of another shape
    assert AutoTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids(words(tiny)) == list(range(300))


def test_what_experts_cost() -> None:
    """8 sequences that choose 2 of 12 experts each leave (10/12)^8 of them unread."""
    found, sizes = report.count_parameters(TINY_MOE), dict(tensors_of(TINY_MOE))
    expert = sizes["model.layers.0.mlp.experts.3.up_proj.weight"]
    assert found.experts == 2 * 12 * 3 * expert[0] * expert[1]
    assert found.read(1) == pytest.approx(found.all - found.experts * 10 / 12)
    assert found.read(8) == pytest.approx(found.all - found.experts * (10 / 12) ** 8)
    assert found.layers == found.all - 300 * 64 - 64 - found.experts * 10 // 12
    dense = report.count_parameters(TINY)
    assert dense.read(1) == dense.read(8) == dense.all


@BOTH
def test_gguf_holds_the_checkpoints_numbers(tmp_path: Path, tiny: dict[str, Any]) -> None:
    gguf = pytest.importorskip("gguf")
    import torch
    from safetensors.torch import load_file

    make_checkpoint(tmp_path, tiny)
    write_gguf(tmp_path, tmp_path / "model.gguf", tiny, words(tiny))
    found = {t.name: t for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    stored = load_file(tmp_path / "model.safetensors")
    assert found.keys() == {gguf_name(name, tiny) for name in stored}
    for name, tensor in stored.items():
        data = torch.from_numpy(found[gguf_name(name, tiny)].data.copy())
        if ".experts." in name:
            data = data[int(name.split(".")[5])]
        whole = tensor.ndim > 1 and "mlp.gate." not in name
        assert torch.equal(data.view(torch.bfloat16).float() if whole else data, tensor.float()), name
    assert found["blk.1.attn_k.weight"].shape.tolist() == [64, 32]  # llama.cpp's order: the inner size first
    assert gguf_name("model.layers.1.self_attn.q_proj.bias", TINY) == "blk.1.attn_q.bias"
    assert gguf_name("model.layers.1.mlp.experts.7.up_proj.weight", TINY_MOE) == "blk.1.ffn_up_exps.weight"
    with pytest.raises(KeyError):
        gguf_name("model.layers.1.router.weight", tiny)
