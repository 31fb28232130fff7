"""The recipes in configs/fairseq: at small widths they train and translate; all of them as one command."""

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
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

from attn_plugins.fairseq.aligned_lstm import BahdanauLSTMDecoder
from tests.fairseq.captioning_helpers import write_images
from tests.fairseq.recipe_helpers import (
    by_command_line,
    check_keys,
    check_overrides,
    one_line_commands,
    table_overrides,
)
from tests.fairseq.recipe_helpers import composed as composed_of
from tests.fairseq.recipe_helpers import hydra_main as hydra_main_of
from tests.helpers.slow_cases import slow_but

CONFIGS = ROOT / "configs/fairseq"
RECIPES = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem != "shared")
ATTENTIONS = sorted(path.stem for path in CONFIGS.glob("attention/*.yaml"))
SMALL = ["embed_dim=16", "ffn_embed_dim=16", "attention_heads=2", "layers=2"]
hydra_main, composed = partial(hydra_main_of, CONFIGS), partial(composed_of, CONFIGS)
RECURRENT = CONFIGS / "recurrent"
RECURRENT_RECIPES = sorted(path.stem for path in RECURRENT.glob("*.yaml") if path.stem != "shared")
NARROW = ["encoder_hidden_size=8", "decoder_hidden_size=16", "encoder_embed_dim=12", "decoder_embed_dim=12"]


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"))


def small(data: Path, folder: Path) -> list[str]:
    """Return overrides that only make a recipe small."""
    sizes = [f"++model.{side}_{size}" for side in ("encoder", "decoder") for size in SMALL]
    return [*sizes, "dataset.max_tokens=400", *run_options(data, folder)]


def run_options(data: Path, folder: Path) -> list[str]:
    run = ["common.cpu=true", "dataset.num_workers=0", "optimization.max_update=1"]
    return [*run, f"task.data={data}", f"checkpoint.save_dir={folder}"]


def trained(folder: Path) -> tuple[dict[str, Any], Any, Any]:
    """Return the configuration, model and task of the checkpoint after one update."""
    path = str(folder / "checkpoint_last.pt")
    [model], _, task = checkpoint_utils.load_model_ensemble_and_task([path])
    state = checkpoint_utils.load_checkpoint_to_cpu(path)
    assert state["optimizer_history"][-1]["num_updates"] == 1
    return state["cfg"], model, task


