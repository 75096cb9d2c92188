"""A tokenizer whose tokens are bytes and byte pairs, so that characters and stop strings are split over tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from graphllm.engine.requests.text import Tokenizer

SPECIAL = ["<s>", "</s>", "<|end|>"]
BOS, EOS, END = range(3)
TEXT = [
    "Hello world, how are you? The cat sat.",
    "Grüße aus Köln; das Wetter ist schön.",
    "aab aaab STOP STOPPED 🙂🙃",
] * 3


def make(folder: Path) -> Tokenizer:
    """Saved into ``folder`` and read from there. Both </s> and <|end|> are end-of-sequence tokens."""
    backend = byte_pairs(TEXT, SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, END]}))
    return Tokenizer.from_folder(folder)


def byte_pairs(texts: Sequence[str], special: Sequence[str]) -> tokenizers.Tokenizer:
    """Byte pairs that are frequent in some texts: 320 tokens, the special ones first."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return backend


CHAT_TEMPLATE = (
    "<s>{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if mood %}{{ mood }}{% endif %}"
    "{% if tools %}{{ tools | length }}{% endif %}{% if add_generation_prompt %}bot:{% endif %}"
)
