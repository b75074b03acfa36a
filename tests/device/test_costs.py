"""Costs by name: estimated, given, checked, and in a graph's order."""

import pickle
from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.instances import make_rng, random_step
from kit.strategies import costs_for, graphs
from poetmodel.device import (
    FREE,
    Compute,
    Cost,
    Costs,
    Device,
    PageCost,
    Storage,
    StorageMode,
    Transfer,
)
from poetmodel.device.ram import (
    DeviceRam,
    RamUse,
    device_ram_metrics,
    floor_ram_use,
    keep_all_ram_use,
    make_gauge,
)
from poetmodel.errors import CostError
from poetmodel.graph import Graph, Node, Tensor, checkpoint_all_peak_bytes, floor, operation
from poetmodel.report.device_ram import format_warning


@pytest.fixture
def board():
    """Return a device of round numbers: 10 FLOP/s at 2 W, and storage that is slower to write."""
    return Device(
        name="board",
        ram_bytes=1024,
        compute=Compute(flops_per_s=10.0, power_w=2.0),
        storage=Storage(
            mode=StorageMode.BLOCKING,
            page_in=Transfer(latency_s=0.5, bytes_per_s=4.0, power_w=3.0),
            page_out=Transfer(latency_s=1.0, bytes_per_s=2.0, power_w=5.0),
        ),
    )


@pytest.fixture
def pair():
    """Return x (8 B, 20 FLOP) and a node of two outputs (4 B, 2 B, 5 FLOP) that reads x twice."""
    outputs = (Tensor(name="y", bytes=4), Tensor(name="mask", bytes=2))
    return Graph(
        name="pair",
        nodes=(
            operation("x", output_bytes=8, flops=20),
            Node(
                name="drop", op="drop", phase="forward", inputs=("x", "x"), outputs=outputs, flops=5
            ),
        ),
    )


def test_estimates_follow_the_figures(pair, board):
    """Time is FLOP over rate, energy time times power; a transfer adds its latency.

    With flops_per_j, energy is FLOP over it, and power_w is not used. A node takes at least the
    time of its traffic: x moves 8 B, drop 8 + 4 + 2 B (x once), at 4 B/s. A device without
    storage has no page costs.
    """
    table = Costs.estimate(pair, board).table(pair)
    assert (table.compute_time_s, table.compute_energy_j) == ((2.0, 0.5), (4.0, 1.0))
    assert table.page_in_time_s == (0.5 + 2.0, 0.5 + 1.0, 0.5 + 0.5)
    assert table.page_in_energy_j == (7.5, 4.5, 3.0)
    assert table.page_out_time_s == (1.0 + 4.0, 1.0 + 2.0, 1.0 + 1.0)
    assert table.page_out_energy_j == (25.0, 15.0, 10.0)
    assert table.has_storage
    core = replace(board.compute, flops_per_j=4.0, power_w=99.0)
    table = Costs.estimate(pair, replace(board, compute=core)).table(pair)
    assert (table.compute_energy_j, table.compute_time_s) == ((5.0, 1.25), (2.0, 0.5))
    core = replace(board.compute, bytes_per_s=4.0)
    table = Costs.estimate(pair, replace(board, compute=core)).table(pair)
    assert (table.compute_time_s, table.compute_energy_j) == ((2.0, 3.5), (4.0, 7.0))
    graph = replace(pair, nodes=(pair.nodes[0], replace(pair.nodes[1], bytes_moved=40)))
    table = Costs.estimate(graph, replace(board, compute=core)).table(graph)
    assert table.compute_time_s == (2.0, 10.0)  # a stated traffic goes first
    costs = Costs.estimate(pair, replace(board, storage=None))
    assert costs.pages is None
    table = costs.table(pair)
    assert not table.has_storage
    assert table.page_in_time_s == table.page_out_energy_j == ()