def translation(folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    """Return the configuration, the model and the best translation of a sentence of two words."""
    cfg, model, task = trained(folder)
    cfg.generation.max_len_b = 10  # after one update, no translation ends by itself
    source = task.source_dictionary.encode_line("the cat", append_eos=True, add_if_not_exist=False).long()
    sample = {"net_input": {"src_tokens": source[None], "src_lengths": torch.tensor([len(source)])}}
    hypotheses = task.build_generator([model], cfg.generation).generate([model], sample)
    assert hypotheses[0][0]["score"].isfinite()
    return cfg, model, hypotheses[0][0]


@pytest.mark.parametrize(
    "recipe, attention",
    [(recipe, None) for recipe in RECIPES if recipe != "gettext"] + [("gettext", kind) for kind in ATTENTIONS],
)
def test_every_recipe_trains_and_translates(recipe, attention, joined, tmp_path):
    hydra_main(recipe, *small(joined, tmp_path), *([] if attention is None else [f"attention={attention}"]))
    cfg, model, _ = translation(tmp_path)
    schedule = "cosine" if recipe.endswith("_big") else "inverse_sqrt"
    assert (cfg.criterion.label_smoothing, cfg.lr_scheduler._name) == (0.1, schedule)
    assert model.encoder.embed_tokens.weight is model.decoder.output_projection.weight  # joined dictionary
    if attention is not None:  # Zhu et al. (2019) drop absolute positions, also for "none"
        absolute = attention in ("content", "bilateral")
        assert [part.embed_positions is not None for part in (model.encoder, model.decoder)] == [absolute] * 2


@pytest.mark.parametrize("recipe", RECURRENT_RECIPES)
def test_every_recurrent_recipe_trains_and_translates(recipe, joined, tmp_path):
    narrow = [f"++model.{size}" for size in NARROW if recipe != "gettext"]  # gettext is small already
    languages = ["task.source_lang=en", "task.target_lang=de", "++dataset.batch_size=40"]
    hydra_main_of(RECURRENT, recipe, *narrow, *run_options(joined, tmp_path), *languages)
    _, model, best = translation(tmp_path)
    assert isinstance(model.decoder, BahdanauLSTMDecoder)
    assert best["attention"].shape[0] == 3


PAPERS = {
    "wmt14_en_de": {
        "model": {"layers": 6, "embed_dim": 512, "ffn": 2048, "heads": 8, "kind": "MultiheadSpatialAttention"},
        "optimization": {"max_update": 100_000, "lr": [0.001], "clip_norm": 0},
        "optimizer": {"adam_betas": "(0.9, 0.98)", "adam_eps": 1e-9, "weight_decay": 0},
        "lr_scheduler": {"warmup_updates": 4000, "warmup_init_lr": 1e-7},
        "dataset": {"max_tokens": 30_000 // 8},
    },
    "iwslt14_de_en": {
        "model": {"layers": 6, "embed_dim": 512, "ffn": 1024, "heads": 4, "kind": "BilateralSelfAttention"},
        "optimization": {"max_update": 50_000, "lr": [0.0005], "clip_norm": 0},
        "optimizer": {"adam_betas": "(0.9, 0.98)", "weight_decay": 1e-4},
        "lr_scheduler": {"warmup_updates": 4000, "warmup_init_lr": 1e-7},
        "dataset": {"max_tokens": 4000},
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
    }


@pytest.mark.parametrize("recipe", PAPERS)
def test_the_papers_sizes_and_schedules(recipe, joined, tmp_path):
    """The recipes at full size, overriding only the folders."""
    cfg = composed(recipe, f"task.data={joined}")
    with torch.device("meta"):
        model = tasks.setup_task(cfg.task).build_model(cfg.model)
    for part in model.encoder, model.decoder:
        layer = part.layers[-1]
        sizes = {"layers": len(part.layers), "embed_dim": part.embed_tokens.weight.shape[1]}
        sizes |= {"ffn": layer.fc1.out_features, "heads": layer.self_attn.num_heads}
        assert {**sizes, "kind": type(layer.self_attn.attention).__name__} == PAPERS[recipe]["model"]
    check_keys(cfg)
    for part, values in PAPERS[recipe].items():
        if part != "model":
            assert {name: cfg[part][name] for name in values} == values


def test_the_sizes_of_bahdanau(joined):
    """The sizes of Bahdanau, Cho and Bengio (2015), appendix A."""
    cfg = composed_of(RECURRENT, "wmt14_en_fr", f"task.data={joined}", "task.target_lang=de")
    check_keys(cfg)
    with torch.device("meta"):
        model = tasks.setup_task(cfg.task).build_model(cfg.model)
    decoder = model.decoder
    assert (model.encoder.lstm.hidden_size, model.encoder.lstm.bidirectional) == (1000, True)
    assert model.encoder.embed_tokens.embedding_dim == decoder.embed_tokens.embedding_dim == 620
    assert (decoder.layers[0].input_size, decoder.layers[0].hidden_size) == (620 + 2000, 1000)
    assert decoder.attention.attention.score.vector.shape == (1000,)
    assert decoder.fc_out.in_features == 500
    assert (cfg.dataset.batch_size, cfg.optimizer.adadelta_rho, cfg.optimizer.adadelta_eps) == (80, 0.95, 1e-6)


ROOMS = {n: (CONFIGS / n / "README.md").read_text(encoding="utf-8") for n in ("", "recurrent", "captioning")}
COMMANDS = [(room, command) for room, readme in ROOMS.items() for command in one_line_commands(readme)]
# Where a command may differ: the log, languages that fairseq reads off the data, and what the models' names show.
FREE = {("common", "log_format"), ("task", "source_lang"), ("task", "target_lang")}
FREE |= {("model", "criterion"), ("model", "encoder_positions"), ("model", "decoder_positions")}


def trained_by(room: str, command: str) -> tuple[str, str]:
    """Return the recipe of a command and its attention, by the folder that it saves to."""
    name = re.search(r"--save-dir checkpoints/(\w+)", command)[1].removesuffix("_bahdanau_additive")
    recipe, _, attention = (name, "", "") if room else name.rpartition("_")
    return recipe, attention


def test_the_readmes_train_every_recipe_by_one_command():
    for room in ROOMS:
        recipes = {path.stem for path in (CONFIGS / room).glob("*.yaml")} - {"shared"}
        assert sorted(recipes) == sorted(trained_by(*row)[0] for row in COMMANDS if row[0] == room)


# The first of each README.
FIRST = [next(row for row in COMMANDS if row[0] == room) for room in ROOMS]


@pytest.mark.parametrize("room, command", slow_but(FIRST, COMMANDS))
def test_the_one_line_commands_are_the_recipes(room, command, joined, images):
    """The commands and recipes agree in every field."""
    words = shlex.split(command)[1:]
    recipe, attention = trained_by(room, command)
    words[0] = str(images if room == "captioning" else joined)
    choice = [recipe, f"attention={attention}"] if attention else [recipe]
    cfg = composed_of(CONFIGS / room, *choice, f"task.data={words[0]}")
    line, own = by_command_line(words), cfg.model._name
    ARCH_CONFIG_REGISTRY[own](cfg.model)
    for node in cfg.keys() - {"_name", "job_logging_cfg", "scoring"}:  # a recipe scores nothing
        given = {} if line[node] is None else line[node]
        given = given if hasattr(given, "keys") else vars(given)  # the optimizer's and an LSTM's are a namespace
        for name, value in (cfg[node] or {}).items():
            free = (node, name) in FREE or name == "_name" or (room, recipe, name) == ("", "gettext", "num_workers")
            assert free or str(given[name]) == str(value), (node, name)
    with torch.device("meta"):
        models = [ARCH_MODEL_REGISTRY[own].build_model(c.model, tasks.setup_task(c.task)) for c in (line, cfg)]
    assert str(models[0]) == str(models[1])


def documented() -> list[Any]:
    """Return the READMEs' overrides by recipe. Of each kind of override, the first is not slow."""
    cases, kinds = [], set()
    for section in re.split(r"^## ", ROOMS[""], flags=re.M):
        recipe = re.search(r"--config-name (\w+)", section)
        for row in table_overrides(section):
            kind = row.split(".")[0], row.split("=")[0].rpartition("_")[0]
            marks = [pytest.mark.slow] if kind in kinds else []
            cases.append(pytest.param("", recipe[1], row, marks=marks))
            kinds.add(kind)
    captioning = re.findall(r"`((?:\+\+)?(?:model|criterion)\.[^`]*)`", ROOMS["captioning"])
    for row in sorted({*table_overrides(ROOMS["captioning"]), *captioning}):
        kind = row.strip("+").split(".")[0]
        marks = [pytest.mark.slow] if kind in kinds else []
        cases.append(pytest.param("captioning", "coco_self_critical", row, marks=marks))
        kinds.add(kind)
    assert len(cases) > 20
    return cases


@pytest.mark.parametrize("room, recipe, overrides", documented())
def test_every_setting_of_a_readme_builds(room, recipe, overrides, joined, images):
    data = images if room == "captioning" else joined
    cfg = composed_of(CONFIGS / room, recipe, f"task.data={data}", *shlex.split(overrides))
    check_overrides(cfg, overrides)
    with torch.device("meta"):
        tasks.setup_task(cfg.task).build_model(cfg.model)


@pytest.mark.slow
def test_the_console_script(joined, tmp_path):
    """Run the script once as a process from the repository root."""
    command = ["--config-dir", "configs/fairseq", "--config-name", "gettext"]
    log = fairseq("hydra-train", *command, *small(joined, tmp_path))
    assert "num_updates 1" in log
    assert trained(tmp_path)[1].encoder.layers[0].self_attn.deformable is not None
