"""What an artifact is compiled for: the machine, the buckets, and every setting that compiled programs depend on."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from graphllm.config.errors import ConfigError
from graphllm.config.setting import definitions, not_key, parse_count, setting
from graphllm.config.token_tree import DynamicTree, TokenTree, token_tree

_SHORT = (256, 512, 1024)  # tokens of steps for which a GPU has products that suit that number of rows
_LARGEST_BUCKET, _MOST_QUERIES = 2**24, 2**10
Dtype = Literal["bfloat16", "float16", "float32"]
Quantization = Literal["int8", "int4", "fp8", "mxfp4", "nf4"]
RecurrentDtype = Literal["auto", "bfloat16", "float16", "float32"]
CacheDtype = Literal["auto", "bfloat16", "float16", "float32", "fp8", "int8"]


@dataclass(frozen=True)
class Target:
    """The machine an artifact is compiled for.

    device: "cpu" or "cuda". arch: "sm_90" and "sms_132" (multiprocessors) on CUDA, the sorted instruction-set flags
    that kernels may use on a CPU.
    name: the product name, for people.
    """

    device: Literal["cpu", "cuda"]
    arch: tuple[str, ...]
    name: str = field(default="", metadata=not_key("a label; `arch` says what matters"))

    @property
    def multiprocessors(self) -> int:
        """Of the GPU; 1 where `arch` tells none."""
        return next((int(a.removeprefix("sms_")) for a in self.arch if a.startswith("sms_")), 1)


@dataclass(frozen=True, order=True)
class Bucket:
    """A range of sizes that one specialization of a graph serves.

    kind "decode": ``lo`` to ``hi`` sequences that have ``query_len`` tokens each, and a sample after each token: one
    token in plain decoding, more where drafts are verified. kind "mixed": one ragged batch of ``lo`` to ``hi`` tokens.
    A bucket with ``lo == hi`` is compiled for that static size; sizes are dynamic (and at least 2) otherwise."""

    kind: Literal["decode", "mixed"]
    lo: int
    hi: int
    query_len: int = 1

    @property
    def static(self) -> bool:
        return self.lo == self.hi

    @property
    def name(self) -> str:
        kind = self.kind if self.query_len == 1 else f"{self.kind}{self.query_len}"
        return f"{kind}-{self.lo}" if self.static else f"{kind}-{self.lo}-{self.hi}"

    def limits(self, max_num_seqs: int, query_len: int = 1) -> dict[str, int]:
        """The largest T, S and R of a step in this bucket. Dynamic ones are at least 2, however few there are.
        query_len: the longest of all buckets; in mixed buckets, sequences verify drafts next to prompts."""
        if self.kind == "decode":
            return {"T": self.query_len * self.hi, "S": self.hi, "R": self.query_len * self.hi}
        rows = 1 if self.hi == 1 else max(2, max_num_seqs)
        return {"T": self.hi, "S": rows, "R": min(self.hi, rows * query_len)}


def parse_buckets(text: str) -> tuple[Bucket, ...]:
    """Buckets from ``decode-1,decode-2-64,mixed-2-2048``; ``decode3-1-64`` are sequences of three tokens each. Raises
    ConfigError naming the part that is wrong."""
    out = []
    for part in text.split(","):
        found = re.fullmatch(r"(decode|mixed)(\d{0,4})-(\d{1,9})(?:-(\d{1,9}))?", part.strip())
        if found is None or (found[1] == "mixed" and found[2]) or found[2] == "0":
            raise ConfigError(
                f"buckets: {part!r:.80} is not of the form decode-1, decode-2-64, decode3-1-64 or mixed-2-2048"
            )
        kind, query_len, lo, hi = found.groups()
        out.append(Bucket("mixed" if kind == "mixed" else "decode", int(lo), int(hi or lo), int(query_len or 1)))
    return tuple(out)


def parse_rules(text: str) -> tuple[str, ...]:
    """Rules from ``layers.0.*=none,lm_head=int8``."""
    return tuple(rule.strip() for rule in text.split(","))


def parse_names(text: str) -> tuple[str, ...]:
    """Names from ``q_proj,v_proj``."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def default_buckets(
    target: Target, max_num_seqs: int, max_num_batched_tokens: int, num_speculative_tokens: int = 0,
    dynamic: bool = False, deterministic: bool = False,
) -> tuple[Bucket, ...]:  # fmt: skip
    """A bucket of one sequence is static; the rest of decode is split where other kernels win on a GPU. dynamic: fewer
    drafts may be verified, too: 1, 2, 4 and so on. deterministic: on a CPU, where generated code decides how norms add
    up, one program serves every step; on a GPU, where no library chooses products by their size, short steps with
    prompts have their own, of several sizes."""
    if deterministic and target.device == "cpu":
        return (Bucket("mixed", 1, max_num_batched_tokens),)
    found = [Bucket("decode", 1, 1)]
    edges = [16, 32, 64, 128, 256, max_num_seqs] if target.device == "cuda" else [max_num_seqs]
    low = 2
    for edge in edges:
        if low <= min(edge, max_num_seqs):
            found.append(Bucket("decode", low, min(edge, max_num_seqs)))
            low = edge + 1
    counts = [2**i for i in range(10) if dynamic and 2**i < num_speculative_tokens]
    verifying = []
    for count in (*counts, num_speculative_tokens) if num_speculative_tokens else ():
        most = min(max_num_seqs, max_num_batched_tokens // (count + 1))
        verifying += [replace(b, hi=min(b.hi, most), query_len=count + 1) for b in found if b.lo <= most]
    ends = [n for n in _SHORT if deterministic and n < max_num_batched_tokens] + [max_num_batched_tokens]
    mixed = [Bucket("mixed", before + 1, end) for before, end in zip([1, *ends], ends, strict=False)]
    return (*found, *verifying, *mixed)


@dataclass(frozen=True)
class CompileConfig:
    """All that the compiler is given in addition to the model's own config. What compiled programs depend on stands
    here, and every field is in the artifact key by default."""

    target: Target = setting(
        auto="a GPU where there is one",
        written=Literal["auto", "cpu", "cuda"],
        help="Device to compile for and to run on.",
    )
    backend: Literal["inductor", "prebuilt", "eager"] = setting(
        "inductor",
        help="What makes the code. inductor: code of the model's own, which needs a compiler and a minute. prebuilt, "
        "on a CPU: kernels that come with graphllm, in seconds and a bit slower. eager runs the reference ops: slow, "
        "always there.",
    )
    dtype: Dtype = setting(
        "bfloat16",
        auto="the checkpoint's, but bfloat16 for float32 checkpoints on a GPU",
        written=Literal["auto", Dtype],
        help="Type in which the model computes.",
    )
    quantization: Quantization | None = setting(
        None,
        written=str | None,
        help="int8, int4, fp8, mxfp4 or nf4: round the weights of linear layers and experts while they are loaded. "
        "Without kernels on the device they are kept in the model's type. A quantized checkpoint's own method may be "
        "named too, and need not be.",
    )
    kv_cache_dtype: CacheDtype = setting(
        "auto",
        help="Type of the cache's keys and values: fp8 (e4m3) and int8 hold twice the tokens in the same memory; auto: "
        "that of the model.",
    )
    mamba_ssm_cache_dtype: RecurrentDtype = setting(
        "auto",
        help="Type in which scans and delta nets keep their states; they compute in float32. With float16 a step moves "
        "half the bytes, and each token rounds the state. auto: float32.",
    )
    snapshot_dtype: Literal["auto", "int8"] = setting(
        "auto",
        help="Type in which copies of recurrent states are kept for reuse: int8 has a scale for each channel of a "
        "head, and takes a quarter of float32's memory. States of convolutions are kept as they are. auto: all are.",
    )
    quantization_rules: tuple[str, ...] = setting(
        (),
        parse=parse_rules,
        help="Matrices that are rounded otherwise, such as layers.0.*=none,lm_head=int8: names in the checkpoint or in "
        "the weight plan, with * and ?, and none or a value of quantization. The first rule that fits holds.",
    )
    buckets: tuple[Bucket, ...] = setting(
        (),
        auto="chosen by device, max_num_seqs and max_num_batched_tokens",
        parse=parse_buckets,
        help="Batch sizes to specialize for, such as decode-1,decode-2-64,mixed-2-2048.",
    )
    max_model_len: int = setting(
        2048,
        auto="the model's own",
        parse=functools.partial(parse_count, "max_model_len"),
        help="Tokens of a prompt and its output together, such as 8192 or 8k.",
        ge=2,
        le=2**31 - 1,
    )
    max_num_seqs: int = setting(
        64,
        auto="64 on a CPU, 256 or 1024 by the memory of a GPU; fewer where recurrent states are large",
        parse=functools.partial(parse_count, "max_num_seqs"),
        help="Sequences in one step.",
        ge=1,
        le=2**16,
    )
    max_num_batched_tokens: int = setting(
        2048,
        auto="2048 on a CPU, 8192 on a GPU",
        parse=functools.partial(parse_count, "max_num_batched_tokens"),
        help="Tokens in one step.",
        ge=2,
        le=_LARGEST_BUCKET,
    )
    block_size: int = setting(16, auto="16", help="Tokens in one block of the cache.", ge=1, le=2**16)
    max_logprobs: int = setting(
        20,
        help="Log-probabilities that a request may ask for at each position; -1: the whole vocabulary.",
        ge=-1,
        le=2**16,
    )
    max_logit_bias: int = setting(1024, help="Number of tokens that a request may bias the logits of.", ge=0, le=2**24)
    tensor_parallel_size: int = setting(
        1, help="Ranks that divide the matrices of the layers among them.", ge=1, le=2**10
    )
    enable_expert_parallel: bool = setting(
        False, help="Ranks divide the experts of a layer by their number, each whole, and not by their width."
    )
    data_parallel_experts: int = setting(
        1,
        auto="data_parallel_size with enable_expert_parallel and one rank for each core",
        help="Engine cores that have the experts of a layer together, some each, and all else by themselves; they step "
        "together.",
        ge=1,
        le=64,
    )
    enable_eplb: bool = setting(
        False,
        help="Balance the experts of enable_expert_parallel: while serving, move them between ranks as tokens choose "
        "them.",
    )
    num_redundant_experts: int = setting(
        0,
        help="Of enable_eplb: number of copies of busy experts that each layer has room for, shared by all ranks.",
        ge=0,
        le=2**12,
    )
    num_speculative_tokens: int = setting(
        0, help="Drafted tokens of a sequence that one step verifies; 0: none.", ge=0, le=2**10
    )
    dynamic_speculative_tokens: bool = setting(
        False,
        help="Compile programs that verify 1, 2, 4 ... drafts, too; a step takes what is the fastest as measured.",
    )
    speculative_token_tree: str | None = setting(
        None,
        help="Which drafts a step verifies where a draft model guesses several tokens for one place: a list of paths, "
        "such as [(0,), (1,), (0, 0)], each telling which of the likeliest tokens follow each other; or sizes of one "
        'that grows where an EAGLE head is sure, such as {"top_k": 4, "depth": 5, "drafts": 16}; None: one run.',
    )
    prompt_lookup_max: int = setting(
        0,
        help="Most tokens to look up in the text so far: drafts are what followed them there; 0: no such drafts.",
        ge=0,
        le=2**6,
    )
    prompt_lookup_min: int = setting(
        1, help="Fewest of the last tokens that must have stood together before.", ge=1, le=2**6
    )
    draft_sample_method: Literal["greedy", "probabilistic"] = setting(
        "greedy",
        help="probabilistic: a draft model draws its drafts, and keeps the probabilities of the whole vocabulary for "
        "their verification. greedy: the likeliest token is the draft.",
    )
    rejection_sample_method: Literal["standard", "typical", "synthetic"] = setting(
        "standard",
        help="How drafts are accepted. standard: texts are as without them. Lossy are typical: sampled requests accept "
        "drafts that are likely enough, and synthetic, for benchmarks: each is accepted with a given probability.",
    )
    posterior_threshold: float = setting(
        0.09, help="Of typical acceptance: a probability above which drafts are accepted.", gt=0, le=1
    )
    posterior_alpha: float = setting(
        0.3,
        help="Of typical acceptance: times exp(-entropy), such a probability, too.",
        gt=0,
        le=1,
    )
    synthetic_acceptance_rate: float = setting(
        0.8, help="Of synthetic acceptance: the probability with which each draft is accepted.", gt=0, le=1
    )
    item_tokens: int = setting(
        0, help="Rows of encoded inputs that are kept, for models with an encoder.", ge=0, le=2**31 - 1
    )
    enable_lora: bool = setting(
        False, help="Serve LoRA adapters together with the model: every request may have its own, loaded while serving."
    )
    max_loras: int = setting(1, help="Adapters that requests of one step may have, at most.", ge=1, le=2**12)
    max_lora_rank: int = setting(16, help="The largest rank of an adapter.", ge=1, le=2**10)
    lora_target_modules: tuple[str, ...] = setting(
        (),
        parse=parse_names,
        help="Modules that adapters may change, by the ends of their names, such as q_proj,v_proj; default: all linear "
        "layers. The fewer, the faster. lm_head, embed_tokens and experts only by name.",
    )
    count_expert_tokens: bool = setting(
        False, help="Count the tokens of each expert in every layer, for metrics and benchmarks."
    )
    deterministic: bool = setting(
        False,
        help="A request gets the same tokens and log-probabilities, bit for bit, whatever runs at the same time, "
        "however its prompt is divided, and whether it comes from the cache or is computed again; a little slower.",
    )
    tune: bool = setting(False, auto="on for a GPU", help="Choose kernels by timing them while compiling (GPU).")
    tune_all: bool = setting(
        False, help="Of tune: time every candidate, also where the package's tables know what is fast on this GPU."
    )
    dump: Path | None = setting(
        None,
        help="Write the readable IR of every stage into this folder.",
        key="where to write the readable IR; the artifact is the same",
    )
    jobs: int = setting(
        0,
        help="Processes that compile at the same time; 0 chooses.",
        key="parallel build processes; the artifact is the same",
        ge=0,
        le=2**10,
    )

    @property
    def counts_experts(self) -> bool:
        """Whether steps count the tokens of each expert."""
        return self.count_expert_tokens or self.enable_eplb

    @property
    def longest_query(self) -> int:
        """Tokens of a sequence that a step verifies at most, 1 without drafts."""
        return max((b.query_len for b in self.buckets), default=1)

    @property
    def usual_snapshots(self) -> int:
        """Copies of recurrent states there are at most where the user does not say how much memory they have."""
        return 4 * self.max_num_seqs

    @property
    def tree(self) -> TokenTree | DynamicTree | None:
        """The tree of drafts that steps verify, None for one run of them."""
        return None if self.speculative_token_tree is None else token_tree(self.speculative_token_tree)

    @property
    def cache_dtype(self) -> str:
        """The torch dtype that `kv_cache_dtype` means."""
        return {"auto": self.dtype, "fp8": "float8_e4m3fn"}.get(self.kv_cache_dtype, self.kv_cache_dtype)

    @property
    def state_dtypes(self) -> dict[str, str]:
        """The torch dtypes of states that are "model", "cache" or "recurrent" in a `StateSpec`."""
        recurrent = "float32" if self.mamba_ssm_cache_dtype == "auto" else self.mamba_ssm_cache_dtype
        return {"model": self.dtype, "cache": self.cache_dtype, "recurrent": recurrent}


def ranked_logprobs(max_logprobs: int) -> int:
    """How many of the likeliest tokens a step finds at each position; for more, the host ranks the vocabulary."""
    return 20 if max_logprobs == -1 else max_logprobs


def _check_tree(config: CompileConfig, tree: TokenTree | DynamicTree) -> None:
    """Raise ConfigError for what does not go with a tree of drafts."""
    drafts = tree.drafts
    if config.num_speculative_tokens != drafts:
        raise ConfigError(
            f"num_speculative_tokens is {config.num_speculative_tokens}, but speculative_token_tree has {drafts} "
            "drafts; leave num_speculative_tokens out"
        )
    wrong = {
        "dynamic_speculative_tokens is True": config.dynamic_speculative_tokens,
        "draft_sample_method is probabilistic": config.draft_sample_method != "greedy",
        f"rejection_sample_method is {config.rejection_sample_method}": config.rejection_sample_method != "standard",
    }
    for mistake, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(f"{mistake}: drafts of a tree are all verified, by comparing; leave it or the tree out")
    if lengths := [b.name for b in config.buckets if b.query_len not in (1, drafts + 1)]:
        raise ConfigError(f"buckets: {lengths[0]} verifies a part of speculative_token_tree; leave it out")
    if config.prompt_lookup_max:
        raise ConfigError(
            f"prompt_lookup_max is {config.prompt_lookup_max}: it guesses one run of tokens; leave "
            "speculative_token_tree out"
        )


def _check_sharing(config: CompileConfig) -> None:
    """Raise ConfigError for what engine cores that share experts cannot do."""
    wrong = {
        "enable_expert_parallel is False": not config.enable_expert_parallel,
        f"tensor_parallel_size is {config.tensor_parallel_size}": config.tensor_parallel_size > 1,
        f"num_speculative_tokens is {config.num_speculative_tokens}": config.num_speculative_tokens > 0,
        "enable_eplb is True": config.enable_eplb,
        "enable_lora is True": config.enable_lora,
    }
    for mistake, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(
                f"{mistake}: that is not there for {config.data_parallel_experts} engine cores that share experts; "
                "leave it out, or set data_parallel_experts 1 and tensor_parallel_size"
            )


def _check_deterministic(config: CompileConfig) -> None:
    """Raise ConfigError for what depends on the batch whatever kernels do."""
    if config.backend == "eager":
        raise ConfigError("deterministic: products of the backend eager depend on the batch; use inductor")
    if config.mamba_ssm_cache_dtype not in ("auto", "float32"):
        raise ConfigError(
            f"deterministic: mamba_ssm_cache_dtype is {config.mamba_ssm_cache_dtype}, and each step would round the "
            "states, so how a prompt is divided would matter; leave it out"
        )
    if config.snapshot_dtype != "auto":
        raise ConfigError(
            f"deterministic: snapshot_dtype is {config.snapshot_dtype}, and a text would depend on what the cache has; "
            "leave it out"
        )
    if config.num_speculative_tokens:
        raise ConfigError(
            f"deterministic: num_speculative_tokens is {config.num_speculative_tokens}, and drafts are verified by "
            "other programs than those that decode; leave them out"
        )
    largest = max((b.hi for b in config.buckets), default=0)
    if config.target.device == "cpu" and config.buckets != (Bucket("mixed", 1, largest),):
        raise ConfigError(
            f"deterministic: buckets are {', '.join(b.name for b in config.buckets)}, and on a CPU one program serves "
            f"every step; use mixed-1-{largest}, or leave them out"
        )


def check(config: CompileConfig) -> None:
    """Raise ConfigError for settings that cannot work together."""
    for name, definition in definitions(CompileConfig).items():
        definition.check(getattr(config, name))  # also what the model's config.json says
    if config.dtype not in get_args(Dtype):
        raise ConfigError(f"dtype is {config.dtype!r}: use bfloat16, float16 or float32")
    if config.kv_cache_dtype not in ("auto", "fp8", "int8", config.dtype):
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype}: the model computes in {config.dtype}; use auto, fp8 or int8"
        )
    if config.mamba_ssm_cache_dtype not in ("auto", "float32") and config.target.device == "cpu":
        raise ConfigError(
            f"mamba_ssm_cache_dtype is {config.mamba_ssm_cache_dtype}: on a CPU states are float32; leave it out"
        )
    if config.prompt_lookup_max and not config.num_speculative_tokens:
        raise ConfigError(
            f"prompt_lookup_max is {config.prompt_lookup_max}, num_speculative_tokens 0: say how many tokens to guess"
        )
    if 0 < config.prompt_lookup_max < config.prompt_lookup_min:
        raise ConfigError(
            f"prompt_lookup_min is {config.prompt_lookup_min}: it is more than prompt_lookup_max, "
            f"{config.prompt_lookup_max}"
        )
    if config.draft_sample_method == "probabilistic" and config.rejection_sample_method != "standard":
        raise ConfigError(
            f"draft_sample_method is probabilistic: {config.rejection_sample_method} acceptance does not look at "
            "probabilities of drafts; use rejection_sample_method standard, or greedy drafts"
        )
    if config.enable_expert_parallel and config.tensor_parallel_size == 1 and config.data_parallel_experts == 1:
        raise ConfigError(
            "enable_expert_parallel: one rank has all experts; set tensor_parallel_size or data_parallel_size, or "
            "leave it out"
        )
    if config.data_parallel_experts > 1:
        _check_sharing(config)
    if config.enable_eplb and not config.enable_expert_parallel:
        raise ConfigError(
            "enable_eplb is True: it moves whole experts between ranks; set enable_expert_parallel, or leave it out"
        )
    if config.num_redundant_experts and not config.enable_eplb:
        raise ConfigError(
            f"num_redundant_experts is {config.num_redundant_experts}: enable_eplb makes the copies; set it, or use 0"
        )
    if config.tree is not None:
        _check_tree(config, config.tree)
    if config.deterministic:
        _check_deterministic(config)
    for rule in config.quantization_rules:
        pattern, _, to = rule.rpartition("=")
        if not pattern or to not in ("none", *get_args(Quantization)):
            raise ConfigError(
                f"quantization_rules: {rule!r:.80} is not of the form PATTERN=none or "
                f"PATTERN={', PATTERN='.join(get_args(Quantization))}"
            )
    for b in config.buckets:
        if b.hi > _LARGEST_BUCKET or b.query_len > _MOST_QUERIES:
            raise ConfigError(
                f"buckets: {b.name} is too large; give at most {_LARGEST_BUCKET} and decode{_MOST_QUERIES}"
            )
        if not 1 <= b.lo <= b.hi or (b.lo == 1 and b.hi > 1 and not config.deterministic):
            raise ConfigError(f"buckets: {b.name} is no range; 1 is a bucket of its own, ranges start at 2")
    largest = max((b.hi for b in config.buckets if b.kind == "mixed"), default=0)
    if largest < 2:
        raise ConfigError("buckets: none takes prompts; add a mixed one such as mixed-2-2048")
    if not config.max_num_seqs <= config.max_num_batched_tokens <= largest:
        raise ConfigError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}: it must be at least max_num_seqs, "
            f"{config.max_num_seqs}, and at most what the mixed buckets take, {largest}"
        )
