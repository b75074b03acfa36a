"""The tutorial: it runs, what it claims holds, and what it shows is what running it gives."""

import json
import subprocess
import sys
from base64 import b64decode
from copy import deepcopy

import numpy as np
import pytest

from kit.commands import invoke
from make_tutorial import ROOT, TUTORIAL, differences

STORED = json.loads(TUTORIAL.read_text(encoding="utf-8"))
CODE = [cell for cell in STORED["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_it_runs_and_its_outputs_are_current():
    """No cell fails, not even an assertion, and each prints what the file has."""
    for package in ("IPython", "nbformat", "matplotlib"):
        pytest.importorskip(package)
    command = [sys.executable, str(ROOT / "scripts" / "make_tutorial.py"), "--check"]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout


def test_its_claims_are_asserted_and_its_outputs_are_stored():
    """Every part has an assertion; cells were run in order; there is a picture, and no error."""
    source = "".join("".join(cell["source"]) for cell in CODE)
    assert source.count("assert ") > 10
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    outputs = [output for cell in CODE for output in cell["outputs"]]
    assert any("image/svg+xml" in output.get("data", {}) for output in outputs)
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result"}
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}


def test_what_differs_is_told():
    """Another text, and a picture that is missing; not the numbers within a picture."""
    other = deepcopy(STORED)
    printed, pictured = (
        next(cell for cell in other["cells"] if key in str(cell.get("outputs")))
        for key in ("'text'", "image/svg+xml")
    )
    printed["outputs"][0]["text"] = ["something else\n"]
    pictured["outputs"][0]["data"]["image/svg+xml"] = ["<svg/>"]
    (found,) = differences(STORED, other)
    assert "something else" in found
    pictured["outputs"] = []
    assert len(differences(STORED, other)) == 2


@pytest.mark.torch
def test_its_step_is_what_pytorch_gives(tmp_path):
    """The file of the step that it exports is captured from the network that the script has.

    All but the release of PyTorch that did it, which the file names, and the last bits of the
    initial weights, which depend on the instructions that a processor has.
    """
    pytest.importorskip("torch")
    out = tmp_path / "digits.step.json"
    done = invoke(
        *("export", f"{ROOT / 'scripts' / 'make_tutorial.py'}:digits", "--optimizer", "sgd"),
        *("--target", "step", "--name", "digits", "--out", out),
    )
    assert done.status == 0, done.err
    made, stored = (
        json.loads(file.read_text(encoding="utf-8"))
        for file in (out, TUTORIAL.parent / "digits.step.json")
    )
    assert set(made.pop("versions")) == set(stored.pop("versions")) == {"torch"}
    weights = [step.pop("values") for step in (made, stored)]
    assert made == stored
    assert weights[0].keys() == weights[1].keys()
    for name, text in weights[0].items():
        values, kept = (np.frombuffer(b64decode(t), "<f4") for t in (text, weights[1][name]))
        np.testing.assert_allclose(values, kept, rtol=0, atol=1e-7)
