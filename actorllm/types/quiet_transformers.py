"""`quiet`: transformers says nothing but errors for a while, and loads for one thread at a time.

While transformers loads, it changes torch's default type, the initialisers of `torch.nn.init`, and how much it logs. All three
belong to the whole process, and it puts back what it has found. Of two loads at once the second finds what the first has changed.
It would put that back, for good, in the application that has the engines.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Iterator
from typing import Any

_turn = threading.RLock()
"""Of the thread that loads."""


def _renew_turn() -> None:
    """In a fork: a thread that held it is not there."""
    global _turn
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_renew_turn)


@contextlib.contextmanager
def quiet(shows_progress: bool = False) -> Iterator[None]:
    """transformers says nothing but errors, and shows its bars only if wanted. Waits while another thread is within it."""
    logging: Any = importlib.import_module("transformers.utils.logging")  # it is not typed
    with _turn:
        level, had_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        _show_progress(logging, shows_progress)
        try:
            yield
        finally:
            logging.set_verbosity(level)
            _show_progress(logging, had_progress)


def _show_progress(logging: Any, is_shown: bool) -> None:
    switch = logging.enable_progress_bar if is_shown else logging.disable_progress_bar
    switch()
