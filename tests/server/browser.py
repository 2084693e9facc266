"""A headless Chromium, over the pipe of its DevTools protocol: no driver and no package beside the browser itself."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from types import TracebackType
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-headless-shell") or shutil.which("google-chrome")
TIMEOUT_S = 40.0


class Browser:
    """One page. What goes wrong in it (exceptions, errors on its console, loads that fail) is in `errors`."""

    def __init__(self, width: int = 1280, height: int = 860, is_dark: bool = False) -> None:
        assert PROGRAM is not None
        self._profile = tempfile.TemporaryDirectory(prefix="actorllm-browser-", ignore_cleanup_errors=True)
        there, self._write = os.pipe()
        self._read, back = os.pipe()
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
        options += (f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}", "--no-first-run")
        options += ("--remote-debugging-pipe", "--disable-background-networking", "--disable-component-update")
        redirected = f'exec "$@" 3<&{there} 4>&{back} 2>/dev/null'  # where the protocol says that the pipes are
        self._process = subprocess.Popen(
            ["bash", "-c", redirected, "bash", PROGRAM, *options, "about:blank"],
            pass_fds=(there, back),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(there)
        os.close(back)
        self.errors: list[str] = []
        self.urls: list[str] = []
        """Of everything that the page asked for."""
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        pages = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._receive(until)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        packet, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(packet)
        match message.get("method"):
            case "Runtime.exceptionThrown" | "Network.loadingFailed":
                self.errors.append(json.dumps(message["params"])[:500])
            case "Log.entryAdded" if message["params"]["entry"]["level"] == "error":
                self.errors.append(json.dumps(message["params"])[:500])
            case "Network.requestWillBeSent":
                self.urls.append(message["params"]["request"]["url"])
        return message

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.becomes_true("location.href !== 'about:blank' && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Of JavaScript in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def becomes_true(self, expression: str) -> None:
        until = time.monotonic() + TIMEOUT_S
        while not self.value(expression):
            assert time.monotonic() < until, (expression, self.value("document.body.innerText"), self.errors)
            time.sleep(0.05)

    def screenshot(self) -> bytes:
        """PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        os.close(self._write)
        os.close(self._read)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        self._profile.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
