"""Fields of a checkpoint's JSON files that change no number here, by pattern and why. What is neither used nor refused
nor here gets a warning: `unknown_fields`. docs/checkpoints.md has the same table, and a test compares them."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence, Set
from typing import Any

Reasons = Mapping[str, str]  # by patterns of fields, with blanks between
_TRANSFORMERS = "of transformers' own programs"
_TRAINING = "of training"

CONFIG: Reasons = {
    "architectures model_type auto_map": "choose the family",
    "bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id mask_token_id *_token_index": (
        "where texts begin and end"
    ),
    "dtype torch_dtype": "the default of `--dtype`",
    "quantization_config pooling draft method tensors max_model_len model_impl sentence_transformers "
    "matryoshka_dimensions sbert_ce_default_activation_function id2label label2id problem_type num_labels classifier_* "
    "is_original_qwen3_reranker num_speculative_tokens block_size": "have readers of their own",
    "*dropout* *_pdrop layerdrop *initializer_* init_std seq_aux router_aux_loss_coef output_router_logits "
    "*_jitter_noise label_smoothing *_loss_* *_init_* time_step_scale time_step_min time_step_max time_step_floor "
    "rescale_prenorm_residual embedding_fraction offset_alibi init_config": _TRAINING,
    "_name_or_path transformers_version use_cache return_dict output_attentions output_hidden_states torchscript "
    "chunk_size_feed_forward is_encoder_decoder is_decoder pretraining_tp cache_implementation task_specific_params "
    "*attn_implementation* deterministic_flash_attn reorder_and_upcast_attn gradient_checkpointing use_flash_attn* "
    "position_embedding_type unsloth_* add_cross_attention use_mambapy use_falcon_mambapy use_associative_scan "
    "use_mamba_kernels fused_add_norm pad_vocab_size_multiple num_logits_to_keep calc_logits_for_entire_prompt "
    "ep_size tokenizer_class tokenizer_name verbose init_device attn_impl attention_softmax_in_fp32 *_fusion "
    "skip_bias_add* slow_but_exact": (_TRANSFORMERS),
    "n_ctx initial_context_length max_window_layers _sliding_window_pattern hidden_act head_dim tie_word_embeddings "
    "sinusoidal_pos_embds moe_intermediate_size expand d_model d_inner n_layer qk_head_dim "
    "attention_layers": ("say again what another field of the family says"),
    "summary_* sparse_pred* decoder_bias vocab_size_* num_nextn_predict_layers": "of parts that are not computed",
}
ROPE: Reasons = {"mrope_interleaved": _TRANSFORMERS}
QUANTIZATION: Reasons = {
    "quant_method": "chooses the method",
    "modules_to_not_convert ignored_layers exclude_modules ignore lm_head llm_int8_skip_modules targets "
    "block_name_to_quantize modules_in_block_to_quantize *embedding*": "the tensors show which matrices are encoded",
    "activation_scheme activation_scale_ub input_activations output_activations kv_cache_scheme "
    "kv_cache_quant_algo fmt": "activations are not rounded, the cache by `--kv-cache-dtype`",
    "damp* true_sequential static_groups mse seqlen iters nsamples batch_size dataset tokenizer quantizer meta "
    "model_name_or_path model_file_base_name model_seqlen module_name_preceding_first_block low_gpu_mem_usage lr* "
    "minmax_lr enable_* amp gradient_accumulate_steps autoround_version act_* scale_dtype data_type super_* producer "
    "quantization_status global_compression_ratio sparsity_config offload* compression_ratio": "of the quantizer",
    "zero_point sym symmetric": "stored zero points hold",
    "use_exllama exllama_config use_cuda_fp16 max_input_length cache_block_outputs disable_exllama do_fuse backend "
    "fuse_max_seq_len modules_to_fuse pack_dtype checkpoint_format format hf_device_map is_marlin_format version "
    "dequantize include_* untie_embedding_weights *compute_dtype *load_in_* llm_int8_* bnb_4bit_* _*": (
        "of other programs' kernels"
    ),
}  # fmt: skip
GENERATION: Reasons = {
    "do_sample max_new_tokens temperature top_k top_p min_p repetition_penalty": "used",
    "bos_token_id eos_token_id pad_token_id": "used",
    "max_length": "`max_tokens` says how long an answer may be",
    "_from_model_config transformers_version use_cache cache_* return_dict* output_* disable_compile compile_config "
    "continuous_batching_config low_memory prefill_chunk_size max_cache_len renormalize_logits remove_invalid_values "
    "decoder_start_token_id chat_format trust_remote_code": _TRANSFORMERS,
    "*assistant* prompt_lookup_num_tokens max_matching_ngram_size target_lookbehind speculation_type use_mtp": (
        "drafts are chosen by `--speculative-config`"
    ),
}  # fmt: skip
TOKENIZER: Reasons = {
    "*_token additional_special_tokens extra_special_tokens chat_template added_tokens_decoder": "used",
    "add_bos_token add_eos_token": "tokenizer.json decides; a warning says where it differs",
    "tokenizer_class auto_map processor_class tokenizer_file vocab_file merges_file name_or_path backend is_local "
    "special_tokens_map_file local_files_only _commit_hash": _TRANSFORMERS,
    "model_max_length max_length stride padding* pad_* truncation* model_input_names return_*": (
        "`--max-model-len` and `truncate_prompt_tokens` say how long a prompt may be"
    ),
    "legacy use_default_system_prompt sp_model_kwargs add_prefix_space do_lower_case do_basic_tokenize strip_accents "
    "tokenize_chinese_chars never_split normalization use_fast from_slow errors trim_offsets tokenizer_type "
    "clean_up_tokenization_spaces spaces_between_special_tokens": "tokenizer.json says how text is cut and joined",
}  # fmt: skip
SENTENCES: Reasons = {
    "max_seq_length do_lower_case prompts default_prompt_name similarity_fn_name include_prompt pooling_mode*": "used",
    "word_embedding_dimension embedding_dimension __version__ model_type transformer_task modality_config "
    "module_output_name": "of sentence-transformers' own program",
}  # fmt: skip


def unknown_fields(fields: Mapping[str, Any], inert: Reasons, used: Set[str] | Sequence[str] = ()) -> list[str]:
    """The names of those that change nothing although nobody says why. None, False and empty ones ask for nothing."""
    patterns = [pattern for names in inert for pattern in names.split()]

    def is_known(name: str) -> bool:
        return name in used or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    return sorted(n for n, v in fields.items() if v not in (None, False, "", [], {}) and not is_known(n))
