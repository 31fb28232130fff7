"""The task ``captioning``: files, samples, batches, and the stock console commands with it."""

from __future__ import annotations

import argparse
import json
import logging
import re
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("fairseq")

from attn_plugins.captioning.caption_files import described_by, words_of
from attn_plugins.captioning.region_features import RegionFeatures
from tests.captioning.read_only import read_only
from tests.captioning.test_region_features import write
from tests.fairseq.captioning_helpers import COLORS, D, batches_of, change, task_of, write_images, write_json
from tests.fairseq.console_helpers import in_one_process


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_images(tmp_path / "data")


@pytest.mark.parametrize(
    ("caption", "words"),
    [
        ("A man's T-shirt,  (red) & \tblue.\n", "a mans tshirt red blue"),  # as Karpathy's
        (" ... ", ""),
        ("The man’s “blue”—or red?", "the mans blue or red"),
        ("一只红色的猫，在iPhone上。", "一 只 红 色 的 猫 在 iphone 上"),
        ("猫とネコ・犬！", "猫 と ネ コ 犬"),
        (["红色", "的", "猫", "。"], "红色 的 猫"),  # the tokens of a file stay whole
        ("고양이 두 마리", "고양이 두 마리"),  # Korean has spaces
    ],
)
def test_captions_are_split_into_words(caption, words):
    assert words_of(caption) == words.split()


def test_a_data_folder_that_cannot_be_written(folder, caplog):
    expected = task_of(folder).dictionary
    (folder / "dict.txt").unlink()
    with read_only(folder), caplog.at_level(logging.WARNING, "attn_plugins"):
        task = task_of(folder)
    assert task.dictionary == expected
    assert task.dictionary.count == expected.count
    assert not (folder / "dict.txt").exists()
    [line] = [record.message for record in caplog.records]
    assert "words are counted at every start" in line
    assert "--dictionary takes another path" in line


@pytest.mark.parametrize("listed", [True, False], ids=["image_info", "splits only"])
def test_images_without_captions_can_be_captioned(folder, listed):
    """COCO's test server has pictures whose captions are not public."""
    own = [image["cocoid"] for image in json.loads((folder / "splits.json").read_text())["images"]]
    bare = {image_id for image_id in own if image_id % 6 == 3}  # the split test

    def keep(content: dict) -> None:
        content["images"] = [image for image in content["images"] if image["id"] not in bare]
        content["annotations"] = [c for c in content["annotations"] if c["image_id"] not in bare]

    change(folder / "captions.json", keep)
    captions = str(folder / "captions.json")
    if listed:
        write_json(folder / "image_info.json", {"images": [{"id": i, "file_name": f"{i}.jpg"} for i in sorted(bare)]})
        captions += f":{folder / 'image_info.json'}"
    task = task_of(folder, captions=captions)
    task.load_dataset("train")
    batches = batches_of(task, "test")
    assert {image_id for batch in batches for image_id in batch["image_ids"]} == bare
    assert all(batch["target"] is None and "references" not in batch for batch in batches)
    with pytest.raises(ValueError, match="have no captions: they can only be captioned"):
        task.valid_step(batches[0], None, None)
    change(folder / "splits.json", lambda c: c["images"][0].update(split="test", cocoid=999))
    change(folder / "splits.json", lambda c: c["images"][3].update(split="val", cocoid=998))
    with pytest.raises(ValueError, match=r"image 998 is not in .*captions\.json"):
        task_of(folder, captions=captions).load_dataset("train")


@pytest.mark.slow
def test_the_dictionary_is_made_once_of_frequent_words(folder):
    # Not forked: threads of earlier tests have left locks in this process that a child would wait for.
    with ProcessPoolExecutor(3, get_context("spawn")) as pool:
        sizes = list(pool.map(_words_with, [folder] * 3, [8] * 3))
    assert len(set(sizes)) == 1
    assert sorted(path.name for path in folder.iterdir() if "dict" in path.name) == ["dict.txt"]
    content = json.loads((folder / "captions.json").read_text())["annotations"]
    splits = {image["cocoid"]: image["split"] for image in json.loads((folder / "splits.json").read_text())["images"]}
    training = [words_of(c["caption"]) for c in content if splits[c["image_id"]] in ("train", "restval")]
    counts = Counter(word for caption in training for word in caption)
    expected = {word: count for word, count in counts.items() if count >= 8}
    assert dict(line.split() for line in (folder / "dict.txt").read_text().splitlines()) == {
        word: str(count) for word, count in expected.items()
    }
    assert 0 < len(expected) < len(counts)
    assert _words_with(folder, 1) == sizes[0]  # the file exists


def _words_with(folder: Path, count: int) -> int:
    return len(task_of(folder, min_word_count=count).dictionary)


