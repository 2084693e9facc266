"""Encoders of `transformers` (BERT, RoBERTa, DistilBERT ...), whose tokens see all others: packed, and without a cache.

A step is one row of tokens with positions, as for decoders. Our attention, registered under the name ATTENTION, keeps prompts
apart, so that nothing is padded and no mask is made. Whole prompts only: `Submit.is_chunkable` is false, and the runner's blocks
are counted but hold nothing. What cannot be run so is refused by name and with the reason. `read_plan` runs the model once on
torch's meta device, and refuses what the structure shows. `load` refuses what only numbers show: it compares the states of two
prompts with those that transformers has for each of them alone. Called by `registry`.
"""

from __future__ import annotations

import copy
import inspect
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import AttentionInterface, AutoModel

from actorllm.config import ModelConfig
from actorllm.errors import CorruptModelError, EngineError
from actorllm.model.cpu.attention import KVCache
from actorllm.model.hf import packing
from actorllm.model.hf.transformers_backend import IGNORED, draw_weights, quiet, read_config, refused
from actorllm.model.inputs import StepInputs
from actorllm.model.weights import progress_is_shown, tensor_files
from actorllm.types.pooling_params import position_offset

ATTENTION = "actorllm_encoder"
"""The name of our attention in transformers' AttentionInterface."""

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Root mean square difference of states, in their standard deviations. Prompts that are mixed up cost 0.1 and more."""

PROBED = (7, 12)
"""Tokens of the prompts that a loaded model is checked with."""

Model: Any = AutoModel  # it is not typed


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderPlan:
    """What config.json says; the fields that `DecoderConfig` has too mean the same."""

    config: Any
    """The transformers configuration."""
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    position_offset: int
    """The position of a prompt's first token."""


@dataclass(slots=True)
class EncoderStep:
    """What the attention of every layer needs to know of the step under way."""

    bounds: list[tuple[int, int]]
    """[start, end) of each prompt among the tokens."""
    num_calls: int = 0


_step_under_way: ContextVar[EncoderStep | None] = ContextVar("actorllm_encoder_step", default=None)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer. query: [1, num_heads, num_tokens, width]; key and value alike.

    Returns [1, num_tokens, num_heads, width]. Padding tokens belong to no prompt, and get zeros.
    """
    step = _step_under_way.get()
    if step is None:
        raise EngineError("the packed attention was called outside of a step")
    unknown = sorted(name for name, given in arguments.items() if given is not None and name not in IGNORED)
    if unknown or attention_mask is not None:
        raise EngineError(f"its attention takes {unknown[0] if unknown else 'a mask'!r}, which ours does not know")
    step.num_calls += 1
    out = value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
    for start, end in step.bounds:
        rows = slice(start, end)
        attended = functional.scaled_dot_product_attention(
            query[:, :, rows], key[:, :, rows], value[:, :, rows], scale=scaling
        )
        out[:, rows] = attended.transpose(1, 2)
    return out, None


AttentionInterface.register(ATTENTION, packed_attention)


def read_plan(model: ModelConfig, hf: dict[str, Any]) -> EncoderPlan:
    """How to run the model of this config.json. Raises UnsupportedModelError with the reason, or CorruptModelError."""
    config = read_config(model, hf)
    num_heads, hidden_size = config.num_attention_heads, config.hidden_size
    plan = EncoderPlan(
        config=config,
        architecture=model.architecture,
        vocab_size=config.vocab_size,
        hidden_size=hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=getattr(config, "head_dim", None) or hidden_size // num_heads,
        position_offset=position_offset(hf),
    )
    with quiet(), torch.device("meta"), torch.inference_mode():
        try:
            made = Model.from_config(copy.deepcopy(config), attn_implementation=ATTENTION)
        except Exception as error:
            raise refused(model.architecture, f"it cannot be built: {type(error).__name__}: {error}") from error
        Encoder(plan, made)._run(np.zeros(3, np.int64), np.arange(3), [(0, 1), (1, 3)])
    return plan


class Encoder:
    """A loaded model with what the runner uses of `decoder.Decoder`'s surface."""

    def __init__(self, plan: EncoderPlan, model: Any) -> None:
        """model: the transformers model; from now on it belongs to this object."""
        self.config = plan
        self.model = model.eval().requires_grad_(False)
        self.dtype: torch.dtype = model.dtype
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise refused(plan.architecture, "it takes no position_ids")
        embedding = model.get_input_embeddings()
        self.num_bytes: int = sum(p.numel() * p.element_size() for p in model.parameters() if p is not embedding.weight)
        """Bytes of weights that one step reads."""

    @property
    def num_kv_heads(self) -> int:
        return self.config.num_kv_heads

    def pack(self) -> None:
        """Give the linear layers the weights in the form that is read fastest. There is no way back."""
        packing.pack(self.model)

    def forward(self, inputs: StepInputs, cache: KVCache) -> torch.Tensor:
        """The final hidden states, [num_tokens, hidden_size]. The cache stays as it is. Raises ValueError for a part of a
        prompt."""
        if any(inputs.prefill_first) or inputs.num_decodes:
            raise ValueError("an encoder takes whole prompts")
        bounds = [
            (start, start + count) for start, count in zip(inputs.prefill_starts, inputs.prefill_counts, strict=True)
        ]
        return self._run(inputs.token_ids, inputs.positions, bounds)

    def _run(self, token_ids: Any, positions: Any, bounds: list[tuple[int, int]]) -> torch.Tensor:
        device = self.model.device
        ids, where = torch.from_numpy(token_ids).to(device), torch.from_numpy(positions).to(device)
        step = EncoderStep(bounds)
        token = _step_under_way.set(step)
        try:
            output = self.model(
                input_ids=ids.unsqueeze(0), position_ids=where.unsqueeze(0) + self.config.position_offset
            )
        except Exception as error:
            raise refused(
                self.config.architecture, f"it cannot be run packed: {type(error).__name__}: {error}"
            ) from error
        finally:
            _step_under_way.reset(token)
        if step.num_calls != self.config.num_layers:
            raise refused(
                self.config.architecture,
                f"it calls our attention {step.num_calls} times in one step, for {self.config.num_layers} layers",
            )
        states: torch.Tensor = output.last_hidden_state[0]
        return states

    def select(self, hidden: torch.Tensor, rows: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        """The final hidden states of some rows, [num_rows, hidden_size]."""
        return hidden.index_select(0, torch.from_numpy(rows))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise EngineError("an encoder has no logits")

    def narrow_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise EngineError("an encoder has no logits")


def load(plan: EncoderPlan, model: ModelConfig, dtype: torch.dtype, show_progress: bool | None) -> Encoder:
    """The model with its weights, checked against transformers' own attention. Raises ModelError."""
    with torch.inference_mode(False), torch.no_grad():
        loaded = _read(plan, model, dtype, show_progress)
        encoder = Encoder(plan, loaded)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, plan.vocab_size, size) for size in PROBED]
    if (padding := getattr(plan.config, "pad_token_id", None)) is not None:  # stock models leave it out of positions
        prompts = [np.where(ids == padding, (padding + 1) % plan.vocab_size, ids) for ids in prompts]
    with torch.inference_mode():
        loaded.set_attn_implementation("eager")
        stock = torch.cat([loaded(input_ids=torch.from_numpy(ids)[None]).last_hidden_state[0] for ids in prompts])
        loaded.set_attn_implementation(ATTENTION)
    _check(encoder, prompts, stock)
    with torch.inference_mode(False), torch.no_grad():
        encoder.pack()
    _check(encoder, prompts, stock)
    return encoder


