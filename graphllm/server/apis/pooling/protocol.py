"""Bodies of requests for vectors and of their answers, as the OpenAPI document shows them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from graphllm.server.http.bodies import Answer, Items, Object

_Count = Annotated[int, Field(ge=1)]


class _Body(Object):
    """What all bodies have in common."""

    model: str | None = Field(None, description="One of the names that /v1/models lists; left out: the first of them.")
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = Field(
        None, description="Keep this many tokens of the beginning of a prompt; -1 keeps all that fit."
    )
    use_activation: bool | None = Field(
        None, description="false: numbers as the model gives them, neither normalized nor as probabilities."
    )
    normalize: bool | None = Field(None, description="The older name of use_activation.")
    activation: bool | None = Field(None, description="The older name of use_activation.")
    softmax: bool | None = Field(None, description="The older name of use_activation.")
    priority: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = Field(None, description="Lower goes first.")
    cache_salt: str | None = Field(None, description="Only requests with the same salt share cached prompts.")
    request_id: str | None = Field(None, description="For the log, the answer's id and the header x-request-id.")


Text = str | Items[int] | Items[str] | Items[Items[int]]


class _Prompts(_Body):
    """What has texts, token ids, or a conversation."""

    input: Text | None = Field(None, description="Text or token ids, one or several.")
    messages: Items[dict[str, Any]] | None = Field(None, description="A conversation, in place of input.")
    add_special_tokens: bool | None = Field(None, description="Of the tokenizer, such as BOS.")


class _Encoded(_Prompts):
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = Field(
        None,
        description="How numbers are written. bytes: the answer is only the numbers, and the header metadata has the "
        "rest; bytes_only: the answer is only the numbers.",
    )
    embed_dtype: Literal["float32", "float16", "bfloat16"] | None = Field(
        None, description="Of numbers in base64 and bytes."
    )
    endianness: Literal["native", "little", "big"] | None = Field(None, description="Of numbers in base64 and bytes.")
    dimensions: _Count | None = Field(None, description="Keep this many numbers of an embedding.")


class EmbeddingBody(_Encoded):
    """POST /v1/embeddings"""

    prompt_name: str | None = Field(None, description="Which of the checkpoint's prompts stands before each text.")


class PoolingBody(_Encoded):
    """POST /pooling"""

    task: str | None = Field(None, description="embed, classify, token_embed or token_classify; what the model gives.")
    step_tag_id: int | None = Field(None, description="Only what stands at this token, of a vector for each token.")
    returned_token_ids: Items[int] | None = Field(None, description="Only these classes.")


class ClassifyBody(_Prompts):
    """POST /classify"""


Texts = str | Items[str]


class ScoreBody(_Body):
    """POST /score: text_1 against text_2, one against one or many, or two lists by place. Other names of the two are
    data_1 and data_2, queries and documents, queries and items."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None


class RerankBody(_Body):
    """POST /rerank, as Jina's and Cohere's clients send it."""

    query: str
    documents: Items[str | dict[str, Any]] = Field(min_length=1, description="Texts, or objects with text.")
    top_n: Annotated[int, Field(ge=0)] | None = Field(None, description="Return the best documents, this many; 0: all.")
    return_documents: bool | None = Field(None, description="false: without the documents' texts.")
    truncation: bool | None = Field(None, description="Cut pairs that are too long.")
    max_tokens_per_doc: _Count | None = Field(None, description="Tokens of a pair, cut at its longer text.")


class CohereEmbedBody(Object):
    """POST /v2/embed, as Cohere's client sends it."""

    model: str | None = None
    texts: Items[str] = Field(min_length=1)
    input_type: str | None = Field(
        None, description="search_query is the checkpoint's prompt query, if it has one, ..."
    )
    embedding_types: Items[Literal["float", "base64", "binary", "ubinary"]] | None = None
    output_dimension: _Count | None = None
    truncate: Literal["NONE", "START", "END"] | None = Field(None, description="What is cut off a text too long.")
    max_tokens: _Count | None = Field(None, description="Tokens of a text.")
    priority: int | None = None


class PoolingUsage(Answer):
    """Tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class _List(Answer):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: PoolingUsage


class EmbeddingData(Answer):
    """One text's."""

    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class EmbeddingList(_List):
    """The answer of /v1/embeddings."""

    data: list[EmbeddingData]


class PoolingData(Answer):
    """One text's."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[list[float]] | list[float] | str


class PoolingList(_List):
    """The answer of /pooling."""

    data: list[PoolingData]


class Classes(Answer):
    """One text's. label: of the likeliest class."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassesList(_List):
    """The answer of /classify."""

    data: list[Classes]


class ScoreData(Answer):
    """One pair's."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(_List):
    """The answer of /score."""

    data: list[ScoreData]


class RerankDocument(Answer):
    """A document."""

    text: str


class Ranked(Answer):
    """A document's place in the request, and its score."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankList(Answer):
    """The answer of /rerank, best first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[Ranked]
    meta: dict[str, Any]


class CohereEmbeddings(Answer):
    """The answer of /v2/embed."""

    id: str
    embeddings: dict[str, list[Any]]
    texts: list[str]
    meta: dict[str, Any]
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"
