"""Instructions of kernels, estimated from counts of an emulator."""

from dataclasses import replace
from itertools import product

import pytest

from kit.commands import invoke
from kit.digits import build_and_run, linear_step
from kit.programs import require_programs
from kit.rotation import mark_seeds_except
from mcu.small_networks import NETWORKS, make_training
from poetmodel.device import Costs, Device
from poetmodel.errors import InputError
from poetmodel.export.board import Target
from poetmodel.export.exporting import export_step
from poetmodel.export.measuring import measure_emulated
from poetmodel.graph import Graph
from poetmodel.lowered.calls import Call, Ref
from poetmodel.lowered.instructions import (
    OTHER_KERNELS,
    count_work,
    estimate_call_instructions,
    load_table,
)
from poetmodel.lowered.io import load_step, save_step
from poetmodel.lowered.kernels import kernel_names
from poetmodel.plan import Op
from poetmodel.tiling.choice import divide_step

SHAPE = (8, 6, 10, 16, 6, 10, 3, 3, 1, 1, 1, 1, 1, 1, 1)
"""Of a convolution from 8 to 16 channels over 6 x 10 places, with windows of 3 x 3 around each."""


def captured(name, tile=None):
    """Return the step of a network with plain SGD, in tiles of a given size."""
    torch = pytest.importorskip("torch")
    from poetmodel.torch.lowering.step import lower

    model, loss_fn, inputs = make_training(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return divide_step(lower(model, loss_fn, inputs, optimizer=optimizer), tile)


def counts(kernel, *arguments):
    """Return the number of units that the kernel of a call repeats."""
    return dict(count_work(Call(kernel, arguments))[1])


def test_products_are_counted_in_blocks():
    """Of 9 rows and 10 columns 8 by 8 go in blocks of 4 x 4. A dilated window sees six elements."""
    tensors = (Ref("y"), Ref("x"), Ref("w"))
    found = counts("pm_mm", *tensors, 9, 7, 10, 10, 7, 1, 1, 7, 0)
    assert found == {
        "call": 1,
        "4x4": 4, "4x4 step by rows": 4 * 7,
        "1x4": 2, "1x4 step by rows": 2 * 7,
        "1x1": 18, "1x1 step": 18 * 7,
    }  # fmt: skip
    steps = (20, 20, 5, 1) * 3
    pool = (Ref("y"), Ref("p"), Ref("x"), (0, 5), (0, 4), steps, 2, 3, 1, 1, 2, 3)
    found = counts("pm_max_pool2d_places", *pool)
    assert found["seen"] == 6 * 3 * 2
    assert found["window_row"] == 6 * 3


def test_convolutions_are_counted_in_windows():
    """Eight of ten places in a row see whole windows: two blocks of four, for four channels each.

    16 channels are four times four; all rows together see 6 * 3 - 2 rows of windows, of 8 channels.
    The places at both ends see two of three columns. The gradient of the input has half as many
    channels, and twice as many for each.
    """
    found = counts("pm_conv2d", Ref("y"), Ref("x"), Ref("w"), 0, SHAPE, 1, 0, 16, 960, 0)
    assert found == {
        "call": 1,
        "line": 4 * 6,
        "4x4 sliding": 4 * 6 * 2,
        "4x4 sliding row": 4 * 16 * 8 * 2,
        "4x4 sliding tap": 4 * 16 * 8 * 2 * 3,
        "4x1 sliding": 4 * 6 * 2,
        "4x1 sliding row": 4 * 16 * 8 * 2,
        "4x1 sliding tap": 4 * 16 * 8 * (2 + 2),
    }
    back = counts("pm_conv2d_dx", Ref("x"), Ref("y"), Ref("w"), SHAPE, 1, 0, 16, 960, 0)
    assert back == {**found, "line": 2 * 6, "4x4 sliding": 2 * 6 * 2, "4x1 sliding": 2 * 6 * 2}


def test_taps_beside_the_input_have_no_rows():
    """Of windows over one column, those of its middle multiply rows: others see padding alone."""
    shape = (4, 6, 1, 4, 6, 1, 3, 3, 1, 1, 1, 1, 1, 1, 1)
    found = counts("pm_conv2d_dw", Ref("w"), Ref("x"), Ref("y"), shape, 1, 0, 4, 24)
    assert (found["tap"], found["4x4"]) == (9, 9)
    assert (found["4x4 row"], found["4x4 place"]) == (3, 5 + 6 + 5)
    shape = (4, 6, 1, 4, 6, 1, 1, 3, 1, 1, 0, 1, 1, 1, 4)
    found = counts("pm_depthwise", Ref("y"), Ref("x"), Ref("w"), 0, shape, 1, 0, 4, 24)
    assert (found["tap"], found["row"], found["element"]) == (4 * 3, 4 * 6, 4 * 6)


def test_windows_of_one_pixel_may_leave_pixels_out():
    """A transposed convolution with output padding: no window reaches its last row and column.

    Rows then stay rows. In its gradient, 9 positions are two blocks of four and a single one;
    for the outputs, the last of 10 positions has no window, nor has the last of 6 rows.
    """
    shape = (8, 6, 10, 16, 5, 9, 1, 1, 1, 1, 0, 0, 2, 2, 1)
    found = counts("pm_conv2d", Ref("y"), Ref("x"), Ref("w"), 0, shape, 1, 0, 16, 720, 0)
    assert found == {
        "call": 1,
        "line": 4 * 5,
        "4x4 by 1": 4 * 5 * 2, "4x4 by 1 row": 4 * 5 * 2, "4x4 by 1 tap": 4 * 5 * 2 * 8,
        "4x1": 4 * 5, "4x1 row": 4 * 5, "4x1 tap": 4 * 5 * 8,
    }  # fmt: skip
    back = counts("pm_conv2d_dx", Ref("x"), Ref("y"), Ref("w"), shape, 1, 0, 16, 720, 0)
    assert back["line"] == 2 * 6
    assert back["4x4 by 1 row"] == back["4x4 by 1 tap"] == 2 * 5 * 16 * 2
    assert back["4x1 tap"] == 2 * 5 * 16


def test_gradients_of_a_bias_are_counted_in_rows():
    """The steps of such a call are strides of a tensor: it has no windows."""
    found = counts("pm_conv2d_db", Ref("b"), Ref("y"), 2, 3, 4, 5, 60, 20, 5, 1)
    assert found == {"call": 1, "plane": 6, "row": 6 * 4, "element": 6 * 4 * 5}


UNMEASURED = {"pm_within"}
"""A check of indices, which no node has: estimates leave it out."""


def test_table_is_about_kernels():
    """Each kernel that a node can call has a row with its cost."""
    names = {name.removesuffix(", decay") for name in load_table()} - {OTHER_KERNELS}
    assert kernel_names() - names == UNMEASURED
    assert names <= kernel_names()
    assert all(row and min(row.values()) > 0 for row in load_table().values())
    arguments = (Ref("w"), Ref("g"), 40, 0.1, 1.0)
    plain, decayed = (Call("pm_sgd", (*arguments, decay)) for decay in (0.0, 0.1))
    assert estimate_call_instructions(plain) < estimate_call_instructions(decayed)


def node_instructions(step):
    """Return the instructions of the nodes that compute."""
    return {node.name: node.instructions or 0 for node in step.graph.nodes if not node.is_state}


def uncounted(graph):
    """Return a graph without known instructions."""
    return replace(graph, nodes=tuple(replace(n, instructions=None) for n in graph.nodes))


def test_boards_cost_what_their_kernels_do():
    """A Cortex-M with an FPU: instructions over those of a cycle and the clock. Others: rates."""
    step, board = linear_step(), Device.load("nrf52840")
    costs, rated = (Costs.estimate(graph, board) for graph in (step.graph, uncounted(step.graph)))
    for name, instructions in node_instructions(step).items():
        assert instructions > 0
        assert costs.compute[name].time_s == pytest.approx(instructions / 0.79 / 64e6)
        assert costs.compute[name].energy_j == pytest.approx(instructions / 0.79 / 64e6 * 0.009984)
    assert costs.compute.keys() == rated.compute.keys()
    assert costs.pages == rated.pages
    for other in (
        replace(board, core="Cortex-M4F"),
        replace(board, compute=replace(board.compute, power_w=None, flops_per_j=1e9)),
        Device.load("esp32s3"),
        Device.load("mkr1000"),
    ):
        assert Costs.estimate(step.graph, other) == Costs.estimate(uncounted(step.graph), other)


def test_instructions_travel_with_the_graph(tmp_path):
    """Files cost the same, older ones those of their calls; the identity stays."""
    step = linear_step()
    save_step(step, tmp_path / "linear.step.json")
    assert load_step(tmp_path / "linear.step.json").graph == step.graph
    assert Graph.load(tmp_path / "linear.step.json") == step.graph
    assert uncounted(step.graph).sha256 == step.graph.sha256
    for graph in (
        uncounted(step.graph),
        replace(
            step.graph,
            nodes=(
                *(replace(n, instructions=None if n.is_state else 7) for n in step.graph.nodes),
            ),
        ),
    ):
        save_step(replace(step, graph=graph), tmp_path / "old.step.json")
        assert load_step(tmp_path / "old.step.json").graph == step.graph


MOST = {
    "perceptron": 280_000,
    "perceptron in batches": 1_200_000,
    "lenet": 4_400_000,
    "batch norms": 5_500_000,
}
"""Instructions of all nodes of a step that is computed once."""


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "tile"),
    mark_seeds_except(product(NETWORKS, (None, "4KiB")), {("lenet", None), ("perceptron", "4KiB")}),
)
def test_estimates_are_near_the_emulator(name, tile):
    """Of networks that the table was not made from: all together, and each large node.

    Steps are quick.
    """
    require_programs(Target.M4)
    step = captured(name, tile)
    found = node_instructions(step)
    emulated = measure_emulated(step, device="nrf52840").instructions
    total = sum(emulated.values())
    assert sum(found.values()) == pytest.approx(total, rel=0.03)
    assert tile is not None or total <= MOST[name]
    large = [node for node, count in emulated.items() if count > total / 100]
    assert {node: found[node] for node in large} == pytest.approx(
        {node: emulated[node] for node in large}, rel=0.1
    )


