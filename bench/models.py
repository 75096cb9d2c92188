"""Shapes of models, and folders with random weights in these shapes."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from bench.harness import GRAPHLLM

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
        "hidden_act": "silu", "dtype": "bfloat16", "use_sliding_window": False,
    },
    # As wide, with 16 experts, two for each token: 1.24 billion numbers.
    "qwen3-moe-1.2b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 896,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64,
        "intermediate_size": 1024, "moe_intermediate_size": 1024, "num_experts": 16, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "tie_word_embeddings": True, "hidden_act": "silu", "dtype": "bfloat16",
    },
    "llama3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "dtype": "bfloat16", "head_dim": 128, "attention_bias": False,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
        "tie_word_embeddings": True, "dtype": "bfloat16", "head_dim": 128, "attention_bias": False,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936, "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu", "tie_word_embeddings": False,
        "dtype": "bfloat16", "head_dim": 128, "attention_bias": False,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
        "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088, "max_position_embeddings": 131072,
        "sliding_window": 128, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "dtype": "bfloat16",
    },
}  # fmt: skip
SHAPES |= {
    "llama3.1-8b-fp8": {**SHAPES["llama3.1-8b"], "quantization_config": {"quant_method": "fbgemm_fp8"}},
    "llama3.1-8b-awq": {**SHAPES["llama3.1-8b"], "quantization_config": {"quant_method": "awq", "bits": 4,
                        "group_size": 128, "zero_point": True, "version": "gemm"}},
    "llama3-70b": {**SHAPES["llama3.1-8b"], "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
                   "intermediate_size": 28672},
    "llama3-70b-awq": {**SHAPES["llama3.1-8b"], "hidden_size": 8192, "num_hidden_layers": 80,
                       "num_attention_heads": 64, "intermediate_size": 28672, "quantization_config": {
                       "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}},
    "gpt-oss-20b-mxfp4": {**SHAPES["gpt-oss-20b"], "quantization_config": {"quant_method": "mxfp4"}},
    # Qwen3-Next-80B-A3B, of whose 48 layers these are 12: three of four are gated delta nets.
    "qwen3-next-12": {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
        "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "intermediate_size": 5120, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.25, "vocab_size": 151936, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
        "rope_theta": 10000000.0, "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "bfloat16",
        "attention_bias": False,
    },
    # Kimi-Linear-48B-A3B, of whose 27 layers these are 8, one of them dense: three of four are delta nets.
    "kimi-linear-8": {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_size": 2304,
        "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 32, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
        "linear_attn_config": {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7], "head_dim": 128,
                               "num_heads": 32, "short_conv_kernel_size": 4},
        "intermediate_size": 9216, "first_k_dense_replace": 1, "num_experts": 256, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "moe_intermediate_size": 1024, "moe_renormalize": True, "num_expert_group": 1,
        "topk_group": 1, "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.446,
        "vocab_size": 163840, "model_max_length": 1048576, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False, "dtype": "bfloat16",
    },
    # Granite 4.0 H 350M: layers of Mamba2, four with attention.
    "granite-hybrid-350m": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 768,
        "num_hidden_layers": 32, "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 2048,
        "shared_intermediate_size": 2048, "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 48,
        "mamba_d_head": 32, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False,
        "layer_types": ["attention" if i in (10, 13, 17, 27) else "mamba" for i in range(32)],
        "position_embedding_type": "nope", "embedding_multiplier": 12, "attention_multiplier": 0.015625,
        "residual_multiplier": 0.246, "logits_scaling": 3, "vocab_size": 100352, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True,
        "attention_bias": False, "dtype": "bfloat16",
    },
    # Attention of DeepSeek-V2 in a dense model of 0.5 B parameters.
    "deepseek-0.5b": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 1024,
        "num_hidden_layers": 20, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 768,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "intermediate_size": 4096, "first_k_dense_replace": 20, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "topk_method": "greedy", "n_group": 1,
        "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "vocab_size": 100352,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": True, "dtype": "bfloat16", "attention_bias": False,
    },
    # Mamba-Codestral-7B.
    "mamba2-7b": {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 4096, "num_hidden_layers": 64,
        "num_heads": 128, "head_dim": 64, "n_groups": 8, "state_size": 128, "expand": 2, "conv_kernel": 4,
        "chunk_size": 256, "vocab_size": 32768, "layer_norm_epsilon": 1e-5, "rms_norm": True, "use_bias": False,
        "use_conv_bias": True, "hidden_act": "silu", "residual_in_fp32": True, "tie_word_embeddings": False,
        "time_step_limit": [0.0, 1e9], "dtype": "bfloat16",
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "intermediate_size": 10944, "first_k_dense_replace": 1, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "topk_method": "greedy", "n_group": 1,
        "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "vocab_size": 102400,
        "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "dtype": "bfloat16", "attention_bias": False,
    },
    # DeepSeek-V3, of whose 61 layers these are 6, one of them dense, in its float8 of blocks.
    "deepseek-v3-6": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
        "num_hidden_layers": 6, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "intermediate_size": 18432, "first_k_dense_replace": 1, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "vocab_size": 129280,
        "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "dtype": "bfloat16", "attention_bias": False,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3",
                                "activation_scheme": "dynamic"},
    },
    "tiny": {
        **SHAPES["llama3.1-8b"], "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 1024, "max_position_embeddings": 4096,
    },
}  # fmt: skip


def write_config(folder: Path, shape: str, **changes: int) -> Path:
    """The folder, made with the config.json of a shape. changes: of fields."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape] | changes))
    return folder


def new_folder(shape: str) -> Path:
    """A new folder with the config.json of a shape."""
    return write_config(Path(tempfile.mkdtemp(prefix=f"{shape}-")), shape)


def compile_to(artifact: Path, folder: Path | None, *options: str) -> None:
    """`graphllm compile`; folder: None for the embedded model."""
    model = [str(folder)] if folder else []
    command = [*GRAPHLLM, "compile", *model, "-o", str(artifact), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def write_checkpoint(folder: Path) -> None:
    """Random weights in the names that checkpoints have, a safetensors file for each layer; they are in the page cache
    afterwards. Experts have a tensor each, as they are published."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    files: dict[str, dict[str, torch.Size]] = {}
    for name, parameter in model.named_parameters():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        shapes = files.setdefault(f"layer-{layer[1]}.safetensors" if layer else "rest.safetensors", {})
        if name.endswith(".experts.gate_up_proj"):
            parts = {"gate_proj": parameter[0].chunk(2)[0], "up_proj": parameter[0].chunk(2)[1]}
        elif name.endswith(".experts.down_proj"):
            parts = {"down_proj": parameter[0]}
        else:
            shapes[name] = parameter.shape
            continue
        stem = name.rpartition(".")[0]
        shapes |= {f"{stem}.{i}.{k}.weight": p.shape for i in range(len(parameter)) for k, p in parts.items()}
    for file, shapes in files.items():
        tensors = {n: (torch.randn(s, device=device) * 0.02).bfloat16().cpu() for n, s in shapes.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, shapes in files.items() for name in shapes}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
