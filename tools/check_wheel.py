"""Check the installed package: whether it has the CPU kernels, and that every operator runs.

::

    python tools/check_wheel.py none    a wheel without a binary
    python tools/check_wheel.py cpu     one with the CPU kernels

The workflow of wheels runs it where a wheel is installed and nothing else of this repository is.
"""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", choices=("none", "cpu"), help="what the wheel has to have")
    expected = parser.parse_args(arguments).kernels

    from attn_plugins import doctor
    from attn_plugins.core import library

    found = "cpu" if library.has_kernel("cpu") else "none"
    if found != expected:
        print(f"check_wheel: expected kernels: {expected}, found: {found}; {library.failures()}", file=sys.stderr)
        return 1
    return doctor.main()


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, which has a datasets and a site of its own
    sys.exit(main())
