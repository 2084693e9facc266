"""`ArcticDrafter`: method "suffix" by the suffix trees of the package arctic-inference, where that is installed.

The package keeps a tree of each request and one of all responses of a cache. How soon a request is done tells something about the
texts that its drafts come from. So each cache salt has a cache of its own, as in `FinishedOutputs`. A row hands its tokens over as
it drafts. A request that has left its slot is stopped at the next draft of any row. The oldest responses make room for new ones.
Nothing of it is needed for a token. Owned by `Speculator`.
"""

from __future__ import annotations

import importlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from actorllm.errors import is_failure
from actorllm.messages import I32
from actorllm.model.inputs import PersistentBatch
from actorllm.model.speculation.finished import MAX_TOKENS
from actorllm.model.speculation.histories import Histories, History
from actorllm.types.drafter import Speculation

logger = logging.getLogger(__name__)

MODULE, CLASS = "arctic_inference.suffix_decoding", "SuffixDecodingCache"


def find_cache() -> Callable[..., Any] | None:
    """The package's class for a cache; None: it is not installed, or cannot be imported."""
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(MODULE), CLASS)
    except ModuleNotFoundError:
        return None
    except Exception as error:  # of a package of another's
        logger.warning(
            "%s cannot be imported (%s: %s); suffixes are looked up without it", MODULE, type(error).__name__, error
        )
        return None
    return found


@dataclass(slots=True)
class ActiveRequest:
    """A request that is active in the cache of its salt. num_outputs: of its tokens, those that the cache has."""

    history: History
    request: int
    num_outputs: int


class ArcticDrafter:
    """See the module docstring. Drafts for all rows of a step (`BatchDrafter`).

    Arguments:
        options: of the engine.
        vocab_size: of the model.
        make_cache: what `find_cache` has found.
    """

    def __init__(self, options: Speculation, vocab_size: int, make_cache: Callable[..., Any]) -> None:
        self._options, self._vocab_size, self._make_cache = options, vocab_size, make_cache
        self._depth = options.suffix_decoding_max_tree_depth
        self._caches: dict[bytes, Any] = {}
        """By salt; those without a request go."""
        self._rows: dict[int, ActiveRequest] = {}
        """By slot."""
        self._ended: OrderedDict[int, tuple[bytes, int]] = OrderedDict()
        """Requests that have ended, the oldest first: salt, and tokens of the response."""
        self.num_ended_tokens = 0
        self._next_request = 0
        self._is_broken = False

    def draft(self, batch: PersistentBatch, histories: Histories, slots: I32, wanted: I32) -> list[list[int]]:
        if self._is_broken:
            return [[] for _ in slots]
        try:
            self._stop_old(histories)
            columns = zip(slots.tolist(), wanted.tolist(), strict=True)
            return [self._of_row(slot, histories.of(slot), number) for slot, number in columns]
        except BaseException as error:  # of a package of another's: a guess that is not made costs nothing
            if not is_failure(error):
                raise
            self._is_broken = True
            logger.exception("%s failed; rows are computed without drafts from now on", MODULE, exc_info=error)
            return [[] for _ in slots]

    def observe(self, slots: I32, num_drafted: I32, num_accepted: I32) -> None:
        return

    def _of_row(self, slot: int, history: History | None, wanted: int) -> list[int]:
        assert history is not None
        tokens, row = history.tokens, self._rows.get(slot)
        if row is not None and history.num_outputs - row.num_outputs > tokens.size:
            self._stop(slot)  # some of its tokens are not known any more
            row = None
        if row is None:
            row = self._rows[slot] = self._started(history)
        cache = self._caches[history.salt]
        if num_new := history.num_outputs - row.num_outputs:
            cache.add_active_response(row.request, tokens[tokens.size - num_new :].tolist())
            row.num_outputs = history.num_outputs
        found = cache.speculate(
            row.request,
            tokens[-self._depth :].tolist(),
            max_spec_tokens=wanted,
            max_spec_factor=self._options.suffix_decoding_max_spec_factor,
            min_token_prob=self._options.suffix_decoding_min_token_prob,
        )
        drafts = [int(token) for token in found.token_ids[:wanted]]
        wrong = next((i for i, token in enumerate(drafts) if not 0 <= token < self._vocab_size), len(drafts))
        return drafts[:wrong]

    def _started(self, history: History) -> ActiveRequest:
        """With its prompt, and its newest output."""
        self._next_request += 1
        cache = self._caches.get(history.salt)
        if cache is None:
            most = self._options.suffix_decoding_max_cached_requests
            cache = self._make_cache(max_tree_depth=self._depth, max_cached_requests=most)
            self._caches[history.salt] = cache
        tokens = history.tokens
        num_outputs = min(history.num_outputs, tokens.size)
        cache.start_request(self._next_request, tokens[: tokens.size - num_outputs].tolist())
        return ActiveRequest(history, self._next_request, history.num_outputs - num_outputs)

    def _stop_old(self, histories: Histories) -> None:
        """Requests whose slots are free, or another's."""
        for slot in [slot for slot, row in self._rows.items() if histories.of(slot) is not row.history]:
            self._stop(slot)

    def _stop(self, slot: int) -> None:
        row = self._rows.pop(slot)
        salt = row.history.salt
        self._caches[salt].stop_request(row.request)
        self._ended[row.request] = salt, row.num_outputs
        self.num_ended_tokens += row.num_outputs
        most = self._options.suffix_decoding_max_cached_requests
        while len(self._ended) > most or self.num_ended_tokens > MAX_TOKENS:
            request, (of, num_tokens) = self._ended.popitem(last=False)
            self.num_ended_tokens -= num_tokens
            cache = self._caches[of]
            if request in cache.cached_requests:  # else it has made room by itself
                cache.evict_cached_response(request)
            if not cache.active_requests and all(other != of for other, _ in self._ended.values()):
                del self._caches[of]
