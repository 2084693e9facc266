"""actorllm: an LLM inference engine to embed in async Python applications, and a laboratory for latency experiments.

    from actorllm import AsyncLLM, SamplingParams

    llm = AsyncLLM("storyteller")
    async for piece in llm.stream("Once upon a time", SamplingParams(max_tokens=64)):
        print(piece, end="")

Importing this package is light. torch is imported by the processes that compute only; with `topology="inline"` yours is one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actorllm.async_llm import AsyncLLM, AsyncLLMEngine
    from actorllm.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from actorllm.config import EngineConfig
    from actorllm.engine_args import AsyncEngineArgs, EngineArgs, FlexibleArgumentParser
    from actorllm.errors import ActorLLMError, EngineDeadError, EngineOverloaded
    from actorllm.flat_logprobs import FlatLogprobs
    from actorllm.llm import LLM
    from actorllm.llm_engine import LLMEngine
    from actorllm.objective import SLO
    from actorllm.pooled import (
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from actorllm.pooling import PoolerConfig
    from actorllm.pooling_stream import PoolingStream
    from actorllm.prompt import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt
    from actorllm.request import (
        CompletionOutput,
        Logprob,
        PoolingParams,
        RepetitionDetectionParams,
        RequestMetrics,
        RequestOutput,
        RequestOutputKind,
        SamplingParams,
    )
    from actorllm.stream import RequestStream
    from actorllm.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

__all__ = (
    "LLM",
    "SLO",
    "ActorLLMError",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "EngineConfig",
    "EngineDeadError",
    "EngineOverloaded",
    "FlatLogprobs",
    "FlexibleArgumentParser",
    "LLMEngine",
    "Logprob",
    "PoolerConfig",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PoolingStream",
    "PromptType",
    "RepetitionDetectionParams",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RequestStream",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
)

_HOME = {
    "LLM": "llm",
    "SLO": "objective",
    "ActorLLMError": "errors",
    "AsyncEngineArgs": "engine_args",
    "AsyncLLM": "async_llm",
    "AsyncLLMEngine": "async_llm",
    "BeamSearchOutput": "beam_search",
    "BeamSearchParams": "beam_search",
    "BeamSearchSequence": "beam_search",
    "CompletionOutput": "request",
    "EmbeddingOutput": "pooled",
    "EmbeddingRequestOutput": "pooled",
    "EmbedsPrompt": "prompt",
    "EngineArgs": "engine_args",
    "EngineConfig": "config",
    "EngineDeadError": "errors",
    "EngineOverloaded": "errors",
    "FlatLogprobs": "flat_logprobs",
    "FlexibleArgumentParser": "engine_args",
    "LLMEngine": "llm_engine",
    "Logprob": "request",
    "PoolerConfig": "pooling",
    "PoolingOutput": "pooled",
    "PoolingParams": "request",
    "PoolingRequestOutput": "pooled",
    "PoolingStream": "pooling_stream",
    "PromptType": "prompt",
    "RepetitionDetectionParams": "request",
    "RequestMetrics": "request",
    "RequestOutput": "request",
    "RequestOutputKind": "request",
    "RequestStream": "stream",
    "SamplingParams": "request",
    "StructuredOutputsParams": "structured_outputs",
    "ScoringOutput": "pooled",
    "ScoringRequestOutput": "pooled",
    "TextPrompt": "prompt",
    "TokensPrompt": "prompt",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"actorllm.{_HOME[name]}"), name)
    raise AttributeError(f"module 'actorllm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
