"""Encoders of `transformers` (BERT, RoBERTa, DistilBERT ...), whose tokens see all others: packed, and without a cache.

A step is one row of tokens with positions, as for decoders. Our attention (`attention`) keeps prompts
apart, so that nothing is padded and no mask is made. Whole prompts only: `Submit.is_chunkable` is false, and the runner's blocks
are counted but hold nothing. What cannot be run so is refused by name and with the reason. `read_plan` runs the model once on
torch's meta device, and refuses what the structure shows. `load` refuses what only numbers show: it compares the states of two
prompts with those that transformers has for each of them alone. Called by `registry`.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

from actorllm.config import ModelConfig
from actorllm.errors import EngineError
from actorllm.model.cpu.attention import PagedCache
from actorllm.model.hf import own_attention, packing
from actorllm.model.hf.attention import ATTENTION, IGNORED, AttentionStep, attention
from actorllm.model.hf.loading import check_release, check_tensors, drawn, from_checkpoint, read_config, refused
from actorllm.model.hf.own_attention.exchanged import ByDistance
from actorllm.model.inputs import StepInputs
from actorllm.types.pooling_head import Head
from actorllm.types.pooling_params import position_offset
from actorllm.types.quiet_transformers import quiet

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Root mean square difference of states, in their standard deviations. Prompts that are mixed up cost 0.1 and more."""

PROBED = (7, 12)
"""Tokens of the prompts that a loaded model is checked with; a longer one is added where layers look at a window."""

WINDOW_BLOCK = 256
"""Tokens whose window is computed at once: the mask of a prompt has as many rows, and never the whole prompt's."""

KNOWN = IGNORED | {"deterministic"}
"""Arguments of an attention that change nothing here; the last one chooses among kernels."""

Model: Any = AutoModel  # these are not typed
Classifier: Any = AutoModelForSequenceClassification
TokenClassifier: Any = AutoModelForTokenClassification


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
    head: Head | None = None
    """What makes scores of pooled states."""

    @property
    def auto(self) -> Any:
        """The class of transformers that makes the model."""
        if self.head is None:
            return Model
        return TokenClassifier if self.head.is_of_tokens else Classifier


class EncoderStep(AttentionStep):
    """Whole prompts in one row, which do not see each other."""

    def __init__(self, bounds: list[tuple[int, int]]) -> None:
        """bounds: [start, end) of each prompt among the tokens."""
        super().__init__()
        self._bounds = bounds
        self._longest = max((end - start for start, end in bounds), default=0)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        by_distance: ByDistance | None = None,
        **given: Any,
    ) -> torch.Tensor:
        """Padding tokens belong to no prompt, and get zeros.

        sliding_window: a token sees those that are nearer, on both sides. by_distance: what is added to scores.
        """
        unknown = sorted(name for name, value in given.items() if value is not None and name not in KNOWN)
        if unknown or attention_mask is not None:
            raise EngineError(f"its attention takes {unknown[0] if unknown else 'a mask'!r}, which ours does not know")
        out = value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
        for start, end in self._bounds:
            rows = slice(start, end)
            parts = query[:, :, rows], key[:, :, rows], value[:, :, rows]
            if sliding_window is None or end - start <= sliding_window:
                added = None if by_distance is None else by_distance.between(end - start, self._longest)
                attended = functional.scaled_dot_product_attention(*parts, attn_mask=added, scale=scaling)
            else:
                attended = _windowed(*parts, sliding_window, scaling)
            out[:, rows] = attended.transpose(1, 2)
        return out


def _windowed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, scaling: float | None
) -> torch.Tensor:
    """Attention of one prompt, [1, heads, num_tokens, head_dim], in which tokens see those at a distance below `window`."""
    num_tokens = query.shape[2]
    blocks = []
    for first in range(0, num_tokens, WINDOW_BLOCK):
        last = min(first + WINDOW_BLOCK, num_tokens)
        seen = slice(max(0, first - window + 1), min(num_tokens, last + window - 1))
        distance = torch.arange(first, last)[:, None] - torch.arange(seen.start, seen.stop)[None]
        mask = (distance.abs() < window).to(query.device)
        blocks.append(
            functional.scaled_dot_product_attention(
                query[:, :, first:last], key[:, :, seen], value[:, :, seen], attn_mask=mask, scale=scaling
            )
        )
    return torch.cat(blocks, 2)


