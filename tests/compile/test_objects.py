"""Objects compiled in the background: the library computes what the sources say, also when objects were kept."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphllm.compile.codegen.objects import BuildError, Objects

HEADER = "#define FIVE 5"


def _command(definition: str) -> list[str]:
    return ["g++", f"-DADDED={definition}", "-fPIC", "-c"]


class Made:
    """What a library's functions return, and which sources were compiled for it."""

    def __init__(self, folder: Path | None, place: Path, own: Path, generated: str, definition: str = "1") -> None:
        def command(source: Path, output: Path) -> list[str]:
            return [*_command(definition), str(source), "-o", str(output)]

        with Objects(folder) as objects:
            objects.add(own)
            objects.link([own], [generated], HEADER, command, CALLS, place)
        self.compiled = sorted(name for name in objects.seconds if name != "link")
        library = ctypes.CDLL(str(place))
        self.own, self.generated = library.own(), library.generated()
        assert library.calls() == 3


@pytest.fixture
def own(tmp_path: Path) -> Path:
    source = tmp_path / "doubler" / "cpu.cpp"
    source.parent.mkdir()
    source.write_text('extern "C" int own() { return 21 * 2; }')
    return source


CALLS = 'extern "C" int calls() { return 3; }'
GENERATED = 'extern "C" int generated() { return FIVE + ADDED; }'


def test_kept_objects_are_used_until_something_changes(tmp_path: Path, own: Path) -> None:
    kept = tmp_path / "kept"
    first = Made(kept, tmp_path / "1.so", own, GENERATED)
    assert (first.own, first.generated) == (42, 6)
    assert first.compiled == ["calls.cpp", "doubler/cpu.cpp", "generated0.cpp"]

    again = Made(kept, tmp_path / "2.so", own, GENERATED)
    assert (again.own, again.generated, again.compiled) == (42, 6, [])

    own.write_text('extern "C" int own() { return 21 * 3; }')
    edited = Made(kept, tmp_path / "3.so", own, GENERATED)
    assert (edited.own, edited.generated, edited.compiled) == (63, 6, ["doubler/cpu.cpp"])

    text = Made(kept, tmp_path / "4.so", own, GENERATED.replace("FIVE", "2 * FIVE"))
    assert (text.own, text.generated, text.compiled) == (63, 11, ["generated0.cpp"])

    flags = Made(kept, tmp_path / "5.so", own, GENERATED, "7")
    assert (flags.own, flags.generated, flags.compiled) == (63, 12, ["generated0.cpp"])


@pytest.mark.parametrize("where", [None, "a file/kept"])
def test_without_a_folder_nothing_is_kept(tmp_path: Path, own: Path, where: str | None) -> None:
    (tmp_path / "a file").touch()
    for turn in range(2):
        made = Made(tmp_path / where if where else None, tmp_path / f"{turn}.so", own, GENERATED)
        assert (made.own, made.generated, len(made.compiled)) == (42, 6, 3)


def test_a_failed_compiler_is_quoted_and_keeps_nothing(tmp_path: Path, own: Path) -> None:
    own.write_text('extern "C" int own() { return unheard_of; }')
    with pytest.raises(BuildError, match="unheard_of"):
        Made(tmp_path / "kept", tmp_path / "1.so", own, GENERATED)
    own.write_text('extern "C" int own() { return 1; }')
    assert Made(tmp_path / "kept", tmp_path / "2.so", own, GENERATED).own == 1


def test_a_missing_compiler_is_named(tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"g\+\+ is not installed"):
        Made(None, tmp_path / "1.so", own, GENERATED)


def test_sources_that_are_not_expected_are_not_linked(tmp_path: Path, own: Path) -> None:
    other = tmp_path / "other" / "cpu.cpp"
    other.parent.mkdir()
    other.write_text('extern "C" int own() { return 0; }')  # twice the same name would not link
    with Objects(None) as objects:
        objects.add(other)
        objects.expect([own])
        objects.link(
            [own], [], HEADER, lambda source, to: [*_command("1"), str(source), "-o", str(to)], CALLS, tmp_path / "1.so"
        )
    assert ctypes.CDLL(str(tmp_path / "1.so")).own() == 42


def test_what_a_killed_compile_left_is_removed(tmp_path: Path) -> None:
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True
    ).stdout
    dead, living = tmp_path / f".{gone.strip()}-a.o", tmp_path / f".{os.getpid()}-b.o"
    for file in (dead, living, tmp_path / "kept.o"):
        file.touch()
    with Objects(tmp_path):
        assert sorted(f.name for f in tmp_path.iterdir()) == [living.name, "kept.o"]


def test_the_first_compilers_need_no_torch() -> None:
    script = "import sys, graphllm.compile.codegen.objects; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
