"""Train a small timm model to classify images, or a TimeSformer to classify clips, on one device.

::

    python -m tools.train configs/timm/tools_train/clips.yaml --data DIR
    python -m tools.train configs/timm/tools_train/clips.yaml --data DIR --set epochs=30 --set model_args.depth=6

timm's own train.py trains large classifiers, on several devices and with resuming: see configs/timm/README.md.

DIR holds train/CLASS/*.jpg and val/CLASS/*.jpg, with the same classes in both. With dataset=clips it holds videos,
train/CLASS/*.mp4 (or .avi, .m4v, .mkv, .mov, .webm, which OpenCV decodes: python -m attn_plugins install mm), or
folders of frames, train/CLASS/CLIP/*.png. The keys of CONFIG are the fields of tools.train.config.Config, which
documents them; --set changes one.

The folder --output gets log.csv and best.safetensors, the weights of the epoch with the best accuracy on val/, for
timm.create_model(..., checkpoint_path=FILE), tools.view and our mmdet backbone. An earlier training there is
overwritten.
"""

from __future__ import annotations

import csv
import io
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.data import resolve_data_config
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import nn

from attn_plugins.timm import param_groups
from tools import command_parser, torch_device
from tools.files import write_text
from tools.pictures import BadPicture

from .checkpoint import save_weights
from .config import Config, ConfigError, load
from .data import datasets, loader
from .model import create_model


def optimization(config: Config, model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    """Create timm's optimizer and its schedule by updates, of which an epoch has ``steps``."""
    grouping = partial(param_groups, lr=config.lr, weight_decay=config.weight_decay)
    try:
        optimizer = create_optimizer_v2(
            model, config.optimizer, config.lr, config.weight_decay, config.momentum, param_group_fn=grouping
        )
    except ValueError as error:
        raise ConfigError(f"optimizer {config.optimizer!r}: {error}") from error
    warmup = config.warmup * config.epochs
    scheduler, _ = create_scheduler_v2(
        optimizer,
        num_epochs=config.epochs - warmup,  # type: ignore[arg-type]
        warmup_epochs=warmup,  # type: ignore[arg-type]
        warmup_lr=0.0,
        warmup_prefix=True,
        step_on_epochs=False,
        updates_per_epoch=steps,
    )
    return optimizer, scheduler


@torch.inference_mode()
def evaluate(model: nn.Module, batches: Any, device: torch.device) -> dict[str, float]:
    """Compute the mean cross-entropy, and the accuracy in percent."""
    model.eval()
    loss, right, count = 0.0, 0, 0
    for images, labels in batches:
        logits, labels = model(images.to(device)), labels.to(device)
        loss += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
        right += int((logits.argmax(1) == labels).sum())
        count += len(labels)
    return dict(val_loss=loss / count, top1=100 * right / count)


def train(config: Config, data: Path, output: Path, device: torch.device) -> dict[str, float]:
    """Train as configured; return the last row of the log.

    Raises:
        ConfigError: The configuration does not fit the model or the data.
        FloatingPointError: The loss is not finite.
    """
    training, validation, classes = datasets(config, data)
    torch.manual_seed(config.seed)
    model = create_model(config, len(classes)).to(device)
    size = {} if config.input_size is None else dict(input_size=(3, *config.input_size))
    facts = resolve_data_config(size, model=model)
    batches, val_batches = (loader(half, config, facts, half is training) for half in (training, validation))
    optimizer, scheduler = optimization(config, model, len(batches))
    print(
        f"{config.model}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {len(classes)} classes, "
        f"{'×'.join(str(n) for n in facts['input_size'][1:])} pixels; {len(batches.dataset)} + "  # type: ignore[arg-type]
        f"{len(val_batches.dataset)} {'clips' if config.dataset == 'clips' else 'images'}",  # type: ignore[arg-type]
        flush=True,
    )
    rows: list[dict[str, float]] = []
    for epoch in range(config.epochs):
        began, total = time.monotonic(), 0.0
        model.train()
        for step, (images, labels) in enumerate(batches):
            scheduler.step_update(epoch * len(batches) + step)
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            if not loss.isfinite():
                raise FloatingPointError(f"the loss is {loss.item()} at epoch {epoch + 1}, step {step + 1}: reduce lr")
            optimizer.zero_grad()
            loss.backward()
            if config.clip_grad is not None:
                nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
            optimizer.step()
            total += loss.item()
        row = dict(epoch=epoch + 1, train_loss=total / len(batches), **evaluate(model, val_batches, device))
        if not math.isfinite(row["val_loss"]):
            raise FloatingPointError(f"the validation loss is {row['val_loss']} after epoch {epoch + 1}: reduce lr")
        best = max((other["top1"] for other in rows), default=-1.0)
        rows.append(dict(row, seconds=round(time.monotonic() - began, 1)))
        if row["top1"] > best:
            file = output / "best.safetensors"
            save_weights(file, model, config, classes, **row | {k: facts[k] for k in ("mean", "std")},
                         input_size=facts["input_size"][1:])  # fmt: skip
        table = csv.DictWriter(text := io.StringIO(), list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        write_text(output / "log.csv", text.getvalue())
        print(
            f"epoch {epoch + 1}/{config.epochs}: loss {row['train_loss']:.4f}  validation {row['val_loss']:.4f}  "
            f"top-1 {row['top1']:.2f} %  (best {max(best, row['top1']):.2f} %)  {rows[-1]['seconds']:.0f} s",
            flush=True,
        )
    return rows[-1]


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("train", __doc__)
    option = parser.add_argument
    option("config", type=Path, metavar="CONFIG", help="a YAML file, such as those of configs/timm/tools_train")
    option("--data", type=Path, required=True, metavar="DIR", help="folder with train/ and val/")
    text = "set a key of CONFIG, or one inside a key (model_args.nu=0.25); may be repeated"
    option("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    option("--output", type=Path, metavar="DIR", help="default: work_dirs/CONFIG without its suffix")
    option("--device", help="cpu, cuda or cuda:N; default: cuda where there is a GPU, else cpu")
    options = parser.parse_args(arguments)
    try:
        device = torch_device(options.device)
    except ValueError as error:
        parser.error(str(error))
    try:
        output = options.output or Path("work_dirs") / options.config.stem
        train(load(options.config, options.set), options.data, output, device)
    except (ConfigError, BadPicture, FloatingPointError, OSError) as error:
        message = str(error).strip().splitlines()[-1]  # a loading process prepends its traceback
        print(f"train: {message.removeprefix('tools.pictures.BadPicture: ')}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
