"""LoRA adapters beside PEFT's own model, on tiny random checkpoints: alone, mixed in one batch, over quantized weights,
more of them than have tables, and through the ends of requests."""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from graphllm import LLM, LoRARequest, SamplingParams
from graphllm.config import ConfigError
from tests.engine.adapters.checked import check_logprobs
from tests.tiers import thorough

V, COUNT = 131, 6
LLAMA = {
    "vocab_size": V, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.15,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GPT2 = {
    "vocab_size": V, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "initializer_range": 0.35,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
BLOOM = {
    "vocab_size": V, "hidden_size": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.3, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
# By family: the config, and modules of an adapter that changes some. Projections are merged by the engine (Qwen2), by
# the checkpoint (Phi3, GPT-2), stored transposed (GPT-2) or by turns (CodeGen, BLOOM).
FAMILIES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "qwen2": ("Qwen2", LLAMA, ["q_proj", "v_proj", "down_proj"]),
    "phi3": ("Phi3", LLAMA, ["qkv_proj", "gate_up_proj"]),
    "gpt2": ("GPT2", GPT2, ["c_attn", "c_fc"]),
    "codegen": ("CodeGen", GPT2 | {"rotary_dim": 8}, ["qkv_proj"]),
    "bloom": ("Bloom", BLOOM, ["query_key_value", "dense_h_to_4h"]),
}
SCALED = {"gemma2": ("Gemma2", LLAMA | {"head_dim": 16, "sliding_window": 64}, ["q_proj"])}  # its embedding is scaled
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 8},
    "some": {"r": 8, "lora_alpha": 4, "use_rslora": True},
    "uneven": {"r": 2, "lora_alpha": 2, "rank_pattern": {"1.*": 5}, "alpha_pattern": {"0.*": 6}},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, logprobs=20, prompt_logprobs=0)


