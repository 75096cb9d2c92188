"""What the families share: reading ``config.json`` with errors that name the remedy, splitting merged heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from graphllm.config import ConfigError

HF = Mapping[str, Any]
_LAYER_TYPES = {"full_attention": "full", "sliding_attention": "sliding"}


def number(hf: HF, name: str, default: Any = None) -> Any:
    """The number in that field; a missing or null field takes the default. Raises ConfigError when there is none."""
    value = hf.get(name)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ConfigError(f"config.json: {name} is {value!r}; set it to the checkpoint's number")
    return value


def only(hf: HF, name: str, *accepted: Any) -> Any:
    """The field's value, the first accepted one when it is missing. Raises ConfigError unless it is accepted."""
    value = hf.get(name, accepted[0])
    if value not in accepted:
        choice = " or ".join(repr(a) for a in accepted)
        raise ConfigError(f"config.json: {name} is {value!r}, which is not supported; use a checkpoint with {choice}")
    return value


def check_plain(hf: HF) -> None:
    """Raises ConfigError for a quantized checkpoint."""
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method")
        raise ConfigError(
            f"config.json: quantization_config (quant_method {method!r}) is not supported; use an unquantized one"
        )


def head_dim(hf: HF, default: int | None = None) -> int:
    """``head_dim``, or what the family uses when the file does not say."""
    if hf.get("head_dim") or default:
        return int(number(hf, "head_dim", default))
    D, H = number(hf, "hidden_size"), number(hf, "num_attention_heads")
    if D % H:
        raise ConfigError(f"config.json: hidden_size {D} is no multiple of num_attention_heads {H}; set head_dim")
    return D // H


def layer_types_of(layer_types: Sequence[str]) -> tuple[str, ...]:
    """Layer types "full" and "sliding" from the file's ``layer_types``. Raises ConfigError for other types."""
    for name in layer_types:
        if name not in _LAYER_TYPES:
            raise ConfigError(
                f"config.json: layer_types has {name!r}, which is not supported; use a checkpoint with "
                + " and ".join(_LAYER_TYPES)
            )
    return tuple(_LAYER_TYPES[name] for name in layer_types)


def split_heads(qkv_TO: Tensor, H: int, K: int, E: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, E], keys and values [T, K, E]: views of the merged projection's rows."""
    q_THE, k_TKE, v_TKE = qkv_TO.unflatten(1, (H + 2 * K, E)).split((H, K, K), dim=1)
    return q_THE, k_TKE, v_TKE
