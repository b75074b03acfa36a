"""``poetmodel devices``: every shipped device, for people and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kit.commands import BOARD, invoke
from poetmodel.device.io import device_names, load_device

if TYPE_CHECKING:
    from kit.messages import Told


def test_list_has_every_device_on_a_line_of_its_own() -> None:
    """Each shipped name begins one line, unbroken, so that it can be copied."""
    outcome = invoke("devices")
    assert outcome.status == 0
    firsts = [line.split()[0] for line in outcome.out.splitlines() if line.strip()]
    assert [name for name in firsts if name in device_names()] == list(device_names())
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_json_is_a_list_with_the_keys_of_the_files() -> None:
    """The list as JSON has one object per device, figures as in its file."""
    entries = invoke("devices", "--json").json
    assert [entry["key"] for entry in entries] == list(device_names())
    entry = next(entry for entry in entries if entry["key"] == "rpi4b")
    board = load_device("rpi4b")
    assert entry["ram_bytes"] == board.ram_bytes
    assert entry["compute"]["flops_per_s"] == board.compute.flops_per_s
    assert entry["storage"]["page_in"]["latency_s"] == 5.1e-6
    assert entry["source"]


@pytest.mark.parametrize("name", device_names())
def test_one_device_shows_where_its_figures_come_from(name: str) -> None:
    """A name gives that device, with its source, in 80 columns."""
    outcome = invoke("devices", name)
    assert outcome.status == 0
    assert load_device(name).source.split()[0] in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert invoke("devices", name, "--json").json["key"] == name


def test_implausible_device_is_warned_about(told: Told) -> None:
    """The published Cortex-A72 implies 49.9 W against 3 W: one warning line on stderr."""
    outcome = invoke("devices", "paper-a72")
    assert outcome.status == 0
    assert len(outcome.err.splitlines()) == 1
    told(outcome.err)
    assert "warning" not in outcome.out


def test_sane_device_is_not_warned_about() -> None:
    """A device whose figures hold together gives no warning."""
    assert invoke("devices", "rpi4b").err == ""


def test_file_is_shown_as_a_shipped_one() -> None:
    """A device file is shown too, also one without storage."""
    path = Path("mine.toml")
    path.write_text(BOARD[: BOARD.index("[storage]")])
    outcome = invoke("devices", path)
    assert outcome.status == 0
    assert "Test board" in outcome.out
    assert "none" in outcome.out
    assert invoke("devices", path, "--json").json["storage"] is None