def read_plan(model: ModelConfig, hf: dict[str, Any]) -> EncoderPlan:
    """How to run the model of this config.json. Raises UnsupportedModelError with the reason, or CorruptModelError."""
    check_release(model.architecture)
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
        head=None if model.pooler is None else model.pooler.head,
    )
    with quiet(), torch.device("meta"), torch.inference_mode():
        try:
            made = plan.auto.from_config(copy.deepcopy(config), attn_implementation=_name(config))
        except Exception as error:
            raise refused(model.architecture, f"it cannot be built: {type(error).__name__}: {error}") from error
        _prepare(made, model.max_model_len)
        Encoder(plan, made)._run(np.zeros(3, np.int64), np.arange(3), [(0, 1), (1, 3)])
    return plan


class EncoderHead:
    """From pooled states to scores, by the modules of transformers around the body."""

    def __init__(self, model: Any, plan: EncoderPlan) -> None:
        """model: with its head. Raises UnsupportedModelError for a head of an unknown form."""
        self._pooler: Any = getattr(model.base_model, "pooler", None)
        self._before: list[Any] = [getattr(model, name) for name in ("pre_classifier", "head") if hasattr(model, name)]
        if self._before and hasattr(model, "pre_classifier"):
            self._before.append(torch.nn.ReLU())
        self._classifier: Any = getattr(model, "classifier", None)
        if self._classifier is None:
            raise refused(plan.architecture, "its head is not named 'classifier'")
        self._takes_prompts = not isinstance(self._classifier, torch.nn.Linear)
        self._dtype = next(self._classifier.parameters()).dtype
        self._is_of_tokens = plan.head is not None and plan.head.is_of_tokens

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """states: float32 [num_states, hidden_size]. Returns float32 [num_states, num_labels]."""
        states = states.to(self._dtype)
        if self._pooler is not None and not self._is_of_tokens:
            states = self._pooler(states.unsqueeze(1))  # prompts of one token: the state that is pooled
        for module in self._before:
            states = module(states)
        scores: torch.Tensor = self._classifier(states.unsqueeze(1) if self._takes_prompts else states)
        return scores.float()


class Encoder:
    """A loaded model with what the runner uses of `decoder.Decoder`'s surface."""

    def __init__(self, plan: EncoderPlan, model: Any) -> None:
        """model: the transformers model; from now on it belongs to this object."""
        model = model.eval().requires_grad_(False)
        self.config = plan
        self.head = None if plan.head is None else EncoderHead(model, plan)
        self.model = model if plan.head is None else model.base_model
        self.dtype: torch.dtype = model.dtype
        parameters = inspect.signature(self.model.forward).parameters
        self._takes_types = "token_type_ids" in parameters and getattr(plan.config, "type_vocab_size", 0) > 1
        if "position_ids" not in parameters:
            raise refused(plan.architecture, "it takes no position_ids")
        embedding = self.model.get_input_embeddings()
        self.num_bytes: int = sum(p.numel() * p.element_size() for p in model.parameters() if p is not embedding.weight)
        """Bytes of weights that one step reads."""

    @property
    def num_kv_heads(self) -> int:
        return self.config.num_kv_heads

    def pack(self) -> None:
        """Give the linear layers the weights in the form that is read fastest. There is no way back."""
        packing.pack(self.model)

    def forward(self, inputs: StepInputs, cache: PagedCache) -> torch.Tensor:
        """The final hidden states, [num_tokens, hidden_size]. The cache stays as it is. Raises ValueError for a part of a
        prompt."""
        if any(inputs.prefill_first) or inputs.num_decodes:
            raise ValueError("an encoder takes whole prompts")
        bounds = [
            (start, start + count) for start, count in zip(inputs.prefill_starts, inputs.prefill_counts, strict=True)
        ]
        types = None
        if any(inputs.pair_starts):
            types = np.zeros(len(inputs.token_ids), np.int64)
            for (start, end), pair_start in zip(bounds, inputs.pair_starts, strict=True):
                if pair_start:
                    types[start + pair_start : end] = 1
        return self._run(inputs.token_ids, inputs.positions, bounds, types)

    def _run(
        self, token_ids: Any, positions: Any, bounds: list[tuple[int, int]], types: Any | None = None
    ) -> torch.Tensor:
        """types: of each token, 1 in the second text of a pair; None: every one is 0."""
        device = self.model.device
        more = {}
        if types is not None:
            if not self._takes_types:
                raise ValueError("the model does not tell the texts of a pair apart")
            more["token_type_ids"] = torch.from_numpy(types).to(device).unsqueeze(0)
        ids, where = torch.from_numpy(token_ids).to(device), torch.from_numpy(positions).to(device)
        step = EncoderStep(bounds)
        try:
            with step.under_way():
                output = self.model(
                    input_ids=ids.unsqueeze(0), position_ids=where.unsqueeze(0) + self.config.position_offset, **more
                )
        except Exception as error:
            raise refused(
                self.config.architecture, f"it cannot be run packed: {type(error).__name__}: {error}"
            ) from error
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


