"""What guesses drafts on the host: the protocol, and how a proposer is found.

A proposer is asked when the tokens of a step are known and before the next one is launched, which is planned by then:
the time it takes is time in which the device waits. Whatever it says, texts are as without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Protocol

from graphllm.config import ConfigError, SpeculationConfig
from graphllm.engine.drafts.ngram import NgramProposer
from graphllm.engine.drafts.suffix import SuffixProposer
from graphllm.host.importing import imported

GROUP = "graphllm.proposers"
_OWN: dict[str, type[Proposer]] = {"ngram": NgramProposer, "suffix": SuffixProposer}


class Proposer(Protocol):
    """Guesses what comes next. Made with the engine's `SpeculationConfig`."""

    def __init__(self, settings: SpeculationConfig) -> None: ...

    def propose(self, id: str, prompt: Sequence[int], output: Sequence[int], count: int) -> Sequence[int]:
        """At most ``count`` tokens that may follow a running request's tokens, the likeliest run of them; nothing where
        there is no good guess. The lists are the engine's own, which grow: they are not to be changed."""

    def end(self, id: str, output: Sequence[int]) -> None:
        """A request has ended, with that output; nothing of one that was aborted."""


def find_proposer(settings: SpeculationConfig) -> Proposer | None:
    """The one that the settings name, None without one. Raises ConfigError when there is none of that name."""
    name = settings.draft_proposer
    if name is None:
        return None
    found = _OWN.get(name) or next((entry.load() for entry in entry_points(group=GROUP, name=name)), None)
    if found is None and not any(mark in name for mark in ".:"):
        raise ConfigError(
            f"draft_proposer is {name!r}: there are {', '.join(sorted(_OWN))}, what packages offer under the entry "
            f"point group {GROUP}, and classes as package.module:Name"
        )
    made = (found or imported("draft_proposer", name))(settings)
    if not all(callable(getattr(made, method, None)) for method in ("propose", "end")):
        raise ConfigError(f"draft_proposer is {name!r}: it has no methods propose and end; see docs/speculation.md")
    proposer: Proposer = made
    return proposer
