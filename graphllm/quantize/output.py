"""The new checkpoint folder: files of a layer or some, made elsewhere than where it will be."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from graphllm.config import ConfigError

_FILE_BYTES = 1 << 26  # what is held longer than a layer leaves holes in the memory of layers
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf", "*.pt", "*.pth", "*.h5")


class Output:
    """Written in a folder next to it, which becomes ``folder`` at the end of a with statement that did not fail."""

    def __init__(self, folder: Path) -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"output: {folder} is there already; give a new folder")
        self._folder = folder
        self._files: list[dict[str, int]] = []  # the bytes of each one's tensors
        self._held: dict[str, Tensor] = {}

    def __enter__(self) -> Output:
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._at = Path(tempfile.mkdtemp(prefix=f".{self._folder.name}-", dir=self._folder.parent))
        return self

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Write these tensors, now or with later ones."""
        self._held |= {n: t.cpu().contiguous() for n, t in tensors.items()}
        if sum(t.nbytes for t in self._held.values()) >= _FILE_BYTES:
            self._write()

    def _write(self) -> None:
        save_file(self._held, self._at / f"{len(self._files)}.safetensors", metadata={"format": "pt"})
        self._files.append({n: t.nbytes for n, t in self._held.items()})
        self._held = {}

    def finish(self, source: Path, config: Mapping[str, Any]) -> int:
        """Write what is left, config.json and the source's other files. Returns the bytes of all tensors."""
        self._write()
        count = len(self._files)
        single = "model.safetensors"
        names = [single] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for i, name in enumerate(names):
            (self._at / f"{i}.safetensors").rename(self._at / name)
        total = sum(sum(of.values()) for of in self._files)
        if count > 1:
            found = {tensor: name for name, of in zip(names, self._files, strict=True) for tensor in of}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(found.items()))}
            (self._at / f"{single}.index.json").write_text(json.dumps(index, indent=1))
        for file in source.iterdir():
            if file.is_file() and not file.name.startswith(".") and not any(map(file.match, _WEIGHTS)):
                shutil.copyfile(file, self._at / file.name)
        (self._at / "config.json").write_text(json.dumps(config, indent=2))
        return total

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            shutil.rmtree(self._at)
            return
        mask = os.umask(0)
        os.umask(mask)
        for path in (self._at, *self._at.iterdir()):  # temporary ones are for their owner only
            path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
        self._at.replace(self._folder)
