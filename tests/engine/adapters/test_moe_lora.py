"""LoRA adapters of experts beside PEFT's own model, on tiny random checkpoints: alone, mixed in one batch, over
quantized weights, and in the names of older checkpoints."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from graphllm import LLM, LoRARequest, SamplingParams
from graphllm.config import ConfigError
from tests.engine.adapters.checked import check_logprobs
from tests.tiers import thorough

V = 131
SIZES = {
    "vocab_size": V, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.15, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "num_experts_per_tok": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 48, "head_dim": 16}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "head_dim": 16, "layer_types": ["full_attention"] * 2}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": ("Qwen2Moe", {"num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40}),
    "olmoe": ("Olmoe", {"num_experts": 4}),
    "phimoe": ("Phimoe", {"num_local_experts": 4}),
}
# Where every expert is chosen, rounding does not decide which ones are.
ALL_CHOSEN = {"all_chosen": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 4})}
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=20, prompt_logprobs=0)


class Family:
    """A checkpoint in a folder with adapters beside it, and what PEFT's models say. made: transformers' name and fields
    of a family that is not in the lists above."""

    def __init__(
        self, name: str, folder: Path, adapters: dict[str, dict[str, Any]], change: Callable[[Any], None] | None = None,
        made: tuple[str, dict[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        kind, more = made or (FAMILIES | OTHERS | ALL_CHOSEN)[name]
        self.folder, self._kind = folder / "model", kind
        torch.manual_seed(sum(map(ord, name)))
        config = getattr(transformers, f"{kind}Config")(**SIZES | more)
        base = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        if change is not None:
            change(base)
        base.save_pretrained(self.folder)
        self.models: dict[str | None, Any] = {None: self.base()}
        for adapter, fields in adapters.items():  # with parameters of modules, PEFT wants one model for each
            model = peft.get_peft_model(self.base(), peft.LoraConfig(**fields)).eval()
            for parameter, values in model.named_parameters():
                if "lora_" in parameter:
                    torch.nn.init.normal_(values, std=0.2)
            model.save_pretrained(folder / adapter)
            self.models[adapter] = model
        self.requests = {n: LoRARequest(n, i + 1, str(folder / n)) for i, n in enumerate(adapters)}

    def base(self) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    def rounded(self) -> Family:
        """The same with PEFT's models in bfloat16."""
        other = copy.copy(self)
        other.models = {name: copy.deepcopy(model).bfloat16() for name, model in self.models.items()}
        return other

    def logprobs(self, tokens: Sequence[int], adapter: str | None) -> torch.Tensor:
        """[T, V]: log-probabilities after each token."""
        with torch.no_grad():
            logits = self.models[adapter](torch.tensor([list(tokens)])).logits[0]
        return torch.log_softmax(logits.double(), -1)

    def check(self, outputs: Sequence[Any], adapters: Sequence[str | None], tolerance: float = 1e-4) -> None:
        check_logprobs(self.logprobs, outputs, adapters, tolerance)


def _open(family: Family, **options: Any) -> LLM:
    given: dict[str, Any] = {
        "dtype": "float32", "backend": "eager", "max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 32,
        "block_size": 8, "skip_tokenizer_init": True, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8,
        "lora_target_modules": ("q_proj", "experts"),
    }  # fmt: skip
    return LLM(family.folder, **{**given, **options})


def _prompts(count: int, seed: int = 0) -> list[Any]:
    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randrange(V) for _ in range(rng.choice([1, 5, 19, 45]))]} for _ in range(count)]


def _run(family: Family, llm: LLM, adapters: Sequence[str | None], seed: int = 0) -> list[Any]:
    requests = [a and family.requests[a] for a in adapters]
    return llm.generate(_prompts(len(adapters), seed), GREEDY, lora_request=requests)


