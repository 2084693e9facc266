"""The tensors of a decoder, by the names of its family: which there are, and which part of each is a rank's.

Every rank holds its share of the heads, of the MLP and of the vocabulary (`model.parallel`). Products whose inputs are shared
out are summed over the ranks, and the first rank alone adds their bias. A tensor is read when it is asked for, so that loading
needs little more memory than the model. Called by the decoders of all backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from actorllm.model.adapters import AdaptedLayer
from actorllm.model.families.decoder_config import DecoderConfig, LatentShape
from actorllm.model.families.recurrent_tensors import RecurrentTensors, recurrent_targets, recurrent_tensors
from actorllm.model.families.stacked_experts import StackedExperts
from actorllm.model.linear import Form, LinearPart, LinearWeight
from actorllm.model.linear.dense import Dense
from actorllm.model.parallel import HeadShare, Ranks
from actorllm.model.pipeline.part import WHOLE, LayerPart
from actorllm.model.weights import ALL, Weights
from actorllm.types.quantization import KV_SCALES


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """The experts of one layer, which are read while they are iterated over: gate and up side by side, and down, of each."""

    router: torch.Tensor
    """float32 [num_experts, hidden_size]: of all experts."""
    router_bias: torch.Tensor | None
    """float32 [num_experts]."""
    correction: torch.Tensor | None
    """float32 [num_experts]: what is added to scores where experts are chosen."""
    shared: tuple[LinearWeight, LinearWeight] | None
    """Of the MLP that every token takes: gate and up, and down."""
    shared_gate: torch.Tensor | None
    """float32 [1, hidden_size]."""
    numbers: range
    """The experts of this rank."""
    read: Callable[[int], tuple[LinearWeight, LinearWeight]]
    latents: tuple[LinearWeight, LinearWeight] | None = None
    """What makes the latents that experts read, and what reads those that they make."""

    def __iter__(self) -> Iterator[tuple[LinearWeight, LinearWeight]]:
        return map(self.read, self.numbers)


@dataclass(frozen=True, slots=True)
class LatentTensors:
    """Of a layer whose keys and values are made of latents: what comes behind its first product, which is `LayerTensors.qkv`.

    The outputs of that are queries, or the vector that they are made of, then the latent, then the part that is rotated.
    """

    query_norm: torch.Tensor | None
    query_up: LinearWeight | None
    """Both None: the first product has this rank's queries already."""
    norm: torch.Tensor
    up: LinearWeight
    """[num_heads * (plain_dim + value_dim), rank] of this rank's heads: what is not rotated of a key, then the value."""


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer, as the checkpoint has it; a norm that the shape does not have is None."""

    qkv: LinearWeight | None
    """The first product of the layer, of a recurrent one as well. Where a layer has both, that of attention. None: the layer
    is its MLP alone."""
    output: LinearWeight | None
    """What the mixer adds to the stream is made by it."""
    gate_up: LinearWeight | None
    down: LinearWeight | None
    experts: ExpertTensors | None
    """In the place of gate_up and down."""
    input_norm: torch.Tensor | None
    output_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp_output_norm: torch.Tensor | None
    qk_norms: tuple[torch.Tensor, torch.Tensor] | None
    """Of queries and keys: [head_dim] each, or this rank's [num_heads * head_dim] and [num_kv_heads * head_dim]."""
    sinks: torch.Tensor | None
    """float32, of this rank's heads."""
    latent: LatentTensors | None = None
    recurrent: RecurrentTensors | None = None


