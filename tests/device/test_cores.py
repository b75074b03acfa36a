"""Times of instructions: cycles of the core, and the additional cycles of memory."""

from dataclasses import replace

import pytest

from kit.commands import invoke
from kit.digits import STEP
from poetmodel.device import Costs, Device
from poetmodel.device.cores import CORES, NO_WAITS_LABEL, find_core
from poetmodel.errors import DeviceError
from poetmodel.lowered.io import load_step

M4 = "0.79 instructions a cycle at 64 MHz"
LABEL = "estimated: cycles of the core, without waits for memory"


@pytest.mark.parametrize(
    ("text", "name", "per_cycle"),
    [
        ("ARM Cortex-M4F (nRF52840), 64 MHz", "Cortex-M4", 0.79),
        ("ARM Cortex-M7, 480 MHz", "Cortex-M7", 1.05),
        ("ARM Cortex-M33 (RP2350), 150 MHz", "Cortex-M33", 1.0),
        ("Cortex-M3, 72 MHz", "Cortex-M3", 1.0),
    ],
)
def test_a_core_is_found_by_its_name(text, name, per_cycle):
    """It has a number with a source; without a name, a core executes one instruction per cycle."""
    core = find_core(text)
    assert (core.name, core.instructions_per_cycle or 1.0) == (name, per_cycle)
    assert core.source
    for other in ("Xtensa LX7, 240 MHz", "ARM Cortex-M0+, 48 MHz", "Cortex-M35P, 96 MHz", ""):
        assert find_core(other) is None
    assert len({core.name for core in CORES}) == len(CORES)


def test_the_model_says_what_it_leaves_out():
    """A core without a figure is named; a factor for memory has another label than none."""
    board = Device.load("rp2350")
    assert board.cycle_model.instructions_per_s == 150e6
    assert "assumed: Cortex-M33 was not measured" in board.cycle_model.text
    assert board.cycle_model.label == NO_WAITS_LABEL == LABEL
    slow = replace(board, compute=replace(board.compute, memory_factor=1.25))
    assert slow.cycle_model.instructions_per_s == 120e6
    assert slow.cycle_model.label == (
        "estimated: cycles of the core, times 1.25 for waits for memory"
    )
    for name in ("mkr1000", "esp32s3", "rpi4b"):
        assert Device.load(name).cycle_model is None
    assert replace(board, core="Cortex-M3, 150 MHz").cycle_model is None  # it has no FPU


def test_a_memory_factor_multiplies_times_and_energies(tmp_path):
    """Of instructions: those of FLOP, and transfers, stay."""
    text = (load_text("nrf52840")).replace(
        "[compute]\nflops", "[compute]\nmemory_factor = 1.3\nflops"
    )
    path = tmp_path / "slow.toml"
    path.write_text(text)
    graph = load_step(STEP).graph
    plain, slow = (Costs.estimate(graph, Device.load(name)) for name in ("nrf52840", str(path)))
    for name, cost in plain.compute.items():
        assert slow.compute[name].time_s == pytest.approx(1.3 * cost.time_s)
        assert slow.compute[name].energy_j == pytest.approx(1.3 * cost.energy_j)
    assert slow.pages == plain.pages
    uncounted = replace(graph, nodes=tuple(replace(n, instructions=None) for n in graph.nodes))
    rated = [Costs.estimate(uncounted, Device.load(name)) for name in ("nrf52840", str(path))]
    assert rated[0].compute == rated[1].compute
    assert rated[0].cycles is None
    path.write_text(text.replace("1.3", "0"))
    with pytest.raises(DeviceError, match=r"\[compute\] memory_factor: expected a finite number"):
        Device.load(str(path))


def load_text(name):
    """Return the text of a shipped device file."""
    from poetmodel.files import shipped_folder

    return (shipped_folder("devices") / f"{name}.toml").read_text(encoding="utf-8")


def test_times_carry_their_label(tmp_path):
    """Tables of `solve` and `export`, reports, manifests, profiles and devices state it."""
    schedule, folder, page = (tmp_path / name for name in ("a.schedule.json", "firmware", "a.html"))
    how = ("--device", "nrf52840", "--gap", "0.5")
    solved = invoke("solve", STEP, *how, "--ram", "90%", "--out", schedule, status=0)
    reported = invoke("report", schedule, "--graph", STEP, "--out", page, status=0)
    exported = invoke("export", STEP, "--device", "nrf52840", "--out", folder, status=0)
    estimated = invoke("profile", STEP, "--device", "nrf52840", status=0)
    shown = invoke("devices", "nrf52840", status=0)
    for outcome in (solved, exported, estimated, shown):
        text = " ".join(outcome.out.split())
        assert M4.removesuffix(" at 64 MHz") in text  # narrow tables wrap the rest
        assert "pipeline model" in text or outcome is not shown
    assert reported.out
    assert f"{M4} (Cortex-M4); {LABEL}" in page.read_text(encoding="utf-8")
    import json

    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["cycles"] == {
        "core": "Cortex-M4",
        "clock_hz": 64e6,
        "instructions_per_cycle": 0.79,
        "memory_factor": 1.0,
        "label": LABEL,
    }
    flop_based = invoke("profile", "mlp", "--device", "nrf52840", status=0)
    assert "a cycle" not in flop_based.out
