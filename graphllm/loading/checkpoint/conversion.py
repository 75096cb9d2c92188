"""Files of older checkpoints, turned once into those that are read here, by a process of its own with limits.

What it makes stays in the cache, named after the files that it was made of.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from graphllm.config import ConfigError
from graphllm.config.fields import check_no_pointer
from graphllm.config.setting import size_text
from graphllm.host.importing import import_path
from graphllm.host.silence import Silence, threads_of
from graphllm.loading.checkpoint.gguf_folder import gguf_tokenizer_folder
from graphllm.loading.checkpoint.made_once import file_facts, made_once
from graphllm.weights.checkpoint.checkpoint import BIN

_WEIGHTS = "graphllm.loading.checkpoint.weights_worker"
_TOKENIZER = "graphllm.loading.checkpoint.tokenizer_worker"
_SECONDS = 120.0  # of a conversion, in which it could run; and more for large files
_TICK = 0.25  # seconds between two looks at whether it could
_SLOW = 20e6  # bytes of weights that are read and written in a second at least
# Files of tokenizers that have no tokenizer.json.
_TOKENIZER_FILES = ("*.model", "*.tiktoken", "vocab.json", "vocab.txt", "vocab.bpe")


def safetensors_of(folder: Path, files: Sequence[str]) -> Path:
    """A folder with the tensors of ``folder``'s .bin files as safetensors. Raises ConfigError when they hold anything
    else, and when there is no room."""
    index = [] if files == [BIN] else [f"{BIN}.index.json"]
    return _converted(_WEIGHTS, folder, [folder / file for file in (*files, *index)], "weights")


def tokenizer_folder(folder: Path) -> Path:
    """The folder with the tokenizer.json of a checkpoint folder: itself, or one that transformers has written from
    another kind of tokenizer. Raises ConfigError when that cannot be."""
    if (folder / "tokenizer.json").is_file():
        return folder
    return next((made for make in _TOKENIZERS if (made := make(folder)) is not None), folder)


def _older_tokenizer(folder: Path) -> Path | None:
    """What transformers makes of older files; None where there are none."""
    kept = [file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)]
    if not kept:
        return None
    also = [file for pattern in ("*.json", "*.txt", "*.jinja") for file in folder.glob(pattern)]
    return _converted(_TOKENIZER, folder, sorted({*kept, *also}), "tokenizer")


_TOKENIZERS = (gguf_tokenizer_folder, _older_tokenizer)  # other kinds of tokenizers, in the order of the search


def _converted(worker: str, folder: Path, files: Sequence[Path], what: str) -> Path:
    """What a worker makes of some files of a folder: it is given the folder to write to and the files."""
    for file in files:
        check_no_pointer(file)
    facts = file_facts(files)
    size = sum(nbytes for _, nbytes, _ in facts)

    def write(building: Path, place: Path) -> None:
        _run(worker, building, files, size, f"{folder}: its {what}", place)

    return made_once(what, [worker, facts], write)


def _run(worker: str, building: Path, files: Sequence[Path], size: int, subject: str, place: Path) -> None:
    logging.getLogger(__name__).warning("converting %s (%s) once, into %s", subject, size_text(size), place)
    if shutil.disk_usage(building).free < size:
        raise ConfigError(
            f"{subject} need {size_text(size)} of {building.parent}; make room there or set GRAPHLLM_CACHE"
        )
    environment = {
        **os.environ, "PYTHONPATH": import_path(), "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    command = [sys.executable, "-P", "-m", worker, str(building), *map(str, files)]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
        start_new_session=True,
    )  # fmt: skip
    seconds, silence = _SECONDS + size / _SLOW, Silence(lambda: threads_of(process.pid), _TICK)
    with process:
        try:
            while (said := _said(process)) is None:
                if silence.look() > seconds:
                    raise ConfigError(f"{subject} cannot be converted in {seconds:.0f} s; {_ELSEWHERE}")
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        reason = said.decode(errors="replace").strip() or f"its limits are passed, or it died: {process.returncode}"
        raise ConfigError(f"{subject} cannot be converted ({reason:.500}); {_ELSEWHERE}")


def _said(process: subprocess.Popen[bytes]) -> bytes | None:
    """All that a process has said, once it has ended; None while it works, after a while."""
    try:
        return process.communicate(timeout=_TICK)[0]
    except subprocess.TimeoutExpired:
        return None


_ELSEWHERE = (
    "download the files again, or convert them where you trust them, with from_pretrained and save_pretrained of "
    "transformers"
)
