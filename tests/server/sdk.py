"""For tests with the APIs' own clients: what they ask the embedded model, and what transformers makes of the same."""

from __future__ import annotations

import itertools
import json
from functools import cache
from typing import Any

import torch

from graphllm.embedded import MODEL_DIR

MODEL = "graphllm-embedded"
SUM: Any = [{"role": "user", "content": "What is 12 + 7?"}]  # the model says: 12 + 7 = 19.
STORY: Any = [{"role": "user", "content": "Write a story."}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
BOTH: Any = [{"role": "user", "content": "What is the weather in Paris and in Rome?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS: Any = [  # which it has learned to call
    {"name": "get_weather", "description": "Get the current weather of a city.", "parameters": CITY},
    {"name": "get_time", "description": "Get the current time in a city.", "parameters": CITY},
]
TOOLS: Any = [{"type": "function", "function": function} for function in FUNCTIONS]
RESULT = json.dumps({"sky": "sunny", "temperature": 18})
TOLD = "It is sunny in Paris, 18 degrees."  # of that
_SALTS = map(str, itertools.count())


def fresh(**fields: Any) -> dict[str, Any]:
    """Options of a client's call: these fields in the body too, and nothing of the prompt is in the cache."""
    return {"extra_body": {"cache_salt": next(_SALTS), **fields}}


@cache
def tokenizer() -> Any:
    """As transformers reads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL_DIR)


def prompt_ids(messages: Any, **fields: Any) -> list[int]:
    """Tokens of a chat."""
    return tokenizer().apply_chat_template(messages, add_generation_prompt=True, **fields)["input_ids"]


@cache
def _model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()


def scores(ids: list[int]) -> torch.Tensor:
    """Log-probabilities [T, V] of what comes behind each token."""
    with torch.no_grad():
        return _model()(torch.tensor([ids])).logits[0].log_softmax(-1)
