"""The tensors of a GGUF file, by the names of transformers, and what its layers become.

Q4_0, Q4_1 and Q4_K are groups of 32 inputs with a scale and a smallest value: 4 bits stay 4 bits. All other types are
dequantized by the package `gguf` and rounded to 8 bits where that is near enough (`grouped.nearest`). All else is plain. Files of
Llama have the rows of queries and keys in the order of adjacent pairs; they are put back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actorllm.errors import CorruptModelError
from actorllm.model.linear import LinearPart, LinearWeight
from actorllm.model.linear.dense import Dense
from actorllm.model.linear.side_by_side import side_by_side
from actorllm.model.quantization.grouped import nearest
from actorllm.model.quantization.int4 import MIDDLE, Int4, fitting
from actorllm.model.weights import ALL, Stored, Weights
from actorllm.types.gguf_file import KINDS, GgufTensor, read_header
from actorllm.types.gguf_model import check_package

GROUP = 32

LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Names of the parts of a layer, behind `model.layers.N.` and `blk.N.`."""

OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

PLAIN = ("F32", "F16", "BF16")


def file_name(name: str) -> str:
    """Of a tensor of transformers, such as model.layers.0.mlp.up_proj.weight: blk.0.ffn_up.weight."""
    part, _, suffix = name.rpartition(".")
    if part in OUTER:
        return f"{OUTER[part]}.{suffix}"
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", part)
    return name if found is None or found[2] not in LAYER else f"blk.{found[1]}.{LAYER[found[2]]}.{suffix}"


def layer_name(name: str) -> str:
    """The other way round, without the suffix: of blk.0.ffn_up.weight, model.layers.0.mlp.up_proj."""
    part = name.rpartition(".")[0]
    names = {inner: outer for outer, inner in (OUTER | LAYER).items()}
    found = re.fullmatch(r"blk\.(\d+)\.(.+)", part)
    if found is None:
        return names.get(part, part)
    return f"model.layers.{found[1]}.{names.get(found[2], found[2])}"


