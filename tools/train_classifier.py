"""Train a timm model, ours or any other, to classify images.

::

    python -m tools.train_classifier configs/timm/aa_resnet50_imagenet.yaml --data DIR
    torchrun --nproc-per-node 8 -m tools.train_classifier CONFIG --data DIR
    python -m tools.train_classifier CONFIG --data DIR --set epochs=30 --set model_args.nu=0.25
    python -m tools.train_classifier CONFIG --data DIR --resume
    python -m tools.train_classifier CONFIG --data DIR --evaluate work_dirs/…/best.safetensors

DIR holds ``train/CLASS/*.png`` and ``val/CLASS/*.png``; the number of classes is that of the folders. Every key of
CONFIG is a field of ``tools.classification.config.Config`` and may be set on the command line. Written into
``--output``: ``log.csv``, ``best.safetensors`` and ``last.safetensors`` (weights, for ``timm.create_model(...,
checkpoint_path=...)`` and our mmdet backbone), ``state.pt`` (what ``--resume`` needs).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import Mixup, resolve_data_config
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from timm.utils.distributed import distribute_bn, init_distributed_device_so
from torch import nn

from attn_plugins.timm import param_groups
from tools.classification import checkpoint
from tools.classification.config import Config, ConfigError, load
from tools.classification.data import (
    TrainingLoader,
    Transformed,
    datasets,
    training_transform,
    validation_loader,
    validation_transform,
)
from tools.classification.log import Log
from tools.pictures import BadPicture


@dataclass
class Place:
    """Where a process computes: its device, its rank, and how many there are."""

    device: torch.device
    rank: int
    processes: int
    dtype: torch.dtype | None

    def autocast(self) -> Any:
        """The context in which the model runs."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Added over all processes."""
        if self.processes > 1:
            torch.distributed.all_reduce(values)
        return values


