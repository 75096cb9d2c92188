"""Trees of drafts as users write them: what they mean, and what is refused, with what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from graphllm.config import ConfigError, EngineArgs
from graphllm.config.token_tree import DynamicTree, chain, of_parents, token_tree
from graphllm.loading.artifact.resolve import compile_config

BRANCHING = "[(0,), (1,), (0, 0)]"


def test_nodes() -> None:
    """Shorter paths first, whatever the order in which they are given."""
    tree = token_tree("[(1, 0), (0, 2), (0,), (1,), (1, 0, 0)]")
    assert tree.paths == ((0,), (1,), (0, 2), (1, 0), (1, 0, 0))
    assert (tree.levels, tree.depths, tree.parents) == (3, [0, 1, 1, 2, 2, 3], [-1, 0, 0, 1, 2, 4])
    assert (tree.choices, tree.inner) == ([0, 1, 2, 0, 0], [1, 2, 4])
    assert tree.children == [[1, 2], [3], [4], [], [5], []]
    assert [bin(bits) for bits in tree.ancestors] == ["0b1", "0b11", "0b101", "0b1011", "0b10101", "0b110101"]
    assert token_tree("[[0], [0, 0], (0, 0, 0)]") == chain(3)


def test_sizes_of_one_that_grows() -> None:
    tree = token_tree('{"top_k": 3, "depth": 4, "drafts": 12}')
    assert isinstance(tree, DynamicTree)
    assert (tree.levels, tree.drafts, tree.nodes, tree.rows, tree.candidates) == (4, 12, 13, 9, 30)
    made = of_parents([0, 0, 0, 1, 1, 2, 4])
    assert made.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0))
    assert made.parents == [-1, 0, 0, 1, 1, 2, 4]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("", "give a list of paths, such as"),
        ("[(0,), 1]", "give a list of paths, such as"),
        ("[(0,), ()]", "give a list of paths, such as"),
        ("[(True,)]", "give a list of paths, such as"),
        ("[(-1,)]", "give a list of paths, such as"),
        ("__import__('os').getcwd()", "give a list of paths, such as"),
        ("[(0,), (0,)]", "a path is there twice"),
        ("[(0,), (1, 0)]", r"\(1, 0\) has nothing to follow; give the path \(1,\) as well"),
        (str([(i,) for i in range(61)] + [(0, 0), (0, 1)]), "has 63 drafts; give at most 62"),
        ("{'top_k': 4, 'depth': 3}", "give a list of paths, such as .* for one that grows"),
        ("{'top_k': 4, 'depth': 3, 'drafts': 0}", "give a list of paths"),
        ("{'top_k': 4, 'depth': 3, 'drafts': 63}", "has 63 drafts, and 8 of them are expanded"),
        ("{'top_k': 8, 'depth': 9, 'drafts': 20}", "has 20 drafts, and 64 of them are expanded"),
        (
            "{'top_k': 2, 'depth': 3, 'drafts': 11}",
            "has 11 drafts; .* at least, and at most 10",
        ),
        ("{'top_k': 4, 'depth': 6, 'drafts': 5}", "has 5 drafts; give as many as its depth, 6, at least"),
    ],
)
def test_what_is_no_tree(said: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"speculative_token_tree.*{told}"):
        token_tree(said)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"num_speculative_tokens": 2}, "num_speculative_tokens is 2, but speculative_token_tree has 3 drafts; leave"),
        ({"dynamic_speculative_tokens": True}, "dynamic_speculative_tokens is True: drafts of a tree are all verified"),
        ({"draft_sample_method": "probabilistic"}, "draft_sample_method is probabilistic: drafts of a tree are all"),
        ({"rejection_sample_method": "synthetic"}, "rejection_sample_method is synthetic: drafts of a tree are all"),
        ({"rejection_sample_method": "typical"}, "rejection_sample_method is typical: drafts of a tree are all"),
        (
            {"prompt_lookup_max": 3},
            "prompt_lookup_max is 3: it guesses one run of tokens; leave speculative_token_tree",
        ),
        ({"buckets": "decode-1,decode2-1,mixed-2-64"}, "buckets: decode2-1 verifies a part of speculative_token_tree"),
    ],
)
def test_what_does_not_go_together(fields: dict[str, Any], told: str) -> None:
    args = EngineArgs(target="cpu", max_num_batched_tokens=64, max_num_seqs=4, speculative_token_tree=BRANCHING)
    assert compile_config({}, args).num_speculative_tokens == 3
    with pytest.raises(ConfigError, match=told):
        compile_config({}, EngineArgs(**{**vars(args), **fields}))


def test_vllms_form() -> None:
    """Its text, and the list itself."""
    sizes = {"top_k": 2, "depth": 3, "drafts": 8}
    args = EngineArgs(speculative_config={"method": "eagle3", "speculative_token_tree": sizes})
    assert token_tree(str(args.speculative_token_tree)) == DynamicTree(2, 3, 8)
    for said in (BRANCHING, [[0], [1], [0, 0]]):
        args = EngineArgs(speculative_config={"method": "medusa", "speculative_token_tree": said})
        assert token_tree(str(args.speculative_token_tree)) == token_tree(BRANCHING)
    with pytest.raises(ConfigError, match=r"speculative_token_tree is .* with method ngram give"):
        EngineArgs(speculative_config={"method": "ngram", "speculative_token_tree": BRANCHING})
