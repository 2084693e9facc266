"""What programs read of vLLM's configuration objects, by vLLM's names: mixins of the parts of `EngineConfig`.

Each says in other words what its part holds already. Whatever only vLLM's own code reads is not here. Nothing is imported before it
is asked for; what needs the model's config.json imports transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from actorllm.types.model_files import overridden, read_model_config, read_object

if TYPE_CHECKING:
    from actorllm.types.drafter import Speculation
    from actorllm.types.encoder_decoder import EncoderDecoder
    from actorllm.types.lent_module import LentModule
    from actorllm.types.media_rules import MediaRules
    from actorllm.types.pooling_params import Pooler


class ModelNames:
    """`vllm_config.model_config`."""

    __slots__ = ()

    if TYPE_CHECKING:
        name: str
        path: str
        tokenizer: str | None
        max_model_len: int
        vocab_size: int
        sampling_defaults: dict[str, Any]
        impl: Literal["auto", "vllm", "transformers"]
        media: MediaRules | None
        encoder_decoder: EncoderDecoder | None
        pooler: Pooler | None
        overrides: dict[str, Any]
        module: LentModule | None

    trust_remote_code = False
    """No code of a model is run."""
    tokenizer_mode = "auto"

    @property
    def model(self) -> str:
        """The folder, where vLLM has what the user gave."""
        return self.path

    @property
    def served_model_name(self) -> str:
        """What the user gave."""
        return self.name

    @property
    def skip_tokenizer_init(self) -> bool:
        """There is no tokenizer."""
        return self.tokenizer is None

    @property
    def runner_type(self) -> str:
        """ "generate", or "pooling" where prompts become vectors."""
        return "generate" if self.pooler is None else "pooling"

    @property
    def max_seq_len_to_capture(self) -> int:
        """As max_model_len; of older releases."""
        return self.max_model_len

    @property
    def is_multimodal_model(self) -> bool:
        """Prompts may have images or audio."""
        return self.media is not None

    @property
    def is_encoder_decoder(self) -> bool:
        """The model has an encoder beside its decoder."""
        return self.encoder_decoder is not None

    @property
    def hf_config(self) -> Any:
        """The configuration as transformers has it, with `overrides`; of a lent module its own. Imports transformers."""
        if self.module is not None:
            return self.module.module.config
        from transformers import AutoConfig

        tree = overridden(read_model_config(Path(self.path)), self.overrides)
        return AutoConfig.for_model(**tree)

    @property
    def hf_text_config(self) -> Any:
        """The part of `hf_config` that is about text."""
        return self.hf_config.get_text_config()

    def get_vocab_size(self) -> int:
        """As `vocab_size`."""
        return self.vocab_size

    def get_hidden_size(self) -> int:
        """How many numbers a state of the model has."""
        return int(self.hf_text_config.hidden_size)

    def get_inputs_embeds_size(self) -> int:
        """How many numbers an embedding of a prompt has."""
        return self.get_hidden_size()

    def get_head_size(self) -> int:
        """How many numbers a head of attention has."""
        text = self.hf_text_config
        return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)

    def get_total_num_kv_heads(self) -> int:
        """Heads of keys and values, of all ranks together."""
        text = self.hf_text_config
        return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)

    def get_num_kv_heads(self, parallel_config: ParallelNames) -> int:
        """The same of one rank.

        Arguments:
            parallel_config: `vllm_config.parallel_config`.
        """
        return max(1, self.get_total_num_kv_heads() // parallel_config.tensor_parallel_size)

    def get_num_attention_heads(self, parallel_config: ParallelNames) -> int:
        """Heads of queries, of one rank.

        Arguments:
            parallel_config: `vllm_config.parallel_config`.
        """
        return int(self.hf_text_config.num_attention_heads) // parallel_config.tensor_parallel_size

    def get_total_num_hidden_layers(self) -> int:
        """Of all stages together."""
        return int(self.hf_text_config.num_hidden_layers)

    def get_num_layers(self, parallel_config: ParallelNames) -> int:
        """Of one of as many equal stages as there are.

        Arguments:
            parallel_config: `vllm_config.parallel_config`.
        """
        return self.get_total_num_hidden_layers() // parallel_config.pipeline_parallel_size

    def get_sliding_window(self) -> int | None:
        """Tokens that a token attends to; None: all before it."""
        window = getattr(self.hf_text_config, "sliding_window", None)
        return None if window is None else int(window)

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """Sampling parameters that the model's folder, or the engine, sets otherwise than vLLM does."""
        return dict(self.sampling_defaults)

    def try_get_generation_config(self) -> dict[str, Any]:
        """generation_config.json as a mapping; empty where there is none."""
        file = Path(self.path) / "generation_config.json"
        return read_object(file) if file.is_file() else {}

    def using_transformers_backend(self) -> bool:
        """The forward of transformers was asked for."""
        return self.impl == "transformers"


class SchedulerNames:
    """`vllm_config.scheduler_config`."""

    __slots__ = ()

    if TYPE_CHECKING:
        depth: Literal[1, 2]
    enable_chunked_prefill = chunked_prefill_enabled = True

    @property
    def async_scheduling(self) -> bool:
        """A step is planned while the one before it runs."""
        return self.depth > 1


class ParallelNames:
    """`vllm_config.parallel_config`."""

    __slots__ = ()

    if TYPE_CHECKING:
        tensor_parallel_size: int
        pipeline_parallel_size: int
    rank = data_parallel_rank = 0
    """Of the process that asks: it holds no ranks."""
    distributed_executor_backend = "mp"


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """What the engine computes on."""

    device: str

    @property
    def device_type(self) -> str:
        """The same."""
        return self.device


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """How weights are read."""

    load_format: str
    download_dir: None = None


class EngineNames:
    """`vllm_config`."""

    __slots__ = ()

    if TYPE_CHECKING:
        model: Any
        speculation: Speculation | None
        device: str
    kv_transfer_config = ec_transfer_config = kv_events_config = None
    """There is no KV outside of the engine."""

    @property
    def speculative_config(self) -> Speculation | None:
        """As `speculation`."""
        return self.speculation

    @property
    def device_config(self) -> DeviceConfig:
        """As `device`."""
        return DeviceConfig(self.device)

    @property
    def load_config(self) -> LoadConfig:
        """As `model.load_format`."""
        return LoadConfig(self.model.load_format)
