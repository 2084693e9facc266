"""The public traces that this laboratory reads, and downloading them. Nothing is downloaded unless it is asked for.

A download goes to NAME.part. It goes on where it was broken off, if the server still has the same file: the entity tag is kept
beside the part. A download is checked against its size and checksum, and only then gets its name. So a file that is there is whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from actorllm.errors import ConfigError, DownloadError, nearest_name

if TYPE_CHECKING:
    import httpx2

ATTEMPTS = 4
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class PublicTrace:
    """Where a trace is, and how to tell that it is the one."""

    name: str
    url: str
    licence: str
    about: str
    size: int | None = None
    """Bytes; None: not known here."""
    sha256: str | None = None
    """None: this project has not seen the file, so that only its transfer can be checked."""

    @property
    def file_name(self) -> str:
        return f"{self.name}{Path(self.url).suffix}"


_AZURE = "https://raw.githubusercontent.com/Azure/AzurePublicDataset/790921015d50dd6aae7f7e47f39ba0e235ad6b08/data"
_AZURE_2024 = "https://github.com/Azure/AzurePublicDataset/releases/download/dataset-llm-2024"
_MOONCAKE = "https://raw.githubusercontent.com/kvcache-ai/Mooncake"
_MOONCAKE_CONVERSATION = f"{_MOONCAKE}/a2a4b18ac537fd798d50e6e9f57031ce86419a37/FAST25-release/traces"
_MOONCAKE_SYNTHETIC = f"{_MOONCAKE}/3cca71daccf2a7afb8fe3f0295358f70e3a69fdb/FAST25-release/traces"
_BURSTGPT = "https://github.com/HPMLL/BurstGPT/releases/download/v1.1"
_QWEN_TREE = "alibaba-edu/qwen-bailian-usagetraces-anon/5f7439c51ec248a0c585f7d90a41a6f57773b912"
_QWEN = f"https://media.githubusercontent.com/media/{_QWEN_TREE}"
"""Where the files themselves are: the repository has pointers to them."""
_TRACELAB = "https://github.com/uw-syfi/TraceLab/releases/download/v2026-06-08-syfi-trace"

TRACES = {
    trace.name: trace
    for trace in (
        PublicTrace(
            "azure23-code",
            f"{_AZURE}/AzureLLMInferenceTrace_code.csv",
            "CC-BY-4.0",
            "Azure 2023, code completion: 8,819 requests in an hour, very bursty",
            320_117,
            "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
        ),
        PublicTrace(
            "azure23-conv",
            f"{_AZURE}/AzureLLMInferenceTrace_conv.csv",
            "CC-BY-4.0",
            "Azure 2023, conversation: 19,366 requests in an hour",
            719_188,
            "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
        ),
        PublicTrace(
            "azure24-code",
            f"{_AZURE_2024}/AzureLLMInferenceTrace_code_1week.csv",
            "CC-BY-4.0",
            "Azure 2024, code completion: a week, some 17 million requests",
        ),
        PublicTrace(
            "azure24-conv",
            f"{_AZURE_2024}/AzureLLMInferenceTrace_conv_1week.csv",
            "CC-BY-4.0",
            "Azure 2024, conversation: a week, some 27 million requests",
        ),
        PublicTrace(
            "mooncake-conversation",
            f"{_MOONCAKE_CONVERSATION}/conversation_trace.jsonl",
            "Apache-2.0",
            "Mooncake (FAST 2025), conversation: 12,031 requests with prefixes",
            3_029_533,
            "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
        ),
        PublicTrace(
            "mooncake-synthetic",
            f"{_MOONCAKE_SYNTHETIC}/synthetic_trace.jsonl",
            "Apache-2.0",
            "Mooncake (FAST 2025), synthetic: 3,993 requests with many shared prefixes",
            1_136_313,
            "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
        ),
        PublicTrace(
            "burstgpt-1",
            f"{_BURSTGPT}/BurstGPT_1.csv",
            "CC-BY-4.0",
            "BurstGPT, first two months: 1.4 million requests; rows of failures are left out when it is read",
        ),
        PublicTrace(
            "burstgpt-2",
            f"{_BURSTGPT}/BurstGPT_2.csv",
            "CC-BY-4.0",
            "BurstGPT, second two months: 3.9 million requests",
        ),
        PublicTrace(
            "qwen-bailian-chat",
            f"{_QWEN}/qwen_traceA_blksz_16.jsonl",
            "Apache-2.0",
            "Qwen-Bailian (ATC 2025): two hours of chats with people, with prefixes in blocks of 16 tokens",
        ),
        PublicTrace(
            "qwen-bailian-api",
            f"{_QWEN}/qwen_traceB_blksz_16.jsonl",
            "Apache-2.0",
            "Qwen-Bailian (ATC 2025): two hours of calls by programs, likewise",
        ),
        PublicTrace(
            "qwen-bailian-coder",
            f"{_QWEN}/qwen_coder_blksz_16.jsonl",
            "Apache-2.0",
            "Qwen-Bailian: a model that writes programs, likewise",
        ),
        PublicTrace(
            "qwen-bailian-thinking",
            f"{_QWEN}/qwen_thinking_blksz_16.jsonl",
            "Apache-2.0",
            "Qwen-Bailian: a model that reasons before it answers, likewise",
        ),
        PublicTrace(
            "tracelab",
            f"{_TRACELAB}/syfi_coding_trace.jsonl.gz",
            "CC-BY-4.0",
            "TraceLab (arXiv 2606.30560): 357,161 rounds of coding agents in some 4,300 sessions, with tool calls",
        ),
    )
}


def public_trace(name: str) -> PublicTrace:
    """Raises ConfigError naming the nearest one."""
    if name not in TRACES:
        raise ConfigError(
            f"there is no public trace {name!r}{nearest_name(name, TRACES)}; there are {', '.join(TRACES)}"
        )
    return TRACES[name]


def traces_folder() -> Path:
    """Where downloads go unless something else is said: $XDG_CACHE_HOME/actorllm/traces."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "actorllm" / "traces"