@pytest.mark.slow
@pytest.mark.torch
def test_schedules_run_what_they_are_said_to(tmp_path):
    """The emulator counts the estimate, and by its count, more RAM needs less energy."""
    require_programs(Target.M4)
    step, board = captured("lenet", "4KiB"), Device.load("nrf52840")
    estimated = node_instructions(step)
    energies = []
    for ram in ("60%", "56kB"):
        folder = tmp_path / ram.rstrip("%")
        made = export_step(step, folder, ram=ram, device=board, time_limit=5, gap=0.02)
        done = build_and_run(folder, Target.M4, inputs=bytes(4 * 784 + 4), steps=1)
        spent = done.metrics["step_instructions"]
        nodes = [step.graph.nodes[k] for op, k in made.plan.program if op == Op.COMPUTE]
        total = sum(estimated[node.name] for node in nodes if not node.is_state)
        assert spent == pytest.approx(total, rel=0.03)
        assert made.result is not None
        assert made.result.energy_j is not None
        per_s = board.cycle_model.instructions_per_s
        energies.append(made.result.energy_j + (spent - total) / per_s * 0.009984)
    assert energies[0] < energies[1]


# -- how quick kernels are -------------------------------------------------------------------------
MOST_PER_MAC = 12
LAYERS = {
    # channels, height, width of input and output; window; stride; padding; groups
    "ds-cnn first": ((1, 49, 10), (64, 25, 5), (10, 4), 2, (5, 1), 1),
    "ds-cnn depthwise": ((64, 25, 5), (64, 25, 5), (3, 3), 1, (1, 1), 64),
    "ds-cnn pointwise": ((64, 25, 5), (64, 25, 5), (1, 1), 1, (0, 0), 1),
    "resnet8 3x3": ((16, 32, 32), (16, 32, 32), (3, 3), 1, (1, 1), 1),
    "resnet8 3x3 by 2": ((16, 32, 32), (32, 16, 16), (3, 3), 2, (1, 1), 1),
    "resnet8 1x1 by 2": ((16, 32, 32), (32, 16, 16), (1, 1), 2, (0, 0), 1),
    "resnet8 last": ((64, 8, 8), (64, 8, 8), (3, 3), 1, (1, 1), 1),
    "mobilenet first": ((3, 96, 96), (8, 48, 48), (3, 3), 2, (1, 1), 1),
    "mobilenet depthwise": ((8, 48, 48), (8, 48, 48), (3, 3), 1, (1, 1), 8),
    "mobilenet depthwise by 2": ((16, 48, 48), (16, 24, 24), (3, 3), 2, (1, 1), 16),
    "mobilenet pointwise": ((128, 6, 6), (128, 6, 6), (1, 1), 1, (0, 0), 1),
    "mobilenet last depthwise": ((256, 3, 3), (256, 3, 3), (3, 3), 1, (1, 1), 256),
    "mobilenet last pointwise": ((256, 3, 3), (256, 3, 3), (1, 1), 1, (0, 0), 1),
    "lenet": ((6, 14, 14), (16, 10, 10), (5, 5), 1, (0, 0), 1),
    "lenet last": ((400, 1, 1), (120, 1, 1), (1, 1), 1, (0, 0), 1),
}
PRODUCTS = {
    # rows, summed, columns; steps of rows of the result, rows and columns of both factors
    "autoencoder": (1, 640, 128, 128, 640, 1, 1, 640),
    "autoencoder, of its input": (1, 128, 640, 640, 128, 1, 640, 1),
    "autoencoder, of its weights": (128, 1, 640, 640, 1, 128, 640, 1),
    "bert": (16, 32, 32, 32, 32, 1, 1, 32),
    "bert, of its weights": (32, 16, 32, 32, 1, 32, 32, 1),
}


