"""Any decoder of `transformers`, run over our paged KV cache: the way in for models without a fused forward.

`read_plan` says from config.json alone whether a model can be served and what its attention looks like. The model is built
without memory (torch's meta device) and run once with an attention that only takes notes. `TransformersDecoder` is the
model itself with our attention (`attention`). The whole step is one row of tokens with positions. What a layer may look at was
read off its mask function, not off what it says.

Served is what keeps all its state in keys and values, attends once per layer and step, causally or in a sliding window.
Everything else is refused by name and with the reason (UnsupportedModelError). The plan refuses where the structure shows it,
`probe` on the loaded model where only the logits do. No code of a model's folder is ever run.

Called by `registry`, under its guarantee that transformers is imported only where it is needed.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.import_utils import is_accelerate_available

from actorllm.config import ModelConfig
from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model.adapters.slots import AdapterSlots
from actorllm.model.cpu.attention import AttentionBatch, KVCache, PagedCache, Scoring
from actorllm.model.cpu.layers import linear
from actorllm.model.embeds import later_rows, place_rows
from actorllm.model.hf import adapting, own_attention, packing
from actorllm.model.hf.attention import ATTENTION, IGNORED, AttentionStep, attention
from actorllm.model.hf.loading import (
    LANGUAGE_PARTS,
    built,
    check_release,
    check_tensors,
    drawn,
    from_checkpoint,
    from_tensors,
    read_config,
    refused,
)
from actorllm.model.hf.own_attention.exchanged import AttentionFunction, ExchangedAttention
from actorllm.model.hf.plan import TracedLayer, TransformersPlan
from actorllm.model.hf.probe import PROBED_POSITIONS
from actorllm.model.hf.stored_layers import StoredTensors, read_stored
from actorllm.model.hf.twin import twin
from actorllm.model.inputs import StepInputs
from actorllm.model.linear import Form, Linear, LinearWeight
from actorllm.model.linear.dense import Dense
from actorllm.model.quantization import form_of
from actorllm.model.quantization.checkpoint import CheckpointForm
from actorllm.model.weights import UPDATE, tensors_of_version
from actorllm.types.encoder_decoder import ARCHITECTURES as ENCODER_DECODERS
from actorllm.types.media_rules import ARCHITECTURES
from actorllm.types.quiet_transformers import quiet

logger = logging.getLogger(__name__)

TRACE = "actorllm_trace"
"""The name of the attention that takes notes, in transformers' AttentionInterface."""

LAYER_TYPES = {"full_attention", "sliding_attention"}

NO_INTERFACE = "its attention does not go through transformers' AttentionInterface"

TRACED_TOKENS = 5

MEDIA_PARTS = ("vision_config", "audio_config")
"""What config.json has of models that take more than text."""


def _auto(config: Any) -> Any:
    """The class of transformers that makes the model."""
    parts = [getattr(config, name, None) for name in MEDIA_PARTS]
    # Older releases have no such class. This module has to be imported there to say which release is needed.
    return AutoModelForCausalLM if parts == [None, None] else transformers.AutoModelForMultimodalLM


def read_plan(model: ModelConfig, hf: dict[str, Any]) -> TransformersPlan:
    """How to run the model of this config.json, or the application's module.

    Raises UnsupportedModelError with the reason, or CorruptModelError.
    """
    architecture = model.architecture
    check_release(architecture)
    if model.module is None:
        config = read_config(model, hf, takes_quantized=not any(hf.get(part) for part in MEDIA_PARTS))
        _check_config(config, architecture)
        traced = _without_weights(config, model)
    else:
        traced = _twin_to_trace(model.module.module, architecture)
        config = traced.config
        _check_config(config, architecture)
    freeze_rope(traced, model.max_model_len)
    if architecture in own_attention.ARCHITECTURES:
        own_attention.exchange(traced, architecture, max(model.max_model_len, PROBED_POSITIONS))
        own_attention.choose(traced, _note_attention)
    trace = _trace(traced, architecture)
    num_heads, num_kv_heads, head_dim = _cached_shape({call.shape for call in trace.calls}, architecture)
    names = {id(module): name for name, module in traced.named_modules()}
    return TransformersPlan(
        config=config,
        architecture=architecture,
        vocab_size=trace.vocab_size,
        hidden_size=trace.hidden_size,
        num_layers=len(trace.calls),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=tuple(
            TracedLayer(names[id(call.module)], _window(call, architecture, model.max_model_len))
            for call in trace.calls
        ),
        body=trace.body,
        max_positions=model.max_model_len,
        scores_positions=any(call.arguments.get("by_position") is not None for call in trace.calls),
    )


