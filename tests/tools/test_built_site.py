"""The built site in a browser; ``make docs`` builds it and runs these tests."""

from __future__ import annotations

import functools
import http.server
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.view_helpers import click
from tools.site import reference

pytestmark = pytest.mark.site
ROOT = Path(__file__).parents[2]
SITE = ROOT / "build/site"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Suppress log messages."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Serve the site and return its address; search does not work on files."""
    handler = functools.partial(Quiet, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


KEEP_ERRORS = """{
    window.errors = [];
    addEventListener("error", e => window.errors.push(e.message || e.target.src || e.target.href), true);
    const log = console.error;
    console.error = (...all) => { window.errors.push(all.join(" ")); log(...all); };
}"""


@pytest.fixture(scope="module")
def page(browser):
    """Return the browser, which records errors of its pages."""
    browser.before_each_page(KEEP_ERRORS)
    return browser


PAGES = sorted(page.relative_to(SITE).as_posix() for page in SITE.rglob("*.html")) if SITE.is_dir() else []


def test_the_site_is_built():
    assert {"index.html", "reference/modules.html", "howto/choosing.html", "benchmarks/findings.html"} <= set(PAGES)


@pytest.mark.parametrize("name", [name for name in PAGES if not name.startswith("404")])
def test_no_error_and_every_picture(name, address, page):
    page.open(f"{address}/{name}")
    assert page.run("window.errors") == []
    broken = "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
    assert page.run(broken) == []


def test_search_engines_see_titles_and_descriptions_and_the_navigation_headings():
    text = (SITE / "howto/errors.html").read_text()
    assert "<title>Fix: No module named" in text
    assert '<meta name="description" content="Errors of compiled extensions' in text
    assert "Errors of extensions that are not compiled, and how to fix them" in (SITE / "index.html").read_text()


@pytest.mark.parametrize("words, wanted", [("window_attention", "reference/ops.html"), ("shaw", "start/fairseq.html")])
def test_search(words, wanted, address, page):
    page.open(f"{address}/index.html")
    page.run("document.querySelector('[data-md-toggle=search]').click()")
    page.run(f"""(() => {{
        const box = document.querySelector('[data-md-component=search-query]');
        box.focus(); box.value = '{words}'; box.dispatchEvent(new Event('input', {{bubbles: true}}));
        box.dispatchEvent(new Event('keyup', {{bubbles: true}}));
    }})()""")
    links: list[str] = []
    for _ in range(100):
        links = page.run("[...document.querySelectorAll('.md-search-result__link')].map(a => a.href)")
        if links:
            break
        time.sleep(0.1)
    assert any(wanted in link for link in links), links


def test_every_public_name_is_on_the_site():
    lines = zlib.decompress((SITE / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode().splitlines()
    documented = {line.split()[0] for line in lines}
    wanted = {name for room in reference.TITLES for name in reference.public_names(room)}
    assert wanted <= documented


def test_the_attention_page_answers_a_click(address, page):
    page.open(f"{address}/attention/index.html")
    page.run("image.decode()")
    before = page.run("where.textContent")
    click(page, "picture", 0.8, 0.8)
    assert page.run("where.textContent") != before
    assert page.run("window.errors") == []
