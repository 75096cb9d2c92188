"""The first lines of Python in the README, word for word: they print what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from graphllm.config import EngineArgs, Env
from graphllm.host.machine import detect_target
from graphllm.loading.artifact.build import artifact_folder
from graphllm.loading.artifact.resolve import compile_config
from graphllm.loading.checkpoint.source import open_source

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.skipif(detect_target("auto").device != "cpu", reason="the artifact is for a CPU")
def test_the_first_lines_of_python(embedded_artifact: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = open_source(None)
    place = artifact_folder(source, compile_config(source.config, EngineArgs()), Env.read())
    place.parent.mkdir(parents=True)
    place.symlink_to(embedded_artifact)
    text = README.read_text()
    (code,) = re.findall(r"```python\n(from graphllm import.*?)```", text, flags=re.DOTALL)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["12 + 7 = 19.", "The capital of France is Paris."]
    assert "It prints " + " and ".join(f"`{line}`" for line in printed) in text
    assert [p.name for p in place.parent.iterdir()] == [place.name]  # nothing was compiled
