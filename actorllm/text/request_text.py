"""The text of one request, from its tokens: detokenization and stop strings together.

Owns, for one request, which text may be given out after which token. It is a function of the tokens alone. So a request that is
submitted again with the tokens it has had (after a crash) goes on at the same character. Nothing is repeated, and what had been
held back comes later.

Called by the scheduler actor after a step. Where the text is not asked for, there is no RequestText.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actorllm.text.detokenizer import Detokenizer
from actorllm.text.stop import StopMatcher
from actorllm.text.token_text import LogprobText
from actorllm.text.tokenizer import I32, Tokenizer


class RequestText:
    """Turns the output tokens of a request into text, up to a stop string.

    output_ids_so_far: output tokens whose text was given out before, as far as it was certain. min_tokens: a stop string
    is found only if it is completed by a later output token than this one (counted from 1); it may begin earlier.

    A token that ends the request itself (end of text, a stop token id) has no text unless include_stop; the caller leaves
    it out.
    """

    __slots__ = ("_detokenizer", "_matcher", "_min_tokens", "_num_tokens", "logprobs", "stop_string")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] | I32,
        output_ids_so_far: Sequence[int] | I32 = (),
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens, spaces_between_special_tokens)
        self._matcher = StopMatcher(stop, include_stop) if stop else None
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.stop_string: str | None = None
        """The stop string that was found; there is no text after it."""
        self.logprobs: LogprobText | None = None
        """Set where log-probabilities were asked for."""
        self.push(output_ids_so_far)

    def push(self, token_ids: Sequence[int] | I32) -> tuple[str, str | None, int]:
        """`(new text, the stop string it ends at or None, how many of the tokens belong to the output)`."""
        ids: Sequence[int] = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
        if self._matcher is None:
            if len(ids) == 1:
                return self._detokenizer.push(ids[0]), None, 1
            return self._detokenizer.push_many(ids), None, len(ids)
        if self.stop_string is not None:
            return "", self.stop_string, 0
        pieces: list[str] = []
        for num_used, token_id in enumerate(ids, 1):
            self._num_tokens += 1
            text, stop = self._matcher.push(self._detokenizer.push(token_id), self._num_tokens > self._min_tokens)
            pieces.append(text)
            if stop is not None:
                self.stop_string = stop
                return "".join(pieces), stop, num_used
        return "".join(pieces), None, len(ids)

    def finish(self) -> str:
        """The text that was still held back, when the output ends without a stop string; empty when it ended with one."""
        if self.stop_string is not None:
            return ""
        text = self._detokenizer.finish()
        if self._matcher is None:
            return text
        # Half a character at the end is not what a stop string is made of.
        certain, _ = self._matcher.push(text, can_stop=False)
        return certain + self._matcher.flush()