class Family:
    """A checkpoint in a folder with adapters beside it, and what PEFT's model says."""

    def __init__(
        self,
        name: str,
        folder: Path,
        changes: dict[str, Any] | None = None,
        adapters: dict[str, tuple[dict[str, Any], list[str]]] | None = None,
    ) -> None:
        kind, config, some = (FAMILIES | SCALED)[name]
        config = config | (changes or {})
        torch.manual_seed(sum(map(ord, name)))
        whole = getattr(transformers, f"{kind}Config")(**config)
        base = transformers.AutoModelForCausalLM.from_config(whole).float().eval()
        self.folder = folder / "model"
        base.save_pretrained(self.folder)
        every = {
            "Phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
            "GPT2": ["c_attn", "c_proj", "c_fc"],
            "CodeGen": ["qkv_proj", "out_proj", "fc_in", "fc_out"],
            "Bloom": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
        }
        linear = every.get(kind, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
        self.model: Any = None
        adapters = adapters or {n: (o, some if n == "some" else linear) for n, o in ADAPTERS.items()}
        for adapter, (options, chosen) in adapters.items():
            given = peft.LoraConfig(target_modules=chosen, fan_in_fan_out=kind == "GPT2", **options)
            if self.model is None:
                self.model = peft.get_peft_model(base, given, adapter_name=adapter).eval()
            else:
                self.model.add_adapter(adapter, given)
        for parameter, values in self.model.named_parameters():
            if "lora_" in parameter:
                torch.nn.init.normal_(values, std=0.2)
        self.model.save_pretrained(folder / "adapters")
        self.adapters = {n: LoRARequest(n, i + 1, str(folder / "adapters" / n)) for i, n in enumerate(adapters)}

    def logprobs(self, tokens: Sequence[int], adapter: str | None) -> torch.Tensor:
        """[T, V]: log-probabilities after each token."""
        ids = torch.tensor([list(tokens)])
        with torch.no_grad():
            if adapter is None:
                with self.model.disable_adapter():
                    logits = self.model(ids).logits[0]
            else:
                self.model.set_adapter(adapter)
                logits = self.model(ids).logits[0]
        return torch.log_softmax(logits.double(), -1)

    def quantize(self) -> None:
        """Round PEFT's base as int8 does, in groups of 64."""
        linear = [m for n, m in self.model.named_modules() if isinstance(m, torch.nn.Linear) and "lora_" not in n]
        with torch.no_grad():
            for group in (g for module in linear for g in module.weight.split(64, 1)):  # each row of one has a scale
                scale = (group.abs().amax(1, keepdim=True) / 127).bfloat16().float()
                group.copy_((group / scale).round().clamp(-127, 127) * scale)

    def rounded(self) -> Family:
        """The same with PEFT's model in bfloat16."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model).bfloat16()
        return other

    def check(self, outputs: Sequence[Any], adapters: Sequence[str | None], tolerance: float = 1e-4) -> None:
        check_logprobs(self.logprobs, outputs, adapters, tolerance)


@pytest.fixture(scope="module", params=[f if f == "qwen2" else thorough(f) for f in FAMILIES])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family("qwen2", tmp_path_factory.mktemp("one"))


def _open(family: Family, **options: Any) -> LLM:
    given: dict[str, Any] = {
        "dtype": "float32", "backend": "eager", "max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 32,
        "block_size": 8, "skip_tokenizer_init": True, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8,
    }  # fmt: skip
    return LLM(family.folder, **{**given, **options})


@pytest.fixture(scope="module")
def llm(family: Family) -> Iterator[LLM]:
    with _open(family) as llm:
        yield llm


def _prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(V) for _ in range(rng.choice([1, 5, 19, 45]))] for _ in range(count)]


def _ids(prompts: Sequence[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": p} for p in prompts]


@pytest.mark.parametrize("adapter", [None, *ADAPTERS])
def test_alone(family: Family, llm: LLM, adapter: str | None) -> None:
    prompts = _prompts(2, seed=1)
    outputs = llm.generate(_ids(prompts), GREEDY, lora_request=adapter and family.adapters[adapter])
    family.check(outputs, [adapter] * 2)


def test_mixed(family: Family, llm: LLM) -> None:
    """Three adapters and none, of which two have tables at a time; prompts are chunked beside those that decode."""
    adapters = [None, *ADAPTERS] * 3
    requests = [a and family.adapters[a] for a in adapters]
    outputs = llm.generate(_ids(_prompts(len(adapters))), GREEDY, lora_request=requests)
    family.check(outputs, adapters)
    # A prompt's cached beginning belongs to its adapter.
    prompt = [7] * 45
    outputs = llm.generate(_ids([prompt] * 8), GREEDY, lora_request=requests[:4] * 2)
    family.check(outputs, adapters[:4] * 2)


@pytest.mark.thorough
def test_compiled(qwen2: Family) -> None:
    adapters = [None, *ADAPTERS] * 2
    requests = [a and qwen2.adapters[a] for a in adapters]
    with _open(qwen2, backend="inductor") as llm:
        qwen2.check(llm.generate(_ids(_prompts(len(adapters))), GREEDY, lora_request=requests), adapters)
        qwen2.check(llm.generate(_ids(_prompts(3)), GREEDY), [None] * 3)


@pytest.mark.parametrize("tied", [thorough(False), True])
def test_the_head(tied: bool, tmp_path: Path) -> None:
    """Of sampled rows and of scored ones, tied to the embedding or not."""
    options = {"r": 3, "lora_alpha": 5}
    family = Family("qwen2", tmp_path, {"tie_word_embeddings": tied}, {"head": (options, ["lm_head", "up_proj"])})
    adapters = [None, "head"] * 3
    requests = [a and family.adapters[a] for a in adapters]
    with _open(family, lora_target_modules=("lm_head", "up_proj")) as llm:
        family.check(llm.generate(_ids(_prompts(6)), GREEDY, lora_request=requests), adapters)
        with pytest.raises(ConfigError, match=r"proj is none of the layers .* \(gate_proj, lm_head, up_proj\)"):
            llm.generate(_ids(_prompts(1)), GREEDY, lora_request=Family("qwen2", tmp_path / "all").adapters["all"])


EMBEDDINGS = {
    "untied": ("qwen2", False, ["embed_tokens", "up_proj"]),
    "tied": ("qwen2", True, ["embed_tokens"]),
    "with its head": ("qwen2", True, ["embed_tokens", "lm_head"]),
    "gpt2": ("gpt2", True, ["wte", "c_attn"]),
    "scaled": ("gemma2", True, ["embed_tokens", "q_proj"]),
}


@pytest.mark.parametrize("case", EMBEDDINGS)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_the_embedding(case: str, tmp_path: Path) -> None:
    """Tied to the head or not: an adapter of the embedding leaves the head as it is, one of both has two changes."""
    name, tied, modules = EMBEDDINGS[case]
    adapters = {"own": ({"r": 3, "lora_alpha": 5}, modules), "other": ({"r": 5, "use_rslora": True}, modules)}
    family = Family(name, tmp_path, {"tie_word_embeddings": tied}, adapters)
    mixed = [None, *adapters] * 2
    with _open(family, lora_target_modules=tuple(modules)) as llm:
        family.check(llm.generate(_ids(_prompts(2)), GREEDY, lora_request=family.adapters["own"]), ["own"] * 2)
        requests = [a and family.adapters[a] for a in mixed]
        family.check(llm.generate(_ids(_prompts(6)), GREEDY, lora_request=requests), mixed)


def test_drafts_of_a_model(qwen2: Family, tmp_path: Path) -> None:
    """They are guessed without the adapter, by the base itself here, and verified with it."""
    adapters = [None, *ADAPTERS] * 2
    requests = [a and qwen2.adapters[a] for a in adapters]
    folder = shutil.copytree(qwen2.folder, tmp_path / "drafts")
    drafts = {"model": str(folder), "num_speculative_tokens": 2}
    with _open(qwen2, speculative_config=drafts) as llm:
        qwen2.check(llm.generate(_ids(_prompts(len(adapters))), GREEDY, lora_request=requests), adapters)


def test_over_quantized_weights(tmp_path: Path) -> None:
    """The base product reads int8; what the adapter adds is as it is."""
    family = Family("qwen2", tmp_path)
    family.quantize()
    adapters = [None, *ADAPTERS]
    with _open(family, quantization="int8") as llm:
        outputs = llm.generate(_ids(_prompts(4)), GREEDY, lora_request=[a and family.adapters[a] for a in adapters])
    family.check(outputs, adapters, 1e-3)


def test_mistakes(qwen2: Family, tmp_path: Path) -> None:
    """Refused before anything runs, by name; the engine goes on."""
    from safetensors.torch import load_file, save_file

    source = Path(qwen2.adapters["all"].lora_path)

    def broken(name: str, config: dict[str, Any] | None = None, change: Any = None) -> LoRARequest:
        import json

        folder = tmp_path / name
        folder.mkdir()
        fields = json.loads((source / "adapter_config.json").read_text()) | (config or {})
        (folder / "adapter_config.json").write_text(json.dumps(fields))
        tensors = load_file(source / "adapter_model.safetensors")
        save_file(change(tensors) if change else tensors, folder / "adapter_model.safetensors")
        return LoRARequest(name, 9, str(folder))

    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    cases = (
        (LoRARequest("x", 1, str(tmp_path / "nowhere")), "lora_path is .*nowhere.*: No such file"),
        (LoRARequest("x", 1, str(qwen2.folder)), "adapter_config.json is not there; give the folder of a LoRA adapter"),
        (broken("dora", {"use_dora": True}), "use_dora is True, which cannot be served; merge it"),
        (broken("bias", {"bias": "all"}), "bias is 'all'"),
        (broken("saved", {"modules_to_save": ["lm_head"]}), "modules_to_save is .'lm_head'."),
        (broken("ia3", {"peft_type": "IA3"}), "peft_type is 'IA3'; only LORA"),
        (broken("rank", {"r": 5}), "r of model.layers.0.* is 5, its tensors have 4"),
        (broken("shape", None, lambda t: t | {first: torch.zeros(4, 65)}), "q_proj has 65 inputs"),
        (broken("half", None, lambda t: {n: v for n, v in t.items() if n != first}), "q_proj has no lora_A"),
        (broken("other", None, lambda t: {n.replace("q_proj", "x_proj"): v for n, v in t.items()}),
         "x_proj is none of the layers that adapters may change here"),
        (broken("nan", None, lambda t: t | {first: torch.full((4, 64), float("nan"))}), "not finite"),
        (broken("extra", None, lambda t: t | {"base_model.model.lm_head.weight": torch.zeros(1)}), "lm_head.weight is"),
    )  # fmt: skip
    with _open(qwen2, max_lora_rank=4) as llm:
        prompts = _ids(_prompts(1))
        for request, told in cases:
            with pytest.raises(ConfigError, match=told):
                llm.generate(prompts, GREEDY, lora_request=request)
        with pytest.raises(ConfigError, match="has rank 8, the engine's tables hold 4; start with --max-lora-rank 8"):
            llm.generate(prompts, GREEDY, lora_request=qwen2.adapters["some"])
        outputs = llm.generate(prompts, GREEDY, lora_request=qwen2.adapters["all"])
        qwen2.check(outputs, ["all"])
        # Files that are gone when the engine wants to read them end that request only.
        gone = broken("gone")
        opened = llm.llm_engine.adapters.open
        Path(gone.lora_path, "adapter_config.json").touch()
        adapter = opened("gone", gone.lora_path)
        Path(adapter.folder, "adapter_model.safetensors").unlink()
        llm.llm_engine.adapters.open = lambda name, path: adapter if name == "gone" else opened(name, path)  # type: ignore[method-assign]
        requests = [gone, qwen2.adapters["all"], None]
        lost, *outputs = llm.generate(_ids(_prompts(3)), GREEDY, lora_request=requests)
        assert lost.outputs[0].finish_reason == "error"
        assert "adapter_model.safetensors is not there" in lost.outputs[0].error
        qwen2.check(outputs, ["all", None])
    with _open(qwen2, enable_lora=False) as llm, pytest.raises(ConfigError, match="start with --enable-lora"):
        llm.generate(prompts, GREEDY, lora_request=qwen2.adapters["all"])
    with pytest.raises(ConfigError, match="max_cpu_loras is 1: it must be at least max_loras, 2"):
        _open(qwen2, max_cpu_loras=1)
