"""The wheel and the source distribution: built as a release is, whole, at work in an empty environment elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from graphllm.host.kernel_sources import LEVELS, LOOPS, library_name, sources

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
NO_SOURCES = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")


def _run(*command: object, cwd: Path, **environment: str) -> str:
    """What it prints, in an environment that knows nothing of this checkout."""
    outside = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | environment
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=outside, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _environment(folder: Path, *install: object) -> Path:
    """An empty virtual environment into which this is installed: its programs."""
    _run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    _run(folder / "bin" / "pip", "install", "-q", *install, cwd=folder.parent)
    return folder / "bin"


@pytest.fixture(scope="module")
def packages(shared: Any) -> dict[str, Path]:
    """The source distribution, and the wheel that was built of it."""

    def make(folder: Path) -> None:
        shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=NO_SOURCES)
        shutil.rmtree(folder / "source" / "graphllm" / "prebuilt", ignore_errors=True)  # the clone's own
        bin = _environment(folder / "venv", "build")
        _run(bin / "python", "-m", "build", "--outdir", folder / "dist", folder / "source", cwd=folder)

    dist = shared("packages", make) / "dist"
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    return {"wheel": wheel, "source": source}


def test_the_packages_are_whole(packages: dict[str, Path]) -> None:
    """All files of the package are in both, also those that are no Python, and nothing else is installed."""
    files = {
        str(Path(folder, name).relative_to(ROOT))
        for folder, _, names in os.walk(ROOT / "graphllm", followlinks=True)
        for name in names
        if not folder.endswith("__pycache__")
    }
    assert {Path(f).suffix for f in files} >= {".py", ".cpp", ".h", ".safetensors", ".json", ".js", ".woff2"}
    files = {name for name in files if not name.startswith("graphllm/prebuilt/")}  # the clone's own
    with zipfile.ZipFile(packages["wheel"]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    kernels = {name for name in names if name.startswith("graphllm/prebuilt/")}
    assert names - kernels == files
    libraries = {library_name(source) for source in (*sources(), LOOPS)}
    assert kernels == {f"graphllm/prebuilt/{level.name}/{name}" for level in LEVELS for name in libraries}
    with tarfile.open(packages["source"]) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert files <= names
    assert not [name for name in names if name.startswith(("tests", "bench", "docs"))]


@pytest.mark.parametrize("kind", ["wheel", "source"])
def test_installed_elsewhere(kind: str, packages: dict[str, Path], tmp_path: Path) -> None:
    """With all that it depends on, torch as well, as docs/index.md does it."""
    bin = _environment(tmp_path / "venv", "-c", ROOT / "constraints.txt", packages[kind])
    away = tmp_path / "away"
    away.mkdir()
    where = _run(bin / "python", "-c", "import graphllm; print(graphllm.__file__)", cwd=away)
    assert Path(where.strip()).is_relative_to(tmp_path / "venv")
    answer = _run(
        *(bin / "graphllm", "run", "--prompt", "What is 12 + 7?"), cwd=away, GRAPHLLM_CACHE=str(tmp_path / "cache")
    )
    assert "12 + 7 = 19." in answer
    assert not list(away.iterdir())
