"""Does the engine lose, change or leak anything in half an hour of kills, stops, guests and shortages?

    python bench/soak.py [--minutes 30] [--seed 1] [--replicas N] [--json FILE]

One engine with the bundled storyteller in float32 serves mixed requests while its processes are killed and stopped at
random, programs join it and leave or are killed, memory is taken away, /dev/shm is filled and the owner runs out of
descriptors. Every stream is held against an oracle (`tests/oracle.py`), those of the programs that leave included. Prints the
figures of `tests/chaos/harness.py`, and how memory, descriptors and threads of the owner and its children have grown: medians
of the last quarter of the samples against those of the second (the first is warm-up), all with as many processes. Of the
children's memory the KV cache is left out. Its pages come with use, so that a worker which lives longer has more of them.
Fails when a stream is lost or differs, and when something has grown by more than GROWTH allows. With --replicas 2 or more it
is a fleet: whole replicas are killed, also while they start, and it is drained and scaled under its streams.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import anyio  # noqa: E402 (the path comes first)
import numpy as np  # noqa: E402
from anyio.abc import Process  # noqa: E402
from report import environment, print_table, write_json  # noqa: E402

from actorllm import AsyncLLM  # noqa: E402
from tests.chaos.harness import MAX_MODEL_LEN, VICTIMS, Chaos, Load, is_parked, own_mib, resident_mib  # noqa: E402
from tests.oracle import MAX_RATE, oracle_model  # noqa: E402

NAME = f"soak-{os.getpid()}"
SAMPLE_EVERY_S = 5.0
MAX_FILL_BYTES = 1 << 30
OWN_SHARED_MEMORY = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=256m tmpfs /dev/shm && exec "$@"', "sh")
"""Before a command: it gets a small /dev/shm of its own, if this user may have one."""
GUEST = """
import asyncio, sys
from actorllm import AsyncLLM, SamplingParams
async def main():
    llm = AsyncLLM.attach(sys.argv[1])
    while True:
        async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=200, temperature=1.0)):
            print(".", end="", flush=True)
asyncio.run(main())
"""
LEAVING_GUEST = """
import asyncio, json, sys
from actorllm import AsyncLLM
from tests.chaos.harness import Load
async def main():
    load = Load(int(sys.argv[2]))
    requests = [load.next() for _ in range(int(sys.argv[3]))]
    async def one(request):
        told = [[[], "", None] for _ in range(request.params.n)]
        async for output in llm.generate({"prompt_token_ids": request.prompt}, request.params):
            for part in output.outputs:
                tokens, text, reason = told[part.index]
                told[part.index] = [tokens + part.token_ids, text + part.text, part.finish_reason or reason]
        return told
    async with AsyncLLM.attach(sys.argv[1]) as llm:
        print("joined", flush=True)
        print(json.dumps(await asyncio.gather(*[one(request) for request in requests])), flush=True)
