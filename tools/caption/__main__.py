"""Regions of pictures, and captions.

::

    python -m tools.caption extract data/own/images data/own/regions.hdf5 --splits data/own/splits.json --grid resnet50
    python -m tools.caption caption photo.jpg --path checkpoints/own/checkpoint_best.pt --attributes attributes.json
"""

from __future__ import annotations

import importlib
import sys

from tools import command_parser

COMMANDS = {"extract": "extract region features of a folder of pictures", "caption": "caption pictures"}


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit code, 2 for bad input and for files that cannot be read or written."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = command_parser("caption", __doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, formatter_class=parser.formatter_class)
        if name in given[:1]:  # import only what this command needs
            module = importlib.import_module(f"tools.caption.{name}")
            command.description = module.__doc__
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    options = parser.parse_args(given)
    try:
        return options.run(options)
    except (ValueError, OSError, ModuleNotFoundError) as error:  # such as h5py, for the regions' format
        print(f"{given[0]}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
