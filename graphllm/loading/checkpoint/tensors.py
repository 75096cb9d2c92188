"""The headers of a checkpoint's tensors, opened once: from its safetensors, .bin or GGUF files, from the dense layers
that follow pooling, and from a draft model that joins it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from graphllm.config.pooling_config import dense_tensor
from graphllm.loading.checkpoint.conversion import safetensors_of
from graphllm.loading.checkpoint.model_files import ModelFiles
from graphllm.weights.checkpoint.checkpoint import Checkpoint, TensorInfo, WeightError, draft_name, weight_files
from graphllm.weights.checkpoint.further_layers import drafting_tensors, further_layers
from graphllm.weights.checkpoint.multimodal import is_multimodal, text_tensors
from graphllm.weights.checkpoint.stacked_experts import has_stacks, single_experts


class Tensors(NamedTuple):
    """The tensors of a model.

    checkpoint: their headers; None where there are none, and for random weights.
    absent: why there are none; None for random weights.
    """

    checkpoint: Checkpoint | None
    absent: WeightError | None = None


def open_tensors(files: ModelFiles, load_format: str, draft: ModelFiles | None = None) -> Tensors:
    """The headers of a model's tensors, or why there are none; neither for load_format "dummy". A whole multimodal
    checkpoint gives the tensors of its text model.

    draft: the draft model that joins it; its tensors get "draft:" before their names. The model's own files stand for
    the further layers of its own checkpoint. Raises ConfigError for damaged files.
    """
    own = _text_tensors(files, load_format)
    if draft is None:
        return own
    if draft.folder != files.folder:
        return _joined(own, _text_tensors(draft, load_format))
    if own.checkpoint is None:
        return own
    if not (further := drafting_tensors(own.checkpoint.tensors)):
        raise WeightError(
            files.folder,
            ["has no tensors of a further layer that drafts (MTP); use a checkpoint with one, or another way to draft"],
        )
    return _joined(own, Tensors(replace(own.checkpoint, tensors=further)))


def stored_checkpoint(files: ModelFiles) -> Checkpoint:
    """All tensors of one folder, by their own names. Raises WeightError where there are none."""
    found, absent = _stored(files, "auto")
    if found is None:
        assert absent is not None
        raise absent
    return found


def _text_tensors(files: ModelFiles, load_format: str) -> Tensors:
    found, absent = _stored(files, load_format)
    if found is not None and is_multimodal(files.config or {}):
        found = replace(found, tensors=text_tensors(found.tensors))
    if found is not None and has_stacks(files.config or {}):
        found = replace(found, tensors=single_experts(found.tensors))
    if found is not None:
        found = replace(found, tensors=further_layers(found.tensors, files.config or {}))
    return Tensors(found, absent)


def _stored(files: ModelFiles, load_format: str) -> Tensors:
    """As `open_tensors`, of all tensors of one folder, by their own names."""
    if load_format == "dummy":
        return Tensors(None)
    folder, weights = files.folder, weight_files(files.folder, load_format)
    if weights and weights[0].endswith(".bin"):
        if missing := [file for file in weights if not (folder / file).is_file()]:
            raise WeightError(
                folder, [f"its index names {file!r:.200}, which is not there; download it" for file in missing]
            )
        own = Checkpoint(folder, Checkpoint.open(safetensors_of(folder, weights)).tensors)
    else:
        try:
            own = Checkpoint.open(folder)
        except WeightError as absent:
            if weights:
                raise
            return Tensors(None, absent)
    return Tensors(replace(own, tensors={**own.tensors, **_dense_tensors(files, load_format)}))


def _dense_tensors(files: ModelFiles, load_format: str) -> dict[str, TensorInfo]:
    """The tensors of the dense layers that follow pooling; each has a folder of its own."""
    found: dict[str, TensorInfo] = {}
    for layer in files.sentences.dense:
        tensors, absent = _stored(ModelFiles.read(files.folder / layer.folder), load_format)
        if absent is not None:
            raise absent
        found |= {dense_tensor(layer.folder, n): t for n, t in (tensors.tensors if tensors else {}).items()}
    return found


def _joined(own: Tensors, draft: Tensors) -> Tensors:
    absent = own.absent or draft.absent
    if own.checkpoint is None or draft.checkpoint is None:
        return Tensors(None, absent)
    named = {draft_name(name): tensor for name, tensor in draft.checkpoint.tensors.items()}
    return Tensors(Checkpoint(own.checkpoint.folder, {**own.checkpoint.tensors, **named}), absent)
