"""Step files as graphs and as C: commands report about the exported kernels."""

import json
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest

from kit.commands import invoke, invoke_refused
from kit.digits import STEP, linear_step
from kit.programs import require_programs
from poetmodel.case.case import Case
from poetmodel.case.solving import LoadedCase, Placing, Stages, solve_case
from poetmodel.cli.explore import initial_state
from poetmodel.cli.options import CostOptions, GraphOptions
from poetmodel.device import Device
from poetmodel.export.board import Target, build_program, run_program
from poetmodel.graph import floor
from poetmodel.graph.catalogue import Variant
from poetmodel.lowered.io import load_step, save_step
from poetmodel.problem import Limits
from poetmodel.problem import io as problem_io
from poetmodel.solver import fitting
from poetmodel.solver.request import SearchOptions
from poetmodel.sweeps.runs import grid

BOARD = ("--device", "nrf52840")
RAM = ("--ram", "4KiB")
TILES = ("--tile", "512B")
TRAIN = """
import torch
from torch import nn

ROWS = (torch.ones(2, 16), torch.zeros(2, 4))

def linear():
    return nn.Linear(16, 4), nn.functional.mse_loss, ROWS

def layers():
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4)), nn.functional.mse_loss, ROWS

def images():
    torch.manual_seed(0)
    convolutions = (nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 7, 3, padding=1))
    model = nn.Sequential(*convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(448, 10))
    return model, nn.functional.cross_entropy, (torch.ones(1, 1, 8, 8), torch.tensor([3]))
"""


@pytest.fixture
def train(tmp_path):
    """Return the file of functions that return training steps."""
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path / "train.py"


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """Return a step file."""
    path = tmp_path_factory.mktemp("steps") / "net.step.json"
    save_step(linear_step(), path)
    return path


@pytest.fixture(scope="module")
def schedule(step):
    """Return a schedule of the step, as ``solve`` finds it."""
    path = step.with_name("net.schedule.json")
    invoke("solve", step, *BOARD, *RAM, "--out", path, status=0)
    return path


@pytest.mark.parametrize("way", ["argument", "option"])
def test_inspect_speaks_of_the_exported_kernels(step, way):
    """The minimum RAM is that of their graph; further RAM of C is printed."""
    given = (step,) if way == "argument" else ("--graph", step)
    found = json.loads(invoke("inspect", *given, "--json").out)
    assert found["sha256"] == linear_step().graph.sha256
    assert found["floor_bytes"] == floor(linear_step().graph).bytes
    assert found["reserved_bytes"] > 2048
    assert "graph of the exported kernels" in invoke("inspect", *given).out


def test_other_sizes_are_refused(step, told):
    """The kernels have one size; a file without a graph is reported in a sentence."""
    told(invoke_refused("inspect", step, "--batch", "2"))
    told(invoke_refused("solve", step, *BOARD, "--tile", "auto", "--state", "sgd"), "state")
    path = Path("broken.step.json")
    path.write_text(json.dumps({"format": "poetmodel-step", "version": 1}))
    told(invoke_refused("limits", path, *BOARD), "no step")
    told(invoke("solve", path, *BOARD).err, "no graph file")


@pytest.mark.torch
def test_sums_of_gradients_are_captured(train, tmp_path, told):
    """``--accumulate`` belongs to the capture: a step file has it, and accepts no other."""
    step, train = tmp_path / "net.step.json", f"{train}:linear"
    options = ("--optimizer", "sgd", "--accumulate", "4")
    invoke("export", train, *options, "--target", "step", "--out", step, status=0)
    folder = tmp_path / "firmware"
    assert invoke("export", step, "--out", folder).status == 0
    assert "#define PM_ACCUMULATE 4" in (folder / "include/pm.h").read_text(encoding="utf-8")
    alone = invoke("export", train, "--accumulate", "2", "--out", folder)
    assert (alone.status, "needs an optimizer" in alone.err) == (2, True)
    told(invoke_refused("export", step, "--accumulate", "2", "--out", folder))


@pytest.mark.torch
def test_tiles_are_those_of_export(train, tmp_path):
    """With ``--tile`` the graph is that of the tiled kernels, which a schedule names too."""
    step, train = tmp_path / "net.step.json", f"{train}:layers"
    invoke("export", train, "--optimizer", "sgd", "--target", "step", "--out", step, status=0)
    whole, tiled = (
        json.loads(invoke("inspect", step, *more, "--json").out) for more in ((), TILES)
    )
    assert tiled["nodes"] > whole["nodes"]
    assert tiled["floor_bytes"] < whole["floor_bytes"]
    schedule = tmp_path / "net.schedule.json"
    assert invoke("solve", step, *TILES, *BOARD, "--out", schedule).status == 0
    assert invoke("plan", schedule, "--graph", step, *TILES).status == 0
    assert "PyTorch's kernels" in invoke("trace", train, "--optimizer", "sgd").out


