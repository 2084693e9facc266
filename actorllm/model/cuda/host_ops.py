"""What the kernels do, by torch and numpy: the same arguments, the same results up to rounding.

So the step of the GPU can be run where there is none, in milliseconds. Triton's interpreter does the same with the kernels
themselves, in seconds. On a GPU a kernel is held against its function here, which takes the place of one that is wrong. The
function waits for the GPU, and draws on the CPU. Like the kernels, nothing here looks at more than a kernel would: lengths come
from tensors, and padding rows do nothing. Called through `ops`, which chooses.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from actorllm.model.philox import ID_DOMAIN, TILE_DOMAIN, gumbel_noise, round_keys
from actorllm_kernels import reference
from actorllm_kernels.edit_logits import Edits, Penalties
from actorllm_kernels.lora_shrink import num_parts, part_size
from actorllm_kernels.sample_pick import TILE, Offers, SamplingState
from actorllm_kernels.sample_topk_topp import FilterScratch, FilterState
from actorllm_kernels.skinny_gemm import SplitScratch

LARGEST = 1e30

KEEP_ALL = float(np.finfo(np.float32).max)


def step_prep(
    rows: torch.Tensor,
    last_token: torch.Tensor,
    num_computed: torch.Tensor,
    block_table: torch.Tensor,
    page: int,
    ids: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    keeps_padding: bool = False,
    pdl: bool = False,
) -> None:
    is_live, slot = rows >= 0, rows.clamp_min(0).long()
    position = num_computed[slot]
    block = block_table[slot, (position // page).long()].long()
    padding = (ids.clone(), positions.clone(), kv_slots.clone()) if keeps_padding else (0, 0, -1)
    ids.copy_(torch.where(is_live, last_token[slot], padding[0]))
    positions.copy_(torch.where(is_live, position, padding[1]))
    kv_slots.copy_(torch.where(is_live, block * page + position % page, padding[2]))
    seq_lens.copy_(torch.where(is_live, position + 1, 0))
    num_computed[slot[is_live]] += 1


def plan_decode(*_: Any, **__: Any) -> None:
    """Nothing is divided among programs here."""


def embed(ids: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, scale: float = 1.0, *, pdl: bool = False) -> None:
    is_there = (ids >= 0) & (ids < len(weight))
    rows = weight.index_select(0, torch.where(is_there, ids, 0).long())
    torch.mul(rows.masked_fill_(~is_there.unsqueeze(1), 0), scale, out=y)


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    y: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> None:
    if residual is not None:
        residual.add_(x)
        x = residual
    y.copy_(_normed(x, weight, eps))


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def skinny_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str = "",
    scratch: SplitScratch | None = None,
    pdl: bool = False,
) -> None:
    out = torch.nn.functional.linear(x if norm is None else _normed(x, norm, eps), weight, bias)
    if activation:
        out = _gated(out, activation)
    y.copy_(out if residual is None else out + residual)


def quantized_gemm(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    y: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str = "",
    scratch: SplitScratch | None = None,
    pdl: bool = False,
) -> None:
    wide = (x if norm is None else _normed(x, norm, eps)).float()
    out = wide @ reference.dequantized(codes, scales, x.shape[1]).T
    if bias is not None:
        out += bias
    if activation:
        out = _gated(out, activation)
    y.copy_(out if residual is None else out + residual)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, y: torch.Tensor, first: int, *, pdl: bool = False) -> None:
    rows = slice(first, first + len(y))
    part = scales[:, rows] if scales.dim() == 3 else scales[rows]
    y.copy_(reference.dequantized(codes[rows], part, y.shape[1]))


def quantize_rows(x: torch.Tensor, rounded: torch.Tensor, factors: torch.Tensor, *, pdl: bool = False) -> None:
    codes, found = reference.quantized_rows(x.float(), rounded.dtype)
    rounded[: len(x)].copy_(codes)
    factors.copy_(found)


def scale_sums(
    sums: torch.Tensor,
    factors: torch.Tensor,
    scales: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> None:
    y.copy_(reference.scaled_sums(sums[: len(y)].float(), factors, scales, bias))


def lora_shrink(
    x: torch.Tensor,
    down: torch.Tensor,
    token_rows: torch.Tensor,
    adapters: torch.Tensor,
    hidden: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    (num_tokens, in_features), width = x.shape, down.shape[1]
    parts = num_parts(num_tokens, in_features)
    size = part_size(in_features, parts)
    sums = hidden[: num_tokens * parts * width].view(num_tokens, parts, width)
    for slot, tokens in _of_slots(token_rows, adapters):
        for part in range(parts):
            columns = slice(part * size, (part + 1) * size)
            sums[tokens, part] = x[tokens, columns].float() @ down[slot - 1, :, columns].float().T


def lora_expand(
    hidden: torch.Tensor,
    up: torch.Tensor,
    starts: torch.Tensor,
    token_rows: torch.Tensor,
    adapters: torch.Tensor,
    y: torch.Tensor,
    in_features: int,
    widest: int,
    *,
    pdl: bool = False,
) -> None:
    num_tokens, rank, edges = len(y), up.shape[2], starts.tolist()
    parts, width = num_parts(num_tokens, in_features), (len(edges) - 1) * rank
    sums = hidden[: num_tokens * parts * width].view(num_tokens, parts, -1, rank)
    for slot, tokens in _of_slots(token_rows, adapters):
        found = sums[tokens].sum(1).to(up.dtype).float()
        for target, (first, end) in enumerate(pairwise(edges)):
            added = found[:, target] @ up[slot - 1, first:end].float().T
            y[tokens, first:end] = (y[tokens, first:end].float() + added).to(y.dtype)


def _of_slots(token_rows: torch.Tensor, adapters: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Slots of adapters, and which tokens have that of each."""
    slots = torch.where(token_rows >= 0, adapters[token_rows.clamp_min(0).long()], 0)
    return [(slot, torch.nonzero(slots == slot)[:, 0]) for slot in sorted(set(slots.tolist())) if slot]


