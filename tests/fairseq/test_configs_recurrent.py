"""The recipes in configs/fairseq/recurrent: each trains at small widths, translates, and matches its command line."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.fairseq.fairseq_helpers import ROOT

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils, tasks
from fairseq.models import ARCH_CONFIG_REGISTRY

from attn_plugins.fairseq.aligned_lstm import BahdanauLSTMDecoder
from tests.fairseq.recipe_helpers import by_command_line, check_keys, one_line_commands
from tests.fairseq.recipe_helpers import composed as composed_of
from tests.fairseq.recipe_helpers import hydra_main as hydra_main_of

CONFIGS = ROOT / "configs/fairseq/recurrent"
RECIPES = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem != "shared")
README = (CONFIGS / "README.md").read_text(encoding="utf-8")
hydra_main, composed = partial(hydra_main_of, CONFIGS), partial(composed_of, CONFIGS)
SMALL = ["encoder_hidden_size=8", "decoder_hidden_size=16", "encoder_embed_dim=12", "decoder_embed_dim=12"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains_and_translates(recipe, joined, tmp_path):
    run = [f"task.data={joined}", "task.source_lang=en", "task.target_lang=de", f"checkpoint.save_dir={tmp_path}"]
    run += ["common.cpu=true", "dataset.num_workers=0", "optimization.max_update=2", "dataset.batch_size=40"]
    hydra_main(recipe, *run, *(f"++model.{size}" for size in SMALL if recipe != "gettext"))  # gettext is small already
    path = str(tmp_path / "checkpoint_last.pt")
    [model], _, task = checkpoint_utils.load_model_ensemble_and_task([path])
    cfg = checkpoint_utils.load_checkpoint_to_cpu(path)["cfg"]
    assert isinstance(model.decoder, BahdanauLSTMDecoder)
    source = task.source_dictionary.encode_line("the cat", append_eos=True, add_if_not_exist=False).long()
    sample = {"net_input": {"src_tokens": source[None], "src_lengths": torch.tensor([len(source)])}}
    hypotheses = task.build_generator([model], cfg.generation).generate([model], sample)
    assert hypotheses[0][0]["score"].isfinite()
    assert hypotheses[0][0]["attention"].shape[0] == len(source)


@pytest.mark.parametrize("recurrence, alignment", [("luong", "dot"), ("bahdanau", "cosine")])
def test_other_choices_build(recurrence, alignment, joined):
    choice = [f"model.recurrence={recurrence}", f"model.alignment={alignment}"]
    cfg = composed("gettext", f"task.data={joined}", *choice)
    assert cfg.checkpoint.save_dir == f"checkpoints/gettext_{recurrence}_{alignment}"
    model = tasks.setup_task(cfg.task).build_model(cfg.model)
    assert model.decoder.attention.attention.score_name == alignment
    assert isinstance(model.decoder, BahdanauLSTMDecoder) == (recurrence == "bahdanau")


def test_the_papers_sizes(joined):
    """The sizes of Bahdanau, Cho and Bengio (2015), appendix A."""
    cfg = composed("wmt14_en_fr", f"task.data={joined}", "task.target_lang=de")
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


def test_every_recipe_is_given_as_one_command():
    assert len(one_line_commands(README)) == len(RECIPES) == 2


@pytest.mark.parametrize("command", one_line_commands(README))
def test_the_one_line_commands_are_the_recipes(command, joined):
    words = shlex.split(command)[1:]
    recipe = Path(words[words.index("--save-dir") + 1]).name.removesuffix("_bahdanau_additive")
    cfg, line = composed(recipe, f"task.data={joined}"), by_command_line(words)
    for node in "criterion", "optimizer", "lr_scheduler", "optimization":
        found = vars(line[node]) if node == "optimizer" and recipe == "wmt14_en_fr" else dict(line[node])
        assert {name: found[name] for name in cfg[node]} == dict(cfg[node]), node
    for node, names in dict(
        checkpoint=["save_dir", "keep_last_epochs", "no_epoch_checkpoints"],
        dataset=["max_tokens", "batch_size", "num_workers", "skip_invalid_size_inputs_valid_test"],
        common=["cpu", "user_dir"],
        task=["source_lang", "target_lang", "max_source_positions", "max_target_positions"],
    ).items():
        assert {name: line[node][name] for name in names} == {name: cfg[node][name] for name in names}
    ARCH_CONFIG_REGISTRY[cfg.model._name](cfg.model)
    options = vars(line.model) if not hasattr(line.model, "keys") else line.model
    differ = {name for name in cfg.model if name not in ("_name", "criterion") and options[name] != cfg.model[name]}
    assert differ == set()
