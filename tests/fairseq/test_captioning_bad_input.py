"""Defects in the files of a captioning task: an error names the item."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fairseq")

from attn_plugins.captioning.region_features import RegionFeatures, write_region_features
from tests.fairseq.captioning_helpers import batches_of, change, spoil_features, task_of, write_images, write_json


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_images(tmp_path / "data")


BAD_SAMPLES = [  # of image 102
    ("captions", lambda c: c["annotations"][4].update(image_id=7),
     r"captions\.json: caption 4 belongs to image 7, which is not in its list of images"),
    ("captions", lambda c: c["annotations"][5].update(caption=" .. "),
     r"captions\.json: caption 5 of image 102 is empty, got ' \.\. '"),
    ("splits", lambda c: c["images"].append({"cocoid": 555, "split": "train"}),
     r"splits\.json: image 555 is not in .*captions\.json"),
    ("splits", lambda c: c["images"].append({"cocoid": "102", "split": "test"}),
     r"splits\.json: image 102 appears twice, in train and in test"),
    ("attributes", lambda c: c.update({"102": [["zebra", 1]]}),
     r"attributes\.json: image 102 has no attribute that is in the dictionary"),
    ("attributes", lambda c: c.pop("102"), r"attributes\.json: image 102 has no attribute that"),
    ("regions", None, r"regions\.hdf5 has no image 102"),
    ("regions", slice(0), r"regions\.hdf5: image 102 has no regions: remove it from the splits"),
]  # fmt: skip


def rewrite_regions(folder: Path, rows: slice | None) -> None:
    """Keep these rows of image 102, or for None leave it out."""
    regions = RegionFeatures(folder / "regions.hdf5")
    images = {i: dict(features=regions.features(i)) for i in regions.image_ids}
    own = images.pop(102)["features"]
    if rows is not None:
        images[102] = dict(features=own[rows])
    write_region_features(folder / "regions.hdf5", images.items())


@pytest.mark.parametrize(("file", "edit", "message"), BAD_SAMPLES)
def test_a_bad_sample_is_named(folder, file, edit, message):
    if file == "regions":
        rewrite_regions(folder, edit)
    else:
        change(folder / f"{file}.json", edit)
    with pytest.raises(ValueError, match=message):
        task_of(folder).load_dataset("train")


def test_regions_that_cannot_be_read_are_found_in_the_run(folder):
    spoil_features(folder, 102)
    with pytest.raises(ValueError, match="image 102 has features that are NaN or infinite"):
        batches_of(task_of(folder), "train")


def test_a_sample_that_is_too_large(folder):
    task = task_of(folder)
    task.load_dataset("valid")
    dataset, indices = task.dataset("valid"), np.arange(4)
    with pytest.raises(ValueError, match="1 samples are too large: image 104 has 2 regions and a caption"):
        task.filter_indices_by_size(indices[:1], dataset, (1, 10))
    counts = dataset.region_counts
    kept = task.filter_indices_by_size(indices, dataset, (1, 10), ignore_invalid_inputs=True)
    assert kept.tolist() == indices[counts == 1].tolist()
    assert task.filter_indices_by_size(indices, dataset, (9, 10)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("captions.json", '{"images": [{"id": 1}', r"captions\.json is not a JSON file or is truncated"),
        ("captions.json", '{"annotations": []}', r"captions\.json must have a list of images; it has annotations"),
        ("captions.json", '{"images": [], "annotations": [{"id": 3}]}', r"caption 3 must have image_id and caption"),
        ("captions.json", '{"images": [{"id": 1}], "annotations": [{"id": 3, "image_id": 1}]}', r"caption 3 must have"),
        ("splits.json", "[]", r"splits\.json must hold a JSON object, got a list"),
        ("splits.json", '{"images": [{"split": "train"}]}', r"cocoid or imgid of an image must be a number or a s"),
        ("splits.json", '{"images": [{"cocoid": 100}]}', r"splits\.json: image 100 has no split"),
        ("splits.json", '{"images": [{"cocoid": 100, "split": "test"}]}', "no image is in split train or restval"),
        ("captions.json", '{"images": [{"file_name": "1.jpg"}], "annotations": []}', r"id of an image must be a nu"),
        ("captions.json", b'{"images": "caf\xe9"}', r"captions\.json is not UTF-8 text: 'utf-8' codec can't decode"),
        ("attributes.json", '{"102": ["dog"], "100": []}', r"image 102 must have pairs of word and probability, got"),
        ("attributes.json", '{"102": [["dog", NaN]]}', r"image 102 must have pairs of word and probability, got"),
        ("attributes.json", '{"1": [], "102": [["dog", 1]], "102": []}', r"attributes\.json: image 102 appears twice"),
        ("regions.hdf5", b"PK", r"regions\.hdf5 is not an HDF5 file or is truncated"),
    ],
)
def test_malformed_files_raise(folder, name, text, message):
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        task_of(folder).load_dataset("train")


@pytest.mark.parametrize(
    ("sentences", "message"),
    [
        (["a dog"], "image 103 must have a list of sentences with raw or a list of tokens, got"),
        ({"raw": "a dog"}, "image 103 must have a list of sentences with raw or a list of tokens, got"),
        ([{"tokens": "a dog"}], "image 103 must have a list of sentences with raw or a list of tokens, got"),
        ([], r"splits\.json: image 103 has no captions in"),
        ([{"raw": 3}], r"splits\.json: caption 1 of image 103 is empty, got 3"),
    ],
)
def test_malformed_sentences_raise(folder, sentences, message):
    (folder / "captions.json").unlink()
    row = {"cocoid": 103, "split": "restval", "sentences": sentences}
    good = {"cocoid": 104, "split": "train", "sentences": [{"tokens": ["a", "cat"]}]}
    write_json(folder / "splits.json", {"images": [good, row]})
    with pytest.raises(ValueError, match=message):
        task_of(folder).load_dataset("train")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(data="nowhere"), FileNotFoundError, "the data folder nowhere does not exist"),
        (dict(splits="nowhere.json"), FileNotFoundError, r"--splits: nowhere\.json does not exist"),
        (dict(captions="nowhere.json"), FileNotFoundError, r"--captions: nowhere\.json does not exist"),
        (dict(regions="nowhere.hdf5"), FileNotFoundError, r"--regions: nowhere\.hdf5 does not exist"),
        (dict(attributes="nowhere.json"), FileNotFoundError, r"--attributes: nowhere\.json does not exist"),
        (dict(min_word_count=0), ValueError, "--min-word-count must be at least 1, got 0"),
        (dict(max_attributes=0), ValueError, "--max-attributes must be at least 1, got 0"),
        (dict(min_word_count=999), ValueError, "--min-word-count 999: no word occurs that often"),
    ],
)
def test_options_out_of_range_raise(folder, options, error, message):
    with pytest.raises(error, match=message):
        task_of(**{"folder": options.pop("data", folder), **options})


def test_subsets_that_are_not_there(folder):
    with pytest.raises(ValueError, match="the subset must be one of train, valid, val, test, got 'train1'"):
        task_of(folder).load_dataset("train1")
    (folder / "splits.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"--splits: .* has no splits\.json; it gives each image its split"):
        task_of(folder).load_dataset("train")


def test_a_number_and_its_text_are_one_id(folder):
    """Results use the ids of the captions, against which they are scored. A mark of the byte order is no error."""
    expected = task_of(folder).captions

    def as_text(content: dict) -> None:
        for image in content["images"]:
            image["cocoid"] = str(image["cocoid"])

    change(folder / "splits.json", as_text)
    for name in ("captions.json", "splits.json", "attributes.json"):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    task = task_of(folder)
    task.load_dataset("train")
    assert task.captions == expected
    assert all(isinstance(image_id, int) for part in task.captions.values() for image_id in part)


def test_a_dictionary_of_other_captions(folder, caplog):
    (folder / "dict.txt").write_text("a 9\nthe 8\ndog 3\ncat 3\nbus 3\nkite 3\nboat 3\n")
    with caplog.at_level(logging.WARNING, "attn_plugins"):
        task_of(folder).load_dataset("valid")
    [told] = [record.message for record in caplog.records]  # of the 7 words of each image: the color twice, and "is"
    assert told.startswith("43 % of the words of valid are not in")
    assert "dict.txt: if it was made from other captions, delete it to rebuild it" in told
