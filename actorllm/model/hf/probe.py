"""The last check of a model of transformers: in chunks and through our cache, it must say what transformers says.

Two sequences of random ids run together, one in short chunks, one as decode rows, over blocks in no order. The logits of
every token after the first step must equal those of the stock model with transformers' own eager attention, for the
whole sequence. What this finds is state that is kept outside of keys and values, or that mixes neighbours in the batch,
whatever the model calls it. Called by `transformers_backend.load`, which repeats the check when it has packed the weights, and
by `cuda.transformers_model.load`, for the attention of a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.errors import UnsupportedModelError
from actorllm.model.inputs import StepInputs
from actorllm.types.quantization import bits_of

if TYPE_CHECKING:
    from actorllm.model.hf.plan import TransformersPlan

NUM_BLOCKS = 7
CHUNKS = (8, 3, 3, 3, 3)
"""Of the first sequence; the second one has as many steps: a prefill of SECOND_PREFILL tokens, then decode rows."""
PROBED_POSITIONS = sum(CHUNKS) + 1
"""However short the sequences of an engine are."""
SECOND_PREFILL = 3

TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""For `relative_error`. What is really missing costs 0.1 to 1.4; rounding costs 1e-6, and 0.01 to 0.1 in bfloat16. In float16
it costs an eighth of that."""

MAX_NOISE = 0.25
"""Rounding that chooses other experts costs still more: then that is the measure, up to this (`noise_limit`)."""
NUM_NOISES = 3
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""By how much a value and its neighbour in the type differ at most."""

MAX_QUANTIZED = {8: 0.25, 4: 0.5}
"""By bits. Rounding to 8 costs 0.02 to 0.05, to 4 some 0.1 to 0.3; a layer that multiplies by its weight in another way costs 1
and more."""

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stock:
    """What the stock model says of two sequences."""

    sequences: tuple[Tokens, Tokens]
    logits: torch.Tensor
    """float32, of the tokens that are not in the first step: those of the first sequence, then those of the second."""


class Probed(Protocol):
    """A loaded model, as it is driven here. Caches and hidden states are its own."""

    config: TransformersPlan
    dtype: torch.dtype
    probed_block_size: int
    """Tokens per block of the caches: the fewest that there can be."""

    def stock(self) -> contextlib.AbstractContextManager[Any]:
        """The model with transformers' own attention, meanwhile."""

    def place(self, ids: Tokens) -> torch.Tensor:
        """Token ids where the model is."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """What the model makes of ids, [..., embedding_size]."""

    def new_cache(self, num_blocks: int) -> Any:
        """An empty one."""

    def forward(self, inputs: StepInputs, cache: Any) -> torch.Tensor:
        """The hidden states of a step, [num_tokens, hidden_size]."""

    def select(self, hidden: torch.Tensor, rows: Tokens) -> torch.Tensor:
        """Those of some rows."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [num_rows, vocab_size] of what `select` returned."""


def probe(decoder: Probed) -> Stock:
    """Raises UnsupportedModelError if the logits differ, or if either of the two ways fails; returns what is right."""
    rng = np.random.default_rng(0)
    vocab_size = decoder.config.vocab_size
    first = rng.integers(0, vocab_size, sum(CHUNKS))
    second = rng.integers(0, vocab_size, SECOND_PREFILL + len(CHUNKS) - 1)
    with torch.inference_mode(), _refusing(decoder), decoder.stock() as model:
        found = Stock((first, second), _logits_of(decoder, model, first, second))
    check(decoder, found)
    return found


@torch.inference_mode()
def check(decoder: Probed, stock: Stock) -> None:
    """Raises UnsupportedModelError if the decoder's logits are others, or if it fails."""
    limit = TOLERANCES[decoder.dtype]
    with _refusing(decoder):
        distance = relative_error(_in_chunks(decoder, *stock.sequences), stock.logits)
        if distance > limit and decoder.dtype in ROUNDING:
            limit = max(limit, noise_limit(decoder, lambda model: _logits_of(decoder, model, *stock.sequences)))
    if not distance <= limit:
        raise UnsupportedModelError(
            f"architecture {decoder.config.architecture!r} is not supported: in chunks its logits differ from "
            f"transformers' own (by {distance:.2g} standard deviations), so it keeps state outside of keys and values"
        )