@pytest.mark.slow
@pytest.mark.torch
def test_commands_find_the_tiles_in_which_a_step_fits(train, tmp_path, told):
    """``limits`` has the floor of both, and refusals name the step; RAM is a share of the whole."""
    step, train = tmp_path / "net.step.json", f"{train}:images"
    made = invoke("export", train, "--optimizer", "sgd", "--target", "step", "--out", step)
    assert made.status == 0, made.err
    found = json.loads(invoke("limits", step, *BOARD, "--json").out)
    assert found["tiled_floor_bytes"] < found["floor_bytes"]
    ram = ("--ram", f"{found['tiled_floor_bytes']}B")
    committed = json.loads(invoke("limits", step, *BOARD, "--commit", "--json").out)
    assert committed["reserved_bytes"] - found["reserved_bytes"] == 512  # its stack
    refused = invoke("solve", step, *BOARD, *ram)
    assert refused.status == 3
    assert "proved for the step without tiles" in refused.err
    solved = invoke("solve", step, "--tile", "auto", *BOARD, *ram)
    assert solved.status == 0, solved.err
    told(solved.err)
    none = invoke("solve", step, "--tile", "auto", *BOARD, "--ram", "2KiB", status=3)
    assert "no tile size fits" in none.err
    assert "--tile auto looks" not in none.err
    between, loose = ("--ram", f"{found['floor_bytes'] - 1}B"), ("--gap", "0.5", "--json")
    stated = []
    with pytest.MonkeyPatch.context() as patched:  # a problem is stated once for each size
        state = problem_io.state_problem
        patched.setattr(
            problem_io, "state_problem", lambda *a: stated.append(id(a[0])) or state(*a)
        )
        auto = json.loads(invoke("solve", step, "--tile", "auto", *BOARD, *between, *loose).out)
    assert len(stated) == len({*stated})
    tried = {trial["tile_bytes"]: trial["value"] for trial in auto["tile_trials"]}
    assert auto["problem"]["ram_budget_bytes"] == found["floor_bytes"] - 1
    assert len(tried) > 1
    assert auto["objective"]["value"] <= tried[auto["tile_bytes"]] == min(tried.values())
    small = ("--tile", f"{found['tile_bytes']}B", "--json")
    half, whole = (
        json.loads(invoke("solve", step, *more, *BOARD, "--ram", "50%").out)
        for more in (small, ("--json",))
    )
    assert half["problem"]["ram_budget_bytes"] == whole["problem"]["ram_budget_bytes"]


class Refusing(Stages):
    """Some tiles exceed a limit that no problem states; what is left is noted."""

    def __init__(self, tile_nodes):
        self.tile_nodes, self.settled = tile_nodes, []

    def excess_bytes(self, step, result):
        """Refuse the tiles of so many nodes."""
        assert result.problem.graph is step.graph
        return int(len(step.graph.nodes) == self.tile_nodes)

    def settle(self, remainder):
        """Note what is left, once."""
        self.settled.append(remainder)
        return remainder


@pytest.mark.torch
def test_a_step_in_memory_is_the_case_of_its_file(train, tmp_path, monkeypatch):
    """With its problem and tiles; a caller may know a limit that the best tiles exceed."""
    step = tmp_path / "net.step.json"
    made = invoke(
        "export", f"{train}:images", "--optimizer", "sgd", "--target", "step", "--out", step
    )
    assert made.status == 0, made.err
    least = json.loads(invoke("inspect", step, "--json").out)["floor_bytes"]
    search = SearchOptions(gap=1.0)  # any schedule
    tiled = Case(shape=Variant(tile="auto"), limits=Limits(ram=least - 1), search=search)
    board = Device.load("nrf52840")
    loaded = LoadedCase.read(replace(tiled, step=load_step(step), board=board))
    by_file = LoadedCase.read(replace(tiled, source=str(step), device="nrf52840"))
    assert by_file.problem.to_dict() == loaded.problem.to_dict()
    sizes, file_sizes = ([size for size, _ in one.tiles.candidates] for one in (loaded, by_file))
    assert file_sizes == sizes
    by_step = solve_case(loaded)
    assert [trial.tile_bytes for trial in by_step.tiles.trials] == sizes
    stages = Refusing(len(by_step.tiles.step.graph.nodes))
    placed = solve_case(loaded, placing=Placing(alignment=4), stages=stages)
    (left,) = stages.settled
    assert placed.tiles == left.tiles
    assert placed.tiles.tile_bytes != by_step.tiles.tile_bytes
    plan = placed.require_plan()
    assert plan.require_arena().bytes <= least - 1
    assert plan.plan.identity.sha256 == placed.tiles.step.graph.sha256
    # A stop in trials leaves a tenth of the time, which the caller's part does not divide again.
    limits, fit = [], fitting.fit_arena
    monkeypatch.setattr(
        fitting, "fit_arena", lambda *a, **b: limits.append(b["time_limit"]) or fit(*a, **b)
    )
    request = SearchOptions(time_limit_s=100.0).start(lambda _: False)
    stopped = solve_case(loaded, request, placing=Placing(time_ratio=0.5))
    assert stopped.tiles.is_interrupted
    assert round(*limits) == 10


