"""Build with setuptools, and add to every wheel the module that torch's entry point names.

The module is copied into editable wheels as well. setuptools would map it to the checkout, and ``import torch``
would fail as soon as the checkout is moved or deleted.

torch and ninja are build requirements only where a binary is compiled (``ATTN_PLUGINS_BUILD`` other than ``none``).
"""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that stay as they are)

MODULE = Path(__file__).with_name("attn_plugins_autoload.py")
TO_COMPILE = ["torch>=2.10", "ninja"]


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + _to_compile()


def get_requires_for_build_editable(config_settings=None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + _to_compile()


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None) -> str:
    name = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    add_module(Path(wheel_directory, name))
    return name


def build_editable(wheel_directory, config_settings=None, metadata_directory=None) -> str:
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    add_module(Path(wheel_directory, name))
    return name


def add_module(wheel: Path) -> None:
    """Add ``MODULE`` and its line of RECORD to ``wheel``."""
    content = MODULE.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    partial = wheel.with_name(wheel.name + ".part")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            data = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                data += f"{MODULE.name},sha256={digest},{len(content)}\n".encode()
            new.writestr(entry, data)
        new.writestr(MODULE.name, content)
    partial.replace(wheel)


def _to_compile() -> list[str]:
    return [] if os.environ.get("ATTN_PLUGINS_BUILD") == "none" else TO_COMPILE
