"""vLLM's submodules by their names: `from actorllm.compat.sampling_params import SamplingParams`; `import actorllm.compat as vllm`.

Names only: each is defined elsewhere in actorllm, or in `functions` beside it, and is loaded when it is used. `MODULES` is the
whole table. vLLM's modules also have what they import themselves, and programs import it from there. So each submodule here has
the names of all others, where only one thing is called so. A name or a submodule that is not in the table raises ImportError, as
any that does not exist. Submodules are attributes of the package without an import of their own, as they are in vLLM.
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
from actorllm.compat.variables import DEFAULTS as VARIABLES


class UsageContext(StrEnum):
    """Where a program of vLLM says that it runs. Nothing is reported here."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


VLLM_VERSION = "0.32.0"
"""Whose names these are."""
__version__ = f"{VLLM_VERSION}+actorllm.{actorllm.__version__}"
"""Programs compare it before they import what their vLLM has; `actorllm.__version__` is that of this package."""
__version_tuple__ = (0, 32, 0)


def random_uuid() -> str:
    """An id for a request: 32 hexadecimal digits."""
    return uuid.uuid4().hex


def _same(module: str, *names: str) -> dict[str, str]:
    return {name: f"{module}:{name}" for name in names}


_BEAMS = _same("actorllm.api.beam_search", "BeamSearchParams", "BeamSearchSequence", "BeamSearchOutput")
_LOGPROBS = _same("actorllm", "Logprob", "FlatLogprobs")
_PROMPTS = _same("actorllm", "TextPrompt", "TokensPrompt", "EmbedsPrompt", "PromptType")
_ENGINE_DEAD = _same("actorllm.errors", "EngineDeadError")
_ASYNC = {"AsyncLLM": "actorllm:AsyncLLM", "AsyncLLMEngine": "actorllm:AsyncLLMEngine"}
_PARSER = _same("actorllm", "FlexibleArgumentParser")
_LOGITS_INTERFACE = _same(
    "actorllm.types.logits_processors", "AddedRequest", "BatchUpdate", "LogitsProcessor", "MoveDirectionality"
) | _same("actorllm.types.logits_processors", "MovedRequest", "RemovedRequest")

