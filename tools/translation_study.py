"""Train, translate and score with fairseq's own commands, for each of several attentions, on a small real corpus.

::

    python -m tools.datasets.gettext_corpus data/gettext --download --bpe 3000
    python -m tools.translation_study data/gettext OUT                          # thirteen attentions
    python -m tools.translation_study data/gettext OUT --study alignment        # scores and recurrences of aligned_lstm
    python -m tools.translation_study data/gettext-ja OUT --study cross --target ja --seeds 1 2 3   # word order differs
    python -m tools.translation_study data/gettext OUT --settings cross-1000 cross-0111
    python -m tools.translation_study data/gettext OUT --add 'range-7=--attention-range 7' --settings range-7
    python -m tools.translation_study data/gettext OUT --train '--max-update 8000 --seed 2'

    OUT/bin                      of fairseq-preprocess
    OUT/SETTING/, OUT/SETTING-seedN/   checkpoint_last.pt, train.log, generate.log, hypotheses.txt, result.json
    OUT/attention.{md,json}      the table of all finished settings, rewritten after each one

All settings of a study are trained with the same options, on one CPU thread each. A setting with a ``result.json`` is
not run again; an interrupted one restarts from the beginning. Scores are sacrebleu's, of the detokenised translations
against the corpus's own lines, of characters if the target language has no spaces.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import need
from tools.files import write_text
from tools.study import USER_DIR, StudyError, add_arguments, added, choose, count_parameters, kept, log_rows, run
from tools.study import facts as machine_facts

TRAINING = (
    "--optimizer adam --adam-betas '(0.9, 0.98)' --lr 5e-3 --lr-scheduler inverse_sqrt --warmup-updates 400 "
    "--criterion label_smoothed_cross_entropy --label-smoothing 0.1 --dropout 0.1 --max-tokens 1000 "
    "--max-update 4000 --seed 1"
)
# Options that the tool depends on; the user cannot change them.
HOUSEKEEPING = (
    "--cpu --num-workers 0 --log-format json --log-interval 100 --no-epoch-checkpoints --save-interval 100000 "
    "--validate-interval 100000 --required-batch-size-multiple 1"
)
GENERATION = (
    "--cpu --num-workers 0 --gen-subset test --beam 4 --max-tokens 4000 --required-batch-size-multiple 1 "
    "--remove-bpe sentencepiece"
)


@dataclass(frozen=True)
class Study:
    """Settings to compare.

    Attributes:
        title: Title of the table.
        common: fairseq-train's options for all settings.
        settings: Name to its own options.
    """

    title: str
    common: str
    settings: Mapping[str, str]


def _self(attention: str, positions: str = "none") -> str:
    """Return the options of self-attention on both sides; Zhu et al. (2019) use relative positions or none."""
    return " ".join(f"--{side}-attention {attention} --{side}-positions {positions}" for side in ("encoder", "decoder"))


STUDIES = {
    "attention": Study(
        "Attention of a small Transformer",
        f"--arch spatial_transformer_tiny --share-all-embeddings {TRAINING}",
        {  # first those that test the paper's second finding
            "1111": f"{_self('1111')} --cross-attention 1111",
            "cross-1000": f"{_self('1111')} --cross-attention 1000",
            "cross-0111": f"{_self('1111')} --cross-attention 0111",
            "cross-0010": f"{_self('1111')} --cross-attention 0010",
            "none": _self("none"),
            "none+absolute": _self("none", "absolute"),
            "0010": _self("0010"),
            "0010+absolute": _self("0010", "absolute"),
            "0110": _self("0110"),
            "0010+deformable": f"{_self('0010')} --deformable",
            "dynamic": _self("dynamic"),
            "bilateral": _self("bilateral", "absolute"),  # as in the thesis, which changes self-attention only
            "shaw": _self("shaw"),
        },
    ),
    "cross": Study(
        "Terms of cross-attention, and of self-attention without content",
        f"--arch spatial_transformer_tiny --share-all-embeddings {TRAINING} --max-update 2000",
        {
            "1111": f"{_self('1111')} --cross-attention 1111",
            **{f"cross-{bits}": f"{_self('1111')} --cross-attention {bits}" for bits in ("1000", "0111", "0110")},
            "self-0111": f"{_self('0111')} --cross-attention 1111",
        },
    ),
    "paddings": Study(
        "Paddings of bilateral self-attention",
        f"--arch spatial_transformer_tiny --share-all-embeddings {TRAINING} --max-update 1500",
        {
            "bilateral": _self("bilateral", "absolute"),  # 0 outside its window
            **{
                f"bilateral-{name.lstrip('-')}": f"{_self('bilateral', 'absolute')} --bilateral-outside={name}"
                for name in ("min", "-inf", "learned")
            },
            "1000+absolute": _self("1000", "absolute"),
        },
    ),
    "alignment": Study(
        "Alignment scores of a small LSTM",
        f"--arch aligned_lstm_tiny --share-all-embeddings {TRAINING}",
        {
            **{name: f"--alignment {name}" for name in ("additive", "general", "dot", "scaled-dot", "cosine")},
            "additive+bahdanau": "--alignment additive --recurrence bahdanau",
        },
    ),
}


TOKENS = {"ja": "char", "ko": "char", "th": "char", "zh": "zh"}  # BLEU's tokenisers for languages without spaces
PIECES = ("--bpe", "3000", "--shortest", "6")  # for the corpus of --target


def make_corpus(folder: Path, target: str) -> None:
    """Create the corpus of ``target`` in ``folder`` if missing, from entries of at least six English words.

    Raises:
        StudyError: the corpus there is of another language, or it cannot be created.
    """
    if (folder / "recipe.json").is_file():
        language = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))["languages"][1]
        if language != target:
            raise StudyError(f"--target {target}: CORPUS {folder} is of {language}: name another folder")
        return
    need("polib", "sentencepiece")
    from tools.datasets import gettext_corpus

    coverage = ["--coverage", "0.9995"] if target.split("_")[0] in TOKENS else []
    arguments = [str(folder), "--download", "--language", target, *PIECES, *coverage]
    if gettext_corpus.main(arguments):
        raise StudyError(f"CORPUS {folder} cannot be made, see above")


@dataclass(frozen=True)
class Corpus:
    """A folder of tools.datasets.gettext_corpus."""

    folder: Path
    source: str
    target: str
    recipe: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """Open a corpus; raise StudyError if it is missing or has no BPE pieces."""
        make = f"make it with python -m tools.datasets.gettext_corpus {folder} --download --bpe 3000"
        if not (folder / "recipe.json").is_file():
            raise StudyError(f"CORPUS {folder} has no recipe.json: {make}")
        if not (folder / "bpe").is_dir():
            raise StudyError(f"CORPUS {folder} has no bpe/: {make}, into another folder")
        recipe = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
        return cls(folder, *recipe["languages"], recipe)

    @property
    def tokens(self) -> str:
        """Name of sacrebleu's tokeniser."""
        return TOKENS.get(self.target.split("_")[0], "13a")

    def references(self) -> list[str]:
        """Return the test part in the target language, before BPE."""
        return (self.folder / f"test.{self.target}").read_text(encoding="utf-8").split("\n")[:-1]


