"""From chats to training batches: rendering with the model's own chat template, tokenizing, packing into rows."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from torch.utils.data import IterableDataset, get_worker_info

from graphllm.embedded.tasks import Message, Schema, mixture

CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text()
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTEXT = 1024
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
    """An endless stream of [rows, row length] token batches of `batch_tokens` tokens, different in each loader worker."""

    def __init__(self, tokenizer_file: Path, batch_tokens: int, seed: int) -> None:
        self.tokenizer_file, self.batch_tokens, self.seed = tokenizer_file, batch_tokens, seed

    def __iter__(self) -> Iterator[torch.Tensor]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a worker
        worker = get_worker_info()
        rng = Random(f"{self.seed} {worker.id if worker else 0}")
        tokenizer = Tokenizer.from_file(str(self.tokenizer_file))
        pad = tokenizer.token_to_id(END_OF_TEXT)
        short, long = (_Rows(self.batch_tokens // length, length, pad) for length in (SHORT_ROW, CONTEXT))
        samples = mixture(rng)
        while True:
            chats = (next(samples) for _ in range(512))
            texts = [render(chat.conversation(), chat.tools) + END_OF_TEXT for chat in chats]
            for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                ids = encoding.ids
                rows = short if len(ids) <= SHORT_DOCUMENT and rng.random() < 2 / 3 else long
                if (batch := rows.add(ids)) is not None:
                    yield batch


def answer_mask(ids: torch.Tensor, turn_start: int, turn_end: int, assistant: int) -> torch.Tensor:
    """True where a token of [rows, length] ids is one that the assistant says, the end of its turn included."""
    position = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    nowhere = torch.full_like(position, -1)
    starts = ids == turn_start
    start = torch.cummax(torch.where(starts, position, nowhere), dim=1).values
    ends = torch.cummax(torch.where(ids == turn_end, position, nowhere), dim=1).values
    end_before = torch.cat([nowhere[:, :1], ends[:, :-1]], dim=1)
    role = ids.gather(1, (start + 1).clamp(max=ids.shape[1] - 1))
    header = 3  # turn start, role, newline
    return (start >= 0) & (role == assistant) & (position >= start + header) & (end_before < start)
