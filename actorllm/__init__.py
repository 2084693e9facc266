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
    from actorllm.api.async_llm import AsyncLLM, AsyncLLMEngine
    from actorllm.api.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from actorllm.api.engine_args import AsyncEngineArgs, EngineArgs, FlexibleArgumentParser
    from actorllm.api.llm import LLM
    from actorllm.api.llm_engine import LLMEngine
    from actorllm.client.pooling_stream import PoolingStream
    from actorllm.client.stream import RequestStream
    from actorllm.config import EngineConfig
    from actorllm.errors import ActorLLMError, EngineDeadError, EngineOverloaded
    from actorllm.types.flat_logprobs import FlatLogprobs
    from actorllm.types.logprob import Logprob
    from actorllm.types.lora_request import LoRARequest
    from actorllm.types.objective import SLO
    from actorllm.types.outputs import CompletionOutput, RequestOutput
    from actorllm.types.params import PoolingParams, RepetitionDetectionParams, RequestOutputKind, SamplingParams
    from actorllm.types.pooling_outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from actorllm.types.pooling_params import PoolerConfig
    from actorllm.types.prompts import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt
    from actorllm.types.request_metrics import RequestMetrics
    from actorllm.types.structured_outputs import StructuredOutputsParams

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
    "ClassificationOutput",
    "ClassificationRequestOutput",
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
    "LoRARequest",
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
    "LLM": "api.llm",
    "SLO": "types.objective",
    "ActorLLMError": "errors",
    "AsyncEngineArgs": "api.engine_args",
    "AsyncLLM": "api.async_llm",
    "AsyncLLMEngine": "api.async_llm",
    "BeamSearchOutput": "api.beam_search",
    "BeamSearchParams": "api.beam_search",
    "BeamSearchSequence": "api.beam_search",
    "CompletionOutput": "types.outputs",
    "ClassificationOutput": "types.pooling_outputs",
    "ClassificationRequestOutput": "types.pooling_outputs",
    "EmbeddingOutput": "types.pooling_outputs",
    "EmbeddingRequestOutput": "types.pooling_outputs",
    "EmbedsPrompt": "types.prompts",
    "EngineArgs": "api.engine_args",
    "EngineConfig": "config",
    "EngineDeadError": "errors",
    "EngineOverloaded": "errors",
    "FlatLogprobs": "types.flat_logprobs",
    "FlexibleArgumentParser": "api.engine_args",
    "LLMEngine": "api.llm_engine",
    "LoRARequest": "types.lora_request",
    "Logprob": "types.logprob",
    "PoolerConfig": "types.pooling_params",
    "PoolingOutput": "types.pooling_outputs",
    "PoolingParams": "types.params",
    "PoolingRequestOutput": "types.pooling_outputs",
    "PoolingStream": "client.pooling_stream",
    "PromptType": "types.prompts",
    "RepetitionDetectionParams": "types.params",
    "RequestMetrics": "types.request_metrics",
    "RequestOutput": "types.outputs",
    "RequestOutputKind": "types.params",
    "RequestStream": "client.stream",
    "SamplingParams": "types.params",
    "StructuredOutputsParams": "types.structured_outputs",
    "ScoringOutput": "types.pooling_outputs",
    "ScoringRequestOutput": "types.pooling_outputs",
    "TextPrompt": "types.prompts",
    "TokensPrompt": "types.prompts",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"actorllm.{_HOME[name]}"), name)
    raise AttributeError(f"module 'actorllm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
