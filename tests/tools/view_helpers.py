"""Helpers of the tests of ``tools.view``: small models, and the contents of the page."""

from __future__ import annotations

import base64
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tools.view import models
from tools.view.__main__ import main

VIT, CLIP = "vit_tiny_patch16_224", "timesformer_small_patch16_224"
SMALL_VIT = dict(img_size=(48, 64), embed_dim=32, depth=3, num_heads=2)
SMALL_CLIP = dict(img_size=(48, 64), embed_dim=32, depth=2, num_heads=2, num_frames=4)


def run(*arguments: object) -> int:
    """Run the command line on models with the same random weights each time; return its exit status."""
    torch.manual_seed(0)
    return main([str(n) for n in arguments])


def names_in(folder: Path) -> set[str]:
    """Return the names of the files in a folder."""
    return {file.name for file in folder.iterdir()}


def options_of(arguments: dict) -> list[str]:
    """Return the options for the arguments of a timm model."""
    return [f"--model-args={key}={list(n) if isinstance(n, tuple) else n}" for key, n in arguments.items()]


@torch.no_grad()
def seen_by(model: nn.Module, x: Tensor, **keywords) -> tuple[dict, dict[str, Tensor]]:
    """Return the captured layers, and their outputs."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, _: nn.Module, inputs: tuple, output: Tensor) -> None:
        outputs[name] = output

    def hooked() -> list[int]:
        return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]

    before = hooked()
    hooks = [
        model.get_submodule(name).register_forward_hook(partial(keep, name)) for name in models.known_layers(model)
    ]
    with models.capture(model) as captured:
        model(x, **keywords)
    for hook in hooks:
        hook.remove()
    assert hooked() == before
    return captured, outputs


def page_data(file: Path) -> dict:
    """Return the data embedded in the page, after checking that it loads nothing from elsewhere."""
    text = file.read_text()
    assert not re.search(r"(src|href|url)\s*[=(]\s*[\"']?(https?:)?//", text)
    assert "@" not in re.sub(r"@media[^{]*", "", text.partition("const data")[0])
    match = re.search(r"const data = (\{.*\});", text)
    assert match is not None
    return json.loads(match[1])


def numbers(text: str, kind: str = "u1") -> np.ndarray:
    """Decode the page's numbers."""
    return np.frombuffer(base64.b64decode(text), kind)


def bytes_of(layer: dict) -> np.ndarray:
    """Return a layer's maps (M, Hq, Wq, Hk, Wk) in 255ths of their maxima."""
    return numbers(layer["maps"]).reshape(layer["heads"], *layer["queries"], *layer["keys"])


def weights_of(layer: dict) -> np.ndarray:
    """Return a layer's maps."""
    maps = bytes_of(layer)
    return maps / 255 * numbers(layer["peaks"], "<f4").reshape(maps.shape[:3])[..., None, None]


def choose(browser, select: str, value: object) -> None:
    """Choose a value of an input of the page."""
    event = "input" if select == "opacity" else "change"
    browser.run(f"(() => {{ {select}.value = '{value}'; {select}.dispatchEvent(new Event('{event}')); }})()")


def box_of(browser, element: str) -> tuple[float, float, float, float]:
    """Return left, top, width and height of an element, scrolled into the window."""
    browser.run(f"{element}.scrollIntoView({{ block: 'center' }})")
    return browser.run(
        f"(() => {{ const b = {element}.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; }})()"
    )


def click(browser, element: str, x: float, y: float) -> None:
    """Click a place relative to the element's size."""
    left, top, width, height = box_of(browser, element)
    browser.click(left + x * width, top + y * height)


def open_page(browser, file: Path) -> None:
    """Open the page, with maps over the picture."""
    browser.open(file)
    browser.run("image.decode()")
    choose(browser, "opacity", 0)


def painted(browser, panel: str, size: tuple[int, int]) -> np.ndarray:
    """Return the colours in the middle of every key's cell of a panel, (H, W, 3)."""
    H, W = size
    colours = browser.run(
        f"""(() => {{
            const {{ canvas }} = {panel}, context = canvas.getContext('2d'), found = [];
            for (let y = 0; y < {H}; y++) for (let x = 0; x < {W}; x++) {{
                const at = [(x + 0.5) * canvas.width / {W}, (y + 0.5) * canvas.height / {H}].map(Math.floor);
                found.push(...context.getImageData(...at, 1, 1).data.slice(0, 3));
            }}
            return found;
        }})()"""
    )
    return np.array(colours).reshape(H, W, 3)


def same_colours(browser, file: Path, panel: str, expected: np.ndarray, but: tuple[int, int] | None = None) -> None:
    """Check that a panel shows bytes (H, W) in the page's colours, but for a cell, which a frame may cover."""
    colours = numbers(page_data(file)["colours"]).reshape(256, 3).astype(int)
    wrong = np.abs(painted(browser, panel, expected.shape) - colours[expected]).max(-1) > 2
    if but is not None:
        wrong[but] = False
    assert not wrong.any()
