"""Step 9: the model in a process of its own, over pipes. It is killed, and a second one recomputes its requests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from step01_scheduler import Request, Row
from step05_prefix_cache import CachingScheduler
from step06_real_model import Storyteller, expected_streams, story_requests

from actorllm.config import BUNDLED_MODELS
from actorllm.text.tokenizer import Tokenizer


class WorkerDied(Exception):
    pass


def serve(num_blocks: int) -> None:
    """The program of the worker process: a line with rows, a line with tokens. It ends with its standard input."""
    model = Storyteller(num_blocks)
    for line in sys.stdin:
        rows = [Row(*fields, tuple(blocks)) for *fields, blocks in json.loads(line)]
        print(json.dumps(model(rows)), flush=True)


class Worker:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.start()

    def start(self) -> None:
        command = [sys.executable, __file__, "worker", str(self.num_blocks)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, rows: list[Row]) -> list[int | None]:
        try:
            print(json.dumps(rows), file=self.process.stdin, flush=True)
        except BrokenPipeError as error:
            raise WorkerDied from error
        line = self.process.stdout.readline()
        if not line.endswith("\n"):
            raise WorkerDied
        return json.loads(line)

    def stop(self) -> None:
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()


class SurvivingScheduler(CachingScheduler):
    """Knows all tokens of all requests, so that the death of a worker costs time and nothing else."""

    num_steps = 0

    def update(self, rows: list[Row], sampled: Sequence[int | None]) -> list[Request]:
        self.num_steps += 1
        return super().update(rows, sampled)

    def lose_worker(self) -> None:
        """The KV memory is gone: every running request is preempted, and no cached block can be found."""
        for request in reversed(self.running.copy()):
            self.preempt(request)
        self.cached.clear()
        self.hash_of.clear()


def main() -> None:
    tokenizer = Tokenizer(BUNDLED_MODELS["storyteller"])
    requests = story_requests(tokenizer)
    scheduler, worker = SurvivingScheduler(max_seqs=4, num_blocks=64, max_step_tokens=32), Worker(64)
    for request in requests:
        scheduler.add(request)
    num_deaths = 0
    while rows := scheduler.schedule():
        if scheduler.num_steps == 12 and not num_deaths:
            os.kill(worker.process.pid, signal.SIGKILL)
        try:
            scheduler.update(rows, worker(rows))
        except WorkerDied:
            num_deaths += 1
            print(f"the worker died in step {scheduler.num_steps}; {len(requests[0].output)} tokens of king are out")
            worker.stop()
            worker.start()
            scheduler.lose_worker()
    worker.stop()
    same = {request.name: request.output for request in requests} == expected_streams()
    print(f"{num_deaths} death; the same tokens as from an engine without one: {same}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        serve(int(sys.argv[2]))
    else:
        main()
