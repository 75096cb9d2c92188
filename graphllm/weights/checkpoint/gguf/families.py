"""The architectures of GGUF files that are read, and which one a file is of."""

from __future__ import annotations

from collections.abc import Mapping

from graphllm.weights.checkpoint.gguf.decoders import DECODERS
from graphllm.weights.checkpoint.gguf.encoders import ENCODERS
from graphllm.weights.checkpoint.gguf.facts import Facts
from graphllm.weights.checkpoint.gguf.family import Family
from graphllm.weights.checkpoint.gguf.header import Gguf
from graphllm.weights.checkpoint.gguf.hybrids import HYBRIDS
from graphllm.weights.checkpoint.tensor_info import WeightError

FAMILIES: Mapping[str, tuple[Family, ...]] = DECODERS | HYBRIDS | ENCODERS
"""By general.architecture; of several families the first one whose ``when`` holds."""


def family_of(file: Gguf) -> tuple[Facts, Family]:
    """What a file says, and the table of its architecture. Raises WeightError for one that is not read."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILIES:
        raise WeightError(
            file.files[0],
            [
                f"general.architecture is {name!r:.80}; GGUF files of {', '.join(FAMILIES)} are read: use the model's "
                "safetensors, if the README lists its family under Models"
            ],
        )
    facts = Facts(file, name)
    for family in FAMILIES[name]:
        if _holds(family.when, facts):
            return facts, family
    raise facts.bad(f"is of no kind of {name} that is read; use the model's safetensors")


def _holds(when: str, facts: Facts) -> bool:
    """Whether a file is of the family of that `Family.when`."""
    if when.startswith("blk."):
        return facts.tensor(when) is not None
    return not when or bool(facts.get(when))
