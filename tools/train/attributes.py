r"""Train the attribute detector on captioned pictures, and write the attributes for the captioner.

::

    python -m tools.train attributes data/own work_dirs/attributes

The vocabulary is the ``--words`` most frequent words of the training captions that occur at least ``--min-word-count``
times (as counted by the captioning task); stop words stay unless ``--skip-words`` lists them. An image has a word if
one of its captions has it. Loss: binary cross-entropy of p = 1 − Π(1 − p_cell), the noisy-OR over the cells of the
backbone's last map (Fang et al., 2015). Pictures are stretched to ``--size`` and shifted by up to ``--shift`` of it,
but not mirrored, because captions distinguish left from right.

DATA is the folder of the captioning task: ``images/``, ``splits.json`` (Karpathy's format) and ``captions.json``
(COCO's; without it the captions in ``splits.json``); each has an option for another path. The backbone starts from
timm's weights (a download; resnet50 by default, see ``--backbone``), from those of ``--weights FILE``, or with
``--no-pretrained`` from random weights, which suits a small one.

OUT gets ``best.safetensors`` (of the epoch with the best mAP over words on ``val``), ``last.pth`` (for ``--resume``)
and ``log.json``. At the end DATA gets ``attributes.json``: the ``--top`` most probable words of every image of
``splits.json``, ``{image id: [[word, probability], ...]}``. ``--predict`` writes it again, without training.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from tools import command_parser, files, torch_device
from tools.caption.attributes import AttributeDetector, load_detector, noisy_or, noisy_or_loss, top
from tools.caption.backbones import TimmBackbone
from tools.pictures import BadPicture
from tools.train.attribute_data import Data, Pictures, average_precision, collate, frequent_words, labels

# Options that a resumed training must not change.
FIXED = (
    "backbone", "size", "weights", "no_pretrained", "words", "min_word_count", "skip_words",
    "epochs", "batch_size", "lr", "weight_decay", "shift", "seed",
)  # fmt: skip
TRAINING, VALIDATION = ("train", "restval"), ("val",)


def course(step: int, steps: int) -> float:
    """Return the factor of the learning rate: warm-up over a tenth of all steps, then a cosine decay to 0."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup)))) / 2