_CLASSES = "actorllm.text.plugin_classes"
_TREES, _SERVING = "actorllm.cli.vllm_bodies", "actorllm.cli.vllm_serving"
_CHAT_BODIES = _same(_TREES, "ChatCompletionRequest", "ChatCompletionResponse")
_COMPLETION_BODIES = {
    "CompletionRequest": "actorllm.server.protocol:CompletionRequest",
    **_same(_TREES, "CompletionResponse"),
}
_EMBEDDING_BODIES = {
    "EmbeddingRequest": "actorllm.server.vectors.bodies:EmbeddingRequest",
    **_same(_TREES, "EmbeddingResponse"),
}
_TOKEN_BODIES = _same("actorllm.server.protocol", "TokenizeRequest", "DetokenizeRequest")
_ERROR = _same(_TREES, "ErrorResponse")
_ADAPTER_BODIES = {
    "LoadLoRAAdapterRequest": "actorllm.server.adapter_routes:LoadAdapterRequest",
    "UnloadLoRAAdapterRequest": "actorllm.server.adapter_routes:UnloadAdapterRequest",
}
_RESPONSES = {"ResponsesRequest": f"{_CLASSES}.deltas:AskedFields"}
_ALL_BODIES = {**_CHAT_BODIES, **_COMPLETION_BODIES, **_EMBEDDING_BODIES, **_TOKEN_BODIES, **_ERROR, **_ADAPTER_BODIES}
_ASKED = {**_CHAT_BODIES, **_RESPONSES}
_SERVING_MODELS = _same(_SERVING, "OpenAIServingModels", "BaseModelPath", "LoRAModulePath")
_SERVING_PARTS = {
    module: _same(_SERVING, name)
    for name, modules in {
        "OpenAIServingChat": ("serving_chat", "chat_completion.serving"),
        "OpenAIServingCompletion": ("serving_completion", "completion.serving"),
        "OpenAIServingResponses": ("serving_responses", "responses.serving"),
        "OpenAIServingEmbedding": ("serving_embedding",),
        "OpenAIServingTokenization": ("serving_tokenization",),
    }.items()
    for module in modules
}
_DELTAS = _same(
    f"{_CLASSES}.deltas",
    *("DeltaMessage", "DeltaToolCall", "DeltaFunctionCall", "ExtractedToolCallInformation", "FunctionCall", "ToolCall"),
    *("FunctionDefinition", "ChatCompletionToolsParam"),
)
_TOOLS = {
    "ToolParser": f"{_CLASSES}.tool_base:PluginToolParser",
    "ToolParserManager": f"{_CLASSES}.managers:ToolParserManager",
}
_TOOL_FUNCTIONS = _same(
    f"{_CLASSES}.tool_base",
    *("consume_space", "extract_intermediate_diff", "find_all_indices", "find_common_prefix", "find_common_suffix"),
    *("is_complete_json", "partial_json_loads"),
)
_THOUGHTS = {
    "ReasoningParser": f"{_CLASSES}.reasoning_base:PluginReasoningParser",
    "ReasoningParserManager": f"{_CLASSES}.managers:ReasoningParserManager",
}
_THINKING = _same(f"{_CLASSES}.reasoning_base", "BaseThinkingReasoningParser")
_CALL_IDS = _same(f"{_CLASSES}.deltas", "make_tool_call_id", "random_tool_call_id")
_BODIES = "actorllm.server.vectors.plugin_bodies"
_BODY_NAMES = {
    "UsageInfo": f"{_BODIES}:UsageInfo",
    "OpenAIBaseModel": f"{_BODIES}:OpenBody",
}
_VECTOR_BODIES = {
    "PoolingBasicRequestMixin": f"{_BODIES}:PoolingBody",
    "CompletionRequestMixin": f"{_BODIES}:CompletionBody",
    "EncodingRequestMixin": f"{_BODIES}:EncodingBody",
    "EmbedRequestMixin": f"{_BODIES}:VectorBody",
    "ClassifyRequestMixin": f"{_BODIES}:ClassifyBody",
}
_PLUGIN_BODIES = {"IOProcessorRequest": f"{_BODIES}:PluginRequest", "IOProcessorResponse": f"{_BODIES}:PluginResponse"}
_IO_PROCESSOR = _same("actorllm.types.io_processor", "IOProcessor", "IOProcessorInput", "IOProcessorOutput")
_TOKENIZER = dict.fromkeys(("AnyTokenizer", "TokenizerLike"), "typing:Any")

_FUNCTIONS = "actorllm.compat.functions"
_MODELS = _same(_FUNCTIONS, "ModelRegistry")
_VERSION = _same("actorllm.compat", "__version__", "__version_tuple__")
_TOP = {**{name: f"actorllm:{name}" for name in actorllm.__all__ if name != "__version__"}, **_MODELS}
_MERGED = _same(_FUNCTIONS, "merge_async_iterators")
_SERVER = "actorllm.cli.vllm_server"
_SERVER_ARGUMENTS = _same(_SERVER, "make_arg_parser", "validate_parsed_serve_args")
_LISTENING = _same(_SERVER, "serve_http", "setup_server", "create_server_socket")
_CLIENTS = _same(_SERVER, "build_async_engine_client", "build_async_engine_client_from_engine_args")
_SERVER_PARTS = {**_same(_SERVER, "run_server", "build_app", "init_app_state"), **_CLIENTS, **_LISTENING}
_SETTINGS = dict.fromkeys(
    (
        *("AttentionConfig", "CompilationConfig", "KVEventsConfig", "KVTransferConfig", "LoadConfig"),
        *("ObservabilityConfig", "ProfilerConfig", "SpeculativeConfig", "StructuredOutputsConfig"),
        "WeightTransferConfig",
    ),
    f"{_FUNCTIONS}:Settings",
)
_TRANSFERS = dict.fromkeys(
    ("WeightTransferInitRequest", "WeightTransferUpdateRequest"),
    f"{_FUNCTIONS}:Settings",
)
_CLEANING = dict.fromkeys(
    ("cleanup_dist_env_and_memory", "destroy_distributed_environment", "destroy_model_parallel"),
    f"{_FUNCTIONS}:cleanup_dist_env_and_memory",
)
_PORTS = _same(_FUNCTIONS, "get_open_port", "get_ip")
_DEVICES = _same(_FUNCTIONS, "cuda_device_count_stateless")
_CLI, _ULIMIT = _same(_FUNCTIONS, "cli_env_setup"), _same(_FUNCTIONS, "set_ulimit")
_COUNTER, _GET_TOKENIZER = {"Counter": f"{_FUNCTIONS}:IdCounter"}, _same(_FUNCTIONS, "get_tokenizer")
_IS_LIST = _same("actorllm.types.io_processor", "is_list_of")

