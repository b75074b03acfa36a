"""The folders of ``examples/``: short, named in README, and run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(path for path in (ROOT / "examples").iterdir() if path.is_dir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_examples_are_short_and_named(folder):
    """At most 200 lines, a README of one screen with a picture, and a link in the README."""
    sources = [path for path in folder.iterdir() if path.suffix in (".py", ".toml")]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources) <= 200
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 50
    pictures = [path for path in folder.iterdir() if path.suffix in (".svg", ".png")]
    assert [path.name for path in pictures if f"]({path.name})" in text]
    assert f"(examples/{folder.name})" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_experiment(tmp_path):
    """A front with proved bounds; the second solver finds the value of the first."""
    pytest.importorskip("distributed")
    pytest.importorskip("matplotlib")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/experiment/experiment.py"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"MPLBACKEND": "Agg"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| poetmodel")]
    assert len(rows) == 5
    assert all("%" in row.split("|")[-2] for row in rows)
    assert (tmp_path / "out" / "front.svg").stat().st_size > 1000
    first, second = (line.partition("energy ")[2] for line in done.stdout.splitlines()[-2:])
    assert float(first.split()[0]) == pytest.approx(float(second.split()[0]), rel=1e-4)
