"""Models with a language head that give vectors, classifiers, reward models and rerankers beside transformers, through
`LLM`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from graphllm import PoolingParams
from graphllm.config import ConfigError
from graphllm.config.pooling_config import PoolingConfig
from graphllm.config.requests.pooling_params import Vectors
from graphllm.embedded import MODEL_DIR
from graphllm.engine.vectors.pooling import Pooling
from tests.engine.vectors.opened import open_llm

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
LENGTHS = (1, 2, 15, 16, 17, 100)
PROMPTS = [[(i * 7 + n) % 95 + 1 for i in range(n)] for n in LENGTHS]


def _save(model: Any, folder: Path, rename: str | None = None, **config: Any) -> Any:
    """Save, maybe with this beginning of all names taken away."""
    model = model.eval()
    model.save_pretrained(folder)
    if rename is not None:
        file = folder / "model.safetensors"
        save_file({n.removeprefix(rename): t for n, t in load_file(file).items()}, file, {"format": "pt"})
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return model


@pytest.mark.parametrize("rename", [None, "model."])
def test_language_model_as_embedder(rename: str | None, tmp_path: Path) -> None:
    """An untied head is not read, and the decoder's tensors may lack their beginning, as in Qwen3-Embedding."""
    torch.manual_seed(1)
    config = transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False)
    model = _save(transformers.Qwen3ForCausalLM(config), tmp_path / "m", rename)
    with torch.no_grad():
        states = [model.model(torch.tensor([p])).last_hidden_state[0, -1] for p in PROMPTS]
    with open_llm(tmp_path / "m", runner="pooling") as llm:
        for output, state in zip(llm.embed(PROMPTS, use_tqdm=False), states, strict=True):
            vector = torch.tensor(output.outputs.embedding)
            assert abs(vector.norm().item() - 1) < 1e-5
            assert torch.cosine_similarity(vector, state, dim=0) > 1 - 1e-5
        outputs = llm.score([PROMPTS[2]], PROMPTS[3:], use_tqdm=False)
        for found, state in zip(outputs, states[3:], strict=True):
            expected = torch.cosine_similarity(states[2], state, dim=0).item()
            assert found.outputs.score == pytest.approx(expected, abs=1e-5)
        with pytest.raises(ConfigError, match="classify is 'classify': the model gives embeddings"):
            llm.classify(PROMPTS)


def test_sentence_transformers_folder_is_an_embedder(tmp_path: Path) -> None:
    """modules.json says so where nobody else does; its prompts stand before texts when they are asked for."""
    torch.manual_seed(1)
    folder = tmp_path / "m"
    sizes = SIZES | {"vocab_size": 4096}
    _save(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=16)), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((MODEL_DIR / name).read_bytes())
    types = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"type": f"sentence_transformers.models.{t}", "path": f"{i}_{t}" if i else ""} for i, t in enumerate(types)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 9, "do_lower_case": True}))
    prompts = {"query": "Query: ", "document": ""}
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    with open_llm(folder, skip_tokenizer_init=False) as llm:
        ids = llm.get_tokenizer().encode
        plain, asked = llm.embed("a cat", use_tqdm=False), llm.embed("a cat", use_tqdm=False, prompt_name="query")
        assert plain[0].prompt_token_ids == ids("a cat")
        assert asked[0].prompt_token_ids == ids("query: a cat")
        assert plain[0].outputs.embedding != asked[0].outputs.embedding
        with pytest.raises(ConfigError, match="prompt_name is 'x': there are query, document"):
            llm.embed("a", prompt_name="x")
        short = llm.embed("one two three four", pooling_params=PoolingParams(truncate_prompt_tokens=3), use_tqdm=False)
        assert short[0].prompt_token_ids == ids("one two three four")[:3]
        long = "One two three four " * 9
        for params, kept in ((None, 9), (PoolingParams(truncate_prompt_tokens=-1), 9),
                             (PoolingParams(truncate_prompt_tokens=12), 12)):  # fmt: skip
            found = llm.embed(long, pooling_params=params, use_tqdm=False)
            assert found[0].prompt_token_ids == ids(long.lower())[:kept]
        found = llm.embed({"prompt_token_ids": ids(long)[:20]}, use_tqdm=False)  # is what it is
        assert len(found[0].prompt_token_ids) == 20
    with open_llm(folder, skip_tokenizer_init=False, runner="generate") as llm:
        assert llm.generate("a", use_tqdm=False)[0].outputs[0].token_ids


