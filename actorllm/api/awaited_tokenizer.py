"""`awaited`: a tokenizer of transformers that may be awaited, too. Releases of vLLM differ in whether `get_tokenizer` of an
engine for async programs is a coroutine, and programs of either kind bring their line.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Generator
from typing import Any


def awaited(tokenizer: Any) -> Any:
    """The same tokenizer; awaiting it gives itself.

    Arguments:
        tokenizer: of transformers.
    """
    if not hasattr(tokenizer, "__await__"):
        kind: Any = type(tokenizer)
        tokenizer.__class__ = _with_await(kind)
    return tokenizer


@functools.cache
def _with_await(kind: Any) -> type[Any]:
    class Awaited(kind):  # type: ignore[misc]
        def __await__(self) -> Generator[Any, None, Any]:
            return self
            yield  # a generator is what can be awaited

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Copies and pickles are of the class of transformers, which other processes have."""
            plain: Any = object.__new__(kind)
            plain.__dict__.update(self.__dict__)
            return copy.copy, (plain,)

    # What is saved names its class.
    Awaited.__name__, Awaited.__qualname__, Awaited.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Awaited