def preprocess(corpus: Corpus, output: Path) -> Path:
    """Return fairseq's binary form of ``corpus``, with one dictionary for both languages; create it if missing."""
    binary, partial = output / "bin", output / ".bin.partial"
    if not binary.exists():
        shutil.rmtree(partial, ignore_errors=True)
        prefixes = [f"--{part}pref={corpus.folder / 'bpe' / part}" for part in ("train", "valid", "test")]
        languages = (f"--source-lang={corpus.source}", f"--target-lang={corpus.target}", "--joined-dictionary")
        run("fairseq-preprocess", [*languages, *prefixes, f"--destdir={partial}"], output / "preprocess.log")
        write_text(partial / "recipe.json", json.dumps(corpus.recipe))
        partial.rename(binary)
    elif json.loads((binary / "recipe.json").read_text()) != corpus.recipe:
        raise StudyError(f"OUT {output} is of another corpus than {corpus.folder}: name another, or remove it")
    return binary


def read_training(log: str) -> dict[str, Any]:
    """Read parameters, updates, target tokens, validation loss and perplexity from fairseq-train's JSON log."""
    found: dict[str, Any] = {"parameters": count_parameters(log), "updates": 0, "tokens": 0}
    for row in log_rows(log):
        if "train_num_updates" in row:  # one per epoch
            updates = int(row["train_num_updates"])
            found["tokens"] += round(float(row["train_wpb"]) * (updates - found["updates"]))
            found["updates"] = updates
        if "valid_loss" in row:
            found["valid_loss"], found["valid_ppl"] = float(row["valid_loss"]), float(row["valid_ppl"])
    return found


