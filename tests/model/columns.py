"""Columns of a plan for new rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actorllm.messages import NewRow, pack_rows
from tests.model.driver import int32


def new_columns(rows: Sequence[dict[str, Any]], num_groups: int = 1) -> dict[str, Any]:
    """The `new_` columns of a plan; every row gives slot, tokens, computed and blocks (per group)."""
    return {
        "new_rows": pack_rows(
            NewRow(
                r["slot"],
                len(r["tokens"]),
                seed=r.get("seed", 0),
                num_outputs=r.get("outputs", 0),
                num_computed=r.get("computed", 0),
                adapter_id=r.get("adapter", 0),
            )
            for r in rows
        ),
        "new_tokens": int32([t for r in rows for t in r["tokens"]]),
        "new_num_blocks": int32([len(g) for r in rows for g in r["blocks"]]),
        "new_blocks": int32([b for r in rows for g in r["blocks"] for b in g]),
    }
