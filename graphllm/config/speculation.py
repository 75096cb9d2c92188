"""Settings of drafts that matter while an engine runs: what guesses on the host, and when it is worth verifying."""

from __future__ import annotations

from dataclasses import dataclass

from graphllm.config.setting import setting

_RUNNING = "read while an engine runs; the compiled programs are the same"


@dataclass(frozen=True)
class SpeculationConfig:
    """What a proposer on the host is given, too."""

    draft_proposer: str | None = setting(
        None,
        written=str | type | None,
        help="What guesses drafts on the host: suffix, ngram, a name under the entry point group graphllm.proposers, "
        "or a class as package.module:Name; None: nothing does.",
        key=_RUNNING,
    )
    speculative_disable_by_batch_size: int | None = setting(
        None, help="Sequences of a step above which nothing is verified; None: as it pays.", key=_RUNNING, ge=1
    )
    ngram_proposer_max: int = setting(
        4, help="Proposer ngram: the most last tokens that are looked up in the text before.", key=_RUNNING, ge=1, le=64
    )
    ngram_proposer_min: int = setting(1, help="Proposer ngram: the fewest.", key=_RUNNING, ge=1, le=64)
    suffix_decoding_max_tree_depth: int = setting(
        24, help="Proposer suffix: the most last tokens that are compared with earlier ones.", key=_RUNNING, ge=1
    )
    suffix_decoding_max_cached_requests: int = setting(
        1000, help="Proposer suffix: number of ended requests that are searched as well; 0: none.", key=_RUNNING, ge=0
    )
    suffix_decoding_max_spec_factor: float = setting(
        1.0, help="Proposer suffix: drafts for each token that was the same before, at most.", key=_RUNNING, gt=0
    )
    suffix_decoding_min_token_prob: float = setting(
        0.1, help="Proposer suffix: how often a token must have come next to be drafted.", key=_RUNNING, ge=0, le=1
    )
