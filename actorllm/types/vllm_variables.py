"""Environment variables of vLLM that programs set: which count here, which change nothing, and which are refused.

`read_variables` looks at them when an engine is configured. A variable that would change tokens is refused by its name, as an
argument is (`types.vllm_options`). One without effect is said in the log, once per process and at level INFO: it may be meant
for another program. Variables that no table names are left alone. Standard library only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from actorllm.errors import ConfigError

logger = logging.getLogger(__name__)

TAKEN = {
    "VLLM_SERVER_DEV_MODE": "as --enable-dev-endpoints of `actorllm serve`",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "`actorllm serve` has /v1/load_lora_adapter and /v1/unload_lora_adapter",
    "VLLM_API_KEY": "the key of `actorllm serve`, where ACTORLLM_API_KEY is not set",
    "VLLM_BATCH_INVARIANT": "batch_invariant=True",
    "VLLM_CPU_KVCACHE_SPACE": "GiB of the KV cache on a CPU, where no argument says its size",
    "VLLM_TORCH_PROFILER_DIR": "where `start_profile` writes traces, where profiler_config is not given",
}
"""Those that do what they say, and what that is."""

REFUSED = {
    "VLLM_USE_MODELSCOPE": "models are fetched from the Hugging Face Hub",
}
"""Those that would change tokens, or promise what does not hold; they are taken at 0."""

_IDLE: dict[str, tuple[str, ...]] = {
    "the kernels are those of the backend": (
        "VLLM_ATTENTION_BACKEND",
        "VLLM_DISABLED_KERNELS",
        "VLLM_DISABLE_COMPILE_CACHE",
        "VLLM_FLASH_ATTN_VERSION",
        "VLLM_FLASHINFER_MOE_BACKEND",
        "VLLM_FLOAT32_MATMUL_PRECISION",
        "VLLM_TUNED_CONFIG_FOLDER",
        "VLLM_USE_AOT_COMPILE",
        "VLLM_USE_DEEP_GEMM",
        "VLLM_USE_FLASHINFER_SAMPLER",
        "VLLM_USE_STANDALONE_COMPILE",
        "VLLM_USE_TRITON_FLASH_ATTN",
    ),
    "the engine's processes are its own": (
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_USE_RAY_COMPILED_DAG",
        "VLLM_USE_RAY_SPMD_WORKER",
        "VLLM_USE_V1",
        "VLLM_USE_V2_MODEL_RUNNER",
        "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE",
        "VLLM_WORKER_MULTIPROC_METHOD",
    ),
    "each process of the application has a whole engine, as ranks of vLLM have whose model is dense": (
        "VLLM_DP_MASTER_IP",
        "VLLM_DP_MASTER_PORT",
        "VLLM_DP_RANK",
        "VLLM_DP_RANK_LOCAL",
        "VLLM_DP_SIZE",
    ),
    "num_threads and cpu_share say how many threads there are": (
        "VLLM_CPU_NUM_OF_RESERVED_CPU",
        "VLLM_CPU_OMP_THREADS_BIND",
    ),
    "processes talk over shared memory": (
        "VLLM_ALLOW_INSECURE_SERIALIZATION",
        "VLLM_HOST_IP",
        "VLLM_LOOPBACK_IP",
        "VLLM_PORT",
        "VLLM_RINGBUFFER_WARNING_INTERVAL",
        "VLLM_RPC_BASE_PATH",
        "VLLM_RPC_TIMEOUT",
    ),
    "messages are those of Python's logging, as the application sets it up": (
        "VLLM_CONFIGURE_LOGGING",
        "VLLM_LOGGING_CONFIG_PATH",
        "VLLM_LOGGING_LEVEL",
        "VLLM_LOGGING_PREFIX",
        "VLLM_LOGGING_STREAM",
        "VLLM_LOG_BATCHSIZE_INTERVAL",
        "VLLM_TRACE_FUNCTION",
    ),
    "nothing is reported to anyone": ("VLLM_DO_NOT_TRACK", "VLLM_NO_USAGE_STATS", "VLLM_USAGE_SOURCE"),
    "arguments of this name decide it": (
        "VLLM_ENGINE_ITERATION_TIMEOUT_S",
        "VLLM_ENGINE_READY_TIMEOUT_S",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
    ),
    "max_model_len beyond the positions of the model is refused": ("VLLM_ALLOW_LONG_MAX_MODEL_LEN",),
    "plug-ins are loaded where an argument names them": ("VLLM_PLUGINS",),
    "nothing is kept there": ("VLLM_ASSETS_CACHE", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_XLA_CACHE_PATH"),
    "how images and audio are fetched is fixed": (
        "VLLM_AUDIO_FETCH_TIMEOUT",
        "VLLM_IMAGE_FETCH_TIMEOUT",
        "VLLM_MEDIA_LOADING_THREAD_COUNT",
        "VLLM_VIDEO_FETCH_TIMEOUT",
    ),
}

IDLE = {name: reason for reason, names in _IDLE.items() for name in names}
"""Those that change no token, and why they have no effect."""

OFF = ("", "0", "false", "False", "no", "off")
GIB = 1 << 30


def is_on(name: str) -> bool:
    """Whether a variable is at what vLLM takes for True."""
    return os.environ.get(name, "0").strip().lower() in ("1", "true")


def read_variables(given: dict[str, Any], environment: Mapping[str, str] = os.environ) -> None:
    """Completes the arguments of an engine by what the environment says.

    Arguments:
        given: all arguments; those that a variable stands for are set where they are not given.
        environment: of the process.

    Raises:
        ConfigError: a variable is refused, or its value cannot be read.
    """
    names = [name for name in environment if name.startswith("VLLM_")]
    for name in names:
        if name in REFUSED and environment[name] not in OFF:
            raise ConfigError(f"the environment has {name}={environment[name]!r:.80}, and {REFUSED[name]}; unset it")
        if name in IDLE:
            _say_idle(name)
    space = environment.get("VLLM_CPU_KVCACHE_SPACE")
    sizes = ("kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override")
    if space and space != "0" and given["device"] != "cuda" and all(given[name] is None for name in sizes):
        given["kv_cache_memory_bytes"] = _gib(space)
    if environment.get("VLLM_BATCH_INVARIANT", "") not in OFF:
        given["batch_invariant"] = True
    folder = environment.get("VLLM_TORCH_PROFILER_DIR")
    if folder and given["profiler_config"] is None:
        given["profiler_config"] = {"profiler": "torch", "torch_profiler_dir": folder}


@cache
def _say_idle(name: str) -> None:
    logger.info("%s has no effect here: %s", name, IDLE[name])


def _gib(text: str) -> int:
    try:
        number = float(text)
        if 0 < number < 1 << 20:
            return int(number * GIB)
    except ValueError:
        pass
    raise ConfigError(
        f"the environment has VLLM_CPU_KVCACHE_SPACE={text!r:.80}, which must be a number of GiB; unset it"
    )