@torch.inference_mode()
def check_quantized(decoder: Probed, stock: Stock, method: str) -> None:
    """Raises UnsupportedModelError if rounding the weights has changed more than it may, or if the decoder fails."""
    with _refusing(decoder):
        distance = relative_error(_in_chunks(decoder, *stock.sequences), stock.logits)
    check_change(decoder.config.architecture, method, distance)


def check_change(architecture: str, method: str, distance: float) -> None:
    """Raises UnsupportedModelError if rounding the weights has changed more than it may. distance: `relative_error` of logits."""
    limit = MAX_QUANTIZED[bits_of(method)]
    if not distance <= limit:
        raise UnsupportedModelError(
            f"quantization={method!r}: the logits of architecture {architecture!r} change by {distance:.2g} "
            f"standard deviations, and {limit} is the most that rounding may do; leave it at None"
        )


@torch.inference_mode()
def probe_embeds(decoder: Probed, embedding_size: int) -> None:
    """Raises UnsupportedModelError if a prompt given as its embeddings has other states than the same as ids.

    embedding_size: what prompts are checked against.
    """
    architecture = decoder.config.architecture
    ids = np.random.default_rng(0).integers(0, decoder.config.vocab_size, decoder.probed_block_size + 1)
    table = np.arange(2, dtype=np.int32)
    try:
        rows = decoder.embed(decoder.place(ids))
        inputs = step_inputs(decoder, None, [(ids, 0, table)])
        expected = decoder.forward(inputs, decoder.new_cache(NUM_BLOCKS))
        inputs.embedded = np.arange(ids.size)
        inputs.embeds = rows.contiguous().view(torch.uint8).reshape(-1).cpu().numpy()
        inputs.token_ids = np.zeros_like(ids)
        states = decoder.forward(inputs, decoder.new_cache(NUM_BLOCKS))
    except Exception as error:
        raise UnsupportedModelError(
            f"enable_prompt_embeds=True: architecture {architecture!r} cannot start from embeddings: "
            f"{type(error).__name__}: {error}"
        ) from error
    is_same = torch.equal(states, expected)
    if states.is_cuda:  # which repeats sums of experts only up to rounding
        is_same = relative_error(states.float(), expected.float()) <= TOLERANCES[decoder.dtype]
    if rows.shape[1] != embedding_size or not is_same:
        raise UnsupportedModelError(
            f"enable_prompt_embeds=True: architecture {architecture!r} does more with ids than to look up "
            f"{embedding_size} numbers for each"
        )


@contextlib.contextmanager
def _refusing(decoder: Probed) -> Iterator[None]:
    """Whatever is raised within is why the model is not supported."""
    try:
        yield
    except Exception as error:
        reason = f"it cannot be run over the paged cache: {type(error).__name__}: {error}"
        raise UnsupportedModelError(
            f"architecture {decoder.config.architecture!r} is not supported: {reason}"
        ) from error


def relative_error(ours: torch.Tensor, stock: torch.Tensor) -> float:
    """Of two [num_tokens, vocab_size]: the root mean square difference of a token's logits, in their standard deviations.

    The median over the tokens, so that one expert chosen otherwise by rounding does not decide.
    """
    spread = stock.std(1).clamp_min(1e-30)
    return float(((ours - stock).square().mean(1).sqrt() / spread).median())


