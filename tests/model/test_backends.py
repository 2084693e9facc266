"""Backends by name: ours, and those that installed packages announce as entry points."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actorllm import LLM, EngineConfig, SamplingParams
from actorllm.errors import ActorLLMError, ConfigError, UnsupportedModelError
from actorllm.model import backends
from actorllm.model.cpu.runner import CpuRunner
from actorllm.model.registry import model_plan
from actorllm.types import device
from tests.model.driver import TINY_LLAMA

HERE = Path(__file__).parent

Announce = Callable[..., None]


@pytest.fixture
def announce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Announce:
    """Install a package with these entry points: what pip leaves of one, in a folder that programs and workers look into."""
    site = tmp_path / "site"
    site.mkdir()

    def announce(*, rules: str | None = None, **points: str) -> None:
        """rules: of the first."""
        info = site / "made_up-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n")
        lines = [f"[{device.GROUP}]", *(f"{name} = {value}" for name, value in points.items())]
        if rules is not None:
            lines += [f"[{device.RULES_GROUP}]", f"{next(iter(points))} = {rules}"]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        (site / "made_up.py").write_text((HERE / "counting_backend.py").read_text())
        (site / "made_up_rules.py").write_text((HERE / "counting_rules.py").read_text())

    monkeypatch.syspath_prepend(site)
    return announce


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TINY_LLAMA))
    return path


def arguments(**more: Any) -> dict[str, Any]:
    return {"load_format": "dummy", "skip_tokenizer_init": True, "num_threads": 1, "max_num_seqs": 4} | more


@pytest.mark.parametrize("topology", ["inline", "process"])
def test_a_backend_of_another_package_runs(announce: Announce, folder: Path, topology: str) -> None:
    """In whichever process the worker is, and with the scheduler as it is: prompts, decode steps, several rows."""
    announce(counting="made_up:CountingRunner")
    params = SamplingParams(max_tokens=5, ignore_eos=True, detokenize=False)
    with LLM(folder, device="counting", topology=topology, **arguments()) as llm:
        outputs = llm.generate([[7, 3], [95]], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [[4, 5, 6, 7, 8], [96, 0, 1, 2, 3]]


def test_ours_stay_ours(announce: Announce) -> None:
    announce(cpu="made_up:CountingRunner", auto="made_up:CountingRunner")
    assert backends.load("cpu") is CpuRunner
    assert device.others() == {}


def test_an_unknown_name_lists_those_that_are_there(announce: Announce, folder: Path) -> None:
    announce(counting="made_up:CountingRunner")
    with pytest.raises(ConfigError, match=r"device='npu' must be one of 'auto', 'cpu', 'cuda', 'counting'"):
        EngineConfig.from_arguments(folder, **arguments(device="npu"))
    with pytest.raises(ConfigError, match=r"device='npu' is no backend here; there are 'cpu', 'cuda', 'counting'"):
        backends.load("npu")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("nowhere:Runner", "nowhere:Runner cannot be imported: ModuleNotFoundError"),
        ("made_up:Nothing", "made_up:Nothing cannot be imported: AttributeError"),
        ("made_up:PersistentBatch", r"made_up:PersistentBatch is no subclass of actorllm\.model\.runner\.ModelRunner"),
    ],
)
def test_one_that_cannot_be_used_says_why(announce: Announce, folder: Path, value: str, reason: str) -> None:
    announce(broken=value)
    with pytest.raises(ActorLLMError, match=f"device='broken': {reason}"):
        LLM(folder, device="broken", topology="inline", **arguments())


def test_what_it_does_not_know_is_refused_by_name(announce: Announce, folder: Path) -> None:
    announce(counting="made_up:CountingRunner")
    backend = backends.load("counting")

    def plan(**differences: Any) -> Any:
        hf = TINY_LLAMA | differences
        (folder / "config.json").write_text(json.dumps(hf))
        return model_plan(EngineConfig.from_arguments(folder, **arguments()).model, hf, backend)

    assert plan(architectures=["Qwen2ForCausalLM"]).switches == {"has_qkv_bias"}
    with pytest.raises(
        UnsupportedModelError, match=r"needs qk_norm='head', which the fused forward of device='counting'"
    ):
        plan(architectures=["Qwen3ForCausalLM"])
    with pytest.raises(
        UnsupportedModelError, match=r"'GPT2LMHeadModel' would run through transformers, which device='count"
    ):
        plan(architectures=["GPT2LMHeadModel"])


def test_its_rules_decide_before_anything_starts(announce: Announce, folder: Path) -> None:
    announce(counting="made_up:CountingRunner", rules="made_up_rules:RULES")

    def config(**options: Any) -> EngineConfig:
        return EngineConfig.from_arguments(folder, **arguments(device="counting", **options))

    assert (config().model.dtype, config().cache.block_size) == ("bfloat16", 48)
    assert config(block_size=32, dtype="bfloat16").cache.block_size == 32
    for options, words in (
        ({"dtype": "float32"}, "dtype='float32' is not supported on device='counting'; use 'auto' or 'bfloat16'"),
        ({"block_size": 40}, "block_size=40: on device='counting' it must be a multiple of 16; use 48"),
        ({"runner": "pooling"}, "runner='pooling': vectors of prompts are not made on device='counting' yet"),
        ({"enforce_eager": True}, "enforce_eager=True: nothing is recorded by device='counting'; leave it out"),
    ):
        with pytest.raises(ConfigError, match=f"^{words}.*, or device='cpu'$"):
            config(**options)


def test_one_without_rules_takes_what_the_cpu_takes(announce: Announce, folder: Path) -> None:
    """All but vectors of prompts, which a backend must say that it makes."""
    announce(counting="made_up:CountingRunner")
    config = EngineConfig.from_arguments(folder, **arguments(device="counting", dtype="float32", block_size=7))
    assert (config.model.dtype, config.cache.block_size) == ("float32", 7)
    with pytest.raises(ConfigError, match="vectors of prompts are not made on device='counting'"):
        EngineConfig.from_arguments(folder, **arguments(device="counting", runner="pooling"))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("nowhere:RULES", "nowhere:RULES cannot be imported: ModuleNotFoundError"),
        ("made_up_rules:CountingRules", r"made_up_rules:CountingRules is no actorllm\.types\.device\.BackendRules"),
    ],
)
def test_rules_that_cannot_be_used_say_why(announce: Announce, folder: Path, value: str, reason: str) -> None:
    announce(counting="made_up:CountingRunner", rules=value)
    with pytest.raises(ConfigError, match=f"device='counting': {reason}"):
        EngineConfig.from_arguments(folder, **arguments(device="counting"))
