"""Where to put the experts of a layer, from the tokens that each got. Pure: no torch, no state.

A placement lists the expert in each slot, the slots of rank 0 first; every rank has as many slots. Copies of an expert
share its tokens evenly.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence

Moves = list[list[tuple[int, int]]]


def rank_loads(tokens: Sequence[float], placement: Sequence[int], ranks: int) -> list[float]:
    """The tokens of each rank. tokens: of each expert."""
    copies, count = Counter(placement), len(placement) // ranks
    return [sum(tokens[e] / copies[e] for e in placement[r * count : (r + 1) * count]) for r in range(ranks)]


def balancedness(loads: Sequence[float]) -> float:
    """The mean of the ranks' loads over the largest one: 1 is balanced, and so is none at all."""
    return sum(loads) / len(loads) / max(loads) if any(loads) else 1.0


def balanced(tokens: Sequence[float], placement: Sequence[int], ranks: int, gain: float = 0.0) -> list[int]:
    """A placement that gives the busiest rank fewer tokens, by the share ``gain`` at least; else this one.

    The experts with the most tokens for each copy get the copies that there is room for; then, the busiest first, each
    copy goes to the rank with the least so far, one that has none of the expert if there is one. Ranks and slots are
    numbered so that much stays where it is.
    """
    copies = _copies(tokens, len(placement))
    bins = _packed(tokens, copies, ranks, len(placement) // ranks)
    found = _aligned(bins, placement, ranks)
    before, after = (max(rank_loads(tokens, p, ranks)) for p in (placement, found))
    return found if after < before * (1 - gain) else list(placement)


def _copies(tokens: Sequence[float], slots: int) -> list[int]:
    """How many slots each expert has."""
    copies = [1] * len(tokens)
    busiest = [(-float(count), expert) for expert, count in enumerate(tokens)]
    heapq.heapify(busiest)
    for _ in range(slots - len(tokens)):
        _, expert = busiest[0]
        copies[expert] += 1
        heapq.heapreplace(busiest, (-tokens[expert] / copies[expert], expert))
    return copies


def _packed(tokens: Sequence[float], copies: Sequence[int], ranks: int, room: int) -> list[list[int]]:
    """The experts of each rank, each once on a rank but where it has more copies than there are ranks."""
    bins: list[list[int]] = [[] for _ in range(ranks)]
    free = [(0.0, 0, r) for r in range(ranks)]  # ranks with room: tokens, experts, number
    for expert in sorted(range(len(tokens)), key=lambda e: (-tokens[e] / copies[e], -copies[e], e)):
        left, share = copies[expert], tokens[expert] / copies[expert]
        while left:
            least = [heapq.heappop(free) for _ in range(min(left, len(free)))]
            for load, count, r in least:
                bins[r].append(expert)
                if count + 1 < room:
                    heapq.heappush(free, (load + share, count + 1, r))
            left -= len(least)
    return bins


def _aligned(bins: Sequence[Sequence[int]], placement: Sequence[int], ranks: int) -> list[int]:
    """A placement with these experts on the ranks, where possible the same ones in the same slots as in an old one."""
    room = len(placement) // ranks
    old = [list(placement[r * room : (r + 1) * room]) for r in range(ranks)]
    holders: dict[int, list[int]] = {}
    for b, experts in enumerate(bins):
        for expert in {*experts}:
            holders.setdefault(expert, []).append(b)
    common = Counter((b, r) for r, was in enumerate(old) for expert in {*was} for b in holders[expert])
    rank_of: dict[int, int] = {}
    left_ranks = set(range(ranks))
    for (b, r), _ in sorted(common.items(), key=lambda item: (-item[1], item[0])):
        if b not in rank_of and r in left_ranks:
            rank_of[b] = r
            left_ranks.remove(r)
    rank_of |= zip([b for b in range(ranks) if b not in rank_of], sorted(left_ranks), strict=True)
    found: list[int] = [0] * len(placement)
    for b, r in rank_of.items():
        left = Counter(bins[b])
        stays = []
        for expert in old[r]:
            stays.append(left[expert] > 0)
            left[expert] -= stays[-1]
        coming = iter(sorted((+left).elements()))
        found[r * room : (r + 1) * room] = [e if s else next(coming) for e, s in zip(old[r], stays, strict=True)]
    return found


def moves_between(old: Sequence[int], new: Sequence[int], ranks: int) -> Moves:
    """Copies (from slot, to slot) that turn a placement into another one, in groups of one or two that are made at
    once. There are no more groups than slots that change. After every group each expert has a slot.

    An expert comes from a slot of the same rank if there is one. Where the last copy of another expert would be lost,
    the two change places.
    """
    now, count = list(old), len(old) // ranks
    holders: dict[int, set[int]] = {expert: set() for expert in {*old, *new}}
    for slot, expert in enumerate(now):
        holders[expert].add(slot)
    groups: Moves = []

    def put(expert: int, slot: int) -> None:
        holders[now[slot]].discard(slot)
        holders[expert].add(slot)
        now[slot] = expert

    rest = deque(slot for slot in range(len(old)) if now[slot] != new[slot])
    free = deque(slot for slot in rest if len(holders[now[slot]]) > 1)
    while True:
        while free:
            slot = free.popleft()
            wanted = new[slot]
            if now[slot] == wanted or len(holders[now[slot]]) == 1:
                continue
            source = min(holders[wanted], key=lambda s, slot=slot: (s // count != slot // count, s))  # type: ignore[misc]
            groups.append([(source, slot)])
            put(wanted, slot)
            free.extend(s for s in sorted(holders[wanted]) if new[s] != wanted)
        while rest and now[rest[0]] == new[rest[0]]:
            rest.popleft()
        if not rest:
            return groups
        # Whatever is to go is the last of its expert, and every expert has as many slots as it shall have.
        slot, wanted = rest[0], new[rest[0]]
        source = next(s for s in sorted(holders[wanted]) if new[s] != wanted)
        groups.append([(source, slot), (slot, source)])
        gone = now[slot]
        put(wanted, slot)
        put(gone, source)
