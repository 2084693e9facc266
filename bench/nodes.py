"""What does it cost to have a replica behind a stream, and how soon is its death seen?

    python bench/nodes.py [--peer-python RAY_PYTHON] [--json FILE] [--rounds N] [--streams N] [--tokens N]

All on the loopback interface of one machine, sides in turns. In float32.

- CPU: processor time of the driver for each token, over TCP, against a program that is attached over rings; and against a driver
  that gets each token from a streaming generator of Ray, if there is an interpreter that has Ray.
- Latency: from the scheduler's send to the application for each batch of outputs, over TCP against a ring of an engine of its own.
- Floor: the same for a relay in plain Python that only copies (`nodes_floor.py`), against a bell that wakes the receiver.
- Death: kill -9 of the agent, and SIGSTOP of it, until the replica counts as lost.
- Idle: processor time of an agent whose replica has nothing to do, as a share of a core; of the agent alone, not of its replica.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import absolute, compared, finish, informative, quantile, versions
from sides import exit_on_sigterm

MODEL = "storyteller"
ENGINE = {"dtype": "float32", "num_threads": 1, "standby_worker": False}
NAME = "nodes-bench"


class Agent:
    """`actorllm node` on the loopback interface."""

    def __init__(self, key: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        command = [sys.executable, "-m", "actorllm", "node", "--listen", self.address, "--key-file", key]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def cpu_s(self) -> float:
        """That the agent alone has used."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int(task.joinpath("schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


