"""Step files as graphs: what commands say is said of the exported kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kit.commands import invoke
from kit.linear_steps import linear_step
from kit.programs import needs
from poetmodel.export.board import Target, build, run
from poetmodel.export.io import save_step
from poetmodel.graph import Graph, floor

if TYPE_CHECKING:
    from kit.messages import Told

BOARD = ("--device", "nrf52840")
RAM = ("--ram", "4KiB")
TILES = ("--tile", "512B")
CNN = """
import torch
from torch import nn

def step():
    torch.manual_seed(0)
    convolutions = (nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 7, 3, padding=1))
    model = nn.Sequential(*convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(448, 10))
    return model, nn.functional.cross_entropy, (torch.ones(1, 1, 8, 8), torch.tensor([3]))
"""


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a step file."""
    path = tmp_path_factory.mktemp("steps") / "net.step.json"
    save_step(linear_step(), path)
    return path


@pytest.fixture(scope="module")
def schedule(step: Path) -> Path:
    """Give a schedule of the step, as ``solve`` finds it."""
    path = step.with_name("net.schedule.json")
    solved = invoke("solve", step, *BOARD, *RAM, "--out", path)
    assert solved.status == 0, solved.err
    return path


def test_a_graph_is_read_from_a_step_file(step: Path) -> None:
    """The library reads it as the command line does."""
    assert Graph.load(step) == linear_step().graph


@pytest.mark.parametrize("way", ["argument", "option"])
def test_inspect_speaks_of_the_exported_kernels(step: Path, way: str) -> None:
    """Its minimum RAM is that of their graph; what C takes beside is told."""
    given = (step,) if way == "argument" else ("--graph", step)
    found = json.loads(invoke("inspect", *given, "--json").out)
    assert found["sha256"] == linear_step().graph.sha256
    assert found["floor_bytes"] == floor(linear_step().graph).bytes
    assert found["reserved_bytes"] > 2048
    assert "graph of the exported kernels" in invoke("inspect", *given).out


def test_other_sizes_are_refused(step: Path, told: Told) -> None:
    """The kernels are those of one size."""
    refused = invoke("inspect", step, "--batch", "2")
    assert refused.status == 2
    told(refused.err)


@pytest.mark.torch
def test_sums_of_gradients_are_captured(tmp_path: Path, told: Told) -> None:
    """``--accumulate`` belongs to the capture: a step file has it, and takes no other."""
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(
        "import torch\n\n\ndef step():\n"
        "    inputs = (torch.ones(2, 16), torch.zeros(2, 4))\n"
        "    return torch.nn.Linear(16, 4), torch.nn.functional.mse_loss, inputs\n"
    )
    step, train = tmp_path / "net.step.json", f"{tmp_path / 'train.py'}:step"
    options = ("--optimizer", "sgd", "--accumulate", "4")
    made = invoke("export", train, *options, "--target", "step", "--out", step)
    assert made.status == 0, made.err
    folder = tmp_path / "firmware"
    assert invoke("export", step, "--out", folder).status == 0
    assert "#define PM_ACCUMULATE 4" in (folder / "include/pm.h").read_text(encoding="utf-8")
    alone = invoke("export", train, "--accumulate", "2", "--out", folder)
    assert (alone.status, "there is no optimizer to wait for" in alone.err) == (2, True)
    again = invoke("export", step, "--accumulate", "2", "--out", folder)
    assert again.status == 2
    told(again.err)


@pytest.mark.torch
def test_tiles_are_those_of_export(tmp_path: Path) -> None:
    """With ``--tile`` the graph is that of the tiled kernels, which a schedule names too."""
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(
        "import torch\n\n\ndef step():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 4))\n"
        "    inputs = (torch.ones(2, 16), torch.zeros(2, 4))\n"
        "    return model, torch.nn.functional.mse_loss, inputs\n"
    )
    step, train = tmp_path / "net.step.json", f"{tmp_path / 'train.py'}:step"
    made = invoke("export", train, "--optimizer", "sgd", "--target", "step", "--out", step)
    assert made.status == 0, made.err
    whole, tiled = (
        json.loads(invoke("inspect", step, *more, "--json").out) for more in ((), TILES)
    )
    assert tiled["nodes"] > whole["nodes"]
    assert tiled["floor_bytes"] < whole["floor_bytes"]
    schedule = tmp_path / "net.schedule.json"
    assert invoke("solve", step, *TILES, *BOARD, "--out", schedule).status == 0
    assert invoke("plan", schedule, "--graph", step, *TILES).status == 0
    assert "PyTorch's kernels" in invoke("trace", train, "--optimizer", "sgd").out


