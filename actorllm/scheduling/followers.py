"""`Followers`: which requests wait for a sibling to compute the prompt they share (see `forks`). Owned by the table."""

from __future__ import annotations

from actorllm.scheduling.sequence import Sequence, State


class Followers:
    """Which request follows which, in the order of arrival."""

    def __init__(self) -> None:
        self.leaders: dict[Sequence, Sequence] = {}
        """The leader of every request that follows one; empty as long as no request has siblings."""
        self._followers: dict[Sequence, dict[Sequence, None]] = {}

    def has_any(self, leader: Sequence) -> bool:
        return leader in self._followers

    def count(self, leader: Sequence) -> int:
        """How many follow this one."""
        return len(self._followers.get(leader, ()))

    def add(self, sequence: Sequence, leader: Sequence) -> None:
        self.leaders[sequence] = leader
        self._followers.setdefault(leader, {})[sequence] = None

    def discard(self, sequence: Sequence) -> None:
        """It follows no request any more, if it did."""
        leader = self.leaders.pop(sequence, None)
        if leader is not None:
            del self._followers[leader][sequence]
            if not self._followers[leader]:
                del self._followers[leader]

    def take(self, leader: Sequence) -> list[Sequence]:
        """The requests that follow this one, and do no longer."""
        taken = list(self._followers.pop(leader, ()))
        for sequence in taken:
            del self.leaders[sequence]
        return taken

    def check_integrity(self) -> None:
        """AssertionError when an invariant of the module docstring does not hold."""
        for leader, followers in self._followers.items():
            assert followers, f"{leader.key} is said to have followers"
            assert leader not in self.leaders, f"{leader.key} leads and follows"
            assert leader.state is not State.FINISHED, f"{leader.key} has ended and has followers"
            assert leader.known.size == leader.num_prompt, f"{leader.key} has output, and followers still"
            for sequence in followers:
                assert self.leaders[sequence] is leader, f"{sequence.key} does not know its leader"
                assert sequence.state is State.FOLLOWING, f"{sequence.key} follows and is {sequence.state}"
        assert sum(map(len, self._followers.values())) == len(self.leaders), "count of followers"
