"""LLM: offline inference in this process. Prompts in, finished outputs back, in their order."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar, cast

from graphllm.config import ConfigError, EngineArgs
from graphllm.config.sampling import BeamSearchParams, RequestOutputKind, SamplingParams
from graphllm.engine.beam import BeamSearch, BeamSearchOutput, step_params
from graphllm.engine.outputs import OutputProcessor, RequestOutput
from graphllm.engine.processor import GrammarChecker, ParsedRequest, Processor, Prompt
from graphllm.engine.request import Core
from graphllm.engine.text import Tokenizer
from graphllm.entrypoints.core import load_core
from graphllm.entrypoints.model import resolve_model

_T = TypeVar("_T")
Message = Mapping[str, Any]
Done = Callable[[RequestOutput], None]


class LLM:
    """A model ready to generate, in this process; for one thread at a time. Close it, or use it in ``with``.

    model: a checkpoint folder, None for the embedded model. options: the fields of `EngineArgs`. Raises ConfigError
    naming what cannot be used.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        args = EngineArgs(model, **options)
        resolved = resolve_model(args)
        core = load_core(resolved.config, processors=resolved.processors)
        grammar = core.grammars if resolved.tokenizer else None
        self._attach(core, resolved.tokenizer, resolved.defaults, grammar, args.seed)

    @classmethod
    def from_core(
        cls,
        core: Core,
        tokenizer: Tokenizer | None,
        defaults: SamplingParams | None = None,
        grammar: GrammarChecker | None = None,
        seed: int | None = 0,
    ) -> LLM:
        """An LLM that drives this core, and closes it in the end."""
        llm = cls.__new__(cls)
        llm._attach(core, tokenizer, defaults or SamplingParams(), grammar, seed)
        return llm

    def _attach(
        self,
        core: Core,
        tokenizer: Tokenizer | None,
        defaults: SamplingParams,
        grammar: GrammarChecker | None,
        seed: int | None,
    ) -> None:
        self._core, self._tokenizer, self._defaults = core, tokenizer, defaults
        self._processor = Processor(tokenizer, core.info, grammar, seed)
        self._outputs = OutputProcessor(tokenizer)
        self._count = 0

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back memory and threads; nothing can be generated after it."""
        self._core.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Finish every prompt; one output each, in their order.

        prompts: text, token ids, a mapping with ``prompt`` or ``prompt_token_ids``, or a list of these.
        sampling_params: for all of them or one each, None for `get_default_sampling_params`. use_tqdm: show progress.
        priority: one each, lower goes first, with scheduling_policy="priority". Raises ConfigError before anything runs
        when one of them cannot run. What goes wrong later is in the output: finish_reason "error".
        """
        listed = [cast(Prompt, prompts)] if _is_one(prompts) else list(cast(Sequence[Prompt], prompts))
        given = sampling_params if sampling_params is not None else self._defaults
        each = _each("sampling_params", given, SamplingParams, len(listed))
        priorities = _each("priority", priority if priority is not None else 0, int, len(listed))
        final = {id(p): _final(p) for p in each}  # mostly the same object for all
        return self._run(listed, [final[id(p)] for p in each], priorities, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """`generate` for one conversation or a list of them, written out by the checkpoint's chat template.

        tools: JSON schemas. chat_template_kwargs: variables that the template knows.
        """
        tokenizer = self.get_tokenizer()
        one = not messages or isinstance(messages[0], Mapping)
        chats = [cast(Sequence[Message], messages)] if one else cast(Sequence[Sequence[Message]], messages)
        options = {"add_generation_prompt": add_generation_prompt, "tools": tools, **(chat_template_kwargs or {})}
        prompts = []
        for chat in chats:
            text = tokenizer.render_chat(chat, **options)
            # The template has written BOS where it wants one, so none is added.
            prompts.append({"prompt": text, "add_special_tokens": False})
        return self.generate(prompts, sampling_params, use_tqdm)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The likeliest sequences that beam search finds for each prompt."""
        info, tokenizer = self._core.info, self._tokenizer
        step = step_params(params, info.max_logprobs)
        listed = [cast(Prompt, prompts)] if _is_one(prompts) else list(cast(Sequence[Prompt], prompts))
        eos = tokenizer.stop_ids if tokenizer else frozenset[int]()
        parsed = self._parse(listed, [step] * len(listed), [0] * len(listed))
        searches = [BeamSearch(p.prompt_token_ids, params, eos, info.max_model_len) for p in parsed]
        while live := [(search, wanted) for search in searches if (wanted := search.prompts())]:
            beams = [beam for _, wanted in live for beam in wanted]
            found = iter(self._run(beams, [step] * len(beams), [0] * len(beams), False))
            for search, wanted in live:
                search.advance([_position(next(found)) for _ in wanted])
        return [BeamSearchOutput(search.best(tokenizer)) for search in searches]

    def get_tokenizer(self) -> Tokenizer:
        """Raises ConfigError where there is none."""
        if self._tokenizer is None:
            raise ConfigError("tokenizer: there is none; leave out skip_tokenizer_init, or work with token ids")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's ``generation_config.json`` asks for."""
        return self._defaults

    def reset_prefix_cache(self) -> bool:
        """Forget the cached blocks of earlier prompts."""
        return self._core.reset_prefix_cache()

    def encode(self, *_: Any, **__: Any) -> NoReturn:
        """Reserved for pooling models."""
        _no_pooling("encode")

    def embed(self, *_: Any, **__: Any) -> NoReturn:
        """Reserved for pooling models."""
        _no_pooling("embed")

    def classify(self, *_: Any, **__: Any) -> NoReturn:
        """Reserved for pooling models."""
        _no_pooling("classify")

    def score(self, *_: Any, **__: Any) -> NoReturn:
        """Reserved for pooling models."""
        _no_pooling("score")

    def _parse(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], priority: Sequence[int]
    ) -> list[ParsedRequest]:
        parsed = []
        for i, (prompt, how, first) in enumerate(zip(prompts, params, priority, strict=True)):
            try:
                parsed.append(self._processor.make(prompt, how, str(self._count), priority=first))
            except ConfigError as mistake:
                raise ConfigError(f"prompts[{i}]: {mistake}") from mistake
            self._count += 1
        return parsed

    def _run(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], priority: Sequence[int], show: bool
    ) -> list[RequestOutput]:
        parsed = self._parse(prompts, params, priority)
        if not show:
            return run_to_completion(self._core, self._outputs, parsed)
        from rich.progress import Progress

        with Progress(transient=True) as view:
            task = view.add_task("generating", total=len(parsed))
            return run_to_completion(self._core, self._outputs, parsed, lambda _: view.advance(task))


