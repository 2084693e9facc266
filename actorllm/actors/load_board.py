"""`LoadBoard`: what routers are told by schedulers and by each other, in shared memory, and `LoadPublisher`, which writes a row.

Each scheduler writes the row of its replica, after each result, and the table of the block hashes that its prefix cache has. Each
program that routes requests writes a row as well: what it has on each replica, from the moment at which it sends it. So what is
on its way counts for the routers of all programs.

A writer writes its own row only, and readers take it as it is. A word is one aligned number. A row that is half of the turn
before is a hint as good as any: a wrong one costs time, and no token. So there is no lock and no message. The owner of the
engine makes the memory (`memory_file`); schedulers open it by path, and attached programs by descriptor. Of the tables only the
pages exist that were written.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actorllm.kvcache.block_hash_table import BlockHashTable, num_words
from actorllm.kvcache.manager import KVCacheManager
from actorllm.messages import StepFailed, StepResult
from actorllm.scheduling.router import MAX_REPLICAS, LearntSteps
from actorllm.scheduling.step_time import StepTime, features_of

if TYPE_CHECKING:
    from actorllm.scheduling.ledger import StepRecord
    from actorllm.scheduling.scheduler import Scheduler

NUM_COLUMNS = 2 + 8
"""Of a replica: free blocks, steps that were seen, and what was learnt of them (`StepTime.learnt`)."""
MAX_PROGRAMS = 256
"""That have rows of their own; of more, some share one, and routers know less."""
MAX_BUCKETS = 1 << 18
"""Of the table of a replica: with four entries each, and some 60 bytes a block."""
PAGE_WORDS = 512


class ProgramLoad(NamedTuple):
    """What a program has on a replica."""

    num_waiting: int = 0
    """Sequences that wait."""
    num_waiting_tokens: int = 0
    """Of their prompts."""
    num_running: int = 0
    num_context: int = 0
    """Tokens of those that run."""
    num_pinned: int = 0
    """Sequences of both kinds that may go nowhere else."""


NO_LOAD = ProgramLoad()


class LoadBoard:
    """See the module docstring."""

    NUM_LOADS = MAX_REPLICAS * NUM_COLUMNS
    NUM_JOURNALS = MAX_PROGRAMS * MAX_REPLICAS * len(NO_LOAD)
    FIRST_TABLE = -(-(NUM_LOADS + NUM_JOURNALS + 1) // PAGE_WORDS) * PAGE_WORDS
    TABLE_WORDS = -(-num_words(MAX_BUCKETS) // PAGE_WORDS) * PAGE_WORDS
    NUM_BYTES = (FIRST_TABLE + MAX_REPLICAS * TABLE_WORDS) * 8

    def __init__(self, path: str) -> None:
        """path: of NUM_BYTES of memory, which stays mapped when the file is closed. Raises OSError: its owner has ended."""
        with open(path, "r+b", buffering=0) as file:
            memory = mmap.mmap(file.fileno(), self.NUM_BYTES)
        words: NDArray[np.float64] = np.frombuffer(memory, np.float64, self.FIRST_TABLE)
        num_before = self.NUM_LOADS + self.NUM_JOURNALS
        self._table = words[: self.NUM_LOADS].reshape(MAX_REPLICAS, NUM_COLUMNS)
        self._journals = words[self.NUM_LOADS : num_before].reshape(MAX_PROGRAMS, MAX_REPLICAS, len(NO_LOAD))
        self._num_programs = words[num_before : num_before + 1]
        self._words = memoryview(memory).cast("Q")

    def clear(self, row: int) -> None:
        """Its replica has ended: nothing is known of the next one."""
        self._table[row] = 0.0
        self.hashes(row).end()

    def load_row(self, row: int) -> NDArray[np.float64]:
        """The row itself, for a copy of a replica's board elsewhere (`fleet.nodes.load_mirror`)."""
        cells: NDArray[np.float64] = self._table[row]
        return cells

    def hash_words(self, row: int) -> NDArray[np.uint64]:
        """The table itself, in the same way."""
        first = self.FIRST_TABLE + row * self.TABLE_WORDS
        return np.frombuffer(self._words[first : first + self.TABLE_WORDS], np.uint64)

    def hashes(self, row: int) -> BlockHashTable:
        """What the prefix cache of a replica has."""
        first = self.FIRST_TABLE + row * self.TABLE_WORDS
        return BlockHashTable(self._words[first : first + self.TABLE_WORDS])

    def write(self, row: int, num_free_blocks: int, times: StepTime) -> None:
        """What the scheduler of a replica knows now."""
        self._table[row] = (num_free_blocks, times.num_steps, *times.learnt)

    def read(self, row: int) -> tuple[int, LearntSteps] | None:
        """Free blocks, and what is known of its steps. None: not enough steps have been seen."""
        free, num_steps, *learnt = self._table[row].tolist()
        if num_steps < StepTime.MIN_STEPS or not all(-1e15 < number < 1e15 for number in learnt):
            return None
        return int(free), LearntSteps(tuple(learnt[:4]), tuple(learnt[4:]))

    # Programs

    @property
    def has_others(self) -> bool:
        """Programs have joined the engine since it started."""
        return bool(self._num_programs[0])

    def add_program(self, program: int) -> None:
        """The program-th joins; the owner is number 0."""
        row = self._row_of(program)
        self._journals[row] = 0.0
        self._num_programs[0] = max(self._num_programs[0], row + 1)

    def remove_program(self, program: int) -> None:
        """It is gone, with what it had."""
        self._journals[self._row_of(program)] = 0.0

    def write_journal(self, program: int, replica: int, journal: ProgramLoad) -> None:
        self._journals[self._row_of(program), replica] = journal

    def journals_of_others(self, program: int) -> list[ProgramLoad]:
        """By replica, of all programs but this one."""
        known = self._journals[: int(self._num_programs[0])]
        total = known.sum(axis=0)
        if len(known):
            total -= known[self._row_of(program)]
        return [ProgramLoad(*map(int, numbers)) for numbers in total.tolist()]

    @staticmethod
    def _row_of(program: int) -> int:
        return 0 if program == 0 else 1 + (program - 1) % (MAX_PROGRAMS - 1)


class LoadPublisher:
    """Learns what steps take, and writes the row and the table of its replica. A part of the scheduler actor."""

    def __init__(self, path: str, row: int) -> None:
        """Raises OSError: the owner has ended."""
        self._board = LoadBoard(path)
        self._row = row
        self._times = StepTime()
        self._launched: dict[int, tuple[int, int, int]] = {}

    def show_cache(self, kv: KVCacheManager) -> None:
        """From here on the table has the hashes of what this scheduler finds."""
        if kv.index is not None:
            table = self._board.hashes(self._row)
            table.begin(kv.pool.num_blocks)
            kv.index.observer = table

    def launched(self, record: StepRecord, scheduler: Scheduler) -> None:
        """A step is on its way, the newest of the ledger."""
        self._launched[record.step] = features_of(record, scheduler)[:3]

    def done(self, result: StepResult | StepFailed, scheduler: Scheduler) -> None:
        """Its result has come."""
        features = self._launched.pop(result.step, None)
        if features is not None and isinstance(result, StepResult):
            p, d, context = features
            self._times.observe(p, d + result.num_checked, context, result.ended - result.started)
        self._board.write(self._row, scheduler.kv.num_free, self._times)

    def clear(self) -> None:
        """The workers are lost, with every step in flight."""
        self._launched.clear()
