"""`Facts`: what a GGUF file says of its model, by keys and by which tensors there are, and which keys were read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from graphllm.weights.checkpoint.gguf.header import Gguf, Tensor
from graphllm.weights.checkpoint.tensor_info import WeightError

LAYER = re.compile(r"blk\.(\d+)\.(.+)")


class Facts:
    """A file's metadata and table of tensors. name: its architecture, which its keys begin with.

    layers: how many layers the model has, without those that only draft.
    read: the keys that were asked for, without the architecture.
    """

    def __init__(self, file: Gguf, name: str) -> None:
        self._file, self.name, self.read = file, name, set[str]()
        self._layers: list[dict[str, Tensor]] = []
        blocks, drafting = self.get("block_count"), self.get("nextn_predict_layers", 0)
        if type(blocks) is not int or type(drafting) is not int or not 0 <= drafting < blocks <= 2**16:
            raise self.bad(f"{name}.block_count is {blocks!r:.80}, not a number of layers; convert the model again")
        self.layers = blocks - drafting
        self._layers = [{} for _ in range(self.layers)]
        for own, tensor in file.tensors.items():
            found = LAYER.fullmatch(own)
            if found is not None and int(found[1]) < self.layers:
                self._layers[int(found[1])][found[2]] = tensor

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ARCHITECTURE.key."""
        self.read.add(key)
        return self._file.metadata.get(f"{self.name}.{key}", default)

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number; of a list the largest one. Raises WeightError for anything else."""
        value = self.get(key, default)
        value = max(value) if isinstance(value, list) and value and all(type(n) is int for n in value) else value
        if type(value) is not int or value < 0:
            raise self.bad(f"{self.name}.{key} is {value!r:.80}, not a whole number; convert the model again")
        return value

    def by_layer(self, key: str) -> list[int]:
        """A whole number for each layer. Raises WeightError for a list of another length."""
        value = self.get(key, 0)
        numbers = value if isinstance(value, list) else [value] * self.layers
        if len(numbers) < self.layers or not all(type(n) is int for n in numbers):
            raise self.bad(f"{self.name}.{key} has no whole number for each of {self.layers} layers; convert again")
        return numbers[: self.layers]

    def having(self, tensor: str) -> list[bool]:
        """Whether each layer has a tensor of that name, without its "blk.N."."""
        return [tensor in layer for layer in self._layers]

    def tensor(self, name: str) -> Tensor | None:
        """The tensor of that name: of the first layer that has one, where it begins with "blk."; None without any."""
        if not name.startswith("blk."):
            return self._file.tensors.get(name)
        return next((layer[name[4:]] for layer in self._layers if name[4:] in layer), None)

    def head_dim(self) -> int:
        """Numbers of a query head."""
        given = self.get("attention.key_length")
        return int(given or self.whole("embedding_length") // max(1, self.whole("attention.head_count", 0)))

    def bad(self, why: str) -> WeightError:
        """The error that names the file."""
        return WeightError(Path(self._file.files[0]), [why])