asyncio.run(main())
"""
NUM_OF_GUEST = 8
"""Requests of a guest that leaves."""

CACHE_BYTES = 256 << 20
"""Of the KV cache of a replica; one engine alone has more."""
PROCESSES = "processes"
"""Only samples with as many of them as most samples have are compared. Those that are parked are left out: they load for a
while, and have half their memory meanwhile."""
GROWTH = {
    "memory of the owner, MiB": (0.05, 10.0),
    "memory of its children, MiB": (0.05, 10.0),
    "descriptors of the owner": (0.0, 1.0),
    "threads of the owner": (0.0, 1.0),
    "names in /dev/shm": (0.0, 0.0),
}
"""How much more of it there may be late in a run than early: this share, and so much beside."""


class Soak:
    """The events of one run, drawn at random, and the samples of what the engine holds."""

    def __init__(self, chaos: Chaos, seed: int, num_replicas: int = 1) -> None:
        self.chaos = chaos
        self._num_replicas = num_replicas
        self.counts: dict[str, int] = {}
        self.samples: list[dict[str, float]] = []
        self._has_guest = False
        """What a program that has joined takes is none of the engine's growth."""
        self._rng = np.random.default_rng(seed + 2)
        self._events = [
            (8, "kill", self._kill),
            (3, "kill twice", self._kill_twice),
            (3, "stop", self._stop),
            (2, "guest killed", self._guest),
            (2, "guest stopped, and left", self._leaving_guest),
            (1, "memory taken", self._take_memory),
            (1, "/dev/shm filled", self._fill_shared_memory),
            (1, "descriptors taken", self._take_descriptors),
        ]
        if num_replicas > 1:
            self._events += [
                (4, "replica killed", self._kill_replica),
                (2, "replica drained", self._drain),
                (2, "scaled down and up", self._scale),
                (2, "killed while it started", self._kill_start),
            ]

    async def run(self, minutes: float) -> None:
        end = time.monotonic() + 60 * minutes
        weights = np.array([weight for weight, _, _ in self._events], float)
        while time.monotonic() < end:
            self._has_guest = False
            await anyio.sleep(float(self._rng.exponential(2.0)))
            _, name, event = self._events[int(self._rng.choice(len(weights), p=weights / weights.sum()))]
            self._has_guest = "guest" in name
            if await event() is False:
                name += ", not possible here"
            self.counts[name] = self.counts.get(name, 0) + 1

    async def sample(self) -> None:
        """What owner and children hold, again and again."""
        while True:
            await anyio.sleep(SAMPLE_EVERY_S)
            health = self.chaos.engine.health()
            if self._has_guest or health.state != "running" or any(one.state != "running" for one in health.replicas):
                continue  # a fleet runs with fewer processes while one of its replicas does not
            pids = [pid for name, pid in self.chaos.pids().items() if not is_parked(name)]
            with contextlib.suppress(OSError):  # a process is gone, or no file can be opened now
                self.samples.append(
                    {
                        PROCESSES: len(pids),
                        "memory of the owner, MiB": resident_mib([os.getpid()]),
                        "memory of its children, MiB": own_mib(pids, CACHE_BYTES),
                        "descriptors of the owner": len(os.listdir("/proc/self/fd")),
                        "threads of the owner": threading.active_count(),
                        "names in /dev/shm": len(os.listdir("/dev/shm")),
                    }
                )

    def growth(self) -> list[dict[str, Any]]:
        """Of every sampled quantity: the second quarter of the run against the last."""
        usual = statistics.mode(sample[PROCESSES] for sample in self.samples) if self.samples else 0
        samples = [sample for sample in self.samples if sample[PROCESSES] == usual]
        quarter = len(samples) // 4
        rows = []
        for name in GROWTH if quarter else ():
            early = statistics.median(sample[name] for sample in samples[quarter : 2 * quarter])
            late = statistics.median(sample[name] for sample in samples[-quarter:])
            rows.append({"quantity": name, "early": round(early, 1), "late": round(late, 1)})
        return rows

    # Events

    def _victims(self) -> tuple[str, ...]:
        """Of one replica, if there are several."""
        return self._of_a_replica(VICTIMS[int(self._rng.integers(len(VICTIMS)))])

    def _of_a_replica(self, names: tuple[str, ...]) -> tuple[str, ...]:
        if self._num_replicas == 1:
            return names
        number = int(self._rng.integers(self._num_replicas))
        return tuple(f"replica{number}/{name}" for name in names)

    async def _kill(self) -> None:
        await self.chaos.kill(self._victims(), in_prefill=bool(self._rng.integers(2)))

    async def _kill_twice(self) -> None:
        """The second one while the first is being recovered from."""
        await self.chaos.kill(self._victims(), in_prefill=True, is_patient=False)
        await anyio.sleep(float(self._rng.random() * 1.5))
        await self.chaos.kill(self._victims(), in_prefill=bool(self._rng.integers(2)))

    async def _stop(self) -> None:
        (name,) = self._of_a_replica((str(self._rng.choice(["scheduler", "worker"])),))
        await self.chaos.stop(name, float(self._rng.random()))

    async def _kill_replica(self) -> None:
        await self.chaos.kill(self._of_a_replica(("scheduler", "worker")), in_prefill=bool(self._rng.integers(2)))

    async def _drain(self) -> None:
        """A replica gives its streams away, and takes requests again later."""
        number = int(self._rng.integers(self._num_replicas))
        await self._all_run()
        await self.chaos.engine.drain_replica(number)
        await anyio.sleep(float(self._rng.random()))
        await self.chaos.engine.drain_replica(number, is_draining=False)

    async def _scale(self) -> None:
        await self._all_run()
        await self.chaos.engine.scale(int(self._rng.integers(1, self._num_replicas)))
        await anyio.sleep(float(self._rng.random()))
        await self.chaos.engine.scale(self._num_replicas)

    async def _kill_start(self) -> None:
        """The last replica is stopped, and dies while it starts again."""
        await self._all_run()
        engine, last = self.chaos.engine, self._num_replicas - 1
        await engine.scale(last)
        async with anyio.create_task_group() as group:
            group.start_soon(engine.scale, self._num_replicas)
            await anyio.sleep(0.2 + 2 * float(self._rng.random()))
            for replica in engine.health().replicas:
                for pid in replica.pids.values() if replica.number == last else ():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    async def _all_run(self) -> None:
        with anyio.fail_after(300):
            while any(one.state != "running" for one in self.chaos.engine.health().replicas):  # noqa: ASYNC110 (of processes)
                await anyio.sleep(0.05)

    async def _guest(self) -> None:
        """Another program joins, gets tokens, and is killed."""
        async with await self._open_guest(GUEST) as guest:
            assert guest.stdout is not None
            with anyio.fail_after(60):
                await guest.stdout.receive(20)
            guest.kill()

    async def _leaving_guest(self) -> None:
        """Another program joins, a process of the engine is killed, the program is stopped for a while, and then it leaves.

        Its streams count like those of the owner.
        """
        seed = int(self._rng.integers(1 << 31))
        told = b""
        async with await self._open_guest(LEAVING_GUEST, str(seed), str(NUM_OF_GUEST)) as guest:
            assert guest.stdout is not None
            with anyio.fail_after(300):  # on a busy machine a restart takes half a minute
                told += await guest.stdout.receive()
                await self.chaos.kill(self._victims(), in_prefill=bool(self._rng.integers(2)), is_patient=False)
                guest.send_signal(signal.SIGSTOP)
                await anyio.sleep(float(self._rng.random()))
                guest.send_signal(signal.SIGCONT)
                async for data in guest.stdout:
                    told += data
                code = await guest.wait()
        if code:
            raise RuntimeError(f"a guest ended with exit code {code}")
        load = Load(seed)
        for sequences in json.loads(told.removeprefix(b"joined\n")):
            self.chaos.take(load.next(), sequences)

    @staticmethod
    async def _open_guest(program: str, *arguments: str) -> Process:
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
        command = [sys.executable, "-c", program, NAME, *arguments]
        return await anyio.open_process(command, stdout=subprocess.PIPE, stderr=None, env=environment)

    async def _take_memory(self) -> None:
        """Another program uses a gibibyte for a while."""
        hog = "import time; x = bytearray(1 << 30); x[::4096] = b'1' * len(x[::4096]); time.sleep(3)"
        await anyio.run_process([sys.executable, "-c", hog])

    async def _take_descriptors(self) -> None:
        """The owner can open nothing for a while, and a process dies."""
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        victims = self._victims()
        await self.chaos.kill(victims, in_prefill=False, is_patient=False)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            await anyio.sleep(1.0 + float(self._rng.random()))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        await self.chaos.kill(victims, in_prefill=False)

    async def _fill_shared_memory(self) -> bool:
        """There is no shared memory left while a process dies. False: nothing was done."""
        path = Path("/dev/shm") / NAME
        free = os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize
        if free > MAX_FILL_BYTES:
            return False  # shared memory is memory: to fill all of it takes the machine down
        try:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, free - (1 << 20)))
            await self.chaos.kill(self._of_a_replica(("scheduler",)), in_prefill=False, is_patient=False)
            await anyio.sleep(0.05)
        finally:
            path.unlink(missing_ok=True)
        await self.chaos.kill(self._of_a_replica(("worker",)), in_prefill=False)
        return True


