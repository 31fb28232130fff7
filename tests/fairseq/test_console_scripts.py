"""fairseq's console scripts on our models, each in its own process as a user starts it."""

from __future__ import annotations

import re
import subprocess
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fairseq.console_helpers import in_one_process, parameters
from tests.fairseq.fairseq_helpers import ENVIRONMENT, ROOT, WORDS, generate, script

pytest.importorskip("fairseq")

from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.data import Dictionary

import attn_plugins.__main__ as cli
import attn_plugins.fairseq  # noqa: F401 - registers the models
from tools.average_checkpoints import main as average_checkpoints

MIXED = ["--arch=spatial_transformer_tiny", "--encoder-attention=0110", "--decoder-attention=bilateral"]
MIXED += ["--cross-attention=1000", "--deformable", "--encoder-layers=1", "--decoder-layers=2"]
CPU = ["--user-dir=plugins/fairseq", "--cpu", "--num-workers=0"]
RUN = ["--optimizer=adam", "--lr=0.01", "--batch-size=10", "--log-format=simple", "--log-interval=1"]
UPDATES = 4


def train_command(data: Path, folder: Path, *options: Any) -> list[str]:
    parts = [*MIXED, *RUN, "--no-epoch-checkpoints", f"--save-dir={folder}", *options]
    return [script("train"), str(data), *map(str, parts)]


def run(command: list[str], cwd: Path = ROOT, **options: Any) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=1800, **options)