def test_a_tensor_may_share_its_name_with_another_node(board):
    """Node and tensor names are two sets: costs of a node are not those of a tensor."""
    crossed = Graph(
        name="crossed",
        nodes=(
            Node(name="a", op="o", phase="forward", outputs=(Tensor(name="b", bytes=4),), flops=10),
            Node(name="b", op="o", phase="forward", outputs=(Tensor(name="a", bytes=8),), flops=30),
        ),
    )
    table = Costs.estimate(crossed, board).table(crossed)
    assert (table.compute_time_s, table.page_in_time_s) == ((1.0, 3.0), (1.5, 2.5))


@given(st.data())
def test_arrays_come_back_as_a_table(data):
    """Costs that are given in the order of a graph are the table in that order."""
    graph = data.draw(graphs())
    n, m = len(graph.nodes), len(graph.tensors)
    times = list(map(float, range(n)))
    costs = Costs.from_arrays(
        graph,
        compute_time_s=times,
        compute_energy_j=[2 * time for time in times],
        page_in=[(i, 10 + i) for i in range(m)],
        page_out=[(20 + i, 30 + i) for i in range(m)],
    )
    table = costs.table(graph)
    assert table.compute_time_s == tuple(range(n))
    assert table.compute_energy_j == tuple(range(0, 2 * n, 2))
    assert table.page_in_time_s == tuple(range(m))
    assert table.page_in_energy_j == tuple(range(10, 10 + m))
    assert table.page_out_time_s == tuple(range(20, 20 + m))
    assert table.page_out_energy_j == tuple(range(30, 30 + m))


def test_arrays_must_fit(pair, told):
    """Sequences of another length, and only one direction of paging, are errors."""
    figures = {"compute_time_s": [1, 2], "compute_energy_j": [1, 2]}
    with told.raises(CostError):
        Costs.from_arrays(pair, **figures, page_in=[(1, 1)] * 3)
    with pytest.raises(ValueError, match="shorter"):
        Costs.from_arrays(pair, **figures | {"compute_energy_j": [1]})


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), True, "1", None])
def test_every_figure_is_checked(value):
    """Each negative, infinite or missing number is a fault that names row and quantity."""
    with pytest.raises(CostError) as caught:
        Costs(
            compute={"a": Cost(value, 1.0)},
            pages={"a": PageCost(Cost(1.0, value), FREE), "b": PageCost(FREE, Cost(value, 1.0))},
        )
    wheres = [fault.split(": expected")[0] for fault in caught.value.faults]
    assert wheres == ["a: compute_time_s", "a: page_in_energy_j", "b: page_out_time_s"]


def test_costs_must_fit_the_graph(pair):
    """Rows that are missing and rows too many are all named in one error."""
    costs = Costs(
        compute={"x": FREE, "y": FREE},
        pages={"x": PageCost(FREE, FREE), "drop": PageCost(FREE, FREE)},
        source="p.csv",
    )
    with pytest.raises(CostError) as caught:
        costs.table(pair)
    assert caught.value.faults == (
        "p.csv: no compute costs for 'drop' of graph 'pair'; "
        "every node needs a row with the compute columns",
        "p.csv: compute costs for 'y', which graph 'pair' does not have",
        "p.csv: no page costs for 'y', 'mask' of graph 'pair'; "
        "every tensor needs a row with the page columns",
        "p.csv: page costs for 'drop', which graph 'pair' does not have",
    )


def test_many_misfits_are_counted(pair, told):
    """A message names four rows and counts the rest."""
    extra = {f"n{k}": FREE for k in range(9)}
    with told.raises(CostError):
        Costs(compute=extra | {"x": FREE, "drop": FREE}).table(pair)


@given(st.data())
def test_costs_are_frozen_values(data):
    """Costs cannot be changed, equal their like, and can be sent to another process."""
    graph = data.draw(graphs())
    costs = data.draw(costs_for(graph, storage=data.draw(st.booleans())))
    copied = pickle.loads(pickle.dumps(costs))  # noqa: S301
    assert copied == costs
    assert copied.table(graph) == costs.table(graph)
    with pytest.raises(TypeError):
        costs.compute["n0"] = FREE  # type: ignore[index]


