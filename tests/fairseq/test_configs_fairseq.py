"""The recipes in configs/fairseq: fairseq-hydra-train reads them, and at small widths they train and translate."""

from __future__ import annotations

import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fairseq.fairseq_helpers import ROOT, fairseq

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils, tasks
from fairseq.models import ARCH_CONFIG_REGISTRY

from attn_plugins.fairseq.spatial_transformer_options import SpatialTransformerConfig, checked
from tests.fairseq.recipe_helpers import (
    by_command_line,
    check_keys,
    check_overrides,
    one_line_commands,
    table_overrides,
)
from tests.fairseq.recipe_helpers import composed as composed_of
from tests.fairseq.recipe_helpers import hydra_main as hydra_main_of

CONFIGS = ROOT / "configs/fairseq"
RECIPES = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem != "shared")
ATTENTIONS = sorted(path.stem for path in CONFIGS.glob("attention/*.yaml"))
SMALL = ["embed_dim=16", "ffn_embed_dim=16", "attention_heads=2", "layers=2"]
README = (CONFIGS / "README.md").read_text(encoding="utf-8")
hydra_main, composed = partial(hydra_main_of, CONFIGS), partial(composed_of, CONFIGS)


def small(data: Path, folder: Path) -> list[str]:
    """Return overrides that only make a recipe small."""
    sizes = [f"++model.{side}_{size}" for side in ("encoder", "decoder") for size in SMALL]
    run = ["common.cpu=true", "dataset.num_workers=0", "dataset.max_tokens=400", "optimization.max_update=1"]
    return [*sizes, *run, f"task.data={data}", f"checkpoint.save_dir={folder}"]


def trained(folder: Path) -> tuple[dict[str, Any], Any, Any]:
    """Return the configuration, model and task of the checkpoint after one update."""
    path = str(folder / "checkpoint_last.pt")
    [model], _, task = checkpoint_utils.load_model_ensemble_and_task([path])
    state = checkpoint_utils.load_checkpoint_to_cpu(path)
    assert state["optimizer_history"][-1]["num_updates"] == 1
    return state["cfg"], model, task


@pytest.mark.parametrize(
    "recipe, attention",
    [(recipe, None) for recipe in RECIPES if recipe != "gettext"]
    + [("gettext", attention) for attention in ATTENTIONS],
)
def test_every_recipe_trains_and_translates(recipe, attention, joined, tmp_path):
    hydra_main(recipe, *small(joined, tmp_path), *([] if attention is None else [f"attention={attention}"]))
    cfg, model, task = trained(tmp_path)
    schedule = "cosine" if recipe.endswith("_big") else "inverse_sqrt"
    assert (cfg.criterion.label_smoothing, cfg.lr_scheduler._name) == (0.1, schedule)
    assert model.encoder.embed_tokens.weight is model.decoder.output_projection.weight  # joined dictionary
    source = task.source_dictionary.encode_line("the cat", append_eos=True, add_if_not_exist=False).long()
    sample = {"net_input": {"src_tokens": source[None], "src_lengths": torch.tensor([len(source)])}}
    hypotheses = task.build_generator([model], cfg.generation).generate([model], sample)
    assert hypotheses[0][0]["score"].isfinite()


