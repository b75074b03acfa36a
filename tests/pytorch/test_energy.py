"""Power: from a device's figures, or from energy counters."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from poetmodel.device import Device
from poetmodel.device.hardware import Compute
from poetmodel.torch import energy
from poetmodel.torch.energy import measured_power, power_of

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def counter(folder: Path, name: str, value: int, largest: int | None = None) -> Path:
    """Make the folder of an energy counter; return its file."""
    package = folder / name
    package.mkdir()
    (package / "energy_uj").write_text(f"{value}\n")
    if largest is not None:
        (package / "max_energy_range_uj").write_text(f"{largest}\n")
    return package / "energy_uj"


def two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock of the module go on by 2 s from one look at it to the next."""
    moments = iter((10.0, 12.0))
    monkeypatch.setattr(energy, "perf_counter", lambda: next(moments))


def test_counters_of_all_packages_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Energy of all packages over time; parts of a package are not counted again."""
    first = counter(tmp_path, "intel-rapl:0", 1_000_000)
    second = counter(tmp_path, "intel-rapl:1", 0)
    part = counter(tmp_path, "intel-rapl:0:0", 0)
    two_seconds(monkeypatch)

    def work() -> None:
        first.write_text("4000000")
        second.write_text("1000000")
        part.write_text("9000000")

    power = measured_power(work, folder=tmp_path)
    assert power is not None
    assert (power.compute_w, power.page_in_w, power.page_out_w) == (2.0, 2.0, 2.0)
    assert power.source == "RAPL counters: 2.0 W for 2 package(s), idle power included"


def test_a_counter_that_begins_again_is_no_negative_energy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A counter that passed its largest value has gone on, not back."""
    file = counter(tmp_path, "intel-rapl:0", 5_000_000, largest=5_999_999)
    two_seconds(monkeypatch)
    power = measured_power(lambda: file.write_text("3000000") and None, folder=tmp_path)
    assert power is not None
    assert power.compute_w == 2.0


def test_no_counter_is_no_power(tmp_path: Path) -> None:
    """Where nothing can be read, nothing is made up."""
    (tmp_path / "intel-rapl:0").mkdir()
    assert measured_power(lambda: None, folder=tmp_path) is None
    assert measured_power(lambda: None, folder=tmp_path / "nowhere") is None


def test_power_of_a_device_is_its_own() -> None:
    """A device's figures are taken as they are, and its name is said."""
    power = power_of(Device.load("rpi4b"))
    assert (power.compute_w, power.page_in_w, power.page_out_w) == (3.0, 0.15, 0.15)
    assert power.source == "the power figures of device rpi4b"


def test_power_of_a_device_with_an_efficiency() -> None:
    """Without a power it is the rate over the efficiency; without storage pages cost the same."""
    device = dataclasses.replace(
        Device.load("rpi4b"), compute=Compute(flops_per_s=8e9, flops_per_j=2e9), storage=None
    )
    power = power_of(device)
    assert (power.compute_w, power.page_in_w, power.page_out_w) == (4.0, 4.0, 4.0)
