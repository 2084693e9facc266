"""Groups of a trainer and ranks, over gloo in this process: what arrives, and what becomes of those whom nothing reaches."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actorllm.errors import EngineError, InvalidParameterError
from actorllm.model.updates.tensor_files import TORCH_TYPES, Layout, TensorFile, TensorRoom
from actorllm.model.updates.transfer_group import (
    TRAINER,
    Buffers,
    TransferGroup,
    cut,
    flat_bytes,
    named_tensors,
    serve,
)
from actorllm.types.weight_transport import GroupPlace
from tests.model.updates.memory_files import new_memory, read

CPU = torch.device("cpu")
SIZES = Buffers(True, 1 << 20)

TENSORS: dict[str, Any] = {
    "a": torch.arange(7, dtype=torch.float32),
    "empty": torch.zeros(0, 3),
    "b": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).T,
    "c": torch.tensor(3, dtype=torch.int64),
    "d": torch.arange(100, dtype=torch.uint8),
}


@contextmanager
def group_of(
    num_ranks: int, buffers: Buffers = SIZES, timeout_s: float = 60, **told: Any
) -> Iterator[tuple[TransferGroup, list[TransferGroup]]]:
    """A trainer, and ranks on threads that have met it. timeout_s: from then on, however long they took to meet."""
    place = GroupPlace("gloo", "127.0.0.1", 0, 1 + num_ranks)
    store = serve(place, buffers)
    place = replace(place, master_port=store.port)
    with ThreadPoolExecutor(num_ranks) as threads:
        meeting = [threads.submit(TransferGroup, place, 1 + number, CPU) for number in range(num_ranks)]
        trainer = TransferGroup(place, TRAINER, CPU, store)
        del store  # it ends with the trainer
        ranks = [one.result() for one in meeting]
        for group in (trainer, *ranks):
            group.place = replace(place, timeout_s=timeout_s)
            group._group._set_default_timeout(timedelta(seconds=timeout_s))
        try:
            yield trainer, ranks
        finally:
            for group in (trainer, *ranks):
                group.close()


def beside(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """On a thread that does not keep the test from its end."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(function(*arguments))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def extending(taken: bytearray) -> Callable[[Any], None]:
    return lambda piece: taken.extend(piece.tobytes())


def layout_of(tensors: Any) -> list[Layout]:
    return [layout for layout, _ in named_tensors(tensors)]


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("num_bytes", [1, 5, 1000])
def test_pieces_are_the_stream(is_packed: bool, num_bytes: int) -> None:
    buffers = Buffers(is_packed, num_bytes)
    layout = layout_of(TENSORS)
    lengths = buffers.pieces(layout)
    assert max(lengths) <= num_bytes
    whole = torch.cat([flat_bytes(tensor) for _, tensor in named_tensors(TENSORS)])
    pieces = [piece.clone() for piece in cut((flat_bytes(one) for _, one in named_tensors(TENSORS)), lengths, CPU)]
    assert [len(piece) for piece in pieces] == lengths
    assert torch.equal(torch.cat(pieces), whole)
    if not is_packed and num_bytes == 1000:
        assert len(lengths) == 4, "one for each that has bytes"


@pytest.mark.parametrize("buffers", [SIZES, Buffers(True, 11), Buffers(False, 11)])
def test_every_rank_gets_every_byte(buffers: Buffers) -> None:
    """More than once over one group."""
    layout = layout_of(TENSORS)
    with group_of(2, buffers) as (trainer, ranks):
        for factor in (1, 2):
            sent = {name: tensor * factor for name, tensor in TENSORS.items()}
            file = TensorFile.laid_out(layout, new_memory)
            taken = bytearray()
            with TensorRoom(file.path, is_written=True) as room:
                assert room.layout == layout
                waiting = [
                    beside(ranks[0].receive, layout, room.write),
                    beside(ranks[1].receive, layout, extending(taken)),
                ]
                trainer.send(named_tensors(sent))
                for one in waiting:
                    one.result()
            found = read(file)
            assert found.keys() == sent.keys()
            assert all(torch.equal(found[name], sent[name]) for name in sent)
            assert taken == b"".join(bytes(flat_bytes(tensor).numpy()) for tensor in sent.values())
            file.close()