_CONFIGS = {
    "VllmConfig": "actorllm.config:EngineConfig",
    **_same("actorllm.config", "ModelConfig", "CacheConfig", "SchedulerConfig", "ParallelConfig", "LoRAConfig"),
    **_same("actorllm", "PoolerConfig"),
    **_SETTINGS,
    **_same(_FUNCTIONS, "CompilationMode"),
}
_CONFIG_HOMES = {
    f"config.{module}": {name: _CONFIGS[name]}
    for module, name in (
        *(("attention", "AttentionConfig"), ("cache", "CacheConfig"), ("kv_events", "KVEventsConfig")),
        *(("kv_transfer", "KVTransferConfig"), ("load", "LoadConfig"), ("lora", "LoRAConfig")),
        *(("model", "ModelConfig"),),
        *(("observability", "ObservabilityConfig"), ("parallel", "ParallelConfig"), ("pooler", "PoolerConfig")),
        *(("profiler", "ProfilerConfig"), ("scheduler", "SchedulerConfig"), ("speculative", "SpeculativeConfig")),
        *(("structured_outputs", "StructuredOutputsConfig"), ("vllm", "VllmConfig")),
        ("weight_transfer", "WeightTransferConfig"),
    )
}
_CHAT_UTILS = {
    **_CALL_IDS,
    **_same(_FUNCTIONS, "load_chat_template", "resolve_hf_chat_template"),
    **dict.fromkeys(("ChatCompletionMessageParam", "ConversationMessage"), "typing:Any"),
}
_RENDERER = {"BaseRenderer": "actorllm.client.plugin_data:PromptRenderer"}
_BATCH = {"main": "actorllm.compat:run_batch"}

