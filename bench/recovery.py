"""How long after a kill do tokens flow again?

    python bench/recovery.py [--kills 20] [--json FILE]

The bundled storyteller, 16 streams and more. A recovery is the time from the SIGKILL to the first token that arrives after
the engine runs again with other processes; `standby`: with a parked worker process that has torch imported
(`standby_worker=True`; `no` is `standby_worker=False`). Kills of the scheduler, of the worker and of both take turns.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import anyio  # noqa: E402 (the path comes first)
import numpy as np  # noqa: E402
from report import environment, print_table, write_json  # noqa: E402

from actorllm import AsyncLLM  # noqa: E402
from tests.chaos.harness import MAX_MODEL_LEN, VICTIMS, Chaos  # noqa: E402

TARGET_S = 2.0
REST_S = 2.0
"""Between kills: a parked process is there again."""


async def recoveries(standby: bool, kills: int) -> dict[str, list[float]]:
    """Seconds, by victims."""
    engine = AsyncLLM(
        "storyteller", dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=32, standby_worker=standby
    )
    chaos = Chaos(engine, seed=1)
    async with engine, anyio.create_task_group() as group:
        group.start_soon(chaos.feed)
        for number in range(len(VICTIMS) * kills):
            await chaos.kill(VICTIMS[number % len(VICTIMS)], in_prefill=bool(number // len(VICTIMS) % 2))
            await anyio.sleep(REST_S)
        chaos.stop_feeding()
    if chaos.figures.lost:
        raise SystemExit("\n".join(chaos.figures.lost))
    found: dict[str, list[float]] = {}
    for kill in chaos.figures.kills:
        assert kill.recovery_s is not None
        found.setdefault(" and ".join(kill.victims), []).append(kill.recovery_s)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each kind")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # of every death and every restart
    load_before = os.getloadavg()
    rows: list[dict[str, Any]] = []
    for standby in (False, True):
        for victims, seconds in anyio.run(recoveries, standby, arguments.kills).items():
            p99 = float(np.quantile(seconds, 0.99))
            rows.append(
                {
                    "killed": victims,
                    "standby": "yes" if standby else "no",
                    "kills": len(seconds),
                    "p50 s": round(float(np.quantile(seconds, 0.5)), 3),
                    "p99 s": round(p99, 3),
                    "target": f"p99 < {TARGET_S:g} s",
                    "met": p99 < TARGET_S,
                }
            )
    print_table("from the kill to the next token", rows)
    if arguments.json:
        write_json(
            arguments.json,
            {
                "bench": "recovery",
                "environment": environment(),
                "load_before": [round(x, 2) for x in load_before],
                "configuration": {"kills": arguments.kills, "dtype": "float32", "max_num_seqs": 32},
                "rows": rows,
            },
        )


if __name__ == "__main__":
    main()
