"""Text in and out: the tokenizer of a checkpoint folder and its chat template.

Built on the `tokenizers` library only, imported when first needed; transformers is not imported. Chat templates are
read and rendered by `graphllm.engine.chat_template.template`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphllm.config import ConfigError
from graphllm.config.fields import Fields, check_no_pointer, read_json
from graphllm.config.tokenizer_files import TokenizerFiles, special_ids
from graphllm.engine.chat_template.template import ChatTemplate, ContentFormat, no_text, plain, up_to_the_end, with_end
from graphllm.engine.requests.detokenizer import Detokenizer, TokenBytes, new_text, text_offsets
from graphllm.engine.requests.text_length import characters_per_token

if TYPE_CHECKING:
    import tokenizers

_LONG = 4096  # characters or tokens from which a batch of one is worth it, which lets other threads run meanwhile
Render = Callable[[Mapping[str, Any]], str]


class Tokenizer:
    """A checkpoint's tokenizer. bos_id, eos_id, pad_id: None where there is none. stop_ids: any of them ends output.
    config: ``tokenizer_config.json``."""

    def __init__(
        self,
        folder: Path,
        backend: tokenizers.Tokenizer,
        model: Fields | None,
        generation: Fields | None,
    ) -> None:
        """Use `from_folder`."""
        model = read_json(folder / "config.json") if model is None else model
        generation = read_json(folder / "generation_config.json") if generation is None else generation
        files, ids = TokenizerFiles.read(folder), special_ids(model or {}, generation or {})
        self._folder, self._backend, self.config = folder, backend, files.config
        self._files = model or {}, generation or {}
        self._special, self._templates = files.special, files.templates
        self._compiled: dict[str, ChatTemplate] = {}
        self._alone: dict[bool, dict[int, str]] = {True: {}, False: {}}  # texts of single tokens, special ones skipped
        self.bos_id = self._id_of("bos_token", ids)
        self.eos_id = self._id_of("eos_token", ids)
        self.pad_id = self._id_of("pad_token", ids)
        self.stop_ids = frozenset([*ids.get("eos_token", ()), *([] if self.eos_id is None else [self.eos_id])])

    @staticmethod
    def from_folder(folder: str | Path, model: Fields | None = None, generation: Fields | None = None) -> Tokenizer:
        """Read ``tokenizer.json`` and the other tokenizer files of its folder. Raises ConfigError when a file is
        missing or damaged.

        model, generation: the model's ``config.json`` and ``generation_config.json``, which name special tokens; None:
        the files in the folder.
        """
        import tokenizers

        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"{folder}: no tokenizer.json; make one with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        check_no_pointer(file)
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as e:  # the library raises nothing more precise
            raise ConfigError(f"{file}: damaged, or made for newer tokenizers ({e})") from e
        backend.no_truncation()
        backend.no_padding()
        return Tokenizer(folder, backend, model, generation)

    @property
    def origin(self) -> tuple[str, Fields, Fields]:
        """What `from_folder` makes another one of."""
        return str(self._folder), *self._files

    @property
    def vocab_size(self) -> int:
        """How many tokens it knows; the model's vocabulary may be padded beyond that."""
        return self._backend.get_vocab_size()

    @cached_property
    def characters_per_token(self) -> int | None:
        """Of a text, at most; None where nobody can say."""
        return characters_per_token(self._backend)

    @property
    def chat_template(self) -> str:
        """The source of its chat template, the one for tools where there are several; "" where there is none."""
        return self._templates.get("tool_use") or self._templates.get("default") or ""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. add_special_tokens: such as BOS, where the tokenizer's post-processor adds any. Raises ConfigError
        for half of a surrogate pair."""
        try:
            if len(text) > _LONG:
                return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as e:
            raise no_text(text, "prompt") from e

    def encode_pair(self, first: str, second: str, most: int | None = None) -> tuple[list[int], int]:
        """Token ids of two texts as one, and the number of the second one's first token, 0 where the tokenizer's
        post-processor does not tell them apart. most: cut the longer one until there are no more."""
        try:
            one, other = (self._backend.encode(text, add_special_tokens=False) for text in (first, second))
        except TypeError as e:
            raise no_text(first + second, "prompt") from e
        both = self._backend.post_process(one, other, add_special_tokens=True)
        if most is not None and len(both.ids) > most:
            room = max(0, most - (len(both.ids) - len(one.ids) - len(other.ids)))
            shorter = min(len(one.ids), len(other.ids), room // 2)
            keep = (shorter, room - shorter) if len(one.ids) <= len(other.ids) else (room - shorter, shorter)
            for encoding, count in zip((one, other), keep, strict=True):
                encoding.truncate(count)
            both = self._backend.post_process(one, other, add_special_tokens=True)
        types = both.type_ids
        return both.ids, types.index(1) if 1 in types else 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of some tokens. For the text of an output, which follows a prompt, use `output_text`."""
        if len(ids) > _LONG:
            return self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def output_text(self, prompt_ids: Sequence[int], ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole output."""
        decode = partial(self.decode, skip_special_tokens=skip_special_tokens)
        return new_text(decode, prompt_ids, ids, self.token_bytes.by_bytes)

    def detokenizer(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """One for each request: turns new tokens into new text."""
        decode = partial(self._backend.decode, skip_special_tokens=skip_special_tokens)
        return Detokenizer(decode, prompt_ids, self.token_bytes.by_bytes, self._alone[skip_special_tokens])

    def text_offsets(self, ids: Sequence[int], text: str | None = None) -> list[int]:
        """Of each token, the characters before it in the text, special tokens among them; as `text_offsets`."""
        return text_offsets(self.detokenizer(skip_special_tokens=False), ids, text)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """What each token stands for."""
        return TokenBytes(self._backend)

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of the tokens that are left out of texts, by how they are written."""
        return {t.content: i for i, t in self._backend.get_added_tokens_decoder().items() if t.special}

    def encode_chat(self, messages: Iterable[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of `render_chat`. The template has written BOS where it wants one, so none is added."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def render_chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        content_format: ContentFormat = "auto",
        render: Render | None = None,
        **variables: Any,
    ) -> str:
        """The prompt that the checkpoint's chat template makes of a conversation, which `conversation` has checked.

        tools: JSON schemas. continue_final_message: the prompt ends where the text of the last message does.
        content_format: as in `ChatTemplate.render`. variables: others that the template knows, such as
        ``enable_thinking``. render: writes the variables out in place of the checkpoint's template. Raises ConfigError
        when there is no template, when it does not compile, and with its own message when it refuses the messages.
        """
        known = list(messages)
        if not known:
            raise ConfigError("messages is []: give at least one message")
        known = with_end(known) if continue_final_message else known
        given = {"messages": known, "tools": tools, "documents": None, **self._special, **variables}
        values = {name: plain(value, name) for name, value in given.items()}
        values["add_generation_prompt"] = add_generation_prompt
        if render is None:
            text = self._template(for_tools=tools is not None).render(values, content_format)
        else:
            text = render(values)
        return up_to_the_end(text) if continue_final_message else text

    def with_chat_template(self, text: str) -> Tokenizer:
        """The same tokenizer with this template in place of the checkpoint's. Raises ConfigError when it does not
        compile."""
        other = copy.copy(self)
        other._templates, other._compiled = {"default": text}, {"default": ChatTemplate(text)}
        return other

    def token_id(self, token: str) -> int | None:
        """Of a token by its text; None where there is no such token."""
        return self._backend.token_to_id(token)

    def _template(self, for_tools: bool) -> ChatTemplate:
        name = "tool_use" if for_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            others = f" named 'default', only {', '.join(sorted(self._templates))}" if self._templates else ""
            raise ConfigError(
                f"messages: the model has no chat template{others}; send a plain prompt, or put one into "
                "chat_template.jinja in the model's folder"
            )
        if name not in self._compiled:
            self._compiled[name] = ChatTemplate(self._templates[name])
        return self._compiled[name]

    def _id_of(self, name: str, ids: Mapping[str, Sequence[int]]) -> int | None:
        """The id of a named special token; where the tokenizer names none, the first one the model's files give."""
        token = self._special.get(name)
        found = self._backend.token_to_id(token) if token is not None else None
        return found if found is not None else next(iter(ids.get(name, ())), None)
