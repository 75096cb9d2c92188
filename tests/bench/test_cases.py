"""Every case can be loaded and asked for help without a GPU. Options, rows, turns and
records of a run."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bench import harness, record
from bench.__main__ import find_cases, listing, parser_of
from bench.harness import VOID, Case, check_experts, check_tokens, in_process, in_turn, rows_of, void_unless
from tests.waiting import PATIENCE

CASES = find_cases()
FILES = sorted({entry.module for entry in CASES.values()})


def bench(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, "-m", "bench", *words], {**os.environ, **more}
    return subprocess.run(command, cwd=harness.ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE)


def module_of(values: str) -> ModuleType:
    made = ModuleType("made")
    exec(values, made.__dict__)
    return made


@pytest.mark.thorough
@pytest.mark.parametrize("name", FILES)
def test_case_loads_and_helps(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(name)
    assert callable(module.run)
    for case, settings in module.CASES:
        assert CASES[case].module == name
        assert all(setting in settings for setting in getattr(module, "HELP", {})) or len(module.CASES) > 1
        with pytest.raises(SystemExit) as end:
            parser_of(case, module).parse_args(["--help"])
        assert end.value.code == 0
        assert case in capsys.readouterr().out


def test_list_names_every_case_and_loads_none() -> None:
    done = bench(PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert {line.split()[1] for line in lines[2:]} == CASES.keys()
    assert {"cpu", "gpu_table", "paired", "scheduler", "serve_streams"} <= CASES.keys()
    assert not {name for name in ("torch", "numpy", "msgspec") if f" {name}\n" in done.stderr}
    assert bench("no_such_case").returncode != 0
    assert len(lines) == len(listing(CASES).splitlines())


def test_settings_become_options() -> None:
    module = module_of(
        "from pathlib import Path\n'A doc.'\nCASES = [('made', {'other': Path, 'files': [Path], 'rounds': 5, "
        "'rate': 1.5, 'sizes': (1, 2), 'fast_one': False, 'shape': 'x', 'lock': None})]"
    )
    parser = parser_of("made", module)
    plain = vars(parser.parse_args(["/a", "/b", "/c"]))
    assert plain == {
        "other": Path("/a"), "files": [Path("/b"), Path("/c")], "rounds": 5, "rate": 1.5, "sizes": (1, 2),
        "fast_one": False, "shape": "x", "lock": None, "out": None,
    }  # fmt: skip
    words = ["--rounds", "7", "--sizes", "8,64", "--fast-one", "--shape", "y", "--lock", "/l", "--out", "/o"]
    asked = vars(parser.parse_args(["/a", "/b", *words]))
    assert (asked["rounds"], asked["sizes"], asked["fast_one"]) == (7, (8, 64), True)
    assert (asked["shape"], asked["lock"], asked["out"]) == ("y", Path("/l"), Path("/o"))


def test_rows_are_the_innermost_mappings() -> None:
    figures = {"a": 1, "decode": {1: {"ms": 2.5, "runs": [1, 2]}, "note": "x"}, "list": [{"b": 1}, {"b": 2}]}
    assert rows_of(figures) == {
        "all": {"a": 1}, "decode": {"note": "x"}, "decode, 1": {"ms": 2.5, "runs": [1, 2]}, "list, 1": {"b": 1},
        "list, 2": {"b": 2},
    }  # fmt: skip


def test_turns() -> None:
    calls: list[str] = []

    def measure(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    assert in_turn(2, "ab", measure, warm=1) == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
    assert calls == list("ababab")
    calls.clear()
    in_turn(3, "ab", measure, order="mirrored")
    assert calls == list("baabba")
    calls.clear()
    in_turn(4, "abc", measure, order="random")
    assert [sorted(calls[at : at + 3]) for at in range(0, 12, 3)] == [list("abc")] * 4


def test_work_that_is_not_real_is_refused() -> None:
    check_tokens([[1, 2], [1, 3]])
    check_tokens([[1, 1]])
    with pytest.raises(AssertionError, match="all 3 sequences have the same tokens"):
        check_tokens([[0, 0], [0, 0], [0, 0]])
    assert void_unless(check_tokens, [[1], [2]]) == {}
    assert "same tokens" in void_unless(check_tokens, [[1], [1]])[VOID]["why"]
    check_experts({"1": [8, 8], "128": [8, 100]}, 8)
    with pytest.raises(AssertionError, match="128 tokens read 8 experts"):
        check_experts({"1": [8, 8], "128": [8, 8]}, 8)


def test_function_in_a_process(tmp_path: Path) -> None:
    assert in_process(harness.rows_of, {"a": {"b": 1}}) == {"a": {"b": 1}}
    assert in_process(harness.rows_of, 3) == {"failed": 1}


def test_record_and_its_place(tmp_path: Path) -> None:
    made = record.record("scheduler", "cpu", "python -m bench scheduler", ["pytest"], {"row": {"us": 1.5}})
    assert tuple(made) == record.FIELDS
    assert made["versions"]["pytest"] == pytest.__version__
    assert len(made["versions"]["commit"].rstrip("+")) >= 7 or made["versions"]["commit"] == record.UNKNOWN
    file = record.place_of(made, tmp_path)
    assert file == tmp_path / record.folder_of(made["machine"]) / "scheduler.json"
    record.write(made, file)
    assert json.loads(file.read_text()) == made
    assert record.place_of(made, tmp_path / "own.json") == tmp_path / "own.json"
    assert record.place_of(made, None).is_relative_to(record.RESULTS)


@pytest.mark.parametrize(
    ("machine", "folder"),
    [
        ({"name": "NVIDIA H200", "gpus": 1, "features": "amx"}, "h200"),
        ({"name": "NVIDIA H100 80GB HBM3", "gpus": 4}, "h100-x4"),
        ({"name": "Intel(R) Xeon(R) Processor", "features": "amx"}, "xeon-amx"),
        ({"name": "AMD EPYC", "features": "avx512"}, "epyc-avx512"),
        ({"name": "unknown"}, "unknown"),
    ],
)
def test_folder_of_a_machine(machine: dict[str, object], folder: str) -> None:
    assert record.folder_of(machine) == folder


def test_case_runs_and_is_recorded(tmp_path: Path) -> None:
    done = bench("scheduler", "--steps", "3", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*/scheduler.json")
    found = json.loads(file.read_text())
    assert found["command"] == f"python -m bench scheduler --steps 3 --out {tmp_path}"
    assert found["rows"]["running decodes, 64, both"]["median us"] > 0
    assert json.loads(done.stdout) == found


def test_device_of_a_case() -> None:
    assert Case("made", {"target": "cuda"}).device == "cuda"
    assert Case("made", {}).device == "cpu"
