"""Which way a model is run: by the fused forward of its family, or by transformers over our cache.

A family comes first where it knows the architecture and everything that config.json asks for; all else goes to
`transformers_backend`, which refuses by name and with the reason what it cannot run. `model_impl` narrows the choice, as in
vLLM. transformers is imported only where it is needed. A new family is one entry. Called by the runner and `actorllm info`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch

from actorllm.config import ModelConfig
from actorllm.errors import UnsupportedModelError
from actorllm.model.attention import KVCache
from actorllm.model.decoder import Decoder, DecoderConfig
from actorllm.model.inputs import StepInputs
from actorllm.model.llama import llama_config
from actorllm.model.mistral import mistral_config
from actorllm.model.parallel import Ranks
from actorllm.model.qwen2 import qwen2_config
from actorllm.model.qwen3 import qwen3_config
from actorllm.model.weights import CheckpointWeights, DummyWeights

if TYPE_CHECKING:
    from actorllm.model.encoder import EncoderPlan
    from actorllm.model.transformers_backend import TransformersPlan

FAMILIES: dict[str, Callable[[Mapping[str, Any]], DecoderConfig]] = {
    "LlamaForCausalLM": llama_config,
    "MistralForCausalLM": mistral_config,
    "Qwen2ForCausalLM": qwen2_config,
    "Qwen3ForCausalLM": qwen3_config,
}

FAMILY_OF = {f"{name.removesuffix('ForCausalLM')}Model": name for name in FAMILIES}
"""Of models that were saved without a head."""


class CausalLM(Protocol):
    """A loaded model, as the runner sees it. The hidden states between the calls are the model's own."""

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that one decode step reads."""

    @property
    def num_kv_heads(self) -> int:
        """Of this rank."""

    def forward(self, inputs: StepInputs, cache: KVCache) -> torch.Tensor:
        """Hidden states, [num_tokens, hidden_size]; keys and values go to the cache."""

    def select(self, hidden: torch.Tensor, rows: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        """The final hidden states of some rows, [num_rows, hidden_size]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [num_rows, vocab_size] for what `select` returned; the caller may change it."""

    def narrow_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same before they are widened, in the type that the model gives them."""


def decoder_config(architecture: str, hf: Mapping[str, Any]) -> DecoderConfig:
    """The fused decoder that a config.json describes. Raises UnsupportedModelError naming what is missing."""
    architecture = FAMILY_OF.get(architecture, architecture)
    if architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"architecture {architecture!r} has no fused forward; those that have one are {', '.join(FAMILIES)}"
        )
    return FAMILIES[architecture](hf)


def model_plan(model: ModelConfig, hf: dict[str, Any]) -> DecoderConfig | TransformersPlan | EncoderPlan:
    """How the model of a config.json is run. Raises ModelError with the reason why it cannot be."""
    if model.pooler is not None and model.pooler.is_encoder:
        if model.impl == "vllm":
            raise UnsupportedModelError(
                f"architecture {model.architecture!r} has no fused forward; leave model_impl at 'auto'"
            )
        from actorllm.model import encoder

        return encoder.read_plan(model, hf)
    reason: UnsupportedModelError | None = None
    if model.impl != "transformers":
        try:
            plan = decoder_config(model.architecture, hf)
            return plan if model.pooler is None else replace(plan, has_head=False)
        except UnsupportedModelError as error:
            if model.impl == "vllm":
                raise
            if model.architecture in FAMILIES or model.architecture in FAMILY_OF:
                reason = error
    from actorllm.model import transformers_backend

    try:
        return transformers_backend.read_plan(model, hf)
    except UnsupportedModelError as error:
        if reason is None or str(reason) == str(error):
            raise
        raise UnsupportedModelError(f"{reason}; and not through transformers either: {error}") from error


def way_of(plan: DecoderConfig | TransformersPlan | EncoderPlan, model: ModelConfig, hf: dict[str, Any]) -> str:
    """How the model is run, in words, and why not by a fused forward."""
    if isinstance(plan, DecoderConfig):
        return "a fused forward of its own"
    if model.pooler is not None and model.pooler.is_encoder:
        return "transformers, prompts packed and without a cache; its states are checked when it is loaded"
    reason = f"model_impl={model.impl!r}"
    if model.impl != "transformers":
        try:
            decoder_config(model.architecture, hf)
        except UnsupportedModelError as error:
            reason = str(error)
    return f"transformers, over the paged cache ({reason}); its logits are checked when it is loaded"


def check_shares(plan: DecoderConfig | TransformersPlan | EncoderPlan, model: ModelConfig, size: int) -> None:
    """Raises UnsupportedModelError when the model cannot be shared out among so many ranks."""
    if size > 1 and not isinstance(plan, DecoderConfig):
        raise UnsupportedModelError(
            f"tensor_parallel_size={size}: only models with a fused forward can be shared out among ranks, and "
            f"{model.architecture!r} with model_impl={model.impl!r} runs through transformers; set tensor_parallel_size=1"
        )


def load_model(
    plan: DecoderConfig | TransformersPlan | EncoderPlan,
    model: ModelConfig,
    dtype: torch.dtype,
    show_progress: bool | None,
    ranks: Ranks,
) -> CausalLM:
    """The model, or this rank's part of it, with its weights, read or drawn. Raises ModelError."""
    check_shares(plan, model, ranks.size)
    if not isinstance(plan, DecoderConfig):
        if model.pooler is not None and model.pooler.is_encoder:
            from actorllm.model import encoder

            return encoder.load(cast("EncoderPlan", plan), model, dtype, show_progress)
        from actorllm.model import transformers_backend

        return transformers_backend.load(cast("TransformersPlan", plan), model, dtype, show_progress)
    weights = (
        DummyWeights(model.seed, dtype)
        if model.load_format == "dummy"
        else CheckpointWeights(Path(model.path), dtype, show_progress)
    )
    with weights:
        return Decoder(plan, weights, model.max_model_len, ranks)
