"""Train a timm model, one of ours or any other, to classify images, or a TimeSformer to classify clips.

::

    python -m tools.train configs/timm/image_folder.yaml --data DIR
    python -m tools.train configs/timm/image_folder.yaml --data DIR --set input_size=160 --set epochs=30
    python -m tools.train configs/timm/image_folder.yaml --data DIR --resume
    python -m tools.train --data DIR --check
    python -m tools.train CONFIG --data DIR --evaluate work_dirs/CONFIG/best.safetensors
    python -m tools.train attributes DATA OUT                  # the attribute detector: tools.train.attributes
    torchrun --nproc-per-node 8 -m tools.train configs/timm/imagenet_aa_resnet50.yaml --data DIR

DIR holds train/CLASS/*.jpg and val/CLASS/*.jpg (or .jpeg, .png, .webp, .bmp, .tif, .tiff, .ppm, .pgm), with the same
classes in both. With dataset=clips it holds videos, train/CLASS/*.mp4 (or .avi, .m4v, .mkv, .mov, .webm, which OpenCV
decodes: python -m attn_plugins install mm), or folders of frames, train/CLASS/CLIP/*.png. The keys of CONFIG are the
fields of tools.train.config.Config, which documents them; --set changes one. A batch size greater than the
number of training images is reduced to fit, and the learning rate is scaled in proportion; a printed line says so.

The folder --output gets log.csv; best.safetensors and last.safetensors (the weights of the best and of the last epoch,
for timm.create_model(..., checkpoint_path=FILE), tools.view and our mmdet backbone); state.pt, which --resume
needs; and broken.txt, the images that --skip-broken left out.

A resumed training keeps the settings it started with, whatever CONFIG says now; a printed line names the differences.
The command line may change accumulate, clip_grad, channels_last, label_smoothing and workers, and the augmentation of
images and clips (crop, scale, hflip, color_jitter, auto_augment, erasing, mixup, cutmix, frame_sampling) for the
remaining epochs; a printed line says so. Another value of any other setting is an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tools import command_parser, need
from tools.pictures import BadPicture
from tools.train import broken, checkpoint
from tools.train.config import Config, ConfigError, build, read_yaml
from tools.train.data import TrainingLoader, datasets, validation_loader
from tools.train.log import Log
from tools.train.model import create_model, data_config, draw_parameters
from tools.train.place import Place, find_place
from tools.train.state import Settings, State, check_data, read_state, resumed, save_state
from tools.train.trainer import Trainer, evaluate


def check(options: argparse.Namespace) -> int:
    """Print every image that cannot be read, with the reason; return 1 if there is any, else 0."""
    values = {} if options.config is None else read_yaml(options.config)
    config = build({"model": "any", **values}, options.set)
    training, validation, _ = datasets(config, options.data)
    halves = broken.folders([training, validation])
    reasons = broken.find_broken(halves, options.data, config)
    for name, reason in reasons.items():
        print(f"{options.data / name}: {reason}")
    images = sum(len(half) for half in halves)
    print(f"{len(reasons)} of {images} images cannot be read" if reasons else f"all {images} images can be read")
    return int(bool(reasons))


def build_model(config: Config, num_classes: int, place: Place) -> torch.nn.Module:
    """Return the configured model on its device."""
    model = create_model(config, num_classes).to(place.device)
    return model.to(memory_format=torch.channels_last) if config.channels_last else model  # type: ignore[call-overload]


def evaluate_weights(config: Config, options: argparse.Namespace, place: Place) -> None:
    """Print the accuracy of ``--evaluate``'s weights, at their training size unless another one is configured."""
    if config.input_size is None:
        config = dataclasses.replace(config, input_size=checkpoint.trained_size(options.evaluate, "--evaluate"))
    _, validation, classes, _ = read_images(Settings(config, config), options, place)
    model = build_model(config, len(classes), place)
    checkpoint.load_weights(model, options.evaluate, config, classes)
    scores = evaluate(model, validation_loader(validation, config, data_config(config, model), place), place)
    if place.rank == 0:
        print(f"top-1 {scores['top1']:.2f} %  top-5 {scores['top5']:.2f} %  loss {scores['val_loss']:.4f}")


