"""Tiny configs of any model type of transformers: its defaults, shrunk by the names of fields, and a table of
exceptions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

VOCABULARY, CONTEXT = 131, 512
_MOST_LAYERS = 6
_EXCEPTIONS = Path(__file__).with_name("exceptions.json")

# Sizes by name, in every config within a config, where the default has a number.
_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "model_dim", "emb_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "dff", "ffn_hidden_size"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "shared_intermediate_size"), 96),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "swa_head_dim", "global_head_dim", "attention_head_dim", "v_head_dim"), 16),
    "qk_nope_head_dim": 16,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    "qk_rope_head_dim": 8,
    "rotary_dim": 8,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("vocab_size", "text_vocab_size"), VOCABULARY),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_sequence_length", "context_length"),
        CONTEXT,
    ),
    "sliding_window": 24,
    "window_size": 24,
    "attention_chunk_size": 32,
    "original_max_position_embeddings": CONTEXT,
}  # fmt: skip
_PER_LAYER = "per_layer_config"
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_global_key_value_heads")
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
)  # fmt: skip
PADDING = 1
_TOKENS = {
    "bos_token_id": 0, "decoder_start_token_id": 0, "pad_token_id": PADDING, "eos_token_id": 2, "sep_token_id": 2,
}  # fmt: skip
FIRST_TOKEN = 3  # of those that prompts are made of
_DECODING = {"is_decoder": True, "is_encoder_decoder": False}


def tiny(model_type: str) -> dict[str, Any]:
    """Fields of a tiny config.json of a type. Raises whatever transformers raises for a config without arguments."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    exceptions = json.loads(_EXCEPTIONS.read_text()).get(model_type, {})
    start = exceptions.get("start", {})
    fields = CONFIG_MAPPING[model_type](**start).to_dict()
    shrunk = {n: v for n, v in _shrunk(fields).items() if n not in exceptions.get("without", ())}
    return _merged(shrunk, exceptions.get("fields", {}))


def _shrunk(fields: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(fields)
    name = next((n for n in _LAYERS if isinstance(fields.get(n), int)), None)
    if name is not None:
        kept = _kept_layers(fields, fields[name])
        for n, v in fields.items():
            if n in _LAYERS and v == fields[name]:
                made[n] = len(kept)
            elif _by_layer(v, fields[name]):
                made[n] = [v[i] for i in kept]
            elif n == _PER_LAYER:
                made[n] = {str(kept.index(int(i))): own for i, own in (v or {}).items() if int(i) in kept}
    heads = next((fields[n] for n in ("num_attention_heads", "n_head", "num_heads") if n in fields), None)
    for n, v in made.items():
        if isinstance(v, dict) and "model_type" in v:
            made[n] = _shrunk(v)
        elif n in _TOKENS and v is not None:
            made[n] = _TOKENS[n]
        elif n in _DECODING:
            made[n] = _DECODING[n]
        elif n == "head_dim" and fields.get("qk_rope_head_dim") is not None:
            made[n] = 8 if v == fields["qk_rope_head_dim"] else 16
        elif n == "qk_head_dim" and v is not None:
            made[n] = 24
        elif n == "head_dim" and v is None:
            made[n] = 16
        elif isinstance(v, bool) or not isinstance(v, int):
            continue
        elif n in _KV_HEADS:
            made[n] = 4 if v == heads else min(v, 2)
        elif n in _SIZES:
            made[n] = min(v, _SIZES[n])
    return made


def _kept_layers(fields: Mapping[str, Any], count: int) -> list[int]:
    """A few layers with every kind that the lists of the config tell apart; without such lists the first ones."""
    own = {int(i): v for i, v in (fields.get(_PER_LAYER) or {}).items()}
    lists = [*(v for v in fields.values() if _by_layer(v, count)), [own.get(i) for i in range(count)]]
    first: dict[str, int] = {}
    for i in range(count):
        first.setdefault(json.dumps([v[i] for v in lists]), i)
    kept = sorted(first.values())[:_MOST_LAYERS]
    usual = [i for i in range(min(count, 2 if len(first) < 2 else 4)) if i not in kept]
    return sorted([*kept, *usual[: max(0, 2 - len(kept))]])


def _by_layer(value: Any, count: int) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == count


def _merged(fields: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(fields)
    for name, value in others.items():
        inner = isinstance(value, dict) and name != "rope_parameters" and isinstance(made.get(name), dict)
        made[name] = _merged(made[name], value) if inner else value
    return made
