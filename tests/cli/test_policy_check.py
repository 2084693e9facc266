"""`actorllm policy check`: what it says of policies that are right, and of each way to be wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from actorllm import cli
from actorllm.scheduling.admission_policy import ADMISSIONS, AdmissionPolicy
from actorllm.scheduling.policy import POLICIES, KeyPolicy, PlanPolicy
from actorllm.scheduling.policy_check import Check, check_policy, readable
from actorllm.scheduling.sequence import Sequence

HEAD = """
import math
import numpy as np
from actorllm.scheduling.admission_policy import AdmissionPolicy
from actorllm.scheduling.policies.priority import Priority
from actorllm.scheduling.policy import Admit, Budget, Decision, KeyPolicy
from actorllm.scheduling.step_packing import KeyPlanner


"""

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Puts a class `Mine` in a module of the current folder; returns its name for a command line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def written(source: str) -> str:
        module = f"mine_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{module}.py").write_text(HEAD + source)
        return f"{module}:Mine"

    return written


def rows(found: Check) -> dict[str, str]:
    return {hook.name: hook.told for hook in found.hooks}


@pytest.mark.parametrize("name", sorted({**POLICIES, **ADMISSIONS.names}))
def test_what_ships_passes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["policy", "check", name, "--no-attributes"]) == 0
    told = capsys.readouterr().out
    assert "not called" not in told
    assert "a run         ok, " in told


SHORTEST = """
class Mine(KeyPolicy):
    name = "shortest"

    def key(self, sequence, view):
        return (sequence.priority, view.admission_blocks(sequence))
