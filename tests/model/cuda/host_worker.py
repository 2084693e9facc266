"""A worker process whose GPU is the host."""

from __future__ import annotations

from actorllm.actors.worker import WorkerActor
from actorllm.config import EngineConfig
from actorllm.model.cuda.device import HostDevice
from actorllm.model.cuda.runner import CudaRunner


class HostWorkerActor(WorkerActor):
    def _load(self, config: EngineConfig) -> CudaRunner:
        runner = CudaRunner(config, self.rank, show_progress=False, device=HostDevice())
        runner.load()
        return runner
