"""What the backend of `counting_backend` takes. Importing it needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.types.device import BackendRules


class CountingRules(BackendRules):
    def why_not(self, options: Mapping[str, Any], *, pools: bool) -> str | None:
        if options["enforce_eager"]:
            return "enforce_eager=True: nothing is recorded by device='counting'; leave it out"
        return super().why_not(options, pools=pools)


RULES = CountingRules(dtypes=("bfloat16",), block_size=48, block_multiple=16)
