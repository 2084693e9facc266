"""The plugin in a suite of an application: with pytest-asyncio in both modes, with anyio's plugin, and with both."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = 'pytest_plugins = ["actorllm.testing.plugin"]\n'
BODY = """
    llm = scripted_llm(["fine"])
    async for output in llm.generate("x"):
        text = output.outputs[0].text
    assert text == "fine"
    with open("runs", "a") as file:
        file.write("ran\\n")
"""
TEST = "async def test_it(scripted_llm):" + BODY
OF_A_CLASS = "class TestIt:\n    async def test_it(self, scripted_llm):" + BODY.replace("\n", "\n    ")
LEFT = """
import pytest
from actorllm.errors import EngineShutdownError

async def test_it(scripted_llm):
    global llm
    llm = scripted_llm(["fine"])
    await llm.start()
    with open("runs", "a") as file:
        file.write("ran\\n")

def test_after():
    with pytest.raises(EngineShutdownError):
        llm.generate("x")
"""


def passed(folder: Path, test: str, conftest: str = CONFTEST, **options: str) -> tuple[int, int]:
    """How many tests of an application passed, and how often their body ran; warnings are errors."""
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_application.py").write_text(test)
    options = {"asyncio_default_fixture_loop_scope": "function", "filterwarnings": "error"} | options
    lines = [f"{name} = {value}" for name, value in options.items()]
    (folder / "pytest.ini").write_text("\n".join(["[pytest]", *lines]))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=50, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    found = re.search(r"(\d+) passed", result.stdout)
    assert found is not None
    return int(found[1]), len((folder / "runs").read_text().splitlines())


MARKED = "import pytest\n@pytest.mark.{}\n"


@pytest.mark.parametrize("test", [TEST, OF_A_CLASS], ids=["function", "class"])
@pytest.mark.parametrize("anyio_mode", ["strict", "auto"])
def test_a_test_of_pytest_asyncio_runs_once(tmp_path: Path, test: str, anyio_mode: str) -> None:
    assert passed(tmp_path, MARKED.format("asyncio") + test, asyncio_mode="strict", anyio_mode=anyio_mode) == (1, 1)


def test_with_the_automatic_mode_of_pytest_asyncio(tmp_path: Path) -> None:
    assert passed(tmp_path, TEST, asyncio_mode="auto") == (1, 1)


@pytest.mark.parametrize("anyio_mode", ["strict", "auto"])
def test_a_test_of_anyio_runs_with_each_backend(tmp_path: Path, anyio_mode: str) -> None:
    mark = MARKED.format("anyio") if anyio_mode == "strict" else ""
    assert passed(tmp_path, mark + TEST, anyio_mode=anyio_mode) == (2, 2)


def test_the_fixture_without_the_plugin(tmp_path: Path) -> None:
    conftest = "from actorllm.testing.fixtures import scripted_llm\n"
    assert passed(tmp_path, TEST, conftest, asyncio_mode="auto") == (1, 1)


def test_the_engines_end_with_their_test(tmp_path: Path) -> None:
    assert passed(tmp_path, LEFT, asyncio_mode="auto") == (2, 1)