# -- room ----------------------------------------------------------------------------------------
GRAPH = Graph(
    name="pair",
    nodes=(operation("a", output_bytes=8), operation("b", output_bytes=4, inputs=("a",))),
)


@pytest.mark.parametrize(
    ("ram", "peak", "resident", "blamed"),
    [
        (12, 12, 0, None),
        (20, 12, 8, None),
        (10, 20, 0, "the peak alone is too much"),
        (10, 4, 20, "the resident bytes alone are too much"),
        (10, 20, 20, "each alone is too much"),
        (19, 12, 8, "together they are too much"),
    ],
)
def test_peak_and_resident_bytes_count_together(ram, peak, resident, blamed):
    """They fit if their sum is at most the RAM, to the byte; the error names the excess."""
    found = DeviceRam(device="board", ram_bytes=ram, peak_bytes=peak, resident_bytes=resident)
    fits, warning = blamed is None, format_warning(found)
    assert found.fits is (warning is None) is fits
    assert fits or f"device board, which has {ram} B of RAM" in warning
    assert fits or blamed in warning
    assert device_ram_metrics(found) == {
        "resident_bytes": resident,
        "device_ram_bytes": ram,
        "fits_device": fits,
        "device_ram": None,
    }


def test_graph_and_device_give_the_figures():
    """Resident bytes are the graph's, RAM is the device's; without a device there is no result.

    Resident gradients count as gradients, the other kinds as state, and all count.
    """
    device = Device.load("paper-m4")
    graph = replace(GRAPH, resident_bytes={"parameters": 5})
    found = DeviceRam.compare(device, graph, 12)
    assert (found.device, found.ram_bytes) == ("paper-m4", device.ram_bytes)
    assert (found.peak_bytes, found.resident_bytes) == (12, 5)
    assert DeviceRam.compare(None, graph, 12) is None
    assert set(device_ram_metrics(None).values()) == {None}
    assert make_gauge(None) is make_gauge(found) is None  # of a plan only the peak is known
    device = replace(Device.load("paper-m4"), ram_bytes=100)
    graph = replace(GRAPH, resident_bytes={"parameters": 50, "gradients": 30, "optimizer": 7})
    use = RamUse(activation_bytes=9, gradient_bytes=1, workspace_bytes=2)
    assert make_gauge(DeviceRam.compare(device, graph, use)) == {
        "ram_bytes": 100,
        "state_bytes": 57,
        "activation_bytes": 9,
        "gradient_bytes": 31,
        "workspace_bytes": 2,
        "free_bytes": 1,
        "missing_bytes": 0,
        "trains": True,
    }
    found = make_gauge(DeviceRam.compare(replace(device, ram_bytes=98), graph, use))
    assert (found["free_bytes"], found["missing_bytes"], found["trains"]) == (0, 1, False)


def test_keep_all_and_floor_are_split_without_rest():
    """For random training steps the kinds together are the peak, and the floor of each storage."""
    for seed in range(300):
        graph = random_step(make_rng(f"room/{seed}"), (3, 9))
        assert keep_all_ram_use(graph).total_bytes == checkpoint_all_peak_bytes(graph)
        for mapped in (False, True):
            use = floor_ram_use(graph, memory_mapped=mapped)
            assert use.total_bytes == floor(graph, memory_mapped=mapped).bytes
            assert min(astuple(use)) >= 0
            assert not (mapped and use.state_bytes)


def test_costs_add_and_scale():
    """Times and energies add up; a time at a power has that energy."""
    cost = Cost(1.0, 2.0) + Cost.at_power(2.0, 3.0)
    assert cost == Cost(3.0, 8.0)
    assert cost * 0.5 == Cost(1.5, 4.0)
