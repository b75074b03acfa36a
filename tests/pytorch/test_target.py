"""Targets: finding a user's function and saying what is wrong with it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from poetmodel.errors import InputError
from poetmodel.torch import target
from poetmodel.torch.target import is_captured, is_target, load_step

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """\
import math

def step():
    return "model", None, ["x"]

def pair():
    return 1, 2

def no_tuple():
    return "model", None, "x"

def no_loss():
    return "model", 3, ("x",)

def leaves():
    raise SystemExit(3)

def broken():
    return math.sqrt(-1)

number = 3
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a user's file; the current folder is its own, and PyTorch is not needed."""
    path = tmp_path / "user_step.py"
    path.write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(target, "require_torch", lambda: "2.13.0")
    monkeypatch.delitem(sys.modules, "user_step", raising=False)
    return path


@pytest.mark.parametrize("head", ["user_step", "user_step.py", "{folder}/user_step.py"])
def test_function_is_found(head: str, file: Path) -> None:
    """A module of the current folder, a file, and a file elsewhere are found."""
    path = list(sys.path)
    found = load_step(f"{head.format(folder=file.parent)}:step")
    assert found == ("model", None, ("x",))
    assert sys.path == path


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("user_step", "'user_step': expected module:function"),
        ("user_step:", "expected module:function"),
        (":step", "expected module:function"),
        ("user_step:nothing", "user_step has no function 'nothing'"),
        ("user_step:number", "'number'"),
        ("nowhere:step", "there is no module 'nowhere'"),
        ("nowhere.inner:step", "'nowhere.inner'"),
        ("nowhere.py:step", "nowhere.py: no such file"),
        ("user_step:pair", r"expected it to return \(model, loss_fn, inputs\), got a tuple of 2"),
        ("user_step:no_tuple", "inputs: expected a tuple, got a str"),
        ("user_step:no_loss", "loss_fn: .*got 3"),
        ("user_step:leaves", r"user_step:leaves: it ended the program \(sys.exit\(3\)\)"),
        ("user_step:broken", r"user_step.py:19 \(return math.sqrt\(-1\)\) with ValueError: "),
    ],
)
@pytest.mark.usefixtures("file")
def test_what_is_wrong_is_said(text: str, fragment: str) -> None:
    """Every way to get a target wrong has its sentence."""
    with pytest.raises(InputError, match=fragment):
        load_step(text)


@pytest.mark.parametrize(
    ("content", "fragment"),
    [("import no_such_module\n", "ModuleNotFoundError"), ("def step(:\n", "SyntaxError")],
)
def test_a_file_that_cannot_be_read_is_said(content: str, fragment: str, file: Path) -> None:
    """What goes wrong while the user's file is read is no traceback."""
    file.write_text(content)
    with pytest.raises(InputError, match=f"failed.*{fragment}"):
        load_step("user_step.py:step")


def test_targets_are_told_from_files() -> None:
    """Graph files and models that come along are no targets."""
    assert is_target("package.module:step")
    assert is_target("folder/file.py:step")
    assert not is_target("net.graph.json")
    assert not is_target("paper/vgg16")
    assert not is_target("a:b.json")
    assert is_captured("train.py"), "the function was forgotten"
    assert not is_captured("net.step.json")
