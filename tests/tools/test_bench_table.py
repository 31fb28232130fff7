"""The performance tables are up to date with the benchmarks' files and refer to existing benchmarks."""

from __future__ import annotations

import json
import shutil

import pytest

from tools.bench import cases, results, table
from tools.bench.measure import operators
from tools.files import dump_rows

BEGIN, END = "<!-- benchmark all: begin -->", "<!-- benchmark all: end -->"


@pytest.fixture
def edited(tmp_path):
    """Copy the benchmarks' files; call the fixture with a file and a change of its content."""
    for file in results.FOLDER.glob("*.json"):
        shutil.copy(file, tmp_path)

    def edit(name, change):
        data = results.read(tmp_path / f"{name}.json")
        change(data)
        (tmp_path / f"{name}.json").write_text(results.dump(data))

    return edit


def test_pages_are_what_the_files_say(capsys):
    """README, the site and all pages of benchmarks: titles, peers, ratios, memory, legends and dates."""
    assert table.main(["--check"]) == 0, capsys.readouterr().out


def test_files_hold_a_row_on_each_line():
    for file in results.FOLDER.glob("*.json"):
        text = file.read_text()
        assert text == dump_rows(json.loads(text)), file.name


def table_of(folder, name):
    """Return a page of one table."""
    return table.filled(f"<!-- benchmark {name}: begin --><!-- benchmark {name}: end -->", folder)


def test_rows_of_the_gpu(tmp_path, edited):
    def host_bound(data):
        for row in (row for row in data["rows"] if "error" not in row):
            row["ours"]["how"] = "events, with the host's time: no graph (it waits)"

    assert "| criss_cross: content, B 1, 97x97, d 64, dv 512, bfloat16 |" in table_of(tmp_path, "gpu")
    edited("gpu-h200", host_bound)
    assert table_of(tmp_path, "gpu").count("×**†") > 4


def test_losses_noise_dates_and_machines_show(tmp_path, edited):
    def lose(data):
        data["machine"] |= dict(date="2020-01-01", torch="3.0")
        data["rows"][0] |= dict(ratio=0.934, noisy=True)

    edited("criss_cross-cpu", lose)
    text = table_of(tmp_path, "all")
    assert all(words in text for words in (", 0.93×† |", "† noisy", "torch 3.0, 2020-01-01 to 20"))


def test_missing_measurements_are_reported(tmp_path, edited, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    arguments = ["--pages", str(page), "--benchmarks", str(tmp_path)]
    results.write(tmp_path, "criss_cross-cpu", dict(rows=[]), "")
    assert table.main(arguments) == 1
    assert "criss_cross-cpu.json has no row 'module, " in capsys.readouterr().err
    (tmp_path / "criss_cross-cpu.json").write_text('{"rows": []}')  # as older versions wrote them
    assert table.main(arguments) == 1
    assert "criss_cross-cpu.json is missing or of an older format" in capsys.readouterr().err
    assert page.read_text() == f"{BEGIN}\n{END}\n"
    assert table.main(["--pages", str(tmp_path / "none.md")]) == 1
    assert "none.md: [Errno 2]" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        table.main(["--pages", str(page), "--benchmarks", str(tmp_path / "none")])


def test_the_table_of_backends_is_what_operators_have():
    words = dict(
        cpu="C++ kernels",
        cuda="CUDA kernels",
        triton="Triton kernels",
        sdpa="PyTorch's SDPA",
        eager="PyTorch operations",
    )
    text = (table.ROOT / "docs/performance.md").read_text()
    for name, operator in operators().items():
        names = [backend.name for backend in operator.table]
        both = [[n for n in names if n not in absent] for absent in (("cuda", "triton"), ("cpu",))]
        cells = (", then ".join(words.get(n, n) for n in side) for side in both)
        assert f"| `{name}` | {' | '.join(cells)} |\n" in text


def test_only_what_is_between_the_markers_is_written(tmp_path, edited):
    page = tmp_path / "page.md"
    page.write_text(f"# before\n\n{BEGIN}\nas it was\n{END}\n\nafter\n")
    options = ["--pages", str(page), "--benchmarks", str(tmp_path)]
    assert table.main([*options, "--check"]) == 1
    assert "as it was" in page.read_text()
    assert table.main(options) == 0
    assert table.main([*options, "--check"]) == 0
    text = page.read_text()
    assert text.startswith(f"# before\n\n{BEGIN}\n| operator")
    assert text.endswith(f"\n{END}\n\nafter\n")
    assert "as it was" not in text
    for text in ("", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}", BEGIN + END.replace("all", "short")):
        with pytest.raises(ValueError, match="each table needs"):
            table.filled(text, tmp_path)
    with pytest.raises(ValueError, match=f"must be one of {', '.join(table.TABLES)}, got 'other'"):
        table_of(tmp_path, "other")


def test_every_row_of_the_table_is_measured():
    names = (*cases.NAMES, "transformers_models", "end_to_end")
    measured = {name: {case.name for case in cases.cases(name, "cpu")} for name in names}
    for entry in (*table.OPERATORS, *table.MODELS):
        for pass_name in entry.passes:
            assert f"{entry.case}, {pass_name}" in measured[entry.file.removesuffix("-cpu")]