def find_trace(name: str | Path) -> Path:
    """A file or folder, or a public trace that was downloaded. Raises ConfigError saying how to get it."""
    path = Path(name)
    if path.exists():
        return path
    if str(name) in TRACES:
        path = traces_folder() / TRACES[str(name)].file_name
        if path.exists():
            return path
        raise ConfigError(f"trace {str(name)!r} is not there yet; download it with: actorllm trace fetch {name}")
    raise ConfigError(f"trace {str(name)!r} does not exist{nearest_name(str(name), TRACES)}")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(trace: PublicTrace, path: Path, on_progress: Callable[[int, int | None], object] | None = None) -> str:
    """Download a trace to this path unless it is there already; returns its checksum.

    on_progress(bytes so far, bytes in all) is called with every piece. Raises DownloadError; what came until then is kept,
    unless its checksum is wrong. Raises ConfigError where httpx2 is missing, which the extra `laboratory` installs.
    """
    if path.exists():
        return _checked(trace, path)
    try:
        import httpx2
    except ModuleNotFoundError as error:
        raise ConfigError("a download needs httpx2: pip install 'actorllm[laboratory]'") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    problem: Exception | None = None
    with httpx2.Client(follow_redirects=True, timeout=TIMEOUT_S) as client:
        for _ in range(ATTEMPTS):
            try:
                _transfer(client, trace, part, on_progress)
                break
            except httpx2.HTTPStatusError as error:
                if error.response.status_code < 500:
                    raise DownloadError(f"{trace.url} answers {error.response.status_code}") from error
                problem = error
            except (httpx2.TransportError, _CutShortError) as error:
                problem = error
        else:
            done = part.stat().st_size if part.exists() else 0
            raise DownloadError(
                f"{trace.url} cannot be downloaded ({type(problem).__name__}: {problem}); {done} bytes are kept in "
                f"{str(part)!r}, and the next attempt goes on from there"
            ) from problem
    found = _checked(trace, part)
    _tag_of(part).unlink(missing_ok=True)
    part.replace(path)
    return found


class _CutShortError(Exception):
    """The connection ended before the file did."""


def _tag_of(part: Path) -> Path:
    return part.with_name(part.name + ".etag")


def _transfer(
    client: httpx2.Client, trace: PublicTrace, part: Path, on_progress: Callable[[int, int | None], object] | None
) -> None:
    """Add what is missing of a part, or begin anew."""
    tag_file = _tag_of(part)
    had = part.stat().st_size if part.exists() and tag_file.exists() else 0
    headers = {"Accept-Encoding": "identity"}
    if had:
        headers |= {"Range": f"bytes={had}-", "If-Range": tag_file.read_text()}
    with client.stream("GET", trace.url, headers=headers) as response:
        if (
            response.status_code == 416
        ):  # there is nothing after what we have, or it is another file: the checksum tells
            response.read()
            total = response.headers.get("Content-Range", "").rpartition("/")[2]
            if total == str(had):
                return
            part.unlink()
            raise _CutShortError("what was there is of another file")
        response.raise_for_status()
        if response.status_code != 206 or not response.headers.get("Content-Range", "").startswith(f"bytes {had}-"):
            had = 0
        length = response.headers.get("Content-Length")
        total_size = had + int(length) if length is not None else trace.size
        tag = response.headers.get("ETag", "")
        if tag and not tag.startswith("W/"):
            tag_file.write_text(tag)
        else:
            tag_file.unlink(missing_ok=True)
        with part.open("ab" if had else "wb") as file:
            for piece in response.iter_raw():
                file.write(piece)
                had += len(piece)
                if on_progress is not None:
                    on_progress(had, total_size)
        if total_size is not None and had < total_size:
            raise _CutShortError(f"it ended after {had} of {total_size} bytes")


def _checked(trace: PublicTrace, path: Path) -> str:
    """The checksum of a file; a part with a wrong one is of no use, so it is removed."""
    found = sha256_of(path)
    if trace.sha256 is not None and found != trace.sha256:
        size = path.stat().st_size
        if path.suffix == ".part":
            path.unlink()
            _tag_of(path).unlink(missing_ok=True)
            what = "it was removed"
        else:
            what = "remove it to download it anew"
        raise DownloadError(
            f"{str(path)!r} is not {trace.name}: its SHA-256 is {found} ({size} bytes), expected {trace.sha256} "
            f"({trace.size} bytes); {what}"
        )
    return found