PAPERS = {
    "wmt14_en_de": {
        "model": {"layers": 6, "embed_dim": 512, "ffn": 2048, "heads": 8, "kind": "MultiheadSpatialAttention"},
        "optimization": {"max_update": 100_000, "lr": [0.001], "clip_norm": 0},
        "optimizer": {"adam_betas": "(0.9, 0.98)", "adam_eps": 1e-9, "weight_decay": 0},
        "lr_scheduler": {"warmup_updates": 4000, "warmup_init_lr": 1e-7},
        "dataset": {"max_tokens": 30_000 // 8},
        "checkpoint": {"save_dir": "checkpoints/wmt14_en_de_relative"},
    },
    "iwslt14_de_en": {
        "model": {"layers": 6, "embed_dim": 512, "ffn": 1024, "heads": 4, "kind": "BilateralSelfAttention"},
        "optimization": {"max_update": 50_000, "lr": [0.0005], "clip_norm": 0},
        "optimizer": {"adam_betas": "(0.9, 0.98)", "weight_decay": 1e-4},
        "lr_scheduler": {"warmup_updates": 4000, "warmup_init_lr": 1e-7},
        "dataset": {"max_tokens": 4000},
        "checkpoint": {"save_dir": "checkpoints/iwslt14_de_en_bilateral"},
    },
}
BIG = {
    "model": {"layers": 6, "embed_dim": 1024, "ffn": 4096, "heads": 16, "kind": "BilateralSelfAttention"},
    "optimizer": {"adam_betas": "(0.9, 0.98)", "weight_decay": 0},
    "dataset": {"max_tokens": 3584},
}
for corpus, last in ("wmt14_en_de", 30_000), ("wmt14_en_fr", 80_000):  # one period after a warm-up of 10,000 updates
    PAPERS[f"{corpus}_big"] = {
        **BIG,
        "optimization": {"max_update": last, "lr": [0.001], "update_freq": [16], "clip_norm": 0},
        "lr_scheduler": {"_name": "cosine", "warmup_updates": 10_000, "lr_period_updates": last - 10_000},
        "checkpoint": {"save_dir": f"checkpoints/{corpus}_big_bilateral"},
    }


@pytest.mark.parametrize("recipe", PAPERS)
def test_the_papers_sizes_and_schedules(recipe, joined, tmp_path):
    """The recipes at full size, overriding only the folders."""
    cfg = composed(recipe, f"task.data={joined}")
    with torch.device("meta"):
        model = tasks.setup_task(cfg.task).build_model(cfg.model)
    for part in model.encoder, model.decoder:
        layer = part.layers[-1]
        found = {"layers": len(part.layers), "embed_dim": part.embed_tokens.weight.shape[1]}
        found |= {"ffn": layer.fc1.out_features, "heads": layer.self_attn.num_heads}
        assert {**found, "kind": type(layer.self_attn.attention).__name__} == PAPERS[recipe]["model"]
    check_keys(cfg)
    for part, values in PAPERS[recipe].items():
        if part != "model":
            assert {name: cfg[part][name] for name in values} == values


SAME = {
    "checkpoint": ["save_dir", "keep_last_epochs", "no_epoch_checkpoints"],
    "dataset": ["max_tokens"],
    "common": ["cpu", "user_dir", "fp16"],
}


def test_every_recipe_is_given_as_one_command():
    assert len(one_line_commands(README)) == len(RECIPES)


@pytest.mark.parametrize("command", one_line_commands(README))
def test_the_one_line_commands_are_the_recipes(command, joined):
    words = shlex.split(command)[1:]
    recipe, _, attention = Path(words[words.index("--save-dir") + 1]).name.rpartition("_")
    cfg = composed(recipe, f"task.data={joined}", f"attention={attention}")
    line = by_command_line(words)
    for node in "criterion", "optimizer", "lr_scheduler", "optimization":
        assert dict(line[node]) == dict(cfg[node])
    for node, names in SAME.items():
        assert {name: line[node][name] for name in names} == {name: cfg[node][name] for name in names}
    ARCH_CONFIG_REGISTRY[cfg.model._name](cfg.model)
    models = [vars(checked(each.model, SpatialTransformerConfig)) for each in (line, cfg)]
    assert models[0] == models[1]


def documented() -> list[Any]:
    """Return the README's overrides by recipe. Among rows that differ only in numbers, all but one are marked slow."""
    found, kinds = [], set()
    for section in re.split(r"^## ", README, flags=re.M):
        recipe = re.search(r"--config-name (\w+)", section)
        for row in table_overrides(section):
            kind = (recipe[1], re.sub(r"\d+|zero|min|learned", "", row))
            found.append(pytest.param(recipe[1], row, marks=[pytest.mark.slow] if kind in kinds else []))
            kinds.add(kind)
    return found


@pytest.mark.parametrize("recipe, overrides", documented())
def test_every_setting_of_the_readme_builds(recipe, overrides, joined, tmp_path):
    cfg = composed(recipe, f"task.data={joined}", *shlex.split(overrides))
    check_overrides(cfg, overrides)
    with torch.device("meta"):
        tasks.setup_task(cfg.task).build_model(cfg.model)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_positions_are_the_papers(attention, joined):
    """Zhu et al. (2019) drop absolute positions, even if no relative term is used; the thesis keeps them."""
    cfg = composed("wmt14_en_de", f"task.data={joined}", f"attention={attention}")
    positions = "absolute" if attention in ("content", "bilateral") else "none"
    assert (cfg.model.encoder_positions, cfg.model.decoder_positions) == (positions, positions)
    with torch.device("meta"):
        model = tasks.setup_task(cfg.task).build_model(cfg.model)
    for part in model.encoder, model.decoder:
        assert (part.embed_positions is not None) == (positions == "absolute")


@pytest.mark.parametrize(
    "override, message",
    [
        ("+model.encoder_atention=1111", "encoder_atention"),
        ("optimization.max_updates=3", "max_updates"),
        ("+criterion.label_smothing=0.1", "label_smothing"),
        ("model.encoder_attention=0120", "four bits"),
        ("+model.encoder_kernel_sizes=3", "--encoder-kernel-sizes"),
        ("attention=convolution", "attention/convolution"),
    ],
)
def test_wrong_overrides_are_refused(override, message, joined, tmp_path):
    with pytest.raises(Exception, match=message):
        hydra_main("gettext", *small(joined, tmp_path), override)


def test_the_console_script(joined, tmp_path):
    """Run the script once as a process from the repository root."""
    command = ["--config-dir", "configs/fairseq", "--config-name", "gettext"]
    log = fairseq("hydra-train", *command, *small(joined, tmp_path))
    assert "num_updates 1" in log
    assert trained(tmp_path)[1].encoder.layers[0].self_attn.deformable is not None
