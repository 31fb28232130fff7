"""Small trainings that compare settings, and the documents' claims that they test.

::

    python -m tools.study NAME                           # all settings and seeds of configs/studies/NAME.yaml
    python -m tools.study vision-transformers --sets crops --settings vit-stock vit-1111 --seeds 0 1 2 3 4
    python -m tools.study detection OUT --train 'train_cfg.max_epochs=80'    # the toolkit's options, for every setting
    python -m tools.study paddings OUT --add 'nl=nl_narrow-r18_digits' --settings cc nl     # a setting of your own
    python -m tools.study cross-attention --data data/gettext-fr             # another corpus
    python -m tools.study captioning --regions '--mmdet CONFIG CHECKPOINT'   # instead of grid cells
    python -m tools.study sharing --table benchmarks/digits-sharing.json     # the table of recorded results
    python -m tools.study findings --list                                    # see python -m tools.study findings -h

    OUT/[PART/]SETTING-SEED/     checkpoints, logs, result.json
    OUT/NAME.{md,json,png}       tables and curves of all finished trainings, rewritten after each one

Missing data sets are made. Each training runs on one CPU thread, by the toolkit's own command; a second process may
work in the same OUT with other --settings or --seeds. Trainings with a result.json are not repeated. An interrupted
training restarts, so that its CPU time is of one whole run. The options of --add may begin with a setting's name.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools import command_parser
from tools.study import findings
from tools.study.commands import ROOT, StudyError
from tools.study.runner import carry_out, recorded, toolkit_of
from tools.study.settings import NAMES, Run, Study

CAPTIONING = {
    "--self-critical": "options of fairseq-train in the self-critical stage",
    "--scenes": "options of tools.datasets.captioned_scenes",
    "--detector": "options of tools.train attributes",
    "--regions": "options of the extraction of regions, for other regions",
}


def parse(arguments: list[str]) -> tuple[argparse.Namespace, Study]:
    """Parse the options; return them and the study with the user's settings."""
    parser = command_parser("study", __doc__)
    parser.add_argument("name", choices=NAMES, metavar="NAME", help=", ".join([*NAMES, "findings"]))
    parser.add_argument("output", type=Path, nargs="?", metavar="OUT", help="default: work_dirs/studies/NAME")
    parser.add_argument(
        "--data", type=Path, help="folder of the data sets, default: data; of translation and captioning the set itself"
    )
    parser.add_argument("--settings", nargs="+", metavar="NAME", help="settings to run; default: all of the study")
    parser.add_argument("--add", action="append", default=[], metavar="NAME=OPTIONS", help="a further setting")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="N", help="default: the study's")
    parser.add_argument("--train", default="", metavar="OPTIONS", help="the toolkit's options for every setting")
    parser.add_argument("--table", type=Path, metavar="JSON", help="print the table of recorded results and stop")
    for kind in ("sets", "tasks", "stages"):
        parser.add_argument(f"--{kind}", nargs="+", metavar="NAME", help=f"the study's {kind}, default: all")
    captioning = parser.add_argument_group("the study captioning")
    captioning.add_argument("--part", choices=("val", "test"), default="test", help="images to score, default: test")
    for name, text in CAPTIONING.items():
        captioning.add_argument(name, default="", metavar="OPTIONS", help=text)
    options = parser.parse_args(arguments)
    study = Study(options.name)
    for text in options.add:
        try:
            study.add(text)
        except ValueError as error:
            parser.error(str(error))
    options.settings = options.settings or list(study.settings)
    options.seeds = options.seeds or study.data["seeds"]
    trained = [name for name, part in study.parts.items() if study.kind == "stages" or not study.kind or "data" in part]
    options.parts = getattr(options, study.kind or "sets") or trained
    for name, known in (("settings", study.settings), *(((study.kind, trained),) if study.kind else ())):
        for value in getattr(options, name) or ():
            if value not in known:
                parser.error(f"--{name} must be among {', '.join(known)}, got {value!r}")
    for kind in ("sets", "tasks", "stages"):
        if getattr(options, kind) and kind != study.kind:
            parser.error(f"{study.name} has no --{kind}")
    if study.data["toolkit"] != "captioning":
        for name in CAPTIONING:
            if getattr(options, name[2:].replace("-", "_")):
                parser.error(f"{name} is of the study captioning")
    if min(options.seeds) < 0:
        parser.error(f"--seeds must not be negative, got {min(options.seeds)}")
    return options, study


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["findings"]:
        return findings.main(arguments[1:])
    options, study = parse(arguments)
    try:
        if options.table:
            print(recorded(study, options.table), end="")
            return 0
        output = (options.output or ROOT / "work_dirs/studies" / study.name).resolve()
        toolkit = toolkit_of(study)(study, output, options)
        chosen = [Run(*one) for one in product(options.settings, options.parts, options.seeds)]
        runs = toolkit.runs(chosen) if hasattr(toolkit, "runs") else chosen
        toolkit.prepare(runs)
        text = carry_out(study, toolkit, runs, output)
        print(f"\n{text}\nwritten: {output / study.name}.md and .json")
    except StudyError as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    return 0


def product(settings: list[str], parts: list[str], seeds: list[int]) -> list[tuple[str, str, int]]:
    """Return all combinations: seed by seed, and the parts of a setting one after the other."""
    return [(setting, part, seed) for seed in seeds for setting in settings for part in parts]


if __name__ == "__main__":
    sys.exit(main())
