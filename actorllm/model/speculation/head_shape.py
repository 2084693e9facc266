"""`HeadShape`: what a head that drafts is made of, as its config.json or that of its target says.

| method | head | input of its first layer, beside the token | logits of |
| --- | --- | --- | --- |
| eagle | EAGLE (arXiv:2401.15077) | the final states of the target, both through `fc` | the head of the target |
| eagle3 | EAGLE-3 (arXiv:2503.01840) | states behind several layers, through `fc` | `lm_head`, over some of the ids (`d2t`) |
| mtp | MiMo (arXiv:2505.07608) | the states behind the last layer, both through `input_proj` | the head of the target |
| mtp | DeepSeek V3 (arXiv:2412.19437) | the final states of the target, both through `eh_proj` | `shared_head`, as the target's |

Names and defaults are those that vLLM reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actorllm.config import EngineConfig, ModelConfig
from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model.families.decoder_config import DecoderConfig, positive
from actorllm.model.registry import decoder_config
from actorllm.model.speculation.draft_shape import model_in
from actorllm.types.draft_head import MTP_LAYERS, head_tree
from actorllm.types.model_files import overridden, read_model_config
from actorllm.types.quantization import GGUF, read_checkpoint
from actorllm.types.speculation import EAGLE, EAGLE3, MTP

ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
"""Of the layers of EAGLE heads."""
MTP_ARCHITECTURES = ("MiMoForCausalLM", "DeepseekV3ForCausalLM")
"""Targets whose layers for further tokens are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpLayout:
    """How a family has a layer for further tokens in its checkpoint, and what that reads."""

    prefix: str
    """What its tensors begin with."""
    joins: str
    """The product that joins state and token, with a norm of each before it, and one behind the layer: names of tensors."""
    hidden_norm: str
    token_norm: str
    norm: str
    has_state_first: bool
    """Of what is joined."""
    reads_normed: bool
    """The states of the target are those behind its final norm."""
    chains_normed: bool
    """The next pass is given the state behind `norm`."""
    head: str | None = None
    """Its own head and embedding, which published checkpoints have as the target has them; None: it has none."""
    embedding: str | None = None
    layer: int | None = None
    """Its number among the layers of the target, which it is like in all; None: it is one of attention and MLP."""


MIMO = MtpLayout(
    prefix="model.mtp_layers.0.",
    joins="input_proj",
    hidden_norm="hidden_layernorm",
    token_norm="token_layernorm",
    norm="final_layernorm",
    has_state_first=True,
    reads_normed=False,
    chains_normed=True,
)


