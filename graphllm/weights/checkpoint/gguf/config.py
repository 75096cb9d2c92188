"""The config.json that a GGUF file's metadata stands for."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Mapping
from typing import Any

from graphllm.weights.checkpoint.gguf.derived import pooled
from graphllm.weights.checkpoint.gguf.facts import Facts
from graphllm.weights.checkpoint.gguf.families import family_of
from graphllm.weights.checkpoint.gguf.family import Change, Family
from graphllm.weights.checkpoint.gguf.header import Gguf
from graphllm.weights.checkpoint.gguf.tensors import types_of

# What a file may say and the families here are anyway: by the key, the only value.
_ONLY: Mapping[str, object] = {
    "attention.causal": True, "expert_weights_norm": True, "expert_weights_scale": 1.0, "expert_gating_func": 1,
    "expert_shared_count": 0, "leading_dense_block_count": 0, "rope.scaling.attn_factor": 1.0,
    "tensor_data_layout": "Meta AI original pth",
}  # fmt: skip
# What changes no number: sizes that the tensors show, and what other programs do with the file.
_INERT = (
    "general.*", "split.*", "quantize.*", "imatrix.*", "*.vocab_size", "*.rope.scaling.finetuned", "GGUF.*",
    "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type",
    "tokenizer.ggml.scores", "tokenizer.ggml.merges", "tokenizer.ggml.add_*", "tokenizer.ggml.*_token_id",
    "tokenizer.ggml.token_type_count", "tokenizer.ggml.remove_extra_whitespaces", "tokenizer.huggingface.json",
    "tokenizer.ggml.precompiled_charsmap", "tokenizer.chat_template*",
)  # fmt: skip
# What ends a turn, where the file does not say it by a number: older ones do not.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
_EMBEDDING = "token_embd.weight"
_log = logging.getLogger(__name__)


def config_of(file: Gguf) -> dict[str, Any]:
    """The fields of a config.json. Raises WeightError for what cannot be read."""
    facts, family = family_of(file)
    embedding = file.tensors.get(_EMBEDDING)
    if embedding is None:
        raise facts.bad(f"there is no tensor {_EMBEDDING}; give the file of a whole model")
    config = {"architectures": [family.architecture], **family.settings, **_fields(facts, family)}
    config |= {field: any(facts.having(tensor)) for field, tensor in family.present.items()}
    for derive in (*family.derived, pooled):
        config |= derive(facts, config)
    if lists := [field for key, field in family.fields.items() if field and isinstance(config.get(field), list)]:
        raise facts.bad(f"{lists[0]} differs between layers, which is not supported; use another model")
    _check_others(file, facts, family)
    metadata = file.metadata
    return config | {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _ends(metadata),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "float32" if embedding.kind.name == "f32" else "bfloat16",
        "quantization_config": {
            "quant_method": "gguf",
            "types": types_of(file),
            "changes": {name: _plain(change, config) for name, change in family.changes.items()},
        },
    }


def _fields(facts: Facts, family: Family) -> dict[str, Any]:
    """The fields that keys have. Raises WeightError for a size that is missing."""
    found: dict[str, Any] = {}
    for key, field in family.fields.items():
        value = facts.get(key)
        if value is not None and field:
            found[field] = value
        elif field and key in ("context_length", "embedding_length", "attention.head_count"):
            raise facts.bad(f"metadata has no {facts.name}.{key}; convert the model again")
    if "num_hidden_layers" in found:
        found["num_hidden_layers"] = facts.layers
    if "attention.key_length" in family.fields:
        found["head_dim"] = facts.head_dim()
    return found


def _plain(change: Change, config: Mapping[str, Any]) -> dict[str, Any]:
    """A change as JSON, with sizes in place of fields."""
    steps = [[name, *(config[n] if isinstance(n, str) else n for n in sizes)] for name, *sizes in change.steps]
    return {"steps": steps, "parts": list(change.parts)}


def _ends(metadata: Mapping[str, Any]) -> list[int]:
    """The tokens that end a text, a turn or a message."""
    numbers = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    if numbers[1] is None:
        tokens = metadata.get("tokenizer.ggml.tokens") or ()
        numbers[1] = next((tokens.index(end) for end in _TURN_ENDS if end in tokens), None)
    return list(dict.fromkeys(number for number in numbers if isinstance(number, int)))


def _check_others(file: Gguf, facts: Facts, family: Family) -> None:
    """Refuse what the family does not compute, and warn of what is not known."""
    width = facts.head_dim()
    only = {**_ONLY, "rope.dimension_count": width, "attention.value_length": width, **family.only}
    for key, value in only.items():
        if key in facts.read and key not in family.only:
            continue
        said = facts.get(key, value)
        if said != value and not (said == 0 and isinstance(value, float)):
            raise facts.bad(f"{facts.name}.{key} is {said!r:.80}, only {value!r} is supported; use safetensors")
    known = {f"{facts.name}.{key}" for key in facts.read}
    if unread := sorted(key for key in file.metadata if key not in known and not _is_inert(key)):
        _log.warning("%s: %s: not read, and without effect here", file.files[0], ", ".join(unread))


def _is_inert(key: str) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in _INERT)
