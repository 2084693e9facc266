"""`vllm.envs`: variables of vLLM's environment as programs read them. What becomes of each here says `types.vllm_variables`."""

from __future__ import annotations

import os
from typing import Any

from actorllm.types.vllm_variables import is_on

DEFAULTS: dict[str, Any] = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": False,
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": False,
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": False,
    "VLLM_API_KEY": None,
    "VLLM_ATTENTION_BACKEND": None,
    "VLLM_BATCH_INVARIANT": False,
    "VLLM_CACHE_ROOT": os.path.expanduser("~/.cache/vllm"),
    "VLLM_CONFIGURE_LOGGING": True,
    "VLLM_CONFIG_ROOT": os.path.expanduser("~/.config/vllm"),
    "VLLM_CPU_KVCACHE_SPACE": 0,
    "VLLM_CPU_OMP_THREADS_BIND": "auto",
    "VLLM_DO_NOT_TRACK": False,
    "VLLM_DP_MASTER_IP": "127.0.0.1",
    "VLLM_DP_MASTER_PORT": 0,
    "VLLM_DP_RANK": 0,
    "VLLM_DP_RANK_LOCAL": -1,
    "VLLM_DP_SIZE": 1,
    "VLLM_ENABLE_V1_MULTIPROCESSING": True,
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": 60,
    "VLLM_HOST_IP": "",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": 5,
    "VLLM_IMAGE_FETCH_TIMEOUT": 5,
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_LOGGING_PREFIX": "",
    "VLLM_NO_USAGE_STATS": False,
    "VLLM_PLUGINS": None,
    "VLLM_PORT": None,
    "VLLM_RPC_TIMEOUT": 10000,
    "VLLM_SERVER_DEV_MODE": False,
    "VLLM_TARGET_DEVICE": "cuda",
    "VLLM_TORCH_PROFILER_DIR": None,
    "VLLM_USAGE_SOURCE": "production",
    "VLLM_USE_MODELSCOPE": False,
    "VLLM_USE_V1": True,
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}
"""What each is where it is not set; its type is that of what is read."""
NUMBERS = ("VLLM_PORT",)
"""Those that are numbers, and None where they are not set."""


def __getattr__(name: str) -> Any:
    """As it is now. Raises AttributeError: vLLM, or this table, has no such variable; ValueError: it is no number."""
    if name not in DEFAULTS:
        raise AttributeError(f"vllm.envs: {name!r} is not known here; read os.environ[{name!r}]")
    default, text = DEFAULTS[name], os.environ.get(name)
    if text is None:
        return default
    if isinstance(default, bool):
        return is_on(name)
    if isinstance(default, int) or name in NUMBERS:
        return int(text)
    return text.split(",") if name == "VLLM_PLUGINS" else text