def _name(config: Any) -> str:
    """What a model is built to attend by."""
    return "eager" if config.model_type in own_attention.ENCODERS else ATTENTION


def _prepare(made: Any, max_positions: int) -> None:
    """Let a model that was built attend by ours."""
    if made.config.model_type in own_attention.ENCODERS:
        own_attention.exchange(made, made.config.model_type, max_positions)
        _choose(made, is_stock=False)


def _choose(made: Any, *, is_stock: bool) -> None:
    """is_stock: it attends as transformers does."""
    if made.config.model_type in own_attention.ENCODERS:
        own_attention.choose(made, None if is_stock else attention)
    else:
        made.set_attn_implementation("eager" if is_stock else ATTENTION)


def load(plan: EncoderPlan, model: ModelConfig, dtype: torch.dtype, show_progress: bool | None) -> Encoder:
    """The model with its weights, checked against transformers' own attention. Raises ModelError."""
    with torch.inference_mode(False), torch.no_grad():
        loaded = _read(plan, model, dtype, show_progress)
        _prepare(loaded, model.max_model_len)
        encoder = Encoder(plan, loaded)
    rng = np.random.default_rng(0)
    sizes: tuple[int, ...] = PROBED
    if (window := getattr(plan.config, "sliding_window", None)) is not None:
        sizes = *PROBED, min(2 * int(window) + 3, model.max_model_len)
    prompts = [rng.integers(0, plan.vocab_size, size) for size in sizes]
    if (padding := getattr(plan.config, "pad_token_id", None)) is not None:  # stock models leave it out of positions
        prompts = [np.where(ids == padding, (padding + 1) % plan.vocab_size, ids) for ids in prompts]
    with torch.inference_mode():
        _choose(loaded, is_stock=True)
        asked = [{"input_ids": torch.from_numpy(ids)[None]} for ids in prompts]
        stock = torch.cat([encoder.model(**one).last_hidden_state[0] for one in asked])
        scores = None if encoder.head is None else torch.cat([loaded(**one).logits[0] for one in asked])
        _choose(loaded, is_stock=False)
    if encoder.head is not None and scores is not None:
        _check_head(encoder, prompts, stock, scores)
    _check(encoder, prompts, stock)
    with torch.inference_mode(False), torch.no_grad():
        encoder.pack()
    _check(encoder, prompts, stock)
    return encoder


@torch.inference_mode()
def _check_head(encoder: Encoder, prompts: list[Any], stock: torch.Tensor, scores: torch.Tensor) -> None:
    """stock: states of all prompts; scores: what transformers makes of them, of prompts or of tokens."""
    head, plan = encoder.head, encoder.config
    assert head is not None
    assert plan.head is not None
    states = stock
    if not plan.head.is_of_tokens:
        pool = torch.Tensor.mean if getattr(plan.config, "classifier_pooling", "cls") == "mean" else _first
        parts = torch.split(stock.float(), [len(ids) for ids in prompts])
        states = torch.stack([pool(one, 0) for one in parts])
    found, wanted = head(states.float()), scores.float().reshape(-1, plan.head.size)
    if found.shape != wanted.shape:
        raise refused(plan.architecture, f"its head gives scores of shape {tuple(found.shape)}")
    distance = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
    if not distance <= TOLERANCES[encoder.dtype]:
        raise refused(plan.architecture, f"its scores differ from transformers' own (by {distance:.2g} of the largest)")


def _first(states: torch.Tensor, dim: int) -> torch.Tensor:
    return states.select(dim, 0)


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
        return drawn(plan.auto, plan.config, _name(plan.config), dtype, model.seed)
    loaded, report = from_checkpoint(plan.auto, plan.config, _name(plan.config), dtype, model.path, show_progress)
    parts = {name for name, _ in loaded.named_children()}
    check_tensors(
        model.path,
        # A head that the states were trained with is no part of the model, and a pooler is not used.
        [key for key in report["missing_keys"] if plan.head is not None or not key.startswith("pooler.")],
        [key for key in report["unexpected_keys"] if key.split(".")[0] in parts and not key.endswith("_ids")],
        report["mismatched_keys"],
    )
    return loaded
