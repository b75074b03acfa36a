"""``poetmodel export``: what it says where PyTorch is missing."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from kit.commands import invoke

STEP = Path(__file__).parents[2] / "docs" / "digits.step.json"


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
    """To capture a step needs PyTorch: one sentence with how to get it, and nothing is written."""

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
    assert written["commits"] == written["plain"] + in_ram + 4 * len(state) + 32


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
    ("options", "field"),
    [
        (("m:f",), "--ram"),
        (("m:f", "--ram", "60%", "--commit"), "--commit"),
        (("m:f", "--ram", "60%", "--tile", "32KiB"), "--tile"),
        (("m:f", "--ram", "60%", "--weights", "binary"), "--weights"),
        ((STEP,), "--target executorch"),
    ],
)
def test_programs_of_executorch_are_made_by_few_options(options, field, tmp_path):
    """What such a program cannot have, as calls of kernels, is refused before anything runs."""
    out = tmp_path / "step.pte"
    outcome = invoke("export", *options, "--target", "executorch", "--out", out, status=2)
    assert outcome.err.startswith(f"error: {field}: ")
    assert not out.exists()
