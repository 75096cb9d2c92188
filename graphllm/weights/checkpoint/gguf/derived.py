"""Fields of a config.json that no single key of a GGUF file has: of lists by layer, of sizes, of which tensors it has.

Each function takes the file's facts and the fields that are known so far, and gives further fields, or others in their
place. The table of families (`graphllm.weights.checkpoint.gguf.families`) names those of each.
"""

from __future__ import annotations

from typing import Any

from graphllm.weights.checkpoint.gguf.facts import Facts

Fields = dict[str, Any]


def expert_width(facts: Facts, config: Fields) -> Fields:
    """Older files do not say how wide an expert is."""
    stack = facts.tensor("blk.ffn_down_exps.weight")
    return {"moe_intermediate_size": stack.shape[-1]} if stack is not None else {}


def shared_width(facts: Facts, config: Fields) -> Fields:
    """The same of the expert that all tokens share."""
    matrix = facts.tensor("blk.ffn_down_shexp.weight")
    return {"shared_expert_intermediate_size": matrix.shape[-1]} if matrix is not None else {}


def all_heads(facts: Facts, config: Fields) -> Fields:
    """Heads of keys and values of attention over latents, which files give as one, the latent."""
    return {"num_key_value_heads": config["num_attention_heads"]}


def latents(facts: Facts, config: Fields) -> Fields:
    """Sizes of attention over latents. Newer files have as key_length and value_length what is kept of a token."""
    rotated = facts.whole("rope.dimension_count")
    keys = facts.whole("attention.key_length_mla", facts.whole("attention.key_length"))
    values, output = facts.get("attention.value_length"), facts.tensor("blk.attn_output.weight")
    if values is None and output is not None:
        values = output.shape[1] // config["num_attention_heads"]
    return {
        "q_lora_rank": facts.get("attention.q_lora_rank"),
        "kv_lora_rank": facts.whole("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys - rotated,
        "v_head_dim": facts.get("attention.value_length_mla", values),
    }


def grouped_experts(facts: Facts, config: Fields) -> Fields:
    """How DeepSeek-V2 chooses experts."""
    return {"topk_method": "group_limited_greedy" if (config.get("n_group") or 1) > 1 else "greedy"}


def all_groups(facts: Facts, config: Fields) -> Fields:
    """Files that do not say how many groups of experts there are have none, whatever they say of groups to choose."""
    return {} if config.get("n_group") else {"n_group": None, "topk_group": None}


def query_scale(facts: Facts, config: Fields) -> Fields:
    """What Gemma divides scores by: the root of a head's numbers, but for the models of 27B, known by their layers."""
    largest = {"gemma2": 46, "gemma3": 62}
    of_model = config["hidden_size"] // config["num_attention_heads"]
    return {"query_pre_attn_scalar": of_model if facts.layers == largest.get(facts.name) else facts.head_dim()}


def window_pattern(facts: Facts, config: Fields) -> Fields:
    """Which layers have a window, where the file says so: a flag by layer, or every which one has none."""
    given = facts.get("attention.sliding_window_pattern")
    if given is None:
        return {}
    sliding = given if isinstance(given, list) else [(i + 1) % given != 0 for i in range(facts.layers)]
    return {"layer_types": ["sliding_attention" if s else "full_attention" for s in sliding[: facts.layers]]}


def no_window(facts: Facts, config: Fields) -> Fields:
    """0 is none."""
    return {"sliding_window": facts.get("attention.sliding_window") or None}


def delta_layers(facts: Facts, config: Fields) -> Fields:
    """Which layers are delta nets, and their sizes."""
    heads = facts.whole("ssm.time_step_rank")
    facts.get("full_attention_interval")  # the tensors show which
    return {
        "layer_types": ["linear_attention" if has else "full_attention" for has in facts.having("ssm_a")],
        "linear_conv_kernel_dim": facts.whole("ssm.conv_kernel"),
        "linear_num_key_heads": facts.whole("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": facts.whole("ssm.state_size"),
        "linear_value_head_dim": facts.whole("ssm.inner_size") // max(heads, 1),
    }


def attention_layers(facts: Facts, config: Fields) -> Fields:
    """The layers with attention are those that have heads of keys and values."""
    kinds = {"lfm2": ("full_attention", "conv")}.get(facts.name, ("attention", "mamba"))
    heads = facts.by_layer("attention.head_count_kv")
    return {"num_key_value_heads": max(heads), "layer_types": [kinds[n == 0] for n in heads]}


def mamba_sizes(facts: Facts, config: Fields) -> Fields:
    """Mamba2's sizes in the names of hybrids."""
    heads, inner = facts.whole("ssm.time_step_rank"), facts.whole("ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // max(heads, 1),
        "mamba_n_groups": facts.whole("ssm.group_count"),
        "mamba_d_state": facts.whole("ssm.state_size"),
        "mamba_d_conv": facts.whole("ssm.conv_kernel"),
        "mamba_d_ssm": inner,
    }


def head_sizes(facts: Facts, config: Fields) -> Fields:
    """Heads of Mamba2."""
    heads = facts.whole("ssm.time_step_rank")
    wide = {"num_heads": heads, "head_dim": facts.whole("ssm.inner_size") // max(heads, 1)}
    return wide | {"expand": facts.whole("ssm.inner_size") // config["hidden_size"]}


def jamba_layers(facts: Facts, config: Fields) -> Fields:
    """Every few layers, from one on, have attention, and experts."""
    heads = facts.by_layer("attention.head_count_kv")
    found: Fields = {"num_key_value_heads": max(heads)}
    for name, having in (("attn", [n > 0 for n in heads]), ("expert", facts.having("ffn_gate_inp.weight"))):
        at = [i for i, has in enumerate(having) if has]
        period = at[1] - at[0] if len(at) > 1 else facts.layers
        offset = at[0] if at else period - 1
        if at and at != list(range(offset, facts.layers, period)):
            raise facts.bad(f"layers {at[:8]} have {name}, which is not every few; use the model's safetensors")
        found |= {f"{name}_layer_period": period, f"{name}_layer_offset": offset}
    return found | {"mamba_expand": facts.whole("ssm.inner_size") // config["hidden_size"]}


def nemotron_layers(facts: Facts, config: Fields) -> Fields:
    """One part to a layer, which the tensors show."""
    heads, inner = facts.by_layer("attention.head_count_kv"), facts.whole("ssm.time_step_rank")
    facts.get("feed_forward_length")
    parts = {"full_attention": "attn_q.weight", "moe": "ffn_gate_inp.weight", "mlp": "ffn_up.weight"}
    kinds = ["linear_attention"] * facts.layers
    for kind, tensor in parts.items():
        kinds = [kind if has else other for has, other in zip(facts.having(tensor), kinds, strict=True)]
    dense = facts.tensor("blk.ffn_up.weight")
    return {
        "layers_block_type": kinds,
        "num_key_value_heads": max(heads),
        "intermediate_size": dense.shape[0] if dense is not None else 1,
        "mamba_num_heads": inner,
        "mamba_head_dim": facts.whole("ssm.inner_size") // max(inner, 1),
    }


def rotary_positions(facts: Facts, config: Fields) -> Fields:
    """Whether attention between layers of Mamba2 knows positions."""
    return {"position_embedding_type": "rope" if facts.get("rope.scaling.finetuned") else "nope"}


def dense_or_experts(facts: Facts, config: Fields) -> Fields:
    """Granite's hybrids without experts call the dense part by another name."""
    width = facts.get("expert_shared_feed_forward_length") or config["intermediate_size"]
    return {"shared_intermediate_size": width, "num_local_experts": facts.get("expert_count", 0)}


def token_types(facts: Facts, config: Fields) -> Fields:
    """How many types of tokens an encoder tells apart."""
    table = facts.tensor("token_types.weight")
    return {"type_vocab_size": table.shape[0] if table is not None and len(table.shape) > 1 else 0}


def pooled(facts: Facts, config: Fields) -> Fields:
    """How one vector is made of a text, where the file says so."""
    kinds = {0: "ALL", 1: "MEAN", 2: "CLS", 3: "LAST"}
    kind = facts.get("pooling_type")
    if kind is None:
        return {}
    if kind not in kinds:
        raise facts.bad(
            f"{facts.name}.pooling_type is {kind!r:.80}; none, mean, cls and last are read; use safetensors"
        )
    return {"pooling": {"pooling_type": kinds[kind]}}


def head_bias(facts: Facts, config: Fields) -> Fields:
    """Whether the language head has a bias."""
    return {"lm_head_bias": facts.tensor("output.bias") is not None}


def untruncated(facts: Facts, config: Fields) -> Fields:
    """GPT-OSS was trained with borders of YaRN that are not rounded to whole pairs."""
    scaling = config["rope_scaling"]
    return {"rope_scaling": scaling | {"truncate": False}} if scaling else {}


def inner_width(facts: Facts, config: Fields) -> Fields:
    """Files of GPT-2 have four times the width for its feed-forward part, whatever the matrices are."""
    matrix = facts.tensor("blk.ffn_up.weight")
    return {"n_inner": matrix.shape[0]} if matrix is not None else {}


def indexed_layers(facts: Facts, config: Fields) -> Fields:
    """Which layers choose tokens; the others take what the last one chose."""
    facts.get("attention.indexer.types")
    return {"indexer_types": ["full" if has else "shared" for has in facts.having("indexer.attn_k.weight")]}


def kimi_layers(facts: Facts, config: Fields) -> Fields:
    """Which layers are delta nets, and their sizes."""
    facts.get("attention.head_count_kv")
    heads, kinds = facts.tensor("blk.ssm_beta.weight"), facts.having("ssm_beta.weight")
    return {
        "layer_types": ["linear_attention" if delta else "full_attention" for delta in kinds],
        "linear_conv_kernel_dim": facts.whole("ssm.conv_kernel"),
        "linear_head_dim": facts.whole("kda.head_dim"),
        "linear_num_heads": heads.shape[0] if heads is not None else None,
    }
