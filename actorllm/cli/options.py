"""What several commands share: options of the engine and of sampling, and a text that is printed as it comes.

Owns how an option that was not given is left to the model's author or to the engine's default. Called by the command
modules; importing it loads nothing heavy, so that `actorllm --help` is quick.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

from cyclopts import Parameter

from actorllm.errors import ConfigError

if TYPE_CHECKING:
    from actorllm.client.engine import Engine
    from actorllm.intake.tokenization import Prompt
    from actorllm.types.outputs import RequestOutput
    from actorllm.types.params import SamplingParams


def see_own_folder() -> None:
    """Let classes of this folder be found, as `python -m` does; the engine's processes get this process's sys.path.

    Last, so that a module there hides none of the installed ones.
    """
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)


def _number(kind: Any, tokens: Sequence[Any]) -> Any:
    from actorllm.config import human_number

    text = tokens[0].value
    number = human_number(text)
    try:
        return int(number)
    except ValueError:
        raise ValueError(f"{text!r:.40} must be a whole number, like 2048, 2k (2,000) or 2K (2,048)") from None


Number: TypeAlias = Annotated[int | None, Parameter(converter=_number)]
"""A number as people write it: vLLM's command line takes 2k and 2K as well."""

C = TypeVar("C", bound=type)


class _Help:
    """The docstring of a class of options, completed when help is printed: what each argument of the engine means."""

    def __init__(self, text: str, names: Iterable[str]) -> None:
        self._text, self._names = text, tuple(names)

    def __get__(self, instance: object, owner: type) -> str:
        from actorllm.types.options import DEFAULTS, meanings

        told = meanings()
        rows = []
        for name in self._names:
            if name in told:
                is_said = DEFAULTS[name] is None or getattr(owner, name) is not None
                rows.append(f"{name}\n    {told[name]}{'' if is_said else f' Default: {DEFAULTS[name]}.'}")
        return "\n".join([self._text, "", "Parameters", "----------", *rows])


def with_meanings(cls: C) -> C:
    """Options that are arguments of the engine: their help is that of `actorllm.types.options`."""
    cls.__doc__ = _Help(cls.__doc__ or "", cls.__annotations__)  # type: ignore[assignment]
    return cls


@Parameter(name="*")
@with_meanings
@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """Arguments of the engine, as in `AsyncLLM`; what is not given is left to its default, and it checks what is."""

    model: str = "storyteller"
    """A bundled model, a folder, a GGUF file, or a Hugging Face id."""
    tokenizer: str | None = None
    dtype: str = "auto"
    load_format: str | None = None
    quantization: str | None = None
    model_impl: str | None = None
    max_model_len: int | str | None = None
    max_num_seqs: Number = None
    max_num_batched_tokens: Number = None
    max_num_partial_prefills: int | None = None
    long_prefill_token_threshold: Number = None
    scheduling_policy: Annotated[str | None, Parameter(name=["--scheduling-policy", "--policy"])] = None
    admission_policy: str | None = None
    step_model: str | None = None
    speculative_config: str | None = None
    async_scheduling: bool | None = None
    block_size: int | None = None
    kv_cache_dtype: str | None = None
    enable_prefix_caching: bool | None = None
    kv_offloading_size: float | None = None
    kv_disk_path: str | None = None
    kv_disk_size: float | None = None
    kv_transfer_config: str | None = None
    kv_cache_memory_bytes: Number = None
    num_gpu_blocks_override: Number = None
    device: str | None = None
    gpu_memory_utilization: float | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    pipeline_layer_partition: str | None = None
    data_parallel_size: int | None = None
    data_parallel_size_local: int | None = None
    data_parallel_address: str | None = None
    data_parallel_backend: str | None = None
    distributed_executor_backend: str | None = None
    ray_address: str | None = None
    placement: str | None = None
    placement_timeout_s: float | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    nodes: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None
    node_key_file: str | None = None
    node_timeout_s: float | None = None
    node_ca_file: str | None = None
    ready_replicas: int | None = None
    min_replicas: int | None = None
    max_replicas: int | None = None
    target_attainment: float | None = None
    autoscaling: str | None = None
    router: str | None = None
    roles: str | None = None
    enable_lora: bool | None = None
    max_loras: int | None = None
    max_lora_rank: int | None = None
    max_cpu_loras: int | None = None
    enable_sleep_mode: bool | None = None
    worker_cls: str | None = None
    worker_extension_cls: str | None = None
    max_logprobs: int | None = None
    logits_processors: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None
    generation_config: str | None = None
    enforce_eager: bool | None = None
    trust_remote_code: bool | None = None
    topology: str = "process"
    num_threads: int | None = None
    intake_timeout_s: float | None = None
    max_prompt_characters: int | None = None
    on_failure: str | None = None

    def __post_init__(self) -> None:
        policies = any(
            ":" in policy
            for policy in (self.scheduling_policy, self.admission_policy, self.router)
            if policy is not None
        )
        is_own = self.logits_processors or self.worker_cls or self.worker_extension_cls
        if policies or is_own or ":" in (self.speculative_config or ""):
            see_own_folder()

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of a front door; what was not given is left to its default."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "model"}
        return {name: value for name, value in given.items() if value is not None}

    def changed(self) -> list[str]:
        """The names of those that were given and are not their default."""
        return [field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]

    def make_engine(self) -> Engine:
        """Not started yet. Raises ConfigError and ModelError."""
        from actorllm.config import EngineConfig
        from actorllm.fleet.fleet_engine import new_engine

        return new_engine(EngineConfig.from_arguments(self.model, **self.arguments()))


