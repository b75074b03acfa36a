"""What the shell offers for each argument and option."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from poetmodel.backends.registry import backend_names
from poetmodel.baselines import method_names
from poetmodel.baselines.own import own_names
from poetmodel.bench.figures import FIGURES
from poetmodel.cli import completion
from poetmodel.device.io import device_names
from poetmodel.graph.catalogue import model_names

if TYPE_CHECKING:
    from collections.abc import Sequence

FOREIGN = ("numpy", "scipy", "pyomo", "highspy", "networkx", "torch", "rich")
"""Packages that are too slow for a keystroke."""


def offered(words: Sequence[str], typed: str) -> list[str]:
    """Return what click's completion offers after some words."""
    from typer._completion_classes import BashComplete  # the class for bash, of this typer
    from typer.main import get_command

    from poetmodel.cli.application import app

    complete = BashComplete(get_command(app), {}, "poetmodel", "_POETMODEL_COMPLETE")
    return [item.value for item in complete.get_completions(list(words), typed)]


@pytest.mark.parametrize(
    "words",
    [
        *((name,) for name in ("solve", "limits", "inspect", "models", "sweep", "profile")),
        *((name, "x.json", "--graph") for name in ("verify", "plan", "explain", "report", "diff")),
        ("sweep", "mlp"),
    ],
)
def test_networks_are_offered(words: tuple[str, ...]) -> None:
    """Every MODEL is a name of a network that comes along, those with the typed beginning."""
    assert offered(words, "") == list(model_names())
    assert offered(words, "paper/vgg") == ["paper/vgg16", "paper/vgg16-cifar"]
    assert offered(words, "nothing-of-that") == []


@pytest.mark.parametrize(
    "words",
    [
        *(
            (name, "--device")
            for name in ("solve", "limits", "inspect", "verify", "plan", "trace", "profile")
        ),
        ("explain", "x.json", "--device"),
        ("profile", "mlp", "--power-from"),
        ("devices",),
    ],
)
def test_devices_are_offered(words: tuple[str, ...]) -> None:
    """Every device is a name of one that comes along."""
    assert offered(words, "") == list(device_names())
    assert offered(words, "rpi") == ["rpi4b"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("solve", "mlp", "--backend"), backend_names()),
        (("limits", "mlp", "--backend"), backend_names()),
        (("solve", "mlp", "--formulation"), ("lazy", "compact", "paper")),
        (("solve", "mlp", "--minimize"), ("energy", "time", "ram", "writes")),
        (("solve", "mlp", "--deadline-counts"), ("compute", "serial", "overlap")),
        (("plan", "x.json", "--mode"), ("blocking", "dma")),
        (("plan", "x.json", "--format"), ("json", "text", "binary", "trace", "memory-viz")),
        (("bench",), tuple(FIGURES)),
    ],
)
def test_choices_are_offered(words: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Solvers, formulations, figures: all that would be accepted, and nothing else."""
    assert offered(words, "") == list(names)


def test_methods_are_offered() -> None:
    """Those that come along, the default first, then those of packages and of this process."""
    names = [*method_names(), *own_names()]
    assert offered(("solve", "mlp", "--method"), "") == names
    assert offered(("sweep", "mlp", "--methods"), "") == names


def test_lists_go_on_after_a_comma() -> None:
    """The last name of a list is completed, and none is offered twice."""
    assert offered(("sweep", "mlp", "--devices"), "rpi4b,mk") == ["rpi4b,mkr1000"]
    assert offered(("sweep", "mlp", "--backends"), "highs,") == ["highs,scip", "highs,gurobi"]
    assert "optimal,dtr" in offered(("sweep", "mlp", "--methods"), "optimal,d")


def test_names_have_their_meaning() -> None:
    """Shells that can show more than a name show what it is."""
    for names in (completion.models, completion.devices, completion.methods):
        assert [name for name, text in names() if not text] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    ["solve ", "solve mlp --device ", "solve mlp --method ", "bench ", "sweep mlp --devices rp"],
)
def test_a_keystroke_loads_nothing_slow(line: str) -> None:
    """Completing loads no solver, no modelling library and no other large package."""
    code = (
        "import atexit, sys\n"
        f"slow = lambda: [name for name in {FOREIGN!r} if name in sys.modules]\n"
        "atexit.register(lambda: print(slow(), file=sys.stderr))\n"
        "from poetmodel.cli.entry import main\n"
        "main()\n"
    )
    words = f"poetmodel {line}"
    asked = {"COMP_WORDS": words, "COMP_CWORD": f"{words.count(' ')}"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | asked | {"_POETMODEL_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip()
    assert done.stderr == "[]\n"
