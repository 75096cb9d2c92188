"""Small models of transformers' causal types, and how far ours are from them. `bench.coverage` tries every type."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tests.models import driver

V, N_TOKENS, LENGTHS = 131, 10, (1, 7, 40)
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# The names that configs give to their sizes; those that a config has are taken.
SIZES = IDS | {
    "vocab_size": V, "vocab_size_per_layer_input": V, "max_position_embeddings": 512, "n_positions": 512,
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "embed_dim": 64, "embedding_size": 64, "word_embed_proj_dim": 64,
    "intermediate_size": 96, "ffn_dim": 96, "decoder_ffn_dim": 96, "ffn_hidden_size": 96, "mlp_hidden_size": 96,
    "num_hidden_layers": 3, "n_layer": 3, "num_layers": 3, "n_layers": 3, "decoder_layers": 3,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "num_kv_heads": 2, "head_dim": 16, "global_head_dim": 32, "query_pre_attn_scalar": 16, "rotary_dim": 8,
    "initializer_range": 0.15, "init_std": 0.15, "sliding_window": 20, "local_attention": 20, "window_size": 20,
    "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "shared_intermediate_size": 48,
    "expert_ffn_hidden_size": 48, "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6,
    "moe_num_experts": 6, "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 28, "kv_lora_rank": 40, "qk_nope_head_dim": 24,
    "is_decoder": True, "qk_rope_head_dim": 8, "v_head_dim": 20, "hidden_size_per_layer_input": 16, "index_topk": 8,
}  # fmt: skip
LATENTS = {"head_dim": 8, "num_key_value_heads": 4}  # of models whose head_dim is that of the rotated part
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("youtu", "deepseek_v2", "deepseek_v3", "longcat_flash", "glm4_moe_lite", "minicpm3", "axk1", "axk2"), LATENTS
    ),
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "window_size": 20},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny(kind: str, **changes: Any) -> transformers.PreTrainedConfig:
    """A small config of a model type."""
    config_class = transformers.CONFIG_MAPPING[kind]
    plain = config_class()
    have = plain.to_dict()
    fields = {n: v for n, v in (SIZES | OWN.get(kind, {}) | changes).items() if n in have or hasattr(plain, n)}
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(have.get(name), list) and name not in changes:
            kinds = list(dict.fromkeys(have[name]))
            fields[name] = (kinds * 3)[: max(3, len(kinds))]
            fields["num_hidden_layers"] = max(3, len(kinds))
    return config_class(**fields)


def random_model(config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    """The causal model of a config, with random numbers in every parameter."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    cls = found[0] if isinstance(found, tuple) else found
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = cls(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() <= 1:  # those that start as constants would hide a mix-up
                parameter += 0.2 * torch.randn(parameter.shape)
    return model


@torch.no_grad()
def difference(model: transformers.PreTrainedModel, runner: driver.Runner, vocabulary: int) -> float:
    """The largest difference of prefill logits between transformers' model and ours, for prompts in one batch and one
    in chunks. Raises AssertionError for another greedy token."""
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, vocabulary, (n,), generator=draw).tolist() for n in LENGTHS]
    logits, tokens = runner.generate(prompts, N_TOKENS)
    worst = 0.0
    for prompt, own, drawn in zip(prompts, logits, tokens, strict=True):
        expected = model(torch.tensor([prompt + drawn[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
        assert drawn == expected.argmax(-1).tolist()
        worst = max(worst, (own - expected[0]).abs().max().item())
    return max(worst, (runner.chunked(prompts[-1], 13) - logits[-1]).abs().max().item())
