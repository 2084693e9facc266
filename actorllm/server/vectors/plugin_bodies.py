"""What plug-ins of an engine (`io_processor_plugin`) give a server back, and the bodies that they derive their own from.

vLLM has these in its modules of protocols; plug-ins import them by those names (`actorllm.compat`).
"""

from __future__ import annotations

import time
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")


class OpenBody(BaseModel):
    """Fields that it does not name are kept."""

    model_config = ConfigDict(extra="allow")


class PoolingBody(OpenBody):
    """What all requests for vectors have."""

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    request_id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class CompletionBody(OpenBody):
    """Texts, or token ids."""

    input: list[int] | list[list[int]] | str | list[str]
    add_special_tokens: bool = True


class EncodingBody(OpenBody):
    """How numbers are written."""

    encoding_format: str = "float"
    embed_dtype: str = "float32"
    endianness: str = "native"


class VectorBody(EncodingBody):
    """Of vectors of texts."""

    dimensions: int | None = None
    use_activation: bool | None = None


class ClassifyBody(OpenBody):
    """Of probabilities."""

    use_activation: bool | None = None


class PluginRequest(PoolingBody, EncodingBody, Generic[T]):
    """`POST /pooling` with data."""

    data: T
    task: str = "plugin"


class PluginResponse(OpenBody, Generic[T]):
    """The answer to it."""

    request_id: str | None = None
    created_at: int = Field(default_factory=lambda: int(time.time()))
    data: T


class UsageInfo(OpenBody):
    """Tokens that were read and written."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: Any = None