@pytest.mark.torch
def test_a_step_file_takes_inputs_as_bytes(train, tmp_path):
    """The option counts where a step is captured: a quarter of the RAM of its inputs."""
    files = tmp_path / "reals.step.json", tmp_path / "bytes.step.json"
    for path, more in zip(files, ((), ("--byte-input", "inputs[0]=uint8:0.1")), strict=True):
        invoke("export", f"{train}:images", *more, "--target", "step", "--out", path, status=0)
    reals, bytes_ = (json.loads(invoke("inspect", path, "--json").out) for path in files)
    assert reals["reserved_bytes"] - bytes_["reserved_bytes"] == 3 * 64


@pytest.mark.torch
def test_shares_of_ram_are_of_the_whole_step_in_sweeps_too(train, tmp_path):
    """And in the explorer, whose first position of the slider is a share."""
    step, train = tmp_path / "net.step.json", f"{train}:layers"
    invoke("export", train, "--optimizer", "sgd", "--target", "step", "--out", step, status=0)
    whole, tiled = (
        next(iter(grid([str(step)], ["nrf52840"], ram=["50%"], shapes=[Variant(tile=tile)])))
        for tile in (None, "512B")
    )
    least = whole.build_problem().ram_budget_bytes
    assert tiled.build_problem().ram_budget_bytes == least
    assert len(tiled.build_problem().graph.nodes) > len(whole.build_problem().graph.nodes)
    source = GraphOptions(model=str(step), tile="512B")
    costing = CostOptions(device="nrf52840")
    catalogue, choice, first = initial_state(source, costing, Limits(ram="50%"))
    assert first["ram_bytes"] == least
    assert catalogue.case(choice).load_graph() == tiled.build_problem().graph


def test_limits_and_infeasible_budgets_speak_of_one_graph(step):
    """The least RAM that ``limits`` proves is where ``solve`` begins to find schedules."""
    found = json.loads(invoke("limits", step, *BOARD, *RAM, "--json").out)
    least = found["ram"]["both"]["value"]
    assert invoke("solve", step, *BOARD, "--ram", f"{least}B").status == 0
    assert invoke("solve", step, *BOARD, "--ram", f"{least - 1}B").status == 3


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(
    "more", [(), pytest.param(("--no-paging",), marks=pytest.mark.slow)], ids=["paged", "in RAM"]
)
def test_one_model_has_one_least_ram_from_trace_to_board(more, train, tmp_path, told):
    """The minimum RAM of ``limits`` for a step file is that of exported C, to the byte.

    For the traced graph, it is that of PyTorch's kernels, which the output states. The file has
    an inference, too, which exports omit unless requested.
    """
    train, graph, step = f"{train}:images", "net.graph.json", "net.step.json"
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
    whole = ("export", tmp_path / step, *BOARD, *more, "--tile", "none", "--out", folder)
    less = invoke(*whole, "--ram", f"{least - 1}B")
    assert less.status in (1, 2)
    assert "proved" in less.err or f"give at least {least:,} B" in less.err
    done = invoke(*whole, "--ram", f"{least}B")
    assert done.status == 0, done.err
    require_programs(Target.M4)
    batch = np.ones(64, np.float32).tobytes() + np.array([1], np.int32).tobytes()
    program = build_program(folder, Target.M4)
    ran = run_program(program, Target.M4, folder, inputs=batch, steps=3, learning_rate=0.1)
    assert len(ran.require_success().losses) == 3
    assert ran.losses[3] < ran.losses[1]
    assert ran.metrics["ram_bytes"] <= ran.metrics["ram_limit_bytes"] == least


@pytest.mark.parametrize("command", ["plan", "explain", "verify", "report"])
def test_schedules_of_a_step_are_read_with_it(command, step, schedule):
    """``--graph`` accepts the step file of the schedule."""
    more = ("--out", Path("page.html")) if command == "report" else ()
    invoke(command, schedule, "--graph", step, *more, status=0)


def test_a_sweep_takes_step_files(step):
    """Beside built-in networks."""
    sweep = ("--devices", "nrf52840", "--ram", "100%", "--methods", "checkpoint-all")
    invoke("sweep", step, *sweep, "--out", Path("out"), status=0)


