"""What an intake process reads is what this process would read, and it ends with its owner."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from actorllm import AsyncLLM, SamplingParams
from actorllm.config import BUNDLED_MODELS
from actorllm.errors import InvalidPromptError
from actorllm.intake.intake_process import IntakeProcess
from actorllm.intake.tokenization import LARGE_TEXT
from actorllm.text.chat_template import Conversation
from actorllm.text.tokenizer import Tokenizer

TEXT = "Once upon a time, in the 1st village — déjà vu 🙂 —  there was\n\n a fox. " * (LARGE_TEXT // 60)
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ x }}{% endfor %}{{ tools | tojson }}"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_it_reads_the_same() -> None:
    async with AsyncLLM("storyteller", topology="inline", num_threads=1) as llm:
        engine, one = llm._engine, SamplingParams(max_tokens=1)
        at_most = {"truncate_prompt_tokens": 900}
        assert len(TEXT) > LARGE_TEXT
        (output,) = [output async for output in llm.generate(TEXT, one, tokenization_kwargs=at_most)]
        here = engine.prompts.tokenize(TEXT, truncate_prompt_tokens=900)
        assert np.array_equal(here.ids, output.prompt_token_ids)
        kwargs = {"x": [1.5, None, {"a": True}]}
        conversation = Conversation.of(
            [{"role": "user", "content": "é\n"}], chat_template=TEMPLATE, tools=[{"a": 1}], chat_template_kwargs=kwargs
        )
        (output,) = [output async for output in llm.generate(conversation, one)]
        assert output.prompt == engine.prompts.chat_template.render(conversation)
        with pytest.raises(InvalidPromptError, match="not valid Jinja"):
            await llm.generate(Conversation.of([{"role": "user"}], chat_template="{% if %}"), one).__anext__()
        with pytest.raises(InvalidPromptError, match="not valid Unicode"):
            await llm.generate("\ud800" + TEXT, one, tokenization_kwargs=at_most).__anext__()
        # what does not travel is rendered here
        own = Conversation.of([{"role": "user"}], chat_template="{{ x }}", chat_template_kwargs={"x": (1, 2)})
        (output,) = [output async for output in llm.generate(own, one)]
        assert output.prompt == "(1, 2)"
        stats = (await llm.stats())["intake"]
        assert (stats["num_processes_started"], stats["num_processes_killed"]) == (1, 0)


def test_a_tokenizer_that_is_written_anew_is_read_anew(tmp_path: Path) -> None:
    """As an adapter's may be: the process is the same, and goes on."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODELS["storyteller"] / name, tmp_path / name)
    process = IntakeProcess(1 << 32)
    try:

        def ids() -> list[int]:
            answer = process.ask(("encode", str(tmp_path), "Once upon a time", True, None), 60.0, lambda: None)
            found: list[int] = np.frombuffer(answer, np.int32).tolist()
            return found

        before = ids()
        assert ids() == before
        tree = json.loads((tmp_path / "tokenizer.json").read_text())
        words = {id: word for word, id in tree["model"]["vocab"].items()}
        here, other = words[before[1]], words[next(id for id in sorted(words, reverse=True) if id not in before)]
        vocab = tree["model"]["vocab"]
        vocab[here], vocab[other] = vocab[other], vocab[here]
        (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
        assert ids() == Tokenizer(tmp_path).encode("Once upon a time").tolist() != before
    finally:
        process.close()


OWNER = """
import sys, threading, time
from actorllm.intake.intake_process import IntakeProcess
process = IntakeProcess(1 << 32)
request = ("encode", sys.argv[1], "Once upon a time", True, None)
process.ask(request, 60.0, lambda: None)
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_owner(number: signal.Signals) -> None:
    from actorllm.config import BUNDLED_MODELS

    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(BUNDLED_MODELS["storyteller"])], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    with owner, owner.stdout:
        pid = int(owner.stdout.readline())
        owner.send_signal(number)
        owner.wait()
    until = time.monotonic() + 60
    while not _is_gone(pid):
        assert time.monotonic() < until
        time.sleep(0.01)


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[0] in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return True
