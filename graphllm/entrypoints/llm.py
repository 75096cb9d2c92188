"""LLM: offline inference in this process. Prompts in, finished outputs back, in their order. Methods for vectors are in
`graphllm.entrypoints.pooling`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Unpack, cast, get_args

from graphllm.config import ConfigError, EngineArgs
from graphllm.config.errors import ErrorPlace
from graphllm.config.requests.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from graphllm.engine.chat_template.conversation import check_template_kwargs, conversation, shown_tools
from graphllm.engine.chat_template.template import ContentFormat
from graphllm.engine.process.sleep_orders import PauseMode
from graphllm.engine.requests.beam import BeamSearch, BeamSearchOutput, step_params
from graphllm.engine.requests.outputs import RequestOutput
from graphllm.engine.requests.processor import GrammarChecker, ParsedRequest, Prompt
from graphllm.engine.requests.request import Adapter, Core
from graphllm.engine.requests.text import Tokenizer
from graphllm.entrypoints.adapters import LoRARequest
from graphllm.entrypoints.llm_engine import LLMEngine, load_engine, refuse
from graphllm.entrypoints.metrics_reader import Metric
from graphllm.entrypoints.offline import Bars, Show, bars, each, listed
from graphllm.entrypoints.pooling import PoolingOfflineMixin

if TYPE_CHECKING:
    from graphllm.config.args import EngineSettings

Message = Mapping[str, Any]


class LLM(PoolingOfflineMixin):
    """A model ready to generate, in this process; for one thread at a time. Close it, or use it in ``with``.

    model: a checkpoint folder, or a name of the Hugging Face hub; None for the embedded model. options: the fields of
    `EngineArgs`. Raises ConfigError naming what cannot be used.
    """

    def __init__(self, model: str | Path | None = None, **options: Unpack[EngineSettings]) -> None:
        self._attach(load_engine(EngineArgs(model, **options)))

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
        llm._attach(LLMEngine(core, tokenizer, defaults, grammar, seed))
        return llm

    def _attach(self, engine: LLMEngine) -> None:
        self.llm_engine = engine
        self._count = 0

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back memory and threads; nothing can be generated after it."""
        self.llm_engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Show = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Finish every prompt; one output each, in their order.

        prompts: text, token ids, a mapping with ``prompt`` or ``prompt_token_ids``, or a list of these.
        sampling_params: for all of them or one each, None for `get_default_sampling_params`. use_tqdm: show progress in
        a terminal; or what makes a progress bar, such as tqdm's class. lora_request: the adapter of all of them, or one
        each. priority: one each, lower goes first, with scheduling_policy="priority". Raises ConfigError before
        anything runs when one of them cannot run. What goes wrong later is in the output: finish_reason "error".
        """
        refuse(tokenization_kwargs=tokenization_kwargs)
        many = listed(prompts)
        given = sampling_params if sampling_params is not None else self.llm_engine.defaults
        params = each("sampling_params", given, SamplingParams, len(many))
        priorities = each("priority", priority if priority is not None else 0, int, len(many))
        final = {id(p): _final(p) for p in params}  # mostly the same object for all
        adapters = self.llm_engine.adapters.each(lora_request, len(many))
        return self._run(many, [final[id(p)] for p in params], priorities, bars(use_tqdm), adapters)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Show = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: None = None,
        tokenization_kwargs: None = None,
    ) -> list[RequestOutput]:
        """`generate` for one conversation or a list of them, written out by the checkpoint's chat template.

        chat_template: the text of another one, which you trust. continue_final_message: the output goes on with the
        last message; give add_generation_prompt=False with it. tools: JSON schemas. chat_template_kwargs: variables
        that the template knows. chat_template_content_format: "string" for content as texts and "openai" for content as
        parts; "auto" finds out from the template which of them it reads.
        """
        refuse(mm_processor_kwargs=mm_processor_kwargs)
        if continue_final_message and add_generation_prompt:
            raise ConfigError("continue_final_message is True: give add_generation_prompt=False with it")
        tokenizer = self.get_tokenizer()
        if chat_template is not None:
            tokenizer = tokenizer.with_chat_template(chat_template)
        one = not messages or isinstance(messages[0], Mapping)
        chats = [cast(Sequence[Message], messages)] if one else cast(Sequence[Sequence[Message]], messages)
        variables = chat_template_kwargs or {}
        check_template_kwargs(variables, "chat_template_kwargs")
        formats = get_args(ContentFormat)
        if chat_template_content_format not in formats:
            raise ConfigError(
                f"chat_template_content_format is {chat_template_content_format!r:.80}: give {', '.join(formats)}"
            )
        write = functools.partial(
            tokenizer.render_chat,
            tools=shown_tools(tools),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            content_format=chat_template_content_format,
            **variables,
        )
        prompts = []
        for i, chat in enumerate(chats):
            try:
                text = write(conversation(chat))
            except ConfigError as mistake:
                raise mistake if one else ErrorPlace("messages", i).error(mistake) from None
            # The template has written BOS where it wants one, so none is added.
            prompts.append({"prompt": text, "add_special_tokens": False})
        return self.generate(prompts, sampling_params, use_tqdm, lora_request, None, tokenization_kwargs)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: Show = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest sequences that beam search finds for each prompt. use_tqdm, concurrency_limit: change nothing;
        all prompts run at the same time, as far as a step has room."""
        adapter = self.llm_engine.adapters.requested(lora_request)
        info, tokenizer = self.llm_engine.core.info, self.llm_engine.tokenizer
        step = step_params(params, info.max_logprobs)
        many = listed(prompts)
        eos = tokenizer.stop_ids if tokenizer else frozenset[int]()
        parsed = self._parse(many, [step] * len(many), [0] * len(many), [adapter] * len(many))
        searches = [BeamSearch(p.prompt_token_ids, params, eos, info.max_model_len) for p in parsed]
        while live := [(search, wanted) for search in searches if (wanted := search.prompts())]:
            beams = [beam for _, wanted in live for beam in wanted]
            count = len(beams)
            found = iter(self._run(beams, [step] * count, [0] * count, None, [adapter] * count))
            for search, wanted in live:
                search.advance([_position(next(found)) for _ in wanted])
        return [BeamSearchOutput(search.best(tokenizer)) for search in searches]

    def get_tokenizer(self) -> Tokenizer:
        """Raises ConfigError where there is none."""
        return self.llm_engine.get_tokenizer()

    def get_metrics(self) -> list[Metric]:
        """All that was counted since the start, as gauges, counters and histograms with vLLM's names."""
        return self.llm_engine.get_metrics()

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's ``generation_config.json`` asks for."""
        return self.llm_engine.defaults

    def reset_prefix_cache(self) -> bool:
        """Forget the cached blocks of earlier prompts."""
        return self.llm_engine.reset_prefix_cache()

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """See `LLMEngine.sleep`."""
        self.llm_engine.sleep(level, mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See `LLMEngine.wake_up`."""
        self.llm_engine.wake_up(tags)

    def is_sleeping(self) -> bool:
        """See `LLMEngine.is_sleeping`."""
        return self.llm_engine.is_sleeping()

    def release_kv_cache_memory(self) -> None:
        """See `LLMEngine.release_kv_cache_memory`."""
        self.llm_engine.release_kv_cache_memory()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """See `LLMEngine.collective_rpc`."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """See `LLMEngine.start_profile`."""
        self.llm_engine.start_profile(profile_prefix)

    def stop_profile(self) -> list[str]:
        """See `LLMEngine.stop_profile`."""
        return self.llm_engine.stop_profile()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., NoReturn]:
            if name not in _MISSING:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return functools.partial(_not_here, name)

    def _parse(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priority: Sequence[int],
        adapters: Sequence[Adapter | None],
    ) -> list[ParsedRequest]:
        parsed, make = [], self.llm_engine.driver.processor.make
        for i, (prompt, how, first, adapter) in enumerate(zip(prompts, params, priority, adapters, strict=True)):
            try:
                parsed.append(make(prompt, how, str(self._count), priority=first, adapter=adapter))
            except ConfigError as mistake:
                raise ErrorPlace("prompts", i).error(mistake) from mistake
            self._count += 1
        return parsed

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priority: Sequence[int],
        show: Bars | None,
        adapters: Sequence[Adapter | None],
    ) -> list[RequestOutput]:
        parsed = self._parse(prompts, params, priority, adapters)
        with show(total=len(parsed), desc="Processed prompts") if show else contextlib.nullcontext() as bar:
            done = (lambda output: bar.update(1)) if bar is not None else (lambda output: None)
            outputs = self.llm_engine.driver.finish(parsed, done)
        for output, request in zip(outputs, parsed, strict=True):
            self.llm_engine.finished(output, request.params)
        return outputs


def _final(params: SamplingParams) -> SamplingParams:
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        return params
    return dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)


def _position(output: RequestOutput) -> Any:
    completion = output.outputs[0]
    if not completion.logprobs:
        raise RuntimeError(f"beam search: a step ended with {completion.finish_reason}: {completion.error}")
    return completion.logprobs[0]


_WORKERS = "give collective_rpc a function, which finds each rank's weights, and may write them"
_MISSING = {
    **dict.fromkeys(("apply_model", "init_weight_transfer_engine", "update_weights"), _WORKERS),
    "set_tokenizer": "give LLM(tokenizer=...), a folder or a name of the hub",
}


def missing_methods() -> dict[str, str]:
    """Methods of vLLM's class that this one refuses, and what to do instead."""
    return _MISSING


def _not_here(name: str, *_: object, **__: object) -> NoReturn:
    raise ConfigError(f"{name}: not supported; {_MISSING[name]}")
