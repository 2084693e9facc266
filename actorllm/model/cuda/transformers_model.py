"""Any decoder that `model.hf.transformers_backend` takes, on a device: transformers' modules, our attention over the cache there.

`load` puts the weights on the device and checks the model against transformers' own attention there (`probe`). Its plain linear
layers are then rounded, where that is asked for, and computed with as those of the fused forwards are (`quantized`). In a step its
modules may do more than launch: read a value, remember something, choose by a number of Python's. So the runner tries a recorded
step before it relies on one (`needs_trial`). Called by the runner.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.config import ModelConfig
from actorllm.errors import UnsupportedModelError
from actorllm.model.cuda import ops
from actorllm.model.cuda.cache import DeviceCache
from actorllm.model.cuda.decoder import AttentionShape, DeviceDecodeRows, PagedAttention, StepTokens, check_head_size
from actorllm.model.cuda.device import Device
from actorllm.model.cuda.linear import DeviceLinear
from actorllm.model.cuda.prompt_products import PromptProducts
from actorllm.model.cuda.quantized import Workspaces, linear
from actorllm.model.cuda.sampling import LMHead
from actorllm.model.cuda.state import StateTable
from actorllm.model.hf import transformers_backend
from actorllm.model.hf.attention import AttentionStep
from actorllm.model.hf.plan import TransformersPlan
from actorllm.model.hf.probe import check_quantized, probe, probe_embeds
from actorllm.model.hf.transformers_backend import TransformersDecoder, repeated, widened
from actorllm.model.inputs import StepInputs
from actorllm.model.linear import Linear, LinearWeight
from actorllm.model.quantization import form_of
from actorllm_kernels.quantized_gemm import MAX_ROWS


class DeviceStep(AttentionStep):
    """A step over the cache of a device."""

    def __init__(self, model: DeviceTransformers, tokens: StepTokens, cache: DeviceCache, state: StateTable) -> None:
        super().__init__()
        self._model, self._tokens, self._cache, self._state = model, tokens, cache, state

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
        **_: Any,
    ) -> torch.Tensor:
        """Keys and values go to the cache, which is then attended to."""
        model, tokens = self._model, self._tokens
        shape = model.shape
        index, window = model.loaded.layers[id(module)]
        num_tokens, width, out_width = query.shape[2], query.shape[3], value.shape[3]
        query, key, value = (widened(x[0], shape.head_dim, model.dtype) for x in (query, key, value))
        heads = torch.cat([query, *(repeated(x, shape.num_kv_heads) for x in (key, value))])
        packed = heads.transpose(0, 1).reshape(num_tokens, -1)  # [num_tokens, (q + k + v heads) * head_dim]
        q = torch.empty(num_tokens, shape.num_heads, shape.head_dim, dtype=model.dtype, device=packed.device)
        out = torch.empty_like(q)
        keys, values = self._cache.layers[index]
        nowhere = torch.zeros(num_tokens, dtype=torch.int32, device=packed.device)
        # The model has rotated them already: this is the write to the cache.
        ops.qknorm_rope_kv(packed, nowhere, tokens.kv_slots, *model.no_rotation, q, keys, values)
        model.attention.attend(
            q,
            keys,
            values,
            out,
            tokens,
            self._state.block_table,
            scale=scaling if scaling is not None else width**-0.5,
            window=window or 0,
            softcap=softcap or 0.0,
            sinks=s_aux,
        )
        return out.view(1, num_tokens, shape.num_heads, shape.head_dim)[..., :out_width]


def load(
    plan: TransformersPlan,
    model: ModelConfig,
    dtype: torch.dtype,
    show_progress: bool | None,
    device: Device,
    prompts: PromptProducts | None = None,
) -> DeviceTransformers:
    """The model with its weights on the device, checked against transformers' own attention. Raises ModelError.

    prompts: empty ones, which its layers are to have; None: rows of prompts have the same products as decode rows.
    """
    check_head_size(plan.head_dim)
    with device.active():
        loaded = transformers_backend.load_unchecked(plan, model, dtype, show_progress, device.torch_device)
        device.wait_for_all()  # transformers' threads have streams of their own
        made = DeviceTransformers(loaded, device)
        probed = ProbedModel(made)
        stock = probe(probed)
        if model.quantization is not None:
            made.quantize(model, prompts)
            check_quantized(probed, stock, model.quantization)
        if model.prompt_embedding_size is not None:
            probe_embeds(probed, model.prompt_embedding_size)
    return made


def without_weights(
    plan: TransformersPlan,
    model: ModelConfig,
    dtype: torch.dtype,
    device: Device,
    prompts: PromptProducts | None = None,
) -> DeviceTransformers:
    """On torch's meta device. prompts: as of `load`."""
    made = DeviceTransformers(transformers_backend.without_weights(plan, dtype), device)
    if model.quantization is not None:
        made.quantize(model, prompts)
    return made


