"""`actorllm chat`: what is printed, what is remembered, and what the commands do."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest

from actorllm import cli
from actorllm.config import BUNDLED_MODELS
from actorllm.intake.tokenizer_pool import TokenizerWorker
from actorllm.text.chat_template import ChatTemplate, Conversation
from actorllm.text.tokenizer import Tokenizer

STORYTELLER = BUNDLED_MODELS["storyteller"]
QUICK = ("--topology", "inline", "--num-threads", "1", "--temperature", "0", "--dtype", "float32")


class Terminal:
    """Types the lines, and shows what came out and which conversations were rendered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self.conversations: list[Conversation] = []
        self.out: list[str] = []
        self.err: list[str] = []
        render = ChatTemplate.render

        def note(template: ChatTemplate, conversation: Conversation) -> str:
            self.conversations.append(conversation)
            return render(template, conversation)

        def note_brought(
            worker: TokenizerWorker, tokenizer: Tokenizer, conversation: Conversation, most: int
        ) -> str | None:
            self.conversations.append(conversation)
            return render_brought(worker, tokenizer, conversation, most)

        render_brought = TokenizerWorker.render
        monkeypatch.setattr(ChatTemplate, "render", note)
        monkeypatch.setattr(TokenizerWorker, "render", note_brought)

    def run(self, *arguments: str, typed: str = "") -> int:
        self._monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        status = cli.main(["chat", *QUICK, *arguments])
        captured = self._capsys.readouterr()
        self.out, self.err = captured.out.splitlines(), captured.err.splitlines()
        return status

    def said(self) -> list[list[tuple[Any, ...]]]:
        """Role and content of every message, by conversation."""
        return [[(m["role"], m["content"]) for m in c.messages] for c in self.conversations]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(monkeypatch, capsys)


def test_a_conversation_is_remembered_until_it_is_cleared(terminal: Terminal) -> None:
    typed = "Once upon a time\n\n and then?  \n/clear\nAgain\n/exit\nnever"
    assert terminal.run("--max-tokens", "4", "--system", "Be short.", typed=typed) == 0
    first, second, third = terminal.said()
    assert first == [("system", "Be short."), ("user", "Once upon a time")]
    assert second == [*first, ("assistant", second[2][1]), ("user", "and then?")]
    assert third == [("system", "Be short."), ("user", "Again")]
    assert second[2][1]
    assert "\n".join(terminal.out).startswith(second[2][1])
    assert terminal.err == []


def test_one_message(terminal: Terminal) -> None:
    assert terminal.run("--once", "Once upon a time", "--stop", " a", "--stats", typed="not read") == 0
    assert terminal.said() == [[("user", "Once upon a time")]]
    assert terminal.out
    assert "tokens; first after" in terminal.err[0]


def test_commands(terminal: Terminal) -> None:
    assert terminal.run(typed="/help\n/cler\n") == 0
    assert [line.split()[0] for line in terminal.out] == ["/clear", "/exit", "/help"]
    assert terminal.err == ["actorllm: there is no command '/cler'; did you mean '/clear'?"]
    assert terminal.conversations == []


def test_a_message_that_cannot_be_answered_is_forgotten(terminal: Terminal) -> None:
    typed = "Once\n" + "word " * 2000 + "\nTwice\n"
    assert terminal.run("--max-tokens", "2", typed=typed) == 0
    assert len(terminal.err) == 1
    assert "max_model_len is 1024" in terminal.err[0]
    assert "/clear" in terminal.err[0]
    assert [m[0] for m in terminal.said()[-1]] == ["user", "assistant", "user"]
    assert terminal.run("--once", "word " * 2000) == 2
    assert "max_model_len is 1024" in terminal.err[0]


def test_templates(terminal: Terminal, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}, and")
    for given in (str(file), "{{ messages[0].content }}, and"):
        assert terminal.run("--once", "Once", "--max-tokens", "1", "--chat-template", given) == 0
        assert terminal.conversations[-1].chat_template == "{{ messages[0].content }}, and"
    assert terminal.run("--once", "Once", "--chat-template", "/nowhere") == 2
    assert "chat_template='/nowhere'" in terminal.err[0]


def test_a_model_without_a_template(terminal: Terminal, tmp_path: Path) -> None:
    for file in STORYTELLER.iterdir():
        if file.suffix in (".json", ".safetensors") and file.name != "tokenizer_config.json":
            shutil.copy(file, tmp_path)
    assert terminal.run("--once", "Once", "--model", str(tmp_path)) == 2
    assert "give one with chat_template=" in terminal.err[0]


def test_a_message_that_is_no_text_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert cli.main(["chat", *QUICK]) == 2
    assert "the message is not valid utf-8" in capsys.readouterr().err
