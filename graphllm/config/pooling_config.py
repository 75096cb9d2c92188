"""`PoolingConfig`: how a checkpoint makes vectors of its hidden states, as sentence-transformers' files say it. Plain
data: `graphllm.loading.checkpoint.sentence_transformers` reads it, model families and the front go by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from graphllm.config.errors import ConfigError

POOLING = "pooling"  # the field of a model's config that holds `PoolingConfig.plain`
PoolingType = Literal["LAST", "CLS", "MEAN", "ALL"]
DenseActivation = Literal["identity", "tanh", "relu", "gelu", "sigmoid"]


@dataclass(frozen=True)
class DenseLayer:
    """A linear layer after pooling, of ``outputs`` rows and ``inputs`` columns. folder: where its tensors lie, such as
    2_Dense, or nothing for the checkpoint's own; they are "linear.weight" and "linear.bias"."""

    folder: str
    inputs: int
    outputs: int
    bias: bool = True
    activation: DenseActivation = "tanh"

    def tensor(self, leaf: str) -> str:
        """The name of its weight or bias among the checkpoint's tensors."""
        return dense_tensor(self.folder, f"linear.{leaf}")


def dense_tensor(folder: str, name: str) -> str:
    """The name of a dense layer's tensor among the model's tensors. folder: the layer's."""
    return f"{folder}:{name}" if folder else name


@dataclass(frozen=True)
class PoolingConfig:
    """What a checkpoint says of its vectors.

    pooling_type: of a sequence's hidden states the last, the first, their mean, or all of them, one vector for each
    token; None where the checkpoint leaves it to its family. dense: layers after pooling, in order. normalize: whether
    vectors are to have length 1. dimensions: the lengths to which a vector may be cut (Matryoshka); empty for any.
    prompts: what stands before a text, by `prompt_name`. default_prompt_name: of the one that stands there unless
    another is asked for. include_prompt: whether its tokens take part in the mean. max_seq_length: longer texts are cut
    there, None where nothing says. lowercase: texts are read in lower case. similarity: how two vectors are compared:
    cosine, dot, euclidean or manhattan.
    """

    pooling_type: PoolingType | None = None
    dense: tuple[DenseLayer, ...] = ()
    normalize: bool = True
    dimensions: tuple[int, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    include_prompt: bool = True
    max_seq_length: int | None = None
    lowercase: bool = False
    similarity: str = "cosine"

    @property
    def plain(self) -> dict[str, Any]:
        """What compiled programs depend on, as JSON."""
        dense = [vars(layer) for layer in self.dense]
        return {"pooling_type": self.pooling_type} | ({"dense": dense} if dense else {})


def pooling_of(hf: Mapping[str, Any], default: PoolingType) -> tuple[PoolingType, tuple[DenseLayer, ...]]:
    """What a model's config has of `PoolingConfig.plain`: where it leaves the type open, ``default``. Raises
    ConfigError for a type that there is not."""
    found = hf.get(POOLING) or {}
    kind = found.get("pooling_type") or default
    if kind not in get_args(PoolingType):
        raise ConfigError(f"pooling_type is {kind!r:.80}: use {', '.join(get_args(PoolingType))}")
    return kind, tuple(DenseLayer(**layer) for layer in found.get("dense", ()))
