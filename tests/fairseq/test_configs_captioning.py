"""The recipes in configs/fairseq/captioning: both stages train, the second from the first, and generate captions."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.fairseq.fairseq_helpers import ROOT

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils, tasks
from fairseq.optim import build_optimizer
from fairseq.optim.lr_scheduler import build_lr_scheduler

from attn_plugins.fairseq.eta_transformer import EtaTransformerModel
from attn_plugins.fairseq.self_critical import SelfCriticalCriterion
from tests.fairseq.captioning_helpers import SIZES, write_images
from tests.fairseq.recipe_helpers import check_keys
from tests.fairseq.recipe_helpers import composed as composed_of
from tests.fairseq.recipe_helpers import hydra_main as hydra_main_of

CONFIGS = ROOT / "configs/fairseq/captioning"
hydra_main, composed = partial(hydra_main_of, CONFIGS), partial(composed_of, CONFIGS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_images(tmp_path_factory.mktemp("set"))


@pytest.mark.parametrize("model", SIZES)
def test_both_stages_train_and_make_captions(model, folder, tmp_path):
    """Only the model, its sizes and the length change: one update per stage."""
    run = ["common.cpu=true", "dataset.num_workers=0", "++optimization.max_update=1", f"task.data={folder}"]
    run += ["++task.min_word_count=1", "dataset.batch_size=8"]
    run += [f"model._name={model}", *(f"++model.{name}={size}" for name, size in SIZES[model].items())]
    hydra_main("coco", *run, f"checkpoint.save_dir={tmp_path / 'one'}")
    first = f"checkpoint.finetune_from_model={tmp_path / 'one/checkpoint_best.pt'}"
    hydra_main("coco_self_critical", *run, f"checkpoint.save_dir={tmp_path / 'two'}", first)
    states = []
    for stage in ("one", "two"):
        path = str(tmp_path / stage / "checkpoint_last.pt")
        [model], _, task = checkpoint_utils.load_model_ensemble_and_task([path])
        states.append(checkpoint_utils.load_checkpoint_to_cpu(path))
        assert states[-1]["optimizer_history"][-1]["num_updates"] == 1
        task.load_dataset("test")
        sample = next(iter(task.get_batch_iterator(task.dataset("test"), max_sentences=4).next_epoch_itr()))
        search = states[-1]["cfg"].generation
        search.max_len_b = 10  # after one update, no caption ends by itself
        generator = task.build_generator([model], search)
        assert all(own[0]["score"].isfinite() for own in task.inference_step(generator, [model], sample))
    loss, reward = (state["extra_state"]["best"] for state in states)
    assert loss == states[0]["extra_state"]["val_loss"] > 0
    assert 0 <= reward == states[1]["extra_state"]["val_loss"] <= 10  # CIDEr-D
    begun, ended = (torch.cat([x.flatten() for x in state["model"].values()]) for state in states)
    rate = states[1]["cfg"].optimization.lr[0]
    assert 0 < (ended - begun).abs().max() < 1.1 * rate  # one step of Adam from where the first stage ended


@pytest.mark.parametrize("recipe", ["coco", "coco_self_critical"])
def test_the_thesis_sizes_and_schedule(recipe, folder):
    """The recipes at full size, overriding only the folder."""
    cfg = composed(recipe, f"task.data={folder}")
    check_keys(cfg)
    with torch.device("meta"):
        task = tasks.setup_task(cfg.task)
        model = task.build_model(cfg.model)
    assert isinstance(model, EtaTransformerModel)
    for layers in (model.encoder.blocks.visual.layers, model.encoder.blocks.semantic.layers, model.decoder.blocks):
        assert len(layers) == 6
        assert "2048" in str(layers)
    assert model.decoder.embed_tokens.weight.shape[1] == 512
    assert model.decoder.blocks[0].self_attention.attention.num_heads == 8
    assert model.decoder.embed_tokens is model.encoder.embed_tokens
    assert (cfg.dataset.batch_size, cfg.optimizer.adam_betas, cfg.task.min_word_count) == (75, "(0.9, 0.98)", 5)
    assert cfg.model.dropout == 0.1
    if recipe == "coco":
        assert (cfg.criterion._name, cfg.criterion.label_smoothing) == ("label_smoothed_cross_entropy", 0.1)
        optimizer = build_optimizer(cfg.optimizer, [torch.nn.Parameter(torch.zeros(1))])
        schedule = build_lr_scheduler(cfg.lr_scheduler, optimizer)
        for n in (1, 10, 19_999, 20_000, 20_001, 300_000):
            assert schedule.step_update(n) == pytest.approx(512**-0.5 * min(n**-0.5, n * 20_000**-1.5), rel=1e-9)
    else:
        assert cfg.criterion._name == "self_critical"
        assert isinstance(task.build_criterion(cfg.criterion), SelfCriticalCriterion)
        assert (cfg.criterion.baseline, cfg.criterion.samples) == ("greedy", 1)
