"""Headless Chromium, driven through its pipe: DevTools messages that end with a zero byte, on descriptors 3 and 4."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from waiting import WAIT_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update"),
    *(
        "--disable-background-networking",
        "--disable-sync",
        "--mute-audio",
        "--autoplay-policy=no-user-gesture-required",
    ),
    *(
        "--disable-sync",
        "--use-fake-ui-for-media-stream",
        "--use-fake-device-for-media-stream",
        "--disable-dev-shm-usage",
    ),
)


class Browser:
    """One tab. Errors of the page and of its policy are in `problems`."""

    def __init__(self, commands: int, events: int) -> None:
        self._commands, self._events = commands, events
        self._number, self._session, self._rest = 0, "", b""
        self.problems: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._events, 2**16)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(event["params"]["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.problems.append(event["params"]["entry"]["text"])

    def open(self, url: str, width: int = 1200, height: int = 900, *, dark: bool = False) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page; a promise is awaited."""
        answer = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, script: str, limit_s: float = WAIT_S) -> Any:
        """Poll until an expression is true; return its value."""
        deadline_s = time.monotonic() + limit_s
        while not (value := self.run(script)):
            assert time.monotonic() < deadline_s, f"waited {limit_s:g} s in vain for: {script}\n{self.problems}"
            time.sleep(0.05)
        return value


@contextmanager
def browser(profile: Path, *flags: str) -> Iterator[Browser]:
    """A browser with an empty profile. `flags` are added to its command line."""
    assert CHROMIUM is not None
    (read_commands, commands), (events, write_events) = os.pipe(), os.pipe()
    command = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", *flags]
    process = _start(command, read_commands, write_events)
    os.close(read_commands)
    os.close(write_events)
    try:
        yield Browser(commands, events)
    finally:
        os.close(commands)  # the browser ends with its pipe
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(events)


def _start(command: Sequence[str], read_commands: int, write_events: int) -> subprocess.Popen[bytes]:
    script = f'exec "$@" 3<&{read_commands} 4>&{write_events}'
    shell = ["bash", "-c", script, "bash", *command]
    return subprocess.Popen(shell, pass_fds=(read_commands, write_events), stderr=subprocess.DEVNULL)
