"""Which way a model is run: by the fused forward of its family, or by transformers over our cache.

A family comes first where it knows everything that config.json asks for. The backend must know every switch of the shape that
the family makes of it, too. All else goes to `hf`, which refuses by name and with the reason what it cannot run. `model_impl`
narrows the choice, as in vLLM. transformers is imported only where it is needed. A new family is a file and a line of
`FAMILIES`. Called by the runners and `actorllm info`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from actorllm.config import ModelConfig
from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.types.device import rules_of
from actorllm.types.model_files import check_sizes, overridden, read_model_config
from actorllm.types.pooling_head import REWARD_HEADS, SEQUENCE_HEAD, TOKEN_HEAD

if TYPE_CHECKING:
    from actorllm.model.encoder_decoder.cross_plan import EncoderDecoderPlan
    from actorllm.model.hf.encoder import EncoderPlan
    from actorllm.model.hf.plan import TransformersPlan

Plan: TypeAlias = "DecoderConfig | TransformersPlan | EncoderPlan | EncoderDecoderPlan"

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "MiMoForCausalLM": "mimo",
    "Qwen3ForCausalLM": "qwen3",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "Gemma3ForCausalLM": "gemma3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "OlmoeForCausalLM": "olmoe",
    "GptOssForCausalLM": "gpt_oss",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "Mamba2ForCausalLM": "mamba2",
    "GraniteMoeHybridForCausalLM": "granite_hybrid",
    "FalconH1ForCausalLM": "falcon_h1",
    "Qwen3NextForCausalLM": "qwen3_next",
    "MambaForCausalLM": "mamba",
    "FalconMambaForCausalLM": "falcon_mamba",
    "RecurrentGemmaForCausalLM": "recurrent_gemma",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "JambaForCausalLM": "jamba",
    "NemotronHForCausalLM": "nemotron_h",
    "Llama4ForCausalLM": "llama4",
    "Llama4ForConditionalGeneration": "llama4",
}
"""The file of each architecture in `families/`."""

FAMILY_OF = {f"{name.removesuffix('ForCausalLM')}Model": name for name in FAMILIES}
"""Of models that were saved without a head, or with one for labels."""
FAMILY_OF |= {
    f"{name.removesuffix('ForCausalLM')}{head}": name for name in FAMILIES for head in (SEQUENCE_HEAD, TOKEN_HEAD)
}
FAMILY_OF |= dict.fromkeys(REWARD_HEADS, "Qwen2ForCausalLM")
FAMILY_OF["Gemma3TextModel"] = FAMILY_OF.pop("Gemma3Model")  # which takes images


class Backend(Protocol):
    """What a plan depends on of the runner that will carry it out (`runner.ModelRunner`)."""

    name: str
    switches: frozenset[str]
    runs_modules: bool


def decoder_config(architecture: str, hf: Mapping[str, Any]) -> DecoderConfig:
    """The fused decoder that a config.json describes. Raises UnsupportedModelError naming what is missing, CorruptModelError."""
    check_sizes(hf)
    architecture = FAMILY_OF.get(architecture, architecture)
    if architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"architecture {architecture!r} has no fused forward; those that have one are {', '.join(FAMILIES)}"
        )
    family = importlib.import_module(f"actorllm.model.families.{FAMILIES[architecture]}")
    config: DecoderConfig = family.decoder_config(hf)
    return config


def model_plan(model: ModelConfig, hf: dict[str, Any], backend: Backend) -> Plan:
    """How the model of a config.json is run by this backend. Raises ModelError with the reason why it cannot be."""
    is_encoder = model.pooler is not None and model.pooler.is_encoder
    if model.pooler is not None and not rules_of(backend.name).makes_vectors:
        raise UnsupportedModelError(f"device={backend.name!r} makes no vectors of prompts; use device='cpu'")
    if is_encoder and not rules_of(backend.name).encodes:
        raise UnsupportedModelError(
            f"architecture {model.architecture!r} is an encoder, for which device={backend.name!r} has no forward; use "
            f"device='cpu'"
        )
    if model.encoder_decoder is not None:
        check_modules(model.architecture, backend)
        from actorllm.model.encoder_decoder.cross_plan import read_plan

        return read_plan(model, hf)
    reason: UnsupportedModelError | None = None
    if model.impl != "transformers":
        try:
            if is_encoder:
                raise UnsupportedModelError(
                    f"architecture {model.architecture!r} has no fused forward; leave model_impl at 'auto'"
                )
            plan = decoder_config(model.architecture, hf)
            check_switches(plan, model.architecture, backend)
            return plan if model.pooler is None else replace(plan, has_head=False)
        except UnsupportedModelError as error:
            # The fused forward was demanded: its reason is the error.
            if model.impl == "vllm":
                raise
            # Of a known family both reasons are told if transformers cannot run it either.
            if model.architecture in FAMILIES or model.architecture in FAMILY_OF:
                reason = error
    try:
        check_modules(model.architecture, backend)
        if is_encoder:
            from actorllm.model.hf import encoder

            return encoder.read_plan(model, hf)
        from actorllm.model.hf import transformers_backend

        return transformers_backend.read_plan(model, hf)
    except UnsupportedModelError as error:
        if reason is None or str(reason) == str(error):
            raise
        raise UnsupportedModelError(f"{reason}; and not through transformers either: {error}") from error


def check_switches(plan: DecoderConfig, architecture: str, backend: Backend) -> None:
    """Raises UnsupportedModelError, with the names, for switches of a shape that the backend's forward does not know."""
    unknown = sorted(plan.switches - backend.switches)
    if unknown:
        raise UnsupportedModelError(
            f"architecture {architecture!r} needs {', '.join(unknown)}, which the fused forward of device={backend.name!r} does "
            f"not know; leave model_impl at 'auto', which runs it through transformers, or use device='cpu'"
        )


