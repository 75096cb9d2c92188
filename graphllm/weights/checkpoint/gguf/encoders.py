"""GGUF's architectures of encoders, as `graphllm.weights.checkpoint.gguf.decoders` has the decoders."""

from __future__ import annotations

from graphllm.weights.checkpoint.gguf import derived as d
from graphllm.weights.checkpoint.gguf.decoders import SIZES
from graphllm.weights.checkpoint.gguf.family import Family, in_layers
from graphllm.weights.checkpoint.gguf.rotary import rotary

_FIELDS = SIZES | {
    "attention.head_count": "num_attention_heads", "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.head_count_kv": "",
}  # fmt: skip
_WHOLE = {
    "token_embd": "embeddings.word_embeddings", "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
}  # fmt: skip
_BERT = "encoder.layer.{layer}."
_NOMIC = "encoder.layers.{layer}."
_BOTH_WAYS = {"attention.causal": False}

ENCODERS: dict[str, tuple[Family, ...]] = {
    "bert": (
        # Of RoBERTa's positions, files have those of tokens: they begin at 0, as BERT's do.
        Family(
            "BertModel",
            _WHOLE | {"token_embd_norm": "embeddings.LayerNorm"} | in_layers(
                _BERT, attn_q="attention.self.query", attn_k="attention.self.key", attn_v="attention.self.value",
                attn_output="attention.output.dense", attn_output_norm="attention.output.LayerNorm",
                ffn_up="intermediate.dense", ffn_down="output.dense", layer_output_norm="output.LayerNorm",
            ),
            _FIELDS, derived=(d.token_types,), only=_BOTH_WAYS,
        ),
    ),
    "nomic-bert": (
        Family(
            "NomicBertModel",
            _WHOLE | {"token_embd_norm": "emb_ln"} | in_layers(
                _NOMIC, attn_qkv="attn.Wqkv", attn_output="attn.out_proj", attn_output_norm="norm1",
                ffn_up="mlp.fc11", ffn_gate="mlp.fc12", ffn_down="mlp.fc2", layer_output_norm="norm2",
            ),
            _FIELDS, derived=(d.token_types, rotary), only=_BOTH_WAYS,
        ),
    ),
    "modern-bert": (
        Family(
            "ModernBertModel",
            {
                "token_embd": "embeddings.tok_embeddings", "token_embd_norm": "embeddings.norm",
                "output_norm": "final_norm",
            } | in_layers(
                "layers.{layer}.", attn_norm="attn_norm", attn_qkv="attn.Wqkv", attn_output="attn.Wo",
                ffn_norm="mlp_norm", ffn_up="mlp.Wi", ffn_down="mlp.Wo",
            ),
            _FIELDS | {
                "attention.layer_norm_epsilon": "norm_eps", "attention.layer_norm_rms_epsilon": "norm_eps",
                "attention.sliding_window": "local_attention",
                "rope.freq_base": "global_rope_theta", "rope.freq_base_swa": "local_rope_theta",
                "hidden_activation": "hidden_activation", "rope.scaling.type": "",
                "attention.sliding_window_pattern": "global_attn_every_n_layers",
            },
            derived=(d.token_types,), only=_BOTH_WAYS,
        ),
    ),
}  # fmt: skip
"""By general.architecture; of several families the first one whose ``when`` holds."""
