"""Log-probabilities in the shapes of OpenAI's two APIs, and of vLLM's `prompt_logprobs`. Pure; needs no web framework.

Called by the server and by `actorllm run-batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actorllm.types.logprob import Logprob
from actorllm.types.outputs import RequestOutput

Position = tuple[int, Mapping[int, Logprob] | None]
"""A token's id, and the log-probabilities at its place: its own and those of the most likely ones, by token id."""

LOWEST = -9999.0
"""What OpenAI has for a token that cannot come: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class LogprobsView:
    """What of the log-probabilities is shown, and how tokens are spelled."""

    number: int
    """Most likely tokens beside each of the output; -1: all that there are."""
    as_ids: bool = False
    """Tokens are shown as "token_id:123"."""

    def of_message(self, positions: Sequence[Position]) -> dict[str, Any]:
        """OpenAI's `logprobs` of a message: for each token its own, and the most likely ones."""
        content = []
        for token_id, entries in positions:
            assert entries is not None
            shown = [self._entry(i, entry) for i, entry in self._most_likely(entries)]
            content.append(self._entry(token_id, entries[token_id]) | {"top_logprobs": shown})
        return {"content": content, "refusal": None}

    def of_text(
        self, positions: Sequence[Position], decode: Callable[[list[int]], str], offset: int = 0
    ) -> dict[str, Any]:
        """OpenAI's `logprobs` of a text, in columns. A token's own is among the most likely ones, even if it is not.

        decode: the text of a token without entries, the first of a prompt. offset: of the first token in the text; below 0
        where the text does not show it (`offset_of_prompt`).
        """
        tokens: list[str] = []
        own: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, entries in positions:
            if not entries:
                token = f"token_id:{token_id}" if self.as_ids else decode([token_id])
                own.append(None)
                top.append(None)
            else:
                token = self._token(token_id, entries[token_id])
                own.append(finite(entries[token_id]))
                by_text: dict[str, float] = {}
                for i, entry in [*self._most_likely(entries), (token_id, entries[token_id])]:
                    by_text.setdefault(self._token(i, entry), finite(entry))  # several may read alike: the likelier
                top.append(by_text)
            tokens.append(token)
            offsets.append(max(0, offset))
            offset += self.width([(token_id, entries)], decode)
        return {"text_offset": offsets, "token_logprobs": own, "tokens": tokens, "top_logprobs": top}

    @staticmethod
    def width(positions: Sequence[Position], decode: Callable[[list[int]], str]) -> int:
        """Characters that these tokens have in a text, however they are spelled here."""
        return sum(
            len((entries[token_id].decoded_token or "") if entries else decode([token_id]))
            for token_id, entries in positions
        )

    def offset_of_prompt(self, prompt: str, positions: Sequence[Position], decode: Callable[[list[int]], str]) -> int:
        """Where the first token of a prompt stands in it: so that the last one ends where the prompt does.

        Before the text there may be a token that begins it, or some that were cut off.
        """
        return len(prompt) - self.width(positions, decode)

    def _most_likely(self, entries: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
        """Those that were asked for, the likeliest first."""
        ordered = sorted(entries.items(), key=lambda item: -item[1].logprob)
        return ordered if self.number == -1 else ordered[: self.number]

    def _entry(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        token = self._token(token_id, entry)
        return {"token": token, "logprob": finite(entry), "bytes": list(token.encode("utf-8", errors="replace"))}

    def _token(self, token_id: int, entry: Logprob) -> str:
        """Its text, or its number where there is none (detokenize=False)."""
        if self.as_ids or entry.decoded_token is None:
            return f"token_id:{token_id}"
        return entry.decoded_token


def of_prompt(output: RequestOutput) -> list[dict[str, Any] | None]:
    """As vLLM shows them: by token id."""
    assert output.prompt_logprobs is not None
    return [
        {
            str(i): {"logprob": finite(entry), "rank": entry.rank, "decoded_token": entry.decoded_token}
            for i, entry in entries.items()
        }
        if entries
        else None
        for entries in output.prompt_logprobs
    ]


def finite(entry: Logprob) -> float:
    return max(entry.logprob, LOWEST)