def run_to_completion(
    core: Core, outputs: OutputProcessor, parsed: Sequence[ParsedRequest], done: Done = lambda output: None
) -> list[RequestOutput]:
    """Run requests to their end, in their order. done: told each as it ends. Nothing of them stays behind: with
    Ctrl-C, or when the core refuses one, all are aborted and the exception goes on."""
    finished: dict[str, RequestOutput] = {}
    with _Interrupts() as interrupts:
        try:
            for request in parsed:
                outputs.add(request)
                for part in request.requests:
                    core.add(part)
            while core.unfinished:
                interrupts.check()
                processed = outputs.process(core.step())
                core.abort(processed.aborts)
                for output in processed.outputs:
                    if output.finished:
                        finished[output.request_id] = output
                        done(output)
        except BaseException as reason:
            core.abort(outputs.abort(request.request_id for request in parsed))
            while core.unfinished and isinstance(reason, (KeyboardInterrupt, ConfigError)):  # else the core is broken
                core.step()
            raise
    return [finished[request.request_id] for request in parsed]


class _Interrupts:
    """Holds Ctrl-C back until `check`, because the middle of a step is no place to stop at; a second one goes
    through."""

    def __enter__(self) -> _Interrupts:
        self._pressed = False
        handler = signal.getsignal(signal.SIGINT)
        main = threading.current_thread() is threading.main_thread()
        self._ours = main and handler is signal.default_int_handler
        if self._ours:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self.check()

    def _note(self, *_: object) -> None:
        if self._pressed:
            raise KeyboardInterrupt
        self._pressed = True

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was one."""
        if self._pressed:
            raise KeyboardInterrupt


def _is_one(prompts: Any) -> bool:
    """Of what `generate` takes: a prompt, not a list of them."""
    return isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _each(name: str, given: _T | Sequence[_T], kind: type[_T], count: int) -> list[_T]:
    """One for each prompt."""
    listed = [given] * count if isinstance(given, kind) else list(cast(Sequence[_T], given))
    if len(listed) != count:
        raise ConfigError(f"{name} has {len(listed)} entries and there are {count} prompts: give one for each")
    return listed


def _final(params: SamplingParams) -> SamplingParams:
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        return params
    return dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)


def _position(output: RequestOutput) -> Any:
    completion = output.outputs[0]
    if not completion.logprobs:
        raise RuntimeError(f"beam search: a step ended with {completion.finish_reason}: {completion.error}")
    return completion.logprobs[0]


def _no_pooling(name: str) -> NoReturn:
    raise ConfigError(f"{name}: pooling models are not available yet; use generate or chat")
