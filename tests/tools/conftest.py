"""Fixtures of the tools' tests, among them a headless Chromium, the machine's own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Browser:
    """A page of the browser, and every request that it made."""

    def __init__(self, page: Any) -> None:
        self._page, self.requests = page, list[str]()
        self._tools = page.context.new_cdp_session(page)
        page.on("request", lambda request: self.requests.append(request.url))

    def send(self, method: str, **parameters: Any) -> dict:
        """Send a command of the DevTools protocol and return its result."""
        return self._tools.send(method, parameters)

    def before_each_page(self, script: str) -> None:
        """Run JavaScript in every page that is opened later, before the page's own."""
        self._page.add_init_script(script)

    def open(self, page: Path | str) -> None:
        """Load a file or an address and wait for its pictures and scripts."""
        self.requests.clear()
        self._page.goto(page.as_uri() if isinstance(page, Path) else page)

    def run(self, script: str) -> Any:
        """Return the awaited value of a JavaScript expression."""
        return self._page.evaluate(script)

    def key(self, name: str) -> None:
        """Press a key, such as ``'Shift+ArrowLeft'``."""
        self._page.keyboard.press(name)

    def click(self, x: float, y: float) -> None:
        """Click a point of the window."""
        self._page.mouse.click(x, y)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    options: Any = dict(executable_path=executable, args=["--no-sandbox", "--disable-dev-shm-usage"])
    with playwright.sync_playwright() as driver, driver.chromium.launch(**options) as chromium:
        yield Browser(chromium.new_page(viewport=dict(width=1000, height=900)))


@pytest.fixture
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the speeds that the CPU reaches on small tensors."""
    from tools.bench import roofline

    monkeypatch.setitem(roofline.SIZES, "cpu", (64, 2**16))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread: sums differ by rounding with the number of threads."""
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
    """Create a data folder of captioned pictures. Its models lie in the parent folder."""
    from tests.tools.caption_helpers import create

    return create(tmp_path_factory.mktemp("captioning"))
