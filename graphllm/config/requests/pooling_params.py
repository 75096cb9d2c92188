"""`PoolingParams`, with vLLM's fields, and `Vectors`: what a model's vectors are, and what is made of them where a
request does not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from graphllm.config.pooling_config import PoolingConfig

NO_POOLING = (
    "the model generates text; use generate or chat with SamplingParams, and a model loaded with runner='pooling' for "
    "embeddings, classes and scores"
)
Activation = Literal["normalize", "softmax", "sigmoid", "identity"]
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForRewardModel", "ForProcessRewardModel")
_PROBLEMS: Mapping[Any, Activation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """How a model's vectors are made, where it makes some.

    truncate_prompt_tokens: how many tokens to keep of a prompt, its first ones; -1 for as many as the model takes.
    dimensions: how many numbers to keep of an embedding, before it is normalized. use_activation: False for numbers as
    the model gives them, neither normalized nor as probabilities; normalize, activation and softmax are older names of
    it.
    task: "embed", "classify", "score", "token_embed" or "token_classify"; None for the model's own. step_tag_id: keep
    only what stands at this token of the prompt, of a model with a vector for each. returned_token_ids: keep these
    classes. The others change nothing.
    """

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    softmax: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: Any = None

    @property
    def activates(self) -> bool:
        """Whether vectors are normalized, and classes are given as probabilities."""
        return False not in (self.use_activation, self.normalize, self.activation, self.softmax)


@dataclass(frozen=True)
class Vectors:
    """kind: hidden states, or a number for each class. activation: what is made of them. labels: names of the classes.
    checkpoint: what sentence-transformers' files say."""

    kind: Literal["embed", "classify"] = "embed"
    activation: Activation = "normalize"
    labels: tuple[str, ...] = ()
    checkpoint: PoolingConfig = field(default_factory=PoolingConfig)


def vectors_of(hf: Mapping[str, Any], checkpoint: PoolingConfig) -> Vectors:
    """What a config.json says of a model's vectors, which may be none. An embedder's are normalized, as vLLM's are,
    unless sentence-transformers' modules say that they are not."""
    architecture = (hf.get("architectures") or [""])[0]
    if not str(architecture).endswith(_CLASSIFIERS):
        return Vectors("embed", "normalize" if checkpoint.normalize else "identity", (), checkpoint)
    named = hf.get("id2label")
    labels = tuple(str(named[k]) for k in sorted(named, key=int)) if isinstance(named, dict) else ()
    if tokens := hf.get("classifier_from_token"):
        labels = (str(tokens[-1]),) if hf.get("is_original_qwen3_reranker") else tuple(map(str, tokens))
    return Vectors("classify", _activation(hf, str(architecture), labels), labels, checkpoint)


def _activation(hf: Mapping[str, Any], architecture: str, labels: tuple[str, ...]) -> Activation:
    if architecture.endswith("ForRewardModel"):
        return "identity"
    trained = hf.get("sentence_transformers")
    named = (trained if isinstance(trained, dict) else {}).get("activation_fn")
    named = named or hf.get("sbert_ce_default_activation_function")
    if isinstance(named, str):
        name = named.rpartition(".")[2].lower()
        return "sigmoid" if name == "sigmoid" else "softmax" if name == "softmax" else "identity"
    count = hf.get("num_labels", len(labels) or 2)
    if hf.get("is_original_qwen3_reranker"):
        count = 1
    return _PROBLEMS.get(hf.get("problem_type"), "sigmoid" if count == 1 else "softmax")