def cases():
    """Yield each case by its name: a call, and its multiplications."""
    a, b, c = Ref("a"), Ref("b"), Ref("c")
    for name, (x, y, window, stride, pad, groups) in LAYERS.items():
        shape = (*x, *y, *window, stride, stride, *pad, 1, 1, groups)
        given = (shape, 1, 0, y[0], y[0] * y[1] * y[2])
        macs = x[0] // groups * y[0] * y[1] * y[2] * window[0] * window[1]
        kernel = "pm_depthwise" if groups > 1 else "pm_conv2d"
        last = (0,) if groups == 1 else ()
        yield name, Call(kernel, (b, a, c, 0, *given, *last)), macs
        yield f"{name}, of its weights", Call(f"{kernel}_dw", (c, a, b, *given)), macs
        if not name.endswith("first"):  # no gradient of what comes from outside
            yield f"{name}, of its input", Call(f"{kernel}_dx", (a, b, c, *given, 0)), macs
    for name, (m, k, n, *steps) in PRODUCTS.items():
        yield f"product: {name}", Call("pm_mm", (c, a, b, m, k, n, *steps, 0)), m * k * n


def test_kernels_are_quick():
    """Convolutions, their gradients and products: 12 instructions a MAC at most, most below 6.

    As estimated, which `test_estimates_are_near_the_emulator` holds to the emulator.
    """
    per_mac = {name: estimate_call_instructions(call) / macs for name, call, macs in cases()}
    assert {name: found for name, found in per_mac.items() if found > MOST_PER_MAC} == {}
    assert sorted(per_mac.values())[len(per_mac) // 2] < MOST_PER_MAC / 2


# -- costs from the instructions of an emulated board ----------------------------------------------
def test_costs_are_counted_instructions():
    """Each node costs its instructions over those of a cycle and the clock, the same each time."""
    require_programs(Target.M4)
    step = linear_step()
    found = measure_emulated(step, device="nrf52840")
    assert set(found.instructions) == {"linear", "gradient", "update"}
    # 192 products each: fewer than 3 instructions would be wrong, and more than 12 slow.
    assert all(2 * 192 < count < 12 * 192 + 400 for count in found.instructions.values())
    for name, count in found.instructions.items():
        cost = found.costs.compute[name]
        assert cost.time_s == pytest.approx(count / 0.79 / 64e6)
        assert cost.energy_j == pytest.approx(count / 0.79 / 64e6 * 0.009984)
    estimated = Costs.estimate(step.graph, Device.load("nrf52840"))
    assert found.costs.pages == estimated.pages
    found.costs.table(step.graph)
    again = measure_emulated(step, device="nrf52840", instructions_per_cycle=0.5)
    assert again.instructions == found.instructions
    cost, count = again.costs.compute["linear"], found.instructions["linear"]
    assert cost.time_s == pytest.approx(count / 32e6)
    assert cost.energy_j == pytest.approx(cost.time_s * 0.009984)
    assert "0.5 a cycle at 64 MHz (given)" in again.notes[0]


@pytest.mark.parametrize(
    ("device", "core", "built", "rate"),
    [
        ("nrf52840", None, "M4", "0.79 a cycle at 64 MHz (Cortex-M4)"),
        ("stm32f746", None, "M7", "1.05 a cycle at 216 MHz (Cortex-M7)"),
        ("nrf52840", "m7", "M7", "1.05 a cycle at 64 MHz (Cortex-M7)"),
        ("nrf52840", "m3", "M3", "1 a cycle at 64 MHz (assumed: Cortex-M3 was not measured)"),
        ("rp2350", None, "M4", "1 a cycle at 150 MHz (assumed: Cortex-M33 was not measured)"),
        ("rp2350", "m4", "M4", "1 a cycle at 150 MHz (assumed: Cortex-M33 was not measured)"),
    ],
)
def test_profiles_take_the_figure_of_the_core(monkeypatch, device, core, built, rate):
    """Of the device, or of the core that the C is built for where that is another."""
    from poetmodel.export import measuring

    targets = []

    def counted(*given):
        targets.append(given[2])
        return dict.fromkeys(node_instructions(given[0]), 1000)

    monkeypatch.setattr(measuring, "_measure_instructions", counted)
    board = Device.load(device)
    board = replace(board, compute=replace(board.compute, memory_factor=1.25))
    profile = measure_emulated(linear_step(), device=board, core=core)
    assert targets == [built.lower()]
    assert f"a Cortex-{built}, counted by QEMU, {rate}" in profile.notes[0]
    assert profile.notes[0].endswith("times 1.25 for waits for memory")
    per_cycle = float(rate.split()[0])
    expected = 1000 / per_cycle / board.clock_hz * 1.25
    assert profile.costs.compute["linear"].time_s == pytest.approx(expected)


COMPUTE = replace(Device.load("nrf52840").compute, power_w=None, flops_per_j=1e9)


@pytest.mark.parametrize(
    ("device", "options", "words"),
    [
        (replace(Device.load("nrf52840"), compute=COMPUTE), {}, "power_w"),
        ("nrf52840", {"instructions_per_cycle": 0.0}, "instructions per cycle: expected a number"),
        ("nrf52840", {"core": "m0"}, "core: expected one of m3, m4, m7, got 'm0'"),
        (replace(Device.load("nrf52840"), core="Cortex-M4F"), {}, "Nordic nRF52840.*clock"),
    ],
)
def test_wrong_choices_are_refused(device, options, words):
    """Options that cannot convert instructions to time are refused before any build."""
    with pytest.raises(InputError, match=words):
        measure_emulated(linear_step(), device=device, **options)


def test_profile_measures_a_step_file(tmp_path):
    """`profile --target qemu` writes costs that `export` reads."""
    require_programs(Target.M4)
    step, costs, folder = (tmp_path / name for name in ("a.step.json", "a.csv", "firmware"))
    save_step(linear_step(), step)
    done = invoke("profile", str(step), "--target", "qemu", "--out", str(costs), status=0)
    assert "counted by QEMU" in done.out
    assert Costs.load(costs).compute["linear"].time_s > 0
    invoke("export", str(step), "--profile", str(costs), "--out", str(folder), status=0)
    assert (folder / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--optimizer", "sgd"), "--optimizer: is for --target qemu"),
        (("--core", "m7"), "--core: is for --target qemu"),
        (("--instructions-per-cycle", "0.8"), "--instructions-per-cycle: is for --target qemu"),
        (("--target", "qemu", "--image", "32"), "does not apply to a captured step"),
        (("--target", "qemu", "--optimizer", "sgd"), "--optimizer: a.step.json was captured"),
    ],
)
def test_profile_refuses_options_that_do_nothing(tmp_path, monkeypatch, options, words):
    """Options of one kind of measurement are refused by the other."""
    monkeypatch.chdir(tmp_path)
    save_step(linear_step(), "a.step.json")
    done = invoke("profile", "a.step.json", *options, status=2)
    assert words in done.err