def create_model(config: Config, num_classes: int) -> nn.Module:
    """The configured model."""
    options = dict(config.model_args)
    if options.get("in_chans", 3) != 3:
        raise ConfigError(f"model_args.in_chans must be 3, for images are read in RGB, got {options['in_chans']!r}")
    if config.model.startswith("aa_") and config.input_size is not None:
        options.setdefault("img_size", config.input_size)  # tables of relative positions for these images
    if not timm.is_model(config.model):
        near = timm.list_models(f"*{config.model.split('_')[0]}*")[:5]
        raise ConfigError(
            f"model {config.model!r} is not one of timm's" + (f": near are {', '.join(near)}" * bool(near))
        )
    try:
        return timm.create_model(config.model, num_classes=num_classes, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model {config.model} with {options}: {error}") from error


def data_config(config: Config, model: nn.Module) -> dict[str, Any]:
    """timm's data configuration of the model, at the configured size."""
    size = {} if config.input_size is None else dict(input_size=(3, *config.input_size))
    return resolve_data_config(size, model=model)


def create_scheduler(config: Config, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """timm's schedule of the learning rate, by optimizer steps."""
    warmup = config.warmup * config.epochs
    cosine = config.schedule == "cosine"  # from its full height after the warm-up; the others count from epoch 0
    scheduler, _ = create_scheduler_v2(
        optimizer,
        {"cosine": "cosine", "multistep": "multistep", "exponential": "step"}[config.schedule],
        num_epochs=config.epochs - warmup if cosine else config.epochs,  # type: ignore[arg-type]
        warmup_epochs=warmup,  # type: ignore[arg-type]
        warmup_lr=0.0,
        warmup_prefix=cosine,
        decay_epochs=config.decay_epochs,
        decay_milestones=list(config.milestones),
        decay_rate=config.decay_rate,
        step_on_epochs=False,
        updates_per_epoch=steps,
    )
    return scheduler


@torch.inference_mode()
def evaluate(model: nn.Module, loader: Any, place: Place) -> dict[str, float]:
    """Cross-entropy, and the shares of images (in percent) whose class is the first, or among the first five."""
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=place.device)
    for images, labels in loader:
        images, labels = images.to(place.device, non_blocking=True), labels.to(place.device, non_blocking=True)
        with place.autocast():
            logits = model(images)
        logits = logits.float()
        ranked = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        sums += torch.stack([loss.double(), ranked[:, 0].sum(), ranked.sum(), labels.new_tensor(len(labels))])
    loss, first, five, images = place.sum(sums).tolist()
    return dict(val_loss=loss / images, top1=100 * first / images, top5=100 * five / images)


class Trainer:
    """One training, an epoch at a time."""

    def __init__(self, config: Config, model: nn.Module, loader: TrainingLoader, num_classes: int, place: Place):
        self.config, self.model, self.loader, self.place = config, model, loader, place
        lr = config.scaled_lr()
        self.optimizer = create_optimizer_v2(
            model,
            config.optimizer,
            lr=lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            param_group_fn=partial(
                param_groups, lr=lr, offset_lr_scale=config.offset_lr_scale, weight_decay=config.weight_decay
            ),
            **config.optimizer_args,
        )
        self.scheduler = create_scheduler(config, self.optimizer, loader.steps)
        self.scaler = torch.amp.GradScaler(place.device.type, enabled=config.precision == "float16")
        self.ema = None if config.ema is None else ModelEmaV3(model, config.ema, use_warmup=True)
        self.mixup = None
        if config.mixup or config.cutmix:
            self.mixup = Mixup(
                config.mixup, config.cutmix, label_smoothing=config.label_smoothing, num_classes=num_classes
            )
            self.loss: nn.Module = SoftTargetCrossEntropy()
        elif config.label_smoothing:
            self.loss = LabelSmoothingCrossEntropy(config.label_smoothing)
        else:
            self.loss = nn.CrossEntropyLoss()
        self.parallel = model
        if place.processes > 1:
            ids = [place.device.index] if place.device.type == "cuda" else None
            self.parallel = nn.parallel.DistributedDataParallel(model, device_ids=ids)

    def parts(self) -> dict[str, Any]:
        """What a resumed training takes up."""
        return dict(model=self.model, ema=self.ema, optimizer=self.optimizer, scaler=self.scaler)

    def result(self) -> nn.Module:
        """The weights to evaluate and to keep."""
        return self.model if self.ema is None else self.ema.module

    def train_epoch(self, number: int, log: Log) -> dict[str, float]:
        """Train an epoch; its mean loss and last learning rate."""
        config, place, steps = self.config, self.place, self.loader.steps
        self.parallel.train()
        total, began = torch.zeros((), dtype=torch.float64, device=place.device), time.monotonic()
        rate = 0.0
        for i, (images, labels) in enumerate(self.loader.epoch(number)):
            step, part = divmod(i, config.accumulate)
            update = number * steps + step
            last = part + 1 == config.accumulate
            if part == 0:
                self.scheduler.step_update(update)
                self.optimizer.zero_grad()
                rate = max(group["lr"] for group in self.optimizer.param_groups)
            images, labels = images.to(place.device, non_blocking=True), labels.to(place.device, non_blocking=True)
            if config.channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
            if self.mixup is not None:
                images, labels = self.mixup(images, labels)
            waiting = place.processes > 1 and not last
            with self.parallel.no_sync() if waiting else contextlib.nullcontext():  # type: ignore[operator]
                with place.autocast():
                    loss = self.loss(self.parallel(images), labels)
                if not math.isfinite(float(loss.detach())):
                    raise FloatingPointError(
                        f"the loss is {float(loss.detach())} at epoch {number + 1}, step {step + 1}: the last whole "
                        "epoch is kept; a lower lr, a longer warmup or clip_grad may help"
                    )
                self.scaler.scale(loss / config.accumulate).backward()
            total += loss.detach().double()
            if not last:
                continue
            if config.clip_grad is not None:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_grad)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.ema is not None:
                self.ema.update(self.model, step=update)
            speed = (step + 1) * config.batch_size / (time.monotonic() - began)
            log.progress(number, config.epochs, step, steps, float(loss.detach()), rate, speed)
        if place.processes > 1:  # running statistics of all processes' images, the same everywhere
            for model in [self.model] if self.ema is None else [self.model, self.ema.module]:
                distribute_bn(model, place.processes, reduce=True)
        mean = place.sum(total) / (steps * config.accumulate * place.processes)
        return dict(lr=rate, train_loss=float(mean))


