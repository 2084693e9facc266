"""Stop strings, found while the text comes in.

Owns an automaton over the stop strings of a request (Aho and Corasick, "Efficient string matching", CACM 1975). Owns its place
in the text so far, and the text that is held back. That is the longest end of the text that is the beginning of a stop string:
only that may still not belong to the output. Where the stop string is part of the output, nothing needs to be held
back.

The stop string that is complete first ends the text; of several that are complete at the same character, the one that
begins first. Called by actorllm.text.request_text.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence


class _Automaton:
    """A node is a beginning of some stop string; node 0 is the empty one."""

    __slots__ = ("depths", "ends", "failures", "first_characters", "steps")

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        self.steps: list[dict[str, int]] = [{}]
        self.depths = [0]
        self.ends: list[str | None] = [None]
        """The longest stop string that the node's text ends with."""
        for string in stop_strings:
            if not string:
                raise ValueError("an empty stop string would stop before the first token")
            node = 0
            for character in string:
                if character not in self.steps[node]:
                    self.steps[node][character] = len(self.steps)
                    self.steps.append({})
                    self.depths.append(self.depths[node] + 1)
                    self.ends.append(None)
                node = self.steps[node][character]
            self.ends[node] = string
        self.failures = [0] * len(self.steps)
        """The longest proper end of the node's text that is a node."""
        queue = deque(self.steps[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self.steps[node].items():
                self.failures[child] = self.step(self.failures[node], character)
                self.ends[child] = self.ends[child] or self.ends[self.failures[child]]
                queue.append(child)
        self.first_characters = frozenset(self.steps[0])

    def step(self, node: int, character: str) -> int:
        """The longest end of the node's text and the character that is a node."""
        while True:
            target = self.steps[node].get(character)
            if target is not None:
                return target
            if node == 0:
                return 0
            node = self.failures[node]


# Requests of one application mostly share their stop strings. The largest automaton takes about a megabyte.
_automaton = functools.lru_cache(maxsize=64)(_Automaton)


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces."""

    __slots__ = ("_automaton", "_held", "_include_stop", "_node")

    def __init__(self, stop_strings: Sequence[str], include_stop: bool = False) -> None:
        self._automaton = _automaton(tuple(stop_strings))
        self._include_stop = include_stop
        self._node = 0
        self._held = ""

    @property
    def held(self) -> str:
        """The text that was pushed and not given out."""
        return self._held

    def push(self, text: str, can_stop: bool = True) -> tuple[str, str | None]:
        """`(text to give out, the stop string that ended it or None)`.

        After a stop the text given out so far is complete: it ends before the stop string, or behind it with
        include_stop; what follows is dropped. With can_stop=False no stop string is found that ends in this piece; one
        that begins in it may be found later.
        """
        automaton, node = self._automaton, self._node
        if node == 0 and automaton.first_characters.isdisjoint(text):
            return text, None
        step, ends = automaton.step, automaton.ends
        for i, character in enumerate(text):
            node = step(node, character)
            stop = ends[node]
            if stop is None:
                continue
            if can_stop:
                whole = self._held + text[: i + 1]
                self._node, self._held = 0, ""
                return whole if self._include_stop else whole[: len(whole) - len(stop)], stop
            while node and not automaton.steps[node]:  # only what can still grow is a beginning
                node = automaton.failures[node]
        self._node = node
        if self._include_stop:
            return text, None
        whole = self._held + text
        border = len(whole) - automaton.depths[node]
        self._held = whole[border:]
        return whole[:border], None

    def flush(self) -> str:
        """The text that was held back, when the output ends for another reason."""
        held, self._held, self._node = self._held, "", 0
        return held
