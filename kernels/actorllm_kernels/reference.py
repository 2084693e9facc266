"""What the kernels compute, stated plainly in torch: the oracle of their tests.

Owns the statement of the sampler (docs/sampling.md), one row at a time. It has integers of any size for the random words
and a choice of precision for the logits. Slow on purpose: nothing here is arranged for speed, so that it can be read
beside the document. Called by tests, of the CPU sampler and of the compiled kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch

TILE = 256
TILE_DOMAIN = 0
ID_DOMAIN = 1

MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of Salmon et al. (SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def noise_word(seed: int, sample_index: int, token_index: int, id: int, domain: int) -> int:
    """The 32 random bits of one id (domain 1) or one tile number (domain 0)."""
    words = philox4x32((token_index, id >> 2, domain, sample_index), (seed & MASK, seed >> 32))
    return words[id & 3]


def gumbel(words: list[int]) -> torch.Tensor:
    """Gumbel noise, float32: u in float32 as defined, the logarithms rounded once."""
    u = torch.tensor(words, dtype=torch.int64).to(torch.float32)
    u = torch.clamp((u + 0.5) * 2.0**-32, max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-u.double())).to(torch.float32)


def scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits divided by the temperature, shifted to a maximum of 0."""
    return (logits - logits.max()) / temperature