def router_scores(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scores: torch.Tensor, *, pdl: bool = False
) -> None:
    scores.copy_(reference.router_scores(x.double(), weight.double(), None if bias is None else bias.double()))


def choose_experts(
    scores: torch.Tensor,
    kv_slots: torch.Tensor,
    numbers: torch.Tensor,
    weights: torch.Tensor,
    normalizes: bool,
    *,
    correction: torch.Tensor | None = None,
    num_groups: int = 1,
    num_active_groups: int = 1,
    scale: float = 1.0,
    pdl: bool = False,
) -> None:
    scores = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    compared = scores if correction is None else (scores.sigmoid() + correction).where(~scores.isneginf(), -torch.inf)
    if num_groups > 1:
        by_group = compared.view(len(scores), num_groups, -1)
        best = by_group.amax(2) if correction is None else by_group.topk(2, 2)[0].sum(2)
        groups = best.sort(stable=True, dim=1, descending=True)[1][:, :num_active_groups]
        is_left = torch.zeros_like(best, dtype=torch.bool).scatter_(1, groups, True)
        compared = by_group.masked_fill(~is_left.unsqueeze(2), -torch.inf).view_as(scores)
    found = compared.sort(stable=True, dim=1, descending=True)[1][:, : numbers.shape[1]]
    chosen = scores.gather(1, found)
    if correction is not None:
        chosen = chosen.sigmoid()
        shares = chosen / chosen.sum(1, keepdim=True).add(1e-20) if normalizes else chosen
    else:
        shares = chosen.softmax(1) if normalizes else scores.softmax(1).gather(1, found)
    numbers.copy_(found.masked_fill((kv_slots < 0).unsqueeze(1), -1))
    weights.copy_(shares * scale)