def read_images(settings: Settings, options: argparse.Namespace, place: Place) -> tuple[Any, Any, list[str], list[str]]:
    """Return training images, validation images, the classes' names, and notes to print.

    Broken images are left out if ``--skip-broken`` or the resumed training says so.
    """
    training, validation, classes = datasets(settings.config, options.data)
    if settings.left_out is None and not options.skip_broken:
        return training, validation, classes, []
    halves, notes = broken.folders([training, validation]), list[str]()
    if settings.left_out is None:
        reasons, file = broken.find_broken(halves, options.data, settings.config, place), options.output / "broken.txt"
        settings.left_out = list(reasons)
        if reasons:
            notes = [broken.report(reasons, len(training) + len(validation), file, write=place.rank == 0)]
    elif settings.left_out:
        notes = [f"left out {len(settings.left_out)} broken images, those that the training began without"]
    broken.leave_out(halves, options.data, settings.left_out)
    return training, validation, classes, notes


def fit_batch(settings: Settings, images: int, processes: int, resuming: bool) -> list[str]:
    """Reduce a batch size that is greater than the images of an epoch; return notes to print.

    Raises:
        ConfigError: there are too few images, or fewer than the resumed training had.
    """
    config, fitting = settings.config, settings.config.fitting(images, processes)
    if fitting == config:
        return []
    epoch = images // processes * processes
    if resuming:
        raise ConfigError(f"--resume needs batch_size = {config.batch_size} images in train/ at least, got {epoch}")
    settings.config = fitting
    rate = f", lr {fitting.scaled_lr():.2g} in proportion" if config.lr_batch_size else ""
    return [
        f"batch_size {config.batch_size} is more than the {epoch} images of an epoch: training with batch_size "
        f"{fitting.batch_size}{rate} (--set batch_size=N takes another)"
    ]


def train(settings: Settings, state: State | None, options: argparse.Namespace, place: Place) -> dict[str, float]:
    """Train from the beginning or from ``state``; return the last row of the log."""
    file = options.output / "state.pt"
    training, validation, classes, notes = read_images(settings, options, place)
    notes += fit_batch(settings, len(training), place.processes, state is not None)
    if state is None:
        settings.classes, settings.images = classes, len(training)
    else:
        notes += check_data(settings, file, classes, len(training))
    config = settings.config
    torch.manual_seed(config.seed)
    model = build_model(config, len(classes), place)
    draw_parameters(model, config.init_std)
    if config.init is not None and state is None:
        notes.append(checkpoint.start_from(model, Path(config.init)))
    data = data_config(config, model)
    val_loader = validation_loader(validation, config, data, place)
    trainer = Trainer(config, model, TrainingLoader(training, config, data, place), len(classes), place)
    first, best = 0, -1.0
    if state is not None:
        state.restore(trainer.parts(), file)
        first, best = state.epoch, state.best
    log = Log(options.output, options.tensorboard, state.rows if state else [], silent=place.rank != 0)
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    size = "×".join(str(n) for n in data["input_size"][1:])
    what = "clips" if config.dataset == "clips" else "images"
    notes.append(
        f"{config.model}: {parameters:.2f} M parameters, {len(classes)} classes, {size} pixels; "
        f"{len(training)} + {len(validation)} {what}"
    )
    if first >= config.epochs:
        notes.append(f"nothing is left to train: {first} of {config.epochs} epochs are done")
    for note in notes:
        log.say(note)
    for epoch in range(first, config.epochs):
        began = time.monotonic()
        row = dict(epoch=epoch + 1, **trainer.train_epoch(epoch, log))
        row.update(evaluate(trainer.result(), val_loader, place), seconds=round(time.monotonic() - began, 1))
        log.row(**row)
        better = row["top1"] > best
        best = max(best, row["top1"])
        log.say(
            f"epoch {epoch + 1}/{config.epochs}: loss {row['train_loss']:.4f}  validation {row['val_loss']:.4f}  "
            f"top-1 {row['top1']:.2f} %  (best {best:.2f} %)  {row['seconds']:.0f} s"
        )
        if place.rank == 0:
            for name in ["last"] + ["best"] * better:
                checkpoint.save_weights(
                    options.output / f"{name}.safetensors", trainer.result(), config, classes, epoch=epoch + 1,
                    top1=row["top1"], input_size=data["input_size"][1:], mean=data["mean"], std=data["std"],
                )  # fmt: skip
            # Written last: a training interrupted before this line repeats the epoch.
            save_state(file, State(settings, epoch + 1, best, log.rows), trainer.parts())
    log.close()
    return log.rows[-1]