async def drive(llm, streams: int, tokens: int) -> dict:
    """So many streams at once: processor time by token, of the process, and the delays of outputs."""
    from actorllm import RequestOutputKind, SamplingParams

    delays: list[float] = []
    frontend = llm._engine._frontend
    replicas = list(getattr(frontend, "_replicas", {}).values())
    frontends = [one.frontend for one in replicas] or [frontend]
    streams_of = [getattr(getattr(one, "supervisor", None), "_stream", None) for one in replicas] or [None]

    class Delays:
        def __init__(self, stream) -> None:
            self.stream = stream

        def see(self, outputs, ends, journal) -> None:
            # Times were moved by what the stream takes for the offset of the two clocks, which are one here.
            moved_s = 0.0 if self.stream is None else self.stream.offset.seconds
            delays.append(time.monotonic() - (outputs.emitted + moved_s))

    for one, of_stream in zip(frontends, streams_of, strict=True):
        one.observer = Delays(of_stream)

    async def stream(number: int) -> int:
        params = SamplingParams(
            max_tokens=tokens, temperature=0.8, seed=number, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        found = 0
        async for output in llm.generate(f"Once upon a time, number {number},", params):
            found += len(output.outputs[0].token_ids)
        return found

    began = time.process_time()
    num_tokens = sum(await asyncio.gather(*[stream(number) for number in range(streams)]))
    used = time.process_time() - began
    for one in frontends:
        one.observer = None
    offset_us = max([1e6 * abs(one.offset.seconds) for one in streams_of if one is not None], default=0.0)
    return {
        "cpu_us": 1e6 * used / num_tokens,
        "delay_us": 1e6 * quantile(sorted(delays), 0.5),
        "offset_us": offset_us,
    }


async def measure(args) -> dict:
    from actorllm import AsyncLLM

    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        key.touch(mode=0o600)
        key.write_text("k" * 64)
        agent = Agent(str(key))
        owner = subprocess.Popen(  # noqa: ASYNC220 - before anything is measured
            [
                sys.executable,
                "-c",
                f"import time\nfrom actorllm import LLM\nllm = LLM({MODEL!r}, name={NAME!r}, **{ENGINE!r})\n"
                "llm._engine.start()\nprint('ready', flush=True)\ntime.sleep(3600)",
            ],
            stdout=subprocess.PIPE,
        )
        try:
            assert owner.stdout is not None
            owner.stdout.readline()
            over_tcp = AsyncLLM(MODEL, nodes=[agent.address], node_key_file=str(key), **ENGINE)
            await over_tcp.start()
            by_ring = AsyncLLM.attach(NAME)
            await by_ring.start()
            sides = {"tcp": over_tcp, "ring": by_ring}
            found: dict[str, list[dict]] = {name: [] for name in sides}
            for round_ in range(args.rounds + 1):
                for name in sorted(sides, reverse=bool(round_ % 2)):
                    one = await drive(sides[name], args.streams, args.tokens)
                    if round_:  # the first warms up
                        found[name].append(one)
            single = [await drive(sides[name], 1, args.tokens) for name in ("tcp", "ring")]
            began, used = time.monotonic(), agent.cpu_s()
            await asyncio.sleep(args.idle)
            idle = (agent.cpu_s() - used) / (time.monotonic() - began)
            by_ring.shutdown()

            async def lost_after(strike) -> float:
                replica = over_tcp._engine._fleet.replicas[0]
                at = time.monotonic()
                strike()
                while replica.supervisor.failure is None and not replica.is_lost:  # noqa: ASYNC110 - of another thread
                    await asyncio.sleep(0.001)
                return time.monotonic() - at

            silent_s = await lost_after(lambda: agent.process.send_signal(signal.SIGSTOP))
            over_tcp.shutdown()
            agent.close()
            agent = Agent(str(key))
            over_tcp = AsyncLLM(MODEL, nodes=[agent.address], node_key_file=str(key), **ENGINE)
            await over_tcp.start()
            killed_s = await lost_after(agent.process.kill)
            over_tcp.shutdown()
        finally:
            agent.close()
            owner.kill()
            owner.wait()
    return {"sides": found, "single": single, "idle": idle, "silent_s": silent_s, "killed_s": killed_s}


def measure_peer(python: str | None, args) -> dict:
    """The processor time of Ray's driver, by round, and the version of Ray; None: there is none."""
    if python is None:
        return {"cpu_us": None, "version": None}
    program = Path(__file__).with_name("nodes_peer.py")
    command = [python, "-W", "ignore", str(program), *map(str, (args.streams, args.tokens, args.rounds))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_floor(num_batches: int = 300) -> dict[str, float]:
    """Microseconds by a bell, and by a relay that only copies, in plain Python."""
    command = [sys.executable, str(Path(__file__).with_name("nodes_floor.py")), str(num_batches)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main() -> None:
    exit_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="an interpreter that has Ray")
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--idle", type=float, default=20.0)
    args = parser.parse_args()
    load_before = os.getloadavg()
    floors = [measure_floor()]
    found = asyncio.run(measure(args))
    floors.append(measure_floor())
    of_ray = measure_peer(args.peer_python, args)
    tcp, ring = found["sides"]["tcp"], found["sides"]["ring"]
    later = [a["delay_us"] - b["delay_us"] for a, b in zip(tcp, ring, strict=True)]
    rows = [
        compared(
            f"driver: CPU µs a token over TCP, {args.streams} streams",
            [one["cpu_us"] for one in tcp],
            "an attached program, over rings",
            [one["cpu_us"] for one in ring],
            at_most=1.3,
        ),
        compared(
            f"driver: CPU µs a token over TCP, {args.streams} streams",
            [one["cpu_us"] for one in tcp],
            "a streaming generator of Ray",
            of_ray["cpu_us"],
            at_most=0.4,
        ),
        absolute("a batch of outputs, µs later than by ring", later, at_most=60.0),
        informative(
            "a relay that only copies, µs from a send to its receipt",
            [one["relay"] for one in floors],
            "a bell",
            [one["bell"] for one in floors],
        ),
        informative(
            "driver: CPU µs a token over TCP, 1 stream",
            [found["single"][0]["cpu_us"]],
            "an attached program, over rings",
            [found["single"][1]["cpu_us"]],
        ),
        informative(
            "a batch of outputs, µs after it was sent, 1 stream",
            [found["single"][0]["delay_us"]],
            "by ring",
            [found["single"][1]["delay_us"]],
        ),
        absolute("agent killed: seconds until it is lost", [found["killed_s"]], at_most=0.05),
        absolute("agent stopped: seconds until it is lost", [found["silent_s"]], at_most=3.5),
        absolute("idle agent: share of a core", [found["idle"]], at_most=0.001),
    ]
    finish(
        "nodes",
        "A replica behind a stream",
        rows,
        args.json,
        load_before,
        configuration={
            "rounds": args.rounds,
            "streams": args.streams,
            "tokens": args.tokens,
            "versions": versions(),
            "ray": of_ray["version"],
        },
        rounds={"tcp": tcp, "ring": ring, "ray": of_ray["cpu_us"]},
    )


if __name__ == "__main__":
    main()