ADAPTERS: dict[str, dict[str, Any]] = {
    "both": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": BOTH},
    "up": {"r": 8, "lora_alpha": 3, "use_rslora": True, "target_modules": [], "target_parameters": BOTH[:1]},
    "down": {"r": 3, "lora_alpha": 5, "target_modules": [], "target_parameters": BOTH[1:]},
}
# PEFT makes of such names the tensors of all experts, gates and ups with twice the rank.
OLD_NAMES = {"mixtral": ["w1", "w2", "w3"], "qwen3_moe": ["gate_proj", "up_proj", "down_proj"]}


@pytest.mark.parametrize(
    "name",
    [
        *(n if n == "qwen3_moe" else thorough(n) for n in FAMILIES),
        *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS),
    ],
)
def test_experts(name: str, tmp_path: Path) -> None:
    """Alone and mixed, with fewer tables than adapters."""
    adapters = dict(ADAPTERS)
    if name in OLD_NAMES:
        adapters["named"] = {"r": 4, "lora_alpha": 8, "target_modules": OLD_NAMES[name]}
    family = Family(name, tmp_path, adapters)
    with _open(family) as llm:
        for adapter in (None, *adapters):
            family.check(_run(family, llm, [adapter] * 2, seed=1), [adapter] * 2)
        mixed = [None, *adapters] * 3
        family.check(_run(family, llm, mixed), mixed)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OLD_NAMES)