def test_a_mean_without_the_prompts_tokens_is_refused() -> None:
    told = PoolingConfig(pooling_type="MEAN", prompts={"query": "Query: ", "none": ""}, include_prompt=False)
    info: Any = SimpleNamespace(max_model_len=64)
    pooling = Pooling(None, None, info, Vectors(checkpoint=told))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="prompt_name is 'query': the checkpoint's include_prompt is false"):
        pooling.instructed("a cat", "query", PoolingParams())
    assert pooling.instructed("a cat", "none", PoolingParams()) == {"prompt": "a cat"}


CLASSIFIERS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForSequenceClassification, {"num_labels": 3}),
    "mistral": (
        transformers.MistralConfig, transformers.MistralForSequenceClassification,
        {"num_labels": 2, "sliding_window": 24},
    ),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForSequenceClassification, {"num_labels": 1}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForSequenceClassification, {"num_labels": 4, "head_dim": 16}),
    "gemma2": (
        transformers.Gemma2Config, transformers.Gemma2ForSequenceClassification, {"num_labels": 3, "head_dim": 8},
    ),
    "gpt2": (transformers.GPT2Config, transformers.GPT2ForSequenceClassification, {"num_labels": 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers(name: str, tmp_path: Path) -> None:
    config, kind, more = CLASSIFIERS[name]
    torch.manual_seed(2)
    model = _save(kind(config(**SIZES, **more)), tmp_path / "m")
    with torch.no_grad():
        logits = [model(torch.tensor([p])).logits[0] for p in PROMPTS]
    with open_llm(tmp_path / "m") as llm:
        found = llm.classify(PROMPTS, use_tqdm=False)
        raw = llm.reward(PROMPTS, use_tqdm=False)
        for output, plain, expected in zip(found, raw, logits, strict=True):
            probs = expected.softmax(0) if more["num_labels"] > 1 else expected.sigmoid()
            torch.testing.assert_close(torch.tensor(output.outputs.probs), probs, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(plain.outputs.data, expected, rtol=1e-4, atol=1e-4)
            assert output.outputs.num_classes == more["num_labels"]
        with pytest.raises(ConfigError, match="embed is 'embed': the model gives classes; use 'classify' or 'score'"):
            llm.embed(PROMPTS)
        with pytest.raises(ConfigError, match="the model gives classes; leave it out"):
            llm.classify(PROMPTS, pooling_params=PoolingParams(dimensions=1))


def _reward_model(name: str, classes: int, folder: Path) -> tuple[Any, Any]:
    """As they are published: two layers over the hidden states."""
    torch.manual_seed(4)
    body = transformers.Qwen2Model(transformers.Qwen2Config(**SIZES)).eval()
    body.save_pretrained(folder)
    score = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, classes))
    tensors = {f"model.{n}": t for n, t in load_file(folder / "model.safetensors").items()}
    tensors |= {f"score.{n}": t.detach() for n, t in score.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    config = {"architectures": [name], "num_labels": classes}
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return body, score


def test_reward_model(tmp_path: Path) -> None:
    body, score = _reward_model("Qwen2ForRewardModel", 1, tmp_path / "m")
    with torch.no_grad():
        expected = [score(body(torch.tensor([p])).last_hidden_state[0, -1]) for p in PROMPTS]
    with open_llm(tmp_path / "m") as llm:
        for output, reward in zip(llm.reward(PROMPTS, use_tqdm=False), expected, strict=True):
            torch.testing.assert_close(output.outputs.data, reward, rtol=1e-4, atol=1e-4)


def test_process_reward_model(tmp_path: Path) -> None:
    """A vector for each token, in chunks, twice, as the prefix cache has none; and those of steps alone."""
    body, score = _reward_model("Qwen2ForProcessRewardModel", 2, tmp_path / "m")
    with torch.no_grad():
        expected = [score(body(torch.tensor([p])).last_hidden_state[0]) for p in PROMPTS]
    with open_llm(tmp_path / "m") as llm:
        for _ in range(2):
            for output, logits in zip(llm.encode(PROMPTS, use_tqdm=False), expected, strict=True):
                torch.testing.assert_close(output.outputs.data, logits.softmax(-1), rtol=1e-4, atol=1e-5)
        tag = PROMPTS[-1][20]
        params = PoolingParams(step_tag_id=tag, returned_token_ids=[1])
        (found,) = llm.reward([PROMPTS[-1]], pooling_params=params, use_tqdm=False)
        places = [i for i, token in enumerate(PROMPTS[-1]) if token == tag]
        assert len(places) > 0
        torch.testing.assert_close(found.outputs.data, expected[-1].softmax(-1)[places][:, 1:], rtol=1e-4, atol=1e-5)
        with pytest.raises(ConfigError, match=r"returned_token_ids is .2.: the model has 2 classes"):
            llm.encode([[1]], PoolingParams(returned_token_ids=[2]))


@pytest.mark.parametrize("tied", [True, False])
def test_reranker_of_two_tokens(tied: bool, tmp_path: Path) -> None:
    """Qwen3-Reranker by vLLM's hf_overrides: the probability of yes, of yes and no alone."""
    torch.manual_seed(5)
    folder = tmp_path / "m"
    config = transformers.Qwen3Config(**SIZES | {"vocab_size": 4096}, head_dim=16, tie_word_embeddings=tied)
    model = _save(transformers.Qwen3ForCausalLM(config), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((MODEL_DIR / name).read_bytes())
    words = transformers.AutoTokenizer.from_pretrained(folder)
    no, yes = (words.convert_ids_to_tokens(words(text).input_ids[-1]) for text in (" no", " yes"))
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": [no, yes],
        "is_original_qwen3_reranker": True,
    }  # fmt: skip
    documents = ["Cats sleep.", "The sun is a star, and far away."]
    with open_llm(folder, skip_tokenizer_init=False, hf_overrides=overrides) as llm:
        outputs = llm.score("What do cats do?", documents, use_tqdm=False)
        for document, output in zip(documents, outputs, strict=True):
            ids = words("What do cats do?").input_ids + words(document).input_ids
            assert output.prompt_token_ids == ids
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            pair = logits[words.convert_tokens_to_ids([no, yes])].softmax(0)
            assert output.outputs.score == pytest.approx(pair[1].item(), abs=1e-5)
        with pytest.raises(ConfigError, match="data_1 has 2 entries and data_2 3: give one, or as many"):
            llm.score(["a", "b"], ["c", "d", "e"])
    with pytest.raises(ConfigError, match="classifier_from_token: 'nothere' is no token"):
        open_llm(folder, hf_overrides=overrides | {"classifier_from_token": [no, "nothere"]})


def test_runner_is_checked(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    _save(transformers.LlamaModel(transformers.LlamaConfig(**SIZES)), folder)
    with pytest.raises(ConfigError, match="runner is 'generate': LlamaModel has no language head"):
        open_llm(folder, runner="generate")
    with pytest.raises(ConfigError, match="convert is 'classify': the model is to generate text"):
        open_llm(folder, runner="generate", convert="classify")
    with pytest.raises(ConfigError, match="runner is 'x'"):
        open_llm(folder, runner="x")
    with pytest.raises(ConfigError, match="task is 'x': give one of"):
        open_llm(folder, task="x")
    with open_llm(folder, task="embed", override_pooler_config={"pooling_type": None}) as llm:
        with pytest.raises(ConfigError, match="prompt has 129 tokens: the context holds 128;"):
            llm.embed([1] * 129)
        assert len(llm.embed([1] * 128, use_tqdm=False)[0].outputs.embedding) == 32
