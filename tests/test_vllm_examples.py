"""The scripts of docs/examples/vllm run, and say what is right. A few in this process, all of them as a user would."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE

FOLDER = Path(__file__).parents[1] / "docs" / "examples" / "vllm"
SCRIPTS = sorted(FOLDER.glob("*.py"))
# What each prints, by a pattern for the whole.
SAID = {
    "async_stream": r"(request-[01]: '.+'\n){2}",
    "basic": r"('.+' -> '.*'\n){3}",
    "beam_search": r"( +-\d+\.\d{3} '.*'\n){6}",
    "conversation": r"The capital of France is Paris\.\n12 \+ 7 = 19\.\n20 \+ 22 = 42\.\n12 \+ 7 = 19\.\n",
    "engine_loop": r"(?=(?s:.*)0 \['.*'\]\n)(?=(?s:.*)1 \['.*', '.*'\]\n)(.*\n){2}",
    "logits_processor": r"\[.*\]\n\[67, 67, 67, 67, 67, 67\]\n\[.*\]\n\[128, 128, 128, 128, 128, 128, 128, 128\]\n",
    "metrics": r"(?s)(?=.*vllm:generation_tokens \(counter\) = 24\n)(?=.*vllm:request_success \(counter\) = 3\n)"
    r"(?=.*vllm:time_to_first_token_seconds \(histogram\): sum = 0?\.\d+|.*count = 3\n).*",
    "prefix_caching": r"same outputs: True\ncached tokens: \[(\d\d+), \1, \1\]\nafter the reset: 0\n",
    "sampling": r"three: \[.*\]\nthe same seed, the same texts: True\n\{.*\}\n\{.*\}\nrepetition \d+\n",
    "structured_outputs": r"choice: (Positive|Negative)\nregex: [a-z]{3,8}@example\.com\n"
    r"json: \{'city': '.*', 'large': (True|False)\}\ngrammar: \d{1,3} \+ \d{1,3}\n",
}
IN_THE_SUITE = ("conversation", "logits_processor", "sampling")


def test_there_are_ten() -> None:
    assert [script.stem for script in SCRIPTS] == sorted(SAID)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_only_the_import_line_is_ours(script: Path) -> None:
    text = script.read_text()
    (ours,) = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.module == "graphllm"
    ]
    assert text.count("graphllm") == 1
    assert ours.lineno == ours.end_lineno


@pytest.mark.parametrize("name", IN_THE_SUITE)
def test_scripts_run(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(FOLDER / f"{name}.py"))["main"](enforce_eager=True, device="cpu", max_model_len=256)
    assert re.fullmatch(SAID[name], capfd.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_every_script_runs_as_it_is(script: Path) -> None:
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, re.fullmatch(SAID[script.stem], done.stdout) is not None) == (0, True), done
