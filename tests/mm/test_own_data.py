"""The configs of the pages on mmdet and on your own data: toolkits build their models and data sets."""

from __future__ import annotations

import re
import subprocess
import sys
from ast import literal_eval
from typing import Any

import numpy as np
import pytest
from mmdet.registry import MODELS as DETECTORS
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmseg.registry import DATASETS, MODELS
from PIL import Image

from attn_plugins import modules
from tests.mm.mm_helpers import ROOT, without_downloads

PAGE = (ROOT / "docs/howto/own-data.md").read_text()


@pytest.fixture
def config(request, tmp_path, monkeypatch) -> Any:
    """Return the page's config with the base of a toolkit, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (text,) = (text for text in blocks if f'_base_ = "{request.param}::' in text)
    (tmp_path / "config.py").write_text(text)
    config = Config.fromfile("config.py")
    init_default_scope(request.param)
    return without_downloads(config)


@pytest.mark.parametrize("config", ["mmdet"], indirect=True)
def test_a_detector(config):
    model = DETECTORS.build(config.model)
    names = {type(module).__name__ for module in model.modules()}
    assert names >= {"DeformableConv2d", "GeneralizedAttention2d"}
    assert model.roi_head.bbox_head.num_classes == 2
    assert config.optim_wrapper.paramwise_cfg.custom_keys == dict(conv_offset=dict(lr_mult=0.1))


@pytest.mark.parametrize("config", ["mmseg"], indirect=True)
def test_a_segmentor(config, tmp_path):
    for split in ("train", "val"):
        for kind, suffix, shape in (("images", "jpg", (60, 80, 3)), ("labels", "png", (60, 80))):
            folder = tmp_path / "data/roads" / kind / split
            folder.mkdir(parents=True)
            Image.fromarray(np.ones(shape, "uint8")).save(folder / f"a.{suffix}")
    for split, loader in (("train", config.train_dataloader), ("val", config.val_dataloader)):
        data = DATASETS.build(loader.dataset)
        assert data.metainfo["classes"] == ("background", "road")
        sample = data[0]["data_samples"]
        assert f"images/{split}" in sample.img_path
        assert set(sample.gt_sem_seg.data.unique().tolist()) <= {1, 255}
    assert config.test_dataloader == config.val_dataloader
    model = MODELS.build(config.model)
    assert isinstance(model.decode_head.attention, modules.BilateralCrissCross2d)
    assert model.decode_head.num_classes == model.auxiliary_head.num_classes == 2


BUILD = """
import sys
from collections import Counter
import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope
from attn_plugins.replacement import stock_of
from tests.mm.mm_helpers import without_downloads

init_default_scope("mmdet")
for file in sys.argv[1:]:
    with torch.device("meta"):
        model = MODELS.build(without_downloads(Config.fromfile(file)).model)
    names = (type(m).__name__ for m in model.modules() if type(m).__module__.startswith("attn_plugins.")
             or stock_of(type(m).forward) is not type(m).forward)
    print(sorted(Counter(names).items()))
"""


@pytest.mark.slow
def test_the_blocks_of_the_mmdet_page(tmp_path):
    """In a process of their own, since the second one replaces mmcv's layers."""
    page, files = (ROOT / "docs/start/mmdet.md").read_text(), []
    for number, text in enumerate(re.findall(r"```python\n(.*?)```", page, re.S)):
        files.append(tmp_path / f"{number}.py")
        files[-1].write_text(text)
    command = [sys.executable, "-c", BUILD, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    recommended, drop_in, attended = [dict(literal_eval(line)) for line in done.stdout.splitlines() if line[0] == "["]
    assert recommended.items() >= dict(DeformableConv2d=9, GeneralizedAttention2d=9).items()
    assert drop_in == dict(DeformConv2dPack=13, GeneralizedAttention=9)
    assert attended["TokenAttention"] == 6  # beside mmcv's layers under the drop-in
