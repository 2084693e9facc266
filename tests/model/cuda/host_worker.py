"""A worker process whose GPU is the host."""

from __future__ import annotations

from actorllm.actors.worker import WorkerActor
from actorllm.model.cuda.device import HostDevice
from actorllm.model.cuda.runner import CudaRunner
from actorllm.types.config import EngineConfig


class HostWorkerActor(WorkerActor):
    def _load(self, config: EngineConfig) -> CudaRunner:
        runner = CudaRunner(config, self.rank, show_progress=False, device=HostDevice())
        runner.load()
        return runner