def test_other_tensors_than_were_told_of_reach_nobody() -> None:
    with group_of(2) as (trainer, ranks):
        taken: list[Any] = []
        waiting = [beside(rank.receive, layout_of({"a": TENSORS["d"]}), taken.append) for rank in ranks]
        sending = beside(trainer.send, named_tensors({"b": TENSORS["d"]}))
        for one in waiting:
            with pytest.raises(
                EngineError, match="sends other tensors than update_info names, and nothing was changed"
            ):
                one.result()
        sending.exception()  # if there is any: the little that it sends may be on its way before the ranks have gone
        assert taken == []
        assert not any(rank.is_open for rank in ranks)


def test_a_trainer_that_is_silent_is_named() -> None:
    with group_of(2, timeout_s=1) as (_, ranks):
        waiting = [beside(rank.receive, layout_of(TENSORS), None) for rank in ranks]
        for one in waiting:
            with pytest.raises(EngineError, match=r"the trainer at 127.0.0.1:\d+ was silent for 1 s while tensor 'a'"):
                one.result()
        assert not any(rank.is_open for rank in ranks)


class Interrupt(BaseException):
    pass


class Halting(list[Any]):
    """Tensors whose layout is whole. After the first one it waits, and raises."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        super().__init__(tensors)
        self.num_passes = 0
        self.goes_on = threading.Event()

    def __iter__(self) -> Iterator[Any]:
        self.num_passes += 1
        return super().__iter__() if self.num_passes == 1 else self._halting()

    def _halting(self) -> Iterator[Any]:
        yield self[0]
        self.goes_on.wait()
        raise Interrupt


def test_a_trainer_that_falls_silent_in_the_middle_is_named() -> None:
    with group_of(2, Buffers(False, 1 << 20), timeout_s=1) as (trainer, ranks):
        waiting = [beside(rank.receive, layout_of(TENSORS), None) for rank in ranks]
        halting = Halting(named_tensors(TENSORS))
        sending = beside(trainer.send, halting)
        for one in waiting:
            with pytest.raises(EngineError, match=r"the trainer at \S+ was silent for 1 s while tensor 'b'"):
                one.result()
        halting.goes_on.set()
        with pytest.raises(Interrupt):
            sending.result()


def test_a_trainer_that_is_interrupted_in_the_middle_is_not_waited_for() -> None:
    with group_of(2, Buffers(False, 1 << 20), timeout_s=600) as (trainer, ranks):
        waiting = [beside(rank.receive, layout_of(TENSORS), None) for rank in ranks]
        halting = Halting(named_tensors(TENSORS))
        halting.goes_on.set()
        with pytest.raises(Interrupt):
            trainer.send(halting)
        for one in waiting:
            with pytest.raises(EngineError, match=r"the trainer at .* has ended while tensor 'b'"):
                one.result(60)
        with pytest.raises(EngineError, match="make another WeightSender"):
            trainer.check()


def test_what_takes_connections_and_is_no_trainer_is_named() -> None:
    """It says nothing, for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = GroupPlace("gloo", "127.0.0.1", listening.getsockname()[1], 2, 1)
        meeting = beside(TransferGroup, place, 1, CPU)
        with pytest.raises(EngineError, match=r"rank 1 of the weight transfer did not meet the trainer at 127.0.0.1"):
            meeting.result(60)


def test_a_trainer_that_ends_is_told_of_at_once() -> None:
    """Long before the time is over."""
    with group_of(1, timeout_s=600) as (trainer, ranks):
        waiting = beside(ranks[0].receive, layout_of(TENSORS), None)
        trainer.close()
        with pytest.raises(EngineError, match=r"the trainer at .* has ended while tensor 'a' was waited for"):
            waiting.result()
        with pytest.raises(EngineError, match="nothing was changed"):
            ranks[0].receive(layout_of(TENSORS), None)


def test_a_rank_that_does_not_come_is_named() -> None:
    place = GroupPlace("gloo", "127.0.0.1", 0, 3, 1)
    store = serve(place, SIZES)
    place = GroupPlace("gloo", "127.0.0.1", store.port, 3, 1)
    meeting = beside(TransferGroup, place, 1, CPU)
    with pytest.raises(EngineError, match=r"rank 0 of the weight transfer did not meet .* not there: rank (1, )?2"):
        TransferGroup(place, TRAINER, CPU, store)
    with pytest.raises(EngineError, match=r"world_size=3 must be the trainer and all ranks"):
        meeting.result()