def begin(options: argparse.Namespace) -> tuple[Settings, State | None]:
    """Return the settings of the command line, or those of the training to ``--resume`` with its state.

    Set ``options.output`` where it is not given.

    Raises:
        ConfigError: a setting is invalid.
    """
    more = dict(model=options.model, epochs=options.epochs, batch_size=options.batch_size, lr=options.lr)
    if options.resume:
        if options.output is None:
            if not (options.config or options.model):
                raise ConfigError("--resume needs the training's folder: name it by --output, or name its CONFIG")
            options.output = Path("work_dirs") / Path(options.config or options.model).stem
        state = read_state(options.output / "state.pt")
        state.settings.config, notes = resumed(state.settings, options.output, options.config, options.set, **more)
        if int(os.environ.get("RANK", "0")) == 0:
            print("\n".join(notes), end="\n" * bool(notes), flush=True)
        return state.settings, state
    values = {} if options.config is None else read_yaml(options.config)
    config = build(values, options.set, **more)
    options.output = options.output or Path("work_dirs") / (options.config or Path(config.model)).stem
    if options.evaluate is None and (options.output / "state.pt").exists():
        raise ConfigError(f"--output {options.output} holds a training already: add --resume, or name another")
    return Settings(config, config, None if options.config is None else values), None


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser("train", __doc__)
    option = parser.add_argument
    option("config", nargs="?", type=Path, metavar="CONFIG", help="a YAML file, such as those of configs/timm")
    option("--data", type=Path, required=True, metavar="DIR", help="folder with train/ and val/")
    option("--model", metavar="NAME", help="timm's name of the model, instead of CONFIG's")
    option("--epochs", type=int, metavar="N", help="the same as --set epochs=N")
    option("--batch-size", type=int, metavar="N", help="the same as --set batch_size=N")
    option("--lr", type=float, help="the same as --set lr=LR")
    text = "set a key of CONFIG, or one inside a key (model_args.nu=0.25); may be repeated"
    option("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    text = "default: work_dirs/CONFIG without its suffix, else work_dirs/MODEL"
    option("--output", type=Path, metavar="DIR", help=text)
    task = parser.add_mutually_exclusive_group().add_argument
    text = "continue the training of --output after its last whole epoch, with the settings it began with"
    task("--resume", action="store_true", help=text)
    text = "only evaluate these weights (.safetensors) on val/, at their training size unless another is configured"
    task("--evaluate", type=Path, metavar="FILE", help=text)
    text = "only read all images and print the broken ones with their reasons; exit status 1 if there are any"
    task("--check", action="store_true", help=text)
    text = "read all images first, leave the broken ones out and list them in broken.txt"
    option("--skip-broken", action="store_true", help=text)
    option("--tensorboard", action="store_true", help="also write TensorBoard's files, to --output/tensorboard")
    option("--device", help="cpu, cuda or cuda:N; default: cuda where there is a GPU, else cpu")
    return parser


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["attributes"]:
        from tools.train import attributes

        return attributes.main(arguments[1:])
    options = build_parser().parse_args(arguments)
    if options.tensorboard:
        need("tensorboard")
    try:
        if options.check:
            return check(options)
        settings, state = begin(options)
        place = find_place(options.device, settings.config)
        if options.evaluate is None:
            train(settings, state, options, place)
        else:
            evaluate_weights(settings.config, options, place)
    except (ConfigError, BadPicture, FloatingPointError) as error:
        message = str(error).strip()
        if isinstance(error, BadPicture):  # a loading process prepends its traceback
            message = message.splitlines()[-1].removeprefix("tools.pictures.BadPicture: ")
            message += "; --check lists every broken image, --skip-broken trains without them"
        print(f"train: {' '.join(message.split())}", file=sys.stderr)
        return 2
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
