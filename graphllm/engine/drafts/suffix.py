"""Suffix decoding: what most often followed the last tokens, in the request's own text and in earlier requests.

Places are found by the last one, two and four tokens and compared backwards; the drafts are the path that most of the
places with the longest agreement took. So texts need no tree of their own: memory is a few numbers for each token.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from graphllm.config import SpeculationConfig

_KEYS = (4, 2, 1)  # tokens by which places are found, longest first
_PLACES = 32  # newest ones that are compared


class _Guess(NamedTuple):
    """score: how many of the drafts are expected to be right."""

    score: float
    drafts: list[int]


class _Texts:
    """Texts, and where runs of tokens ended in them."""

    def __init__(self) -> None:
        self.texts: dict[str, list[int]] = {}
        self._places: defaultdict[tuple[int, ...], list[tuple[str, int]]] = defaultdict(list)

    def append(self, id: str, tokens: Sequence[int]) -> None:
        text = self.texts.setdefault(id, [])
        for token in tokens:
            # A run is entered when something follows it: a text's own end is not found.
            for n in _KEYS:
                if len(text) >= n:
                    self._places[tuple(text[-n:])].append((id, len(text)))
            text.append(token)

    def remove(self, id: str) -> None:
        text = self.texts.pop(id, [])
        for key in {tuple(text[i : i + n]) for n in _KEYS for i in range(len(text) - n)}:
            left = [place for place in self._places[key] if place[0] != id]
            if left:
                self._places[key] = left
            else:
                del self._places[key]

    def guess(self, tail: Sequence[int], count: int, settings: SpeculationConfig) -> _Guess:
        """What follows a text that ends so."""
        depth = settings.suffix_decoding_max_tree_depth
        places = next((p for n in _KEYS if len(tail) >= n and (p := self._places.get(tuple(tail[-n:])))), [])
        longest, best = 0, list[tuple[list[int], int]]()
        for id, at in places[-_PLACES:]:
            text, same = self.texts[id], 1
            while same < min(depth, at, len(tail)) and text[at - 1 - same] == tail[-1 - same]:
                same += 1
            if same >= longest:
                best = best if same == longest else []
                longest = same
                best.append((text, at))
        drafts, score, likely = list[int](), 0.0, 1.0
        while best and len(drafts) < min(count, int(settings.suffix_decoding_max_spec_factor * longest)):
            # The latest of equally frequent ones: `most_common` keeps the order in which it counted.
            token, times = Counter(text[at] for text, at in reversed(best)).most_common(1)[0]
            likely *= times / len(best)
            if likely < settings.suffix_decoding_min_token_prob:
                break
            drafts.append(token)
            score += likely
            best = [(text, at + 1) for text, at in best if text[at] == token and at + 1 < len(text)]
        return _Guess(score, drafts)


class SuffixProposer:
    """Guesses from the request's own text and from the outputs of ended requests; the guess with more expected right
    tokens wins. Source: Oliaro et al. 2024 (SuffixDecoding)."""

    def __init__(self, settings: SpeculationConfig) -> None:
        self._settings, self._earlier = settings, _Texts()
        self._own: dict[str, _Texts] = {}
        self._order: OrderedDict[str, None] = OrderedDict()
        self._ended = 0

    def propose(self, id: str, prompt: Sequence[int], output: Sequence[int], count: int) -> list[int]:
        """See `Proposer`."""
        own = self._own.setdefault(id, _Texts())
        known = len(own.texts.get(id, ()))
        own.append(id, [*prompt[known:], *output[max(0, known - len(prompt)) :]])
        tail = own.texts[id][-self._settings.suffix_decoding_max_tree_depth :]
        guesses = (texts.guess(tail, count, self._settings) for texts in (own, self._earlier))
        return max(guesses, key=lambda guess: guess.score).drafts

    def end(self, id: str, output: Sequence[int]) -> None:
        """See `Proposer`."""
        self._own.pop(id, None)
        most = self._settings.suffix_decoding_max_cached_requests
        if not most or not output:
            return
        self._ended += 1
        name = f"{self._ended}"
        self._earlier.append(name, output)
        self._order[name] = None
        if len(self._order) > most:
            self._earlier.remove(self._order.popitem(last=False)[0])