def group_pairs(
    numbers: torch.Tensor, order: torch.Tensor, starts: torch.Tensor, first: int, *, pdl: bool = False
) -> None:
    flat = numbers.flatten() - first
    num_experts = len(starts) - 1
    is_here = (flat >= 0) & (flat < num_experts)
    there = torch.where(is_here, flat, num_experts).sort(stable=True)[1][: int(is_here.sum())]
    order[: len(there)] = there.int()
    counts = torch.bincount(flat[is_here].long(), minlength=num_experts)
    starts.copy_(torch.cat((counts.new_zeros(1), counts.cumsum(0))))


def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    order: torch.Tensor,
    starts: torch.Tensor,
    y: torch.Tensor,
    num_tokens: int,
    *,
    activation: str = "",
    swiglu: tuple[float, float] | None = None,
    pdl: bool = False,
) -> None:
    per_row = len(y) // len(x)
    for expert, (first, end) in enumerate(pairwise(starts.tolist())):
        if first == end:
            continue
        pairs = order[first:end].long()
        own = weight[expert] if scales is None else reference.dequantized(weight[expert], scales[expert], x.shape[1])
        out = x[pairs // per_row].float() @ own.float().T
        if bias is not None:
            out += bias[expert]
        if swiglu is not None:
            alpha, limit = swiglu
            gate, up = out.chunk(2, 1)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            out = (up + 1) * gate * torch.sigmoid(gate * alpha)
        elif activation:
            out = _gated(out, activation)
        y[pairs] = out.to(y.dtype)


def sum_experts(
    found: torch.Tensor,
    numbers: torch.Tensor,
    weights: torch.Tensor,
    y: torch.Tensor,
    first: int,
    end: int,
    beside: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> None:
    is_here = (numbers >= first) & (numbers < end)
    by_place = torch.where(is_here.unsqueeze(2), found.view(*numbers.shape, -1).float(), 0) * weights.unsqueeze(2)
    total = by_place[:, 0]
    for place in range(1, by_place.shape[1]):
        total = total + by_place[:, place]
    y.copy_(total if beside is None else total + beside.float())


def activation_mul(x: torch.Tensor, y: torch.Tensor, activation: str = "silu", *, pdl: bool = False) -> None:
    y.copy_(_gated(x, activation))


def _gated(x: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = x.chunk(2, 1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def qknorm_rope_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 1e-6,
    *,
    pdl: bool = False,
) -> None:
    num_heads, dim = q.shape[1:]
    _, num_kv_heads, page, _ = keys.shape
    heads = qkv.view(len(qkv), -1, dim)
    queries, new_keys, new_values = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], 1)
    if norms is not None:
        queries, new_keys = _normed(queries, norms[0], eps), _normed(new_keys, norms[1], eps)
    c, s = (table[positions.long()].unsqueeze(1) for table in (cos, sin))
    q.copy_(_rotated(queries, c, s))
    is_written = slots >= 0
    block, offset = slots[is_written].long() // page, slots[is_written].long() % page
    new_keys = _rotated(new_keys, c, s)
    if keys.dtype == torch.uint8:
        new_keys, new_values = reference.float8_codes(new_keys), reference.float8_codes(new_values)
    keys[block, :, offset] = new_keys[is_written]
    values[block, :, offset] = new_values[is_written]


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(heads.dtype)


def attn_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    ends: torch.Tensor,
    quota: torch.Tensor,
    arrivals: torch.Tensor,
    out: torch.Tensor,
    partials: torch.Tensor,
    partial_lse: torch.Tensor,
    scale: float,
    *,
    skipped: int = 0,
    rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 1e-6,
    **how: Any,
) -> None:
    if rope is not None:
        page, last = keys.shape[2], (seq_lens.long() - 1).clamp(min=0)
        block = table[rows.clamp(min=0).long(), last // page]
        slots = torch.where(seq_lens > 0, block * page + last % page, -1)
        packed, q = q, torch.empty_like(out)
        qknorm_rope_kv(packed, last, slots, *rope, q, keys, values, norms, eps)
    for i, (slot, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        if length:
            _attend(q[i : i + 1], keys, values, table[slot], length, out[i : i + 1], scale, skipped=skipped, **how)
        else:
            out[i] = 0


def attn_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    *,
    skipped: int = 0,
    **how: Any,
) -> None:
    edges = starts.tolist()
    for slot, length, a, b in zip(rows.tolist(), seq_lens.tolist(), edges, edges[1:], strict=False):
        if a < b:
            _attend(q[a:b], keys, values, table[slot], length, out[a:b], scale, skipped=skipped, **how)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: torch.Tensor,
    length: int,
    out: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    skipped: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    **_: Any,
) -> None:
    """The last tokens of one sequence; whole blocks are read, as the kernels do, and what is not seen counts 0."""
    num_heads, dim = q.shape[1:]
    num_kv_heads, page = keys.shape[1:3]
    used = blocks[: -(-length // page)].long()
    # [num_kv_heads, blocks * page, dim], and the heads of a group as further queries
    k, v = (pages[used].transpose(0, 1).reshape(num_kv_heads, -1, dim) for pages in (keys, values))
    if k.dtype == torch.uint8:
        k, v = reference.float8_numbers(k), reference.float8_numbers(v)
    grouped = q.view(len(q), num_kv_heads, -1, dim).permute(1, 2, 0, 3)  # [num_kv_heads, group, tokens, dim]
    scores = torch.einsum("hgtd,hkd->hgtk", grouped.float(), k.float()) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(length - len(q), length, device=q.device).unsqueeze(1)
    key = torch.arange(k.shape[1], device=q.device)
    is_seen = key <= position
    if window:
        is_seen = is_seen & (key > position - window)
    if skipped:
        is_seen = is_seen & (key >= skipped)
    scores = scores.masked_fill(~is_seen, -math.inf)
    if sinks is not None:
        sink = sinks.float().view(num_kv_heads, -1, 1, 1).expand(-1, -1, len(q), 1)
        weights = torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    if skipped:  # a token may see nothing
        weights = weights.nan_to_num(0.0)
    attended = torch.einsum("hgtk,hkd->hgtd", weights, v.float())
    out.copy_(attended.permute(2, 0, 1, 3).reshape(len(q), num_heads, dim))


def latent_rope_kv(
    queries: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor,
    rotated: torch.Tensor,
    latents: torch.Tensor,
    eps: float = 1e-6,
    *,
    pdl: bool = False,
) -> None:
    rotary, page, at = rotated.shape[2], latents.shape[1], positions.long()
    rotated.copy_(reference.rotated_pairs(queries[..., -rotary:].float(), at, cos, sin))
    is_written = slots >= 0
    rows = reference.latent_tokens(tokens.float(), at, cos, sin, norm.float(), eps).to(latents.dtype)
    latents[slots[is_written].long() // page, slots[is_written].long() % page] = rows[is_written]


def latent_decode(
    q: torch.Tensor,
    latents: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    ends: torch.Tensor,
    quota: torch.Tensor,
    arrivals: torch.Tensor,
    out: torch.Tensor,
    partials: torch.Tensor,
    partial_lse: torch.Tensor,
    scale: float,
    *,
    skipped: int = 0,
    **how: Any,
) -> None:
    for i, (slot, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        if length:
            _attend_latents(q[i : i + 1], latents, table[slot], length, out[i : i + 1], scale, skipped)
        else:
            out[i] = 0


def latent_prefill(
    q: torch.Tensor,
    latents: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    *,
    skipped: int = 0,
    **how: Any,
) -> None:
    edges = starts.tolist()
    for slot, length, a, b in zip(rows.tolist(), seq_lens.tolist(), edges, edges[1:], strict=False):
        if a < b:
            _attend_latents(q[a:b], latents, table[slot], length, out[a:b], scale, skipped)


def _attend_latents(
    q: torch.Tensor,
    latents: torch.Tensor,
    blocks: torch.Tensor,
    length: int,
    out: torch.Tensor,
    scale: float,
    skipped: int,
) -> None:
    """As `_attend`: one head of keys, whose first numbers are the values."""
    pages = latents.unsqueeze(1)
    attended = torch.empty_like(q)
    _attend(q, pages, pages, blocks, length, attended, scale, skipped=skipped)
    out.copy_(attended[..., : out.shape[2]])


def kv_copy(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    sources, targets = pairs.long().unbind(1)
    pool[:, targets] = pool[:, sources]


def kv_clear(pool: torch.Tensor, slots: torch.Tensor, is_finite: torch.Tensor, *, pdl: bool = False) -> None:
    page = pool.shape[4]
    bad = slots[(is_finite == 0) & (slots >= 0)].long()
    pool[:, bad // page, :, :, bad % page] = 0


# Sampling -------------------------------------------------------------------------------------------------------------


def lm_head_sample(
    x: torch.Tensor,
    weight: torch.Tensor,
    rows: torch.Tensor,
    state: SamplingState,
    offers: Offers,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    pdl: bool = False,
) -> None:
    final = x if norm is None else _normed(x, norm, eps)
    _offer((final.float() @ weight.float().t()), rows, state, offers)


def tile_maxima(
    logits: torch.Tensor,
    scratch: FilterScratch,
    masks: torch.Tensor | None = None,
    mask_rows: torch.Tensor | None = None,
    *,
    has_mass: bool = False,
) -> None:
    if masks is None or mask_rows is None:
        return
    for i, mask in enumerate(mask_rows.tolist()):
        if mask >= 0:
            bits = np.unpackbits(masks[mask].cpu().numpy().view(np.uint8), bitorder="little")[: logits.shape[1]]
            logits[i].masked_fill_(torch.from_numpy(bits == 0).to(logits.device), -math.inf)


def find_cutoffs(
    logits: torch.Tensor, rows: torch.Tensor, state: SamplingState, filters: FilterState, scratch: FilterScratch
) -> None:
    for i, slot in enumerate(rows.tolist()):
        lowest = -KEEP_ALL
        if slot >= 0 and float(state.temperature[slot]):
            y = scaled(logits[i : i + 1], state, rows[i : i + 1])[0]
            keep = y > -math.inf
            top_k, top_p, min_p = int(filters.top_k[slot]), float(filters.top_p[slot]), float(filters.min_p[slot])
            if min_p > 0:
                keep &= y >= math.log(min_p)
            if 0 < top_k < len(y):
                keep &= y >= y.sort(descending=True).values[top_k - 1]
            if top_p < 1 and keep.any():
                largest = y[keep].sort(descending=True).values
                mass = largest.double().exp().cumsum(0)
                keep &= y >= largest[int((mass < top_p * mass[-1]).sum())]
            if keep.any():
                lowest = float(y[keep].min())
        scratch.cutoff[i] = torch.tensor(-lowest + 0.0).view(torch.int32)


def scaled(logits: torch.Tensor, state: SamplingState, rows: torch.Tensor) -> torch.Tensor:
    """Logits below the largest of their row, in units of its temperature."""
    temperature = state.temperature[rows.clamp_min(0).long()]
    divisor = torch.where(temperature == 0, 1.0, temperature).unsqueeze(1)
    return (logits - logits.amax(1, keepdim=True)) / divisor


def draw_tiles(
    logits: torch.Tensor, rows: torch.Tensor, state: SamplingState, scratch: FilterScratch, offers: Offers
) -> None:
    # The smaller the bits of -y, the larger y.
    key = (0.0 - scaled(logits, state, rows)).view(torch.int32)
    is_out = (key > scratch.cutoff[: len(rows)].unsqueeze(1)) & ~logits.isnan()
    _offer(logits.masked_fill(is_out, -math.inf), rows, state, offers)


def _offer(logits: torch.Tensor, rows: torch.Tensor, state: SamplingState, offers: Offers) -> None:
    """What every tile of every row offers."""
    num_rows, vocab_size = logits.shape
    num_tiles = -(-vocab_size // TILE)
    flat = np.full((num_rows, num_tiles * TILE), -np.inf, np.float32)
    flat[:, :vocab_size] = logits.cpu().numpy()
    x = flat.reshape(num_rows, num_tiles, TILE)
    slot = np.maximum(rows.cpu().numpy(), 0)
    temperature, seed, token_index, sample_index = (
        column.cpu().numpy()[slot] for column in (state.temperature, state.seed, state.token_index, state.sample_index)
    )
    keys = round_keys(seed.view(np.uint64))
    indices = token_index, sample_index
    is_bad = np.isnan(x) | (x == np.inf)
    x[is_bad] = -np.inf
    highest = x.max(2)
    with np.errstate(all="ignore"):
        base = np.where(highest > -np.inf, highest, 0)
        y = (x - base[..., None]) / np.where(temperature == 0, 1, temperature)[:, None, None]
        ids = np.arange(num_tiles * TILE // 4, dtype=np.uint32)
        noise = gumbel_noise(keys, *indices, ids, ID_DOMAIN).reshape(y.shape)
        z = np.where(temperature[:, None, None] == 0, y, y + noise)
        tiles = np.arange(-(-num_tiles // 4), dtype=np.uint32)
        weight = np.log(np.exp(y).sum(2)) + gumbel_noise(keys, *indices, tiles, TILE_DOMAIN)[:, :num_tiles]
    weight[temperature == 0] = 0
    highest[is_bad.any(2)] = np.nan
    best = np.minimum(np.arange(num_tiles) * TILE + z.argmax(2), vocab_size - 1)
    for tensor, array in ((offers.highest, highest), (offers.weight, weight), (offers.id, best)):
        tensor.copy_(torch.from_numpy(array))


def sample_pick(
    offers: Offers,
    rows: torch.Tensor,
    state: SamplingState,
    tokens: torch.Tensor,
    is_finite: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    for i, slot in enumerate(rows.tolist()):
        if slot < 0:
            tokens[i], is_finite[i] = 0, 1
            continue
        is_bad = offers.highest[i].isnan()
        highest = offers.highest[i].masked_fill(is_bad, -math.inf)
        top = highest.max()
        temperature = float(state.temperature[slot]) or 1.0
        score = (highest - (top if top > -math.inf else 0.0)) / temperature + offers.weight[i]
        score = score.masked_fill(highest == -math.inf, -math.inf)
        tokens[i] = offers.id[i, int(score.argmax())]
        is_finite[i] = bool(top > -math.inf) and not bool(is_bad.any())
        state.last_token[slot] = tokens[i]
        state.token_index[slot] += 1


def edit_logits(logits: torch.Tensor, edits: Edits, penalties: Penalties) -> None:
    is_edit = edits.row >= 0
    row, id = edits.row[is_edit].long(), edits.id[is_edit].long()
    bias, count = edits.bias[is_edit], edits.count[is_edit]
    x = logits[row, id]
    x = torch.where(bias != 0, (x + bias).clamp_max(LARGEST), x)
    repetition, presence, frequency = penalties.repetition[row], penalties.presence[row], penalties.frequency[row]
    y = torch.where(x > 0, x / repetition, x * repetition).clamp_max(LARGEST)
    y = y - frequency * count - torch.where(count > 0, presence, 0.0)
    logits[row, id] = torch.where(count >= 0, y, x)


def top_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    scratch: FilterScratch,
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    ranks: torch.Tensor,
) -> None:
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, : ids.shape[1] - 1]
    ids.copy_(torch.cat((tokens.long().unsqueeze(1), order), 1))
    logprobs.copy_(torch.log_softmax(logits, 1).gather(1, ids.long()))
    ranks.copy_((logits >= logits.gather(1, ids[:, :1].long())).sum(1))
