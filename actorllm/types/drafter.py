"""The interface of drafters: what guesses the next tokens of a sequence, so that one step can check several of them.

A class of an application is used by its path, `speculative_config={"method": "module:Class", ...}`. Standard library and numpy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

HISTORY_TOKENS = 8192
"""The newest tokens of a sequence that drafters see."""

DEFAULT_LOOKUP = 5
"""Of prompt_lookup_min and prompt_lookup_max where neither is given, as in vLLM."""

Ranges = tuple[tuple[int, int, int], ...]
"""(fewest rows, most rows, drafts of each row)."""

Costs = tuple[tuple[int, float], ...]
"""(tokens of a step, seconds)."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """How tokens are drafted."""

    method: str
    """The name of a built-in drafter, or the path of a class, 'module:Class'."""
    num_speculative_tokens: int
    """Most drafts of a row in a step."""
    prompt_lookup_min: int = DEFAULT_LOOKUP
    """Fewest tokens of an n-gram that is looked up (method 'ngram')."""
    prompt_lookup_max: int = DEFAULT_LOOKUP
    """Most of them."""
    suffix_decoding_max_tree_depth: int = 24
    """Most tokens of a suffix that is looked up (method 'suffix')."""
    suffix_decoding_max_spec_factor: float = 1.0
    """Drafts for each token of the suffix."""
    suffix_decoding_min_token_prob: float = 0.1
    """Least share of the places of the suffix that go on with the drafts."""
    model: str | None = None
    """The folder of the draft model (method 'draft_model')."""
    draft_sample_method: str = "probabilistic"
    """'probabilistic': the draft model draws with the target's noise; 'greedy': it takes its most likely token."""
    num_speculative_tokens_per_batch_size: Ranges = ()
    """How many drafts a row may have in a step with so many decode rows; a number of rows that is in no range has none."""
    suffix_decoding_max_cached_requests: int = 10_000
    """Finished outputs that are kept (method 'suffix'); 0: a row's own text alone is looked through."""
    goes_by_costs: bool = False
    """The application has given no ranges: they are those that pay, once a worker has measured what steps take."""
    step_costs: Costs = ()
    """Of the model; empty: not measured."""
    draft_costs: Costs = ()
    """Of a pass of the draft model over so many rows."""

    @property
    def drafts_from_others(self) -> bool:
        """Whether outputs of other requests with the same cache salt are looked through."""
        return self.method == "suffix" and self.suffix_decoding_max_cached_requests > 0

    @classmethod
    def from_tree(cls, tree: dict[str, Any] | None) -> Speculation | None:
        """What `dataclasses.asdict` made of one, perhaps through JSON."""
        if tree is None:
            return None
        tables = ("num_speculative_tokens_per_batch_size", "step_costs", "draft_costs")
        return cls(**tree | {name: tuple(tuple(entry) for entry in tree[name]) for name in tables})


class Drafter(ABC):
    """Guesses tokens. A wrong guess costs time and changes no token, whatever the class does.

    A worker builds one drafter and asks it for every row of every step. Drafters are asked on the worker's thread.

    Arguments:
        options: the `speculative_config` of the engine.
        vocab_size: drafts are ids in [0, vocab_size).
    """

    def __init__(self, options: Speculation, vocab_size: int) -> None:
        self.options = options
        self.vocab_size = vocab_size

    @abstractmethod
    def draft(self, tokens: NDArray[np.int32], most: int) -> Sequence[int]:
        """The tokens that may come next.

        Arguments:
            tokens: the newest tokens of one sequence, prompt and output, int32 [num_tokens] with 1 to `HISTORY_TOKENS` entries;
                a view that must not be changed or kept. -1 stands for a position whose prompt is an embedding.
            most: how many drafts can be used, at least 1; further ones are left out.

        Returns:
            The drafts in their order; empty: there is no guess. The drafts end before an id that is not in the vocabulary.

        Whatever it raises is logged once, and the row drafts nothing in that step.
        """
