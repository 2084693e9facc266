"""A trainer in a process of its own: python -m tests.api.trainer_program <world size> <timeout in seconds>.

Says its port, then "met". Reads what it does from standard input: "send <seed>", which it answers with "sent".
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import programs

ROOT = Path(__file__).parents[2]


class Trainer:
    """It, as tests have it."""

    def __init__(self, world_size: int, timeout_s: float = 60) -> None:
        command = [sys.executable, "-m", __name__, str(world_size), str(timeout_s)]
        pipe = subprocess.PIPE
        self.process: Any = programs.popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
        self.init_info = {
            "backend": "gloo",
            "master_address": "127.0.0.1",
            "master_port": int(self.process.stdout.readline()),
            "rank_offset": 1,
            "world_size": world_size,
            "timeout_s": timeout_s,
        }

    def send(self, seed: int) -> None:
        """Begin with it."""
        self.process.stdin.write(f"send {seed}\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


def main(world_size: int, timeout_s: float) -> None:
    from actorllm.compat.weight_sender import WeightSender
    from tests.model.updates.weight_folders import changed

    def say(word: object) -> None:
        print(word, flush=True)

    sender = WeightSender(
        world_size=world_size, timeout_s=timeout_s, on_listening=say, packed_buffer_size_bytes=100_000
    )
    say("met")
    for line in sys.stdin:
        sender.send(changed(int(line.split()[1])))
        say("sent")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
