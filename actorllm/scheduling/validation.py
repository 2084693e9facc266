"""`SubmitValidation`: makes a `Sequence` of a request that comes in, or says why it can never run.

Frontends check the same before; this guards the scheduler against those that do not. Owns the order of arrival. What refuses
a request for the time being (`admission`, a deadline that has passed) is not decided here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from actorllm.kvcache.prefix_index import HASH_BYTES
from actorllm.messages import POOLING_CODES, Submit
from actorllm.messages.embeds import EMBEDDED, LOWEST_ID, longest_whole, wrong_rows
from actorllm.messages.logit_rules import SamplingRules
from actorllm.scheduling.limits import Limits
from actorllm.scheduling.repetition import RepetitionWatch
from actorllm.scheduling.sequence import Sequence
from actorllm.types.pooling_head import MAX_VECTOR_BYTES

MAX_PAIR_START = 1 << 24
"""It travels in 24 bits (`NewRow.pooling`)."""


class SubmitValidation:
    """limits: those of the engine, whatever is in force now. silent_ids: ends of text that are no stop_reason."""

    def __init__(
        self,
        limits: Limits,
        *,
        block_size: int,
        vocab_size: int,
        eos_ids: frozenset[int],
        silent_ids: frozenset[int],
        embedding_bytes: int,
        max_source: int = 0,
        max_target: int = 0,
        pools_only: bool = False,
        vector_size: int = 0,
    ) -> None:
        """max_source, max_target: most rows of an encoder, and tokens behind them; 0: the model has none. pools_only: no
        request samples, so that a step never holds a decode row. vector_size: numbers of a vector; 0: no request is pooled."""
        self._limits = limits
        self._pools_only = pools_only
        self._vector_size = vector_size
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._silent_ids = silent_ids
        self._embedding_bytes = embedding_bytes
        self._max_source, self._max_target = max_source, max_target
        self._num_arrivals = 0

    def take(self, frontend: int, submit: Submit, now: float) -> Sequence:
        """The next request, with nothing checked yet."""
        known = np.concatenate((submit.prompt, submit.output)) if submit.output.size else submit.prompt
        # A pooled request ends where its first token would be.
        limit = submit.prompt.size + submit.max_tokens if submit.pooling is None else known.size + 1
        eos = frozenset() if submit.ignore_eos else self._eos_ids
        sequence = Sequence(
            key=(frontend, submit.rid),
            submit=submit,
            arrival_index=self._num_arrivals,
            known=known,
            limit=min(limit, self._limits.max_model_len),
            stop_ids=eos.union(submit.stop_token_ids),
            silent_ids=eos & self._silent_ids,
            queued=now,
            first_token=submit.first_token if submit.output.size else None,
        )
        self._num_arrivals += 1
        return sequence

    def refusal(self, sequence: Sequence) -> str | None:
        """Why a request can never run; None: it can."""
        submit, size = sequence.submit, sequence.known.size
        if not submit.prompt.size:
            return "the prompt is empty"
        if submit.pooling not in POOLING_CODES:
            return f"there is no pooling {submit.pooling!r:.40}"
        if submit.pooling is not None and not self._vector_size:
            return "this engine generates text and makes no vectors"
        if submit.pair_start and (submit.pooling is None or not 0 < submit.pair_start < min(size, MAX_PAIR_START)):
            return f"pair_start={submit.pair_start} is no place in a pooled prompt of {size} tokens"
        if submit.pooling == "all":
            if submit.is_chunkable:
                return "a vector of every token needs the prompt as a whole"
            if 4 * self._vector_size * self._limits.max_tokens > MAX_VECTOR_BYTES:
                return "the vectors of all tokens of a step may be more than one message holds"
        if submit.pooling is None and self._pools_only:
            return "this engine makes vectors and does not generate"
        if size + (submit.pooling is None) > self._limits.max_model_len:
            return f"{size} tokens leave no room for output: max_model_len is {self._limits.max_model_len}"
        if size >= sequence.limit and submit.pooling is None:
            return f"max_tokens={submit.max_tokens} are emitted already"
        # Ids below zero count only where the prompt has rows for them.
        if submit.prompt_embeds.size:
            if error := wrong_rows(submit, self._embedding_bytes):
                return error
            is_inside = int(sequence.known.min()) >= LOWEST_ID and int(sequence.known.max()) < self._vocab_size
        else:
            most = int(np.maximum.reduce(sequence.known.view(np.uint32)))  # an id below zero is a very large one
            is_inside = most < self._vocab_size
        if not is_inside:
            return f"a token id is outside the vocabulary of {self._vocab_size}"
        # Rows of an encoder come before the tokens of its decoder.
        if self._max_source and (error := self._wrong_source(sequence)):
            return error
        num_hashes, num_full = submit.block_hashes.size / HASH_BYTES, submit.prompt.size // self._block_size
        if num_hashes and num_hashes != num_full:
            return (
                f"{submit.block_hashes.size} bytes of block hashes are not {HASH_BYTES} for each of {num_full} blocks"
            )
        # In the worst case every other slot decodes. A whole prompt must fit beside them, or it might wait for ever.
        always_free = self._limits.max_tokens
        if not self._pools_only:
            always_free -= self._limits.max_seqs - 1
        if sequence.is_whole and size > always_free:
            return f"the prompt must not be chunked, and a step has room for {always_free} of its {size} tokens at any time"
        # The rows of an item that attend to each other stay in one chunk, which must fit in the same way.
        if submit.prompt_embeds.size and (longest := longest_whole(submit.prompt)) > always_free:
            return f"{longest} rows must not be cut, and a step has room for {always_free} tokens at any time"
        return None

    def _wrong_source(self, sequence: Sequence) -> str | None:
        """What is wrong with the rows of an encoder, which are the first positions of a prompt."""
        if not sequence.submit.prompt_embeds.size:
            return "the model has an encoder, and the prompt has no rows of it"
        prompt = sequence.submit.prompt
        count = int(np.count_nonzero(prompt < 0))
        if count > self._max_source or (prompt[:count] != EMBEDDED).any() or count == prompt.size:
            return f"{count} rows of an encoder must come first, {self._max_source} at most, with tokens of the decoder behind"
        if sequence.limit - count > self._max_target:
            return (
                f"max_tokens={sequence.submit.max_tokens} are more than the decoder's {self._max_target} positions hold"
            )
        return None

    def take_rules(self, sequence: Sequence, given: dict[str, Any]) -> str | None:
        """Read what a request says of its sampling. Returns why that cannot be used."""
        try:
            rules = SamplingRules.from_fields(given)
            rules.check(self._vocab_size)
            if rules.num_prompt_logprobs >= 0 and sequence.submit.prompt_embeds.size:
                raise ValueError("there are no prompt_logprobs where the prompt has embeddings instead of token ids")
            if rules.repetition is not None:
                room = sequence.limit - sequence.num_prompt
                sequence.watch = RepetitionWatch(*rules.repetition, room, sequence.submit.output)
        except (TypeError, ValueError) as wrong:
            return f"its sampling rules cannot be used: {wrong}"
        sequence.rules = rules
        return None
