"""Costs of a step from the instructions of an emulated board."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kit.commands import invoke
from kit.linear_steps import linear_step
from kit.programs import needs
from poetmodel.device import Costs, Device
from poetmodel.device.io import load_profile
from poetmodel.errors import InputError
from poetmodel.export.board import Target
from poetmodel.export.io import save_step
from poetmodel.export.measuring import emulated_profile

if TYPE_CHECKING:
    from pathlib import Path


def test_costs_are_counted_instructions() -> None:
    """Each node costs its instructions over the clock; they are the same in every run."""
    needs(Target.M4)
    step = linear_step()
    found = emulated_profile(step, device="nrf52840", clock="100MHz", power="10mW")
    assert set(found.instructions) == {"linear", "gradient", "update"}
    # 192 products each: fewer than 3 instructions would be wrong, and more than 12 slow.
    assert all(2 * 192 < count < 12 * 192 + 400 for count in found.instructions.values())
    for name, count in found.instructions.items():
        cost = found.costs.compute[name]
        assert cost.time_s == pytest.approx(count / 100e6)
        assert cost.energy_j == pytest.approx(count / 100e6 * 0.01)
    estimated = Costs.estimate(step.graph, Device.load("nrf52840"))
    assert found.costs.pages == estimated.pages
    found.costs.table(step.graph)
    again = emulated_profile(step, device="nrf52840", instructions_per_cycle=0.5)
    assert again.instructions == found.instructions
    # The device's own: 64 MHz, 9.984 mW.
    cost, count = again.costs.compute["linear"], found.instructions["linear"]
    assert cost.time_s == pytest.approx(count / 32e6)
    assert cost.energy_j == pytest.approx(cost.time_s * 0.009984)
    assert "0.5 a cycle at 64 MHz" in again.notes[0]


@pytest.mark.parametrize(
    ("device", "options", "words"),
    [
        ("imxrt1062", {"clock": "fast"}, "clock: expected a frequency such as 64MHz, got 'fast'"),
        ("imxrt1062", {"clock": 0}, "clock: .*above 0"),
        ("nrf52840", {"power": "3J"}, "power: expected a power such as 20mW"),
        ("nrf52840", {"instructions_per_cycle": 0.0}, "instructions per cycle: expected a number"),
        ("nrf52840", {"core": "m0"}, "core: expected one of m3, m4, m7, got 'm0'"),
    ],
)
def test_wrong_choices_are_refused(device: str, options: dict[str, object], words: str) -> None:
    """What cannot turn instructions into time is named before anything is built."""
    with pytest.raises(InputError, match=words):
        emulated_profile(linear_step(), device=device, **options)  # type: ignore[arg-type]


def test_device_without_clock_needs_one() -> None:
    """A device file need not say how fast its core is clocked."""
    device = replace(Device.load("nrf52840"), core="Cortex-M4F")
    with pytest.raises(InputError, match="clock: device Nordic nRF52840 does not say it"):
        emulated_profile(linear_step(), device=device)


def test_profile_measures_a_step_file(tmp_path: Path) -> None:
    """`profile --target qemu` writes costs that `export` takes."""
    needs(Target.M4)
    step, costs, folder = (tmp_path / name for name in ("a.step.json", "a.csv", "firmware"))
    save_step(linear_step(), step)
    done = invoke("profile", str(step), "--target", "qemu", "--out", str(costs))
    assert done.status == 0, done.err
    assert "counted by QEMU" in done.out
    assert load_profile(costs).compute["linear"].time_s > 0
    done = invoke("export", str(step), "--profile", str(costs), "--out", str(folder))
    assert done.status == 0, done.err
    assert (folder / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--clock", "64MHz"), "--clock: is for --target qemu"),
        (("--target", "qemu", "--image", "32"), "the function gives the inputs of a step"),
        (("--target", "qemu", "--power-from", "mkr1000"), "--power-from is for times of this host"),
        (("--target", "qemu", "--optimizer", "sgd"), "--optimizer: a.step.json was captured"),
    ],
)
def test_profile_refuses_options_that_do_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], words: str
) -> None:
    """Options of one way to measure are not taken by another."""
    monkeypatch.chdir(tmp_path)
    save_step(linear_step(), "a.step.json")
    done = invoke("profile", "a.step.json", *options)
    assert done.status == 2
    assert words in done.err
