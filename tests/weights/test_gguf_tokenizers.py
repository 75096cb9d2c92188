"""Tokenizers of GGUF files: word pieces, unigrams and splits of text are those of the libraries that have them."""

from __future__ import annotations

from pathlib import Path

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from graphllm.config import ConfigError
from graphllm.engine.requests.text import Tokenizer
from graphllm.loading.checkpoint.gguf_splits import SPLITS
from graphllm.loading.checkpoint.gguf_tokenizer import write_tokenizer

_TEXTS = (
    "The quick brown fox", "naïve Café, 12345 + 6.7!", "  two  spaces\n\nand lines ", "日本語 text", "unheardofword x",
    "I've SEEN it's CamelCase/path a\tb", "ΑΒΓ αβγ 한국어 2024年", "[MASK] is [SEP]",
)  # fmt: skip
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def _word_pieces(lower: bool) -> Backend:
    """A BERT's tokenizer, trained on a few words."""
    made = Backend(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=lower)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words = ["the quick brown fox naive cafe seen its camelcase path two spaces and lines text word of heard un 日本語"]
    words += ["The Quick Brown Fox CamelCase SEEN It's I've 12345 6.7 ! , + x a b αβγ ΑΒΓ"]
    trainer = trainers.WordPieceTrainer(vocab_size=220, special_tokens=_SPECIAL, show_progress=False)
    made.train_from_iterator(words * 3, trainer)
    made.add_special_tokens(_SPECIAL)
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return made


@pytest.mark.parametrize("lower", [True, False])
def test_word_pieces(lower: bool, tmp_path: Path) -> None:
    """As BertModel of llama.cpp's converter writes them: what begins a word has a mark, in place of what goes on."""
    original = _word_pieces(lower)
    ids = original.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    marked = [t if t in _SPECIAL else t[2:] if t.startswith("##") else "▁" + t for t in tokens]
    metadata = {
        "tokenizer.ggml.model": "bert", "tokenizer.ggml.pre": "bert-bge", "tokenizer.ggml.tokens": marked,
        "tokenizer.ggml.token_type": [3 if t in _SPECIAL else 1 for t in tokens],
        "tokenizer.ggml.unknown_token_id": 1, "tokenizer.ggml.seperator_token_id": 3, "tokenizer.ggml.cls_token_id": 2,
    }  # fmt: skip
    write_tokenizer(metadata, tmp_path, tmp_path / "a.gguf")
    tokenizer = Tokenizer.from_folder(tmp_path, {}, {})
    for text in _TEXTS:
        assert tokenizer.encode(text) == original.encode(text).ids
    pair = original.encode("the fox", "quick")
    assert tokenizer.encode_pair("the fox", "quick") == (pair.ids, pair.type_ids.count(0))


@pytest.mark.parametrize("prefix", [True, False])
def test_unigrams(prefix: bool, tmp_path: Path) -> None:
    """As XLMRobertaModel of the converter writes them, with the table of SentencePiece's normalization."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"the quick brown fox {n} jumps, over naïve cafés CamelCase path." for n in range(200)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "sp"), model_type="unigram", vocab_size=55, minloglevel=2,
        add_dummy_prefix=prefix,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sp.model"))
    proto = getattr(sentencepiece_model_pb2, "ModelProto")()  # noqa: B009  # made when the module is imported
    proto.ParseFromString((tmp_path / "sp.model").read_bytes())
    ids = range(model.vocab_size())
    metadata = {
        "tokenizer.ggml.model": "t5", "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [2 if model.is_unknown(i) else 3 if model.is_control(i) else 1 for i in ids],
        "tokenizer.ggml.add_space_prefix": prefix, "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.precompiled_charsmap": list(proto.normalizer_spec.precompiled_charsmap),
        "tokenizer.ggml.bos_token_id": model.bos_id(), "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.add_bos_token": True,
    }  # fmt: skip
    write_tokenizer(metadata, tmp_path, tmp_path / "a.gguf")
    tokenizer = Tokenizer.from_folder(tmp_path, {}, {})
    for said in ("the quick fox", "naïve  CAFÉ paths ﬁne", "over \uff11\uff12 jumps ", "  lines\n\nof 日本 words"):
        assert tokenizer.encode(said) == [model.bos_id(), *model.encode(said), model.eos_id()]


@pytest.mark.parametrize("name", sorted(set(SPLITS) & set(GGUF_PRE_TOKENIZER_SPLITS)))
def test_splits_are_those_of_transformers(name: str) -> None:
    """Of the names that its own reader of GGUF files knows."""

    def cut(patterns: tuple[str, ...], text: str) -> list[str]:
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        return [word for word, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]

    for text in _TEXTS:
        assert cut(SPLITS[name].patterns, text) == cut((GGUF_PRE_TOKENIZER_SPLITS[name],), text)


def test_kinds_that_are_not_read(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.model": "rwkv"}
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.model is 'rwkv'; gpt2, llama, t5, bert are read"):
        write_tokenizer(metadata, tmp_path, tmp_path / "a.gguf")
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.pre is 'viking'; gpt-2, .*kimi-k2.* are read; give"):
        write_tokenizer(
            metadata | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "viking"}, tmp_path, tmp_path / "a.gguf"
        )
