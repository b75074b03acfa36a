"""What a step takes of the RAM of its device."""

from dataclasses import astuple, replace

import pytest

from kit.instances import random_step, seeded
from poetmodel.device import Device
from poetmodel.device.room import (
    DeviceRoom,
    RamUse,
    floor_use,
    gauge,
    keep_all_use,
    room_figures,
)
from poetmodel.graph import Graph, checkpoint_all_peak_bytes, floor, operation

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
    """They fit if their sum is at most the RAM, to the byte; what is too much is named."""
    found = DeviceRoom(device="board", ram_bytes=ram, peak_bytes=peak, resident_bytes=resident)
    fits, warning = blamed is None, found.warning()
    assert found.fits is (warning is None) is fits
    assert fits or f"device board, which has {ram} B of RAM" in warning
    assert fits or blamed in warning
    assert room_figures(found) == {
        "resident_bytes": resident,
        "device_ram_bytes": ram,
        "fits_device": fits,
        "device_ram": None,
    }


def test_graph_and_device_give_the_figures():
    """Resident bytes are the graph's, RAM is the device's; without a device nothing is said.

    Gradients that are resident are gradients, the other kinds are state, and all count.
    """
    device = Device.load("paper-m4")
    graph = replace(GRAPH, resident_bytes={"parameters": 5})
    found = DeviceRoom.of(device, graph, 12)
    assert (found.device, found.ram_bytes) == ("paper-m4", device.ram_bytes)
    assert (found.peak_bytes, found.resident_bytes) == (12, 5)
    assert DeviceRoom.of(None, graph, 12) is None
    assert set(room_figures(None).values()) == {None}
    assert gauge(None) is gauge(found) is None  # of a plan only the peak is known
    device = replace(Device.load("paper-m4"), ram_bytes=100)
    graph = replace(GRAPH, resident_bytes={"parameters": 50, "gradients": 30, "optimizer": 7})
    use = RamUse(activation_bytes=9, gradient_bytes=1, workspace_bytes=2)
    assert gauge(DeviceRoom.of(device, graph, use)) == {
        "ram_bytes": 100,
        "state_bytes": 57,
        "activation_bytes": 9,
        "gradient_bytes": 31,
        "workspace_bytes": 2,
        "free_bytes": 1,
        "missing_bytes": 0,
        "trains": True,
    }
    found = gauge(DeviceRoom.of(replace(device, ram_bytes=98), graph, use))
    assert (found["free_bytes"], found["missing_bytes"], found["trains"]) == (0, 1, False)


def test_keep_all_and_floor_are_split_without_rest():
    """For random training steps the kinds together are the peak, and the floor of each storage."""
    for seed in range(300):
        graph = random_step(seeded(f"room/{seed}"), (3, 9))
        assert keep_all_use(graph).total_bytes == checkpoint_all_peak_bytes(graph)
        for mapped in (False, True):
            use = floor_use(graph, memory_mapped=mapped)
            assert use.total_bytes == floor(graph, memory_mapped=mapped).bytes
            assert min(astuple(use)) >= 0
            assert not (mapped and use.state_bytes)
