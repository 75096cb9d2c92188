"""Engine cores over real artifacts, and a way to run requests to their end that checks what holds for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from graphllm.config import (
    CacheConfig,
    CoreConfig,
    LoadConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
    TierConfig,
)
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.core import EngineCore
from graphllm.engine.parts.drafts import Drafts
from graphllm.engine.parts.grammars import Grammars
from graphllm.engine.requests.request import EngineCoreOutput, EngineRequest, PositionLogprobs
from graphllm.engine.structured.bad_words import BadWords, TokenTexts
from graphllm.engine.structured.compilers import GrammarCompilers
from graphllm.loading.core.load import load_core
from graphllm.program.artifact import Artifact

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@dataclass
class Result:
    """What a request got."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    cached: int = 0
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] | None = None

    def take(self, update: EngineCoreOutput) -> None:
        assert self.finish_reason is None, "news of a request that is done"
        self.tokens += update.tokens
        self.finish_reason, self.stop_reason, self.error = update.finish_reason, update.stop_reason, update.error
        self.cached += update.cached
        self.logprobs += update.logprobs or []
        if update.prompt_logprobs is not None:
            assert self.prompt_logprobs is None
            self.prompt_logprobs = update.prompt_logprobs


def open_core(folder: Path, place: Path, pages: int = 49, **options: Any) -> EngineCore:
    """A core of that artifact with so many pages, the null page among them. snapshots: of recurrent states; the usual
    share of the pages' memory if not given."""
    processors = options.pop("processors", ())
    stop_ids = options.pop("stop_ids", ())
    draft = options.pop("draft", None)
    speculation = options.pop("speculation", SpeculationConfig())
    snapshots, tiers = options.pop("snapshots", None), options.pop("tiers", TierConfig(0))
    memory = Artifact.open(place).memory
    config = CoreConfig(
        ModelConfig(str(folder), speculative_model=draft and str(draft)),
        LoadConfig(str(place)),
        CacheConfig(
            kv_cache_memory_bytes=pages * memory.block,
            snapshot_memory_bytes=None if snapshots is None else snapshots * memory.snapshot,
        ),
        SchedulerConfig(**options),
        stop_ids,
        speculation=speculation,
        tiers=tiers,
    )
    core = load_core(config, processors=processors)
    if core.info.task == "generate":
        core.part(Grammars).compilers = cast("GrammarCompilers", Letters(core.grammars))
    return core


class Letters:
    """The texts of random models: each token is a letter. grammars: of the model's own tokenizer, if it has one."""

    texts = TokenTexts([chr(0x100 + i).encode() for i in range(512)])

    def __init__(self, grammars: GrammarCompilers | None = None) -> None:
        self._grammars = grammars

    def constraints(self, params: SamplingParams) -> tuple[Any, BadWords | None]:
        """As `GrammarCompilers.constraints`."""
        words = BadWords(self.texts, params.bad_words) if params.bad_words else None
        plain = replace(params, bad_words=())
        return self._grammars.constraints(plain)[0] if self._grammars else None, words

    @staticmethod
    def words(sequences: Iterable[Sequence[int]]) -> tuple[str, ...]:
        """What sequences of tokens say."""
        return tuple("".join(chr(0x100 + i) for i in ids) for ids in sequences)


def verify_all_drafts(core: EngineCore) -> None:
    """However long steps take, which is what usually decides how many drafts are made and verified."""
    core.part(Drafts).planner.acceptance.best = lambda n, lengths, share=1.0, **runs: lengths[-1]  # type: ignore[method-assign]


def request(id: str, prompt: Sequence[int], params: SamplingParams = GREEDY, **fields: Any) -> EngineRequest:
    """A request; without ``stop_ids`` nothing but its length and stop_token_ids end it. bad_words: as tokens."""
    params = replace(params, bad_words=Letters.words(fields.pop("bad_words", ())))
    fields = {"stop_ids": list(params.stop_token_ids), "limit": params.max_tokens, "seed": params.seed or 0} | fields
    return EngineRequest(id=id, prompt=list(prompt), params=params, **fields)


def finish(
    core: EngineCore, requests: Iterable[EngineRequest], each_step: Callable[[int], None] = lambda step: None
) -> dict[str, Result]:
    """Run requests to their end. each_step: called before every step with its number. Afterwards no page is held."""
    found = {}
    for r in requests:
        core.add(r)
        found[r.id] = Result()
    number = 0
    while core.unfinished:
        each_step(number)
        for update in core.step():
            found[update.id].take(update)
        number += 1
    assert all(r.finish_reason for r in found.values())
    stats = core.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.free_blocks == stats.total_blocks
    return found