def check_modules(architecture: str, backend: Backend) -> None:
    """Raises UnsupportedModelError for a backend that has no way for models without a fused forward."""
    if not backend.runs_modules:
        raise UnsupportedModelError(
            f"architecture {architecture!r} would run through transformers, which device={backend.name!r} does not; use "
            f"device='cpu'"
        )


def check_plan(plan: Plan, architecture: str, backend: Backend) -> None:
    """Raises UnsupportedModelError for a plan that was made for another backend, and that this one cannot carry out."""
    if isinstance(plan, DecoderConfig):
        check_switches(plan, architecture, backend)
    else:
        check_modules(architecture, backend)


def check_same_model(model: ModelConfig, plan: Plan, backend: Backend) -> None:
    """CorruptModelError: the folder of its version of the weights describes another model than the one that runs.

    A folder without config.json describes none.
    """
    folder = model.weights.folder
    if folder is None or not (Path(folder) / "config.json").is_file():
        return
    hf = overridden(read_model_config(Path(folder)), model.overrides)
    named = hf.get("architectures") or [model.architecture]
    if named[0] != model.architecture or model_plan(model, hf, backend) != plan:
        raise CorruptModelError(
            f"{folder}/config.json describes another model than {model.name!r}, which runs; update it with weights of that model"
        )


def way_of(plan: Plan, model: ModelConfig, hf: dict[str, Any], backend: Backend) -> str:
    """How the model is run, in words, and why not by a fused forward."""
    if isinstance(plan, DecoderConfig):
        return "a fused forward of its own"
    if model.encoder_decoder is not None:
        return "a fused forward of the decoder, beside the encoder of transformers; its logits are checked when it is loaded"
    if model.pooler is not None and model.pooler.is_encoder:
        return "transformers, prompts packed and without a cache; its states are checked when it is loaded"
    reason = f"model_impl={model.impl!r}"
    if model.impl != "transformers":
        try:
            check_switches(decoder_config(model.architecture, hf), model.architecture, backend)
        except UnsupportedModelError as error:
            reason = str(error)
    return f"transformers, over the paged cache ({reason}); its logits are checked when it is loaded"


def check_shares(plan: Plan, model: ModelConfig, size: int, num_stages: int = 1) -> None:
    """Raises UnsupportedModelError when the model cannot be shared out among so many ranks, or stages."""
    if num_stages > 1 and not isinstance(plan, DecoderConfig):
        raise UnsupportedModelError(
            f"pipeline_parallel_size={num_stages}: only models with a fused forward can be cut into stages, and "
            f"{model.architecture!r} with model_impl={model.impl!r} runs through transformers; set pipeline_parallel_size=1"
        )
    if size > 1 and not isinstance(plan, DecoderConfig):
        raise UnsupportedModelError(
            f"tensor_parallel_size={size}: only models with a fused forward can be shared out among ranks, and "
            f"{model.architecture!r} with model_impl={model.impl!r} runs through transformers; set tensor_parallel_size=1"
        )
