"""From chats to training batches: rendering with the model's own chat template, tokenizing, packing into rows."""

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from torch.utils.data import IterableDataset, get_worker_info

from bench.training.tasks import Message, Schema, mixture

CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text()
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTEXT = 1024
PLAIN_SHARE = 0.03
"""How many documents are an answer without a chat around it: for whoever completes `The capital of France is`."""
SHORT_ROW = 256
SHORT_DOCUMENT = 128
"""Chats up to this long go to short rows, two times in three: there more of them stand where a real one does, first."""

# As transformers renders: the same environment, and JSON that neither sorts keys nor escapes.
_environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
_environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
_template = _environment.from_string(CHAT_TEMPLATE)


def render(messages: list[Message], tools: list[Schema]) -> str:
    """The text of a whole chat. A test holds it equal to what `apply_chat_template` gives."""
    return _template.render(messages=messages, tools=tools)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the tokenizer must have."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no single token for {token!r}")
    return int(found)


class _Rows:
    """Fills rows of one length with documents, one after another; the document at a row's end is cut there."""

    def __init__(self, rows: int, length: int, pad: int) -> None:
        self.flat = torch.full((rows * length,), pad, dtype=torch.int16)
        self.length, self.at = length, 0

    def add(self, ids: list[int]) -> torch.Tensor | None:
        """Returns the rows when this document has filled the last one."""
        room = self.length - self.at % self.length
        ids = ids[:room]
        self.flat[self.at : self.at + len(ids)] = torch.tensor(ids, dtype=torch.int16)
        self.at += len(ids)
        if self.at < len(self.flat):
            return None
        full, self.flat, self.at = self.flat, torch.empty_like(self.flat), 0
        return full.view(-1, self.length)


class PackedChats(IterableDataset[torch.Tensor]):
    """An endless stream of [rows, row length] batches of `batch_tokens` tokens, another one in each loader worker."""

    def __init__(self, tokenizer_file: Path, batch_tokens: int, seed: int) -> None:
        self.tokenizer_file, self.batch_tokens, self.seed = tokenizer_file, batch_tokens, seed

    def __iter__(self) -> Iterator[torch.Tensor]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a worker
        worker = get_worker_info()
        rng = Random(f"{self.seed} {worker.id if worker else 0}")
        tokenizer = Tokenizer.from_file(str(self.tokenizer_file))
        pad = token_id(tokenizer, END_OF_TEXT)
        short, long = (_Rows(self.batch_tokens // length, length, pad) for length in (SHORT_ROW, CONTEXT))
        samples = mixture(rng)
        while True:
            texts = [
                (chat.answer if rng.random() < PLAIN_SHARE else render(chat.conversation(), chat.tools)) + END_OF_TEXT
                for chat in islice(samples, 512)
            ]
            for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                ids = encoding.ids
                rows = short if len(ids) <= SHORT_DOCUMENT and rng.random() < 2 / 3 else long
                if (batch := rows.add(ids)) is not None:
                    yield batch


def answer_mask(ids: torch.Tensor, end_of_text: int, turn_start: int, turn_end: int, assistant: int) -> torch.Tensor:
    """True where a token of [rows, length] ids is the model's to say.

    That is in the assistant's turns, with the token that ends them, and all of a document that has no turns.
    """
    position = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)

    def last(token: int, before: int) -> torch.Tensor:
        """Where `token` last stood at least `before` places ago, or -1."""
        places = torch.where(ids == token, position, -1).cummax(dim=1).values
        return torch.cat([torch.full_like(places[:, :before], -1), places[:, : places.shape[1] - before]], dim=1)

    start = last(turn_start, 0)
    role = ids.gather(1, (start + 1).clamp(max=ids.shape[1] - 1))
    header = 3  # turn start, role, newline
    in_turn = (role == assistant) & (position >= start + header) & (last(turn_end, 1) < start)
    return in_turn | (last(end_of_text, 1) >= start)