class GgufWeights(Weights):
    """A file's tensors, dequantized where they are taken."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        """Raises ModelError: the file is corrupt, or the package that reads it is missing."""
        super().__init__(dtype)
        check_package()
        self.path, header = path, read_header(path)
        self.tensors, fields = header.tensors, header.fields
        self._left = set(self.tensors)
        self._data = np.memmap(path, np.uint8, mode="r")
        kind = str(fields.get("general.architecture"))
        num_heads = fields.get(f"{kind}.attention.head_count", 1)
        self._heads = (num_heads, fields.get(f"{kind}.attention.head_count_kv", num_heads)) if kind == "llama" else None

    def found(self, name: str, *shape: int) -> GgufTensor:
        """The tensor of transformers' name. Raises CorruptModelError if it is not there, or of another shape."""
        inner = file_name(name)
        tensor = self.tensors.get(inner)
        if tensor is None:
            raise CorruptModelError(f"{self.path} has no tensor {inner!r}, which this architecture needs")
        if tensor.shape != shape:
            raise CorruptModelError(
                f"{self.path}: tensor {inner!r} has shape {tensor.shape}, its fields ask for {shape}"
            )
        self._left.discard(inner)
        return tensor

    def blocks(self, name: str, *shape: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Its bytes, [rows, bytes of a row], in the order of transformers; a copy only where that is another."""
        tensor = self.found(name, *shape)
        data = self._data[tensor.start : tensor.start + tensor.num_bytes].reshape(shape[0] if len(shape) > 1 else 1, -1)
        order = self._order(name, shape)
        return data if order is None else data[order]

    def _order(self, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        for place, part in enumerate(("self_attn.q_proj.", "self_attn.k_proj.")):
            if self._heads is not None and part in name and len(shape) > 1:
                return np.arange(shape[0]).reshape(self._heads[place], -1, 2).swapaxes(1, 2).reshape(-1)
        return None

    def take(
        self, name: str, *shape: int, rows: slice = ALL, columns: slice = ALL, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        data = self.blocks(name, *shape)
        kind = GGMLQuantizationType(self.found(name, *shape).kind)
        if len(shape) > 1:
            data = data[rows]
        made = torch.from_numpy(np.array(dequantize(np.ascontiguousarray(data), kind), dtype=np.float32, copy=True))
        if len(shape) == 1:
            made = made.reshape(-1)
            if self._heads is not None and name.endswith(("q_proj.bias", "k_proj.bias")):
                heads = self._heads["k_proj" in name]
                made = made.view(heads, -1, 2).transpose(1, 2).reshape(-1)
            made = made[rows]
        else:
            made = made[:, columns]
        return made.to(dtype or self.dtype).contiguous()

    def stored(self, name: str) -> Stored | None:
        tensor = self.tensors.get(file_name(name))
        return None if tensor is None else Stored(tensor.shape, tensor.name_of_kind)

    def close(self, is_ignorable: Callable[[str], bool]) -> None:
        left = sorted(name for name in self._left if name != "rope_freqs.weight" and not is_ignorable(name))
        if left:
            raise CorruptModelError(f"{self.path} has a tensor {left[0]!r} that this architecture does not know")


class GgufForm:
    """The form (`model.linear.Form`) of each layer of such a file."""

    def of(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        return Dense.of(weight, bias)

    def head_of(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        """A head that is the embedding: rounded as other layers are, beside the embedding."""
        return nearest(weight.float(), bias, weight.dtype)

    def sharded(self, weights: Weights, part: LinearPart) -> LinearWeight:
        assert isinstance(weights, GgufWeights)
        full, shape = f"{part.name}.weight", (part.out_features, part.in_features)
        bias = part.bias(weights)
        kind = weights.found(full, *shape).name_of_kind
        start, stop, _ = part.columns.indices(part.in_features)
        if kind in SPLIT and fitting(GROUP, start, stop) is not None:
            codes, scales, smallest = (
                torch.from_numpy(y) for y in SPLIT[kind](weights.blocks(full, *shape)[part.rows])
            )
            groups = slice(start // GROUP, stop // GROUP)
            scales, smallest = scales[:, groups].bfloat16().float(), smallest[:, groups]
            if not bool((scales.isfinite() & smallest.isfinite()).all()):
                raise CorruptModelError(f"{weights.path}: tensor {file_name(full)!r} has scales that are not finite")
            return Int4(codes[:, start:stop].contiguous(), scales, smallest + MIDDLE * scales, bias)
        if kind in PLAIN:
            return Dense(part.weight(weights), bias)
        weight = part.weight(weights, torch.float32)
        if not bool(weight.isfinite().all()):
            raise CorruptModelError(f"{weights.path}: tensor {file_name(full)!r} has scales that are not finite")
        return nearest(weight, bias, weights.dtype)

    def fused(self, parts: Sequence[Any]) -> LinearWeight:
        return side_by_side(parts)


Blocks = np.ndarray[Any, np.dtype[np.uint8]]
Split = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""Codes, uint8 [rows, columns]; scales and smallest values, float32 [rows, columns / 32]."""


def _halves(blocks: Blocks, at: int) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _blocks(rows: Blocks, kind: str) -> Blocks:
    """[rows, blocks, bytes of a block]."""
    size = next(num_bytes for name, _, num_bytes in KINDS.values() if name == kind)
    return rows.reshape(len(rows), -1, size)


def _low_then_high(codes: Blocks) -> Blocks:
    """[..., n] bytes to [..., 2 n] codes: all low halves before all high ones."""
    return np.concatenate((codes & 15, codes >> 4), -1)


def split_q4_0(rows: Blocks) -> Split:
    blocks = _blocks(rows, "Q4_0")
    scales = _halves(blocks, 0)
    return _low_then_high(blocks[..., 2:]).reshape(len(rows), -1), scales, -8 * scales


def split_q4_1(rows: Blocks) -> Split:
    blocks = _blocks(rows, "Q4_1")
    return _low_then_high(blocks[..., 4:]).reshape(len(rows), -1), _halves(blocks, 0), _halves(blocks, 2)


def split_q4_k(rows: Blocks) -> Split:
    """Blocks of 256: eight groups, whose scales and smallest values are 6 bits times a number of the block."""
    blocks = _blocks(rows, "Q4_K")
    packed = blocks[..., 4:16]
    first, second, mixed = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate((first & 63, (mixed & 15) | ((first >> 6) << 4)), -1)
    smallest = np.concatenate((second & 63, (mixed >> 4) | ((second >> 6) << 4)), -1)
    codes = _low_then_high(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return (
        codes.reshape(len(rows), -1),
        (_halves(blocks, 0)[..., None] * scales).reshape(len(rows), -1),
        (-_halves(blocks, 2)[..., None] * smallest).reshape(len(rows), -1),
    )


SPLIT: dict[str, Callable[[Blocks], Split]] = {"Q4_0": split_q4_0, "Q4_1": split_q4_1, "Q4_K": split_q4_k}
"""By type: the parts of a tensor's rows."""
