"""The fused forward of every family (`model.families`) on the CPU.

With several ranks, each holds its heads, its part of the MLP and of the vocabulary (`parallel`). A layer is: norm, one product
for query, key and value, rotation, attention, output product plus residual. The MLP follows: norm, one product for gate and up,
the activation, down product plus residual. Called by the runner, under inference mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from actorllm.errors import ConfigError
from actorllm.model import memory
from actorllm.model.adapters.slots import Adapted, rebased
from actorllm.model.cpu.attention import AttentionBatch, Chunk, PagedCache, Scoring, capped_
from actorllm.model.cpu.experts import Experts
from actorllm.model.cpu.latent import LatentAttention
from actorllm.model.cpu.layers import ACTIVATIONS, RMSNorm, RotaryEmbedding, interleave, linear
from actorllm.model.cpu.recurrent.cache import RecurrentCache
from actorllm.model.cpu.recurrent.mixers import RecurrentMixer, mixer_of
from actorllm.model.cpu.recurrent.states import StateRows, States
from actorllm.model.embeds import place_rows
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.families.tensors import DecoderTensors, LayerTensors
from actorllm.model.inputs import StepInputs
from actorllm.model.linear import Form, Linear, LinearWeight
from actorllm.model.linear.by_kind import RowKinds
from actorllm.model.linear.dense import Dense
from actorllm.model.parallel import HeadShare, Ranks
from actorllm.model.pipeline.stage import Stage
from actorllm.model.rope import rotation_angles, rotation_length
from actorllm.model.weights import Weights

if TYPE_CHECKING:
    from actorllm.model.adapters import AdaptedLayer
    from actorllm.model.adapters.slots import AdapterSlots

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
        "scales_given_rows",
        "experts",
        "has_sinks",
        "latent",
        "recurrent",
        "logits_cap",
        "has_mlp",
        "residual_scale",
        "logits_scale",
        "mlp_scales",
        "attention_output_scale",
        "rotary_share",
        "gates_attention",
        "rotates",
        "qk_norm='plain'",
        "activation='relu2'",
        "has_chunks",
        "rotated",
        "has_adjacent_pairs",
        "query_growth",
        "mlps",
        "has_gate",
    }
)
"""What this forward knows beyond the plain decoder (`DecoderConfig.switches`)."""


PRODUCTS = ("qkv", "output", "gate_up", "down")
"""Of a layer, by their names in it."""

ROTATION_BYTES = 20
"""Of a pair at a position: its angle, cosine and sine, and the complex number, which is kept."""


class DecoderLayer:
    """Attention and MLP, each around a residual."""

    def __init__(
        self,
        config: DecoderConfig,
        tensors: LayerTensors,
        index: int,
        ranks: Ranks,
        share: HeadShare,
        adapters: AdapterSlots | None = None,
        targets: Mapping[str, list[AdaptedLayer]] | None = None,
        linear: Callable[[LinearWeight], Linear] = linear,
    ) -> None:
        """config: of the whole model. targets: what of the layer `adapters` adapt, by product. linear: makes the products."""
        self.index = index
        self.has_mlp, self._rotates, self._scale = (
            config.adds_mlp(index),
            config.rotates_in(index),
            config.residual_scale,
        )
        self._has_mixer, self._has_gate = config.mixer(index) != "none", config.has_gate
        self._grows = config.query_growth is not None and not self._rotates
        self._gate_scale, self._mlp_scale = config.mlp_scales
        self._num_gates = share.num_heads * config.head_dim if config.gates_attention else 0
        self._rotary_dim = config.rotary_dim
        self._attended_scale = config.attention_output_scale
        self._recurrent_scale = 1.0 if config.recurrent is None else config.recurrent.output_scale
        cached = config.attention_layers
        self._place = cached.index(index) if index in cached else -1
        """In the cache, among the layers that attend."""
        self._ranks = ranks
        self._is_shared = ranks.size > 1
        self.num_heads, self.num_kv_heads, self.head_dim = share.num_heads, share.num_kv_heads, config.head_dim
        self.window = config.windows[index]
        self.rope = int(self.window is not None and config.window_rope is not None)
        """Which of the decoder's rotations."""
        self.scoring: Scoring | None = None
        if config.attention_scale is not None or tensors.sinks is not None:
            scale = config.attention_scale or config.head_dim**-0.5
            self.scoring = Scoring(scale, sinks=tensors.sinks)
        self.activation = ACTIVATIONS[config.activation]

        def norm(weight: torch.Tensor | None) -> RMSNorm | None:
            return None if weight is None else RMSNorm(weight, config.rms_norm_eps)

        outputs = torch.arange(0 if tensors.qkv is None else tensors.qkv.out_features)
        self.latent: LatentAttention | None = None
        self.recurrent: RecurrentMixer | None = None
        self.beside: tuple[Linear, Linear] | None = None
        """The products of a recurrent mixer beside attention."""
        if tensors.recurrent is not None:
            assert config.recurrent is not None
            self.recurrent = mixer_of(config.recurrent, tensors.recurrent, linear)
            if config.mixer(index) == "both":
                self.beside = linear(tensors.recurrent.first), linear(tensors.recurrent.last)
        self.qkv: Linear
        if tensors.qkv is None:  # the layer is its MLP alone
            pass
        elif config.mixer(index) == "recurrent":
            self.qkv = linear(tensors.qkv)
        elif tensors.latent is not None:
            self.latent = LatentAttention(config, tensors.latent, share, linear)
            self.qkv = linear(tensors.qkv)
        else:
            outputs = by_part(outputs, config, share)
            self.qkv = linear(tensors.qkv.reordered(outputs))
        if tensors.output is not None:
            self.output = linear(tensors.output)
        self.experts: Experts | None = None
        if tensors.experts is not None:
            assert config.experts is not None
            self.experts = Experts(config.experts, tensors.experts, self.activation)
        elif tensors.gate_up is not None and tensors.down is not None:
            self.gate_up, self.down = linear(tensors.gate_up), linear(tensors.down)
        if adapters is not None and targets is not None:
            self._adapt(adapters, {**targets, "qkv": [target.reordered(outputs) for target in targets.get("qkv", ())]})
        self.input_norm, self.output_norm = norm(tensors.input_norm), norm(tensors.output_norm)
        self.mlp_norm, self.mlp_output_norm = norm(tensors.mlp_norm), norm(tensors.mlp_output_norm)
        self.qk_norm: QKNorm | WholeQKNorm | None = None
        if tensors.qk_norms is not None:
            q_norm, k_norm = (interleave(weight, config.head_dim, config.rotary_dim) for weight in tensors.qk_norms)
            if config.qk_norm != "all_heads":
                self.qk_norm = QKNorm(q_norm, k_norm, share, config.rms_norm_eps)
            else:
                self.qk_norm = WholeQKNorm(q_norm, k_norm, share, config.rms_norm_eps, ranks)

    def _adapt(self, adapters: AdapterSlots, targets: Mapping[str, list[AdaptedLayer]]) -> None:
        """targets: by product, in the order of its outputs."""
        for name in PRODUCTS:
            if targets.get(name):
                setattr(self, name, adapters.adapt(getattr(self, name), targets[name]))
        if self.beside is not None:
            first, last = self.beside
            self.beside = adapters.adapt(first, targets["first"]), adapters.adapt(last, targets["last"])

    def rebase(self, old: DecoderLayer) -> None:
        """Let the adapters of the same layer of another decoder be added to these products."""
        for name in PRODUCTS:
            if isinstance(adapted := getattr(old, name, None), Adapted):
                setattr(self, name, rebased(adapted, getattr(self, name)))
        if self.beside is not None and old.beside is not None:
            (first, last), (old_first, old_last) = self.beside, old.beside
            self.beside = rebased(old_first, first), rebased(old_last, last)

    def drop_weights(self) -> None:
        """Let go of all weights but those of adapters."""
        for one in self.beside or ():
            if isinstance(one, Adapted):
                one.drop_base()
            else:
                self.beside = None
        for name, held in list(vars(self).items()):
            if isinstance(held, Adapted):
                held.drop_base()
            elif isinstance(held, Linear | Experts | LatentAttention | RecurrentMixer):
                delattr(self, name)

    def __call__(
        self,
        x: torch.Tensor,
        rotations: torch.Tensor,
        attention: AttentionBatch | None,
        seen: torch.Tensor | None = None,
        rows: StateRows | None = None,
        states: States | None = None,
        growth: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What the layer makes of the residual stream.

        Arguments:
            x: [num_tokens, hidden_size].
            rotations: [num_tokens, 1, rotary_dim / 2].
            attention: None: no layer attends.
            seen: what attention reads, [num_tokens, inputs of qkv]; None: x, after the layer's norm.
            rows, states: of a recurrent layer: which states the tokens go on from, and its states.
            growth: what queries that are not rotated are multiplied by, float32 [num_tokens, 1, 1].
        """
        if not self._has_mixer:
            return self._add_mlp(x)
        if seen is None:
            seen = x if self.input_norm is None else self.input_norm(x)
        if self.recurrent is None or self.beside is not None:
            assert attention is not None
            part = self.output(self._attend(seen, rotations, attention, growth))
        if self._attended_scale != 1:
            part.mul_(self._attended_scale)
        if self.recurrent is not None:
            assert rows is not None
            assert states is not None
            if self.beside is None:
                part = self.output(self.recurrent(self.qkv(seen), states, rows))
            else:
                first, last = self.beside
                part.add_(last(self.recurrent(first(seen), states, rows)), alpha=self._recurrent_scale)
        if self._is_shared:
            self._ranks.sum_(part)
        if self._scale != 1:
            part.mul_(self._scale)
        x = part.add_(x) if self.output_norm is None else self.output_norm(part).add(x)
        return self._add_mlp(x) if self.has_mlp else x

    def _attend(
        self, seen: torch.Tensor, rotations: torch.Tensor, attention: AttentionBatch, growth: torch.Tensor | None
    ) -> torch.Tensor:
        """What heads have attended to, [num_tokens, inputs of the output product]."""
        if self.latent is None:
            made = self.qkv(seen)
            if self._num_gates:
                gates, made = made[:, : self._num_gates], made[:, self._num_gates :]
            heads = made.view(seen.shape[0], -1, self.head_dim)  # [num_tokens, q + k + v heads, dim]
            if self._rotates:
                self._rotate(heads[:, : self.num_heads + self.num_kv_heads], rotations)
            query, key_value = heads[:, : self.num_heads], heads[:, self.num_heads :]
            if self._grows:
                assert growth is not None
                query = (query * growth).to(query.dtype)
            attended = attention.attend(self._place, query, key_value, self.scoring)
            return attended if not self._num_gates else attended.mul_(gates.sigmoid())
        return self.latent(self._place, self.qkv(seen), rotations, attention)

    def _add_mlp(self, x: torch.Tensor) -> torch.Tensor:
        """x: the residual stream behind the mixer. Returns that behind the layer."""
        seen = x if self.mlp_norm is None else self.mlp_norm(x)
        if self.experts is None and not self._has_gate:
            part = self.down(self.activation(self.gate_up(seen)))
        elif self.experts is None:
            gate, up = self.gate_up(seen).chunk(2, 1)  # [num_tokens, intermediate_size] each
            if self._gate_scale != 1:
                gate = gate * self._gate_scale
            part = self.down(self.activation(gate).mul_(up))
            if self._mlp_scale != 1:
                part.mul_(self._mlp_scale)
        else:
            part = self.experts(seen)
        if self._is_shared:
            self._ranks.sum_(part)
        if self._scale != 1:
            part.mul_(self._scale)
        return part.add_(x) if self.mlp_output_norm is None else self.mlp_output_norm(part).add(x)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that one row reads."""
        attention = self.qkv.num_bytes + self.output.num_bytes if self._has_mixer else 0
        if self.latent is not None:
            attention += self.latent.num_bytes
        if self.beside is not None:
            attention += sum(one.num_bytes for one in self.beside)
        if self.experts is not None:
            return attention + self.experts.num_bytes
        if not self.has_mlp:
            return attention
        return attention + self.gate_up.num_bytes + self.down.num_bytes

    def _rotate(self, heads: torch.Tensor, rotations: torch.Tensor) -> None:
        """Normalise and rotate queries and keys in place, in float32 inside."""
        exact = heads.float()  # [num_tokens, q + k heads, head_dim]; the same memory where the model is float32
        if self.qk_norm is not None:
            self.qk_norm.apply_(exact)
        turned = exact if self._rotary_dim == self.head_dim else exact[..., : self._rotary_dim]
        torch.view_as_complex(turned.view(*exact.shape[:2], -1, 2)).mul_(rotations)
        if exact is not heads:
            heads.copy_(exact)


def by_part(outputs: torch.Tensor, config: DecoderConfig, share: HeadShare) -> torch.Tensor:
    """Outputs of the first product in the order of the forward: gates before the rest, and what is rotated in adjacent pairs."""
    start = 0
    if (
        config.gates_attention
    ):  # a head's query and gate to all gates and all queries, which are one layer of the checkpoint
        start = share.num_heads * config.head_dim
        both = outputs[: 2 * start].view(share.num_heads, 2, -1)
        outputs = torch.cat((both[:, 1].reshape(-1), both[:, 0].reshape(-1), outputs[2 * start :]))
    if not config.has_adjacent_pairs:
        rotated = slice(start, start + (share.num_heads + share.num_kv_heads) * config.head_dim)
        outputs[rotated] = interleave(outputs[rotated], config.head_dim, config.rotary_dim)
    return outputs


def grown(positions: torch.Tensor, interval: float, rate: float) -> torch.Tensor:
    """What queries at these positions are multiplied by (`DecoderConfig.query_growth`), float32 [num_tokens, 1, 1]."""
    return torch.log1p(torch.floor((positions.float() + 1) / interval)).mul_(rate).add_(1)[:, None, None]


def check_rotations(config: DecoderConfig, max_positions: int) -> None:
    """Raises ConfigError where there is no memory for those of so many positions."""
    ropes = 1 + (config.window_rope is not None)
    per_position, available = ropes * ROTATION_BYTES * config.rotary_dim // 2, memory.available_bytes()
    if max_positions * per_position > available:
        raise ConfigError(
            f"max_model_len={max_positions}: rotations of so many positions take {max_positions * per_position:,} bytes while they "
            f"are made, and {available:,} are available; set it to {max(1, available // per_position)} or less"
        )


class QKNorm:
    """RMSNorm over the dimensions of every query and key head, in place and in float32."""

    def __init__(self, q_weight: torch.Tensor, k_weight: torch.Tensor, share: HeadShare, eps: float) -> None:
        dim = len(q_weight)
        rows = [q_weight.float()] * share.num_heads + [k_weight.float()] * share.num_kv_heads
        # norm = sqrt(sum of squares), so x / sqrt(mean + eps) = sqrt(dim) * x / hypot(norm, sqrt(dim * eps))
        self.weight = torch.stack(rows) * dim**0.5  # [q + k heads, head_dim]
        self.floor = torch.tensor((dim * eps) ** 0.5)

    def apply_(self, heads: torch.Tensor) -> None:
        norm = torch.linalg.vector_norm(heads, 2, -1, True)  # [num_tokens, q + k heads, 1]
        heads.div_(norm.hypot_(self.floor)).mul_(self.weight)


class WholeQKNorm:
    """RMSNorm over all query heads of a token, and over all its key heads, in place and in float32."""

    def __init__(
        self, q_weight: torch.Tensor, k_weight: torch.Tensor, share: HeadShare, eps: float, ranks: Ranks
    ) -> None:
        """q_weight, k_weight: of this rank's heads."""
        self._parts = (slice(0, share.num_heads), slice(share.num_heads, None))
        self._weights = [weight.float().view(-1, share.head_dim) for weight in (q_weight, k_weight)]
        # Of all ranks together: a key head that several ranks have is summed, and counted, as often.
        self._sizes = torch.tensor([[len(q_weight) * ranks.size, len(k_weight) * ranks.size]])
        self._eps, self._ranks = eps, ranks

    def apply_(self, heads: torch.Tensor) -> None:
        squares = torch.stack([heads[:, part].square().sum((1, 2)) for part in self._parts], 1)  # [num_tokens, 2]
        scales = torch.rsqrt(self._ranks.sum_(squares) / self._sizes + self._eps).unbind(1)
        for part, weight, scale in zip(self._parts, self._weights, scales, strict=True):
            heads[:, part].mul_(scale[:, None, None]).mul_(weight)


class Decoder:
    """Embedding, layers, final norm and LM head of one model."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        max_positions: int,
        ranks: Ranks | None = None,
        form: Form = Dense,
        adapters: AdapterSlots | None = None,
        make: Callable[[LinearWeight], Linear] = linear,
        kinds: RowKinds | None = None,
        stage: Stage | None = None,
    ) -> None:
        """Takes this rank's part of all tensors from `weights`.

        max_positions: how long a sequence may get. form: of the weights of the linear layers. adapters: empty ones, which the
        products of this model are added to; None: it is never adapted. make: what computes with a weight of a layer.
        kinds: told before each step which rows are of prompts; None: nothing asks for that. stage: of a pipeline, whose layers
        `config` is of; None: the only one.
        """
        self.config = config
        self._stage = stage or Stage()
        self._adapters = adapters
        self.ranks = ranks or Ranks()
        tensors = DecoderTensors(config, weights, self.ranks, form, self._stage.part)
        self.share = tensors.share
        self.dtype = weights.dtype
        check_rotations(config, max_positions)
        self.rotary = [
            RotaryEmbedding(
                rotation_angles(config.rotary_dim, rope, config.max_position_embeddings, max_positions),
                rotation_length(rope),
            )
            for rope in (config.rope, config.window_rope)
            if rope is not None
        ]
        windows = dict.fromkeys(config.windows)
        self._windows = tuple(windows)
        if config.has_chunks:
            self._windows = tuple(None if window is None else Chunk(window) for window in windows)
        self._recurrent = config.recurrent_layers
        self._no_states: dict[int, States] = {}
        self._vocab_part = self.ranks.part(config.vocab_size)
        is_first, is_last = self._stage.is_first, self._stage.is_last
        self.embedding = torch.empty(0)
        if is_first or (is_last and config.ties_embeddings):
            # Of an update it is a view of the file, which its owner keeps as long as this version counts.
            self.embedding = tensors.embedding()
        self._embedding_scale = tensors.embedding_scale
        self.layers = [
            DecoderLayer(
                config,
                tensors.layer(i),
                i,
                self.ranks,
                self.share,
                adapters,
                None if adapters is None else tensors.targets(i),
                make,
            )
            for i in range(config.num_layers)
        ]
        self.norm = RMSNorm(tensors.norm(), config.rms_norm_eps) if is_last else None
        self.lm_head: Linear | None = None
        self._kinds = kinds
        self.taps: frozenset[int] = frozenset()
        """Behind how many layers the hidden states of a step are kept in `tapped`."""
        self.tapped: dict[int, torch.Tensor] = {}
        if config.has_head:
            # One arithmetic for both kinds of rows: that of a single scheme.
            self.lm_head = (make if kinds is None else linear)(tensors.head() or form.head_of(self.embedding))
        tensors.close()

    def take_adapters(self, other: Decoder) -> None:
        """Let the adapters of another decoder of the same model be added to the products of this one, which has none."""
        if other._adapters is None:
            return
        self._adapters = other._adapters
        for layer, old in zip(self.layers, other.layers, strict=True):
            layer.rebase(old)

    def drop_weights(self) -> None:
        """Let go of all weights but those of adapters, which another decoder may still take."""
        self.lm_head, self.embedding, self.rotary = None, self.embedding.new_empty(0), []
        for layer in self.layers:
            layer.drop_weights()

    @property
    def num_kv_heads(self) -> int:
        """Of this rank."""
        return self.share.num_kv_heads

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that one decode step reads."""
        head = 0 if self.lm_head is None else self.lm_head.num_bytes
        return head + sum(layer.num_bytes for layer in self.layers)

    def forward(self, inputs: StepInputs, cache: PagedCache) -> torch.Tensor:
        """The hidden states before the final norm, [num_tokens, hidden_size]; keys and values go to the cache.

        Of a stage: those behind its last layer.
        """
        fold = self.share.num_heads // self.share.num_kv_heads if self.config.latent is None else self.share.num_heads
        attention = cache.attention(inputs, fold, self._windows)
        positions = torch.from_numpy(inputs.positions)
        rotations = [rotary.rotations(positions) for rotary in self.rotary]
        if self._stage.is_first:
            token_ids = torch.from_numpy(inputs.token_ids)
            if inputs.embedded is None:
                x = self.embed(token_ids)
            elif self.config.scales_given_rows:
                x = self._looked_up(token_ids)
                place_rows(x, inputs)
                x.mul_(self._embedding_scale)
            else:
                x = self.embed(token_ids)
                place_rows(x, inputs)
        else:
            x = self._stage.receive(inputs.step, len(inputs.token_ids), self.config.hidden_size, self.dtype)
        if self._adapters is not None:
            self._adapters.begin(inputs)
        if self._kinds is not None:
            self._kinds.begin(inputs)
        rows, states = None, self._no_states
        if isinstance(cache, RecurrentCache):
            rows = StateRows(inputs, cache.states.num_slots)
            states = dict(zip(self._recurrent, cache.states.layers, strict=True))
        growth = None
        if self.config.query_growth is not None:
            growth = grown(positions, *self.config.query_growth)
        for layer in self.layers:
            inputs.between_layers()
            if layer.index in self.taps:
                self.tapped[layer.index] = x
            seen = attention.get(layer.window)
            x = layer(x, rotations[layer.rope], seen, rows=rows, states=states.get(layer.index), growth=growth)
        return x

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size]; an id is embedded by the rank that holds it."""
        rows = self._looked_up(token_ids)
        return rows if self._embedding_scale == 1 else rows.mul_(self._embedding_scale)

    def _looked_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Before any scale."""
        if self.ranks.size == 1:
            return torch.embedding(self.embedding, token_ids)
        local = token_ids - self._vocab_part.start
        is_elsewhere = (local < 0) | (local >= len(self.embedding))
        rows = torch.embedding(self.embedding, local.masked_fill(is_elsewhere, 0))
        return self.ranks.sum_(rows.masked_fill_(is_elsewhere.unsqueeze(1), 0))

    def select(self, hidden: torch.Tensor, rows: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        """The final hidden states of some rows, [num_rows, hidden_size]."""
        assert self.norm is not None
        return self.norm(hidden.index_select(0, torch.from_numpy(rows)))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [num_rows, vocab_size] for what `select` returned; [num_rows, 0] on the other ranks than the first."""
        return self.narrow_logits(hidden).float()

    def narrow_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same in the type of the model; with several ranks widened, for the way between them."""
        assert self.lm_head is not None
        logits = finished_logits(self.config, self.lm_head(hidden))
        return logits if self.ranks.size == 1 else self.ranks.gather_columns(logits.float(), self.config.vocab_size)


def finished_logits(config: DecoderConfig, logits: torch.Tensor) -> torch.Tensor:
    """What the head's product becomes, which is changed."""
    if config.logits_scale != 1:
        logits.mul_(config.logits_scale)
    return logits if config.logits_cap is None else capped_(logits, config.logits_cap)
