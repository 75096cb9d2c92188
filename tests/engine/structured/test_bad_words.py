"""Words that must not appear: no output has one, whatever tokens the text is made of, and nothing else is forbidden."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphllm.engine.requests.text import Tokenizer
from graphllm.engine.structured.bad_words import BadWords, TokenTexts
from tests.engine.byte_tokenizer import EOS, make
from tests.tiers import draws

VOCAB = 320


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make(tmp_path_factory.mktemp("bytes"))


def forbidden(texts: TokenTexts, words: list[str], output: list[int]) -> set[int]:
    row = np.full((VOCAB + 31) // 32, -1, dtype=np.int32)
    BadWords(texts, words).forbid(row, output)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little") == 0).tolist())


@settings(deadline=None, max_examples=draws(60, 600))
@given(data=st.data())
def test_what_would_complete_a_word_is_forbidden(tokenizer: Tokenizer, data: st.DataObject) -> None:
    texts = TokenTexts.of(tokenizer, VOCAB)
    letters = st.text("abt hé🙂\n", min_size=1, max_size=5)
    words = data.draw(st.lists(letters, min_size=1, max_size=4, unique=True))
    said = data.draw(letters)
    output = tokenizer.encode(said, add_special_tokens=False)
    said, wanted = "".join(map(chr, b"".join(texts.texts[i] for i in output))), set()
    banned = ["".join(map(chr, word.encode())) for word in words]  # bytes as letters
    for token, text in enumerate(texts.texts):
        whole = said + "".join(map(chr, text))
        if text and any(whole.find(word, max(0, len(said) - len(word) + 1)) >= 0 for word in banned):
            wanted.add(token)
    assert forbidden(texts, words, output) == wanted


def test_special_tokens_are_forbidden_by_their_names(tokenizer: Tokenizer) -> None:
    texts = TokenTexts.of(tokenizer, VOCAB)
    assert forbidden(texts, ["</s>"], []) == {EOS}
    assert EOS not in forbidden(texts, ["s", "<"], [])  # an output can always end