def test_training_samples_are_captions_and_others_are_images(folder):
    task = task_of(folder)
    for split, samples, images in (("train", 32, 16), ("valid", 4, 4), ("test", 4, 4)):
        task.load_dataset(split)
        dataset = task.dataset(split)
        assert (len(dataset), len(dataset.image_ids)) == (samples, images)
    captions = [task.dictionary.string(dataset[i]["target"]) for i in range(4)]
    assert captions[0] == "a green bus"  # image 105, the first caption
    assert dataset.references[0] == ["a green bus", "the bus is green"]
    train = task.dataset("train")
    assert [train.image_id(i) for i in range(4)] == [100, 100, 101, 101]
    assert 103 in train.image_ids  # restval


def test_batches(folder):
    task = task_of(folder)
    task.load_dataset("train")
    regions = RegionFeatures(folder / "regions.hdf5")
    pad, eos = task.dictionary.pad(), task.dictionary.eos()
    batches = batches_of(task, "train", num_workers=0)
    assert sum(batch["nsentences"] for batch in batches) == 32
    widths = []
    for batch in batches:
        inputs, counts = batch["net_input"], [regions.count(image_id) for image_id in batch["image_ids"]]
        widths.append(max(counts))
        mask = inputs["regions_padding_mask"]
        assert (mask is None) == (len(set(counts)) == 1)
        assert inputs["regions"].shape == (len(counts), max(counts), D)
        for row, (image_id, count) in enumerate(zip(batch["image_ids"], counts)):
            features = inputs["regions"][row]
            np.testing.assert_array_equal(features[:count], regions.features(image_id))
            assert not features[count:].any()
            if mask is not None:
                assert mask[row].tolist() == [False] * count + [True] * (max(counts) - count)
            target = batch["target"][row]
            words = target[target != pad]
            assert words[-1] == eos
            assert task.dictionary.string(words) in batch["references"][row]
            assert inputs["prev_output_tokens"][row, : len(words)].tolist() == [eos, *words[:-1]]
            attributes = [task.dictionary[i] for i in inputs["src_tokens"][row, : inputs["src_lengths"][row]]]
            assert len(attributes) == 2
            assert attributes[1] == "a"  # less probable
            assert attributes[0] in batch["references"][row][0]
        assert batch["ntokens"] == int((batch["target"] != pad).sum())
    fewest = task_of(folder, max_attributes=1)
    fewest.load_dataset("valid")
    assert [fewest.dictionary[i] for i in fewest.dataset("valid")[0]["attributes"]] == ["bus"]  # image 104
    assert widths == sorted(widths)
    assert len({len(row) for row in (batch["target"] for batch in batches)}) <= 2


def test_batches_are_bounded_by_tokens_and_redrawn(folder):
    task = task_of(folder)
    for batch in batches_of(task, "train", max_sentences=None, max_tokens=12, required_batch_size_multiple=8):
        largest = max(batch["net_input"]["regions"].shape[1], batch["target"].shape[1])
        assert batch["nsentences"] * largest <= 12
    dataset = task.dataset("train")
    orders = []
    for seed in (0, 0, 1):
        np.random.seed(seed)  # noqa: NPY002  as fairseq does
        orders.append(dataset.ordered_indices().tolist())
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2]) == list(range(32))
    sizes = [dataset.size(i) for i in orders[2]]
    assert sizes == sorted(sizes)
    assert [dataset.num_tokens(i) for i in range(32)] == dataset.num_tokens_vec(np.arange(32)).tolist()


def test_regions_of_bottom_up_attention(folder):
    regions = RegionFeatures(folder / "regions.hdf5")
    expected = batches_of(task_of(folder), "valid")
    write(folder / "regions.tsv", [(image_id, regions.features(image_id)) for image_id in regions.image_ids])
    (folder / "regions.hdf5").unlink()
    task = task_of(folder)
    for workers in (0, 2):  # open the file in this process before the workers do
        for one, other in zip(batches_of(task, "valid", num_workers=workers), expected):
            torch.testing.assert_close(one["net_input"]["regions"].float(), other["net_input"]["regions"].float())


def test_captions_of_several_files_and_of_the_splits_file(folder):
    content, expected = json.loads((folder / "captions.json").read_text()), task_of(folder).captions
    paths = []
    for part in (0, 1):
        paths.append(folder / f"part{part}.json")
        images = [image for image in content["images"] if image["id"] % 2 == part]
        annotations = [c for c in content["annotations"] if c["image_id"] % 2 == part]
        write_json(paths[-1], {"images": images, "annotations": annotations})
    assert task_of(folder, captions=":".join(map(str, paths))).captions == expected

    def add_sentences(splits: dict) -> None:
        for image in splits["images"]:
            own = [c["caption"] for c in content["annotations"] if c["image_id"] == image["cocoid"]]
            image["sentences"] = [{"raw": own[0]}, {"tokens": words_of(own[1])}]

    change(folder / "splits.json", add_sentences)
    (folder / "captions.json").unlink()
    assert task_of(folder).captions == expected


