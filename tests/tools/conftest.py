"""Fixtures of the tools' tests, among them a headless Chromium.

The browser is controlled through a pipe by its DevTools protocol, which needs no package.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Browser:
    """A page of the browser, and every request that it made."""

    def __init__(self, executable: str, profile: Path) -> None:
        read_there, self._write = os.pipe()
        self._read, write_there = os.pipe()

        def place() -> None:  # the browser reads commands from descriptor 3 and writes replies to 4
            spare = [os.dup(fd) for fd in (read_there, write_there)]
            os.dup2(spare[0], 3)
            os.dup2(spare[1], 4)

        command = [
            executable, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--remote-debugging-pipe", f"--user-data-dir={profile}", "--window-size=1000,900", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, preexec_fn=place, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(read_there)
        os.close(write_there)
        self._buffer, self._number, self.requests = b"", 0, list[str]()
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict:
        """Send a command and return its result."""
        self._number += 1
        message: dict[str, Any] = dict(id=self._number, method=method, params=parameters)
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _receive(self) -> dict:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has gone"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def open(self, file: Path) -> None:
        """Load a file and wait for its pictures and scripts."""
        self.requests.clear()
        self.send("Page.navigate", url=file.as_uri())
        self.run("new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))")

    def run(self, script: str) -> Any:
        """Return the awaited value of a JavaScript expression."""
        result = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def key(self, name: str, **more: Any) -> None:
        """Press a key."""
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name, **more)

    def click(self, x: float, y: float) -> None:
        """Click a point of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def close(self) -> None:
        """Close the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    browser = Browser(executable, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread, as started processes do: sums differ by rounding with the number of threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def photograph(tmp_path_factory) -> Path:
    """Write a photograph of a cat of 300 rows and 451 columns."""
    from PIL import Image
    from skimage import data

    file = tmp_path_factory.mktemp("photograph") / "cat.png"
    Image.fromarray(data.chelsea()).save(file)
    return file


@pytest.fixture(scope="session")
def captioned(tmp_path_factory) -> Path:
    """Create a data folder of captioned scenes. Its detector and models lie in the parent folder."""
    from tests.tools.caption_helpers import create

    return create(tmp_path_factory.mktemp("captioning"))