def _in_chunks(decoder: Probed, first: Tokens, second: Tokens) -> torch.Tensor:
    """Logits of the tokens that are not in the first step, float32 [num_tokens, vocab_size]."""
    tables = [np.array([5, 0, 3, 6, 1], np.int32), np.array([4, 2], np.int32)]
    cache = decoder.new_cache(NUM_BLOCKS)
    start, of_first, of_second = 0, [], []
    for i, count in enumerate(CHUNKS):
        chunk = (first[start : start + count], start, tables[0])
        if i == 0:
            decoder.forward(step_inputs(decoder, None, [chunk, (second[:SECOND_PREFILL], 0, tables[1])]), cache)
        else:
            where = SECOND_PREFILL + i - 1
            hidden = decoder.forward(step_inputs(decoder, (int(second[where]), where, tables[1]), [chunk]), cache)
            logits = decoder.logits(decoder.select(hidden, np.arange(1 + count)))
            of_second.append(logits[:1])
            of_first.append(logits[1:])
        start += count
    return torch.cat((*of_first, *of_second))


def _logits_of(decoder: Probed, model: Any, first: Tokens, second: Tokens) -> torch.Tensor:
    """What the stock model says of the same tokens, each sequence whole."""
    stock = [model(input_ids=decoder.place(ids)[None], use_cache=False).logits[0] for ids in (first, second)]
    return torch.cat((stock[0][CHUNKS[0] :], stock[1][SECOND_PREFILL:])).float()


def noise_limit(decoder: Probed, run: Callable[[Any], torch.Tensor]) -> float:
    """Twice as much as a result of the stock model moves when what its attention gives is rounded otherwise in every layer.

    run: makes that result with the stock model. MAX_NOISE is the most.

    Nothing of ours is in it: what our attention does wrong must not count as rounding.
    """
    random = torch.Generator().manual_seed(0)
    epsilon = ROUNDING[decoder.dtype]

    def blur(module: torch.nn.Module, given: Any, output: Any) -> Any:
        states, *others = output if isinstance(output, tuple) else (output,)
        factors = 1 + epsilon * (2 * torch.rand(states.shape, generator=random).to(states.device) - 1)
        blurred = (states.float() * factors).to(states.dtype)
        return (blurred, *others) if isinstance(output, tuple) else blurred

    with decoder.stock() as model:
        exact = run(model)
        hooks = [model.get_submodule(y.module).register_forward_hook(blur) for y in decoder.config.layers]
        try:
            return min(2 * max(relative_error(run(model), exact) for _ in range(NUM_NOISES)), MAX_NOISE)
        finally:
            for hook in hooks:
                hook.remove()


def step_inputs(
    decoder: Probed, decode: tuple[int, int, np.ndarray] | None, prefills: list[tuple[np.ndarray, int, np.ndarray]]
) -> StepInputs:
    """A step of one decode row (token, position, block table) and some chunks (tokens, first position, block table)."""
    size = decoder.probed_block_size
    chunks = [(np.array([decode[0]]), decode[1], decode[2])] if decode is not None else []
    chunks += prefills
    positions = [first + np.arange(len(tokens)) for tokens, first, _ in chunks]
    slots = [
        table[where // size].astype(np.int64) * size + where % size
        for where, (_, _, table) in zip(positions, chunks, strict=True)
    ]
    num_decodes = len(chunks) - len(prefills)
    counts = [len(tokens) for tokens, _, _ in prefills]
    decoded = np.array([decode[1]] if decode is not None else [], np.int64)
    return StepInputs(
        token_ids=np.concatenate([tokens for tokens, _, _ in chunks]).astype(np.int64),
        positions=np.concatenate(positions),
        kv_slots=np.concatenate(slots),
        num_decodes=num_decodes,
        decode_slots=np.arange(num_decodes, dtype=np.int32),
        decode_lengths=decoded + 1,
        decode_positions=decoded,
        decode_version=0,
        decode_table=decode[2][None] if decode is not None else np.zeros((0, 0), np.int32),
        is_sorted=False,
        prefill_slots=list(range(num_decodes, len(chunks))),
        prefill_starts=[num_decodes + sum(counts[:i]) for i in range(len(counts))],
        prefill_counts=counts,
        prefill_first=[first for _, first, _ in prefills],
        prefill_tables=[table for _, _, table in prefills],
        result_slots=np.zeros(0, np.int32),
        result_tokens=np.zeros(0, np.int64),
        forks=[],
        rows_version=0,
        num_prompts=[first + len(tokens) for tokens, first, _ in prefills],
    )