def _cached_shape(shapes: set[tuple[int, int, int, int]], architecture: str) -> tuple[int, int, int]:
    """Query heads, and of the cache key/value heads and width, both the most that a layer has.

    Other layers repeat heads, and have zeros behind them.

    shapes: of all layers, as `AttentionCall` has them. Raises UnsupportedModelError.
    """
    num_heads, num_kv_heads = {shape[0] for shape in shapes}, {shape[1] for shape in shapes}
    most = max(num_kv_heads)
    if len(num_heads) > 1 or any(most % count for count in num_kv_heads):
        raise refused(architecture, f"its layers differ in (query heads, key/value heads, widths): {sorted(shapes)}")
    return num_heads.pop(), most, max(max(shape[2:]) for shape in shapes)


def _without_weights(config: Any, model: ModelConfig) -> Any:
    name = "eager" if model.architecture in own_attention.ARCHITECTURES else TRACE
    with quiet(), torch.device("meta"):
        try:
            return _auto(config).from_config(config, attn_implementation=name, dtype=torch.bfloat16).eval()
        except Exception as error:
            if TRACE in str(error):  # it chooses its attention from a list of its own
                raise refused(model.architecture, NO_INTERFACE) from error
            raise CorruptModelError(
                f"{model.path}/config.json: {model.architecture} cannot be built: {error}"
            ) from error


def _twin_to_trace(module: Any, architecture: str) -> Any:
    traced = twin(module, on_meta=True)
    if architecture in own_attention.ARCHITECTURES:
        return traced
    try:
        with quiet():
            traced.set_attn_implementation(TRACE)
    except Exception as error:  # of a class that chooses its attention from a list of its own
        raise refused(architecture, NO_INTERFACE) from error
    return traced


# The configuration ----------------------------------------------------------------------------------------------------


def _check_config(config: Any, architecture: str) -> None:
    """What needs no look at the model."""
    if getattr(config, "is_encoder_decoder", False):
        raise refused(
            architecture, f"it is an encoder with a decoder; of such models served are {', '.join(ENCODER_DECODERS)}"
        )
    parts = [name for name in MEDIA_PARTS if getattr(config, name, None) is not None]
    if parts and architecture in ARCHITECTURES:
        return
    if parts:
        raise refused(
            architecture,
            f"it takes more than text (config.json has {parts[0]}); of such models served are {', '.join(ARCHITECTURES)}",
        )
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    classes = () if known is None else (known,) if isinstance(known, str) else tuple(known)
    if architecture not in classes:
        instead = f"; of model_type {config.model_type!r}, {' and '.join(classes)} would be" if classes else ""
        raise refused(architecture, f"it is no decoder for text generation{instead}")
    unknown = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if unknown:
        raise refused(
            architecture, f"it has layers of type {sorted(unknown)[0]!r}; only full and sliding attention are served"
        )


# The trace ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class AttentionCall:
    """One call of attention."""

    module: torch.nn.Module
    shape: tuple[int, int, int, int]
    """Query heads, key/value heads, width of keys, width of values."""
    mask: Any
    """The mask function of transformers' `masking_utils`, or None if the mask was made in another way."""
    arguments: dict[str, Any]


@dataclass(slots=True)
class ForwardTrace:
    """The notes of one forward."""

    calls: list[AttentionCall] = field(default_factory=list)
    body: str = ""
    hidden_size: int = 0
    vocab_size: int = 0
    masks: dict[int, tuple[torch.Tensor, Any]] = field(default_factory=dict)
    """Each mask, and the function of transformers' `masking_utils` that it was made of; by the address of its storage."""


_trace_under_way: ContextVar[ForwardTrace | None] = ContextVar("actorllm_trace", default=None)