# -- export --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "train:step", "--out", "firmware"),
        ("profile", "train:step", "--target", "qemu", "--device", "nrf52840", "--out", "p.csv"),
        ("trace", "module:function"),
        ("choose", "net.py:step", "--device", "nrf52840", "--scores", "gradient-norm"),
    ],
)
def test_missing_torch_is_said(arguments, tmp_path, monkeypatch, told):
    """Without PyTorch, one sentence states how to install it, and nothing is written."""

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("poetmodel.torch.errors.version", missing)
    before = set(tmp_path.iterdir())
    told(invoke(*arguments, status=5).err)
    assert set(tmp_path.iterdir()) == before


def test_what_was_proved_and_what_wears_is_said(tmp_path):
    """Energy, overhead and gap of the schedule; commits write all state in RAM each step too.

    Each tensor has a checksum then, and the generation a record.
    """
    how = ("--ram", "95%", "--device", "nano33ble", "--no-recompute", "--gap", "0.5")
    written = {}
    for name, options in (("plain", ()), ("commits", ("--commit",))):
        told = invoke("export", STEP, *how, *options, "--out", tmp_path / name).out
        rows = {line.split("  ")[0].strip(): line for line in told.splitlines()}
        assert {"energy", "overhead", "gap", "compute time", "peak RAM", "storage worn"} < set(rows)
        document = invoke("export", STEP, *how, *options, "--out", tmp_path / name, "--json").json
        written[name] = document["written_bytes"]
        assert document["stored_bytes"] % 4096 == 0
    state = invoke("state", tmp_path / "commits", "--json").json
    in_ram = sum(tensor["bytes"] for tensor in state if tensor["home"] == "ram")
    assert written["commits"] == written["plain"] + in_ram + 4 * len(state) + 40


@pytest.mark.parametrize("device", ["nrf52840", "nano33ble"])
def test_page_ins_count_the_first_reads_of_state(device, tmp_path):
    """They are those of the C; state that the core reads where it lies is not paged in."""
    how = ("--device", device, "--ram", "90%", "--no-recompute", "--gap", "0.5")
    told = invoke("export", STEP, *how, "--out", tmp_path).out
    rows = {line.split("  ")[0].strip(): line for line in told.splitlines()}
    source = (tmp_path / "src" / "pm_step.c").read_text(encoding="utf-8")
    out, into = rows["page-outs, page-ins"].removeprefix("page-outs, page-ins").split()[:2]
    assert int(into) == source.count("pm_page_in(")
    if device == "nrf52840":
        assert int(out.rstrip(",")) == source.count("pm_page_out(")
        assert int(into) > 0


@pytest.mark.parametrize(
    ("limits", "status", "message"),
    [
        (("--deadline", "1ns"), 3, "error: infeasible: deadline 1 ns"),
        (("--ram", "1KiB"), 2, "error: ram: 1.00 KiB less "),
    ],
)
def test_limits_that_nothing_keeps_end_with_their_own_status(limits, status, message, tmp_path):
    """As of solve: 3 where no schedule is proved; 2 where the number itself is too small."""
    outcome = invoke("export", STEP, *limits, "--out", tmp_path / "firmware", status=status)
    assert outcome.err.startswith(message)
    assert not (tmp_path / "firmware").exists()


def test_files_of_a_project_are_not_replaced(tmp_path):
    """Where a folder holds something else by one of our names, the option is named."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "README.md").write_text("mine")
    outcome = invoke("export", STEP, "--out", project, status=2)
    assert outcome.err.startswith(f"error: --out: {project}: holds README.md, which no export")
    assert [(path.name, path.read_text()) for path in project.iterdir()] == [("README.md", "mine")]


@pytest.mark.parametrize(
    ("target", "options", "field"),
    [
        ("executorch", ("m:f",), "--ram"),
        ("executorch", ("m:f", "--ram", "60%", "--commit"), "--commit"),
        ("executorch", ("m:f", "--ram", "60%", "--tile", "32KiB"), "--tile"),
        ("executorch", ("m:f", "--ram", "60%", "--infer"), "--infer"),
        ("executorch", ("m:f", "--ram", "60%", "--weights", "binary"), "--weights"),
        ("executorch", (STEP,), "--target executorch"),
        ("step", ("m:f", "--tile", "32KiB"), "--tile"),
        ("step", ("m:f", "--ram", "32KiB"), "--ram"),
    ],
)
def test_other_targets_are_made_by_few_options(target, options, field, tmp_path):
    """Options that another target does not support, such as tiles, are refused at the start."""
    out = tmp_path / "made"
    outcome = invoke("export", *options, "--target", target, "--out", out, status=2)
    assert outcome.err.startswith(f"error: {field}: ")
    assert not out.exists()