class Training:
    """A new or resumed training."""

    def __init__(self, options: argparse.Namespace, data: Data, device: torch.device) -> None:
        self.options, self.device = options, device
        train, captions = data.part(TRAINING)
        val, val_captions = data.part(VALIDATION)
        words = frequent_words(captions, options.words, options.min_word_count, options.skip_words)
        if not words:
            raise ValueError(
                f"no word is left: none of the captions to train on occurs {options.min_word_count} times "
                f"(--min-word-count) and is not skipped"
            )
        torch.manual_seed(options.seed)
        size = (options.size,) * 2 if options.size else None
        backbone = TimmBackbone(options.backbone, size)
        state = self._state()
        if state is None:
            self._first_weights(backbone)
        self.detector = AttributeDetector(backbone, words).to(device)
        targets = labels(captions, words)
        if state is None:
            with torch.no_grad():
                cells = backbone.eval()(torch.zeros(1, 3, *backbone.size, device=device))[0, 0].numel()
            self.detector.start_at(targets.float().mean(0), cells)
        skip = options.skip_invalid_samples
        self.train = Pictures(train, targets, backbone, options.shift, skip)
        self.val = Pictures(val, labels(val_captions, words), backbone, 0.0, skip)
        parameters = list(self.detector.parameters())
        groups: list[dict[str, Any]] = [dict(params=[p for p in parameters if p.ndim > 1])]
        groups.append(dict(params=[p for p in parameters if p.ndim <= 1], weight_decay=0.0))
        self.optimizer = torch.optim.AdamW(groups, options.lr, weight_decay=options.weight_decay)
        factor = partial(course, steps=options.epochs * -(-len(train) // options.batch_size))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        self.rows: list[dict[str, float]] = []
        if state is not None:
            if state["vocabulary"] != words:
                raise ValueError(f"{options.out / 'last.pth'} was trained on other captions: its words differ")
            self.detector.load_state_dict(state["detector"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.schedule.load_state_dict(state["schedule"])
            self.rows = state["rows"]

    def _first_weights(self, backbone: TimmBackbone) -> None:
        if self.options.weights is not None or not self.options.no_pretrained:
            hint = "pass --weights FILE, or --no-pretrained with a small backbone, such as resnet10t"
            backbone.load(self.options.weights, hint)

    def _state(self) -> dict[str, Any] | None:
        """Return the state after the last epoch, or None at the beginning."""
        file = self.options.out / "last.pth"
        if not file.is_file():
            return None
        if not self.options.resume:
            raise ValueError(f"OUT {self.options.out} already holds a training: --resume continues it")
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
            before = json.loads(state["options"])
        except Exception as error:
            raise ValueError(f"{file} cannot be read: {error}") from error
        for name, value in json.loads(_fixed(self.options)).items():
            if (then := before.get(name, build_parser().get_default(name))) != value:
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{file} was trained with {option} {then}, but now it is {value}")
        return state

    def run(self) -> float:
        """Run the remaining epochs; return the best mAP; raise a FloatingPointError if the loss is not finite."""
        frequencies = self.val.targets.float().mean(0)
        chance = frequencies[frequencies > 0].mean().item()
        print(
            f"{len(self.train)} images to train on, {len(self.val)} to validate, {len(self.detector.words)} words; mAP "
            f"of chance {100 * chance:.1f}",
            flush=True,
        )
        for epoch in range(len(self.rows), self.options.epochs):
            began = time.monotonic()
            loss = self._epoch(epoch)
            row = dict(epoch=epoch + 1, loss=loss, **self._validate(), seconds=round(time.monotonic() - began, 1))
            best = max((other["map"] for other in self.rows), default=-1.0)
            self.rows.append(row)
            if row["map"] > best:
                self.detector.save(self.options.out / "best.safetensors", map=row["map"], epoch=epoch + 1)
            self._save()
            print(
                f"epoch {epoch + 1:>3}/{self.options.epochs}  loss {loss:.4f}  val loss {row['val_loss']:.4f}  "
                f"mAP {100 * row['map']:.1f}  {row['seconds']:.0f} s",
                flush=True,
            )
        return max(row["map"] for row in self.rows)

    def _loader(self, pictures: Pictures, order: Sequence[int]) -> Any:
        batch, workers = self.options.batch_size, self.options.workers
        batches = [order[i : i + batch] for i in range(0, len(order), batch)]
        return DataLoader(pictures, batch_sampler=batches, num_workers=workers, collate_fn=collate)  # type: ignore[arg-type]

    def _epoch(self, number: int) -> float:
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + number)
        torch.manual_seed(self.options.seed * 1_000_003 + number)
        self.train.epoch = (self.options.seed, number)
        self.detector.train()
        total, count = 0.0, 0
        for batch in self._loader(self.train, torch.randperm(len(self.train), generator=generator).tolist()):
            if batch is not None:
                loss = noisy_or_loss(self.detector(batch[1].to(self.device)), batch[2].to(self.device))
                if not loss.isfinite():
                    raise FloatingPointError(f"the loss is {loss.item()} in epoch {number + 1}: try a smaller --lr")
                self.optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.detector.parameters(), 5.0)
                self.optimizer.step()
                total, count = total + loss.item() * len(batch[0]), count + len(batch[0])
            self.schedule.step()
        if count == 0:
            raise ValueError("none of the pictures to train on can be read")
        return total / count

    @torch.inference_mode()
    def _validate(self) -> dict[str, float]:
        self.detector.eval()
        scores, targets, losses = [], [], []
        for batch in self._loader(self.val, range(len(self.val))):
            if batch is not None:
                logits = self.detector(batch[1].to(self.device))
                log_p, log_not = noisy_or(logits)
                scores.append((log_p - log_not).cpu().numpy())
                targets.append(batch[2].numpy())
                losses += [noisy_or_loss(logits, batch[2].to(self.device)).item()] * len(batch[0])
        if not scores:
            raise ValueError("none of the pictures to validate can be read")
        precision = average_precision(np.concatenate(scores), np.concatenate(targets))
        if np.isnan(precision).all():
            raise ValueError("the captions to validate have none of the words")
        return dict(val_loss=float(np.mean(losses)), map=float(np.nanmean(precision)))

    def _save(self) -> None:
        state = dict(options=_fixed(self.options), vocabulary=self.detector.words, rows=self.rows)
        for name in ("detector", "optimizer", "schedule"):
            state[name] = getattr(self, name).state_dict()
        files.write(self.options.out / "last.pth", lambda partial: torch.save(state, partial))
        files.write_text(self.options.out / "log.json", json.dumps(self.rows, indent=1) + "\n")


def _fixed(options: argparse.Namespace) -> str:
    return json.dumps({name: getattr(options, name) for name in FIXED}, default=str)


def predict(options: argparse.Namespace, data: Data, device: torch.device) -> int:
    """Write the attributes of all images with the best weights; return how many could not be read."""
    weights = options.out / "best.safetensors"
    detector = load_detector(weights, device)
    if options.backbone_given and options.backbone != detector.backbone.name:
        raise ValueError(f"{weights} holds a {detector.backbone.name}, but --backbone is {options.backbone}")
    none = torch.zeros(len(data.images), 0)
    pictures = Pictures(data.images, none, detector.backbone, 0.0, options.skip_invalid_samples)
    loader: Any = DataLoader(pictures, options.batch_size, num_workers=options.workers, collate_fn=collate)
    attributes: dict[str, list] = {}
    for batch in filter(None, loader):
        for index, own in zip(batch[0].tolist(), detector.log_odds(batch[1].to(device)).cpu()):
            attributes[str(data.images[index].id)] = top(own, detector.words, options.top)
    if not attributes:
        raise ValueError("none of the pictures can be read")
    out = options.attributes or options.data / "attributes.json"
    files.write_text(out, json.dumps(attributes))
    print(f"{out}: {len(attributes)} images, {len(next(iter(attributes.values())))} words each")
    return len(data.images) - len(attributes)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser("train attributes", __doc__)
    option = parser.add_argument
    option("data", type=Path, metavar="DATA")
    option("out", type=Path, metavar="OUT")
    option("--splits", type=Path, metavar="JSON", help="default: DATA/splits.json")
    option("--captions", type=Path, metavar="JSON", help="default: DATA/captions.json, if it is there")
    option("--images", type=Path, metavar="DIR", help="default: DATA/images, else DATA")
    option("--attributes", type=Path, metavar="FILE", help="output file, default: DATA/attributes.json")
    option("--backbone", metavar="NAME", help="model of timm, default resnet50")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--weights", type=Path, metavar="FILE", help="weights of the backbone, instead of timm's")
    weights.add_argument("--no-pretrained", action="store_true", help="train from random weights")
    option("--size", type=int, metavar="PIXELS", help="side of the pictures, default: the backbone's")
    option("--words", type=int, default=1000, help="default %(default)s")
    option("--min-word-count", type=int, default=5, help="default %(default)s")
    option("--skip-words", nargs="*", default=[], metavar="WORD", help="words to exclude from the attributes")
    option("--epochs", type=int, default=20, help="default %(default)s")
    option("--batch-size", type=int, default=32, help="default %(default)s")
    option("--lr", type=float, help="default 0.002 with --no-pretrained, else 0.0002")
    option("--weight-decay", type=float, default=0.05, help="default %(default)s")
    option("--shift", type=float, default=0.1, help="maximum shift relative to a side, default %(default)s")
    option("--workers", type=int, default=0, help="processes that read pictures, default %(default)s")
    option("--device", help="default: cuda where there is one, else cpu")
    option("--seed", type=int, default=0, help="default %(default)s")
    option("--resume", action="store_true", help="continue the training of OUT")
    option("--predict", action="store_true", help="only write the attributes, with OUT/best.safetensors")
    option("--top", type=int, default=20, metavar="WORDS", help="attributes of each image, default %(default)s")
    option("--skip-invalid-samples", action="store_true", help="leave out bad captions and pictures, with a line each")
    return parser


def check(options: argparse.Namespace) -> None:
    """Fill in defaults that depend on other options; raise a ValueError if a value is invalid."""
    for name in ("words", "min_word_count", "epochs", "batch_size", "top"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.size is not None and options.size < 16:
        raise ValueError(f"--size must be at least 16 pixels, got {options.size}")
    if not 0 <= options.shift < 0.5:
        raise ValueError(f"--shift must be from 0 to 0.5, got {options.shift}")
    options.backbone_given = options.backbone is not None
    options.backbone = options.backbone or "resnet50"
    if options.lr is None:
        options.lr = 2e-3 if options.no_pretrained else 2e-4
    if not options.lr > 0:
        raise ValueError(f"--lr must be above 0, got {options.lr}")


def main(arguments: list[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    try:
        check(options)
        device = torch_device(options.device)
        data = Data(options)
        if not options.predict:
            best = Training(options, data, device).run()
            print(f"best mAP {100 * best:.1f}")
        predict(options, data, device)
    except (ValueError, BadPicture, FloatingPointError, OSError) as error:
        message = str(error).strip()
        if isinstance(error, BadPicture):  # a loading process prepends its traceback
            message = message.splitlines()[-1].removeprefix("tools.pictures.BadPicture: ")
        print(f"train attributes: {message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
