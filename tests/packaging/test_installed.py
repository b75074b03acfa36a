"""The content of an installation, from a wheel and from a checkout alike.

Runs in each environment, and again in one with the wheel and no extra; see ``tox.ini``. These tests
need only pytest.
"""

import os
import subprocess
import sys
from importlib.metadata import distribution, version
from importlib.util import find_spec
from pathlib import Path

import pytest

import poetmodel
from poetmodel.device import Device
from poetmodel.device.io import device_names
from poetmodel.files import shipped_folder
from poetmodel.graph.catalogue import load_model, model_names

FROM_WHEEL = os.environ.get("POETMODEL_FROM_WHEEL") == "1"
ROOT = Path(__file__).resolve().parents[2]


def test_distribution_has_its_version_its_types_and_its_command():
    """Package and metadata agree on the version; type checkers see the annotations.

    ``poetmodel`` is a command, and ``python -m poetmodel`` is the same.
    """
    assert poetmodel.__version__ == version("poetmodel")
    assert Path(poetmodel.__file__).with_name("py.typed").is_file()
    scripts = distribution("poetmodel").entry_points.select(group="console_scripts")
    assert [script.value for script in scripts] == ["poetmodel.cli:main"]
    done = subprocess.run(
        [sys.executable, "-m", "poetmodel", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[:2] == ["poetmodel", poetmodel.__version__]


@pytest.mark.parametrize("kind", ["graphs", "devices"])
def test_shipped_files_are_those_of_the_project(kind):
    """Every graph and device of the project is there, byte for byte."""
    found = shipped_folder(kind)
    suffix = {"graphs": "*.graph.json", "devices": "*.toml"}[kind]
    expected = sorted(path.relative_to(ROOT / kind) for path in (ROOT / kind).rglob(suffix))
    assert expected
    assert sorted(path.relative_to(found) for path in found.rglob(suffix)) == expected
    for path in expected:
        assert (found / path).read_bytes() == (ROOT / kind / path).read_bytes()


def test_sources_in_c_are_those_of_the_project():
    """Every file that an exported folder is made of is there, byte for byte."""
    found = Path(poetmodel.__file__).parent / "c"
    there = ROOT / "src" / "poetmodel" / "c"
    expected = sorted(path.relative_to(there) for path in there.rglob("*") if path.is_file())
    assert {path.suffix for path in expected} >= {"", ".c", ".h", ".ld"}
    assert sorted(path.relative_to(found) for path in found.rglob("*.*")) == [
        path for path in expected if path.suffix
    ]
    for path in expected:
        assert (found / path).read_bytes() == (there / path).read_bytes()


def test_every_model_and_device_loads():
    """Each name in the lists can be used."""
    assert {load_model(name).name for name in model_names()} == set(model_names())
    assert {Device.load(name).key for name in device_names()} == set(device_names())


@pytest.mark.skipif(not FROM_WHEEL, reason="needs an environment with the wheel; see tox.ini")
def test_nothing_comes_from_the_checkout():
    """Package, graphs and devices are the installed ones."""
    for path in (Path(poetmodel.__file__), shipped_folder("graphs"), shipped_folder("devices")):
        assert not path.resolve().is_relative_to(ROOT / "src")
        assert path.resolve().is_relative_to(Path(sys.prefix).resolve())


@pytest.mark.skipif(not FROM_WHEEL, reason="needs an environment with the wheel; see tox.ini")
@pytest.mark.parametrize("package", ["pyscipopt", "gurobipy", "torch", "hypothesis"])
def test_extras_are_not_required(package):
    """An installation without extras has none of the optional packages."""
    assert find_spec(package) is None


@pytest.mark.skipif(not FROM_WHEEL, reason="needs an environment with the wheel; see tox.ini")
@pytest.mark.parametrize("backend", ["scip", "gurobi"])
def test_missing_back_end_says_how_to_get_it(backend):
    """A solver that is not installed ends with exit status 5 and the command that installs it."""
    command = [sys.executable, "-m", "poetmodel", "solve", "mlp", "--device", "mkr1000"]
    done = subprocess.run(
        [*command, "--ram", "70%", "--backend", backend],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr
