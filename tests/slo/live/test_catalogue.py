"""Downloads of traces, from a server that breaks off, changes its mind and lies."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from actorllm.errors import ConfigError, DownloadError
from actorllm.slo.live import catalogue
from actorllm.slo.live.catalogue import TRACES, PublicTrace, fetch, find_trace, public_trace

DOWNLOADED = Path(os.environ.get("ACTORLLM_TRACES", Path(__file__).parents[4] / "shared" / "traces"))
"""Large downloads may lie beside the checkout, too."""
CONTENT = bytes(range(256)) * 2000


class Site:
    """Serves CONTENT with ranges; the first `num_broken` answers end after `cut` bytes."""

    def __init__(self) -> None:
        self.content = CONTENT
        self.tag = '"one"'
        self.num_broken = 0
        self.cut = 100_000
        self.status = 200
        self.asked: list[str | None] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = self.headers.get("Range")
                site.asked.append(wanted)
                if site.status != 200:
                    self.send_error(site.status)
                    return
                start = 0
                if wanted is not None and self.headers.get("If-Range") == site.tag:
                    start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                    if start >= len(site.content):
                        self.send_response(416)
                        self.send_header("Content-Range", f"bytes */{len(site.content)}")
                        self.send_header("Content-Length", "0")
                        self.end_headers()
                        return
                    self.send_response(206)
                    self.send_header("Content-Range", f"bytes {start}-{len(site.content) - 1}/{len(site.content)}")
                else:
                    self.send_response(200)
                body = site.content[start:]
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", site.tag)
                self.end_headers()
                if site.num_broken:
                    site.num_broken -= 1
                    body = body[: site.cut]
                    self.close_connection = True
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def trace(self, **changes: Any) -> PublicTrace:
        url = f"http://127.0.0.1:{self.server.server_address[1]}/some/file.csv"
        known = {"size": len(CONTENT), "sha256": hashlib.sha256(CONTENT).hexdigest()}
        return PublicTrace("mine", url, "CC0", "of a test", **(known | changes))


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.server.shutdown()
    site.thread.join()
    site.server.server_close()


def test_a_file_comes_whole_and_only_once(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "new" / "mine.csv"
    seen: list[tuple[int, int | None]] = []
    assert fetch(site.trace(), path, lambda done, total: seen.append((done, total))) == site.trace().sha256
    assert path.read_bytes() == CONTENT
    assert [p.name for p in path.parent.iterdir()] == ["mine.csv"]
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    fetch(site.trace(), path)
    assert site.asked == [None]


def test_it_goes_on_where_it_was_broken_off(site: Site, tmp_path: Path) -> None:
    site.num_broken = 2
    fetch(site.trace(), tmp_path / "mine.csv")
    assert site.asked == [None, "bytes=100000-", "bytes=200000-"]
    assert (tmp_path / "mine.csv").read_bytes() == CONTENT


def test_the_next_attempt_goes_on_too_unless_the_file_has_changed(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    site.num_broken = catalogue.ATTEMPTS
    with pytest.raises(DownloadError, match=r"400000 bytes are kept in '.*mine.csv.part'"):
        fetch(site.trace(), path)
    assert not path.exists()
    site.asked.clear()
    site.tag = '"two"'
    fetch(site.trace(), path)
    assert site.asked == ["bytes=400000-"], "it was asked for the rest and gave everything"
    assert path.read_bytes() == CONTENT


def test_a_part_that_is_whole_already_is_taken(site: Site, tmp_path: Path) -> None:
    (tmp_path / "mine.csv.part").write_bytes(CONTENT)
    (tmp_path / "mine.csv.part.etag").write_text(site.tag)
    fetch(site.trace(), tmp_path / "mine.csv")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.csv"]


def test_another_file_is_refused_and_removed(site: Site, tmp_path: Path) -> None:
    site.content = CONTENT[::-1]
    path = tmp_path / "mine.csv"
    with pytest.raises(DownloadError, match=r"is not mine: its SHA-256 is [0-9a-f]{64} .* it was removed"):
        fetch(site.trace(), path)
    assert list(tmp_path.iterdir()) == []
    assert fetch(site.trace(sha256=None, size=None), path) == hashlib.sha256(site.content).hexdigest()
    with pytest.raises(DownloadError, match="remove it to download it anew"):
        fetch(site.trace(), path)
    assert path.exists(), "somebody's file is not ours to remove"


def test_a_server_that_refuses(site: Site, tmp_path: Path) -> None:
    site.status = 404
    with pytest.raises(DownloadError, match="answers 404"):
        fetch(site.trace(), tmp_path / "mine.csv")
    assert len(site.asked) == 1
    site.status = 503
    with pytest.raises(DownloadError, match="503"):
        fetch(site.trace(), tmp_path / "mine.csv")
    assert len(site.asked) == 1 + catalogue.ATTEMPTS


def test_what_is_listed_can_be_checked() -> None:
    assert {name for name, trace in TRACES.items() if trace.sha256} == {
        "azure23-code",
        "azure23-conv",
        "mooncake-conversation",
        "mooncake-synthetic",
    }
    for name, trace in TRACES.items():
        assert trace.url.startswith("https://")
        assert trace.licence
        assert trace.file_name.startswith(name)
        assert (trace.sha256 is None) == (trace.size is None)
    with pytest.raises(ConfigError, match="did you mean 'azure23-conv'"):
        public_trace("azure23-con")
    sources = ("azure24", "burstgpt", "qwen-bailian", "tracelab")
    assert all(any(name.startswith(source) for name in TRACES) for source in sources), (
        "public ones of which no file was held"
    )


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("azure23-code", "AzureLLMInferenceTrace_code.csv"),
        ("azure23-conv", "AzureLLMInferenceTrace_conv.csv"),
        ("mooncake-conversation", "mooncake_conversation.jsonl"),
        ("mooncake-synthetic", "mooncake_synthetic.jsonl"),
    ],
)
def test_the_checksums_are_those_of_the_traces(name: str, file: str) -> None:
    if not (DOWNLOADED / file).exists():
        pytest.skip(f"{file} is not in {DOWNLOADED}; name its folder with ACTORLLM_TRACES")
    assert fetch(TRACES[name], DOWNLOADED / file) == TRACES[name].sha256
    assert (DOWNLOADED / file).stat().st_size == TRACES[name].size


def test_a_trace_is_found_by_path_or_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="actorllm trace fetch azure23-conv"):
        find_trace("azure23-conv")
    with pytest.raises(ConfigError, match="does not exist; did you mean 'azure23-conv'"):
        find_trace("azure23conv")
    file = tmp_path / "actorllm" / "traces" / "azure23-conv.csv"
    file.parent.mkdir(parents=True)
    file.touch()
    assert find_trace("azure23-conv") == file
    assert find_trace(file) == file
