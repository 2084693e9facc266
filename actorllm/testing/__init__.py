"""Engines for the tests of applications: everything is real but the model. No torch is imported.

`ScriptedAsyncLLM` is an `AsyncLLM`, `ScriptedLLM` an `LLM`. Parameters, scheduling, streams, errors and restarts are
those of any engine; a scripted worker gives the tokens. `actorllm.testing.fixtures` has a fixture for pytest.
"""

from actorllm.testing.engine import ScriptedAsyncLLM, ScriptedLLM
from actorllm.testing.script import Answers, ScriptedAnswer
from actorllm.testing.virtual_time import VirtualTime

__all__ = ["Answers", "ScriptedAnswer", "ScriptedAsyncLLM", "ScriptedLLM", "VirtualTime"]
