"""Encoders through the engine core: whole prompts in steps of mixed sizes, no cache, vectors of tokens, and the files
of sentence-transformers, whose own vectors they must give."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from graphllm import LLM
from graphllm.config import ConfigError
from graphllm.loading.checkpoint.sentence_transformers import SentenceFiles

V = 120
SIZES: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 96, "initializer_range": 0.2,
}  # fmt: skip


def _open(folder: Path, **settings: Any) -> LLM:
    return LLM(
        folder, skip_tokenizer_init=True, backend="eager", target="cpu", dtype="float32", max_num_seqs=4, **settings
    )


def _bert(folder: Path) -> transformers.PreTrainedModel:
    torch.manual_seed(5)
    model = transformers.BertModel(transformers.BertConfig(**SIZES)).eval()
    model.save_pretrained(folder)
    return model


def _states(model: transformers.PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        states: torch.Tensor = model(torch.tensor([prompt])).last_hidden_state[0]
    return states


def test_many_prompts(tmp_path: Path) -> None:
    """More prompts than fit into a step, each computed whole in one; the longest that the positions allow, and longer
    ones refused before anything runs."""
    model, rng = _bert(tmp_path), random.Random(1)
    prompts = [[rng.randrange(V) for _ in range(n)] for n in (96, 1, 50, 40, 2, 64, 33, 17, 96, 5)]
    with _open(tmp_path, max_num_batched_tokens=128, pooling_type="MEAN") as llm:
        assert llm.llm_engine.core.info.vector_size == 32
        for _ in range(2):
            for output, prompt in zip(llm.encode(prompts, use_tqdm=False), prompts, strict=True):
                wanted = _states(model, prompt).mean(0)
                assert torch.cosine_similarity(output.outputs.data, wanted, dim=0) > 1 - 1e-5
                assert output.num_cached_tokens == 0
        with pytest.raises(ConfigError, match="97 tokens"):
            llm.encode([[1] * 97], use_tqdm=False)
    with pytest.raises(ConfigError, match="max_model_len is 97"):
        _open(tmp_path, max_model_len=97)


def test_vectors_of_tokens(tmp_path: Path) -> None:
    model = _bert(tmp_path)
    prompts = [[(7 * i + n) % V for i in range(n)] for n in (3, 96, 1, 20)]
    with _open(tmp_path, pooling_type="ALL", max_num_batched_tokens=100) as llm:
        assert llm.llm_engine.core.info.vectors == "token"
        for output, prompt in zip(llm.encode(prompts, use_tqdm=False), prompts, strict=True):
            found, wanted = output.outputs.data, _states(model, prompt)
            assert found.shape == wanted.shape
            assert (torch.cosine_similarity(found, wanted, dim=-1) > 1 - 1e-5).all()


def test_documents_of_late_interaction_are_kept(tmp_path: Path) -> None:
    """A document that is scored again, against another query, is not computed again; the memory has a bound."""
    model = _bert(tmp_path)
    documents = [[(7 * i + n) % V for i in range(n)] for n in (30, 20, 10)]
    queries = [[(5 * i + n) % V for i in range(n)] for n in (4, 6)]

    def expected(query: list[int], document: list[int]) -> float:
        one, other = (torch.nn.functional.normalize(_states(model, p), dim=-1) for p in (query, document))
        return float((one @ other.T).max(1).values.sum())

    with _open(tmp_path, pooling_type="ALL", max_num_batched_tokens=100) as llm:
        core = llm.llm_engine.core
        for turn, query in enumerate((*queries, queries[0])):
            steps = core.stats().steps
            for output, document in zip(llm.score([query], documents, use_tqdm=False), documents, strict=True):
                assert output.outputs.score == pytest.approx(expected(query, document), abs=1e-4)
            assert core.stats().steps == steps + (turn < 2)  # the last time all is there
            assert core.stats().token_vector_hits == (0, 3, 7)[turn]
        assert core.stats().token_vector_bytes == 4 * 32 * (30 + 20 + 10 + 4 + 6)
        assert core.stats().prompt_tokens == core.stats().cached_tokens + 70
        assert llm.reset_prefix_cache()
        llm.encode(documents, use_tqdm=False)
        assert core.stats().token_vector_hits == 7
    with _open(tmp_path, pooling_type="ALL", token_vector_memory_bytes=4 * 32 * 55) as llm:
        core = llm.llm_engine.core
        llm.encode(documents, use_tqdm=False)  # the last two are left
        assert core.stats().token_vector_bytes == 4 * 32 * 30
        llm.encode([documents[1], documents[0], documents[2]], use_tqdm=False)
        assert core.stats().token_vector_hits == 2
    with _open(tmp_path, pooling_type="ALL", enable_prefix_caching=False) as llm:
        llm.encode([documents[0]], use_tqdm=False)
        llm.encode([documents[0]], use_tqdm=False)
        assert llm.llm_engine.core.stats().token_vector_hits == 0


def _write(folder: Path, modules: list[tuple[str, str]], **files: dict[str, Any]) -> None:
    listed = [{"idx": i, "name": str(i), "path": p, "type": t} for i, (p, t) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    for name, content in files.items():
        file = folder / (name.replace("__", "/") + ".json")
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content))


START = ("", "sentence_transformers.models.Transformer")
_CLS = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "include_prompt": False}
POOLING = ("1_Pooling", "sentence_transformers.models.Pooling")


def test_files_of_sentence_transformers(tmp_path: Path) -> None:
    """What they say, as one object."""
    _write(
        tmp_path, [START, POOLING, ("2_Normalize", "sentence_transformers.models.Normalize")],
        **{"1_Pooling__config": _CLS},
        sentence_bert_config={"max_seq_length": 256, "do_lower_case": False},
        config_sentence_transformers={
            "prompts": {"query": "query: ", "passage": "passage: "}, "default_prompt_name": "query",
            "similarity_fn_name": "dot",
        },
    )  # fmt: skip
    found = SentenceFiles.read(tmp_path).pooling({"matryoshka_dimensions": [256, 64]})
    assert (found.pooling_type, found.normalize, found.include_prompt, found.max_seq_length) == (
        "CLS",
        True,
        False,
        256,
    )
    assert (found.prompts["passage"], found.default_prompt_name) == ("passage: ", "query")
    assert (found.dimensions, found.similarity, found.dense) == ((64, 256), "dot", ())
    assert SentenceFiles.read(tmp_path).pooling({}, "MEAN").pooling_type == "MEAN"
    assert SentenceFiles.read(tmp_path / "none").pooling({}).pooling_type is None
    _write(tmp_path, [START, ("1_Dense", "pylate.models.Dense.Dense")],
           **{"1_Dense__config": {"in_features": 8, "out_features": 4, "bias": False,
                                  "activation_function": "torch.nn.modules.linear.Identity"}})  # fmt: skip
    late = SentenceFiles.read(tmp_path).pooling({})
    assert (late.pooling_type, late.normalize, late.dense[0].outputs, late.dense[0].activation) == (
        "ALL", False, 4, "identity",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("modules", "files", "told"),
    [
        ([START, ("1_CNN", "sentence_transformers.models.CNN")], {}, "CNN is not supported"),
        ([START, POOLING], {}, "config.json: is not there"),
        ([START, POOLING], {"1_Pooling__config": {"pooling_mode_max_tokens": True}}, "max_tokens is not supported"),
        ([START, ("../x", "a.Pooling")], {}, "modules.json: damaged"),
        ([START, ("2_Dense", "a.Dense")], {"2_Dense__config": {"in_features": 0}}, "in_features is 0"),
        ([START], {"config_sentence_transformers": {"default_prompt_name": "q"}}, "which prompts has not"),
    ],
    ids=["module", "no-config", "max", "path", "dense", "prompt"],
)  # fmt: skip
def test_refused_files(
    modules: list[tuple[str, str]], files: dict[str, dict[str, Any]], told: str, tmp_path: Path
) -> None:
    _write(tmp_path, modules, **files)
    with pytest.raises(ConfigError, match=told):
        SentenceFiles.read(tmp_path).pooling({})


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["cls", "mean", "lasttoken"])
def test_beside_sentence_transformers(mode: str, tmp_path: Path) -> None:
    """A folder that it saved, with a dense layer and norms, gives its vectors of texts, cut and whole."""
    made = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.models")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "sat", "on", "the", "mat", ".", "dog", "##s"]
    inner = tmp_path / "inner"
    _bert(inner)
    (inner / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(inner / "vocab.txt")).save_pretrained(inner)
    model = made.SentenceTransformer(
        modules=[
            modules.Transformer(str(inner)),
            modules.Pooling(32, pooling_mode=mode),
            modules.Dense(32, 16),
            modules.Normalize(),
        ],
        device="cpu",
    )
    model.save(str(tmp_path / "saved"))
    texts = ["a cat sat on the mat.", "dogs", "the the the cat", "a dog sat on a cat. the cats sat on dogs. " * 4]
    wanted = model.encode(texts)
    with LLM(tmp_path / "saved", backend="eager", target="cpu", dtype="float32") as llm:
        for output, vector in zip(llm.embed(texts, use_tqdm=False), wanted, strict=True):
            found = torch.tensor(output.outputs.embedding)
            torch.testing.assert_close(found, torch.from_numpy(vector), rtol=1e-4, atol=1e-5)
