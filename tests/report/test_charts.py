"""What the charts of a report show: a schedule, the network, how a solve went."""

from dataclasses import replace

import pytest

from kit.instances import seeded
from kit.plans import random_plan, random_state_plan
from kit.report_subjects import subject, training_problem
from kit.worked import comb_problem, even_costs, skip_graph, skip_problem
from poetmodel.device import Costs, Device
from poetmodel.device.room import keep_all_use
from poetmodel.graph import Graph, Phase, checkpoint_all_peak_bytes
from poetmodel.graph.catalogue import load_model
from poetmodel.graph.structure import Node, Tensor
from poetmodel.plan import check_plan
from poetmodel.planner import make_plan
from poetmodel.problem import Problem
from poetmodel.report.charts import (
    KINDS,
    address_chart,
    gauge_chart,
    map_chart,
    progress_chart,
    progress_of,
)
from poetmodel.report.network import arranged, blocks_of, network_chart, path_of
from poetmodel.report.pictures import Kind, stage_map
from poetmodel.report.timeline import ORIGINS, plan_chart, timeline_chart
from poetmodel.schedule import Schedule, checkpoint_all


def cells(chart):
    """Spread the runs of a chart."""
    found = {}
    for column, first, last, which in chart["runs"]:
        for row in range(first, last + 1):
            kind, marked, words = chart["labels"][which]
            assert (row, column) not in found
            found[row, column] = (KINDS[kind], marked, words)
    return found


@pytest.mark.parametrize("recompute", [True, False])
def test_runs_are_the_cells_of_the_map(*, recompute):
    """The packed form holds what the other pictures draw."""
    one = subject(skip_problem(recompute=recompute))
    found = cells(map_chart(one.graph, one.schedule))
    grid = stage_map(one.graph, one.schedule)
    assert {place: kind for place, (kind, _, _) in found.items()} == {
        (cell.row, cell.column): cell.kind for cell in grid.cells
    }
    assert {place for place, (_, marked, _) in found.items() if marked} == {
        (cell.row, cell.column) for cell in grid.cells if cell.mark
    }


def test_labels_count_the_bytes_of_what_happens():
    """Of a node with two tensors, only the kept one counts.

    What is resident is in RAM at the step of its node; nothing is computed there.
    """
    graph = skip_graph(mask=True)
    problem = Problem(graph, even_costs(graph), ram=40)
    schedule = Schedule(
        R=((0, 0), (1, 1), (2, 2), (3, 1), (3, 2), (3, 3)),
        S_RAM=((1, 0), (2, 0), (2, 1), (3, 0), (3, 3)),
    )
    found = cells(map_chart(problem.graph, schedule))
    assert found[3, 2] == (Kind.RECOMPUTED, False, "recomputed 5 B; kept in RAM 1 B")
    assert found[1, 0] == found[2, 0] == (Kind.KEPT, False, "kept in RAM 4 B")
    one = subject(training_problem(900))
    found = cells(map_chart(one.graph, one.schedule))
    index = one.graph.node_index
    places = {name: (index[name], index[name]) for name in ("w1", "w2", "h")}
    assert (found[places["w1"]][0], found[places["w2"]][0]) == (Kind.PAGED_IN, Kind.KEPT)
    assert found[places["h"]][0] == Kind.COMPUTED


def test_addresses_of_the_plan():
    """A box for each copy with its words; none of a schedule without a plan."""
    one = subject(skip_problem(recompute=False))
    chart = address_chart(one)
    assert len(chart["boxes"]) == len(one.places.rectangles) == 5
    words = [box[5] for box in chart["boxes"]]
    assert words[0].startswith("a: computed, 4 B, at ")
    assert any(text.startswith("a: paged in, 4 B, at ") for text in words)
    assert chart["limit"] == max(box[3] + 16 for box in chart["boxes"])
    assert chart["end"] == one.simulation.makespan_s
    assert address_chart(replace(one, places=None)) is None


# -- incumbent and bound over time -----------------------------------------------------------------
def test_history_of_the_file_is_drawn():
    """Energies are shares of a single pass, and the end says whether it is proven."""
    one = subject(comb_problem())
    chart = progress_of(one)
    assert chart["history"] == [list(moment) for moment in one.document.history]
    assert chart["unit"] == "%"
    assert 100 * chart["factor"] == pytest.approx(one.problem.baseline_energy_j)
    assert chart["proven"]
    assert chart["end"].startswith("proven optimal after ")
    assert progress_of(replace(one, document=replace(one.document, history=()))) is None
    assert progress_of(replace(one, costs=None)) is None


