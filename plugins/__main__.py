"""Console entry point: ``attn-plugins [doctor | install | fairseq-dir]``, or ``python -m attn_plugins``."""

from __future__ import annotations

import argparse
import sys

from attn_plugins import doctor
from attn_plugins.autoload import FAIRSEQ_USER_DIR
from attn_plugins.install import command


def main() -> None:
    parser = argparse.ArgumentParser(prog="attn-plugins", description=sys.modules["attn_plugins"].__doc__)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("doctor", help="report what is installed, loaded and registered (the default)")
    commands.add_parser("fairseq-dir", help="print the folder to pass to fairseq's --user-dir")
    command.add_parser(commands)
    options = vars(parser.parse_args())
    name = options.pop("command")
    if name == "fairseq-dir":
        print(FAIRSEQ_USER_DIR)
    elif name == "install":
        sys.exit(command.main(**options))
    else:
        sys.exit(doctor.main())


if __name__ == "__main__":
    main()