MODULES: dict[str, dict[str, str]] = {
    "beam_search": _BEAMS,
    "config": _CONFIGS,
    **_CONFIG_HOMES,
    "config.compilation": {**_SETTINGS, **_same(_FUNCTIONS, "CompilationMode")},
    "distributed": _CLEANING,
    "distributed.parallel_state": _CLEANING,
    "distributed.weight_transfer": _TRANSFERS,
    "distributed.weight_transfer.base": _TRANSFERS,
    "engine": {},
    "engine.arg_utils": _same("actorllm", "EngineArgs", "AsyncEngineArgs"),
    "engine.async_llm_engine": {**_ASYNC, "AsyncEngineDeadError": "actorllm.errors:EngineDeadError"},
    "engine.llm_engine": _same("actorllm", "LLMEngine"),
    "engine.protocol": {"EngineClient": "actorllm:AsyncLLM"},
    "entrypoints": {},
    "entrypoints.cli": {},
    "entrypoints.cli.main": {"main": "actorllm.cli:main"},
    "entrypoints.chat_utils": _CHAT_UTILS,
    "entrypoints.generate": {},
    "entrypoints.generate.base": {},
    "entrypoints.generate.base.protocol": _DELTAS,
    "entrypoints.generate.beam_search": {},
    "entrypoints.generate.beam_search.utils": _same(
        "actorllm.api.beam_search", "BeamSearchSequence", "BeamSearchOutput"
    ),
    "entrypoints.launchers": {},
    "entrypoints.launchers.api_server": {},
    "entrypoints.launchers.api_server.app_state": _same(_SERVER, "init_app_state"),
    "entrypoints.launcher": _LISTENING,
    "entrypoints.launchers.api_server.entry": {**_same(_SERVER, "run_server"), **_CLIENTS},
    "entrypoints.launchers.launcher": _LISTENING,
    "entrypoints.launchers.app": _same(_SERVER, "build_app"),
    "entrypoints.launchers.cli_args": _SERVER_ARGUMENTS,
    "entrypoints.launchers.run_batch": _BATCH,
    "entrypoints.llm": _same("actorllm", "LLM"),
    "entrypoints.logger": _same(_SERVING, "RequestLogger"),
    "entrypoints.openai": {},
    "entrypoints.openai.chat_completion": {},
    "entrypoints.openai.chat_completion.protocol": {**_ASKED, **_DELTAS},
    "entrypoints.openai.completion": {},
    "entrypoints.openai.completion.protocol": _COMPLETION_BODIES,
    "entrypoints.openai.engine": {},
    "entrypoints.openai.engine.protocol": {**_ASKED, **_DELTAS, **_BODY_NAMES, **_ERROR},
    "entrypoints.openai.engine.serving": _same(_SERVING, "OpenAIServing"),
    "entrypoints.openai.models": {},
    "entrypoints.openai.models.protocol": _same(_SERVING, "BaseModelPath", "LoRAModulePath"),
    "entrypoints.openai.models.serving": _SERVING_MODELS,
    "entrypoints.openai.protocol": {**_ALL_BODIES, **_ASKED, **_DELTAS, **_CALL_IDS, **_BODY_NAMES, **_PLUGIN_BODIES},
    "entrypoints.openai.responses": {},
    "entrypoints.openai.responses.protocol": _RESPONSES,
    "entrypoints.openai.serving_engine": {
        **_same(_SERVING, "OpenAIServing"),
        **_same(_SERVING, "BaseModelPath", "LoRAModulePath"),
    },
    "entrypoints.openai.serving_models": _SERVING_MODELS,
    **{f"entrypoints.openai.{module}": names for module, names in _SERVING_PARTS.items()},
    "entrypoints.openai.tool_parsers": _TOOLS,
    "entrypoints.openai.tool_parsers.abstract_tool_parser": _TOOLS,
    "entrypoints.openai.tool_parsers.utils": _TOOL_FUNCTIONS,
    "entrypoints.openai.api_server": {"main": "actorllm.compat:serve", **_SERVER_PARTS, **_SERVER_ARGUMENTS},
    "entrypoints.openai.cli_args": _SERVER_ARGUMENTS,
    "entrypoints.openai.run_batch": _BATCH,
    "entrypoints.pooling": {},
    "entrypoints.pooling.base": {},
    "entrypoints.pooling.base.protocol": _VECTOR_BODIES,
    "entrypoints.pooling.pooling": {},
    "entrypoints.pooling.pooling.protocol": _PLUGIN_BODIES,
    "entrypoints.serve": {},
    "entrypoints.serve.engine": {},
    "entrypoints.serve.engine.protocol": _BODY_NAMES,
    "entrypoints.utils": {**_CLI, **_same(_FUNCTIONS, "with_cancellation")},
    "envs": {name: f"actorllm.compat.variables:{name}" for name in VARIABLES},
    "exceptions": _same("actorllm.errors", "VLLMValidationError"),
    "inputs": _PROMPTS,
    "inputs.data": _PROMPTS,
    "inputs.llm": _PROMPTS,
    "logger": _same(f"{_CLASSES}.deltas", "init_logger"),
    "logits_process": {"LogitsProcessor": "actorllm.types.logits_processors:RequestLogitsProcessor"},
    "logprobs": _LOGPROBS,
    "lora": {},
    "lora.request": _same("actorllm", "LoRARequest"),
    "model_executor": {},
    "model_executor.models": _MODELS,
    "model_executor.models.registry": _MODELS,
    "outputs": {
        **_same("actorllm", "RequestOutput", "CompletionOutput", "PoolingOutput", "PoolingRequestOutput"),
        **_same("actorllm", "ClassificationOutput", "ClassificationRequestOutput"),
        **_same("actorllm", "EmbeddingOutput", "EmbeddingRequestOutput", "ScoringOutput", "ScoringRequestOutput"),
    },
    "platforms": _same(_FUNCTIONS, "current_platform"),
    "plugins": {"IO_PROCESSOR_PLUGINS_GROUP": "actorllm.client.plugin_data:GROUP"},
    "plugins.io_processors": _IO_PROCESSOR,
    "plugins.io_processors.interface": _IO_PROCESSOR,
    "pooling_params": _same("actorllm", "PoolingParams"),
    "reasoning": {**_THOUGHTS, **_THINKING},
    "reasoning.abs_reasoning_parsers": _THOUGHTS,
    "reasoning.basic_parsers": {**_THOUGHTS, **_THINKING},
    "reasoning.deepseek_r1_reasoning_parser": _same(f"{_CLASSES}.reasoning_base", "DeepSeekR1ReasoningParser"),
    "reasoning.qwen3_reasoning_parser": _same(f"{_CLASSES}.reasoning_base", "Qwen3ReasoningParser"),
    "renderers": _RENDERER,
    "renderers.base": _RENDERER,
    "renderers.chat_utils": _CHAT_UTILS,
    "sampling_params": {
        **_same("actorllm", "SamplingParams", "RequestOutputKind", "StructuredOutputsParams"),
        **_same("actorllm", "RepetitionDetectionParams", "BeamSearchParams"),
        **_same("actorllm.types.structured_outputs", "GuidedDecodingParams"),
    },
    "sequence": {**_LOGPROBS, **_same("actorllm", "RequestMetrics")},
    "tasks": dict.fromkeys(("PoolingTask", "SupportedTask"), "builtins:str"),
    "tokenizers": {**_TOKENIZER, **_GET_TOKENIZER},
    "tokenizers.protocol": _TOKENIZER,
    "tokenizers.registry": _GET_TOKENIZER,
    "tokenizers.detokenizer_utils": _same("actorllm.types.io_processor", "convert_ids_list_to_tokens"),
    "tool_parsers": _TOOLS,
    "tool_parsers.abstract_tool_parser": _TOOLS,
    "tool_parsers.utils": _TOOL_FUNCTIONS,
    "transformers_utils": {},
    "transformers_utils.tokenizer": {**_TOKENIZER, **_GET_TOKENIZER},
    "usage": {},
    "usage.usage_lib": _same("actorllm.compat", "UsageContext"),
    "utils": {
        **_PARSER,
        **_same("actorllm.compat", "random_uuid"),
        **_COUNTER,
        **_IS_LIST,
        **_PORTS,
        **_DEVICES,
        **_MERGED,
        **_ULIMIT,
    },
    "utils.argparse_utils": _PARSER,
    "utils.async_utils": _MERGED,
    "utils.collection_utils": _IS_LIST,
    "utils.counter": _COUNTER,
    "utils.network_utils": _PORTS,
    "utils.system_utils": _ULIMIT,
    "utils.torch_utils": _DEVICES,
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
    "v1.metrics.loggers": {
        **_same("actorllm.types.stat_loggers", "StatLoggerBase", "AggregateStatLoggerBase"),
        **_same("actorllm.compat.loggers", "LoggingStatLogger", "PrometheusStatLogger"),
    },
    "v1.metrics.stats": _same(
        "actorllm.types.stat_loggers", "SchedulerStats", "IterationStats", "FinishedRequestStats", "PrefixCacheStats"
    ),
    "v1.metrics.reader": _same("actorllm.types.engine_metrics", "Metric", "Counter", "Vector", "Gauge", "Histogram"),
    "version": _VERSION,
}
"""By submodule, what it exports: "module:name", where it is defined."""


