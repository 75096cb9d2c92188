"""Beam search over an engine, as data: `BeamSearch` says which prompts need one more token, and takes the new tokens.

Every step is one request of one token for each live beam; the prefix cache makes it cheap. Whoever drives the engine,
`LLM` or a server, drives this too:

    while prompts := search.prompts():
        search.advance([... one Position for each prompt ...])
    sequences = search.best(tokenizer)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from graphllm.engine.requests.outputs import Position
from graphllm.engine.requests.text import Tokenizer


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam.

    tokens: prompt and output, with the end-of-sequence token.
    prompt_tokens: number of tokens of the prompt.
    logprobs: the candidates at each output token.
    text: of all the tokens.
    finish_reason: "stop" or "length".
    """

    tokens: list[int]
    prompt_tokens: int
    logprobs: list[Position] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def step_params(params: BeamSearchParams, max_logprobs: int) -> SamplingParams:
    """How the requests of a step are sampled. Raises ConfigError where the core gives too few log-probabilities."""
    wanted = 2 * params.beam_width
    if wanted > max_logprobs:
        raise ConfigError(
            f"beam_width is {params.beam_width}: it needs {wanted} log-probabilities and the engine gives "
            f"{max_logprobs}; give at most {max_logprobs // 2}"
        )
    return SamplingParams(
        temperature=params.temperature,
        max_tokens=1,
        logprobs=wanted,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


class BeamSearch:
    """One prompt's search, at most ``max_model_len`` tokens long. eos: ids of end-of-sequence tokens."""

    def __init__(
        self, prompt: Sequence[int], params: BeamSearchParams, eos: frozenset[int], max_model_len: int
    ) -> None:
        self._params, self._eos = params, eos
        self._steps = min(params.max_tokens, max_model_len - len(prompt))
        self._beams = [BeamSearchSequence(list(prompt), len(prompt))]
        self._completed: list[BeamSearchSequence] = []

    def prompts(self) -> list[list[int]]:
        """Tokens of the live beams; each beam needs one more. Empty when the search is over."""
        return [beam.tokens for beam in self._beams] if self._steps > 0 else []

    def advance(self, positions: Sequence[Position]) -> None:
        """Extend each beam of the last `prompts` by its candidates and keep the best."""
        extended = []
        for beam, candidates in zip(self._beams, positions, strict=True):
            for token, candidate in candidates.items():
                longer = BeamSearchSequence(
                    [*beam.tokens, token],
                    beam.prompt_tokens,
                    [*beam.logprobs, candidates],
                    beam.cum_logprob + candidate.logprob,
                )
                if token in self._eos and not self._params.ignore_eos:
                    longer.finish_reason = "stop"
                    self._completed.append(longer)
                else:
                    extended.append(longer)
        self._beams = self._ranked(extended)
        self._steps -= 1

    def best(self, tokenizer: Tokenizer | None = None) -> list[BeamSearchSequence]:
        """The best sequences, complete or as long as allowed, best first; with text where there is a tokenizer."""
        for beam in self._beams:
            beam.finish_reason = "length"
        best = self._ranked([*self._completed, *self._beams])
        if tokenizer is None:
            return best
        for sequence in best:
            hidden = sequence.finish_reason == "stop" and not self._params.include_stop_str_in_output
            shown = sequence.tokens[:-1] if hidden else sequence.tokens
            sequence.text = tokenizer.decode(shown, skip_special_tokens=False)
        return best

    def _ranked(self, sequences: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(sequences, key=self._score, reverse=True)[: self._params.beam_width]

    def _score(self, sequence: BeamSearchSequence) -> float:
        """The length is that of prompt and output without the end-of-sequence token, as vLLM counts."""
        length = len(sequence.tokens) - (sequence.tokens[-1] in self._eos)
        return sequence.cum_logprob / length**self._params.length_penalty