def grown(rows: list[dict[str, Any]]) -> list[str]:
    """What there is more of than GROWTH allows, in words."""
    found = []
    for row in rows:
        share, beside = GROWTH[row["quantity"]]
        most = row["early"] * (1 + share) + beside
        if row["late"] > most:
            found.append(f"{row['quantity']}: {row['late']} late, {row['early']} early, at most {most:.1f} allowed")
    return found


async def soak(
    minutes: float, seed: int, num_replicas: int = 1
) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """The figures, the growth, and what went wrong."""
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 32,
        "num_threads": 1,
        "name": NAME,
    }
    if num_replicas > 1:
        options |= {"data_parallel_size": num_replicas, "kv_cache_memory_bytes": CACHE_BYTES}
    oracle_model()  # it could not be read while the descriptors are taken
    engine = AsyncLLM("storyteller", **options)
    chaos = Chaos(engine, seed)
    run = Soak(chaos, seed, num_replicas)
    async with engine, anyio.create_task_group() as watchers:
        watchers.start_soon(run.sample)
        watchers.start_soon(chaos.compare)
        async with anyio.create_task_group() as group:
            group.start_soon(chaos.feed)
            await run.run(minutes)
            chaos.stop_feeding()
        watchers.cancel_scope.cancel()
    chaos.check_finished(only_survivors=True)
    figures = chaos.figures
    return figures.table() | run.counts, run.growth(), [*figures.lost, *figures.wrong_text]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if (
        not os.environ.get("SOAK_HAS_OWN_SHM")
        and subprocess.run([*OWN_SHARED_MEMORY, "true"], check=False).returncode == 0
    ):
        os.environ["SOAK_HAS_OWN_SHM"] = "1"
        os.execvp(OWN_SHARED_MEMORY[0], [*OWN_SHARED_MEMORY, sys.executable, *sys.argv])
    load_before = os.getloadavg()
    table, growth, wrong = anyio.run(soak, arguments.minutes, arguments.seed, arguments.replicas)
    rows = [
        {"figure": name, "value": value if isinstance(value, int | float) else str(value)}
        for name, value in table.items()
    ]
    print_table("soak", rows)
    print_table("growth", growth)
    print(*wrong[:20], sep="\n")
    if arguments.json:
        write_json(
            arguments.json,
            {
                "bench": "soak",
                "environment": environment(),
                "load_before": [round(x, 2) for x in load_before],
                "configuration": {
                    "minutes": arguments.minutes,
                    "seed": arguments.seed,
                    "replicas": arguments.replicas,
                    "dtype": "float32",
                },
                "rows": rows,
                "growth": growth,
                "wrong": wrong[:100],
            },
        )
    if wrong or table["differing"] > MAX_RATE * table["tokens compared"]:
        raise SystemExit("streams were lost or differ")
    if more := grown(growth):
        raise SystemExit("it has grown\n" + "\n".join(more))


if __name__ == "__main__":
    main()
