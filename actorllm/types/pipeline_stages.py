"""How many layers each stage of a pipeline has, from the arguments of the engine; what a pipeline is not combined with yet."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from actorllm.errors import ConfigError

MAX_STAGES = 64


def read_stages(given: Mapping[str, Any], hf: Mapping[str, Any], device: str, has_module: bool) -> tuple[int, ...]:
    """Layers by stage; none: there is one stage.

    Arguments:
        given: the arguments of the engine.
        hf: the part of config.json that is about text.
        device: the backend's name.
        has_module: the model is a module of the application.

    Raises:
        ConfigError: names the argument, its value and the fix.
    """
    size, partition = given["pipeline_parallel_size"], _partition(given["pipeline_layer_partition"])
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"pipeline_parallel_size={size!r} must be a positive integer")
    if partition is not None and len(partition) != size:
        raise ConfigError(
            f"pipeline_layer_partition={list(partition)} has {len(partition)} stages, and pipeline_parallel_size={size}; "
            f"make them one number"
        )
    if size == 1:
        return ()
    _check_combinations(given, size, device, has_module)
    num_layers = hf.get("num_hidden_layers")
    if isinstance(num_layers, bool) or not isinstance(num_layers, int):
        raise ConfigError(f"pipeline_parallel_size={size}: config.json does not say how many layers the model has")
    if size > MAX_STAGES:
        raise ConfigError(f"pipeline_parallel_size={size} is more than the {MAX_STAGES} stages that an engine may have")
    if size > num_layers:
        raise ConfigError(
            f"pipeline_parallel_size={size}: the model has {num_layers} layers, and a stage has one at least; use "
            f"{num_layers} or less"
        )
    if partition is None:
        return balanced(num_layers, size, head_in_layers(hf))
    if sum(partition) != num_layers or min(partition) < 1:
        raise ConfigError(
            f"pipeline_layer_partition={list(partition)} adds up to {sum(partition)} layers, and the model has {num_layers}; "
            f"give each stage one layer at least, and all of them together {num_layers}"
        )
    return partition


def balanced(num_layers: int, size: int, head: float = 0.0) -> tuple[int, ...]:
    """Layers by stage, so that the slowest stage takes as little as it can; the last one has the head beside its layers.

    Arguments:
        num_layers: of the model, at least `size`.
        size: stages.
        head: how many layers the head costs as much as.
    """
    others = size - 1
    if not others:
        return (num_layers,)

    def cost(last: int) -> tuple[float, float]:
        rest = num_layers - last
        return max(-(-rest // others), last + head), abs(rest / others - last - head)

    last = min(range(1, num_layers - others + 1), key=cost)
    layers = [(num_layers - last) // others] * others
    # The first stage, which has the embeddings, is the last one to get a layer that is left over.
    for stage in [*range(others - 1, 0, -1), 0][: (num_layers - last) % others]:
        layers[stage] += 1
    return (*layers, last)


def head_in_layers(hf: Mapping[str, Any]) -> float:
    """How many layers the head costs as much as, by their products for one token; 0 where config.json does not say it."""

    def number(*names: str) -> int:
        found = next((hf[name] for name in names if hf.get(name) is not None), 0)
        return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 0

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    head_dim = number("head_dim") or hidden // max(heads, 1)
    attention = 2 * head_dim * (heads + number("num_key_value_heads", "num_attention_heads"))
    if rank := number("kv_lora_rank"):  # keys and values are products of a latent
        query, value = number("qk_nope_head_dim") + number("qk_rope_head_dim"), number("v_head_dim")
        attention = rank + heads * (query + value)
    # Of experts those that a token goes through.
    feed_forward = 3 * number("moe_intermediate_size", "intermediate_size") * (number("num_experts_per_tok") or 1)
    return number("vocab_size") / (attention + feed_forward) if attention and feed_forward else 0.0


def _partition(given: Any) -> tuple[int, ...] | None:
    if given is None:
        return None
    if isinstance(given, str) and re.fullmatch(r"\d{1,6}(,\d{1,6}){0,63}", given):
        return tuple(map(int, given.split(",")))
    is_list = isinstance(given, list | tuple) and 0 < len(given) <= MAX_STAGES
    if not is_list or any(isinstance(n, bool) or not isinstance(n, int) for n in given):
        raise ConfigError(
            f"pipeline_layer_partition={given!r:.120} must be a list of numbers of layers, such as [3, 5]"
        )
    return tuple(given)


def _check_combinations(given: Mapping[str, Any], size: int, device: str, has_module: bool) -> None:
    told = f"pipeline_parallel_size={size}"
    if given["topology"] == "inline":
        raise ConfigError(f"{told} needs a process per stage; use topology='process'")
    if device != "cpu":
        raise ConfigError(f"{told} is not supported with device={device!r} yet; use device='cpu', or leave it at 1")
    if has_module or given["model_impl"] == "transformers":
        raise ConfigError(f"{told}: modules of transformers are not cut into stages; leave it at 1")
    for name, unused in (
        ("speculative_config", (None,)),
        ("enable_lora", (None, False)),
        ("batch_invariant", (None, False)),
        ("quantization_twin", (None, False)),
    ):
        if given[name] not in unused:
            raise ConfigError(f"{told} is not supported with {name}={given[name]!r:.80} yet; leave one of them out")
