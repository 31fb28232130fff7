"""The quick demo, from digits to an attention page."""

from __future__ import annotations

import pytest

from tools import demo_quick


@pytest.mark.usefixtures("one_thread")
def test_the_page_is_drawn(tmp_path, capsys):
    data, output = tmp_path / "data", tmp_path / "out"
    demo_quick.write_digits(data, 10)  # of each digit, every fifth for validation
    assert len(list(data.glob("train/*/*"))) == 4 * len(list(data.glob("val/*/*"))) == 80
    assert demo_quick.main(["--epochs", "1", "--data", str(data), "--output", str(output)]) == 0
    assert f"open {output / 'attention' / 'attention.html'}" in capsys.readouterr().out
    page = (output / "attention/attention.html").read_text()
    assert "<script" in page
    assert list((output / "attention").glob("*.png"))


def test_bad_epochs(capsys):
    with pytest.raises(SystemExit):
        demo_quick.main(["--epochs", "0"])
    assert "--epochs must be at least 1, got 0" in capsys.readouterr().err
