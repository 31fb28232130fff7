"""A pytest plug-in that adds the module of ``docs/howto/new-module.md`` to those that tests/modules asks everything.

It does what ``CONTRIBUTING.md`` lists: the class in ``attn_plugins.modules``, and its lines in the tests' tables.
"""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).parents[2] / "docs/howto/new-module.md"
NAME = "RowAttention2d"
OPTIONS: dict[str, Any] = dict(in_channels=16, num_heads=2)


def page_code() -> str:
    """Return the page's blocks of Python, in order."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S))


def definitions() -> ModuleType:
    """Return the term and the module of the page as a Python module, whose class can be pickled."""
    start = page_code().split("\nlayer = ")[0]
    page = ModuleType("row_attention")
    sys.modules[page.__name__] = page
    exec(compile(start, str(PAGE), "exec"), page.__dict__)
    return page


def pytest_collection() -> None:
    """Add the lines before any test file reads the tables."""
    from attn_plugins import modules
    from tests.helpers import attention_terms, module_inputs, public_modules

    kind = getattr(definitions(), NAME)
    setattr(modules, NAME, kind)
    modules.__all__.append(NAME)
    build = partial(kind, **OPTIONS)
    public_modules.OPTIONS[NAME] = OPTIONS
    public_modules.VARIANTS[NAME] = public_modules.MODULES[NAME] = build
    public_modules.IDENTITIES.append(NAME)
    module_inputs.INPUTS[NAME] = module_inputs.over(16, 5, 7)
    attention_terms.NAMES[NAME] = attention_terms.BOTH
