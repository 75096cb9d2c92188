"""Small configs of transformers' model types, for tests of the transformers backend."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SIZES: dict[str, Any] = {
    "vocab_size": 96, "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "n_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "hidden_size": 32, "n_embd": 32, "d_model": 32, "word_embed_proj_dim": 32,
    "intermediate_size": 48, "ffn_dim": 48, "n_inner": 48, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "num_attention_heads": 4, "n_head": 4, "n_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "n_positions": 64, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2,
    "moe_k": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_num_heads": 4, "state_size": 8, "ssm_state_size": 8, "moe_latent_size": 16, "index_n_heads": 2,
    "index_head_dim": 16, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8,
    "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_expand": 1, "mamba_d_head": 8,
    "o_lora_rank": 8, "o_groups": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tiny(model_type: str, **changes: Any) -> tuple[type[Any], Any]:
    """The causal class of a model type, and a small config of it with one layer of each type at least."""
    kind = transformers.CONFIG_MAPPING[model_type]
    plain = kind().to_dict()
    sizes = {n: v for n, v in SIZES.items() if n in plain and not isinstance(plain[n], list)}
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(plain.get(name), list):
            kinds = list(dict.fromkeys(plain[name]))
            sizes["num_hidden_layers"] = max(sizes["num_hidden_layers"], len(kinds))
            sizes[name] = kinds * 2
    count = sizes.get("num_hidden_layers", 0)
    config = kind(**{n: v[:count] if isinstance(v, list) else v for n, v in sizes.items()} | changes)
    config.dtype = torch.float32
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]), config


def random_model(cls: type[Any], config: Any) -> Any:
    """A model all of whose stored tensors have numbers of their own."""
    torch.manual_seed(0)
    model = cls(config).float()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
    return model
