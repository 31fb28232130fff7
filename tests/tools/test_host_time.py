"""The host's time: a row for each case, by both routes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.triton_checks import needs_triton

pytest.importorskip("timm")


@needs_triton
def test_table(python):
    root = str(Path(__file__).parents[2])
    code = "from tools import host_time; host_time.ROUNDS = 1; host_time.main(['--calls', '1'])"
    lines = python(code, TRITON_INTERPRET="0", PYTHONPATH=root).stdout.splitlines()
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines[2:]}
    assert len(rows) == 11
    for name, cells in rows.items():
        peer = name == "SDPA" or name.endswith("timm's")
        assert [bool(cell) for cell in cells] == [True, True, not peer, not peer]
        assert all(float(cell) > 0 for cell in cells if cell)


@needs_triton
def test_the_interpreter_is_refused(monkeypatch, capsys):
    from tools import host_time

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit):
        host_time.main([])
    assert "TRITON_INTERPRET must not be set" in capsys.readouterr().err