def read_translations(log: str, count: int) -> list[str]:
    """Read the ``count`` best hypotheses of fairseq-generate, in the corpus's order.

    Raises:
        StudyError: one is missing.
    """
    found = {int(number): text for number, text in re.findall(r"^D-(\d+)\t[^\t\n]*\t(.*)$", log, re.MULTILINE)}
    if missing := sorted(set(range(count)) - found.keys()):
        raise StudyError(f"fairseq-generate left out {len(missing)} of {count} sentences, the first is {missing[0]}")
    return [found[number] for number in range(count)]


def score(hypotheses: list[str], references: list[str], tokens: str = "13a") -> dict[str, Any]:
    """Compute BLEU with half of its 95 % interval over 1000 resamplings of the test sentences, and chrF.

    ``tokens`` is sacrebleu's name of BLEU's tokeniser.
    """
    from sacrebleu.metrics import BLEU, CHRF

    bleu, chrf = BLEU(tokenize=tokens), CHRF()
    of_bleu = bleu.corpus_score(hypotheses, [references], n_bootstrap=1000)
    of_chrf = chrf.corpus_score(hypotheses, [references])
    return {
        "bleu": of_bleu.score,
        "bleu_interval": of_bleu._ci,
        "length_ratio": of_bleu.ratio,
        "chrf": of_chrf.score,
        "signatures": {"BLEU": str(bleu.get_signature()), "chrF": str(chrf.get_signature())},
    }


def run_setting(
    name: str, options: list[str], corpus: Corpus, binary: Path, folder: Path, seed: int = 1
) -> dict[str, Any]:
    """Train, translate and score one setting in ``folder``, or read the stored result.

    Raises:
        StudyError: a command failed, or the setting was run with other options.
    """
    path, named = folder / "result.json", folder.name
    if result := kept(path, options):
        print(f"{named}: already done", flush=True)
        return result
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    print(f"{named}: training, see {folder / 'train.log'}", flush=True)
    plugins = f"--user-dir={USER_DIR}"
    training = [binary, plugins, f"--save-dir={folder}", *shlex.split(HOUSEKEEPING), *options]
    seconds = run("fairseq-train", training, folder / "train.log")
    wall = time.monotonic() - began
    facts = read_training((folder / "train.log").read_text(encoding="utf-8"))
    checkpoint = folder / "checkpoint_last.pt"
    translation = [binary, plugins, f"--path={checkpoint}", *shlex.split(GENERATION)]
    generation = run("fairseq-generate", translation, folder / "generate.log")
    references = corpus.references()
    hypotheses = read_translations((folder / "generate.log").read_text(encoding="utf-8"), len(references))
    write_text(folder / "hypotheses.txt", "".join(f"{line}\n" for line in hypotheses))
    result = {
        "setting": name,
        "seed": seed,
        "options": options,
        **facts,
        **score(hypotheses, references, corpus.tokens),
        "train_cpu_seconds": round(seconds, 1),
        "train_wall_seconds": round(wall, 1),
        "generate_cpu_seconds": round(generation, 1),
        "tokens_per_cpu_second": round(facts["tokens"] / seconds),
    }
    write_text(path, json.dumps(result, indent=1) + "\n")
    print(f"{named}: BLEU {result['bleu']:.1f}, chrF {result['chrf']:.1f}, {wall:.0f} s of training", flush=True)
    return result


def spread(values: Sequence[float], form: str) -> str:
    """Format the mean, with the standard deviation of several values."""
    deviation = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{deviation}"


