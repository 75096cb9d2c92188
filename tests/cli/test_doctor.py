"""`graphllm doctor`: the machine, an artifact's fit and its steps beside what the machine allows."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from graphllm.cli.doctor import doctor
from graphllm.program.artifact import Artifact


def test_costs_are_those_of_the_weights(checkpoint: Path, compiled_artifact: Path) -> None:
    """One token: every matrix but the embedding is read once and is two operations a number; rows grow with tokens."""
    costs = Artifact.trusted(compiled_artifact).manifest.cost
    tensors = load_file(checkpoint / "model.safetensors")
    numbers = sum(t.numel() for name, t in tensors.items() if t.dim() == 2 and "embed" not in name)
    one = costs["decode-1 plain"]
    assert 1.0 <= one.flops / (2 * numbers) < 1.1
    assert 1.0 <= one.bytes / (4 * numbers) < 1.2
    layers = sum(t.numel() for name, t in tensors.items() if t.dim() == 2 and "layers" in name)
    mixed = next(cost for name, cost in costs.items() if name.startswith("mixed-") and name.endswith("-32 plain"))
    head = numbers - layers
    assert 1.0 <= mixed.flops / (2 * (32 * layers + 4 * head)) < 1.1


@pytest.mark.thorough
def test_steps_are_timed(cli: Callable[..., Any], compiled_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    done = cli("doctor", compiled_artifact)
    assert done.code == 0, done.err
    assert re.search(r"memory is read at \d+\.\d GB/s", done.out)
    rows = re.findall(r"│ (decode|mixed)-(\S+) plain +│ ([\d.]+) +│ ([\d.]+) +│ ([\d.]+) +│", done.out)
    assert len(rows) == len(Artifact.trusted(compiled_artifact).config.buckets)
    for _, _, _, seen, times in rows:
        assert float(seen) > 0
        assert float(times) > 0


def test_products_are_of_numbers_that_the_cpu_computes_with(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without vectors for half precision torch takes 95 s for what float32 does in 0.13."""
    monkeypatch.setattr("graphllm.cli.doctor.doctor._flags", lambda: {"avx2"})
    assert re.search(r"float32 products run at \d+\.\d\d TFLOP/s", cli("doctor").out)


@pytest.mark.thorough
def test_findings(
    cli: Callable[..., Any],
    eager_artifact: Path,
    tmp_path: Path,
    resign: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No compiler; an artifact of another version; one that is too large; one that is interpreted; no artifact."""
    bare = tmp_path / "bin"
    bare.mkdir()
    for kernels, code, says in (
        (lambda name: tmp_path / name, 0, "on prebuilt kernels only"),
        (lambda name: None, 1, "some models cannot run on a CPU"),
    ):
        with monkeypatch.context() as without:
            without.setenv("PATH", str(bare))
            without.setattr(doctor, "find_library", kernels)
            done = cli("doctor")
        assert done.code == code
        assert "there is no g++" in done.out
        assert says in done.out
        assert "apt install g++" in done.out

    def changed(name: str, edit: Callable[[dict[str, Any]], None]) -> Any:
        folder = shutil.copytree(eager_artifact, tmp_path / name)
        resign(folder, edit)
        return cli("doctor", folder)

    other = changed("other", lambda m: m["factors"]["versions"].update(torch="1.0"))
    assert other.code == 1
    assert "compile again" in other.out
    large = changed("large", lambda m: m["memory"].update(weights=10**15))
    assert large.code == 1
    assert "it needs 1000000.0 GB" in large.out
    same = changed("same", lambda m: None)
    assert same.code == 0
    assert "it is interpreted" in same.out
    done = cli("doctor", tmp_path / "nothing")
    assert done.code not in (0, None)
    assert "Traceback" not in done.err