def _elsewhere() -> dict[str, str]:
    """The names of all submodules that stand for one thing."""
    places: dict[str, set[str]] = {}
    for module, names in MODULES.items():
        if module != "envs":
            for name, place in names.items():
                places.setdefault(name, set()).add(place)
    return {name: min(found) for name, found in places.items() if len(found) == 1 and name != "main"}


_ELSEWHERE = _elsewhere()


def serve(arguments: Sequence[str] | None = None) -> int:
    """`actorllm serve`; it returns the exit status.

    Arguments:
        arguments: of the command line; None: those of this process.
    """
    return _command("serve", arguments)


def run_batch(arguments: Sequence[str] | None = None) -> int:
    """`actorllm run-batch`; it returns the exit status.

    Arguments:
        arguments: of the command line; None: those of this process.
    """
    return _command("run-batch", arguments)


def _command(name: str, arguments: Sequence[str] | None) -> int:
    from actorllm.cli import main

    return main([name, *(sys.argv[1:] if arguments is None else arguments)])


def _found(names: dict[str, str], module: str, name: str) -> Any:
    if name not in names:
        inner = f"{module}.{name}"
        if inner.removeprefix(f"{__name__}.") in MODULES:
            return importlib.import_module(inner)
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
        found = names if module.__name__.endswith(".envs") else {**_ELSEWHERE, **names}
        contents["__getattr__"] = lambda name: _found(found, module.__name__, name)
        contents["__dir__"] = lambda: sorted(names)

    def get_source(self, fullname: str) -> str:
        """What `python -m` runs: of a module of a command that command, of the others nothing."""
        names = MODULES[fullname.removeprefix(f"{__name__}.")]
        return f"from {fullname} import main\nraise SystemExit(main())\n" if "main" in names else ""


sys.meta_path.append(_Names())