class BodyRows:
    """Whether the rows of a product are the tokens of the step. Modules may give it others: those of an expert, or all heads."""

    def __init__(self) -> None:
        self.num_tokens: int | None = None
        """Of the step that the body computes; None: something else is computed."""
        self.learns = False
        """A trial is under way. What a layer was given once decides for good, and not what a batch happens to give it."""


class Contiguous(Linear):
    """A product of rows as modules have them: they may be columns of wider ones."""

    __slots__ = ("_base", "_has_other_rows", "_rows", "product")

    def __init__(self, base: DeviceLinear, product: DeviceLinear, rows: BodyRows) -> None:
        """base: of rows whatever they are. product: of all tokens of a step."""
        super().__init__(product.out_features, product.in_features, product.num_bytes)
        self.product = product
        self._base, self._rows, self._has_other_rows = base, rows, False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = self._rows
        is_other = rows.num_tokens is not None and len(x) != rows.num_tokens
        if is_other and rows.learns:
            self._has_other_rows = True
        return (self._base if is_other or self._has_other_rows else self.product)(x.contiguous())


class DeviceTransformers:
    """See the module docstring. Has the surface of `decoder.DeviceModel`."""

    needs_trial = True
    forms: tuple[str, ...] = ()
    head: LMHead | None = None

    def __init__(self, loaded: TransformersDecoder, device: Device) -> None:
        """loaded: on the device; from now on it belongs to this object."""
        plan = self.config = loaded.config
        if plan.scores_positions:
            raise UnsupportedModelError(
                f"architecture {plan.architecture!r} scores the positions of keys (ALiBi), which the attention of device='cuda' "
                f"does not; use device='cpu'"
            )
        self.device = device
        self.dtype = loaded.dtype
        self.vocab_size, self.hidden_size = plan.vocab_size, plan.hidden_size
        self.num_bytes = loaded.num_bytes
        windows = tuple(dict.fromkeys(layer.window or 0 for layer in plan.layers))
        self.shape = AttentionShape(plan.num_heads, plan.num_kv_heads, plan.head_dim, windows)
        self.loaded = loaded
        half, on = plan.head_dim // 2, device.torch_device
        self.no_rotation = torch.ones(1, half, device=on), torch.zeros(1, half, device=on)
        self.attention: PagedAttention
        self.rows = BodyRows()
        self._prompts: PromptProducts | None = None

    def quantize(self, model: ModelConfig, prompts: PromptProducts | None = None) -> None:
        """Round the plain linear layers as `quantization=` says. There is no way back. prompts: as of `load`."""
        workspaces = Workspaces(self.dtype, self.device.torch_device)
        products: list[DeviceLinear] = []
        self._prompts = prompts

        def made(weight: LinearWeight) -> Linear:
            base = linear(weight, workspaces)
            products.append(base if prompts is None else prompts.of(base))
            return Contiguous(base, products[-1], self.rows)

        with torch.inference_mode(False), torch.no_grad():
            self.loaded.pack(form_of(model, keeps_floats=True), made)
        self.num_bytes = self.loaded.num_bytes
        self.forms = tuple(sorted({f"{one.out_features} x {one.in_features}, {one.form}" for one in products}))

    def allocate(self, num_rows: int, attention: PagedAttention) -> None:
        self.attention = attention

    def decode(
        self,
        rows: DeviceDecodeRows,
        cache: DeviceCache,
        state: StateTable,
        *,
        is_adapted: bool = False,
        pdl: bool = False,
    ) -> torch.Tensor:
        return self.forward(StepTokens(rows.ids, rows.positions, rows.kv_slots, rows, None), cache, state)

    def kinds_of_forward(self) -> list[int]:
        # Of quantized layers, builds for up to 16 rows, for up to 32, and for more.
        return [1, 17, MAX_ROWS + 1] if self.forms else [1]

    def forward(self, tokens: StepTokens, cache: DeviceCache, state: StateTable, *, pdl: bool = False) -> torch.Tensor:
        ids = tokens.ids.long().unsqueeze(0)
        given = {"input_ids": ids}
        if tokens.embedded is not None:
            embedded = self.loaded.embed(ids)
            embedded[0].index_copy_(0, *tokens.embedded)
            given = {"inputs_embeds": embedded}
        step = DeviceStep(self, tokens, cache, state)
        self.rows.num_tokens = len(tokens.ids)
        if self._prompts is not None:
            self._prompts.step = tokens.kinds
        try:
            return self.loaded.run_body(step, given, tokens.positions.long().unsqueeze(0))
        finally:
            self.rows.num_tokens = None
            if self._prompts is not None:
                self._prompts.step = None

    def select(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return hidden.index_select(0, rows)

    def logits(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        self.logits_of_final(hidden, logits)

    def logits_of_final(self, final: torch.Tensor, logits: torch.Tensor) -> None:
        ops.copy(self.loaded.narrow_logits(final), logits)


class ProbedModel:
    """A model on a device with the surface of `probe.Probed`: steps that come as arrays, over a cache of a few blocks."""

    probed_block_size = 64
    num_rows = 2

    def __init__(self, model: DeviceTransformers) -> None:
        self.config, self.dtype = model.config, model.dtype
        self._model, self._device = model, model.device
        self._attention = PagedAttention(model.shape, model.device)
        model.allocate(self.num_rows, self._attention)

    def stock(self) -> contextlib.AbstractContextManager[torch.nn.Module]:
        return self._model.loaded.stock()

    def place(self, ids: NDArray[np.int64]) -> torch.Tensor:
        return self._device.upload(ids)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._model.loaded.embed(ids)

    def new_cache(self, num_blocks: int) -> DeviceCache:
        plan, size = self.config, self.probed_block_size
        return DeviceCache(
            self._device, plan.num_layers, plan.num_kv_heads, plan.head_dim, num_blocks, size, self.dtype
        )

    def forward(self, inputs: StepInputs, cache: DeviceCache) -> torch.Tensor:
        device, count = self._device, inputs.num_decodes
        tables = [*inputs.decode_table, *inputs.prefill_tables]
        state = StateTable(device, self.num_rows, max(5, -(-self.config.max_positions // self.probed_block_size)))
        for row, table in enumerate(tables):
            state.block_table[row, : len(table)] = device.upload(table)
        ids, positions, kv_slots = device.upload_parts(inputs.token_ids, inputs.positions, inputs.kv_slots)
        rows: DeviceDecodeRows | None = None
        if count:
            rows = DeviceDecodeRows(count, self._model.shape, device.torch_device)
            rows.rows.copy_(device.upload(inputs.decode_slots))
            rows.seq_lens.copy_(device.upload(inputs.decode_lengths))
            self._attention.plan(rows, pdl=device.uses_pdl)
        counts = np.array(inputs.prefill_counts, np.int32)
        lengths = np.array(inputs.prefill_first, np.int32) + counts
        chunks = self._attention.chunks(np.array(inputs.prefill_slots, np.int32), counts, lengths)
        embedded = None
        if inputs.embedded is not None:
            vectors = device.upload(inputs.embeds).view(self.dtype).view(len(inputs.embedded), -1)
            embedded = (device.upload(inputs.embedded), vectors)
        tokens = StepTokens(ids, positions, kv_slots, rows, chunks, embedded)
        self._model.rows.learns = True
        try:
            return self._model.forward(tokens, cache, state)
        finally:
            self._model.rows.learns = False

    def select(self, hidden: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
        return self._model.select(hidden, self._device.upload(rows))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.empty(len(hidden), self.config.vocab_size, device=hidden.device)
        self._model.logits_of_final(hidden, logits)
        return logits
