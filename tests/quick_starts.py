"""What starts of engines measure of themselves is kept, for the next engine of the same shape.

Before a worker says how many blocks fit, it computes the largest steps that it may be given, and takes the memory that they
need: 0.3 s of processor time, for each of some hundred engines of this suite. What it found is written to a folder that
`ACTORLLM_TEST_KEPT` names. Processes that are copied (`tests/forking.py`) read it there.

Runners that tests make by themselves measure each time, and so do processes that were made by exec.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from actorllm.actors.worker import WorkerActor
from actorllm.config import EngineConfig

FOLDER = "ACTORLLM_TEST_KEPT"


def keep_measured_sizes() -> None:
    """From now on, in this process."""
    load = WorkerActor._load

    def loaded(worker: WorkerActor, config: EngineConfig) -> Any:
        runner = load(worker, config)
        folder = os.environ.get(FOLDER)
        if folder is None or config.device != "cpu" or config.world_size > 1 or config.model.module is not None:
            return runner  # several ranks compute these steps together
        from actorllm.model.cpu.runner import CpuRunner

        if type(runner) is CpuRunner:
            if not hasattr(CpuRunner._profile_working_bytes, "is_kept"):
                CpuRunner._profile_working_bytes = kept(CpuRunner._profile_working_bytes)  # type: ignore[method-assign]
            runner.file_of_its_sizes = Path(folder, name_of(config))  # type: ignore[attr-defined]
        return runner

    WorkerActor._load = loaded  # type: ignore[method-assign]


def kept(measure: Any) -> Any:
    def working_bytes(runner: Any) -> int:
        file: Path | None = getattr(runner, "file_of_its_sizes", None)
        if file is None:
            return int(measure(runner))
        if not file.exists():
            new = file.with_suffix(f".{os.getpid()}-{id(runner)}")
            new.write_text(str(measure(runner)))
            new.replace(file)
        return int(file.read_text())

    working_bytes.is_kept = True  # type: ignore[attr-defined]
    return working_bytes


def name_of(config: EngineConfig) -> str:
    """Of everything that these steps depend on."""
    limits = config.scheduler
    shape = (
        replace(config.model, seed=0, sampling_defaults={}),
        config.cache,
        (limits.max_num_seqs, limits.max_num_batched_tokens, limits.num_lookahead_tokens),
        (config.num_threads, config.cpu_share, config.lora, config.speculation, config.batch_invariant),
    )
    return hashlib.sha256(repr(shape).encode()).hexdigest()
