"""What only an emulation has run, and no GPU: off unless the environment asks for it.

    ACTORLLM_EXPERIMENTAL=recorded-ranks,recorded-modules

`recorded-ranks`: decode steps of several ranks are graphs. Captures hold collectives of NCCL, and ranks vote on which graphs are
used. Without it their steps are launched kernel by kernel, and no rank votes. `recorded-modules`: so are decode steps of models
that run through transformers, where a trial shows that a replay is the step. Read by the runner, in every worker.
"""

from __future__ import annotations

import os

from actorllm.errors import ConfigError

VARIABLE = "ACTORLLM_EXPERIMENTAL"

RECORDED_RANKS = "recorded-ranks"
RECORDED_MODULES = "recorded-modules"
FEATURES = (RECORDED_RANKS, RECORDED_MODULES)


def enabled() -> frozenset[str]:
    """The features that the environment asks for. Raises ConfigError for a name that is none."""
    names = frozenset(filter(None, map(str.strip, os.environ.get(VARIABLE, "").split(","))))
    if unknown := sorted(names - set(FEATURES)):
        raise ConfigError(f"{VARIABLE}: {unknown[0]!r} is none of {', '.join(FEATURES)}")
    return names
