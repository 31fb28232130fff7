"""Schedules, weight decay and crops of ``configs/timm`` against ``paper_values.yaml``, the papers' values."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

pytest.importorskip("timm")

from tools.train.config import load

ROOT = Path(__file__).parents[2]
TABLE = yaml.safe_load((Path(__file__).parent / "paper_values.yaml").read_text(encoding="utf-8"))
RECIPES = sorted(path for path in (ROOT / "configs/timm").glob("*.yaml") if path.stem.startswith(("cifar", "imagenet")))


def row_of(recipe: Path) -> str:
    return next(pattern for pattern in TABLE if fnmatch(recipe.stem, pattern))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_the_papers(recipe):
    row, config = TABLE[row_of(recipe)], load(recipe)
    assert not row["values"].keys() & row["open"].keys()
    expected = row["values"] | row["open"]
    values = {name: getattr(config, name) for name in expected}
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()} == expected


def test_every_row_has_its_recipes():
    assert {row_of(recipe) for recipe in RECIPES} == set(TABLE)
