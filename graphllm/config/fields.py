"""Reading the JSON files of a checkpoint: each field with its type and range, or one ConfigError that names it.

A missing field has its default, and None as a default means that it must be there. A null is refused unless the reader
says what it stands for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphllm.config.errors import ConfigError
from graphllm.config.parameter import SWITCH, Check, is_int, is_number, is_strings

MOST = 2**31 - 1  # of what is counted in 32 bits
MAX_MODEL_LEN = "max_model_len"  # a field in addition to config.json's: tokens of the engine's longest context
DRAFT = "draft"  # a field in addition to config.json's: the config.json of a draft model that joins the model
MODEL_IMPL = "model_impl"  # a field in addition to config.json's: the setting, where it is not auto
READ = "\0read"  # a field in addition to config.json's: the set of the names that were asked for, which copies share
_LARGEST = 2**24  # width, number of heads or vocabulary of a model
_DEEPEST = 64  # levels of lists and objects in a file
_POINTER = b"version https://git-lfs"

Fields = Mapping[str, Any]


def read_json(file: Path) -> dict[str, Any] | None:
    """The object in a file, None when there is no such file. Raises ConfigError when it cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"), parse_constant=_constant, object_hook=_tagged)
    except FileNotFoundError:
        return None
    except OSError as failure:
        raise ConfigError(f"{file}: cannot be read ({failure.strerror}); put the checkpoint's file there") from failure
    except (ValueError, RecursionError) as damage:
        check_no_pointer(file)
        raise ConfigError(f"{file}: damaged, not valid JSON ({damage}); download it again") from damage
    if not isinstance(found, dict) or _deeper(found, _DEEPEST):
        what = f"nested more than {_DEEPEST} deep" if isinstance(found, dict) else "no JSON object"
        raise ConfigError(f"{file}: damaged ({what}); download it again")
    return found


def read_text(file: Path) -> str:
    """A text file of a checkpoint. Raises ConfigError when it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as damage:
        raise ConfigError(f"{file}: cannot be read as text ({damage}); download it again") from damage


def check_no_pointer(file: Path) -> None:
    """Raises ConfigError for the text that Git leaves in place of a large file where Git LFS is not installed."""
    try:
        with file.open("rb") as f:
            start = f.read(len(_POINTER))
    except OSError:
        return
    if start == _POINTER:
        raise ConfigError(
            f"{file}: is a Git-LFS pointer and not the file itself; run `git lfs pull` in its folder, or download it"
        )


def is_folder(path: Path) -> bool:
    """Whether there is such a folder; a name that no file can have is none."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def whole(fields: Fields, name: str, default: Any = None, null: Any = None, *, ge: int = 1, le: int = _LARGEST) -> int:
    """A whole number."""
    right = Check(
        lambda v: is_int(v) and ge <= v <= le, f"set it to the checkpoint's, a whole number from {ge} to {le}"
    )
    return int(read(fields, name, right, default, null))


def number(
    fields: Fields, name: str, default: Any = None, null: Any = None, *, ge: float = -math.inf, gt: float = -math.inf,
    le: float = math.inf,
) -> float:  # fmt: skip
    """A finite number, which may be written as a whole one."""
    bounds = [f"{word} {bound}" for word, bound in (("from", ge), ("above", gt), ("to", le)) if math.isfinite(bound)]
    remedy = " ".join(["set it to the checkpoint's, a number", *bounds])
    return float(read(fields, name, Check(lambda v: is_number(v) and v >= ge and gt < v <= le, remedy), default, null))


def switch(fields: Fields, name: str, default: bool) -> bool:
    """True or False."""
    return bool(read(fields, name, SWITCH, default))


def section(fields: Fields, name: str, file: str = "config.json") -> Fields:
    """An object; empty when it is missing or null."""
    right = Check(lambda v: isinstance(v, Mapping), "set it to the checkpoint's object, or leave it out")
    found: Fields = read(fields, name, right, {}, {}, file)
    return found


def strings(fields: Fields, name: str) -> tuple[str, ...]:
    """A list of texts; empty when it is missing or null."""
    right = Check(lambda v: isinstance(v, list) and is_strings(tuple(v)), "set it to the checkpoint's list of texts")
    return tuple(read(fields, name, right, (), ()))


def read(
    fields: Fields, name: str, check: Check, default: Any = None, null: Any = None, file: str = "config.json"
) -> Any:
    """A field for which there is no reader above."""
    note(fields, name)
    if name not in fields and default is not None:
        return default
    value = fields.get(name)
    if value is None and name in fields and null is not None:
        return null
    if not check.right(value):
        raise ConfigError(f"{file}: {name} is {value!r:.80}; {check.remedy}")
    return value


def raw(fields: Fields, name: str, default: Any = None) -> Any:
    """A field of any kind, that the caller checks."""
    note(fields, name)
    return fields.get(name, default)


def note(fields: Fields, *names: str) -> None:
    """These fields are used or refused: no warning says that they do nothing."""
    fields.get(READ, set()).update(names)


def _constant(name: str) -> float:
    if name == "NaN":  # it equals nothing, not even what an artifact was compiled with
        raise ValueError("NaN is no number")
    return float(name)


def _tagged(made: dict[str, Any]) -> Any:
    """transformers writes an infinite number as an object, which other readers of JSON know."""
    infinite = made.get("__float__")
    return _constant(infinite) if len(made) == 1 and infinite in ("Infinity", "-Infinity", "NaN") else made


def _deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_deeper(v, levels - 1) for v in inner)
