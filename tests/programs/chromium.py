"""A headless Chromium, driven through its debugging pipe (the Chrome DevTools Protocol)."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import time
from typing import Any


class Chromium:
    """One page of a browser; use it as a context manager. Needs Debian's package `chromium`."""

    PROGRAM = shutil.which("chromium")

    def __init__(self, profile: str) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        command = [
            *(
                self.PROGRAM,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
            ),
            *("--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"),
        ]
        # Chromium reads commands from descriptor 3 and writes events to 4.
        script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(to_browser, from_browser),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser), os.close(from_browser)
        self._numbers, self._received = itertools.count(1), b""
        (page,) = (
            target
            for target in self._call("Target.getTargets")["targetInfos"]
            if target["type"] == "page"
        )
        attach = {"targetId": page["targetId"], "flatten": True}
        self._session = self._call("Target.attachToTarget", attach)["sessionId"]

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out), os.close(self._in)
        self._process.kill()
        self._process.wait()

    def open(self, address: str) -> None:
        """Load a page."""
        self._call("Page.navigate", {"url": address}, self._session)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        arguments = {"expression": expression, "returnByValue": True}
        return self._call("Runtime.evaluate", arguments, self._session)["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = 30) -> Any:
        """The value of an expression once it is true."""
        until = time.monotonic() + timeout_s
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < until, self.evaluate("document.body.innerText")
            time.sleep(0.05)
        return value

    def _call(self, method: str, arguments: Any = None, session: str | None = None) -> Any:
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": arguments or {}}
        command |= {"sessionId": session} if session else {}
        os.write(self._out, json.dumps(command).encode() + b"\0")
        while True:
            while b"\0" not in self._received:
                self._received += os.read(self._in, 1 << 16) or exit_error()
            message, _, self._received = self._received.partition(b"\0")
            answer = json.loads(message)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]


def exit_error() -> bytes:
    raise ConnectionError("Chromium has ended")
