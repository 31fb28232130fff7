"""Training of a classifier by epochs, with timm's optimizers, schedules, losses and weight averaging."""

from __future__ import annotations

import contextlib
import math
import time
from functools import partial
from typing import Any

import torch
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from timm.utils.distributed import distribute_bn
from torch import nn

from attn_plugins.timm import param_groups

from .config import Config, ConfigError
from .data import TrainingLoader
from .log import Log
from .place import Place


def create_scheduler(config: Config, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Create timm's learning rate schedule, by optimizer steps."""
    warmup = config.warmup * config.epochs
    cosine = config.schedule == "cosine"  # starts at its full value after the warm-up; the others count from epoch 0
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
    """Compute cross-entropy, top-1 and top-5 accuracy in percent."""
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
    """Training of a classifier by epochs."""

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
            if config.share(place.processes) % 2:
                raise ConfigError(
                    "batch_size / processes / accumulate must be even for mixup and cutmix, got "
                    f"{config.share(place.processes)}"
                )
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
        """Return the objects whose states a resumed training restores."""
        return dict(model=self.model, ema=self.ema, optimizer=self.optimizer, scaler=self.scaler)

    def result(self) -> nn.Module:
        """Return the model with the weights to evaluate and to save."""
        return self.model if self.ema is None else self.ema.module

    def train_epoch(self, number: int, log: Log) -> dict[str, float]:
        """Train an epoch; return its mean loss and last learning rate."""
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
        if place.processes > 1:  # average running statistics over all processes
            for model in [self.model] if self.ema is None else [self.model, self.ema.module]:
                distribute_bn(model, place.processes, reduce=True)
        mean = place.sum(total) / (steps * config.accumulate * place.processes)
        return dict(lr=rate, train_loss=float(mean))