class DecoderTensors:
    """See the module docstring."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, ranks: Ranks, form: Form = Dense, part: LayerPart = WHOLE
    ) -> None:
        """config: of all layers of the part. form: of the weights of its linear layers. part: of the model."""
        self._model_part = part
        self._config, self._weights, self._ranks, self._form = config, weights, ranks, form
        self.share = HeadShare(config.num_heads, config.num_kv_heads, config.head_dim, ranks)

    def embedding(self) -> torch.Tensor:
        """Rows of the ids that are this rank's."""
        size = self._config.vocab_size
        rows = self._part(self._ranks.part(size))
        names = self._config.names
        return self._weights.take(f"{names.model}.{names.embedding}.weight", size, self._config.hidden_size, rows=rows)

    @property
    def embedding_scale(self) -> float:
        """Rounded to the type of the embeddings, as in transformers."""
        return float(torch.tensor(self._config.embedding_scale, dtype=self._weights.dtype))

    def head(self) -> LinearWeight | None:
        """None: it is the embedding, or there is none."""
        c = self._config
        if c.ties_embeddings or not c.has_head:
            return None
        rows = self._part(self._ranks.part(c.vocab_size))
        return self._form.sharded(self._weights, LinearPart(c.names.head, c.vocab_size, c.hidden_size, rows=rows))

    def norm(self) -> torch.Tensor:
        names = self._config.names
        return self._norm(f"{names.model}.{names.final_norm}", self._config.hidden_size)

    def layer(self, index: int) -> LayerTensors:
        c, share, names = self._config, self.share, self._config.names
        prefix = self._prefix(index)
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        q_part, kv_part, inner_part = (
            share.rows(share.heads),
            share.rows(share.kv_heads),
            self._ranks.part(c.intermediate_size),
        )
        out_size, out_part = q_size, q_part
        latent = recurrent = None
        qkv: LinearWeight | None = None
        output: LinearWeight | None = None
        if c.recurrent is not None and c.recurs(index):
            recurrent = recurrent_tensors(prefix, c.recurrent, self._weights, self._form, c.hidden_size)
        if recurrent is not None and c.mixer(index) == "recurrent":
            qkv, output = recurrent.first, recurrent.last
        elif not c.attends(index):
            pass
        elif c.latent is not None:
            out_size, out_part = c.num_heads * c.latent.value_dim, _times(share.heads, c.latent.value_dim)
            qkv, latent = self._latent(prefix, c.latent)
        else:
            made, made_part = q_size, q_part
            if c.gates_attention:  # a head's query, and its gate behind it
                made, made_part = 2 * q_size, _times(share.heads, 2 * c.head_dim)
            qkv = self._side_by_side(
                prefix, names.qkv, (made, kv_size, kv_size), (made_part, kv_part, kv_part), c.has_qkv_bias
            )

        def norm(name: str, is_there: bool) -> torch.Tensor | None:
            return self._norm(prefix + name, c.hidden_size) if is_there else None

        if c.attends(index):
            output = self._summed(prefix + names.output, out_size, out_part, c.has_output_bias)
        qk_norms = None
        if not c.attends(index):
            pass
        elif c.qk_norm == "plain":
            if c.rotates_in(index):
                qk_norms = torch.ones(c.head_dim), torch.ones(c.head_dim)
        elif c.qk_norm == "head":
            qk_norms = (
                self._norm(prefix + names.qk_norms[0], c.head_dim),
                self._norm(prefix + names.qk_norms[1], c.head_dim),
            )
        elif c.qk_norm == "all_heads":
            q_norm = self._norm(prefix + names.qk_norms[0], q_size, self._part(q_part))
            qk_norms = q_norm, self._norm(prefix + names.qk_norms[1], kv_size, self._part(kv_part))
        gate_up = down = experts = None
        if self._has_experts(index):
            experts = self._experts(prefix)
        elif c.adds_mlp(index):
            count = 1 + c.has_gate
            gate_up = self._side_by_side(
                prefix, names.gate_up, (c.intermediate_size,) * count, (inner_part,) * count, c.has_mlp_bias
            )
            down = self._summed(prefix + names.down, c.intermediate_size, inner_part, c.has_mlp_bias)
        return LayerTensors(
            qkv=qkv,
            output=output,
            gate_up=gate_up,
            down=down,
            experts=experts,
            input_norm=norm(names.input_norm, c.norms_inputs and c.mixer(index) != "none"),
            output_norm=norm(names.output_norm, c.norms_outputs),
            mlp_norm=norm(names.mlp_norm, c.norms_inputs and c.adds_mlp(index)),
            mlp_output_norm=norm(names.mlp_output_norm, c.norms_outputs),
            qk_norms=qk_norms,
            sinks=self._sinks(prefix) if c.has_sinks else None,
            latent=latent,
            recurrent=recurrent,
        )

    def _latent(self, prefix: str, shape: LatentShape) -> tuple[LinearWeight, LatentTensors]:
        """The first product of a layer, and what comes behind it. Every rank has the whole latent, and its heads."""
        c, heads = self._config, self.share.heads
        up_dim, q_dim = shape.plain_dim + shape.value_dim, shape.plain_dim + shape.rotary_dim

        def read(name: str, num_outputs: int, num_inputs: int, rows: slice = ALL) -> LinearWeight:
            return self._form.sharded(
                self._weights, LinearPart(prefix + name, num_outputs, num_inputs, rows=self._part(rows))
            )

        q_part = _times(heads, q_dim)
        query_norm = query_up = None
        if shape.query_rank is None:
            first = self._rotated(read(shape.query, c.num_heads * q_dim, c.hidden_size, q_part), shape, q_dim)
        else:
            first = read(shape.query_down, shape.query_rank, c.hidden_size)
            query_norm = self._norm(prefix + shape.query_norm, shape.query_rank)
            query_up = read(shape.query_up, c.num_heads * q_dim, shape.query_rank, q_part)
            query_up = self._rotated(query_up, shape, q_dim)
        down = self._rotated(read(shape.down, shape.width, c.hidden_size), shape, shape.width)
        up = read(shape.up, c.num_heads * up_dim, shape.rank, _times(heads, up_dim))
        tensors = LatentTensors(query_norm, query_up, self._norm(prefix + shape.norm, shape.rank), up)
        return self._form.fused([first, down]), tensors

    @staticmethod
    def _rotated(weight: LinearWeight, shape: LatentShape, dim: int) -> LinearWeight:
        """With adjacent pairs in the last `rotary_dim` of each `dim` outputs."""
        if shape.is_interleaved:
            return weight
        outputs = torch.arange(weight.out_features).view(-1, dim)
        halves = outputs[:, -shape.rotary_dim :].reshape(-1, 2, shape.rotary_dim // 2)
        outputs[:, -shape.rotary_dim :] = halves.transpose(1, 2).reshape(-1, shape.rotary_dim).clone()
        return weight.reordered(outputs.view(-1))

    def _prefix(self, index: int) -> str:
        """index: of a layer within the part."""
        return f"{self._config.names.model}.layers.{self._model_part.first_layer + index}."

    def _sinks(self, prefix: str) -> torch.Tensor:
        heads = self._part(self.share.heads)
        name = f"{prefix}{self._config.names.sinks}"
        return self._weights.take(name, self._config.num_heads, rows=heads, dtype=torch.float32).float()

    def targets(self, index: int) -> dict[str, list[AdaptedLayer]]:
        """What of a layer can be adapted, by the product of `LayerTensors` that computes it, or of `recurrent` beside attention."""
        c, share, names = self._config, self.share, self._config.names
        prefix = self._prefix(index)
        q_size, kv_size, inner = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
        q_part, kv_part, inner_part = share.rows(share.heads), share.rows(share.kv_heads), self._ranks.part(inner)

        def side_by_side(layers: Sequence[str], sizes: Sequence[int], parts: Sequence[slice]) -> list[AdaptedLayer]:
            if len(layers) == 1:  # one layer of the checkpoint has all of them
                starts = accumulate(sizes[:-1], initial=0)
                pieces = [_range(part, start) for start, part in zip(starts, parts, strict=True)]
                wanted = [(layers[0], sum(sizes), torch.cat(pieces))]
            else:
                wanted = [(name, size, _range(part)) for name, size, part in zip(layers, sizes, parts, strict=True)]
            found, end = [], 0
            for name, size, rows in wanted:
                start, end = end, end + len(rows)
                found.append(AdaptedLayer(prefix + name, size, c.hidden_size, rows, ALL, slice(start, end)))
            return found

        def summed(name: str, size: int, part: slice) -> list[AdaptedLayer]:
            whole = torch.arange(c.hidden_size)
            return [AdaptedLayer(prefix + name, c.hidden_size, size, whole, self._part(part), slice(0, c.hidden_size))]

        found: dict[str, list[AdaptedLayer]] = {}
        if c.attends(index):
            made, made_part = q_size, q_part
            if c.gates_attention:
                made, made_part = 2 * q_size, _times(share.heads, 2 * c.head_dim)
            found["qkv"] = side_by_side(names.qkv, (made, kv_size, kv_size), (made_part, kv_part, kv_part))
            found["output"] = summed(names.output, q_size, q_part)
        if c.recurrent is not None and c.recurs(index):
            first, last = recurrent_targets(prefix, c.recurrent, c.hidden_size)
            found |= {"first": first, "last": last} if c.attends(index) else {"qkv": first, "output": last}
        if c.adds_mlp(index) and not self._has_experts(index):
            count = 1 + c.has_gate
            found["gate_up"] = side_by_side(names.gate_up, (inner,) * count, (inner_part,) * count)
            found["down"] = summed(names.down, inner, inner_part)
        return found

    def close(self) -> None:
        """All that is needed has been read. Raises CorruptModelError for a tensor that is left over."""
        needs_no_head = self._config.ties_embeddings or not self._config.has_head
        self._weights.close(  # the config determines them, or no layer needs them
            is_ignorable=lambda name: (
                name.endswith(("rotary_emb.inv_freq", *KV_SCALES))
                or (name == f"{self._config.names.head}.weight" and needs_no_head)
                or self._is_of_another_rank(name)
                or self._is_of_drafts(name)
                or self._model_part.lacks(name, self._config.names)
                or name.startswith(self._config.names.beside)
            )
        )

    def _is_of_another_rank(self, name: str) -> bool:
        """Whether a tensor is of an expert that another rank holds."""
        shape = self._config.experts
        if shape is None or not self._ranks.has_whole_experts:
            return False
        _, is_expert, behind = name.partition(f".{shape.experts}.")
        number = behind.partition(".")[0]
        return bool(is_expert) and number.isdecimal() and int(number) < shape.num_experts

    def _is_of_drafts(self, name: str) -> bool:
        """Whether a tensor is of a layer behind the others that guesses tokens."""
        c = self._config
        if self._model_part.num_layers is not None:  # a part lacks it anyway
            return False
        layers = range(c.num_layers, c.num_layers + c.num_draft_layers)
        return name.startswith(tuple(f"model.layers.{i}." for i in layers))

    def _has_experts(self, index: int) -> bool:
        return self._config.experts is not None and self._config.experts.layers[index]

    def _experts(self, prefix: str) -> ExpertTensors:
        """Every rank has its part of each expert, as it has of an MLP; or some experts as a whole."""
        c, shape, ranks = self._config, self._config.experts, self._ranks
        assert shape is not None
        numbers, part = range(shape.num_experts), ranks.part(shape.intermediate_size)
        if ranks.has_whole_experts:
            numbers, part = numbers[ranks.part(shape.num_experts)], ALL
        count, width = 1 + shape.has_gate, shape.latent_size or c.hidden_size
        sizes, stored = (shape.intermediate_size,) * count, shape
        if shape.stacked and self._weights.stored(f"{prefix}{shape.experts}.{shape.stacked}") is not None:
            stored = replace(shape, is_stacked=True, has_halves=True, suffix="", gate_up=(shape.stacked,))

        def read(number: int) -> tuple[LinearWeight, LinearWeight]:
            if stored.is_stacked:
                stacked = StackedExperts(self._weights, f"{prefix}{shape.experts}.", stored, c.hidden_size)
                return stacked.read(number, self._part(part), self._form, part == ALL or ranks.rank == 0)
            base = f"{prefix}{shape.experts}.{number}."
            gate_up = self._side_by_side(base, shape.gate_up, sizes, (part,) * count, False, width)
            down = self._form.sharded(
                self._weights, LinearPart(base + shape.down, width, shape.intermediate_size, columns=self._part(part))
            )
            return gate_up, down

        router = self._weights.take(
            f"{prefix}{shape.router}.weight", shape.num_experts, c.hidden_size, dtype=torch.float32
        )
        bias = None
        if shape.has_router_bias:
            name = f"{prefix}{shape.router}.bias"
            bias = self._weights.take(name, shape.num_experts, dtype=torch.float32).float()
        correction = shared = None
        if shape.scoring == "sigmoid":
            name = f"{prefix}{shape.correction}"
            correction = self._weights.take(name, shape.num_experts, dtype=torch.float32).float()
        if shape.shared_size is not None:
            base, inner = f"{prefix}{shape.shared}.", ranks.part(shape.shared_size)
            gate_up, down = shape.shared_names or (shape.gate_up, shape.down)
            shared = (
                self._side_by_side(base, gate_up, (shape.shared_size,) * count, (inner,) * count, False),
                self._summed(base + down, shape.shared_size, inner, False),
            )
        gate = None
        if shape.shared_gate is not None:
            name = f"{prefix}{shape.shared_gate}.weight"
            gate = self._weights.take(name, 1, c.hidden_size, dtype=torch.float32).float()
        latents = None
        if shape.latent_size is not None:
            first, last = (prefix + name for name in shape.latents)
            latents = (
                self._form.sharded(
                    self._weights, LinearPart(first, shape.latent_size, c.hidden_size, has_bias=c.has_mlp_bias)
                ),
                self._form.sharded(
                    self._weights, LinearPart(last, c.hidden_size, shape.latent_size, has_bias=c.has_mlp_bias)
                ),
            )
        return ExpertTensors(router.float(), bias, correction, shared, gate, numbers, read, latents)

    def _part(self, part: slice) -> slice:
        """What one rank takes as a whole is not cut."""
        return part if self._ranks.size > 1 else ALL

    def _norm(self, name: str, size: int, part: slice = ALL) -> torch.Tensor:
        offset = self._config.names.norm_offset
        tensor = self._weights.take(f"{name}.weight", size, rows=part)
        return tensor.float() + offset if offset else tensor  # the sum may need more bits than the tensor has

    def _side_by_side(
        self,
        prefix: str,
        names: Sequence[str],
        sizes: Sequence[int],
        parts: Sequence[slice],
        has_bias: bool,
        in_features: int | None = None,
    ) -> LinearWeight:
        """Layers that read the same.

        Arguments:
            sizes: outputs of each.
            parts: which of them are this rank's.
            in_features: None: they read the hidden states.
        """
        width = in_features or self._config.hidden_size
        if len(names) > 1:
            wanted = [(name, size, self._part(part)) for name, size, part in zip(names, sizes, parts, strict=True)]
        elif self._ranks.size == 1:
            wanted = [(names[0], sum(sizes), ALL)]
        else:
            starts = accumulate(sizes[:-1], initial=0)
            shifted = [slice(start + part.start, start + part.stop) for start, part in zip(starts, parts, strict=True)]
            wanted = [(names[0], sum(sizes), part) for part in shifted]
        return self._form.fused(
            [
                self._form.sharded(self._weights, LinearPart(prefix + name, size, width, rows=rows, has_bias=has_bias))
                for name, size, rows in wanted
            ]
        )

    def _summed(self, name: str, in_features: int, part: slice, has_bias: bool) -> LinearWeight:
        """A layer whose product is summed over the ranks."""
        layer = self._form.sharded(
            self._weights,
            LinearPart(name, self._config.hidden_size, in_features, columns=self._part(part), has_bias=has_bias),
        )
        return layer.without_bias() if self._ranks.rank else layer


def _times(part: slice, size: int) -> slice:
    """The rows of these heads, of `size` each."""
    return slice(part.start * size, part.stop * size)


def _range(part: slice, start: int = 0) -> torch.Tensor:
    """The indices of a part, counted on from `start`."""
    return torch.arange(start + part.start, start + part.stop)
