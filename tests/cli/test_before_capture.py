"""Options that are wrong for every step are refused before a module is called or captured."""

import json

import pytest

from kit.commands import invoke

RAISES = """
def step():
    raise RuntimeError("it was called")
"""
EXPORT = ("export", "own.py:step", "--out", "firmware")
CHOOSE = ("choose", "own.py:step", "--device", "nrf52840", "--scores")


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """Write a step that reports its calls, and files that are neither profiles nor scores."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(RAISES)
    (tmp_path / "scores.csv").write_text("layer,value\na,1\n")
    (tmp_path / "good.csv").write_text("name,score\na,1\n")
    (tmp_path / "costs.csv").write_text("no costs\n")


@pytest.mark.torch
@pytest.mark.parametrize(
    "arguments",
    [
        (*EXPORT, "--device", "nowhere"),
        (*EXPORT, "--device", "a100"),
        (*EXPORT, "--ram", "32XB"),
        (*EXPORT, "--ram", "1KiB"),
        (*EXPORT, "--stack", "much"),
        (*EXPORT, "--tile", "2B"),
        (*EXPORT, "--tile", "small"),
        (*EXPORT, "--deadline", "soon"),
        (*EXPORT, "--profile", "none.csv"),
        (*EXPORT, "--profile", "costs.csv"),
        (*EXPORT, "--prefix", "9x"),
        (*EXPORT, "--byte-input", "x=float"),
        (*EXPORT, "--shared-kernels", "firmware"),
        (*EXPORT, "--target", "step", "--byte-input", "x=float"),
        (*EXPORT, "--target", "executorch", "--ram", "32XB"),
        (*EXPORT, "--target", "executorch", "--ram", "50%", "--device", "nowhere"),
        (*CHOOSE, "none.csv"),
        (*CHOOSE, "scores.csv"),
        (*CHOOSE, "good.csv", "--ram", "32XB"),
        (*CHOOSE, "good.csv", "--energy-budget", "none"),
        (*CHOOSE, "good.csv", "--tile", "1B"),
        (*CHOOSE, "good.csv", "--profile", "costs.csv"),
        ("trace", "own.py:step", "--device", "nowhere"),
        ("trace", "own.py:step", "--out", "x.graph.json", "--folder", "nowhere"),
        ("profile", "own.py:step", "--device", "nowhere"),
        ("profile", "own.py:step", "--folder", "nowhere"),
        ("profile", "own.py:step", "--target", "qemu", "--device", "nowhere"),
        ("profile", "own.py:step", "--target", "qemu", "--tile", "2B"),
        (*EXPORT, "--byte-input", "x=uint8", "--byte-input", "x=int8"),
        (*EXPORT, "--byte-input", "x=uint8;x=int8"),
        (*EXPORT, "--commit", "--device", "rp2350", "--migrate-from", "nowhere"),
    ],
)
def test_options_are_checked_before_the_module_is_called(arguments, told):
    """Each error names the option; the function was not called, and nothing was written."""
    outcome = invoke(*arguments, status=2)
    assert "it was called" not in outcome.err
    told(outcome.err, " ".join(arguments[2:]))


@pytest.mark.torch
def test_right_options_reach_the_module():
    """The step of these tests reports its calls."""
    for arguments in (EXPORT, (*CHOOSE, "good.csv"), ("trace", "own.py:step")):
        assert "it was called" in invoke(*arguments, status=2).err


def test_what_is_no_step_is_refused_before_its_options(tmp_path):
    """A file that is no step was not captured already; a step file was."""
    (tmp_path / "own.json").write_text(json.dumps({"format": "other"}))
    for name in ("own.json", "none.step.json", "own.txt"):
        outcome = invoke("export", name, "--optimizer", "sgd", "--out", "firmware", status=2)
        assert "captured already" not in outcome.err
        assert name in outcome.err
