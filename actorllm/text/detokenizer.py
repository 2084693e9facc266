"""Token ids to text, as they come.

Owns the state of one request's stream: a `tokenizers` DecodeStream, and what must be known to get out of its dead ends. The
DecodeStream gives text out as soon as no later token can change it. The dead ends:

1. a character that is never completed would be withheld for ever: `finish` gives it out, as U+FFFD;
2. bytes that never become text (a model with random weights) would pile up, and each token would cost more than the one before.
   After MAX_WITHHELD tokens without text, what there is goes out and the stream starts anew;
3. a stream seeded with a prompt that ends within a character would repeat the prompt's text: such a prompt is not used;
4. some decoders rewrite text that was given out ("Invalid prefix"): what is pending goes out and the stream starts anew.

The pieces put together are the text of the output as it follows the prompt. For text that is valid UTF-8 that is what
decoding all at once gives. Called by actorllm.text.request_text, in the process that makes the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from tokenizers.decoders import DecodeStream

from actorllm.text.tokenizer import I32, Tokenizer

MAX_WITHHELD = 16
"""Tokens without text after which what is pending goes out as it is. No character takes as many."""

NUM_CONTEXT = 6
"""Ids before the first new one that a decoder gets to see: they decide about a leading space."""

REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one request's output.

    spaces_between_special_tokens=False: a special or added token that follows another one is exactly its own name, without
    what the decoder would put in front of it. It means nothing where special tokens are skipped.
    """

    __slots__ = ("_added", "_backend", "_recent", "_skip", "_stream", "_was_added", "_withheld")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] | I32 = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._backend = tokenizer.backend
        self._skip = skip_special_tokens
        is_as_decoded = skip_special_tokens or spaces_between_special_tokens
        self._added = None if is_as_decoded else tokenizer.added_tokens
        self._was_added = False
        self._withheld = 0
        # The last ids: context, and behind it those that no text has come of yet.
        self._recent: deque[int] = deque(maxlen=NUM_CONTEXT + MAX_WITHHELD)
        last = prompt_ids[-NUM_CONTEXT:]
        self._start(last.tolist() if isinstance(last, np.ndarray) else list(last))

    def push(self, token_id: int) -> str:
        """The text that became certain by this token; often empty, within a character."""
        self._recent.append(token_id)
        try:
            text: str | None = self._stream.step(self._backend, token_id)
        except Exception as error:  # the library raises this very class
            if "Invalid prefix" not in str(error):
                raise
            self._withheld += 1
            return self._give_out()
        if text is not None:
            self._withheld = 0
            return text if self._added is None else self._closed_up(token_id, text, self._added)
        self._withheld += 1
        self._was_added = False
        return self._give_out() if self._withheld == MAX_WITHHELD else ""

    def _closed_up(self, token_id: int, text: str, added: dict[int, str]) -> str:
        name = added.get(token_id)
        was_added, self._was_added = self._was_added, name is not None
        return text if name is None or not was_added else name

    def push_many(self, token_ids: Sequence[int] | I32) -> str:
        """The same as pushing one after the other."""
        ids: Sequence[int] = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
        return "".join(map(self.push, ids))

    def finish(self) -> str:
        """What was withheld, at the end of the output."""
        return self._give_out() if self._withheld else ""

    def _give_out(self) -> str:
        """The text of the ids that none has come of, complete or not; then starts a new stream behind it."""
        ids = list(self._recent)
        context, pending = ids[: -self._withheld][-NUM_CONTEXT:], ids[-self._withheld :]
        before = self._decode(context)
        both = self._decode(context + pending)
        text = both[len(before) :] if both.startswith(before) else self._decode(pending)
        # Ids that have no text at all (skipped special tokens) tell the next ones nothing.
        self._start((context + pending)[-NUM_CONTEXT:] if text else context)
        return text

    def _start(self, context: list[int]) -> None:
        if self._decode(context).endswith(REPLACEMENT):
            context = []
        self._withheld = 0
        self._recent.clear()
        self._recent.extend(context)
        self._stream = DecodeStream(ids=context, skip_special_tokens=self._skip)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=self._skip)
        return text