def test_a_rank_that_does_not_take_part_is_named() -> None:
    """The others take nothing either."""
    with group_of(2, timeout_s=1) as (trainer, ranks):
        taken: list[Any] = []
        waiting = beside(ranks[0].receive, layout_of(TENSORS), taken.append)
        with pytest.raises(EngineError, match=r"make another WeightSender .* not there: rank (1, )?2"):
            trainer.send(named_tensors(TENSORS))
        with pytest.raises(EngineError, match="nothing was changed"):
            waiting.result()
        assert taken == []


def test_a_rank_that_another_one_sends_on_to_ends() -> None:
    """What the trainer sends reaches it by way of a rank, which leaves at once, though its error is kept."""
    tensors = {"large": torch.zeros(64 << 20, dtype=torch.uint8)}
    with group_of(3, timeout_s=600) as (trainer, ranks):
        ranks[2]._come("1")
        ranks[2]._group = ranks[2]._store = None  # as a process that was killed: nothing is said
        waiting = [beside(rank.receive, layout_of(tensors), None) for rank in ranks[:2]]
        for one in [beside(trainer.send, named_tensors(tensors)), *waiting]:
            with pytest.raises(EngineError, match="has ended"):
                one.result(60)


def test_who_waits_is_given_up() -> None:
    with group_of(1, timeout_s=600) as (trainer, ranks):
        is_over = threading.Event()
        waiting = beside(ranks[0].receive, layout_of(TENSORS), None, is_over.is_set)
        is_over.set()
        with pytest.raises(EngineError, match="it was given up"):
            waiting.result()
        with pytest.raises(EngineError, match="make another WeightSender"):
            trainer.send(named_tensors(TENSORS), lambda: True)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"backend": "nccl"}, "backend='nccl' is between GPUs, .*; use backend='gloo'"),
        ({"world_size": 3}, "world_size=3 is not that of the trainer at .*, 2"),
    ],
)
def test_what_the_trainer_says_otherwise_is_refused(own: dict[str, Any], said: str) -> None:
    told: dict[str, Any] = {"backend": "gloo", "master_address": "127.0.0.1", "world_size": 2, "timeout_s": 60.0}
    store = serve(GroupPlace(**told, master_port=0), SIZES)
    with pytest.raises(InvalidParameterError, match=said):
        TransferGroup(GroupPlace(**(told | own), master_port=store.port), 1, CPU)


def test_broadcasts_on_a_gpu_come_behind_what_makes_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be under way on the stream of the thread, as a step of an optimizer is; they have a stream of their own."""
    done: list[Any] = []

    def broadcast(tensor: torch.Tensor, rank: int) -> Any:
        done.append("broadcast")
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        done.append(("is on", stream))
        yield

    own: Any = SimpleNamespace(wait_stream=lambda other: done.append(("waits for", other)))
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("that of the thread", device))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", on)
    group = TransferGroup.__new__(TransferGroup)
    group.place, group._device, group._stream = GroupPlace("nccl", "127.0.0.1", 1, 2), gpu, own
    group._group = SimpleNamespace(broadcast=broadcast)
    group._broadcast(torch.zeros(1))
    assert done == [("waits for", ("that of the thread", gpu)), ("is on", own), "broadcast"]


def test_a_port_that_is_taken_is_named() -> None:
    store = serve(GroupPlace("gloo", "127.0.0.1", 0, 2), SIZES)
    with pytest.raises(EngineError, match=f"the trainer cannot listen at 127.0.0.1:{store.port}"):
        serve(GroupPlace("gloo", "127.0.0.1", store.port, 2), SIZES)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "tensors is empty"),
        (5, "tensors=5 must be a mapping from names to tensors"),
        ([("a",)], r"tensors=\[\('a',\)\] must be a mapping"),
        ({"a": torch.zeros(2, device="meta")}, "'a' is on 'meta' and has no data"),
        ({"a": 3}, "'a' is int"),
        ({"": torch.zeros(2)}, "tensor name ''"),
    ],
)
def test_what_is_no_tensor_is_not_sent(tensors: Any, said: str) -> None:
    with pytest.raises(InvalidParameterError, match=said):
        named_tensors(tensors)


def test_types_are_those_of_files() -> None:
    for name, dtype in TORCH_TYPES.items():
        ((layout, _),) = named_tensors({"a": torch.zeros(2, dtype=dtype)})
        assert (layout.dtype, layout.num_bytes) == (name, 2 * dtype.itemsize)