@pytest.mark.parametrize(
    ("minimize", "unit", "name", "history", "status", "end"),
    [
        ("time", "s", "time beyond a single pass", [(0.5, 4.0, 1.0), (60.0, 4.0, 3.0)],
         "feasible", "stopped after 60 s: at most 25 %"),
        ("ram", "B", "peak RAM", [(0.5, None, 1.0), (60.0, None, 3.0)],
         None, "no schedule after 60 s"),
        ("writes", "B", "written to storage", [(0.5, 4.0, None), (2.0, 4.0, 4.0)],
         "optimal", "proven optimal after 2 s"),
    ],
)  # fmt: skip
def test_other_quantities_have_their_units(minimize, unit, name, history, status, end):
    """What is minimized is drawn; how the solve ended, and what was open then, is told."""
    problem = replace(comb_problem(), minimize=minimize)
    chart = progress_chart(problem, history, status=status)
    assert (chart["unit"], chart["y_name"]) == (unit, name)
    assert chart["end"].startswith(end)


# -- several schedules, and the RAM of their device ------------------------------------------------


def test_gauge_adds_up():
    """Parts and what is free make up the RAM; keep-all has its own peak."""
    graph = load_model("mlp")
    costs = Costs.estimate(graph, Device.load("nano33ble"))
    subjects = [
        subject(Problem(graph, costs, ram=ram), label=label)
        for ram, label in (("80%", "A"), ("100%", "B"))
    ]
    chart = gauge_chart(subjects)
    assert [row["label"] for row in chart["rows"]] == ["A", "B"]
    for row in (*chart["rows"], *chart["keep_all"]):
        assert sum(row["parts"]) + row["free"] - row["missing"] == row["ram"]
    (whole,) = chart["keep_all"]
    resident = graph.total_resident_bytes
    assert sum(whole["parts"]) == checkpoint_all_peak_bytes(graph) + resident
    assert keep_all_use(graph).total_bytes == checkpoint_all_peak_bytes(graph)
    assert whole["missing"] > 0


# -- network -------------------------------------------------------------------------------------
def node(name, *inputs, phase=Phase.FORWARD, size=8):
    """Return a node with one tensor of its name."""
    outputs = (Tensor(name=name, bytes=size),)
    return Node(name=name, op="op", phase=phase, inputs=inputs, outputs=outputs)


@pytest.mark.parametrize(
    ("name", "phase", "path"),
    [
        ("layer1.0.conv1", Phase.FORWARD, ("layer1", "0", "conv1")),
        ("layer1.0.conv1.grad_weight", Phase.BACKWARD, ("layer1", "0", "conv1")),
        ("grad.fc1", Phase.BACKWARD, ("fc1",)),
        ("encoder.3/add#2", Phase.FORWARD, ("encoder", "3")),
        ("tanh_backward", Phase.BACKWARD, ("tanh",)),
        ("add#2", Phase.FORWARD, ("add",)),
        ("7.weight/sgd", Phase.UPDATE, ("7", "weight")),
    ],
)
def test_module_is_read_from_a_name(name, phase, path):
    """Backward nodes are of the module whose gradients they make."""
    assert path_of(node(name, phase=phase)) == path


@pytest.mark.parametrize(
    ("names", "blocks"),
    [
        (("in", "layer1.0.a", "layer1.1.a"), ["in", "layer1.0", "layer1.1"]),
        (("model.embed.a", "model.encoder.layer.0.a"), ["model.embed", "model.encoder.layer.0"]),
        (("0.weight", "0", "3", "loss"), ["0", "0", "3", "loss"]),
        (("m.a", "m.b.x", "m.b.y", "m.c"), ["m.a", "m.b", "m.b", "m.c"]),
        (("fc1", "fc1"), ["fc1", "fc1"]),
    ],
)
def test_blocks_are_numbered_modules_or_outermost_ones(names, blocks):
    """What holds blocks is none, and neither is a module around the whole model."""
    assert blocks_of([tuple(name.split(".")) for name in names]) == blocks


def test_things_stand_after_what_they_read():
    """Order follows the links; what nothing separates stands side by side.

    A cycle between blocks shares a layer.
    """
    spots = arranged(range(4), [(0, 2), (1, 2), (2, 3)])
    assert list(spots) == [0, 1, 2, 3]
    assert spots[0] != spots[1]
    assert list(arranged(range(3), [(2, 1), (1, 0)])) == [2, 1, 0]
    spots = arranged(range(3), [(0, 1), (1, 0), (1, 2)])
    assert list(spots) == [0, 1, 2]