def test_limits_and_infeasible_budgets_speak_of_one_graph(step: Path) -> None:
    """The least RAM that ``limits`` proves is where ``solve`` begins to find schedules."""
    found = json.loads(invoke("limits", step, *BOARD, *RAM, "--json").out)
    least = found["ram"]["both"]["value"]
    assert invoke("solve", step, *BOARD, "--ram", f"{least}B").status == 0
    assert invoke("solve", step, *BOARD, "--ram", f"{least - 1}B").status == 3


@pytest.mark.torch
@pytest.mark.parametrize(
    "more", [(), pytest.param(("--no-paging",), marks=pytest.mark.slow)], ids=["paged", "in RAM"]
)
def test_one_model_has_one_least_ram_from_trace_to_board(
    more: tuple[str, ...], tmp_path: Path, told: Told
) -> None:
    """What ``limits`` proves of the step file is where exported C begins to train, to the byte.

    What it says of the traced graph is of PyTorch's kernels, and it says so. The file has an
    inference too, which exports leave out unless it is asked for.
    """
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(CNN)
    train, graph, step = f"{tmp_path / 'train.py'}:step", "net.graph.json", "net.step.json"
    sgd, folder = ("--optimizer", "sgd"), tmp_path / "firmware"
    assert invoke("trace", train, *sgd, *BOARD, "--out", tmp_path / graph).status == 0
    kept = ("--target", "step", "--infer", "--out", tmp_path / step)
    assert invoke("export", train, *sgd, *kept).status == 0
    traced, exported = (invoke("limits", tmp_path / x, *BOARD, *more) for x in (graph, step))
    assert "PyTorch's kernels" in traced.out
    told(traced.err)
    assert "PyTorch's kernels" not in exported.out + exported.err
    found = json.loads(invoke("limits", tmp_path / step, *BOARD, *more, "--json").out)
    block = found["ram"]["block"]
    assert block["proven"]
    least = int(block["value"]) + found["reserved_bytes"]
    assert f"--ram {least}B of 'poetmodel export'" in " ".join(exported.out.split())
    less = invoke(
        *("export", tmp_path / step, *BOARD, *more, "--ram", f"{least - 1}B", "--out", folder)
    )
    assert less.status in (1, 2)
    assert "proved" in less.err or f"give at least {least:,} B" in less.err
    done = invoke("export", tmp_path / step, *BOARD, *more, "--ram", f"{least}B", "--out", folder)
    assert done.status == 0, done.err
    needs(Target.M4)
    batch = np.ones(64, np.float32).tobytes() + np.array([1], np.int32).tobytes()
    program = build(folder, Target.M4)
    ran = run(program, Target.M4, folder, inputs=batch, steps=3, learning_rate=0.1)
    assert len(ran.require_success().losses) == 3
    assert ran.losses[3] < ran.losses[1]
    assert ran.figures["ram_bytes"] <= ran.figures["ram_limit_bytes"] == least


@pytest.mark.parametrize("command", ["plan", "explain", "verify", "report"])
def test_schedules_of_a_step_are_read_with_it(command: str, step: Path, schedule: Path) -> None:
    """``--graph`` takes the step file that the schedule was solved for."""
    more = ("--out", Path("page.html")) if command == "report" else ()
    ended = invoke(command, schedule, "--graph", step, *more)
    assert ended.status == 0, ended.err


def test_a_sweep_takes_step_files(step: Path) -> None:
    """Beside built-in networks."""
    sweep = ("--devices", "nrf52840", "--ram", "100%", "--methods", "checkpoint-all")
    ended = invoke("sweep", step, *sweep, "--out", Path("out"))
    assert ended.status == 0, ended.err


def test_a_step_file_without_a_graph_is_told(told: Told) -> None:
    """In a sentence that names the place."""
    path = Path("broken.step.json")
    path.write_text(json.dumps({"format": "poetmodel-step", "version": 1}))
    ended = invoke("limits", path, *BOARD)
    assert ended.status == 2
    told(ended.err)
    told(invoke("solve", path, *BOARD).err, "no graph file")
