"""The fused forward of every family (`model.families`) on a device.

A layer begins with the norm and the product for query, key and value. In steps with prompts, norm of
heads, rotation and the write to the cache are one launch; else they are part of attention. The output product plus residual
follows. The MLP is the norm, the product for gate and up, the activation, and the down product plus residual. For few rows the norm
before a product and whatever follows it are part of its launch (`linear`). Else the product is cuBLAS's and the rest are kernels
of their own.

`decode` makes the launches of a step of one token per sequence, and nothing else, so that they can be recorded as a graph.
`prefill` works on chunks of prompts, with any decode rows in front of them, and is launched kernel by kernel.
Pairs of a rotation are half a head apart, as in the checkpoints. Called by the runner, under inference mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from actorllm.errors import UnsupportedModelError
from actorllm.messages import I32
from actorllm.model.cuda import ops
from actorllm.model.cuda.adapters import DeviceSlots, StepAdapters
from actorllm.model.cuda.cache import DeviceCache
from actorllm.model.cuda.collectives import Collectives, Vocabulary
from actorllm.model.cuda.device import Device
from actorllm.model.cuda.experts import DeviceExperts, ExpertActivations
from actorllm.model.cuda.latent import DeviceLatent, LatentActivations, geometry
from actorllm.model.cuda.linear import DeviceDense, DeviceLinear
from actorllm.model.cuda.prompt_products import PromptProducts, StepRows
from actorllm.model.cuda.quantized import Workspaces, linear
from actorllm.model.cuda.sampling import LMHead
from actorllm.model.cuda.state import StateTable
from actorllm.model.families.decoder_config import DecoderConfig, LatentShape
from actorllm.model.families.tensors import DecoderTensors, ExpertTensors, LatentTensors, LayerTensors
from actorllm.model.linear import Form, LinearWeight
from actorllm.model.linear.dense import Dense
from actorllm.model.rope import rotation_angles, rotation_length
from actorllm.model.weights import Weights
from actorllm_kernels.attn_decode import division, takes_packed
from actorllm_kernels.attn_prefill import query_tiles, tokens_per_tile
from actorllm_kernels.configs import table
from actorllm_kernels.skinny_gemm import MAX_ROWS as MAX_SKINNY_ROWS
from actorllm_kernels.skinny_gemm import SplitScratch

SWITCHES = frozenset(
    {
        "has_qkv_bias",
        "has_output_bias",
        "has_mlp_bias",
        "qk_norm='head'",
        "qk_norm='all_heads'",
        "windows",
        "window_rope",
        "attention_scale",
        "norms_inputs",
        "norms_outputs",
        "activation='gelu_tanh'",
        "embedding_scale",
        "experts",
        "has_sinks",
        "latent",
    }
)
"""What this forward knows beyond the plain decoder (`DecoderConfig.switches`)."""

HOST_PROGRAMS = 3
"""Of decode attention where there is no GPU to be filled: enough to divide sequences among them."""


@dataclass(slots=True)
class DecodePlan:
    """How the tiles of one window are divided among the programs of decode attention."""

    ends: torch.Tensor  # int32 [num_rows + 1]
    quota: torch.Tensor  # int32 [1]


class DeviceDecodeRows:
    """The tensors that a decode step reads and writes beside weights, cache and state table: one row per sequence.

    Allocated once for the largest batch; a step of fewer rows uses the first ones (`first`).
    """

    def __init__(self, num_rows: int, shape: AttentionShape, device: torch.device) -> None:
        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.num_rows = num_rows
        self.rows = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
        """Slots, or -1: the only thing that a step is told."""
        self.ids, self.positions, self.seq_lens = (integers(num_rows) for _ in range(3))
        self.kv_slots = integers(num_rows, dtype=torch.int64)
        self.plans = {window: DecodePlan(integers(num_rows + 1), integers(1)) for window in shape.windows}
        self.arrivals = integers(num_rows * shape.most_groups)
        """Of the parts of a sequence and group of query heads, while attention runs; 0 between launches."""

    def first(self, num_rows: int) -> DeviceDecodeRows:
        """The same for fewer rows, in the same memory."""
        part = object.__new__(DeviceDecodeRows)
        part.num_rows = num_rows
        for name in ("rows", "ids", "positions", "seq_lens", "kv_slots"):
            setattr(part, name, getattr(self, name)[:num_rows])
        part.arrivals = self.arrivals[: len(self.arrivals) // self.num_rows * num_rows]
        part.plans = {w: DecodePlan(plan.ends[: num_rows + 1], plan.quota) for w, plan in self.plans.items()}
        return part


@dataclass(slots=True)
class PrefillRows:
    """The chunks of prompts of a step, behind its decode rows."""

    slots: torch.Tensor  # int32 [num_chunks]
    seq_lens: torch.Tensor  # int32 [num_chunks] with the chunk
    starts: torch.Tensor  # int32 [num_chunks + 1], counted from the first prompt token of the step
    tiles: torch.Tensor  # int32 [num_tiles, 2]
    counts_all: bool = False
    """`starts` are counted from the first token of the step instead."""


@dataclass(slots=True)
class StepTokens:
    """All tokens of a step: those of the decode rows, then those of the prompts."""

    ids: torch.Tensor  # integers [num_tokens]
    positions: torch.Tensor  # integers [num_tokens]
    kv_slots: torch.Tensor  # int64 [num_tokens]
    decodes: DeviceDecodeRows | None
    prefills: PrefillRows | None
    embedded: tuple[torch.Tensor, torch.Tensor] | None = None
    """Which tokens have an embedding that the prompt brought, and those embeddings."""
    token_rows: torch.Tensor | None = None
    """int32 [num_tokens]: of each token the row of its request in the state table, or -1; None: no token has an adapter."""
    kinds: StepRows | None = None
    """Which tokens are of prompts; None: all have the same products."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What attention needs to know of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    """Those that occur; 0: all keys."""
    latent: LatentShape | None = None
    """Of a cache of latents. `num_kv_heads` is then 1, and `head_dim` the numbers that it holds of a token."""
    skipped: int = 0
    """Tokens at the beginning of every sequence that no token sees: a head that drafts knows nothing of them."""

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def most_groups(self) -> int:
        """Groups of query heads that attend together, at most."""
        return self.num_kv_heads if self.latent is None else self.num_heads

    @property
    def num_parts(self) -> int:
        """What the cache holds of a token and head: keys and values, or rows that are both."""
        return 2 if self.latent is None else 1


def check_head_size(head_dim: int) -> None:
    """Raises UnsupportedModelError where there is no kernel for heads of this size."""
    sizes = sorted(int(name[1:]) for name in table()["attn_decode"]["sm_90"] if name[1:].isdigit())
    if not sizes[0] // 2 < head_dim <= sizes[-1] or head_dim % 2:
        raise UnsupportedModelError(
            f"heads of size {head_dim} are not supported on CUDA: the kernels take even sizes from {sizes[0] // 2 + 2} to "
            f"{sizes[-1]}; use device='cpu'"
        )


class PagedAttention:
    """Attention over the cache, and the memory it needs. One for all layers: they run one after the other."""

    def __init__(self, shape: AttentionShape, device: Device, *, has_drafts: bool = False) -> None:
        """has_drafts: several rows of a step may be of one sequence, and read what the others of them store."""
        self.shape = shape
        self._has_drafts = has_drafts
        on = device.torch_device
        if shape.latent is None:
            group, value_dim, self.num_groups = shape.group, shape.head_dim, shape.num_kv_heads
            self.division = division(on, shape.head_dim, shape.group)
            self.tokens_per_tile = tokens_per_tile(shape.group, shape.head_dim, on)
        else:
            group, self.num_groups, self.division, self.tokens_per_tile = geometry(shape.num_heads, on)
            value_dim = shape.latent.rank
        if on.type != "cuda":
            self.division = self.division._replace(programs=HOST_PROGRAMS)
        self._device = device
        parts = 2 * self.division.programs
        self._partials = torch.empty(parts, group, value_dim, device=on)
        self._partial_lse = torch.empty(parts, group, device=on)

    def takes_packed(self, tokens: StepTokens, keys: torch.Tensor) -> bool:
        """Whether attention norms, rotates and stores by itself: in steps of decode rows alone, for most models.

        Not where rows may be drafts of one sequence: a program would read keys that another one of the same launch stores.
        """
        is_decode = tokens.decodes is not None and tokens.prefills is None
        return is_decode and not self._has_drafts and takes_packed(self.shape.head_dim, self.shape.group, keys.dtype)

    def plan(self, rows: DeviceDecodeRows, *, pdl: bool) -> None:
        """Once per step, for all layers."""
        for window, plan in rows.plans.items():
            ops.plan_decode(
                rows.seq_lens,
                plan.ends,
                plan.quota,
                self.division.programs,
                self.num_groups,
                window=window,
                tile=self.division.tile,
                pdl=pdl,
            )

    def chunks(self, slots: I32, counts: I32, seq_lens: I32) -> PrefillRows:
        """Upload what the chunks of a step are. counts: tokens of each; seq_lens: with them."""
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        tiles = query_tiles(counts, seq_lens, self.tokens_per_tile)
        parts = (part.astype(np.int32) for part in (slots, seq_lens, starts, tiles))
        one, two, three, four = self._device.upload_parts(*parts)
        return PrefillRows(one, two, three, four.view(-1, 2))

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        tokens: StepTokens,
        table: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        rope: tuple[torch.Tensor, torch.Tensor] | None = None,
        norms: tuple[torch.Tensor, torch.Tensor] | None = None,
        eps: float = 1e-6,
        pdl: bool = False,
    ) -> None:
        """q, out: [num_tokens, num_heads, head_dim]; the keys and values of these tokens are in the cache already.

        rope, norms, eps: q is what the product for query, key and value left, and what is to be done with it (`takes_packed`).
        """
        num_decodes = 0
        if tokens.decodes is not None:
            rows = tokens.decodes
            num_decodes = rows.num_rows
            plan, part = rows.plans[window], out[:num_decodes]
            ops.attn_decode(
                q[:num_decodes],
                keys,
                values,
                rows.rows,
                table,
                rows.seq_lens,
                plan.ends,
                plan.quota,
                rows.arrivals,
                part,
                self._partials,
                self._partial_lse,
                scale,
                window=window,
                skipped=self.shape.skipped,
                softcap=softcap,
                sinks=sinks,
                rope=rope,
                norms=norms,
                eps=eps,
                programs=self.division.programs,
                tile=self.division.tile,
                pdl=pdl,
            )
        if tokens.prefills is not None:
            chunks = tokens.prefills
            first = 0 if chunks.counts_all else num_decodes
            ops.attn_prefill(
                q[first:],
                keys,
                values,
                chunks.slots,
                table,
                chunks.seq_lens,
                chunks.starts,
                chunks.tiles,
                out[first:],
                scale,
                window=window,
                skipped=self.shape.skipped,
                softcap=softcap,
                sinks=sinks,
            )

    def attend_latents(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        out: torch.Tensor,
        tokens: StepTokens,
        table: torch.Tensor,
        *,
        scale: float,
        pdl: bool,
    ) -> None:
        """Of absorbed queries; the latents of these tokens are in the cache already.

        Arguments:
            q: [num_tokens, num_heads, width].
            latents: [num_blocks, block_size, width].
            out: [num_tokens, num_heads, rank].
            tokens: of the step.
            table: block tables, by slot.
            scale: of scores.
            pdl: as of `attend`.
        """
        num_decodes = 0
        if tokens.decodes is not None:
            rows = tokens.decodes
            num_decodes, plan = rows.num_rows, rows.plans[0]
            ops.latent_decode(
                q[:num_decodes],
                latents,
                rows.rows,
                table,
                rows.seq_lens,
                plan.ends,
                plan.quota,
                rows.arrivals,
                out[:num_decodes],
                self._partials,
                self._partial_lse,
                scale,
                skipped=self.shape.skipped,
                programs=self.division.programs,
                tile=self.division.tile,
                pdl=pdl,
            )
        if tokens.prefills is not None:
            chunks = tokens.prefills
            first = 0 if chunks.counts_all else num_decodes
            ops.latent_prefill(
                q[first:],
                latents,
                chunks.slots,
                table,
                chunks.seq_lens,
                chunks.starts,
                chunks.tiles,
                out[first:],
                scale,
                skipped=self.shape.skipped,
            )


class DeviceModel(Protocol):
    """A loaded model on a device, as the runner sees it."""

    dtype: torch.dtype
    shape: AttentionShape
    vocab_size: int
    hidden_size: int
    num_bytes: int
    """Bytes of weights that one decode step reads."""
    forms: tuple[str, ...]
    """Of its linear layers (`DeviceLinear.form`), with their shapes, as far as its configuration does not say them."""
    needs_trial: bool
    """Whether `decode` may make more than launches: a recording of it is tried before it is used."""
    head: LMHead | None
    """What follows the hidden states, where sampling may do it itself."""

    def allocate(self, num_rows: int, attention: PagedAttention) -> None:
        """Make room for decode steps of up to so many rows."""

    def decode(
        self,
        rows: DeviceDecodeRows,
        cache: DeviceCache,
        state: StateTable,
        *,
        is_adapted: bool = False,
        pdl: bool = False,
    ) -> torch.Tensor:
        """One token of every row. Returns their hidden states, [num_rows, hidden_size], in memory of the model's own.

        is_adapted: some row may have an adapter.
        """

    def forward(self, tokens: StepTokens, cache: DeviceCache, state: StateTable, *, pdl: bool = False) -> torch.Tensor:
        """Hidden states of any step, [num_tokens, hidden_size]."""

    def kinds_of_forward(self) -> list[int]:
        """Numbers of tokens for which `forward` launches other kernels than for fewer; for many it is always the same ones."""

    def select(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The final hidden states of some rows, [num_rows, hidden_size]. rows: int64."""

    def logits(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """float32 [num_rows, vocab_size] of the hidden states before `select`, of rows that need none."""

    def logits_of_final(self, final: torch.Tensor, logits: torch.Tensor) -> None:
        """The same for what `select` returned."""


class DeviceLayer:
    """The weights of one layer."""

    def __init__(
        self,
        tensors: LayerTensors,
        window: int,
        rope: tuple[torch.Tensor, torch.Tensor],
        product: Callable[[str, LinearWeight], DeviceLinear],
        experts: Callable[[ExpertTensors], DeviceExperts],
        latent: Callable[[LatentTensors], DeviceLatent],
    ) -> None:
        """window: 0: all keys. rope: cosines and sines. product: of this name, with this weight. experts, latent: of these
        tensors."""
        assert tensors.qkv is not None
        assert tensors.output is not None
        self.qkv, self.output = product("qkv", tensors.qkv), product("output", tensors.output)
        self.latent = None if tensors.latent is None else latent(tensors.latent)
        self.experts = None if tensors.experts is None else experts(tensors.experts)
        self.gate_up: DeviceLinear | None = None
        self.down: DeviceLinear | None = None
        if tensors.gate_up is not None and tensors.down is not None:  # else there are experts in their place
            self.gate_up, self.down = product("gate_up", tensors.gate_up), product("down", tensors.down)
        self.sinks = tensors.sinks
        self.input_norm, self.mlp_norm = _wide(tensors.input_norm), _wide(tensors.mlp_norm)
        self.output_norm, self.mlp_output_norm = _wide(tensors.output_norm), _wide(tensors.mlp_output_norm)
        self.qk_norms = tensors.qk_norms
        self.window, self.rope = window, rope

    @property
    def linears(self) -> list[DeviceLinear]:
        of_queries = None if self.latent is None else self.latent.query_up
        return [part for part in (self.qkv, of_queries, self.output, self.gate_up, self.down) if part is not None]

    @property
    def num_bytes(self) -> int:
        """Of the weights that a token reads."""
        beside = sum(part.num_bytes for part in (self.latent, self.experts) if part is not None)
        return sum(part.num_bytes for part in self.linears) + beside

    @property
    def forms(self) -> Iterator[str]:
        for part in self.linears:
            yield f"{part.out_features} x {part.in_features}, {part.form}"
        if self.experts is not None:
            yield from self.experts.forms


def _wide(norm: torch.Tensor | None) -> torch.Tensor | None:
    """The weight of a norm in float32: pieces of two bytes per thread are too small to be loaded ahead."""
    return None if norm is None else norm.float()


class Activations:
    """What flows through the layers, for so many tokens."""

    def __init__(self, num_tokens: int, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(num_tokens, *shape, dtype=dtype, device=device)

        heads, dim = config.num_heads, config.head_dim
        self.num_tokens = num_tokens
        self.h, self.x, self.delta = (empty(config.hidden_size) for _ in range(3))
        shape = config.latent
        self.latent: LatentActivations | None = None
        """For as many tokens; None: there are no latents."""
        if shape is None:
            self.qkv = empty((heads + 2 * config.num_kv_heads) * dim)
            self.q, self.out = empty(heads, dim), empty(heads, dim)
        else:
            self.qkv = empty((shape.query_rank or heads * dim) + shape.width)
            self.q, self.out = empty(heads, shape.width), empty(heads, shape.value_dim)
            self.latent = LatentActivations(num_tokens, shape, heads, dtype, device)
        self.squares = torch.empty(num_tokens, 2, device=device)
        self.gate_up, self.middle = empty(2 * config.intermediate_size), empty(config.intermediate_size)
        self.hidden: torch.Tensor | None = None
        """Of the products of adapters, for all tokens; None: there are no adapters."""
        self.experts: ExpertActivations | None = None
        """For all tokens; None: there are no experts."""
        self.tapped: torch.Tensor | None = None
        """Streams behind some layers, side by side; None: nothing reads them (`DeviceDecoder.taps`)."""
        self.joined: HeadActivations | None = None
        """Of a head that drafts; None: of any other model."""

    def first(self, num_tokens: int) -> Activations:
        """The same for fewer tokens, in the same memory."""
        part = object.__new__(Activations)
        part.num_tokens, part.hidden, part.experts = num_tokens, self.hidden, self.experts
        part.latent = None if self.latent is None else self.latent.first(num_tokens)
        part.tapped = None if self.tapped is None else self.tapped[:num_tokens]
        part.joined = None if self.joined is None else self.joined.first(num_tokens)
        for name in ("h", "x", "delta", "qkv", "q", "out", "squares", "gate_up", "middle"):
            setattr(part, name, getattr(self, name)[:num_tokens])
        return part


class HeadActivations:
    """What a head that drafts computes of so many tokens beside its layers."""

    def __init__(self, num_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.both = torch.empty(num_tokens, 2 * hidden_size, dtype=dtype, device=device)
        """Of each token its embedding and what the pass is given, side by side."""
        self.given = torch.empty(num_tokens, hidden_size, dtype=dtype, device=device)
        self.places = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        """Of decode rows, where what they are given is kept."""
        self.is_first = torch.zeros(num_tokens, dtype=torch.bool, device=device)

    def first(self, num_tokens: int) -> HeadActivations:
        """The same for fewer tokens, in the same memory."""
        part = object.__new__(HeadActivations)
        for name in ("both", "given", "places", "is_first"):
            setattr(part, name, getattr(self, name)[:num_tokens])
        return part


class DeviceDecoder:
    """See the module docstring."""

    needs_trial = False
    taps: tuple[int, ...] = ()
    """Behind how many layers the stream is kept for a head that drafts; said before `allocate`."""
    tapped_forward: torch.Tensor | None = None
    """What was kept of the tokens of the last `forward`."""
    norm: torch.Tensor | None
    """Behind the layers, in float32."""
    _prompts: PromptProducts | None

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        max_positions: int,
        device: Device,
        collectives: Collectives | None = None,
        form: Form = Dense,
        slots: DeviceSlots | None = None,
        prompts: PromptProducts | None = None,
    ) -> None:
        """Takes this rank's part of all tensors from `weights`, which are on the device.

        config: of the whole model. max_positions: how long a sequence may get. collectives: None for one rank, which has all.
        form: of the linear layers (`quantized.device_form`). slots: empty ones, which these layers are to have; None: no adapters.
        prompts: empty ones, which these layers are to have; None: rows of prompts have the same products as decode rows.
        """
        self.collectives = collectives if collectives is not None else Collectives()
        tensors = DecoderTensors(config, weights, self.collectives.ranks, form)
        inner = self.collectives.ranks.part(config.intermediate_size)
        config = replace(  # of this rank
            config,
            num_heads=tensors.share.num_heads,
            num_kv_heads=tensors.share.num_kv_heads,
            intermediate_size=inner.stop - inner.start,
        )
        self._begin(config, weights.dtype, device, slots)
        workspaces = Workspaces(weights.dtype, device.torch_device)
        whole = windowed = self._rope(config.rope, max_positions)
        if config.window_rope is not None:
            windowed = self._rope(config.window_rope, max_positions)
        self.vocabulary = Vocabulary(self.collectives, config.vocab_size, tensors.embedding_scale)
        self.embedding = self.vocabulary.padded(tensors.embedding())
        self._prompts = prompts

        def product(index: int, name: str, weight: LinearWeight) -> DeviceLinear:
            base = linear(weight, workspaces)
            if prompts is not None:
                base = prompts.of(base)
            return base if slots is None else slots.adapt(base, tensors.targets(index)[name], self._scratch)

        self.layers = [
            self._layer(tensors.layer(i), window or 0, windowed if window else whole, partial(product, i), workspaces)
            for i, window in enumerate(config.windows)
        ]
        self.norm = tensors.norm().float()
        self.lm_head: DeviceLinear | None = None
        """None: prompts are pooled, and no logits are made."""
        if config.has_head:
            head = tensors.head()
            head = form.head_of(self.embedding) if head is None else self.vocabulary.padded_head(head)
            self.lm_head = linear(head, workspaces)
        tensors.close()
        self.head: LMHead | None = None
        # With several ranks, logits are gathered before any is chosen.
        if self.collectives.size == 1 and isinstance(self.lm_head, DeviceDense):
            self.head = LMHead(self.lm_head.weight, self.norm, config.rms_norm_eps)
        heads = [] if self.lm_head is None else [self.lm_head]
        self.num_bytes = sum(layer.num_bytes for layer in self.layers) + sum(part.num_bytes for part in heads)
        forms = {form for layer in self.layers for form in layer.forms}
        forms |= {f"{part.out_features} x {part.in_features}, {part.form}" for part in heads}
        self.forms = tuple(sorted(forms))

    def _begin(
        self, config: DecoderConfig, dtype: torch.dtype, device: Device, slots: DeviceSlots | None = None
    ) -> None:
        """Take over what the shape says. config: of this rank. slots: of adapters."""
        if config.latent is None:
            check_head_size(config.head_dim)
        self.config, self.device, self.dtype = config, device, dtype
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        windows = tuple(dict.fromkeys(window or 0 for window in config.windows))
        self.shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, windows)
        if config.latent is not None:
            self.shape = replace(self.shape, num_kv_heads=1, head_dim=config.latent.width, latent=config.latent)
        self._scratch = SplitScratch.empty(device.torch_device)
        self._slots = slots
        self._prompts = None
        self._activations: Activations
        self._attention: PagedAttention

    def _rope(
        self, parameters: Mapping[str, Any], max_positions: int, shift: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of every position. shift: so many tokens stand before the one at position 0."""
        config, on = self.config, self.device.torch_device
        angles = rotation_angles(config.rotary_dim, parameters, config.max_position_embeddings, max_positions)
        if shift:
            angles = angles[(torch.arange(max_positions) - shift).clamp(min=0)]
        length = rotation_length(parameters)
        return (angles.cos() * length).to(on), (angles.sin() * length).to(on)

    def _layer(
        self,
        tensors: LayerTensors,
        window: int,
        rope: tuple[torch.Tensor, torch.Tensor],
        product: Callable[[str, LinearWeight], DeviceLinear],
        workspaces: Workspaces,
    ) -> DeviceLayer:
        config = self.config

        def experts(tensors: ExpertTensors) -> DeviceExperts:
            assert config.experts is not None
            return DeviceExperts(config.experts, tensors, config.activation, workspaces, self._scratch)

        def latent(tensors: LatentTensors) -> DeviceLatent:
            assert config.latent is not None
            return DeviceLatent(
                config.latent, config.num_heads, tensors, lambda weight: linear(weight, workspaces), workspaces
            )

        return DeviceLayer(tensors, window, rope, product, experts, latent)

    def allocate(self, num_rows: int, attention: PagedAttention) -> None:
        self._attention = attention
        self._activations = self._new_activations(num_rows)
        self.vocabulary.allocate(num_rows, self.device.torch_device)

    def decode(
        self,
        rows: DeviceDecodeRows,
        cache: DeviceCache,
        state: StateTable,
        *,
        is_adapted: bool = False,
        pdl: bool = False,
    ) -> torch.Tensor:
        token_rows = rows.rows if is_adapted else None
        tokens = StepTokens(rows.ids, rows.positions, rows.kv_slots, rows, None, token_rows=token_rows)
        return self._run(self._activations.first(rows.num_rows), tokens, cache, state, pdl=pdl)

    def forward(self, tokens: StepTokens, cache: DeviceCache, state: StateTable, *, pdl: bool = False) -> torch.Tensor:
        self.tapped_forward = None  # of the step before: two are not in the profile
        made = self._new_activations(len(tokens.ids))
        self.tapped_forward = made.tapped
        return self._run(made, tokens, cache, state, pdl=pdl)

    def _new_activations(self, num_tokens: int) -> Activations:
        made = Activations(num_tokens, self.config, self.dtype, self.device.torch_device)
        if self._slots is not None:
            made.hidden = self._slots.hidden(num_tokens)
        if self.taps:
            size = len(self.taps) * self.hidden_size
            made.tapped = torch.empty(num_tokens, size, dtype=self.dtype, device=self.device.torch_device)
        shape = self.config.experts
        if shape is not None:
            part = self.collectives.ranks.part(shape.intermediate_size)
            inner = shape.intermediate_size if self.collectives.ranks.has_whole_experts else part.stop - part.start
            shared = self.collectives.ranks.part(shape.shared_size or 0)
            made.experts = ExpertActivations(
                num_tokens,
                shape,
                self.config.hidden_size,
                inner,
                shared.stop - shared.start,
                self.dtype,
                self.device.torch_device,
            )
        return made

    def states(self, num_tokens: int) -> torch.Tensor:
        """Where `decode` and `mixed` leave the hidden states of so many tokens."""
        return self._activations.first(num_tokens).h

    def tapped(self, num_tokens: int) -> torch.Tensor | None:
        """Where these leave what `taps` ask for, [num_tokens, len(taps) * hidden_size]; None: there are none."""
        return self._activations.first(num_tokens).tapped

    def mixed(self, tokens: StepTokens, cache: DeviceCache, state: StateTable, *, pdl: bool = False) -> None:
        """`forward`, in the memory of decode steps, so that it can be recorded. No more tokens than `allocate` was told of."""
        self._run(self._activations.first(len(tokens.ids)), tokens, cache, state, pdl=pdl)

    def kinds_of_forward(self) -> list[int]:
        products = [(part, False) for part in self.layers[0].linears]
        products += [(layer.gate_up, True) for layer in self.layers if layer.gate_up is not None][:1]
        shared = [layer.experts.shared for layer in self.layers if layer.experts is not None]
        products += [(part, part is both[0]) for both in shared[:1] if both is not None for part in both]

        def kind(num_tokens: int) -> tuple[int, bool, list[bool]]:
            # kernels for few rows are compiled for the next power of two; one row has a kernel of its own
            fused = [
                product.fuses(num_tokens, is_gated) for product, is_gated in products
            ]  # of adapted ones: both kinds
            return max(16, 1 << (num_tokens - 1).bit_length()), num_tokens == 1, fused

        return [1, *(n for n in range(2, MAX_SKINNY_ROWS + 1) if kind(n) != kind(n - 1))]

    def select(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        chosen = hidden.index_select(0, rows)
        assert self.norm is not None
        ops.rmsnorm(chosen, self.norm, self.config.rms_norm_eps, chosen)
        return chosen

    def logits(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        final = self._activations.x[: len(hidden)]
        assert self.norm is not None
        ops.rmsnorm(hidden, self.norm, self.config.rms_norm_eps, final)
        self.logits_of_final(final, logits)

    def logits_of_final(self, final: torch.Tensor, logits: torch.Tensor) -> None:
        assert self.lm_head is not None
        self.vocabulary.logits(final, self.lm_head, logits)

    def _run(
        self, a: Activations, tokens: StepTokens, cache: DeviceCache, state: StateTable, *, pdl: bool
    ) -> torch.Tensor:
        """All layers; the residual stream is `a.h`."""
        if self._slots is not None and tokens.token_rows is not None:
            assert a.hidden is not None
            self._slots.step = StepAdapters(tokens.token_rows, state.adapters, a.hidden, pdl)
        if self._prompts is not None:
            self._prompts.step = tokens.kinds
        try:
            return self._run_layers(a, tokens, cache, state, pdl=pdl)
        finally:
            if self._slots is not None:
                self._slots.step = None
            if self._prompts is not None:
                self._prompts.step = None

    def _run_layers(
        self, a: Activations, tokens: StepTokens, cache: DeviceCache, state: StateTable, *, pdl: bool
    ) -> torch.Tensor:
        stream = ResidualStream(a, self.config.rms_norm_eps, pdl, self.collectives, self._scratch)
        joined = self._enter(a, tokens, pdl=pdl)
        for index, layer in enumerate(self.layers):
            self._tap(a, index, stream)
            if joined is None:
                stream.normed_product(layer.input_norm, layer.qkv, a.qkv)
            else:
                layer.qkv(joined, a.qkv)
                joined = None
            self._attend(a, layer, tokens, cache.layers[index], state, pdl=pdl)
            stream.add_product(a.out.view(a.num_tokens, -1), layer.output, layer.output_norm)
            if layer.experts is not None:
                stream.add_experts(layer.mlp_norm, layer.experts, tokens.kv_slots, layer.mlp_output_norm)
                continue
            assert layer.gate_up is not None
            assert layer.down is not None
            stream.normed_product(layer.mlp_norm, layer.gate_up, a.middle, activation=self.config.activation)
            stream.add_product(a.middle, layer.down, layer.mlp_output_norm)
        stream.settle()
        self._tap(a, len(self.layers), stream)
        return a.h

    def _enter(self, a: Activations, tokens: StepTokens, *, pdl: bool) -> torch.Tensor | None:
        """Fill the residual stream. Returns what the first layer reads in the place of its norm of that; None: nothing else."""
        self.vocabulary.embed(tokens.ids, self.embedding, a.h, pdl=pdl)
        if tokens.embedded is not None:
            a.h.index_copy_(0, *tokens.embedded)
        return None

    def _tap(self, a: Activations, num_layers: int, stream: ResidualStream) -> None:
        """Keep the stream behind so many layers, where it is asked for."""
        for place, tap in enumerate(self.taps):
            if tap == num_layers:
                assert a.tapped is not None
                stream.settle()
                ops.copy(a.h, a.tapped[:, place * self.hidden_size : (place + 1) * self.hidden_size])

    def _attend(
        self,
        a: Activations,
        layer: DeviceLayer,
        tokens: StepTokens,
        cached: tuple[torch.Tensor, torch.Tensor],
        state: StateTable,
        *,
        pdl: bool,
    ) -> None:
        """From `a.qkv` to `a.out`. cached: of the layer, as the cache has it."""
        config, attention, (keys, values) = self.config, self._attention, cached
        scale, eps = config.attention_scale or config.head_dim**-0.5, config.rms_norm_eps
        if layer.latent is not None:
            assert a.latent is not None
            layer.latent(
                a.qkv,
                a.latent,
                a.q,
                a.out,
                tokens.positions,
                tokens.kv_slots,
                keys[:, 0],
                layer.rope,
                partial(attention.attend_latents, tokens=tokens, table=state.block_table, scale=scale, pdl=pdl),
                scratch=self._scratch,
                pdl=pdl,
            )
            return
        head_norms = layer.qk_norms
        if config.qk_norm == "all_heads":
            head_norms = None
            self._norm_all_heads(a, layer, pdl=pdl)
        is_packed = attention.takes_packed(tokens, keys)
        if not is_packed:
            ops.qknorm_rope_kv(
                a.qkv,
                tokens.positions,
                tokens.kv_slots,
                *layer.rope,
                a.q,
                keys,
                values,
                head_norms,
                eps,
                pdl=pdl,
            )
        attention.attend(
            a.qkv if is_packed else a.q,
            keys,
            values,
            a.out,
            tokens,
            state.block_table,
            scale=scale,
            window=layer.window,
            sinks=layer.sinks,
            rope=layer.rope if is_packed else None,
            norms=head_norms if is_packed else None,
            eps=eps,
            pdl=pdl,
        )

    def _norm_all_heads(self, a: Activations, layer: DeviceLayer, *, pdl: bool) -> None:
        """Of a token's queries together, and of its keys, which are columns of `a.qkv`."""
        assert layer.qk_norms is not None
        q_size, k_size = (len(weight) for weight in layer.qk_norms)
        parts = (a.qkv[:, :q_size], a.qkv[:, q_size : q_size + k_size])
        eps = self.config.rms_norm_eps
        if self.collectives.size > 1:
            self.collectives.norm_(parts, layer.qk_norms, eps, a.squares)
            return
        for part, weight in zip(parts, layer.qk_norms, strict=True):
            ops.rmsnorm(part, weight, eps, part, pdl=pdl)


class ResidualStream:
    """Products that read the residual stream or add to it, by whichever kernel is meant for the number of rows."""

    def __init__(self, a: Activations, eps: float, pdl: bool, collectives: Collectives, scratch: SplitScratch) -> None:
        self._a, self._eps, self._pdl, self._collectives = a, eps, pdl, collectives
        self._scratch = scratch
        self._has_delta = False
        """`a.delta` is yet to be added; the next norm does that on its way."""

    def normed_product(
        self, norm: torch.Tensor | None, product: DeviceLinear, y: torch.Tensor, activation: str = ""
    ) -> None:
        """y = activation(product(norm(stream)))."""
        a, eps, pdl = self._a, self._eps, self._pdl
        if product.fuses(a.num_tokens, bool(activation)):
            self.settle()
            product.launch(a.h, y, norm=norm, eps=eps, activation=activation, scratch=self._scratch, pdl=pdl)
            return
        x = self._normed(norm)
        if activation:
            product(x, a.gate_up)
            ops.activation_mul(a.gate_up, y, activation, pdl=pdl)
        else:
            product(x, y)

    def add_product(self, x: torch.Tensor, product: DeviceLinear, norm: torch.Tensor | None = None) -> None:
        """stream += norm(product(x)), the product summed over the ranks."""
        a = self._a
        fuses = product.fuses(a.num_tokens, False)
        if fuses and norm is None and self._collectives.size == 1:
            self.settle()
            product.launch(x, a.h, residual=a.h, scratch=self._scratch, pdl=self._pdl)
            return
        # With several ranks, the stream itself is whole everywhere: it is not a part of the sum.
        assert not self._has_delta
        if fuses:
            product.launch(x, a.delta, scratch=self._scratch, pdl=self._pdl)
        else:
            product(x, a.delta)
        self._sum_delta(norm)

    def add_experts(
        self,
        norm: torch.Tensor | None,
        experts: DeviceExperts,
        kv_slots: torch.Tensor,
        norm_behind: torch.Tensor | None = None,
    ) -> None:
        """stream += norm_behind(experts(norm(stream))), the results summed over the ranks. kv_slots: of the tokens."""
        a = self._a
        assert a.experts is not None
        x = self._normed(norm)
        experts(x, kv_slots, a.delta, a.experts, pdl=self._pdl)
        self._sum_delta(norm_behind)

    def _normed(self, norm: torch.Tensor | None) -> torch.Tensor:
        """The stream, normed."""
        a, eps, pdl = self._a, self._eps, self._pdl
        if norm is None:
            self.settle()
            return a.h
        if self._has_delta:
            ops.rmsnorm(a.delta, norm, eps, a.x, a.h, pdl=pdl)
            self._has_delta = False
        else:
            ops.rmsnorm(a.h, norm, eps, a.x, pdl=pdl)
        return a.x

    def _sum_delta(self, norm: torch.Tensor | None) -> None:
        """What this rank has left in `a.delta` is to be added, summed over the ranks and then normed."""
        a = self._a
        self._collectives.sum_(a.delta)
        if norm is not None:
            ops.rmsnorm(a.delta, norm, self._eps, a.delta, pdl=self._pdl)
        self._has_delta = True

    def settle(self) -> None:
        """Let the stream be complete."""
        if self._has_delta:
            ops.add(self._a.h, self._a.delta)
            self._has_delta = False