def train(config: Config, options: argparse.Namespace, place: Place) -> dict[str, float]:
    """Train, or evaluate where asked; the last row of the log."""
    training, validation, classes = datasets(config, options.data)
    if place.device.type == "cpu" and config.precision == "float16":
        raise ConfigError("precision 'float16' needs a GPU, for its gradients are scaled; on a CPU take 'bfloat16'")
    torch.manual_seed(config.seed)
    model = create_model(config, len(classes)).to(place.device)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    data, pin = data_config(config, model), place.device.type == "cuda"
    val_loader = validation_loader(
        Transformed(validation, validation_transform(config, data)), config, place.rank, place.processes, pin
    )
    if options.evaluate is not None:
        checkpoint.load_weights(model, options.evaluate, config)
        found = evaluate(model, val_loader, place)
        if place.rank == 0:
            print(f"top-1 {found['top1']:.2f} %  top-5 {found['top5']:.2f} %  loss {found['val_loss']:.4f}")
        return found
    loader = TrainingLoader(
        Transformed(training, training_transform(config, data)), config, place.rank, place.processes, pin
    )
    trainer = Trainer(config, model, loader, len(classes), place)
    state, first, best, rows = options.output / "state.pt", 0, -1.0, []
    if state.exists():
        if not options.resume:
            raise ConfigError(f"--output {options.output} holds a training already: add --resume, or name another")
        first, best, rows = checkpoint.load_state(state, config, trainer.parts())
    log = Log(options.output, options.tensorboard, rows, silent=place.rank != 0)
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    size = "×".join(str(n) for n in data["input_size"][1:])
    log.say(
        f"{config.model}: {parameters:.2f} M parameters, {len(classes)} classes, {size} pixels; "
        f"{len(training)} + {len(validation)} images"  # type: ignore[arg-type]
    )
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
                    options.output / f"{name}.safetensors", trainer.result(), config, classes,
                    epoch=epoch + 1, top1=row["top1"], mean=data["mean"], std=data["std"],
                )  # fmt: skip
            # Last: what was interrupted before this repeats the epoch.
            checkpoint.save_state(state, config, epoch + 1, best, trainer.parts(), log.rows)
    log.close()
    return log.rows[-1]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.train_classifier",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="a YAML file, such as configs/timm/*")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder with train/ and val/")
    parser.add_argument("--model", help="timm's name of the model")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the configuration")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: work_dirs/ and CONFIG's or model's name")
    parser.add_argument("--resume", action="store_true", help="go on where --output's training stopped")
    parser.add_argument("--evaluate", type=Path, metavar="FILE", help="only evaluate these weights")
    parser.add_argument("--tensorboard", action="store_true", help="write TensorBoard's files as well")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    options = parser.parse_args(arguments)
    torch_device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        config = load(
            options.config, options.set, model=options.model, epochs=options.epochs, batch_size=options.batch_size,
            lr=options.lr,
        )  # fmt: skip
        options.output = options.output or Path("work_dirs") / (options.config or Path(config.model)).stem
        where = init_distributed_device_so(torch_device)
        dtype = None if config.precision == "float32" else getattr(torch, config.precision)
        place = Place(torch.device(where["device"]), where["global_rank"], where["world_size"], dtype)
        train(config, options, place)
    except (ConfigError, BadPicture, FloatingPointError) as error:
        message = str(error).strip()
        if isinstance(error, BadPicture):  # a loading process prepends its traceback
            message = message.splitlines()[-1].removeprefix("tools.pictures.BadPicture: ")
        print(f"train_classifier: {message}", file=sys.stderr)
        return 2
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