def test_forward_and_backward_of_a_module_are_one_row():
    """Forward and backward of a module are one row; bytes are counted by side and decision.

    Of two operators of one module only one of the same name takes a backward node.
    """
    graph = Graph(
        name="pair",
        nodes=(
            node("x", size=4),
            node("b0.fc", "x"),
            node("b1.fc", "b0.fc"),
            node("b1.fc.grad", "b1.fc", phase=Phase.BACKWARD, size=2),
            node("b0.fc.grad", "b1.fc.grad", phase=Phase.BACKWARD),
        ),
    )
    chart = network_chart(graph, ["kept", "paged", "kept", "kept", "never read"])
    assert [block["name"] for block in chart["blocks"]] == ["x", "b0", "b1"]
    block = chart["blocks"][1]
    assert [side["bytes"] for side in block["sides"]] == [8, 8]
    assert [side["parts"] for side in block["sides"]] == [[["paged", 8]], [["never read", 8]]]
    (row,) = block["rows"]
    assert (row["name"], row["nodes"]) == ("fc", [[1], [4]])
    assert (chart["reads"][2], chart["most_bytes"]) == ([1], 8)
    graph = Graph(
        name="traced",
        nodes=(
            node("x"),
            node("b.0/mul", "x"),
            node("b.0/gelu", "b.0/mul"),
            node("b.0/gelu_backward", "b.0/gelu", phase=Phase.BACKWARD),
            node("b.0/sum", "b.0/gelu_backward", phase=Phase.BACKWARD),
        ),
    )
    block = network_chart(graph, ["kept"] * 5)["blocks"][1]
    assert [row["nodes"] for row in block["rows"]] == [[[1], []], [[2], [3]], [[], [4]]]
    assert [row["name"] for row in block["rows"]] == ["mul", "gelu", "sum"]
    assert block["rows"][2]["x"] is None


@pytest.mark.parametrize("model", ["mlp", "resnet50", "bert-base", "paper/linear"])
def test_every_node_is_in_one_row(model):
    """Networks have blocks that a screen can show, and lose no node and no byte."""
    graph = load_model(model)
    chart = network_chart(graph, ["kept"] * len(graph.tensors))
    nodes = [k for b in chart["blocks"] for r in b["rows"] for side in r["nodes"] for k in side]
    assert sorted(nodes) == list(range(len(graph.nodes)))
    assert 4 < len(chart["blocks"]) <= 40
    total = sum(side["bytes"] for block in chart["blocks"] for side in block["sides"])
    assert total == sum(graph.tensor_bytes)


# -- timeline ------------------------------------------------------------------------------------
RESIDENT = ORIGINS.index("resident")


def sums(chart):
    """Add the bands of a chart up as a reader of the values would: during and after each one."""
    n = len(chart["ops"])
    during, after = [0] * n, [0] * n
    for _, size, begin, end, _, _, given_at, given, _, *_ in chart["stays"]:
        for p in range(max(begin, 0), min(end + 1, n)):
            held = size - (given if 0 <= given_at <= p else 0)
            during[p] += held
            after[p] += held if p < end else 0
    return during, after


@pytest.mark.parametrize("mode", ["blocking", "dma"])
def test_bands_add_up_to_the_checked_ram(mode):
    """During and after every instruction of random plans, with state and without."""
    for seed in range(25):
        rng = seeded(f"timeline/{mode}/{seed}")
        for graph, costs, made in (random_plan(rng, mode), random_state_plan(rng, mode)):
            check = check_plan(graph, costs, made)
            chart = plan_chart(graph, made, check)
            assert sums(chart) == (chart["during"], chart["after"])
            assert chart["during"] == [moment.high_bytes for moment in check.moments]
            assert chart["after"] == [moment.ram_bytes for moment in check.moments]


def test_the_ghost_is_keep_all():
    """Its highest point is the keep-all peak; of keep-all itself it is the RAM at every node."""
    graph = load_model("mlp")
    costs = even_costs(graph)
    made = make_plan(graph, costs, checkpoint_all(graph), mode="blocking")
    chart = plan_chart(graph, made, check_plan(graph, costs, made))
    places, kept = chart["ghost"]
    assert max(kept) == checkpoint_all_peak_bytes(graph)
    assert [chart["during"][p] for p in places] == kept


def test_without_costs_it_goes_by_instruction():
    """Without costs there are no times, and the peak is the simulator's.

    One that cannot run is drawn by step, as far as it names what is there: the RAM that the
    simulator found, without bands.
    """
    one = subject(skip_problem(recompute=False))
    chart = timeline_chart(replace(one, plan=None, check=None, places=None, costs=None))
    assert (chart["issued"], chart["work"]) == (None, [])
    assert max(chart["during"]) == one.simulation.peak_ram_bytes
    assert sums(chart) == (chart["during"], chart["after"])
    broken = Schedule(R=((0, 0), (1, 1), (2, 2), (3, 3), (9, 9)), S_RAM=((1, 0), (2, 1)))
    one = subject(skip_problem(), broken)
    assert one.plan is None
    chart = timeline_chart(one)
    assert (set(chart["ops"]), chart["stays"]) == ({"s"}, [])
    assert chart["during"] == [point.ram_bytes for point in one.simulation.curve]


@pytest.mark.parametrize("planned", [True, False])
def test_resident_state_is_there_all_the_time(*, planned):
    """From before the first instruction to the end, with costs or without."""
    one = subject(training_problem(900))
    if not planned:
        one = replace(one, plan=None, check=None)
    chart = timeline_chart(one)
    resident = [stay for stay in chart["stays"] if stay[4] == RESIDENT]
    assert sum(stay[1] for stay in resident) == 300
    assert all((stay[2], stay[3]) == (-1, len(chart["ops"])) for stay in resident)
    assert max(chart["during"]) == one.simulation.peak_ram_bytes
