"""Bodies of requests for vectors, labels or scores, with the fields of OpenAI, vLLM, Jina and Cohere."""

from __future__ import annotations

from typing import Any

from actorllm.server.protocol import EngineRequest, Many, Messages, Prompts

IDLE: dict[str, tuple[Any, ...]] = {
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
    "padding": (None, "do_not_pad"),
    "max_tokens_per_query": (None, 0),
    "max_tokens_per_doc": (None, 0),
    "instruction": (None,),
}
"""Fields of vLLM that are accepted at these values, where they ask for what is done anyway."""

OF_CONVERSATIONS = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs")
"""Fields that say how `messages` become a prompt."""


class Pooled(EngineRequest):
    """What all requests for vectors share."""

    model: str | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    pooling_type: str | None = None
    embed_dtype: str | None = None
    endianness: str | None = None
    padding: str | None = None
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TextsRequest(Pooled):
    """What requests about texts share, each of which has an answer of its own; or about one conversation, `messages`."""

    TOKEN_FIELDS = ("input",)

    input: Prompts = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None


class EmbeddingRequest(TextsRequest):
    """`POST /v1/embeddings`."""

    encoding_format: str | None = None
    dimensions: int | None = None


class ClassifyRequest(TextsRequest):
    """`POST /classify`."""


class PoolingRequest(TextsRequest):
    """`POST /pooling`: what `encode` gives, of any task; or data of a plug-in (`io_processor_plugin`) in place of texts."""

    data: Any = None
    task: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None


class ScoreRequest(Pooled):
    """`POST /v1/score`: two sides, by any of the pairs of names that vLLM knows; a text each, or one text and several."""

    text_1: str | Many[str] | None = None
    text_2: str | Many[str] | None = None
    queries: str | Many[str] | None = None
    documents: str | Many[str] | None = None
    items: str | Many[str] | None = None
    data_1: str | Many[str] | None = None
    data_2: str | Many[str] | None = None


class RerankRequest(Pooled):
    """`POST /v1/rerank`: documents, which are texts or objects with a text, by how alike the query they are."""

    query: str
    documents: str | Many[str | dict[str, Any]]
    top_n: int | None = None
    return_documents: bool | None = None


BODIES = (EmbeddingRequest, ClassifyRequest, PoolingRequest, ScoreRequest, RerankRequest)

SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