"""


def test_a_class_of_this_folder(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    name = write(SHORTEST)
    assert cli.main(["policy", "check", name]) == 0
    told = capsys.readouterr().out
    assert f"{name} (KeyPolicy)" in told
    assert "\n  key           ok, " in told
    assert "\n  admit         not overridden\n" in told
    assert "\n  slo                   What the request was promised; None: nothing.\n" in told
    assert "\n  remaining             Known tokens of a request" in told


def everything(base: type, parent: str) -> str:
    """A class that overrides every hook, and says the same as its parent."""
    lines = [f"class Mine({parent}):"]
    for name, hook in vars(base).items():
        if inspect.isfunction(hook) and not name.startswith("_"):
            arguments = ", ".join(list(inspect.signature(hook).parameters)[1:])
            lines += [f"    def {name}(self, {arguments}):", f"        return super().{name}({arguments})"]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("base", "source"),
    [
        (KeyPolicy, everything(KeyPolicy, "Priority")),
        (AdmissionPolicy, everything(AdmissionPolicy, "AdmissionPolicy")),
        (
            PlanPolicy,
            everything(PlanPolicy, "KeyPlanner") + "\n    def __init__(self):\n        super().__init__(Priority())",
        ),
    ],
)
def test_every_hook_is_called(write: Write, base: type, source: str) -> None:
    found = check_policy(write(source))
    assert found.kind == base.__name__
    told = rows(found)
    assert len(told) > 6
    assert {name: text for name, text in told.items() if not text.startswith("ok, ")} == {}


WRONG: dict[str, tuple[str, str, str]] = {
    "an exception": (
        "class Mine(KeyPolicy):\n    def key(self, sequence, view):\n        return (1 / (sequence.priority - 5),)",
        "key",
        "ZeroDivisionError: division by zero (",
    ),
    "no tuple": (
        "class Mine(KeyPolicy):\n    def key(self, sequence, view):\n        return sequence.arrival",
        "key",
        "it returned 0.0, and a key is a tuple",
    ),
    "an attribute of an objective that is not there": (
        "class Mine(KeyPolicy):\n    def key(self, sequence, view):\n        return (sequence.slo.ttft,)",
        "key",
        "AttributeError: 'NoneType' object has no attribute 'ttft'",
    ),
    "keys that cannot be compared": (
        "class Mine(KeyPolicy):\n    def key(self, sequence, view):\n        return (sequence.tenant,)",
        "key",
        "its keys cannot be compared: TypeError",
    ),
    "a verdict that is none": (
        "class Mine(KeyPolicy):\n    def admit(self, sequence, view):\n        return True",
        "admit",
        "it returned True, and a verdict is one of Admit.ADMIT",
    ),
    "a time that is none": (
        "class Mine(KeyPolicy):\n    def wake_at(self, view):\n        return math.nan",
        "wake_at",
        "it returned nan, which is no time in seconds",
    ),
    "a budget that is none": (
        "class Mine(KeyPolicy):\n    def budget(self, view):\n        return 100",
        "budget",
        "it returned 100, which is no Budget",
    ),
    "a mask of another size": (
        "class Mine(KeyPolicy):\n    def decode_mask(self, view):\n        return np.ones(3, np.bool_)",
        "decode_mask",
        "is no mask of ",
    ),
    "a group without a place": (
        "class Mine(KeyPolicy):\n    def group(self, sequence, view):\n        return sequence.tenant",
        "group",
        "it returned 'a', and a group is None",
    ),
    "turns for ever": (
        "class Mine(KeyPolicy):\n    def preempt_for(self, sequence, victim, view):\n        return True",
        "preempt_for",
        "both ways round",
    ),
    "others than those that give way": (
        "class Mine(Priority):\n    def giving_way(self, sequence, view):\n        return view.running()",
        "giving_way",
        "it names others than those of which preempt_for is true",
    ),
    "a running request that is none": (
        "class Mine(Priority):\n    def giving_way(self, sequence, view):\n        return [1]",
        "giving_way",
        "it returned [1], which is no list of requests",
    ),
    "an event": (
        "class Mine(KeyPolicy):\n    def on_preempt(self, sequence, view):\n        raise KeyError('lost')",
        "on_preempt",
        "KeyError: 'lost' (",
    ),
    "a stall": (
        "class Mine(KeyPolicy):\n    def admit(self, sequence, view):\n        return Admit.WAIT",
        "a run",
        "it plans nothing for 13 requests that could run, and does not ask to be woken",
    ),
    "a decision that is none": (
        everything(PlanPolicy, "KeyPlanner").replace("return super().plan(view)", "return None")
        + "\n    def __init__(self):\n        super().__init__(Priority())",
        "plan",
        "it returned None, the decision is None",
    ),
    "no request": (
        "class Mine(AdmissionPolicy):\n    def reject(self, view):\n        return ['late']",
        "reject",
        "it returned ['late'], which cannot be used",
    ),
    "an event of an admission policy": (
        "class Mine(AdmissionPolicy):\n    def on_end(self, sequence, view):\n        self.left -= 1",
        "on_end",
        "AttributeError: 'Mine' object has no attribute 'left'",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said_of_the_hook(write: Write, capsys: pytest.CaptureFixture[str], what: str) -> None:
    source, hook, words = WRONG[what]
    name = write(source)
    assert cli.main(["policy", "check", name, "--no-attributes"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"  {hook} ")]
    assert words in line
    if words.endswith("("):
        assert f"{name.partition(':')[0]}.py, line " in line
        assert line.rstrip(")").endswith(source.rsplit("\n", 1)[-1].strip().rstrip(")"))


def test_nothing_to_check_is_bad_input(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in (
        ("no_such_module_here:Mine", "ModuleNotFoundError"),
        ("fcfss", "did you mean 'fcfs'"),
        (write("class Mine: ..."), "is no KeyPolicy, no PlanPolicy and no AdmissionPolicy"),
    ):
        assert cli.main(["policy", "check", name]) == 2
        assert words in capsys.readouterr().err


def test_everything_that_may_be_read_is_there_and_explained() -> None:
    lists = readable()
    fields = {*Sequence.__dataclass_fields__, *vars(Sequence)}
    assert {name for name, _ in lists["Sequence"]} <= fields
    assert {"slo", "priority", "tenant"} <= {name for name, _ in lists["Sequence"]}
    assert {"now", "batch", "kv", "running", "remaining"} <= {name for name, _ in lists["View"]}
    for attributes in lists.values():
        for name, text in attributes:
            assert text.endswith((".", "...")), name
