"""vLLM's submodules by their names: `from actorllm.compat.sampling_params import SamplingParams`; `import actorllm.compat as vllm`.

Names only: each is defined elsewhere in actorllm, and is loaded when it is used. `MODULES` is the whole table. A name or a
submodule that is not in it raises ImportError, as any that does not exist.
"""

from __future__ import annotations

import importlib
import sys
import types
import uuid
from collections.abc import Sequence
from enum import StrEnum
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import actorllm


class UsageContext(StrEnum):
    """Where a program of vLLM says that it runs. Nothing is reported here."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


def random_uuid() -> str:
    """An id for a request: 32 hexadecimal digits."""
    return uuid.uuid4().hex


def _same(module: str, *names: str) -> dict[str, str]:
    return {name: f"{module}:{name}" for name in names}


_TOP = {name: f"actorllm:{name}" for name in (*actorllm.__all__, "__version__")}
_BEAMS = _same("actorllm.api.beam_search", "BeamSearchParams", "BeamSearchSequence", "BeamSearchOutput")
_LOGPROBS = _same("actorllm", "Logprob", "FlatLogprobs")
_PROMPTS = _same("actorllm", "TextPrompt", "TokensPrompt", "EmbedsPrompt", "PromptType")
_ENGINE_DEAD = _same("actorllm.errors", "EngineDeadError")
_ASYNC = {"AsyncLLM": "actorllm:AsyncLLM", "AsyncLLMEngine": "actorllm:AsyncLLMEngine"}
_PARSER = _same("actorllm", "FlexibleArgumentParser")
_LOGITS_INTERFACE = _same(
    "actorllm.types.logits_processors", "AddedRequest", "BatchUpdate", "LogitsProcessor", "MoveDirectionality"
) | _same("actorllm.types.logits_processors", "MovedRequest", "RemovedRequest")

MODULES: dict[str, dict[str, str]] = {
    "beam_search": _BEAMS,
    "config": {
        "VllmConfig": "actorllm.config:EngineConfig",
        **_same("actorllm.config", "ModelConfig", "CacheConfig", "SchedulerConfig", "ParallelConfig", "LoRAConfig"),
        **_same("actorllm", "PoolerConfig"),
    },
    "engine": {},
    "engine.arg_utils": _same("actorllm", "EngineArgs", "AsyncEngineArgs"),
    "engine.async_llm_engine": {**_ASYNC, "AsyncEngineDeadError": "actorllm.errors:EngineDeadError"},
    "engine.llm_engine": _same("actorllm", "LLMEngine"),
    "entrypoints": {},
    "entrypoints.llm": _same("actorllm", "LLM"),
    "entrypoints.openai": {},
    "entrypoints.openai.api_server": {"main": "actorllm.compat:serve"},
    "exceptions": _same("actorllm.errors", "VLLMValidationError"),
    "inputs": _PROMPTS,
    "inputs.data": _PROMPTS,
    "logits_process": {"LogitsProcessor": "actorllm.types.logits_processors:RequestLogitsProcessor"},
    "logprobs": _LOGPROBS,
    "lora": {},
    "lora.request": _same("actorllm", "LoRARequest"),
    "outputs": {
        **_same("actorllm", "RequestOutput", "CompletionOutput", "PoolingOutput", "PoolingRequestOutput"),
        **_same("actorllm", "ClassificationOutput", "ClassificationRequestOutput"),
        **_same("actorllm", "EmbeddingOutput", "EmbeddingRequestOutput", "ScoringOutput", "ScoringRequestOutput"),
    },
    "pooling_params": _same("actorllm", "PoolingParams"),
    "sampling_params": {
        **_same("actorllm", "SamplingParams", "RequestOutputKind", "StructuredOutputsParams"),
        **_same("actorllm", "RepetitionDetectionParams", "BeamSearchParams"),
    },
    "sequence": {**_LOGPROBS, **_same("actorllm", "RequestMetrics")},
    "usage": {},
    "usage.usage_lib": _same("actorllm.compat", "UsageContext"),
    "utils": {**_PARSER, **_same("actorllm.compat", "random_uuid")},
    "utils.argparse_utils": _PARSER,
    "v1": {},
    "v1.sample": {},
    "v1.sample.logits_processor": {
        **_same("actorllm.types.logits_processors", "AdapterLogitsProcessor", "RequestLogitsProcessor"),
        **_same("actorllm.types.logits_processors", "process_dict_updates"),
        **_LOGITS_INTERFACE,
    },
    "v1.sample.logits_processor.builtin": _same("actorllm.types.logits_processors", "process_dict_updates"),
    "v1.sample.logits_processor.interface": _LOGITS_INTERFACE,
    "v1.engine": {},
    "v1.engine.async_llm": {"AsyncLLM": "actorllm:AsyncLLM"},
    "v1.engine.exceptions": {**_ENGINE_DEAD, "EngineGenerateError": "actorllm.errors:RequestFailedError"},
    "v1.engine.llm_engine": _same("actorllm", "LLMEngine"),
    "v1.metrics": {},
    "v1.metrics.loggers": _same("actorllm.types.stat_loggers", "StatLoggerBase", "AggregateStatLoggerBase"),
    "v1.metrics.stats": _same(
        "actorllm.types.stat_loggers", "SchedulerStats", "IterationStats", "FinishedRequestStats", "PrefixCacheStats"
    ),
    "v1.metrics.reader": _same("actorllm.types.engine_metrics", "Metric", "Counter", "Vector", "Gauge", "Histogram"),
    "version": _same("actorllm", "__version__"),
}
"""By submodule, what it exports: "module:name", where it is defined."""


def serve(arguments: Sequence[str] | None = None) -> int:
    """`actorllm serve`; it returns the exit status.

    Arguments:
        arguments: of the command line; None: those of this process.
    """
    from actorllm.cli import main

    return main(["serve", *(sys.argv[1:] if arguments is None else arguments)])


def _found(names: dict[str, str], module: str, name: str) -> Any:
    if name not in names:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    home, _, original = names[name].partition(":")
    return getattr(importlib.import_module(home), original)


def __getattr__(name: str) -> Any:
    return _found(_TOP, __name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_TOP})


class _Names(MetaPathFinder, InspectLoader):
    """Finds and makes the modules of the table."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        name = fullname.removeprefix(f"{__name__}.")
        if name == fullname or name not in MODULES:
            return None
        is_package = any(other.startswith(f"{name}.") for other in MODULES)
        return ModuleSpec(fullname, self, origin=__file__, is_package=is_package)

    def exec_module(self, module: types.ModuleType) -> None:
        names = MODULES[module.__name__.removeprefix(f"{__name__}.")]
        contents: dict[str, Any] = vars(module)
        contents["__all__"] = tuple(names)
        contents["__getattr__"] = lambda name: _found(names, module.__name__, name)
        contents["__dir__"] = lambda: sorted(names)

    def get_source(self, fullname: str) -> str:
        """What `python -m` runs: of the server's module the command, of the others nothing."""
        names = MODULES[fullname.removeprefix(f"{__name__}.")]
        return f"import {__name__}\nraise SystemExit({__name__}.serve())\n" if "main" in names else ""


sys.meta_path.append(_Names())