def test_names_of_each_expert(name: str, tmp_path: Path) -> None:
    """As PEFT wrote them while experts were modules: an A and a B for each, of which some may be missing. The model to
    compare with has the same numbers in its tensors of all experts."""
    gate, up, down = [OLD_NAMES[name][i] for i in ((0, 2, 1) if name == "mixtral" else (0, 1, 2))]
    family = Family(name, tmp_path, {"old": {"r": 4, "lora_alpha": 8, "target_modules": ["o_proj"]}})
    folder, model, g = tmp_path / "old", family.base(), torch.Generator().manual_seed(3)
    tensors = load_file(folder / "adapter_model.safetensors")
    owner = "block_sparse_moe" if name == "mixtral" else "mlp"
    for i, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        N, twice, D = experts.gate_up_proj.shape
        halves = slice(0, twice // 2), slice(twice // 2, twice)
        places = {
            gate: (experts.gate_up_proj, halves[0]),
            up: (experts.gate_up_proj, halves[1]),
            down: (experts.down_proj, slice(0, D)),
        }
        for n in range(1, N):
            for module, (stack, rows) in places.items():
                part = stack.data[n, rows]
                a, b = (torch.randn(s, generator=g) / 5 for s in ((4, part.shape[1]), (part.shape[0], 4)))
                part += 2.0 * b @ a
                path = f"base_model.model.model.layers.{i}.{owner}.experts.{n}.{module}"
                tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
        layer.self_attn.o_proj.weight.data += (
            family.models["old"].base_model.model.model.layers[i].self_attn.o_proj.get_delta_weight("default")
        )
    save_file(tensors, folder / "adapter_model.safetensors")
    family.models["old"] = model
    with _open(family, lora_target_modules=("o_proj", "experts")) as llm:
        mixed = [None, "old"] * 2
        family.check(_run(family, llm, mixed), mixed)


def _rounded(model: Any) -> None:
    """Round every matrix to what int8 of groups of 64 holds, so that quantizing it changes nothing."""
    for name, weight in model.named_parameters():
        if weight.ndim >= 2 and not any(part in name for part in ("embed", "norm", "gate.weight")):
            for group in weight.data.split(64, -1):
                scale = (group.abs().amax(-1, keepdim=True) / 127).bfloat16().float()
                group.copy_((group / scale).round().clamp(-127, 127) * scale)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mixtral", thorough("qwen3_moe")])
def test_over_int8(name: str, tmp_path: Path) -> None:
    """Quantized while it is loaded; what adapters add is as it is."""
    family = Family(name, tmp_path, ADAPTERS, _rounded)
    mixed = [None, *ADAPTERS] * 2
    with _open(family, quantization="int8") as llm:
        family.check(_run(family, llm, mixed), mixed, 1e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("wanted", [(), ("shared_expert_gate",)])
def test_gate_of_the_shared_expert(wanted: tuple[str, ...], tmp_path: Path) -> None:
    """It has one product with the router, which no adapter changes. Where only it is asked for, the shared expert is
    one of the others."""
    made = "Qwen2Moe", OTHERS["qwen2_moe"][1] | {"shared_expert_intermediate_size": 48}
    modules = ["shared_expert_gate"] if wanted else ["q_proj", "shared_expert_gate", "down_proj"]
    adapters = {"gate": {"r": 4, "lora_alpha": 8, "target_modules": modules}}
    family = Family("qwen2_moe", tmp_path, adapters, made=made)
    mixed = [None, "gate"] * 2
    with _open(family, lora_target_modules=wanted) as llm:
        family.check(_run(family, llm, mixed), mixed)


@pytest.mark.thorough
def test_over_a_quantized_checkpoint(tmp_path: Path) -> None:
    """Matrices in float8 times a scale, as a checkpoint stores them, beside PEFT over the numbers that these are."""
    family = Family("qwen3_moe", tmp_path, ADAPTERS)
    assert any(".experts.3.down_proj" in name for name in in_float8(family, tmp_path, ADAPTERS))
    mixed = [None, *ADAPTERS] * 2
    with _open(family) as llm:
        family.check(_run(family, llm, mixed), mixed, 1e-3)


def in_float8(family: Family, folder: Path, adapters: Iterable[str]) -> Iterable[str]:
    """Have a family's checkpoint store its projections so; the names of these."""
    tensors, stored = load_file(family.folder / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        if "_proj" in name and name.endswith(".weight"):
            scale = weight.abs().max() / 448
            stored |= {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
            tensors[name] = stored[name].float() * scale
    save_file(tensors, family.folder / "model.safetensors", {"format": "pt"})
    family.models = {a: peft.PeftModel.from_pretrained(family.base(), folder / a).eval() for a in adapters}
    family.models[None] = family.base()
    family.folder = folder / "stored"
    family.folder.mkdir()
    save_file(tensors | stored, family.folder / "model.safetensors", {"format": "pt"})
    fields = json.loads((folder / "model" / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (family.folder / "config.json").write_text(json.dumps(fields))
    return stored


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_compiled(tmp_path: Path) -> None:
    """By the kernels of CPUs, with the embedding and the head; steps without an adapter run programs that have none."""
    ends = {"r": 5, "target_modules": ["embed_tokens", "lm_head", "o_proj"], "target_parameters": BOTH}
    adapters = {**ADAPTERS, "ends": ends}
    family = Family("mixtral", tmp_path, adapters)
    mixed = [None, *adapters] * 2
    wanted = ("q_proj", "o_proj", "experts", "embed_tokens", "lm_head")
    with _open(family, backend="inductor", lora_target_modules=wanted) as llm:
        family.check(_run(family, llm, mixed), mixed)
        family.check(_run(family, llm, [None] * 3), [None] * 3)


@pytest.mark.thorough
def test_what_is_not_asked_for(tmp_path: Path) -> None:
    """Without their names in lora_target_modules experts have no tables; the error says which modules have."""
    family = Family("mixtral", tmp_path, {"both": ADAPTERS["both"]})
    with _open(family, lora_target_modules=()) as llm:
        told = r"experts\.gate_up_proj is none of the layers that adapters may change here.*lora-target-modules"
        with pytest.raises(ConfigError, match=told):
            _run(family, llm, ["both"])
    with _open(family) as llm:
        fields = json.loads((tmp_path / "both" / "adapter_config.json").read_text())
        fields["target_parameters"].append("gate.weight")
        (tmp_path / "both" / "adapter_config.json").write_text(json.dumps(fields))
        with pytest.raises(ConfigError, match=r"target_parameters has 'weight'.*merge_and_unload"):
            _run(family, llm, ["both"])
