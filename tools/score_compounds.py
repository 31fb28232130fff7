r"""Score the output of fairseq-generate like papers on WMT English-German: BLEU of tokens, with compounds split.

::

    fairseq-generate ... --beam 5 --remove-bpe --required-batch-size-multiple 1 > generate.txt
    python -m tools.score_compounds generate.txt
    python -m tools.score_compounds generate.txt --reference test.de --json scores.json

A hyphen between two characters becomes a token, ``##AT##-##AT##``, in translations and references, by the rule of
tensor2tensor's and fairseq's scripts, ``s{(\S)-(\S)}{$1 ##AT##-##AT## $2}g``; so ``a-b-c`` is split once. Text that
already has the token ``##AT##-##AT##`` or ``@-@`` (Moses with ``-a``, as in fairseq's prepare-wmt14en2de.sh) is left
unchanged, and both scores are equal. BLEU of tokens is case-sensitive and without smoothing, as in multi-bleu.perl
(sacrebleu with ``tokenize="none"``).

sacreBLEU is computed from lines D and T. It is comparable with other work if those lines are detokenised, by
``fairseq-generate --tokenizer moses``; lines T are then not tokens, and ``--reference`` must provide the tokens.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import command_parser, need
from tools.files import write_text

LINE = re.compile(r"([THD])-(\d+)\t(.*)")
FINISHED = re.compile(r"^Generate .+ with beam=", re.MULTILINE)
HYPHEN = re.compile(r"(?<!\S)(?:@-@|##AT##-##AT##)(?!\S)|(\S)-(\S)")  # an existing split, or a compound


@dataclass(frozen=True)
class Generated:
    """Sentences printed by fairseq-generate, in the order of the test set."""

    references: list[str]  # lines T
    hypotheses: list[str]  # lines H, the best of each sentence: tokens
    detokenised: list[str]  # lines D of the same sentences; equal to ``hypotheses`` without --tokenizer


def read(log: str, name: str = "the output") -> Generated:
    """Parse the sentences of an output of fairseq-generate.

    Raises:
        ValueError: the text is not such an output, is not finished, or lacks a sentence.
    """
    sentences: dict[str, dict[int, str]] = {"T": {}, "H": {}, "D": {}}
    for match in filter(None, map(LINE.fullmatch, log.split("\n"))):
        letter, number, text = match[1], int(match[2]), match[3]
        # The first hypothesis of a sentence is the best.
        sentences[letter].setdefault(number, text if letter == "T" else text.partition("\t")[2])
    if not sentences["H"]:
        raise ValueError(f"{name} has no line H-...: it must be what fairseq-generate prints without --quiet")
    if not sentences["T"]:
        raise ValueError(f"{name} has no line T-...: the test set must have its target language")
    if not FINISHED.search(log):
        raise ValueError(f"{name} does not end with the line 'Generate ... with beam=': fairseq-generate is not done")
    numbers = range(1 + max(map(max, sentences.values())))
    for letter, lines in sentences.items():
        if missing := sorted(set(numbers) - lines.keys()):
            first = f"{letter}-{missing[0]}"
            raise ValueError(
                f"{name} lacks {len(missing)} of {len(numbers)} sentences, the first is {first}; fairseq-generate "
                "leaves none out with --required-batch-size-multiple 1"
            )
    references, hypotheses, detokenised = ([lines[n] for n in numbers] for lines in sentences.values())
    pieces = next((line for line in hypotheses if "@@ " in line or "\u2581" in line), None)
    if pieces is not None:
        raise ValueError(f"{name} has words in pieces: fairseq-generate needs --remove-bpe; got {pieces!r}")
    return Generated(references, hypotheses, detokenised)


def split_compounds(line: str) -> str:
    """Return ``line`` with ``a-b`` replaced by ``a ##AT##-##AT## b``.

    >>> split_compounds("das Ost-West-Projekt - heute")
    'das Ost ##AT##-##AT## West ##AT##-##AT## Projekt - heute'
    """
    return HYPHEN.sub(lambda m: m[0] if m[1] is None else f"{m[1]} ##AT##-##AT## {m[2]}", line)


def token_bleu(hypotheses: Iterable[str], references: Iterable[str]) -> Any:
    """Return corpus BLEU of given tokens, as sacrebleu's ``BLEUScore``."""
    from sacrebleu.metrics import BLEU

    bleu = BLEU(tokenize="none", smooth_method="none", force=True)
    return bleu.corpus_score([*hypotheses], [[*references]])


def scores(generated: Generated, references: list[str] | None = None) -> dict[str, Any]:
    """Compute BLEU of tokens, of tokens with compounds split, and sacreBLEU with its signature.

    Args:
        generated: Result of :func:`read`.
        references: Tokens, in the order of the test set; None uses lines T, unless they are detokenised text.
    """
    from sacrebleu.metrics import BLEU

    figures: dict[str, Any] = {"sentences": len(generated.hypotheses)}
    detokenised = generated.detokenised != generated.hypotheses
    if references is None and not detokenised:
        references = generated.references
    if references is not None:
        plain = token_bleu(generated.hypotheses, references)
        split = token_bleu(map(split_compounds, generated.hypotheses), map(split_compounds, references))
        figures["bleu"], figures["bleu_compounds_split"] = plain.score, split.score
        figures["detail"], figures["detail_compounds_split"] = str(plain), str(split)
    bleu = BLEU(force=True)
    figures["sacrebleu"] = bleu.corpus_score(generated.detokenised, [generated.references]).score
    figures["signature"] = str(bleu.get_signature())
    figures["detokenised"] = detokenised
    return figures


def table(figures: dict[str, Any]) -> str:
    """Format the scores as lines of text."""
    lines = [f"{figures['sentences']:,} sentences"]
    if "bleu" in figures:
        lines += [f"tokens                     {figures['detail']}"]
        lines += [f"tokens, compounds split    {figures['detail_compounds_split']}"]
    else:
        lines += ["tokens                     need --reference: lines T are detokenised"]
    note = "" if figures["detokenised"] else " (not detokenised: others' sacreBLEU is of other text)"
    return "\n".join([*lines, f"sacreBLEU                  {figures['sacrebleu']:.2f} {figures['signature']}{note}"])


def read_lines(path: Path, count: int) -> list[str]:
    """Read the ``count`` lines of a file; raise a ValueError if the file has more or fewer lines."""
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    if len(lines) != count:
        raise ValueError(f"--reference {path} must have a line for each of the {count} sentences, got {len(lines)}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("score_compounds", __doc__)
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="output of fairseq-generate")
    parser.add_argument("--reference", type=Path, metavar="FILE", help="tokenised references (default: lines T)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file")
    options = parser.parse_args(arguments)
    need("sacrebleu")
    try:
        generated = read(options.output.read_text(encoding="utf-8"), str(options.output))
        reference = None if options.reference is None else read_lines(options.reference, len(generated.hypotheses))
        figures = scores(generated, reference)
        if options.json is not None:
            write_text(options.json, json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        print(f"score_compounds: {error}", file=sys.stderr)
        return 2
    print(table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