@torch.inference_mode()
def _check(encoder: Encoder, prompts: list[Any], stock: torch.Tensor) -> None:
    ends = np.cumsum([len(ids) for ids in prompts]).tolist()
    bounds = list(zip([0, *ends], ends, strict=False))
    positions = np.concatenate([np.arange(len(ids)) for ids in prompts])
    states = encoder._run(np.concatenate(prompts), positions, bounds).float()
    distance = float((states - stock.float()).square().mean().sqrt() / stock.float().std().clamp_min(1e-30))
    if not distance <= TOLERANCES[encoder.dtype]:
        raise refused(
            encoder.config.architecture,
            f"packed, its states differ from transformers' own (by {distance:.2g} standard deviations)",
        )


def _read(plan: EncoderPlan, model: ModelConfig, dtype: torch.dtype, show_progress: bool | None) -> Any:
    if model.load_format == "dummy":
        with quiet(), torch.random.fork_rng(devices=[]):
            made = Model.from_config(copy.deepcopy(plan.config), dtype=dtype, attn_implementation=ATTENTION)
        draw_weights(made, model.seed)
        return made
    tensor_files(Path(model.path))  # raises what is wrong with the files
    with quiet(shows_progress=progress_is_shown(show_progress)):
        try:
            loaded, found = Model.from_pretrained(
                model.path,
                config=copy.deepcopy(plan.config),
                dtype=dtype,
                attn_implementation=ATTENTION,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # they are in the loading info, by name
                output_loading_info=True,
            )
        except Exception as error:
            raise CorruptModelError(f"{model.path}: the weights cannot be loaded: {error}") from error
    # A head that the states were trained with is no part of the model, and a pooler is not used.
    missing = sorted(key for key in found["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise CorruptModelError(f"{model.path} has no tensor {missing[0]!r}, which this architecture needs")
    parts = {name for name, _ in loaded.named_children()}
    unexpected = sorted(
        key for key in found["unexpected_keys"] if key.split(".")[0] in parts and not key.endswith("_ids")
    )
    if unexpected:
        raise CorruptModelError(
            f"{model.path} has a tensor {unexpected[0]!r} that this architecture does not know: config.json describes "
            f"another model"
        )
    if found["mismatched_keys"]:
        name, shape, wanted = min(found["mismatched_keys"])
        raise CorruptModelError(
            f"{model.path}: tensor {name!r} has shape {tuple(shape)}, config.json asks for {tuple(wanted)}"
        )
    return loaded
