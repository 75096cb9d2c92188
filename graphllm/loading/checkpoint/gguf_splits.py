"""How tokenizers of merged bytes cut text into words, by the names that GGUF files have for it. Data only.

A name is that of llama.cpp (`tokenizer.ggml.pre`); what it stands for is the tokenizer.json of the models that have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(ending: str, digits: str, rest: str, but: str = "") -> str:
    """Words that begin with capitals. but: what is not of a word, as an intersection."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{start}[{_UPPER}{but}]*[{_LOWER}{but}]+{ending}|{start}[{_UPPER}{but}]+[{_LOWER}{but}]*{ending}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+{rest}|" + _SPACES
    )


class Split(NamedTuple):
    """How text is cut before merging.

    patterns: each cuts what is left, one after the other; () for GPT-2's.
    digits: each is a word.
    ignore_merges: words that are tokens stay whole.
    bos: whether one comes first where the file does not say.
    nfc: whether text is composed before.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    ignore_merges: bool = False
    bos: bool = False
    nfc: bool = False


_LLAMA3 = (_ENDINGS + "|" + _LETTERS + r"\p{N}{1,3}" + _REST,)
_QWEN2 = (_ENDINGS + "|" + _LETTERS + r"\p{N}" + _REST,)
_QWEN35 = (_ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES,)
_O200K = (_cased(_ENDINGS + "?", r"\p{N}{1,3}", r"[\r\n/]*"),)
_KIMI = (r"[\p{Han}]+|" + _cased(_ENDINGS + "?", r"\p{N}{1,3}", r"[\r\n]*", r"&&[^\p{Han}]"),)
_DEEPSEEK3 = (
    r"\p{N}{1,3}", "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)  # fmt: skip
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}")

_NAMES = {
    "gpt-2 phi-2 jais roberta-bpe": Split(),
    "mpt olmo modern-bert": Split(nfc=True),
    "smollm starcoder refact": Split(digits=True),
    "command-r": Split(digits=True, nfc=True),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": Split(_LLAMA3, ignore_merges=True, bos=True),
    "dbrx smaug-bpe glm4 chatglm-bpe": Split(_LLAMA3),
    "qwen2 stablelm2": Split(_QWEN2, nfc=True),
    "deepseek-r1-qwen megrez": Split(_QWEN2),
    "qwen35": Split(_QWEN35, nfc=True),
    "gpt-4o llama4": Split(_O200K),
    "tekken": Split((_cased("", r"\p{N}", r"[\r\n/]*"),), ignore_merges=True, bos=True),
    "kimi-k2": Split(_KIMI),
    "deepseek-v3": Split(_DEEPSEEK3),
    "deepseek-coder": Split(_DEEPSEEK_CODER),
}
SPLITS: Mapping[str, Split] = {name: split for names, split in _NAMES.items() for name in names.split()}
"""By tokenizer.ggml.pre."""
