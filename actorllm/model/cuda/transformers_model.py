"""Any decoder that `model.transformers_backend` takes, on a device: transformers' modules, our attention over the cache there.

Loaded and checked on the CPU, with the attention of the CPU, and then moved. Every step is launched kernel by kernel: what
such a module does beside launches (reads a value, makes a tensor of a new size) is not known. Called by the runner.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

import torch
from transformers import AttentionInterface

from actorllm.errors import EngineError
from actorllm.model.cuda import ops
from actorllm.model.cuda.cache import DeviceCache
from actorllm.model.cuda.decoder import AttentionShape, DecodeRows, PagedAttention, StepTokens, check_head_size
from actorllm.model.cuda.device import Device
from actorllm.model.cuda.sampling import LMHead
from actorllm.model.cuda.state import StateTable
from actorllm.model.transformers_backend import TransformersDecoder, widened

ATTENTION = "actorllm_device"
"""The name of our attention in transformers' AttentionInterface."""


@dataclass(slots=True)
class Step:
    """What the attention of every layer needs to know of the step under way."""

    model: DeviceTransformers
    tokens: StepTokens
    cache: DeviceCache
    state: StateTable
    num_calls: int = 0


_step_under_way: ContextVar[Step | None] = ContextVar("actorllm_device_step", default=None)


def device_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer. query: [1, num_heads, num_tokens, width]; key and value alike.

    Returns [1, num_tokens, num_heads, width of values].
    """
    step = _step_under_way.get()
    if step is None:
        raise EngineError("the paged attention was called outside of a step")
    step.num_calls += 1
    return step.model.attend(step, module, query, key, value, scaling, softcap or 0.0, s_aux), None


AttentionInterface.register(ATTENTION, device_attention)


class DeviceTransformers:
    """See the module docstring. Has the surface of `decoder.DeviceModel`."""

    can_be_recorded = False
    head: LMHead | None = None

    def __init__(self, loaded: TransformersDecoder, device: Device) -> None:
        """loaded: as `transformers_backend.load` returns it; from now on it belongs to this object."""
        plan = loaded.config
        self.dtype = loaded.dtype
        self.vocab_size, self.hidden_size = plan.vocab_size, plan.hidden_size
        self.num_bytes = loaded.num_bytes
        windows = tuple(dict.fromkeys(layer.window or 0 for layer in plan.layers))
        self.shape = AttentionShape(plan.num_heads, plan.num_kv_heads, plan.head_dim, windows)
        check_head_size(plan.head_dim)
        self._num_layers = plan.num_layers
        self._loaded = loaded
        with torch.inference_mode(False), torch.no_grad():
            loaded.model.to(device.torch_device)
        loaded.model.set_attn_implementation(ATTENTION)
        half = plan.head_dim // 2
        self._cos, self._sin = (
            torch.ones(1, half, device=device.torch_device),
            torch.zeros(1, half, device=device.torch_device),
        )
        self._attention: PagedAttention

    def allocate(self, num_rows: int, attention: PagedAttention) -> None:
        self._attention = attention

    def decode(self, rows: DecodeRows, cache: DeviceCache, state: StateTable, *, pdl: bool = False) -> torch.Tensor:
        return self.forward(StepTokens(rows.ids, rows.positions, rows.kv_slots, rows, None), cache, state)

    def kinds_of_forward(self) -> list[int]:
        return [1]

    def forward(self, tokens: StepTokens, cache: DeviceCache, state: StateTable, *, pdl: bool = False) -> torch.Tensor:
        ids = tokens.ids.long().unsqueeze(0)
        given = {"input_ids": ids}
        if tokens.embedded is not None:
            embedded = self._loaded.embed(ids)
            embedded[0].index_copy_(0, *tokens.embedded)
            given = {"inputs_embeds": embedded}
        step = Step(self, tokens, cache, state)
        token = _step_under_way.set(step)
        try:
            hidden = self._loaded.run_body(given, tokens.positions.long().unsqueeze(0))
        finally:
            _step_under_way.reset(token)
        if step.num_calls != self._num_layers:
            raise EngineError(f"attention was called {step.num_calls} times in a step of {self._num_layers} layers")
        return hidden

    def attend(
        self,
        step: Step,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """One layer: keys and values go to the cache, which is then attended to."""
        index, window = self._loaded.layers[id(module)]
        tokens, shape = step.tokens, self.shape
        num_tokens, width, out_width = query.shape[2], query.shape[3], value.shape[3]
        heads = torch.cat([widened(x[0], shape.head_dim, self.dtype) for x in (query, key, value)])
        packed = heads.transpose(0, 1).reshape(num_tokens, -1)  # [num_tokens, (q + k + v heads) * head_dim]
        q = torch.empty(num_tokens, shape.num_heads, shape.head_dim, dtype=self.dtype, device=packed.device)
        out = torch.empty_like(q)
        keys, values = step.cache.layers[index]
        nowhere = torch.zeros(num_tokens, dtype=torch.int32, device=packed.device)
        # The model has rotated them already: this is the write to the cache.
        ops.qknorm_rope_kv(packed, nowhere, tokens.kv_slots, self._cos, self._sin, q, keys, values)
        self._attention.attend(
            q,
            keys,
            values,
            out,
            tokens,
            step.state.block_table,
            scale=scale if scale is not None else width**-0.5,
            window=window or 0,
            softcap=softcap,
            sinks=sinks,
        )
        return out.view(1, num_tokens, shape.num_heads, shape.head_dim)[..., :out_width]

    def select(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return hidden.index_select(0, rows)

    def logits(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        self.logits_of_final(hidden, logits)

    def logits_of_final(self, final: torch.Tensor, logits: torch.Tensor) -> None:
        logits.copy_(self._loaded.narrow_logits(final))
