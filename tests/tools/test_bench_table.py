"""The performance tables are up to date with the benchmarks' files and refer to existing benchmarks."""

from __future__ import annotations

import pytest

from tools.bench import cases, results, table
from tools.bench.cases.end_to_end import MODELS
from tools.bench.results import compared, summarize

BEGIN, END = "<!-- benchmark all: begin -->", "<!-- benchmark all: end -->"


def made_up(folder):
    """Write a file for every benchmark with a row for every entry of the table."""
    files: dict[str, list] = {"calls-cpu": []}
    for entry in (*table.OPERATORS, *table.MODELS):
        for number, pass_name in enumerate(entry.passes):
            facts = dict(memory=2**20, results=2**18, resident=2**19)
            peers = {"slow": summarize([0.09]) | facts, "fast": summarize([0.04]) | facts, "gone": {"error": "x"}}
            row = dict(case=f"{entry.case}, {pass_name}", ours=summarize([0.01 * (1 + number)]) | facts, peers=peers)
            row |= dict(better_peer="fast", ratio=4.0 / (1 + number), memory_ratio=0.25, noisy=False, loaded=False)
            row |= dict(buffer=dict(name="column buffer", size=2**20))
            files.setdefault(entry.file, []).append(row)
    for name, least in (("a", 12e-6), ("b", 34e-6)):
        for kind in ("forward", "gradients recorded"):
            files["calls-cpu"].append(dict(case=f"{name}, 1 thread, {kind}", ours=summarize([least])))
    machine = dict(cpu="Made Up, 2 cores, 2 threads", torch="2.11.0", date="2030-01-02")
    for name, rows in files.items():
        results.write(folder, name, dict(machine=machine, rows=rows), "")
    return files


def test_pages_are_what_the_files_say(capsys):
    """README, the site and all pages of benchmarks."""
    assert table.main(["--check"]) == 0, capsys.readouterr().out


def test_all_rows_are_there(tmp_path):
    made_up(tmp_path)
    text = table.generate(tmp_path, "all")
    for entry in (*table.OPERATORS, *table.MODELS):
        assert f"| {entry.title} | slow; fast | 10 ms, **4.0×** | 20 ms, **2.0×** | 0.25 / 0.25 |" in text
    assert "(Made Up, 2 cores, 2 threads, torch 2.11.0, 2030-01-02)" in text
    assert "forward and forward+backward: ours 25 % and 25 %, slow 25 % and 25 %, fast 25 % and 25 %." in text
    assert "Overhead of a call on tiny inputs, one thread: 12 to 34 µs without autograd, 12 to 34 µs with it." in text
    assert "Not measured" not in text
    short, models = (table.generate(tmp_path, name) for name in ("short", "models"))
    rows = [line.split(" | ")[0].removeprefix("| ") for line in short.splitlines() if "10 ms" in line]
    assert rows == list(table.SHORT)
    assert [line.split(" | ")[0] for line in models.splitlines() if "10 ms" in line] == [
        f"| {entry.title}" for entry in table.MODELS
    ]


def made_up_gpu(folder, how="graph"):
    """Write a file of the GPU's rows."""
    facts = {"memory": 2**20, "how": how}
    rows = [dict(room="modules", case="Lost, float32, forward", error="took too long")]
    for name in table.GPU_SHORT.values():
        room, case = name.split(": ", 1)
        for number, pass_name in enumerate(("forward", "forward+backward")):
            peers = {"slow": summarize([9e-3]) | facts, "fast": summarize([(2 - number * 1.1) * 1e-3]) | facts}
            ours, memory = summarize([1e-3]) | facts, dict(memory=2**21)
            row = compared(f"{case}, {pass_name}", ours, {**peers, "fast": peers["fast"] | memory})
            rows.append(row | dict(room=room, loaded=False))
    machine = dict(gpu="Made Up", torch="2.11.0", cuda="13.0", triton="3.6.0", date="2030-01-02")
    (folder / f"{table.GPU}.json").write_text(results.dump(dict(format=2, machine=machine, rows=rows)))


def test_rows_of_the_gpu(tmp_path):
    assert "Not measured yet in this way: `gpu-h100`." in table.generate(tmp_path, "gpu")
    made_up_gpu(tmp_path)
    short, every = (table.generate(tmp_path, name) for name in ("gpu_short", "gpu"))
    for title, name in table.GPU_SHORT.items():
        assert f"| {title} | slow; fast | 1 ms, **2.0×** | 1 ms, 0.90× | 0.50 / 0.50 |" in short
        assert f"| {name} | slow; fast | 1 ms, **2.0×** | 1 ms, 0.90× | 0.50 / 0.50 |" in every
    assert "on an Made Up, replayed from CUDA graphs" in short
    made_up_gpu(tmp_path, how="events, with the host's time: no graph (it waits)")
    assert "1 ms, **2.0×**†" in table.generate(tmp_path, "gpu_short")
    file = tmp_path / f"{table.GPU}.json"
    file.write_text(file.read_text().replace("operator and projections", "other"))
    with pytest.raises(ValueError, match="has no row 'criss_cross: operator and projections"):
        table.generate(tmp_path, "gpu_short")


def test_losses_noise_and_dates_show(tmp_path):
    files = made_up(tmp_path)
    files["criss_cross-cpu"][0] |= dict(ratio=0.934, noisy=True)
    machine = dict(cpu="Made Up, 2 cores, 2 threads", torch="2.11.0", date="2030-01-01")
    results.write(tmp_path, "criss_cross-cpu", dict(machine=machine, rows=files["criss_cross-cpu"]), "")
    text = table.generate(tmp_path, "all")
    for words in ("| 10 ms, 0.93×\u2020 |", "\u2020 noisy", "torch 2.11.0, 2030-01-01 to 2030-01-02)"):
        assert words in text


def test_missing_measurements_are_reported(tmp_path, capsys):
    made_up(tmp_path)
    (tmp_path / "criss_cross-cpu.json").write_text('{"rows": []}')  # as older versions wrote them
    (tmp_path / "end_to_end-cpu.json").unlink()
    text = table.generate(tmp_path, "all")
    assert "Not measured yet in this way: `criss_cross-cpu`, `end_to_end-cpu`." in text
    assert "CrissCrossAttention2d" not in text
    results.write(tmp_path, "criss_cross-cpu", dict(rows=[]), "")
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    assert table.main(["--pages", str(page), "--benchmarks", str(tmp_path)]) == 1
    assert "criss_cross-cpu.json has no row 'module, " in capsys.readouterr().err


def test_only_what_is_between_the_markers_is_written(tmp_path):
    made_up(tmp_path)
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
    with pytest.raises(ValueError, match="must be one of all, models, short, gpu, gpu_short, got 'other'"):
        table.filled("<!-- benchmark other: begin --><!-- benchmark other: end -->", tmp_path)


def test_every_row_of_the_table_is_measured():
    measured = {name: {case.name for case in cases.cases(name, "cpu")} for name in cases.NAMES}
    for entry in (*table.OPERATORS, table.COLUMN_BUFFER):
        for pass_name in entry.passes:
            assert f"{entry.case}, {pass_name}" in measured[entry.file.removesuffix("-cpu")]
    titles = {f"{model.title}, {model.size[0]}x{model.size[1]}" for model in MODELS}
    assert {entry.case for entry in table.MODELS} == titles
