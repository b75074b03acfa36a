"""The folders of ``examples/``: short, named in README, and run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kit.programs import require_programs
from poetmodel.export.board import Target

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(path for path in (ROOT / "examples").iterdir() if path.is_dir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_examples_are_short_and_named(folder):
    """At most 200 lines, a README of one screen with a picture, and a link in the README."""
    sources = [path for path in folder.iterdir() if path.suffix in (".py", ".c", ".toml")]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources) <= 200
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 50
    pictures = [path for path in folder.iterdir() if path.suffix in (".svg", ".png")]
    assert [path.name for path in pictures if f"]({path.name})" in text]
    assert f"(examples/{folder.name})" in (ROOT / "README.md").read_text(encoding="utf-8")


def run(program, folder, *arguments):
    """Execute a program of ``examples/`` in a folder; return what it prints."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / program), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"MPLBACKEND": "Agg"},
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_experiment(tmp_path):
    """A front with proved bounds; the second solver finds the value of the first."""
    pytest.importorskip("distributed")
    pytest.importorskip("matplotlib")
    done = run("experiment/experiment.py", tmp_path, tmp_path / "out")
    rows = [line for line in done.stdout.splitlines() if line.startswith("| poetmodel")]
    assert len(rows) == 5
    assert all("%" in row.split("|")[-2] for row in rows)
    assert (tmp_path / "out" / "front.svg").stat().st_size > 1000
    first, second = (line.partition("energy ")[2] for line in done.stdout.splitlines()[-2:])
    assert float(first.split()[0]) == pytest.approx(float(second.split()[0]), rel=1e-4)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(1800)
def test_sensor(tmp_path):
    """The board learns its users, in int8 and a quarter of the RAM; power cuts change nothing."""
    for package in ("torch", "torchao", "sklearn", "matplotlib"):
        pytest.importorskip(package)
    require_programs(Target.M4)
    *rows, cut = run("sensor/sensor.py", tmp_path).stdout.splitlines()
    table = {name.strip(): cells for _, name, *cells, _ in (row.split("|") for row in rows[2:])}
    for cell in table["new users"]:
        before, after = map(float, re.findall(r"[\d.]+", cell))
        assert before + 5 < after
    int8, full = (int(cell.replace(",", "").split()[0]) for cell in table["RAM"])
    assert 4 * int8 < full
    resumed, again, whole = re.fullmatch(r"cut .* step (\d+): (\[.+\]) (\[.+\])", cut).groups()
    assert int(resumed) > 0
    assert again == whole
    assert (tmp_path / "out" / "learning.svg").stat().st_size > 1000


@pytest.mark.seeds
@pytest.mark.torch
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_gpt(tmp_path):
    """All ways have eager's losses; a smaller budget has a smaller peak."""
    for package in ("torch", "matplotlib"):
        pytest.importorskip(package)
    rows = [line.split(" | ") for line in run("gpt/gpt.py", tmp_path).stdout.splitlines()[2:]]
    assert len(rows) == 7
    assert all(row[-1] == "equal to eager's |" for row in rows)
    peak = {row[0].removeprefix("| "): int(row[1].split()[0]) for row in rows}
    for way in ("backend", "compile"):
        assert peak[f"{way} 40%"] < peak[f"{way} 60%"] < peak["eager"]
    assert (tmp_path / "out" / "curves.svg").stat().st_size > 1000
