"""`ActorDeath`: the end of an actor that was not asked to end, in the words of every error and log line about it.

Made by the children of the supervisor (`children`), and by other parts that see one end. Plain values.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from actorllm.actors.actor import Failure
from actorllm.errors import ActorLLMError, EngineDeadError, EngineStartError

OUT_OF_MEMORY_HINT = (
    "the kernel kills a process this way when the memory of the machine, or of its container, is used up; if nothing else "
    "killed it, lower kv_cache_memory_bytes or gpu_memory_utilization, max_num_seqs or max_model_len"
)


STACK_OF_THE_CURRENT_THREAD = "Current thread "
"""How `faulthandler` begins it."""
MAX_QUOTED = 20
"""Lines of a process's stderr in an error."""
MAX_BEFORE = 5
"""Of these, before a stack."""


@dataclass(frozen=True, slots=True)
class ActorDeath:
    """The end of an actor that was not asked to end."""

    actor: str
    exit_code: int | None = None
    """Of a process that exited."""
    signal: int | None = None
    """Of a process that was killed."""
    failure: Failure | None = None
    """The exception that it reported."""
    reason: str | None = None
    """Why it was killed, if the engine did that: "stuck: step 7 ran for 31.0 s, deadline 30 s"."""
    last_words: tuple[str, ...] = ()
    """The last lines that the process wrote to its stderr. The error quotes some, `quoted_words`."""

    @property
    def description(self) -> str:
        """What follows the name: "was killed by signal 9 (SIGKILL)"."""
        if self.failure is not None:
            return f"failed with {self.failure.summary}"
        if self.reason is not None:
            return f"was killed because it was {self.reason}"
        if self.signal is not None:
            return f"was killed by signal {self.signal} ({_signal_name(self.signal)})"
        if self.exit_code is not None:
            return f"exited with code {self.exit_code}"
        return "ended by itself"

    @property
    def quoted_words(self) -> tuple[str, ...]:
        """The last of them; where `faulthandler` wrote a stack, what came before it and the innermost frames, which come first."""
        words = self.last_words
        starts = [i for i, line in enumerate(words) if line.startswith(STACK_OF_THE_CURRENT_THREAD)]
        return words[max(0, starts[-1] - MAX_BEFORE) :][:MAX_QUOTED] if starts else words[-MAX_QUOTED:]

    @property
    def is_killed(self) -> bool:
        """By SIGKILL, without a word."""
        return self.signal == signal.SIGKILL and self.failure is None

    def __str__(self) -> str:
        quoted = "".join(f"\n    {line}" for line in self.quoted_words)
        return f"{self.actor} {self.description}" + (f"; its last words:{quoted}" if quoted else "")

    def to_error(self) -> EngineDeadError:
        """What every user of the engine gets."""
        error = EngineDeadError(str(self))
        if self.is_killed:
            error.add_note(OUT_OF_MEMORY_HINT)
        if self.failure is not None:
            error.add_note(f"In {self.actor}:\n{self.failure.traceback}")
        return error

    def to_start_error(self) -> ActorLLMError:
        """What the caller that started the engine gets."""
        if self.failure is not None:
            return self.failure.to_start_error(self.actor)
        hint = f"\n{OUT_OF_MEMORY_HINT}" if self.is_killed else ""
        return EngineStartError(f"the engine did not start: {self}{hint}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