def test_oracle_attributes(folder):
    vocabulary = {"a": 90, "dog": 20, "cat": 30, "red": 5}
    captions = [["a", "red", "red", "red", "dog"], ["a", "dog"], ["unseen", "cat"]]
    assert described_by(captions, vocabulary, 9) == ["dog", "a", "red", "cat"]
    assert described_by(captions, vocabulary, 2) == ["dog", "a"]
    (folder / "attributes.json").unlink()
    task = task_of(folder, oracle_attributes=True, max_attributes=2)
    task.load_dataset("valid")
    for i, image_id in enumerate(task.dataset("valid").image_ids):
        words = [task.dictionary[j] for j in task.dataset("valid")[i]["attributes"]]
        assert COLORS[(image_id - 100) % 4] in words
        assert len(words) == 2
    with pytest.raises(ValueError, match=r"--oracle-attributes replaces --attributes: .* got words\.json"):
        task_of(folder, oracle_attributes=True, attributes="words.json")


def test_generation_and_what_the_task_cannot_do(folder, tmp_path):
    task = task_of(folder, results_json=str(tmp_path / "results.json"))
    for option, value in (("print_alignment", "soft"), ("replace_unk", "@@"), ("retain_dropout", True)):
        message = f"--{option.replace('_', '-')} is not supported by the task captioning, whose"
        with pytest.raises(ValueError, match=message):
            task.build_generator([], argparse.Namespace(**{option: value}))
    with pytest.raises(ValueError, match="--results-json needs generated captions: leave out --score-reference"):
        task.build_generator([], argparse.Namespace(score_reference=True))
    with pytest.raises(ValueError, match="fairseq-interactive reads sentences, not images"):
        task.build_dataset_for_inference([], [])
    task.load_dataset("valid")
    dataset = task.dataset("valid")
    first, second = (task.get_batch_iterator(dataset).next_epoch_itr for _ in range(2))
    assert first is second, "fairseq's iterator is wrapped once"


def test_one_modality_is_enough(folder):
    (folder / "attributes.json").unlink()
    task = task_of(folder)
    batch = batches_of(task, "valid")[0]
    assert batch["net_input"]["src_tokens"].tolist() == [[task.dictionary.eos()]] * 3
    write_images(folder)
    (folder / "regions.hdf5").unlink()
    batch = batches_of(task_of(folder), "valid")[0]
    assert "regions" not in batch["net_input"]
    (folder / "attributes.json").unlink()
    with pytest.raises(ValueError, match="has neither regions nor attributes: give --regions, --attributes or both"):
        task_of(folder)
    (folder / "regions.npz").touch()
    with pytest.raises(ValueError, match=r"\.npz, which version 0\.2 wrote, is no longer read: extract again"):
        task_of(folder)


@pytest.mark.slow
def test_train_and_generate(tmp_path):
    """Generation uses two checkpoints together."""
    data = write_images(tmp_path / "data")
    options = [data, "--user-dir", "plugins/fairseq", "--task=captioning", "--cpu"]
    train = ["--arch=eta_transformer_tiny", "--criterion=label_smoothed_cross_entropy", "--label-smoothing=0.1"]
    train += ["--min-word-count=1", "--batch-size=4", "--optimizer=adam", "--lr=0.005", "--max-update=30"]
    train += ["--save-interval-updates=15", "--no-epoch-checkpoints", "--no-progress-bar", "--num-workers=0"]
    train = ["train", *options, *train, "--save-dir", tmp_path / "model"]
    results = tmp_path / "results" / "captions.json"
    paths = ":".join(str(tmp_path / "model" / name) for name in ("checkpoint_last.pt", "checkpoint_2_15.pt"))
    generate = ["generate", *options, "--gen-subset=test", "--path", paths, "--beam=3", "--batch-size=2"]
    generate += ["--max-len-b=9", "--results-json", results, "--num-workers=0"]
    log, generated = in_one_process(train, generate)
    losses = [float(loss) for loss in re.findall(r"\| train \|.* nll_loss (\S+)", log)]
    assert "num_updates 30" in log
    assert losses[-1] < losses[0] - 0.5
    assert f"{data / 'dict.txt'}: 12 words" in log

    captions = dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", generated, re.M))
    assert [(result["image_id"], result["caption"]) for result in json.loads(results.read_text())] == [
        (image_id, captions[number]) for image_id, number in ((105, "0"), (111, "1"), (117, "2"), (123, "3"))
    ]
    assert all(caption.split()[0] in ("a", "the") for caption in captions.values())
    assert list(results.parent.iterdir()) == [results]
    assert f"4 captions are in {results}" in generated