def kept(y: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """Which ids the filters keep, bool [vocab_size]. y: as from `scaled`."""
    keep = torch.ones_like(y, dtype=torch.bool)
    if min_p > 0:
        keep &= y >= math.log(min_p)
    if 0 < top_k < int(keep.sum()):
        keep &= y >= y[keep].sort(descending=True).values[top_k - 1]
    if top_p < 1:
        largest = y[keep].sort(descending=True).values
        mass = largest.exp().cumsum(0)
        reached = torch.nonzero(mass >= top_p * mass[-1])
        keep &= y >= largest[reached[0, 0]]
    return keep


@dataclass(frozen=True, slots=True)
class Choice:
    """A sampled id and by how much it won (see `sample`)."""

    token: int
    margin: float


def sample(
    logits: torch.Tensor,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    sample_index: int = 0,
    token_index: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Choice:
    """The next token of one row. logits: [vocab_size], converted to dtype first. seed: 0 <= seed < 2**64.

    The margin is the gap between the best and the second best logit plus noise, the smaller of the two stages; of the
    logits themselves when the temperature is 0.
    """
    logits = logits.to(dtype)
    if temperature == 0:
        return Choice(int(logits.argmax()), _gap(logits))
    y = scaled(logits, temperature)
    y = torch.where(kept(y, top_k=top_k, top_p=top_p, min_p=min_p), y, -math.inf)

    tiles = torch.split(y, TILE)
    weight = torch.stack([tile.logsumexp(0) for tile in tiles])
    words = [noise_word(seed, sample_index, token_index, t, TILE_DOMAIN) for t in range(len(tiles))]
    weight = weight + gumbel(words).to(dtype)
    t = int(weight.argmax())

    ids = range(t * TILE, t * TILE + len(tiles[t]))
    words = [noise_word(seed, sample_index, token_index, id, ID_DOMAIN) for id in ids]
    z = tiles[t] + gumbel(words).to(dtype)
    return Choice(ids[int(z.argmax())], min(_gap(weight), _gap(z)))


def _gap(scores: torch.Tensor) -> float:
    if len(scores) == 1:
        return math.inf
    best = scores.topk(2).values
    return float(best[0] - best[1])


# The layers, on any float type ------------------------------------------------------------------------------------------


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension (Zhang and Sennrich, arXiv:1910.07467)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def qknorm_rope(
    heads: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Query or key heads [num_tokens, num_heads, head_dim], normed and rotated; pairs are half a head apart.

    cos, sin: [max_positions, head_dim / 2] (Su et al., arXiv:2104.09864).
    """
    if weight is not None:
        heads = rmsnorm(heads, weight, eps)
    first, second = heads.chunk(2, -1)
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    return torch.cat((first * c - second * s, second * c + first * s), -1)


def write_pages(pages: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Keys or values of tokens to their slots (block * block_size + offset; negative: nowhere).

    pages: [num_blocks, num_kv_heads, block_size, head_dim]; rows: [num_tokens, num_kv_heads, head_dim].
    """
    size = pages.shape[2]
    for slot, row in zip(slots.tolist(), rows, strict=True):
        if slot >= 0:
            pages[slot // size, :, slot % size] = row


def float8_codes(x: torch.Tensor) -> torch.Tensor:
    """Numbers as the bits of float8_e4m3fn, uint8 (E4M3 of OCP's 8-bit floating point). More than 448, or NaN, becomes 448."""
    size = x.abs()
    bounded = torch.where(size <= 448.0, size, 448.0).copysign(x)
    return bounded.to(torch.float8_e4m3fn).view(torch.uint8)


def float8_numbers(codes: torch.Tensor) -> torch.Tensor:
    """The numbers of codes, float32."""
    return codes.view(torch.float8_e4m3fn).float()


def activation_mul(x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """activation(gate) * up, with the gate in the first half of the last dimension."""
    gate, up = x.chunk(2, -1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def fused_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str = "",
) -> torch.Tensor:
    """x, normed if there is a norm, times weight [out_features, in_features], and what follows it."""
    y = (x if norm is None else rmsnorm(x, norm, eps)) @ weight.T
    if bias is not None:
        y = y + bias
    if activation:
        y = activation_mul(y, activation)
    return y if residual is None else y + residual


def dequantized(codes: torch.Tensor, scales: torch.Tensor, in_features: int) -> torch.Tensor:
    """The weight that `quantized_gemm` multiplies with, float32 [out_features, in_features]."""
    if codes.dtype == torch.float8_e4m3fn:
        return codes.float() / 256 * scales.unsqueeze(1)
    if codes.dtype == torch.int8:
        return codes.float() * scales.unsqueeze(1)
    pieces = codes.view(len(codes), -1, 1, 16)
    numbers = torch.cat((pieces & 15, pieces >> 4), 2).view(len(codes), scales.shape[0], scales.shape[2] // 2, -1)
    scale, zero = scales.float().transpose(0, 1).unflatten(2, (-1, 2)).unsqueeze(3).unbind(4)
    weight: torch.Tensor = (numbers.float() - 8) * scale + zero
    return weight.flatten(1)[:, :in_features]


def quantized_rows(x: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of 8 bits of each row, and the scales by which they are multiplied, [num_rows, 1].

    kind: int8, or uint8 for the bits of float8_e4m3fn.
    """
    largest, most = x.abs().amax(1, keepdim=True), 448.0 if kind == torch.uint8 else 127.0
    steps = x * torch.where(largest > 1e-30, most / largest, 0.0)
    codes = (
        float8_codes(steps) if kind == torch.uint8 else steps.nan_to_num(0.0).round().clamp(-127, 127).to(torch.int8)
    )
    return codes, torch.where(x.isfinite().all(1, keepdim=True), largest / most, torch.nan)


def scaled_sums(
    sums: torch.Tensor, factors: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums of products of codes [num_rows, N], by rows and by columns."""
    y = sums * factors * scales
    return y if bias is None else y + bias


def embed(ids: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Rows of the table; zeros where an id is outside of it."""
    known = (ids >= 0) & (ids < len(weight))
    return torch.where(known.unsqueeze(1), weight[torch.where(known, ids, 0)], 0) * scale


# The cache and the step ---------------------------------------------------------------------------------------------------


def copy_pages(pool: torch.Tensor, sources: list[int], targets: list[int]) -> torch.Tensor:
    """pool [num_layers, num_blocks, ...] with the sources' contents at the targets."""
    copied = pool.clone()
    copied[:, targets] = pool[:, sources]
    return copied


def clear_pages(pool: torch.Tensor, slots: list[int], is_finite: list[bool]) -> torch.Tensor:
    """pool [num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim] with zeros in the slots of what is not finite."""
    cleared, size = pool.clone(), pool.shape[4]
    for slot, finite in zip(slots, is_finite, strict=True):
        if slot >= 0 and not finite:
            cleared[:, slot // size, :, :, slot % size] = 0
    return cleared


@dataclass(frozen=True, slots=True)
class StepRow:
    """What one row of a decode step works on."""

    id: int
    position: int
    kv_slot: int
    seq_len: int


def step_prep(slot: int, last_token: list[int], num_computed: list[int], table: list[list[int]], page: int) -> StepRow:
    """The next token of a slot (-1: padding) at the next position; advances num_computed."""
    if slot < 0:
        return StepRow(0, 0, -1, 0)
    position = num_computed[slot]
    num_computed[slot] += 1
    return StepRow(last_token[slot], position, table[slot][position // page] * page + position % page, position + 1)


def plan_decode(
    seq_lens: list[int], num_programs: int, num_kv_heads: int, q_len: int, window: int, tile: int, min_tiles: int
) -> tuple[list[int], int]:
    """Cumulative tiles of one head by row, from 0, and the tiles of one program."""
    ends = [0]
    for n in seq_lens:
        first = max(0, n - q_len - window + 1) // tile if window else 0
        ends.append(ends[-1] + -(-n // tile) - first)
    return ends, max(min_tiles, -(-ends[-1] * num_kv_heads // num_programs))


def gather_pages(pages: torch.Tensor, blocks: list[int], num_tokens: int) -> torch.Tensor:
    """The first tokens of a sequence, [num_tokens, num_kv_heads, head_dim].

    pages: [num_blocks, num_kv_heads, block_size, head_dim].
    """
    return pages[blocks].transpose(1, 2).flatten(0, 1)[:num_tokens]


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    skipped: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last tokens of one sequence over all of it: [num_new, num_heads, head_dim], as q.

    keys, values: [num_tokens, num_kv_heads, head_dim]. window: how many keys a token sees, itself included (0: all).
    skipped: keys at the beginning that no token sees. softcap: scores become softcap * tanh(scores / softcap).
    sinks: [num_heads] logits that take part in the softmax only.
    """
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(len(keys) - len(q), len(keys)).unsqueeze(1)
    key = torch.arange(len(keys))
    is_seen = key <= position
    if window:
        is_seen &= key > position - window
    is_seen &= key >= skipped
    scores = scores.masked_fill(~is_seen, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, len(q), 1)), 2)
    weights = torch.softmax(scores, -1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values)


def rotated_pairs(x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [num_tokens, num_heads, dim], whose adjacent numbers are a pair; cos, sin: [max_positions, dim / 2] (arXiv:2104.09864)."""
    first, second = x[..., ::2], x[..., 1::2]
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    return torch.stack((first * c - second * s, second * c + first * s), -1).flatten(-2)


def latent_tokens(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """What the cache holds of tokens: the latent, normed, and the part of all heads, rotated (DeepSeek-V2, arXiv:2405.04434).

    tokens: [num_tokens, rank + rotary]; norm: [rank].
    """
    latent, rotary = tokens[:, : len(norm)], tokens[:, len(norm) :]
    turned = rotated_pairs(rotary.unsqueeze(1), positions, cos, sin)[:, 0]
    return torch.cat((rmsnorm(latent, norm, eps), turned), 1)


def latent_attention(
    q: torch.Tensor, latents: torch.Tensor, rank: int, scale: float, *, skipped: int = 0
) -> torch.Tensor:
    """The last tokens of one sequence over all of it: [num_new, num_heads, rank].

    q: [num_new, num_heads, width], absorbed; latents: [num_tokens, width], of which the first `rank` numbers are values as well.
    skipped: as of `attention`.
    """
    rows = latents.unsqueeze(1)
    return attention(q, rows, rows, scale, skipped=skipped)[..., :rank]


# Logits beside the draw ---------------------------------------------------------------------------------------------------


def edit_logit(x: float, bias: float, count: int, presence: float, frequency: float, repetition: float) -> float:
    """One logit after its bias and, with a count of at least 0, its penalties; count: how often the id is in the output."""
    if bias:
        x = min(x + bias, 1e30)
    if count >= 0:
        x = min(x / repetition if x > 0 else x * repetition, 1e30)
        x -= frequency * count + (presence if count > 0 else 0)
    return x


def top_logprobs(logits: torch.Tensor, token: int, num_top: int) -> tuple[list[int], torch.Tensor, int]:
    """Ids, the chosen one first and then the most likely (equal ones in their order), their log-probabilities, the rank."""
    order = torch.sort(logits, descending=True, stable=True).indices[:num_top].tolist()
    ids = [token, *order]
    return ids, torch.log_softmax(logits, 0)[ids], int((logits >= logits[token]).sum())


def lora_shrink(x: torch.Tensor, down: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Inputs times the rows of the matrix of each token's adapter; zeros where there is none (Hu et al., arXiv:2106.09685).

    x: [num_tokens, in_features]; down: [num_slots, width, in_features]; slots: [num_tokens], counted from 1; 0: none.
    """
    hidden = torch.zeros(len(x), down.shape[1], dtype=x.dtype)
    for token, slot in enumerate(slots.tolist()):
        if slot:
            hidden[token] = down[slot - 1] @ x[token]
    return hidden


def lora_expand(hidden: torch.Tensor, up: torch.Tensor, starts: list[int], slots: torch.Tensor) -> torch.Tensor:
    """What adapters add to the outputs of targets that stand side by side.

    hidden: [num_tokens, num_targets * rank]; up: [num_slots, out_features, rank]; starts: [num_targets + 1].
    """
    rank = up.shape[2]
    added = torch.zeros(len(hidden), up.shape[1], dtype=hidden.dtype)
    for token, slot in enumerate(slots.tolist()):
        for target, (first, end) in enumerate(pairwise(starts)):
            if slot:
                added[token, first:end] = up[slot - 1, first:end] @ hidden[token, target * rank : (target + 1) * rank]
    return added


# Experts ------------------------------------------------------------------------------------------------------------------


def router_scores(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x: [num_tokens, hidden_size]; weight: [num_experts, hidden_size]; bias: [num_experts]."""
    scores = x @ weight.T
    return scores if bias is None else scores + bias


def chosen_experts(
    scores: list[float],
    num_active: int,
    normalizes: bool,
    *,
    correction: list[float] | None = None,
    num_groups: int = 1,
    num_active_groups: int = 1,
    scale: float = 1.0,
) -> tuple[list[int], list[float]]:
    """Of one token: the experts with the highest scores, of equal ones the first, and their weights (arXiv:1701.06538).

    correction: weights are sigmoids of the scores, and what is compared has this added (DeepSeek-V3, arXiv:2412.19437); None: they
    are those of a softmax. num_groups: of which the best num_active_groups count, by their best expert, or by their best two.
    """
    compared, kind = scores, 1
    if correction is not None:
        compared, kind = [_sigmoid(score) + more for score, more in zip(scores, correction, strict=True)], 2
    size = len(scores) // num_groups
    groups = [sorted(compared[i : i + size], reverse=True) for i in range(0, len(scores), size)]
    best = sorted(range(num_groups), key=lambda i: (-sum(groups[i][:kind]), i))[:num_active_groups]
    here = [i for i in range(len(scores)) if i // size in best]
    numbers = sorted(here, key=lambda i: (-compared[i], i))[:num_active]
    if correction is not None:
        weights = [_sigmoid(scores[i]) for i in numbers]
        total = math.fsum(weights) if normalizes else 1.0
    else:
        weights = [math.exp(scores[i] - max(scores)) for i in numbers]
        total = math.fsum(weights if normalizes else (math.exp(score - max(scores)) for score in scores))
    return numbers, [weight / total * scale for weight in weights]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def grouped_pairs(numbers: torch.Tensor, first: int, num_experts: int) -> tuple[list[int], list[int]]:
    """The pairs of the experts first..first+num_experts-1, one expert after the other, and where each begins, with the end.

    numbers: the expert of each pair.
    """
    order: list[int] = []
    starts = [0]
    for expert in range(first, first + num_experts):
        order += [pair for pair, number in enumerate(numbers.flatten().tolist()) if number == expert]
        starts.append(len(order))
    return order, starts


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    numbers: list[int],
    *,
    activation: str = "",
    swiglu: tuple[float, float] | None = None,
) -> torch.Tensor:
    """The product of each pair's row with its expert's weight, and the activation.

    x: [num_rows, in_features]; weight: [num_experts, out_features, in_features]; bias: [num_experts, out_features]; numbers: the
    expert of each pair; as many pairs of each row, one row after the other.
    """
    found = []
    for pair, number in enumerate(numbers):
        row, own = x[pair * len(x) // len(numbers)], None if bias is None else bias[number]
        y = fused_linear(row[None], weight[number], bias=own)
        if swiglu is not None:
            alpha, limit = swiglu
            gate, up = y.chunk(2, -1)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            y = (up + 1) * gate * torch.sigmoid(gate * alpha)
        elif activation:
            y = activation_mul(y, activation)
        found.append(y[0])
    return torch.stack(found)


def summed_experts(found: torch.Tensor, weights: torch.Tensor, is_here: torch.Tensor) -> torch.Tensor:
    """found: [num_tokens, num_active, size]; weights, is_here: [num_tokens, num_active]."""
    return torch.where(is_here.unsqueeze(2), found, 0).mul(weights.unsqueeze(2)).sum(1)