def markdown(study: Study, results: list[dict], facts: dict[str, str], signatures: dict[str, str]) -> str:
    """Return the table of ``results``."""
    lines = [
        f"# {study.title}",
        "",
        ", ".join(f"{k} {v}" for k, v in facts.items()),
        "",
        *(f"{metric}: `{signature}`" for metric, signature in signatures.items()),
        "",
        "| setting | parameters | validation loss | perplexity | BLEU (95 % interval) | chrF | CPU s of training "
        "| target tokens / CPU s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in dict.fromkeys(row["setting"] for row in results):
        rows = [row for row in results if row["setting"] == name]
        one = f"{rows[0]['bleu']:.1f} ± {rows[0]['bleu_interval']:.1f}"
        bleu = one if len(rows) == 1 else f"{spread([row['bleu'] for row in rows], '.1f')} ({len(rows)} seeds)"
        means = {key: [row[key] for row in rows] for key in ("valid_loss", "valid_ppl", "chrf", "train_cpu_seconds")}
        cells = [
            name, f"{rows[0]['parameters']:,}", spread(means["valid_loss"], ".3f"), spread(means["valid_ppl"], ".2f"),
            bleu, spread(means["chrf"], ".1f"), f"{statistics.fmean(means['train_cpu_seconds']):.0f}",
            f"{round(statistics.fmean(row['tokens_per_cpu_second'] for row in rows)):,}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def trained_as(common: str, own: str, seed: int) -> list[str]:
    """Return fairseq-train's options of a setting; seed 1 is the default of all studies."""
    return shlex.split(f"{common} {own}" if seed == 1 else f"{common} {own} --seed {seed}")


def folder_of(name: str, seed: int) -> str:
    """Return the folder name of a setting."""
    return name if seed == 1 else f"{name}-seed{seed}"


def report(study: Study, which: str, settings: Mapping[str, str], output: Path, corpus: Corpus, common: str) -> str:
    """Write the table of every finished setting in ``output`` whose options are current, and return it."""
    results = []
    for name, own in settings.items():
        paths = [output / name / "result.json", *sorted(output.glob(f"{name}-seed*/result.json"))]
        for path in paths:
            result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            if result.get("options") == trained_as(common, own, result.get("seed", 1)):
                results.append(result)
    facts = machine_facts("fairseq", "sacrebleu", "sentencepiece")
    facts["pairs"] = ", ".join(f"{count:,} {part}" for part, count in corpus.recipe["pairs"].items())
    signatures = results[0]["signatures"]
    table = markdown(study, results, facts, signatures)
    write_text(output / f"{which}.md", table)
    raw = {"facts": facts, "common": common, "results": results}
    write_text(output / f"{which}.json", json.dumps(raw, indent=1, ensure_ascii=False) + "\n")
    return table


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, dict[str, str]]:
    """Parse the options; return them and all settings of the study, its own and the user's."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.translation_study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("corpus", type=Path, metavar="CORPUS", help="folder of tools.datasets.gettext_corpus, --bpe")
    parser.add_argument("output", type=Path, metavar="OUT")
    parser.add_argument("--study", choices=list(STUDIES), default="attention", help="default: %(default)s")
    add_arguments(parser)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], metavar="N", help="default: 1")
    target = "make CORPUS where it is missing: English and LANGUAGE, entries of six words and more"
    parser.add_argument("--target", metavar="LANGUAGE", help=target)
    parser.add_argument("--train", default="", metavar="OPTIONS", help="fairseq-train's options for every setting")
    options = parser.parse_args(arguments)
    if min(options.seeds) < 1:
        parser.error(f"--seeds must be at least 1, got {min(options.seeds)}")
    settings = dict(STUDIES[options.study].settings)
    settings.update(added(parser, options, (*settings, "bin")))
    choose(parser, options, settings)
    return options, settings


def main(arguments: list[str] | None = None) -> int:
    options, settings = parse(arguments)
    need("fairseq")
    study = STUDIES[options.study]
    common = f"{study.common} {options.train}".strip()
    try:
        if options.target:
            make_corpus(options.corpus.resolve(), options.target)
        corpus, output = Corpus.open(options.corpus.resolve()), options.output.resolve()
        binary = preprocess(corpus, output)
        table = ""
        runs = [(name, seed) for seed in options.seeds for name in options.settings]
        for number, (name, seed) in enumerate(runs, 1):
            print(f"{number}/{len(runs)} ", end="", flush=True)
            own = trained_as(common, settings[name], seed)
            run_setting(name, own, corpus, binary, output / folder_of(name, seed), seed)
            table = report(study, options.study, settings, output, corpus, common)
        print(f"\n{table}\nwritten: {output / options.study}.md and .json")
    except StudyError as error:
        print(f"translation_study: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
