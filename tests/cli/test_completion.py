"""What the shell offers for each argument and option."""

import os
import subprocess
import sys

import pytest

from poetmodel.backends.registry import backend_names
from poetmodel.baselines import method_names
from poetmodel.baselines.own import own_names
from poetmodel.bench.figures import FIGURES
from poetmodel.cli import completion
from poetmodel.device.io import device_names
from poetmodel.graph.catalogue import model_names

FOREIGN = ("numpy", "scipy", "pyomo", "highspy", "networkx", "torch", "rich")
"""Packages that are too slow for a keystroke."""


def offered(words, typed):
    """Return what click's completion offers after some words."""
    from typer._completion_classes import BashComplete  # the class for bash, of this typer
    from typer.main import get_command

    from poetmodel.cli.application import app

    complete = BashComplete(get_command(app), {}, "poetmodel", "_POETMODEL_COMPLETE")
    return [item.value for item in complete.get_completions(list(words), typed)]


OF_DEVICE = ("solve", "limits", "inspect", "verify", "plan", "trace", "profile")
OF_FILE = ("verify", "plan", "explain", "report", "diff")
MODELS = ("solve", "limits", "inspect", "models", "sweep", "profile")
METHODS = (*method_names(), *own_names())


@pytest.mark.parametrize(
    ("words", "names"),
    [
        *(((name,), model_names()) for name in MODELS),
        *(((name, "x.json", "--graph"), model_names()) for name in OF_FILE),
        (("sweep", "mlp"), model_names()),
        *(((name, "--device"), device_names()) for name in OF_DEVICE),
        (("explain", "x.json", "--device"), device_names()),
        (("profile", "mlp", "--power-from"), device_names()),
        (("devices",), device_names()),
        (("solve", "mlp", "--backend"), backend_names()),
        (("solve", "mlp", "--formulation"), ("lazy", "compact", "paper")),
        (("solve", "mlp", "--minimize"), ("energy", "time", "ram", "writes")),
        (("solve", "mlp", "--deadline-counts"), ("compute", "serial", "overlap")),
        (("solve", "mlp", "--method"), METHODS),
        (("sweep", "mlp", "--methods"), METHODS),
        (("plan", "x.json", "--mode"), ("blocking", "dma")),
        (("plan", "x.json", "--format"), ("json", "text")),
        (("bench",), tuple(FIGURES)),
    ],
)
def test_names_are_offered(words, names):
    """All that would be accepted, those with the typed beginning, and nothing else."""
    assert offered(words, "") == list(names)
    assert offered(words, names[0]) == [name for name in names if name.startswith(names[0])]
    assert offered(words, "nothing-of-that") == []


def test_lists_go_on_after_a_comma():
    """The last name of a list is completed, and none is offered twice."""
    assert offered(("sweep", "mlp", "--devices"), "rpi4b,mk") == ["rpi4b,mkr1000"]
    assert offered(("sweep", "mlp", "--backends"), "highs,") == ["highs,scip", "highs,gurobi"]
    assert "optimal,dtr" in offered(("sweep", "mlp", "--methods"), "optimal,d")


def test_names_have_their_meaning():
    """Shells that can show more than a name show what it is."""
    for names in (completion.models, completion.devices, completion.methods):
        assert [name for name, text in names() if not text] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    ["solve ", "solve mlp --device ", "solve mlp --method ", "bench ", "sweep mlp --devices rp"],
)
def test_a_keystroke_loads_nothing_slow(line):
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
