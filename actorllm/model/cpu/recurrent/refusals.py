"""What models with recurrent layers are not combined with yet, and how much memory their states take."""

from __future__ import annotations

from actorllm.config import EngineConfig
from actorllm.errors import ConfigError, UnsupportedModelError


def check_recurrent(config: EngineConfig) -> None:
    """Raises UnsupportedModelError naming the argument and the fix."""
    size, stages = config.tensor_size, len(config.stages)
    told = {
        f"tensor_parallel_size={size}": (size > 1, "set it to 1"),
        f"pipeline_parallel_size={stages}": (stages > 1, "set it to 1"),
        "speculative_config": (
            config.speculation is not None,
            "leave it out: the state of a rejected draft cannot be taken back",
        ),
        f"kv_cache_dtype={config.cache.dtype!r}": (config.cache.dtype != "auto", "leave it out"),
        "batch_invariant=True": (config.batch_invariant, "leave it out"),
        "a KV tier (kv_offloading_size)": (config.cache.has_tiers, "leave it out: tiers keep blocks, and no states"),
        "roles": (bool(config.cache.pools), "leave it out: replicas lend blocks, and no states"),
    }
    for name, (is_wanted, fix) in told.items():
        if is_wanted:
            raise UnsupportedModelError(
                f"{name} is not supported with the recurrent layers of {config.model.architecture} yet; {fix}"
            )


def check_states(config: EngineConfig, num_bytes: int, row_bytes: int) -> None:
    """The states of max_num_seqs sequences must fit. Raises ConfigError.

    Arguments:
        num_bytes: for the cache and the states.
        row_bytes: of the states of one sequence.
    """
    most = config.scheduler.max_num_seqs
    if num_bytes < most * row_bytes:
        fitting = num_bytes // row_bytes
        fix = f"set max_num_seqs={fitting} or less, or give more memory" if fitting > 0 else "give more memory"
        raise ConfigError(
            f"max_num_seqs={most}: the states of so many sequences take {most * row_bytes:,} bytes of {max(0, num_bytes):,}; "
            f"{fix} (kv_cache_memory_bytes, gpu_memory_utilization)"
        )


def most_snapshots(config: EngineConfig) -> int:
    """How many states of prefixes are kept, where memory is no question: as many as sequences run, which doubles the states."""
    return config.scheduler.max_num_seqs if config.cache.enable_prefix_caching else 0


def num_snapshots_within(config: EngineConfig, num_bytes: int, row_bytes: int, *, least_bytes: int) -> int:
    """How many states of prefixes are kept, beside those of the sequences that run (`check_states`).

    Arguments:
        num_bytes, row_bytes: as there.
        least_bytes: of the keys and values of the longest sequence, which must fit beside; 0: no layer attends. If some do, most
            of the rest is for keys and values, too.
    """
    left = max(0, num_bytes - config.scheduler.max_num_seqs * row_bytes - least_bytes)
    return min(most_snapshots(config), (left // 4 if least_bytes else left) // row_bytes)