@Parameter(name="*")
@with_meanings
@dataclass(frozen=True, kw_only=True)
class SeededEngineFlags(EngineFlags):
    """The same where `--seed` is not that of one request."""

    seed: int | None = None


def check_writable(**paths: Path | None) -> None:
    """Before the work is done, and not after. Raises ConfigError naming the option."""
    for name, path in paths.items():
        if path is not None:
            try:
                path.open("ab").close()
            except OSError as error:
                raise ConfigError(f"{name}={str(path)!r} cannot be written: {error.strerror}") from error


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Sampling parameters; the default of each is what the model's author recommends, else that of SamplingParams."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    """0 is greedy."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, Parameter(consume_multiple=False)] = None
    """A string that ends the text; may be given several times."""
    ignore_eos: bool = False

    def params(self, engine: Engine, default_max_tokens: int, **more: Any) -> SamplingParams:
        """What was asked for, else what the model's author recommends, else default_max_tokens and neutral values."""
        params = engine.default_sampling_params()
        if "max_tokens" not in engine.config.model.sampling_defaults:
            params.max_tokens = default_max_tokens
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                setattr(params, field.name, value)
        for name, value in more.items():
            setattr(params, name, value)
        return params.checked_copy()


class GenerationRun:
    """One request as a command sees it: iterate over its outputs, which hold what is new; then look at the figures."""

    def __init__(self, engine: Engine, prompt: Prompt, params: SamplingParams) -> None:
        from actorllm.actors.engine_thread import ThreadHost

        self._host = ThreadHost()
        self.submitted = time.monotonic()
        self._stream = engine.submit(prompt, params, host=self._host)
        self.first: float | None = None
        """When the first output came, in monotonic seconds."""
        self.num_tokens = 0

    def __iter__(self) -> Iterator[RequestOutput]:
        while True:
            output = self._stream.take()
            if output is None:
                self._host.run_pending(None)
                continue
            if self.first is None:
                self.first = time.monotonic()
            self.num_tokens += len(output.outputs[0].token_ids)
            yield output
            if output.finished:
                return

    def abort(self) -> None:
        self._stream.abort()

    def figures(self, began: float | None = None) -> str:
        """Time to first token (began: also from the start of the engine) and tokens per second, for a person."""
        now = time.monotonic()
        first = now if self.first is None else self.first
        decode_s = now - first
        rate = f"{(self.num_tokens - 1) / decode_s:.0f} tokens/s" if self.num_tokens > 1 and decode_s > 0 else "no rate"
        start = "" if began is None else f" ({first - began:.3f} s from the start of the engine)"
        return f"{self.num_tokens} tokens; first after {first - self.submitted:.3f} s{start}, then {rate}"