def losses(log: str) -> dict[int, str]:
    """Return the loss and gradient norm of each update."""
    lines = re.findall(r"train_inner \| .* loss=([\d.]+),.*num_updates=(\d+),.* gnorm=([\d.]+)", log)
    return {int(update): f"{loss} {norm}" for loss, update, norm in lines}


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> tuple[Path, str]:
    """Train without interruption from another folder, with loader workers; return the folder and the log."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as where:
        patch.setattr("sys.argv", ["attn-plugins", "fairseq-dir"])
        cli.main()
    options = [f"--user-dir={where.getvalue().strip()}", "--cpu", "--num-workers=2", "--save-interval-updates=2"]
    command = train_command(data, folder, *options, f"--max-update={UPDATES}")
    result = run(command, cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder, result.stdout + result.stderr


def test_generate_scores_and_refuses_another_model(data, trained):
    folder, trained_log = trained
    assert list(losses(trained_log)) == list(range(1, UPDATES + 1))
    generate = ["generate", data, *CPU, "--path", folder / "checkpoint_last.pt"]
    scored = ["--beam=4", "--max-len-b=10", "--scoring=sacrebleu", "--remove-bpe"]
    scored += ["--required-batch-size-multiple=1", "--batch-size=3"]
    other = ["--model-overrides", "{'encoder_attention': '1111'}"]
    log, refused = in_one_process([*generate, *scored], [*generate, *other], check=False)
    assert "Translated 8 sentences" in log
    assert re.search(r"Generate test with beam=4: BLEU = [\d.]+", log)
    assert sorted(re.findall(r"^H-(\d+)\t", log, re.M)) == [str(i) for i in range(8)]
    assert re.search(r"raised ValueError the checkpoint does not fit .* \(missing: .*--encoder-attention", refused)


LINES = ["the cat sees a dog", "", "xylophone quux", " ".join(["cat"] * 30), "red blue"]
INTERACTIVE = ["-s=en", "-t=de", "--beam=4", "--max-source-positions=20", "--max-len-b=10"]


@pytest.mark.slow
def test_two_processes_are_one_with_twice_the_accumulation(data, tmp_path):
    still = ["--dropout=0", "--max-update=4"]  # workers would draw other random numbers
    # They meet in a file, since a port that is free now may be taken once they start.
    meeting = [f"--distributed-init-method=file://{tmp_path / 'processes'}", "--distributed-world-size=2"]
    meeting += ["--distributed-backend=gloo", "--ddp-backend=legacy_ddp", "--distributed-no-spawn"]
    ranks = []
    for rank in range(2):  # fairseq spawns none on the CPU
        words = [*CPU, *still, *meeting, f"--distributed-rank={rank}"]
        command = train_command(data, tmp_path / "two", *words)
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=1800)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], errors
    whole = train_command(data, tmp_path / "one", *CPU, *still, "--update-freq=2")
    again = train_command(data, tmp_path / "again", *CPU, *still, "--update-freq=2")
    in_one_process(["train", *whole[1:]], ["train", *again[1:]])
    torch.testing.assert_close(parameters(tmp_path / "two"), parameters(tmp_path / "one"), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(parameters(tmp_path / "again"), parameters(tmp_path / "one"), rtol=0, atol=0)


@pytest.mark.slow
def test_one_process_after_another_in_one_interpreter(data, tmp_path):
    """Language models; blocks of sentences and batches by length fail in stock fairseq under numpy 2."""
    text, lm, sentences = data.parent, tmp_path / "lm", tmp_path / "sentences"
    prefixes = [f"--{split}pref={text / split}.en" for split in ("train", "valid", "test")]
    fits = ["--tokens-per-sample=16", "--required-batch-size-multiple=1"]
    blocks = ["--sample-break-mode=eos", "--tokens-per-sample=64", "--required-batch-size-multiple=1"]
    model = ["--arch=spatial_transformer_lm_tiny", "--decoder-attention=0110", "--deformable", "--no-epoch-checkpoints"]
    language_model = ["--task=language_modeling", *model, *CPU, *RUN]
    (tmp_path / "lines").write_text("".join(f"{line}\n" for line in LINES))
    skip = ["--skip-invalid-size-inputs-valid-test", "--buffer-size=5", "--batch-size=2"]
    generate = [data, *CPU, "--path", tmp_path / "memory-efficient-fp16/checkpoint_last.pt", "--max-len-b=10"]

    def two_updates(option: str, *others: str) -> list[str]:
        command = train_command(data, tmp_path / option.strip("-"), *CPU, "--max-update=2", option, *others)
        return ["train", *command[1:]]

    logs = in_one_process(
        ["preprocess", "--only-source", *prefixes, "--destdir", lm],
        ["train", lm, *language_model, *fits, "--save-dir", lm, "--max-update=12"],
        ["eval-lm", lm, *CPU, *fits, "--path", lm / "checkpoint_last.pt", "--context-window=4"],
        two_updates("--memory-efficient-fp16"),
        two_updates("--amp"),  # fairseq offers no other half precision without a GPU
        two_updates("--num-batch-buckets=2", "--max-tokens=400"),
        ["generate", *generate, "--fp16"],
        ["interactive", *generate, *INTERACTIVE, "--input", tmp_path / "lines", *skip],
        ["train", lm, *language_model, *blocks, "--save-dir", sentences, "--max-update=2"],
        ["eval-lm", lm, *CPU, *blocks, "--path", sentences / "checkpoint_last.pt"],
    )
    assert "num_updates 12" in logs[1]
    for log in (logs[2], logs[9]):
        perplexity = re.search(r"Loss \(base 2\): [\d.]+, Perplexity: ([\d.]+)", log)
        assert 1 < float(perplexity[1]) < 2 * len(Dictionary.load(str(lm / "dict.txt")))
    for number in (3, 4, 5, 8):
        assert "num_updates 2" in logs[number]
    assert "Translated 8 sentences" in logs[6]
    assert sorted(re.findall(r"^H-(\d)\t", logs[7], re.M)) == ["0", "1", "2", "4"]  # 3 is too long


LSTM = ["--arch=aligned_lstm_tiny", "--alignment=additive", "--alignment-hidden-size=24", "--recurrence=bahdanau"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [MIXED, LSTM], ids=["spatial_transformer", "aligned_lstm"])
def test_printed_alignments(options, data, tmp_path):
    """They equal those of each sentence alone, computed in Python; a hard one has the most probable words."""
    training = run([script("train"), str(data), *options, *CPU, *RUN, "--max-update=9", f"--save-dir={tmp_path}"])
    checkpoint = tmp_path / "checkpoint_last.pt"
    assert checkpoint.is_file(), training.stderr
    [model], _, task = load_model_ensemble_and_task([str(checkpoint)], {"data": str(data)})
    for kind in ("soft", "hard"):
        lines = generate(data, checkpoint, f"--print-alignment={kind}")
        assert len(lines["A"]) == 8
        for number, line in lines["A"].items():
            source = task.source_dictionary.encode_line(lines["S"][number], add_if_not_exist=False).long()
            target = task.target_dictionary.encode_line(lines["H"][number], add_if_not_exist=False).long()
            previous = torch.cat([target[-1:], target[:-1]])
            matrix = model.eval()(source[None], torch.tensor([len(source)]), previous[None])[1]
            matrix = matrix[0] if options is LSTM else matrix["attn"][0][0]
            if kind == "hard":  # fairseq omits both ends
                assert line.split() == [f"{i}-{t}" for t, i in enumerate(matrix[:-1, :-1].argmax(1).tolist())]
            else:
                printed = torch.tensor([[float(p) for p in row.split(",")] for row in line.split()])
                torch.testing.assert_close(printed, matrix, rtol=0, atol=2e-5)


def test_python_hub_and_averaged_checkpoints(data, trained):
    from attn_plugins.fairseq.spatial_transformer import SpatialTransformerModel

    folder, _ = trained
    hub = SpatialTransformerModel.from_pretrained(str(folder), "checkpoint_last.pt", str(data))
    translations = hub.translate(["the cat sees a dog", "", "xylophone"], beam=4, max_len_b=10)
    reversed_words = {word[::-1] for word in WORDS}
    assert all(set(line.split()) <= reversed_words | {"<unk>"} for line in translations)
    halves = sorted(folder.glob("checkpoint_*_*.pt"))
    assert len(halves) == 2
    assert average_checkpoints([str(folder), "--last=2", "--updates"]) == 0
    average = SpatialTransformerModel.from_pretrained(str(folder), "average.pt", str(data)).models[0]
    models = [SpatialTransformerModel.from_pretrained(str(folder), path.name, str(data)).models[0] for path in halves]
    for name, tensor in average.state_dict().items():
        parts = [model.state_dict()[name] for model in models]
        torch.testing.assert_close(tensor, (parts[0] + parts[1]) / 2, rtol=1e-6, atol=1e-7)


def test_checkpoints_that_cannot_be_averaged(trained, tmp_path, capsys):
    folder, _ = trained
    last = str(folder / "checkpoint_last.pt")
    (tmp_path / "text.pt").write_text("nothing")
    torch.save({"model": {"weight": torch.ones(2)}}, tmp_path / "other.pt")
    for arguments, message in (
        ([str(folder)], "--last 10 needs as many"),
        ([last, str(tmp_path / "text.pt")], "text.pt is not a fairseq checkpoint"),
        ([last, str(tmp_path / "other.pt")], "is of another model than"),
    ):
        assert average_checkpoints([*arguments, "--output", str(tmp_path / "average.pt")]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "average.pt").exists()