def deepseek(layer: int) -> MtpLayout:
    """layer: number of the first one behind those of the target."""
    prefix = f"model.layers.{layer}."
    return MtpLayout(
        prefix=prefix,
        joins="eh_proj",
        hidden_norm="hnorm",
        token_norm="enorm",
        norm="shared_head.norm",
        has_state_first=False,
        reads_normed=True,
        chains_normed=False,
        head=f"{prefix}shared_head.head",
        embedding=f"{prefix}embed_tokens.weight",
        layer=layer,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """See the module docstring."""

    method: str
    model: ModelConfig
    """Whose files have the tensors."""
    layers: DecoderConfig
    state_size: int
    """Of what a token is given of the target."""
    draft_vocab_size: int
    taps: tuple[int, ...] = ()
    """Behind how many layers of the target its states are taken; empty: behind the last one."""
    norm_before_residual: bool = False
    """What attention adds to is the norm of the state (eagle3)."""
    norm_before_fc: bool = False
    """The states go through one norm before `fc`."""
    has_fc_norms: bool = False
    """The states of each layer go through a norm of their own before `fc`."""
    norm_output: bool = False
    """The next pass is given the final norm of the state (eagle3)."""
    mtp: MtpLayout | None = None

    @property
    def chains_normed(self) -> bool:
        """The next pass is given what logits are made of."""
        return self.norm_output if self.mtp is None else self.mtp.chains_normed


def read_head(config: EngineConfig, target: DecoderConfig) -> HeadShape:
    """Of the configured method. Raises ModelError, naming the folder and what is not supported."""
    assert config.speculation is not None
    if config.speculation.method == MTP:
        return _mtp(config.model, target)
    folder = config.speculation.model
    assert folder is not None
    tree = head_tree(read_model_config(Path(folder)))
    told = f"speculative_config: model={folder!r}"
    try:
        layers, quantization = _layers(tree), _quantization(tree)
        if config.speculation.method == EAGLE:
            shape = _eagle(tree, layers, target)
        else:
            shape = _eagle3(tree, layers, target)
    except (UnsupportedModelError, CorruptModelError) as error:
        raise type(error)(f"{told}: {error}") from error
    return replace(shape, model=replace(model_in(config.model, folder), quantization=quantization))


def _layers(tree: Mapping[str, Any]) -> DecoderConfig:
    names = tree.get("architectures")
    named = str(names[0]) if isinstance(names, list) and names else repr(names)
    architecture = named.removeprefix("Eagle3").removeprefix("Eagle").removesuffix("Eagle3")
    if architecture not in ARCHITECTURES:
        known = " and ".join(ARCHITECTURES)
        raise UnsupportedModelError(
            f"the layers of a head are those of {known}; architecture {named!r} is not supported"
        )
    layers = decoder_config(architecture, tree)
    if any(layers.windows):
        raise UnsupportedModelError("a head with sliding windows is not supported")
    return layers


def _quantization(tree: Mapping[str, Any]) -> str | None:
    """Of a checkpoint's weights. A target that is quantized when it is loaded has a plain head: that costs little."""
    checkpoint = read_checkpoint(tree)
    if checkpoint is None:
        return None
    if checkpoint.method == GGUF:
        raise UnsupportedModelError("a head in a GGUF file is not supported; use one of safetensors")
    return checkpoint.method


def _eagle(tree: Mapping[str, Any], layers: DecoderConfig, target: DecoderConfig) -> HeadShape:
    if layers.hidden_size != target.hidden_size:
        raise CorruptModelError(f"hidden_size={layers.hidden_size} is not that of the target, {target.hidden_size}")
    size = target.vocab_size
    if tree.get("truncated_vocab_size") not in (None, size):
        raise UnsupportedModelError(f"truncated_vocab_size={tree['truncated_vocab_size']!r} is not supported")
    return HeadShape(method=EAGLE, model=_UNKNOWN, layers=layers, state_size=target.hidden_size, draft_vocab_size=size)


def _eagle3(tree: Mapping[str, Any], layers: DecoderConfig, target: DecoderConfig) -> HeadShape:
    own = tree.get("eagle_config") or {}
    if not isinstance(own, Mapping):
        raise CorruptModelError(f"config.json: eagle_config is {own!r:.80}, an object is needed")
    if own.get("use_aux_hidden_state", True) is not True:
        raise UnsupportedModelError(f"use_aux_hidden_state={own['use_aux_hidden_state']!r:.80} is not supported")
    if positive(tree, "target_hidden_size", layers.hidden_size) != target.hidden_size:
        raise CorruptModelError(
            f"target_hidden_size={tree.get('target_hidden_size', layers.hidden_size)} is not that of the target, "
            f"{target.hidden_size}"
        )
    if tree.get("logit_scale", 1.0) != 1.0:
        raise UnsupportedModelError(f"logit_scale={tree['logit_scale']!r} is not supported")
    taps = tree.get("eagle_aux_hidden_state_layer_ids") or own.get("eagle_aux_hidden_state_layer_ids")
    if taps is None:
        taps = [2, target.num_layers // 2, target.num_layers - 3]
    is_list = isinstance(taps, list) and len(taps) > 0 and all(type(tap) is int for tap in taps)
    if not is_list or min(taps) < 0 or max(taps) > target.num_layers:
        raise CorruptModelError(
            f"eagle_aux_hidden_state_layer_ids={taps!r:.80} must be numbers of layers from 0 to {target.num_layers}"
        )
    draft_vocab_size = positive(tree, "draft_vocab_size", layers.vocab_size)
    if draft_vocab_size > target.vocab_size:
        raise CorruptModelError(f"draft_vocab_size={draft_vocab_size} is more than the target has, {target.vocab_size}")
    return HeadShape(
        method=EAGLE3,
        model=_UNKNOWN,
        layers=layers,
        state_size=len(taps) * target.hidden_size,
        draft_vocab_size=draft_vocab_size,
        taps=tuple(taps),
        norm_before_residual=bool(tree.get("norm_before_residual", False)),
        norm_before_fc=bool(own.get("norm_before_fc", tree.get("norm_before_fc", False))),
        has_fc_norms=bool(tree.get("fc_norm", False)),
        norm_output=bool(tree.get("norm_output", False)),
    )


def _mtp(model: ModelConfig, target: DecoderConfig) -> HeadShape:
    told = f"speculative_config (method={MTP!r})"
    if model.architecture not in MTP_ARCHITECTURES:
        known = ", ".join(MTP_ARCHITECTURES)
        raise UnsupportedModelError(
            f"{told} is supported for {known}, not for {model.architecture}; use another method"
        )
    tree = overridden(read_model_config(Path(model.path)), model.overrides)
    if not tree.get(MTP_LAYERS):
        raise UnsupportedModelError(
            f"{told}: config.json has {MTP_LAYERS}={tree.get(MTP_LAYERS)!r}: there is no such layer"
        )
    try:
        quantization = _quantization(tree)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{told}: {error}") from error
    layers, layout = replace(target, num_layers=1, windows=(None,)), MIMO
    if model.architecture != MTP_ARCHITECTURES[0]:
        layout = deepseek(target.num_layers)
        if target.experts is not None:
            layers = replace(layers, experts=replace(target.experts, layers=(True,)))
    return HeadShape(
        method=MTP,
        model=replace(model, quantization=quantization),
        layers=layers,
        state_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
        mtp=layout,
    )


_UNKNOWN: Any = None