def _note_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    trace = _trace_under_way.get()
    assert trace is not None
    mask = None if attention_mask is None else trace.masks.get(attention_mask.untyped_storage()._cdata)
    function = None if mask is None else mask[1]
    shape = (query.shape[1], key.shape[1], key.shape[3], value.shape[3])
    trace.calls.append(AttentionCall(module, shape, function, arguments))
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


def _note_mask(*, q_length: int, kv_length: int, mask_function: Any, **_: Any) -> torch.Tensor:
    """A mask without values, whose parts are known by its storage."""
    trace = _trace_under_way.get()
    assert trace is not None
    mask = torch.empty(1, 1, q_length, kv_length, device="meta")
    trace.masks[mask.untyped_storage()._cdata] = mask, mask_function
    return mask


@torch.inference_mode()
def _trace(model: Any, architecture: str) -> ForwardTrace:
    """One forward on the meta device. Raises UnsupportedModelError."""
    trace = ForwardTrace()
    depth = 0
    names = {id(module): name for name, module in model.named_modules()}

    def enter(module: torch.nn.Module, _: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(module: torch.nn.Module, _: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 1 and not trace.body:  # the first thing that the outermost module calls
            trace.body, trace.hidden_size = names[id(module)], _hidden(output).shape[-1]

    hooks = [h for m in model.modules() for h in (m.register_forward_pre_hook(enter), m.register_forward_hook(leave))]
    token = _trace_under_way.set(trace)
    failure: Exception | None = None
    try:
        # A mask of ones keeps transformers from searching the positions for packed sequences, which needs their values.
        with quiet(), torch.device("meta"):
            ids = torch.zeros(1, TRACED_TOKENS, dtype=torch.long)
            output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        trace.vocab_size = output.logits.shape[-1]
        trace.body = _language_part(model) or trace.body
    except Exception as error:  # of modules of another library; raised behind the clean-up
        failure = error
    finally:
        _trace_under_way.reset(token)
        for hook in hooks:
            hook.remove()
    _check_trace(trace, model, architecture, failure)
    return trace


def _language_part(model: Any) -> str | None:
    """The path of the decoder within a model that takes more than text; None: the model takes text."""
    inner = getattr(model, "model", None)
    name = next((name for name in LANGUAGE_PARTS if getattr(inner, name, None) is not None), None)
    return None if name is None else f"model.{name}"


def _hidden(output: Any) -> torch.Tensor:
    hidden: torch.Tensor = output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]
    return hidden


def _check_trace(trace: ForwardTrace, model: Any, architecture: str, failure: Exception | None) -> None:
    calls = trace.calls
    if not calls and failure is None:
        raise refused(architecture, NO_INTERFACE)
    if not calls and not model._supports_attention_backend:
        raise refused(architecture, f"{NO_INTERFACE}, or it fails before ({type(failure).__name__}: {failure})")
    if failure is not None:
        raise refused(architecture, f"its forward depends on more than shapes: {type(failure).__name__}: {failure}")
    num_modules, num_layers = len({id(call.module) for call in calls}), model.config.get_text_config().num_hidden_layers
    # The cache has room for the keys and values of one call per layer and step.
    if len(calls) != num_modules:
        raise refused(architecture, f"its {num_modules} attention modules are called {len(calls)} times in one step")
    if len(calls) != num_layers:
        raise refused(architecture, f"it calls attention {len(calls)} times in one step, for {num_layers} layers")
    for call in calls:
        given = {name for name, value in call.arguments.items() if value is not None}
        unknown = given - IGNORED - {"scaling", "sliding_window", "softcap", "s_aux", "by_position"}
        if unknown:
            raise refused(architecture, f"its attention takes {sorted(unknown)[0]!r}, which ours does not know")
        if not isinstance(call.arguments.get("scaling"), float | int | None):
            raise refused(architecture, "the scale of its scores is computed in every step")
    if isinstance(calls[0].module, ExchangedAttention):
        return  # which looks at positions by itself where its model does not
    if "position_ids" not in inspect.signature(model.get_submodule(trace.body).forward).parameters:
        raise refused(architecture, f"its {trace.body} takes no position_ids")


def _window(call: AttentionCall, architecture: str, max_positions: int) -> int | None:
    """What a layer sees, read off its mask at some positions. Raises UnsupportedModelError for any other pattern."""
    if isinstance(call.module, ExchangedAttention):
        window = call.module.window
        return window if window is not None and window < max_positions else None
    if call.mask is None:
        raise refused(architecture, "its attention mask is not one that transformers makes for all models")
    windows = set()
    for query in sorted(
        {max_positions - 1, max_positions - 2, max_positions // 2, max_positions // 3, 1, 0} - {-1, -2}
    ):
        keys = torch.arange(query + 2)
        zero, at = torch.tensor(0), torch.tensor(query)
        visible = torch.as_tensor(call.mask(zero, zero, at, keys)).expand(len(keys))
        seen = int(visible.sum())
        if not seen or visible[-1] or not visible[query + 1 - seen : query + 1].all():
            raise refused(architecture, "one of its layers is neither causal nor causal in a sliding window")
        windows.add((query + 1, seen))
    window = max(seen for _, seen in windows)
    if any(seen != min(length, window) for length, seen in windows):
        raise refused(architecture, "one of its layers attends within chunks, not in a sliding window")
    return window if window < max_positions else None


# The model ------------------------------------------------------------------------------------------------------------


class TransformersStep(AttentionStep):
    """A step over the paged cache of the CPU."""

    def __init__(
        self,
        batches: dict[int | None, AttentionBatch],
        layers: dict[int, tuple[int, int | None]],
        cache: PagedCache,
        between_layers: Callable[[], object] = bool,
    ) -> None:
        """batches: by sliding window. layers: index and window, by the identity of the calling module."""
        super().__init__()
        self._between_layers = between_layers
        self._batches, self._layers = batches, layers
        self._num_kv_heads, self._head_dim, self._dtype = cache.num_kv_heads, cache.head_dim, cache.dtype

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        by_position: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        self._between_layers()
        index, window = self._layers[id(module)]
        width, out_width = query.shape[3], value.shape[3]
        query = widened(query[0], self._head_dim, self._dtype)
        key, value = (repeated(widened(x[0], self._head_dim, self._dtype), self._num_kv_heads) for x in (key, value))
        scoring = Scoring(scaling if scaling is not None else width**-0.5, softcap, s_aux, by_position)
        key_value = torch.cat((key, value)).transpose(0, 1)  # [num_tokens, 2 * num_kv_heads, head_dim]
        out = self._batches[window].attend(index, query.transpose(0, 1), key_value, scoring)
        return out.view(1, query.shape[1], query.shape[0], self._head_dim)[..., :out_width]


def widened(heads: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Heads in the type and, filled up with zeros, the width of the cache."""
    heads = heads.to(dtype)
    return heads if heads.shape[-1] == width else functional.pad(heads, (0, width - heads.shape[-1]))


def repeated(heads: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Heads of keys or values, [heads of a layer, ...], as so many: each stands for the next queries that it is of."""
    return heads if len(heads) == num_heads else heads.repeat_interleave(num_heads // len(heads), 0)


AttentionInterface.register(TRACE, _note_attention)
AttentionMaskInterface.register(TRACE, _note_mask)


class Given(torch.nn.Module):
    """Stands in for the body of a model whose hidden states are known, so that only the head is computed."""

    output: Any

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output


class KnownStates(tuple[torch.Tensor]):
    """What a model gets for the output of all that is before its head; other fields that it asks for are None."""

    __slots__ = ()

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class Absent(torch.nn.Module):
    """Stands in for a tower, which is asked where it is even when it is not called."""

    device = torch.device("cpu")


class TransformersDecoder:
    """A loaded model with the surface of `decoder.Decoder`, and that of `probe.Probed`."""

    probed_block_size = 4

    def __init__(self, plan: TransformersPlan, model: Any) -> None:
        """model: the transformers model, loaded; from now on it belongs to this object. Its parameters may be another's."""
        self.config = plan
        self.model = model.eval()
        self.dtype: torch.dtype = model.dtype
        freeze_rope(model, plan.max_positions)
        if plan.architecture in own_attention.ARCHITECTURES:
            own_attention.exchange(model, plan.architecture, max(plan.max_positions, PROBED_POSITIONS))
        self._attend_by(attention)
        self.layers = {id(model.get_submodule(y.module)): (i, y.window) for i, y in enumerate(plan.layers)}
        self._body = model.get_submodule(plan.body)
        self._given = Given()
        self._output_kind: Callable[..., Any] | None = None
        """Makes what the body returns of hidden states; known once the body has run."""
        is_outermost = _language_part(model) is None
        self._head_path = plan.body.split(".") if is_outermost else ["model"]
        """Of what is before the head: of models that take more than text, all that holds the body."""
        self._head = _with_part(model, self._head_path, self._given)
        if not is_outermost:
            self._output_kind = lambda last_hidden_state: KnownStates((last_hidden_state,))
        self._keeps_output_kind = not is_outermost
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        is_tied = head is not None and head.weight is embedding.weight
        tensors = [p for p in model.parameters() if is_tied or p is not embedding.weight]
        self._adapters: AdapterSlots | None = None
        self.stored: dict[str, LinearWeight] = {}
        """Layers as a quantized checkpoint has them, by the names of modules; until they are packed."""
        self.num_bytes: int = sum(p.numel() * p.element_size() for p in tensors)
        """Bytes of weights that one decode step reads, experts that are not chosen included."""

    def pack(self, form: Form = Dense, make: Callable[[LinearWeight], Linear] = linear) -> None:
        """Give the linear layers the weights in this form, as it is read fastest. There is no way back.

        form: of what is not `stored`. make: what computes with a weight.
        """
        self.num_bytes -= packing.pack(self.model, form, make, self.stored)
        self.stored = {}
        self._head = _with_part(self.model, self._head_path, self._given)

    def adapt(self, slots: AdapterSlots) -> None:
        """Let the packed layers be adapted; slots of another decoder of the same model go over to this one."""
        if slots.targets:
            adapting.adapt_again(self.model, slots)
        else:
            adapting.adapt(self, self._body, slots)
        self._adapters = slots

    @property
    def num_kv_heads(self) -> int:
        return self.config.num_kv_heads

    def forward(self, inputs: StepInputs, cache: PagedCache) -> torch.Tensor:
        """The hidden states before the head, [num_tokens, hidden_size]; keys and values go to the cache."""
        fold = self.config.num_heads // self.config.num_kv_heads
        batches = cache.attention(inputs, fold, dict.fromkeys(window for _, window in self.layers.values()))
        step = TransformersStep(batches, self.layers, cache, inputs.between_layers)
        if self._adapters is not None:
            self._adapters.begin(inputs)
        grid = inputs.grid_positions
        positions = torch.from_numpy(inputs.positions if grid is None else grid[:, None])
        return self.run_body(step, self._tokens(inputs), positions.unsqueeze(0) if grid is None else positions)

    def run_body(self, step: AttentionStep, tokens: dict[str, Any], positions: torch.Tensor) -> torch.Tensor:
        """What the model makes of one row of tokens, [num_tokens, hidden_size].

        tokens: arguments of the model's body. positions: [1, num_tokens], or on three axes [3, 1, num_tokens].
        """
        with step.under_way():
            output = self._body(**tokens, position_ids=positions, use_cache=False)
        step.check_calls(self.config.num_layers)
        if not self._keeps_output_kind:
            self._output_kind = type(output) if hasattr(output, "last_hidden_state") else None
        return _hidden(output)[0]

    def _tokens(self, inputs: StepInputs) -> dict[str, Any]:
        """The ids of a step, [1, num_tokens], or their embeddings where a prompt brought some of them.

        Then with what their rows add to the states of the first layers (Qwen3-VL).
        """
        ids = torch.from_numpy(inputs.token_ids).unsqueeze(0)
        if inputs.embedded is None:
            return {"input_ids": ids}
        embedded = self.embed(ids)
        place_rows(embedded[0], inputs)
        given: dict[str, Any] = {"inputs_embeds": embedded}
        if later := later_rows(inputs, embedded.shape[2], embedded.dtype):
            is_placed = torch.zeros(1, embedded.shape[1], dtype=torch.bool)
            is_placed[0, torch.from_numpy(inputs.embedded)] = True
            given |= {"visual_pos_masks": is_placed, "deepstack_visual_embeds": later}
        return given

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """What the model makes of ids, [..., embedding_size], before anything that it does to embeddings as well."""
        embedded: torch.Tensor = self.model.get_input_embeddings()(ids)
        return embedded

    def select(self, hidden: torch.Tensor, rows: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        """The final hidden states of some rows, [num_rows, hidden_size]."""
        return hidden.index_select(0, torch.from_numpy(rows))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [num_rows, vocab_size] for what `select` returned: the model's own head, with its caps and scales."""
        return self.narrow_logits(hidden).float().contiguous()

    def narrow_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same in the type that the model gives them."""
        states = hidden.unsqueeze(0)
        self._given.output = (states,) if self._output_kind is None else self._output_kind(last_hidden_state=states)
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        logits: torch.Tensor = self._head(input_ids=ids, use_cache=False).logits[0]
        del self._given.output
        return logits

    def place(self, ids: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(ids)

    def new_cache(self, num_blocks: int) -> KVCache:
        plan = self.config
        size = self.probed_block_size
        return KVCache(plan.num_layers, plan.num_kv_heads, plan.head_dim, num_blocks, size, self.dtype)

    @contextlib.contextmanager
    def stock(self) -> Iterator[Any]:
        """The model with transformers' own attention, meanwhile."""
        self._attend_by(None)
        try:
            yield self.model
        finally:
            self._attend_by(attention)

    def _attend_by(self, function: AttentionFunction | None) -> None:
        """function: `attention`; None: transformers' own."""
        if self.config.architecture in own_attention.ARCHITECTURES:
            own_attention.choose(self.model, function)
            return
        with quiet():  # it warns of parts that are not there, such as the tower of a model that takes images
            self.model.set_attn_implementation("eager" if function is None else ATTENTION)


def _with_part(module: torch.nn.Module, path: list[str], part: torch.nn.Module) -> torch.nn.Module:
    """A copy that shares everything with the module but the part at this path."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    below = module._modules[path[0]]
    assert below is not None
    twin._modules[path[0]] = _with_part(below, path[1:], part) if len(path) > 1 else part
    return twin


def freeze_rope(model: Any, max_positions: int) -> None:
    """Fix rotary frequencies that transformers would choose anew in every step, by the longest row of the batch.

    A row's result must not depend on its neighbours. longrope: the long factors if sequences may get longer than the
    original length, as vLLM does. dynamic: sequences do not get longer than max_position_embeddings, where it begins.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if not isinstance(kinds, str | dict):
            continue
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        frozen = {}
        for layer_type, kind in by_layer.items():
            frozen[layer_type] = "frozen" if kind == "longrope" or "dynamic" in kind else kind
            if kind == "longrope":
                _freeze_longrope(module, layer_type, max_positions)
        module.rope_type = frozen if isinstance(kinds, dict) else frozen[None]


def _freeze_longrope(module: Any, layer_type: str | None, max_positions: int) -> None:
    parameters = module.config.rope_parameters
    original = (parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"]
    if max_positions > original:
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        of_layer = {} if layer_type is None else {"layer_type": layer_type}
        buffer = getattr(module, name)
        frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, buffer.device, seq_len=original + 1, **of_layer)
        buffer.copy_(frequencies)


# Weights --------------------------------------------------------------------------------------------------------------


def load(
    plan: TransformersPlan,
    model: ModelConfig,
    dtype: torch.dtype,
    show_progress: bool | None,
    adapters: AdapterSlots | None = None,
) -> TransformersDecoder:
    """The model with its weights on the CPU, checked against transformers' own attention. Raises ModelError.

    adapters: empty ones, which the linear layers are to have; None: they are not adapted, or later.
    The parameters of a module that the application owns stay where they are, in the form that they have.
    """
    from actorllm.model.hf.media_probe import probe_media
    from actorllm.model.hf.probe import probe, probe_embeds

    if model.module is None:
        decoder = _packed(plan, model, dtype, show_progress)
    else:
        with torch.inference_mode(False), torch.no_grad():
            decoder = TransformersDecoder(plan, twin(model.module.module))
        probe(decoder)
    if model.prompt_embedding_size is not None:
        probe_embeds(decoder, model.prompt_embedding_size)
    if model.media is not None:
        probe_media(decoder, model.media)
    if adapters is not None:
        decoder.adapt(adapters)
    return decoder


def _packed(
    plan: TransformersPlan, model: ModelConfig, dtype: torch.dtype, show_progress: bool | None
) -> TransformersDecoder:
    """The model of a folder, with its linear layers in the form that is read fastest where they can be."""
    from actorllm.model.hf.probe import check, check_quantized, probe

    decoder = load_unchecked(plan, model, dtype, show_progress)
    stock = probe(decoder)
    if model.quantization is not None:
        with torch.inference_mode(False), torch.no_grad():
            decoder.pack(form_of(model))
        check_quantized(decoder, stock, model.quantization)
        return decoder
    try:
        with torch.inference_mode(False), torch.no_grad():
            decoder.pack()
        check(decoder, stock)
    except UnsupportedModelError as error:  # something in it looks at the weights of a linear layer
        logger.warning("the linear layers stay as transformers has them: %s", error)
        del decoder
        decoder = load_unchecked(plan, model, dtype, show_progress)
    return decoder


def load_unchecked(
    plan: TransformersPlan,
    model: ModelConfig,
    dtype: torch.dtype,
    show_progress: bool | None,
    device: torch.device | None = None,
) -> TransformersDecoder:
    """The model with its weights; what it computes with them is not checked yet. Raises ModelError.

    device: where they are wanted; None: on the CPU, where floats of 8 bits become integers. transformers reads to another device
    only by `accelerate`; without it, every tensor is read to the CPU and then moved. So are those of quantized checkpoints.
    """
    form = form_of(model, keeps_floats=device is not None)
    stored = StoredTensors()
    # Weights must be ordinary tensors: views of inference tensors cannot be made outside of inference mode.
    with torch.inference_mode(False), torch.no_grad():
        if isinstance(form, CheckpointForm):
            if not model.weights.is_first:
                raise UnsupportedModelError(
                    f"the weights of {model.name}, a quantized checkpoint that runs through transformers, cannot be updated; build "
                    f"a new engine"
                )
            modules = built(_auto(plan.config), plan.config, "eager", dtype, torch.device("meta"))
            stored = read_stored(modules, model, form, dtype, show_progress)
            loaded = _of_tensors(plan, dtype, stored.plain, model.path)
        elif not model.weights.is_first:
            loaded = _of_tensors(plan, dtype, tensors_of_version(model), UPDATE)
        elif model.load_format == "dummy":
            loaded = drawn(_auto(plan.config), plan.config, "eager", dtype, model.seed, device)
        else:
            place = {} if device is None or not is_accelerate_available() else {"device_map": {"": device}}
            auto = _auto(plan.config)
            loaded, report = from_checkpoint(auto, plan.config, "eager", dtype, model.path, show_progress, **place)
            check_tensors(model.path, report["missing_keys"], report["unexpected_keys"], report["mismatched_keys"])
        if plan.architecture in ARCHITECTURES:
            _drop_tower(loaded)
        made = TransformersDecoder(plan, (loaded if device is None else loaded.to(device)).requires_grad_(False))
        made.stored = stored.layers
        return made


def _of_tensors(plan: TransformersPlan, dtype: torch.dtype, tensors: dict[str, torch.Tensor], place: str) -> Any:
    """The modules with these weights. place: where they are from, for messages."""
    kind = getattr(transformers, str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[plan.config.model_type]))
    loaded, report = from_tensors(kind, plan.config, "eager", dtype, tensors, place)
    check_tensors(place, report["missing_keys"], report["unexpected_keys"], report["mismatched_keys"])
    return loaded


def _drop_tower(model: Any) -> None:
    """Give up what makes rows of images or audio, which is the encoder's (`tower`): the model goes on from embeddings."""
    for name in [name for name, _ in model.model.named_children() if name not in LANGUAGE_PARTS]:
        setattr(model.model, name, Absent())


def without_weights(plan: TransformersPlan, dtype: torch.dtype) -> TransformersDecoder:
    """The model on torch's meta device."""
    with torch.inference_mode(False), torch.no_grad():
        made = built(_auto(plan.config), plan.config, "eager", dtype, torch.device("meta"))
        return TransformersDecoder(plan, made.requires_grad_(False))
