"""Programs import vLLM's names from vLLM's submodules."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import actorllm.compat
from actorllm.compat import MODULES
from actorllm.errors import EngineDeadError
from tests import programs

NO_HOMES = [("entrypoints.launchers.run_batch", "make_arg_parser")]
"""The parser of another command than the one by that name here."""


def test_the_names_of_the_table_are_there() -> None:
    missing = []
    for module, names in MODULES.items():
        imported = importlib.import_module(f"actorllm.compat.{module}")
        missing += [f"{module}: {name}" for name in names if not hasattr(imported, name) or name not in dir(imported)]
    assert missing == []


def test_a_name_is_where_vllm_defines_it() -> None:
    """Not only where older releases did, or where it is exported again."""
    kept = Path(__file__).parents[1] / "project" / "vllm_names.json"
    homes = json.loads(kept.read_text())["homes"]
    assert len(homes) > 100
    places = [(module, name) for name, modules in homes.items() for module in modules]
    assert [(module, name) for module, name in places if name not in MODULES.get(module, {})] == NO_HOMES


def test_the_names_are_those_of_the_package() -> None:
    from actorllm.compat.engine.async_llm_engine import AsyncEngineDeadError
    from actorllm.compat.sampling_params import SamplingParams

    assert SamplingParams is actorllm.SamplingParams is actorllm.compat.SamplingParams
    assert AsyncEngineDeadError is EngineDeadError


def test_logits_processors_are_derived_from_the_classes_of_vllms_modules() -> None:
    from actorllm.compat.logits_process import LogitsProcessor as OfARequest
    from actorllm.compat.v1.sample.logits_processor import AdapterLogitsProcessor, BatchUpdate, process_dict_updates
    from actorllm.compat.v1.sample.logits_processor.interface import LogitsProcessor

    targets: dict[int, int] = {3: 1}
    assert issubclass(AdapterLogitsProcessor, LogitsProcessor)
    assert OfARequest is not LogitsProcessor
    assert process_dict_updates(targets, BatchUpdate(1, [3], [], []), lambda *_: None)
    assert not targets


def test_a_name_may_be_imported_from_any_submodule_that_vllm_has_it_in() -> None:
    """Evaluation harnesses and trainers import what a module of vLLM imports itself."""
    names: dict[str, object] = {}
    exec(
        "from actorllm.compat.v1.engine.async_llm import AsyncEngineArgs, AsyncLLM\n"
        "from actorllm.compat.entrypoints.llm import LLM, UsageContext, RequestOutput\n"
        "from actorllm.compat.engine.arg_utils import EngineArgs, FlexibleArgumentParser, init_logger",
        names,
    )
    assert names["AsyncEngineArgs"] is actorllm.AsyncEngineArgs
    assert names["RequestOutput"] is actorllm.RequestOutput
    with pytest.raises(ImportError, match="cannot import name 'Counter'"):  # of ids, or of metrics: two things
        exec("from actorllm.compat.sampling_params import Counter")


def test_submodules_need_no_import_of_their_own() -> None:
    program = (
        "import actorllm.compat as vllm\n"
        "print(vllm.sampling_params.SamplingParams is vllm.SamplingParams, vllm.v1.engine.async_llm.AsyncLLM.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True AsyncLLM\n"


def test_the_version_is_that_of_the_names() -> None:
    """Programs compare it before they import what their release of vLLM has."""
    import actorllm.compat.version
    from packaging.version import Version

    assert Version("0.32") <= Version(actorllm.compat.__version__) < Version("0.33")
    assert actorllm.compat.version.__version__ == actorllm.compat.__version__ != actorllm.__version__
    assert actorllm.compat.__version_tuple__ >= (0, 32)


def test_what_programs_ask_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from actorllm.compat.entrypoints.utils import cli_env_setup
    from actorllm.compat.utils import cuda_device_count_stateless, get_ip

    assert cuda_device_count_stateless() >= 0
    assert get_ip().count(".") == 3
    monkeypatch.setenv("VLLM_HOST_IP", "10.1.2.3")
    assert get_ip() == "10.1.2.3"
    cli_env_setup()


def test_the_chat_template_that_counts() -> None:
    from types import SimpleNamespace

    from actorllm.compat.entrypoints.chat_utils import resolve_hf_chat_template

    plain, named = SimpleNamespace(chat_template="T"), SimpleNamespace(chat_template={"default": "D", "tool_use": "U"})
    assert resolve_hf_chat_template(plain, None, tools=None, model_config=None) == "T"
    assert resolve_hf_chat_template(plain, "{{ own }}") == "{{ own }}"
    assert resolve_hf_chat_template(named, chat_template="tool_use") == "U"
    assert resolve_hf_chat_template(SimpleNamespace(chat_template=None)) is None


def test_what_is_not_in_the_table_cannot_be_imported() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"actorllm\.compat\.model_executor\.layers"):
        importlib.import_module("actorllm.compat.model_executor.layers")
    with pytest.raises(ImportError, match="cannot import name 'GuidingParams'"):
        exec("from actorllm.compat.sampling_params import GuidingParams")
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = actorllm.compat.Llm


def test_everything_of_a_submodule_and_a_submodule_of_a_submodule() -> None:
    names: dict[str, object] = {}
    exec("from actorllm.compat.sampling_params import *\nimport actorllm.compat.v1.engine.async_llm as found", names)
    assert names["SamplingParams"] is actorllm.SamplingParams
    assert names["found"].AsyncLLM is actorllm.AsyncLLM  # type: ignore[attr-defined]


def test_the_server_starts_by_the_module_that_vllm_has_for_it() -> None:
    command = [sys.executable, "-m", "actorllm.compat.entrypoints.openai.api_server", "--model", "storyteller"]
    done = programs.run([*command, "--api-processes", "0"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--api-processes 0 must be at least 1" in done.stderr


def test_importing_names_imports_no_torch() -> None:
    program = "import actorllm.compat as vllm, sys\nvllm.SamplingParams, vllm.LLM\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("command", [["entrypoints.openai.run_batch"], ["entrypoints.cli.main", "run-batch"]])
def test_a_module_of_a_command_runs_it(tmp_path: Path, command: list[str]) -> None:
    body = {"model": "storyteller", "prompt": "Once", "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    module, *more = command
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    options = ["--model", "storyteller", "--topology", "inline", "--num-threads", "1"]
    done = programs.run(
        [sys.executable, "-m", f"actorllm.compat.{module}", *more, *files, *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out.jsonl").read_text())["response"]["status_code"] == 200
