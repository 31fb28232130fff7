"""Trainings, translations and scores by fairseq's own commands and sacrebleu."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

from tools.files import write_text
from tools.study.commands import ROOT, StudyError, fairseq_log, make, run
from tools.study.settings import Run, Study

PLUGINS = f"--user-dir={ROOT / 'plugins/fairseq'}"
# Options that the reading of logs depends on; the user cannot change them.
TRAINING = (
    "--cpu --num-workers 0 --log-format json --log-interval 100 --no-epoch-checkpoints --save-interval 100000 "
    "--validate-interval 100000 --required-batch-size-multiple 1"
)
GENERATION = (
    "--cpu --num-workers 0 --gen-subset test --beam 4 --max-tokens 4000 --required-batch-size-multiple 1 "
    "--remove-bpe sentencepiece"
)
LENGTHS = {"short": range(1, 11), "medium": range(11, 22), "long": range(22, 10**6)}  # pieces of the source
TOKENS = {"ja": "char", "ko": "char", "th": "char", "zh": "zh"}  # BLEU's tokenisers for languages without spaces


def read_translations(log: str, count: int) -> list[str]:
    """Read the ``count`` best hypotheses of fairseq-generate, in the corpus's order.

    Raises:
        StudyError: one is missing.
    """
    lines = {int(number): text for number, text in re.findall(r"^D-(\d+)\t[^\t\n]*\t(.*)$", log, re.MULTILINE)}
    if missing := sorted(set(range(count)) - lines.keys()):
        raise StudyError(f"fairseq-generate left out {len(missing)} of {count} sentences, the first is {missing[0]}")
    return [lines[number] for number in range(count)]


def score(hypotheses: list[str], references: list[str], tokens: str = "13a") -> dict[str, Any]:
    """Compute BLEU with half of its 95 % interval over 1000 resamplings of the test sentences, and chrF.

    ``tokens`` is sacrebleu's name of BLEU's tokeniser.
    """
    from sacrebleu.metrics import BLEU, CHRF

    bleu, chrf = BLEU(tokenize=tokens), CHRF()
    of_bleu = bleu.corpus_score(hypotheses, [references], n_bootstrap=1000)
    return {
        "bleu": of_bleu.score,
        "bleu_interval": of_bleu._ci,
        "length_ratio": of_bleu.ratio,
        "chrf": chrf.corpus_score(hypotheses, [references]).score,
        "signatures": {"BLEU": str(bleu.get_signature()), "chrF": str(chrf.get_signature())},
    }


def score_by_length(hypotheses: list[str], references: list[str], sources: list[str], tokens: str) -> dict[str, float]:
    """Compute BLEU of the test sentences of each of :data:`LENGTHS` that there are; ``sources`` are in pieces."""
    from sacrebleu.metrics import BLEU

    bleu, scores = BLEU(tokenize=tokens), {}
    for name, lengths in LENGTHS.items():
        chosen = [number for number, source in enumerate(sources) if len(source.split()) in lengths]
        if chosen:
            of_length = [references[number] for number in chosen]
            scores[name] = bleu.corpus_score([hypotheses[number] for number in chosen], [of_length]).score
    return scores


class Translation:
    """Trainings on a corpus of tools.datasets.gettext_corpus, which ``--data`` names.

    A setting's options are those of fairseq-train.
    """

    needs = ("fairseq",)
    facts = ("fairseq", "sacrebleu", "sentencepiece")

    def __init__(self, study: Study, output: Path, options: Namespace) -> None:
        self.study, self.output, self.given, self.more = study, output, options.data, options.train
        self.corpus = (options.data or ROOT / study.data["data"]).resolve()

    def prepare(self, runs: list[Run]) -> None:
        """Make the study's corpus if ``--data`` names none, and fairseq's binary form of it."""
        command = self.study.data["make"]
        if self.given is None:
            make(self.corpus, command, self.output / "corpus.log")
        for name in ("recipe.json", "bpe"):
            if not (self.corpus / name).exists():
                raise StudyError(f"--data {self.corpus} has no {name}: make it with python -m {command} DIR")
        recipe, binary, partial = self.recipe, self.output / "bin", self.output / ".bin.partial"
        if not binary.exists():
            shutil.rmtree(partial, ignore_errors=True)
            source, target = recipe["languages"]
            prefixes = [f"--{part}pref={self.corpus / 'bpe' / part}" for part in ("train", "valid", "test")]
            languages = (f"--source-lang={source}", f"--target-lang={target}", "--joined-dictionary")
            run("fairseq-preprocess", [*languages, *prefixes, f"--destdir={partial}"], self.output / "preprocess.log")
            write_text(partial / "recipe.json", json.dumps(recipe))
            partial.rename(binary)
        elif json.loads((binary / "recipe.json").read_text()) != recipe:
            raise StudyError(f"OUT {self.output} is of another corpus than {self.corpus}: name another, or remove it")

    @property
    def recipe(self) -> dict[str, Any]:
        """Recipe of the corpus."""
        return json.loads((self.corpus / "recipe.json").read_text(encoding="utf-8"))

    def options(self, one: Run) -> list[str]:
        """Return fairseq-train's options of a run; the study's own have seed 1."""
        seed = [] if one.seed == 1 else ["--seed", str(one.seed)]
        common = f"{self.study.data['train']} {self.more}"
        return [*shlex.split(common), *self.study.options(one.setting), *seed]

    def train(self, one: Run, folder: Path) -> dict[str, Any]:
        """Train, translate and score."""
        binary = self.output / "bin"
        training = [binary, PLUGINS, f"--save-dir={folder}", *shlex.split(TRAINING), *self.options(one)]
        seconds = run("fairseq-train", training, folder / "train.log")
        translation = [binary, PLUGINS, f"--path={folder / 'checkpoint_last.pt'}", *shlex.split(GENERATION)]
        generation = run("fairseq-generate", translation, folder / "generate.log")
        source, target = self.recipe["languages"]
        files = (self.corpus / f"test.{target}", self.corpus / f"bpe/test.{source}")
        references, sources = (file.read_text(encoding="utf-8").split("\n")[:-1] for file in files)
        tokens = TOKENS.get(target.split("_")[0], "13a")
        log = (folder / "generate.log").read_text(encoding="utf-8")
        hypotheses = read_translations(log, len(references))
        write_text(folder / "hypotheses.txt", "".join(f"{line}\n" for line in hypotheses))
        trained = self.read_training(folder / "train.log")
        return {
            **trained,
            **score(hypotheses, references, tokens),
            "bleu_by_length": score_by_length(hypotheses, references, sources, tokens),
            "train_cpu_seconds": round(seconds, 1),
            "generate_cpu_seconds": round(generation, 1),
            "tokens_per_cpu_second": round(trained["tokens"] / seconds),
        }

    @staticmethod
    def read_training(file: Path) -> dict[str, Any]:
        """Read parameters, updates, target tokens, validation loss and perplexity from fairseq-train's log."""
        parameters, rows = fairseq_log(file)
        values: dict[str, Any] = {"parameters": parameters, "updates": 0, "tokens": 0}
        for row in rows:
            if "train_num_updates" in row:  # one per epoch
                updates = int(row["train_num_updates"])
                values["tokens"] += round(float(row["train_wpb"]) * (updates - values["updates"]))
                values["updates"] = updates
            if "valid_loss" in row:
                values |= {name: float(row[name]) for name in ("valid_loss", "valid_ppl")}
        return values

    def about(self) -> dict[str, str]:
        """Return the number of sentence pairs."""
        return {"pairs": ", ".join(f"{count:,} {part}" for part, count in self.recipe["pairs"].items())}
