"""The quick demo, from digits to an attention page."""

from __future__ import annotations

import pytest

from tools import demo_quick
from tools.datasets import image_folders


@pytest.mark.usefixtures("one_thread")
def test_the_page_is_drawn(tmp_path, capsys):
    data, output = tmp_path / "data", tmp_path / "out"
    image_folders.main(["digits", str(data)])
    for split in ("train", "val"):
        for folder in (data / split).iterdir():  # a few pictures of each digit
            for picture in sorted(folder.iterdir())[8:]:
                picture.unlink()
    assert demo_quick.main(["--epochs", "1", "--data", str(data), "--output", str(output)]) == 0
    assert f"open {output / 'attention' / 'attention.html'}" in capsys.readouterr().out
    page = (output / "attention/attention.html").read_text()
    assert "<canvas" in page
    assert list((output / "attention").glob("*.png"))


def test_bad_epochs(capsys):
    with pytest.raises(SystemExit):
        demo_quick.main(["--epochs", "0"])
    assert "--epochs must be at least 1, got 0" in capsys.readouterr().err
