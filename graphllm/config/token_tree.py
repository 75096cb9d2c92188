"""TokenTree: which drafts a step verifies where a token has several that may follow it."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from graphllm.config.errors import ConfigError

_MOST = 62  # drafts: each node, with the token last sampled, has a bit of an int64; the sign bit says "no tree"
_FORM = (
    "give a list of paths, such as [(0,), (1,), (0, 0)]: of each draft, which of the likeliest tokens each step takes; "
    'or {"top_k": 4, "depth": 5, "drafts": 16} for one that grows'
)


class TokenTree(NamedTuple):
    """A tree of drafts by its paths, shorter ones first: (0, 1) is the second likeliest token after the likeliest one.

    Nodes are numbered in that order from 1; node 0, the root, is the token that was sampled last. Properties list the
    nodes in that order, the root first.
    """

    paths: tuple[tuple[int, ...], ...]

    @property
    def drafts(self) -> int:
        """How many there are."""
        return len(self.paths)

    @property
    def levels(self) -> int:
        """Drafts of the longest path."""
        return len(self.paths[-1])

    @property
    def depths(self) -> list[int]:
        """How many tokens stand between each node's and the root's, plus one; of the root 0."""
        return [0, *map(len, self.paths)]

    @property
    def parents(self) -> list[int]:
        """The node before each one; of the root -1."""
        number = {(): 0} | {path: i for i, path in enumerate(self.paths, 1)}
        return [-1, *(number[path[:-1]] for path in self.paths)]

    @property
    def choices(self) -> list[int]:
        """Of each draft, its rank among the likeliest tokens after its parent. Without the root."""
        return [path[-1] for path in self.paths]

    @property
    def children(self) -> list[list[int]]:
        """The children of each node."""
        found: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], 1):
            found[parent].append(node)
        return found

    @property
    def ancestors(self) -> list[int]:
        """Bit j of each is set where node j is on the path to the node, its own one included."""
        found = [1]
        for node, parent in enumerate(self.parents[1:], 1):
            found.append(found[parent] | 1 << node)
        return found

    @property
    def inner(self) -> list[int]:
        """The drafts that have children."""
        return [node for node, children in enumerate(self.children) if children and node]

    @property
    def rows(self) -> int:
        """How many of them there are: rows of a sequence in each further run of a draft graph."""
        return len(self.inner)

    @property
    def ancestors_of_rows(self) -> list[int]:
        """Of each of them, bit i is set where the i-th of them is on the path to it."""
        inner, ancestors = self.inner, self.ancestors
        return [sum(1 << i for i, other in enumerate(inner) if ancestors[node] >> other & 1) for node in inner]

    def of_step(self, parents: Sequence[int] | None) -> TokenTree:
        """The tree that a step has verified."""
        return self


class DynamicTree(NamedTuple):
    """A tree of drafts that grows where what drafts is sure (EAGLE-2), anew in each step: only sizes are known.

    top_k: at each depth, expand the top_k most likely drafts, each by its top_k most likely tokens.
    levels: depths.
    drafts: the most likely of all candidates, which are verified.

    Nodes are numbered by depth; node 0 is the token that was sampled last.
    """

    top_k: int
    levels: int
    drafts: int

    @property
    def nodes(self) -> int:
        """Drafts, and the root."""
        return self.drafts + 1

    @property
    def rows(self) -> int:
        """Drafts that get candidates as children."""
        return self.top_k * (self.levels - 1)

    @property
    def candidates(self) -> int:
        """Candidates: the children of the root, then the children of each row."""
        return self.top_k * (1 + self.rows)

    @property
    def ancestors_of_rows(self) -> list[int]:
        """Empty: only the device knows them."""
        return []

    def of_step(self, parents: Sequence[int] | None) -> TokenTree | None:
        """The tree that a step has verified. parents: of its nodes; None where they are not known on the host."""
        return None if parents is None else of_parents(parents)

    @property
    def depths(self) -> list[int]:
        """What is known of them on the host: nothing; the device adds what they are."""
        return [0] * self.nodes

    @property
    def ancestors(self) -> list[int]:
        """The same: they are nodes."""
        return [0] * self.nodes


def of_parents(parents: Sequence[int]) -> TokenTree:
    """The tree with the given parent of each node; the root's parent is ignored."""
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(parents[1:], 1):
        paths.append((*paths[parent], list(parents[1:node]).count(parent)))
    return TokenTree(tuple(paths[1:]))


def chain(length: int) -> TokenTree:
    """The tree without branches."""
    return TokenTree(tuple((0,) * n for n in range(1, length + 1)))


def token_tree(said: str) -> TokenTree | DynamicTree:
    """A tree as vLLM writes it: the text of a list of paths, in any order; or that of the sizes of one that grows.
    Raises ConfigError for what is none."""
    try:
        found = ast.literal_eval(said)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        found = None
    if isinstance(found, dict):
        return _grown(found, said)
    if not isinstance(found, list | tuple) or not found or not all(map(_is_path, found)):
        raise ConfigError(f"speculative_token_tree is {said!r:.80}: {_FORM}")
    paths = tuple(sorted({tuple(path) for path in found}, key=lambda path: (len(path), path)))
    if len(paths) != len(found):
        raise ConfigError(f"speculative_token_tree is {said!r:.80}: a path is there twice; leave one out")
    if orphans := [path for path in paths if len(path) > 1 and path[:-1] not in paths]:
        raise ConfigError(
            f"speculative_token_tree: {orphans[0]} has nothing to follow; give the path {orphans[0][:-1]} as well"
        )
    if len(paths) > _MOST:
        raise ConfigError(f"speculative_token_tree has {len(paths)} drafts; give at most {_MOST}")
    return TokenTree(paths)


def _is_path(value: Any) -> bool:
    whole = isinstance(value, list | tuple) and len(value) > 0
    return whole and all(type(i) is int and 0 <= i < _MOST for i in value)


def _grown(sizes: Mapping[Any, Any], said: str) -> DynamicTree:
    if set(sizes) != {"top_k", "depth", "drafts"} or any(type(n) is not int or n < 1 for n in sizes.values()):
        raise ConfigError(f"speculative_token_tree is {said!r:.80}: {_FORM}")
    tree = DynamicTree(sizes["top_k"], sizes["depth"], sizes["drafts"])
    if max(tree.drafts, tree.rows) > _MOST:
        raise ConfigError(
            f"speculative_token_tree has {tree.drafts} drafts, and {tree.rows} that get children, "
            f"top_k * (depth - 1); give at most {_MOST} of each"
        )
    if not tree.levels <= tree.drafts <= tree.candidates:
        raise ConfigError(
            f"speculative_token_tree has {tree.drafts} drafts; give as many as its depth, {tree.levels}, at least, and "
            f"at most {tree.candidates}, which are looked at"
        )
    return tree
