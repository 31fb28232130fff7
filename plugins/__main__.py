"""The console entry point: ``attn-plugins [doctor]``, or ``python -m attn_plugins``."""

from __future__ import annotations

import argparse
import sys


def main() -> None:
    parser = argparse.ArgumentParser(prog="attn-plugins", description=sys.modules["attn_plugins"].__doc__)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("doctor", help="what is installed, loaded and registered (the default)")
    commands.add_parser("fairseq-dir", help="print the folder to give to fairseq's --user-dir")
    command = parser.parse_args().command
    if command == "fairseq-dir":
        from attn_plugins.autoload import FAIRSEQ_USER_DIR

        print(FAIRSEQ_USER_DIR)
        return
    from attn_plugins import doctor

    sys.exit(doctor.main())


if __name__ == "__main__":
    main()
