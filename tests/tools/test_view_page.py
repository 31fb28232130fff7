"""The page of ``tools.view`` in a browser: by mouse and keyboard, for pictures, the cls token, parts and clips."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("timm")

from tests.tools.view_helpers import (
    CLIP,
    SMALL_CLIP,
    SMALL_VIT,
    VIT,
    bytes_of,
    choose,
    click,
    numbers,
    open_page,
    options_of,
    page_data,
    painted,
    run,
    same_colours,
    weights_of,
)


@pytest.fixture(scope="module")
def draw(tmp_path_factory):
    """Return a function that writes the page of a model."""

    def page_of(*arguments: object) -> Path:
        output = tmp_path_factory.mktemp("page")
        assert run(*arguments, "--output", output) == 0
        return output / "attention.html"

    return page_of


@pytest.fixture(scope="module")
def shown(photograph, draw) -> Path:
    return draw("aa_resnet34", photograph, "--input-size", 96, 128, "--model-args", "img_size=[96, 128]")


def test_a_click_and_the_arrow_keys_change_every_map(shown, browser):
    open_page(browser, shown)
    maps = list(map(bytes_of, page_data(shown)["layers"]))

    def same(layer: int, head: int, cell: tuple[int, int]) -> None:
        same_colours(browser, shown, f"panels[{8 * layer + head}]", maps[layer][head][cell], cell)

    assert browser.run("panels.length") == 24
    click(browser, "picture", 0.9, 0.2)
    # Maps of 6×8 (pooled), 6×8 and 3×4 cells.
    for layer, cell in ((0, (1, 7)), (1, (1, 7)), (2, (0, 3))):
        same(layer, 5, cell)
    assert browser.run("where.textContent") == "Query: pixel (60, 405) of 300 rows and 451 columns"
    browser.run("picture.focus()")
    for key in ("ArrowLeft", "ArrowDown", "ArrowDown"):
        browser.key(key)
    same(0, 2, (3, 6))
    same(2, 2, (1, 3))
    for _ in range(9):
        browser.key("ArrowUp")
    same(0, 3, (0, 6))
    browser.key("Shift+ArrowLeft")
    same(0, 3, (0, 2))
    assert browser.run("where.getAttribute('aria-live')") == "polite"
    assert all(url.startswith(("file:", "data:")) for url in browser.requests)


def test_the_controls_work_by_keyboard_and_on_a_narrow_screen(shown, browser):
    browser.send("Emulation.setDeviceMetricsOverride", width=360, height=700, deviceScaleFactor=1, mobile=True)
    open_page(browser, shown)
    assert browser.run("document.documentElement.scrollWidth") <= 360
    order = []
    for _ in range(4):
        browser.key("Tab")
        order.append(browser.run("document.activeElement.id || document.activeElement.className"))
        assert browser.run("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert order == ["picture", "layer", "opacity", "head"]
    choose(browser, "select", 2)
    assert browser.run("panels.map(p => p.section.hidden)") == [True] * 16 + [False] * 8
    browser.run("panels[16].canvas.closest('button').click()")
    wide, other = (browser.run(f"panels[{n}].canvas.getBoundingClientRect().width") for n in (16, 17))
    assert wide > 1.5 * other
    words = browser.run("panels[16].text.textContent")
    assert re.fullmatch(r"head 1: max [\d.]+ % at row \d+, column \d+ \(uniform [\d.]+ %\)", words)
    browser.send("Emulation.clearDeviceMetricsOverride")


def test_the_cls_token_and_patches(photograph, draw, browser):
    more = options_of(dict(attn_layer="attn1111", reg_tokens=1))
    file = draw(VIT, photograph, *options_of(SMALL_VIT), *more, "--rollout")
    open_page(browser, file)
    layers = page_data(file)["layers"]
    places = [(0, 0), (0, 1), (0, 2), (1, 0)]  # layer and head of each panel
    assert browser.run("where.textContent") == "Query: the cls token"

    def from_cls() -> None:
        for panel, (layer, head) in enumerate(places):
            held = numbers(layers[layer]["cls"]["maps"]).reshape(-1, 3, 4)
            same_colours(browser, file, f"panels[{panel}]", held[head])

    from_cls()
    assert browser.run("getComputedStyle(cross).display") == "none"
    names = ["mean of heads", "head 1", "head 2", "rollout"]
    assert browser.run("panels.map(p => p.text.textContent.split(':')[0])") == names
    share = numbers(layers[0]["cls"]["elsewhere"], "<f4")[1]
    words = browser.run("panels[1].text.textContent")
    assert words.endswith(" % on cls and registers")
    assert abs(float(words.rpartition("; ")[2].split()[0]) - 100 * share) < 1
    click(browser, "picture", 0.9, 0.5)
    assert browser.run("where.textContent").startswith("Query: pixel (150, 405)")
    for panel, (layer, head) in enumerate(places):
        same_colours(browser, file, f"panels[{panel}]", bytes_of(layers[layer])[head, 1, 3], (1, 3))
    browser.run("clsButton.click()")
    assert browser.run("clsButton.getAttribute('aria-pressed')") == "true"
    from_cls()
    open_page(browser, draw(VIT, photograph, *options_of(SMALL_VIT | dict(class_token="false", global_pool="avg"))))
    assert browser.run("getComputedStyle(clsButton).display") == "none"
    assert browser.run("where.textContent").startswith("Query: pixel (")


def test_the_switch_shows_a_part_and_hides_layers_without_it(photograph, draw, browser):
    options = options_of(dict(depth=10, width=1, img_size=16, kappa=0.5, nu=0.5))
    file = draw("aa_wide_resnet28_10", photograph, *options, "--input-size", 16, 16, "--parts", "--layers", "layer3.*")
    open_page(browser, file)
    assert browser.run("['partLabel', 'aboutParts'].map(id => document.getElementById(id).hidden)") == [False] * 2
    assert browser.run("[...partSelect.options].map(o => o.text)") == ["all terms", "content", "position"]
    before = browser.run("panels[0].canvas.toDataURL()")
    choose(browser, "partSelect", "position")
    values, peak = browser.run("(({ values, peak }) => [[...values], peak])(mapOf(panels[0].layer, 1))")
    y, x = browser.run("cellOf(panels[0].layer)")
    (layer,) = page_data(file)["layers"]
    expected = weights_of(layer["parts"]["position"])[1, y, x].ravel()
    np.testing.assert_allclose(np.array(values) / 255 * peak, expected, rtol=1e-5)
    browser.run("(() => { delete panels[0].layer.parts.position; show(); })()")
    assert browser.run("panels[0].section.hidden") is True
    choose(browser, "partSelect", "")
    assert browser.run("panels[0].canvas.toDataURL()") == before


def test_a_place_of_a_frame(draw, browser, clip):
    file = draw(CLIP, clip, *options_of(SMALL_CLIP))
    open_page(browser, file)
    assert browser.run("where.textContent") == "Query: the cls token"
    click(browser, "picture", 0.9, 0.55)  # frame 3: rows from 0.5, columns from 0.5
    assert browser.run("where.textContent") == "Query: frame 3, pixel (9, 128) of 96 rows and 160 columns"
    words = browser.run("panels[0].text.textContent")
    assert "% at frame " in words
    assert "row 1, column 4" in words  # the temporal step: the same place of every frame
    held = bytes_of(page_data(file)["layers"][0])[1, 3, 7]
    assert (held > 0).sum() <= 4
    table = numbers(page_data(file)["colours"]).reshape(256, 3).astype(int)
    assert np.abs(painted(browser, "panels[1]", (6, 8)) - table[held])[held == 0].max() <= 2
