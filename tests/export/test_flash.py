"""Flash of an exported step: estimates, output, and refusal if it does not fit."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from kit.commands import invoke
from kit.digits import STEP, build_and_run, digit_batches
from kit.programs import require_programs
from kit.rotation import mark_seeds_except
from poetmodel.device import Device
from poetmodel.errors import FlashError
from poetmodel.export import board
from poetmodel.export.board import Target
from poetmodel.export.checks import flash_warning
from poetmodel.export.exporting import export_step
from poetmodel.export.flash import (
    code_bytes,
    count_elements,
    load_code_sizes,
    table_bytes,
)
from poetmodel.export.summary import summarize
from poetmodel.lowered.io import load_step
from poetmodel.lowered.kernels import kernel_names

PLANS = {
    "kept": {"ram": "100%"},
    "paged": {"ram": "90%", "recompute": False},
    "commits": {"ram": "100%", "device": "nrf52840", "commit": True},
    "read in place": {"ram": "90%", "device": "nano33ble", "commit": True},
    "binary": {"ram": "100%", "weights": "binary"},
}


def device_of(size_bytes, name="nano33ble", *, storage_bytes=65536):
    """Return a device with other flash."""
    device = Device.load(name)
    assert device.flash is not None
    storage = storage_bytes if device.stores_in_flash else 0
    flash = replace(device.flash, size_bytes=size_bytes, storage_bytes=storage)
    aux_bytes = storage if storage else device.aux_bytes
    return replace(device, flash=flash, aux_bytes=aux_bytes)


def exported(folder, device, **given):
    """Export the step of the digits."""
    return export_step(load_step(STEP), folder, device=device, gap=0.5, **given)


def test_the_table_has_all_kernels():
    """Each kernel has its bytes and its functions of the library, which are listed, too."""
    sizes = load_code_sizes()
    assert sizes["kernels"].keys() == kernel_names()
    for kernel in (*sizes["kernels"].values(), sizes["runtime"], sizes["other"]):
        assert kernel["bytes"] >= 0
        assert set(kernel["library"]) <= sizes["library"].keys()


def test_what_takes_flash_is_said_everywhere(tmp_path):
    """The parts sum to the flash of the chip in all outputs; pages on a card need none."""
    made = exported(tmp_path / "flash", "nano33ble", commit=True)
    sizes = made.flash_map()
    assert list(sizes) == ["code", "constants", "first weights", "storage", "free"]
    assert sum(sizes.values()) == 2**20
    assert sizes["storage"] == made.stored_bytes > 0
    assert sizes["first weights"] == sum(
        made.step.buffers[made.step.graph.tensors[i].name].bytes
        for i in made.step.graph.state_tensors
    )
    manifest = json.loads((tmp_path / "flash" / "manifest.json").read_text())
    assert manifest["flash"] == summarize(made)["flash"] == sizes
    readme = (tmp_path / "flash" / "README.md").read_text()
    assert f"| first weights | {sizes['first weights']:,} |" in readme
    assert flash_warning(made) is None
    made = exported(tmp_path / "card", "nrf52840", commit=True)
    assert made.flash_map()["storage"] == 0 < made.stored_bytes
    without = exported(tmp_path / "none", "rpi4b")
    assert without.flash_map() == {}
    assert "flash (code" not in (tmp_path / "none" / "README.md").read_text()


def with_zeros(names):
    """Return the step of the digits with zeros for the first values of some state."""
    step = load_step(STEP)
    values = {k: np.zeros_like(x) if k in names else x for k, x in step.values.items()}
    return step.edit({}, values=values)


@pytest.mark.parametrize("plan", mark_seeds_except(PLANS, {"paged", "kept", "binary"}, slow=PLANS))
def test_zeros_of_state_take_no_flash(plan, tmp_path):
    """The program makes them itself, and trains as one that reads them from a file of state."""
    require_programs(Target.HOST)
    names = [value.pieces[0].buffer for value in load_step(STEP).states]
    step, folders = with_zeros(names[1::2]), (tmp_path / "zeros", tmp_path / "whole")
    made, whole = (
        export_step(s, folder, gap=0.5, **PLANS[plan])
        for s, folder in zip((step, with_zeros(())), folders, strict=True)
    )
    assert made.flash_map().keys() == whole.flash_map().keys()
    saved = sum(step.buffers[name].bytes for name in names[1::2])
    if made.program_bytes:
        assert made.program_bytes["first weights"] == whole.program_bytes["first weights"] - saved
        assert made.program_bytes["constants"] <= whole.program_bytes["constants"]
    (folders[1] / "first.bin").write_bytes(b"".join(step.values[n].tobytes() for n in names))
    given = {"settings": ("POISON=1", "EXTRA=-O0"), "inputs": digit_batches(3, seed=5), "steps": 3}
    runs = [
        build_and_run(folder, words=words, **given)
        for folder, words in zip(folders, ((), ("state=first.bin",)), strict=True)
    ]
    assert runs[0].state == runs[1].state
    assert len(set(runs[0].losses.values())) == 3


@pytest.mark.parametrize("weights", [pytest.param("c", marks=pytest.mark.slow), "binary"])
def test_state_may_be_zeros_throughout(weights, tmp_path):
    """There are no values to store then, in a build for double neither."""
    require_programs(Target.HOST_DOUBLE)
    step = with_zeros(load_step(STEP).values)
    export_step(step, tmp_path, ram="100%", weights=weights)
    batch = np.frombuffer(digit_batches(1, seed=5), "<f4")
    inputs = batch[:576].astype("<f8").tobytes() + batch[576:].tobytes()
    how = {"settings": ("EXTRA=-O0",), "inputs": inputs, "steps": 1}
    assert build_and_run(tmp_path, Target.HOST_DOUBLE, **how).losses[1] == pytest.approx(np.log(4))


def test_what_does_not_fit_is_refused(tmp_path):
    """The refusal is exact to the byte, and lists the parts and remedies; nothing is written."""
    fits = exported(tmp_path / "fits", "nano33ble", commit=True)
    known = fits.flash_map() | {"storage": fits.min_stored_bytes}
    used = sum(size for what, size in known.items() if what != "free")
    exact = exported(tmp_path / "exact", device_of(used, storage_bytes=used), commit=True)
    assert (exact.flash_map()["free"], exact.generations) == (0, 2)
    small = device_of(used - 1, storage_bytes=used - 1)
    with pytest.raises(FlashError) as caught:
        exported(tmp_path / "refused", small, commit=True)
    (fault,) = caught.value.faults
    assert fault == (
        f"flash: code {known['code']:,} B, constants {known['constants']:,} B, first weights "
        f"{known['first weights']:,} B and storage {known['storage']:,} B are {used:,} B, and "
        f"device Arduino Nano 33 BLE has {used - 1:,} B; leave out the option commit "
        "or take a device whose storage is a card"
    )
    assert not (tmp_path / "refused").exists()
    with pytest.raises(FlashError, match=r"has 4,096 B; take a smaller network$"):
        exported(tmp_path / "refused", device_of(4096, "nrf52840"))


def solved_never(_):
    """Fail where a solve has progress."""
    raise AssertionError("solved")


@pytest.mark.parametrize("plan", PLANS)
def test_what_no_schedule_fits_is_refused_before_a_solve(plan, tmp_path):
    """Program, first weights and two generations of the smallest program are those of no other."""
    given = {"device": "nrf52840", **PLANS[plan], "gap": 0.5}
    made = export_step(load_step(STEP), tmp_path / "made", **given)
    room = made.min_stored_bytes if made.device.stores_in_flash else 1
    given["device"] = device_of(room, given["device"], storage_bytes=room)
    with pytest.raises(FlashError, match=" B at least, and device ") as caught:
        export_step(load_step(STEP), tmp_path / "c", on_progress=solved_never, **given)
    (fault,) = caught.value.faults
    sizes = dict(re.findall(r"(code|constants|first weights|storage) ([\d,]+) B", fault))
    least = {part: int(size.replace(",", "")) for part, size in sizes.items()}
    known = made.flash_map() | {"storage": made.min_stored_bytes}
    assert {"code", "constants", "first weights"} <= least.keys()
    assert ("storage" in least) == (plan == "read in place")
    assert all(0 < size <= known[part] for part, size in least.items())
    assert least["first weights"] == known["first weights"]
    assert plan != "kept" or (least["code"], made.flash_map()["storage"]) == (known["code"], 0)
    assert not (tmp_path / "c").exists()


def test_generations_leave_a_tenth_of_the_flash(tmp_path):
    """Generations use the free flash except a tenth; above that, there is a warning."""
    made = exported(tmp_path, device_of(2**17, storage_bytes=2**17), commit=True)
    assert made.generations > 2
    block = made.commit_erases * 4096
    assert 2**17 // 10 <= made.flash_map()["free"] < 2**17 // 10 + block
    assert flash_warning(made) is None
    known = exported(tmp_path, "nrf52840").flash_map()
    used = sum(size for what, size in known.items() if what != "free")
    made = exported(tmp_path, device_of(used * 10 // 9 - 2, "nrf52840"))
    warning = flash_warning(made)
    assert warning is not None
    assert warning.startswith("the step takes 90% of the flash of device nrf52840: ")
    assert flash_warning(exported(tmp_path, device_of(used * 10 // 9 + 2, "nrf52840"))) is None


def test_the_command_says_so(tmp_path):
    """The command prints a row for each part; a program that is too large has status 3."""
    options = ("--time-limit", "20", "--gap", "0.5", "--out", tmp_path / "c")
    said = invoke("export", STEP, "--device", "nano33ble", *options, status=0)
    for part in ("flash", "  code", "  constants", "  first weights", "  storage"):
        assert any(line.startswith(part) for line in said.out.splitlines()), part
    small = tmp_path / "small.toml"
    small.write_text(
        'name = "Small"\ncore = "Cortex-M4"\nram_bytes = 262_144\n'
        "[compute]\nflops_per_s = 1e6\npower_w = 0.01\n"
        "[flash]\nsize_bytes = 8_192\nwrite_unit_bytes = 4\nerase_block_bytes = 4_096\n"
        "erase_s = 0.1\nwrite_bytes_per_s = 1e5\npower_w = 0.01\n"
    )
    said = invoke("export", STEP, "--device", "nano33ble", *options, "--ram", "2MiB", status=0)
    assert "of RAM, and device nano33ble has 256.00 KiB" in said.err
    said = invoke("export", STEP, "--device", small, *options, status=3)
    assert said.err.startswith("error: flash: code ")


# -- estimates -----------------------------------------------------------------------------------
def test_programs_are_counted_by_what_they_repeat(tmp_path):
    """Calls, their arguments by kind, and arguments on the stack are counted."""
    made = exported(tmp_path, "nrf52840")
    lines = (
        "PM_SLICE(2):",
        "PM_NODE(1); /* a */",
        "pm_mm(PM_REALS(16), x0, PM_CONSTANT_REALS(4), 1, 300, -7, lr, PM_C(-0.5), pm_list_3);",
        "if (!pm_within(x1, pm_list_0, 0, 5, -100)) return PM_ERROR_INPUT;",
        "PM_TRY(pm_page_out(2, PM_ADDRESS(32), 64 * PM_SCALE));",
    )
    counts = count_elements(made, lines)
    assert counts["runtime"] == counts["node"] == counts["driver"] == counts["test"] == 1
    assert (counts["call"], counts["address"], counts["constant"], counts["real"]) == (3, 2, 3, 2)
    assert (counts["number"], counts["long number"], counts["other"]) == (6, 1, 3)
    assert counts["stacked"] == 3 + 1


@pytest.mark.slow
@pytest.mark.parametrize("plan", mark_seeds_except(PLANS, ("read in place",)))
def test_estimates_are_near_what_is_linked(tmp_path, plan):
    """Estimates are within a tenth of the linked step, runtime, kernels and library."""
    require_programs(*board.list_required_programs(Target.M4, emulate=False))
    from mcu.code_sizes import measure_step_bytes

    made = export_step(load_step(STEP), tmp_path, gap=0.5, **PLANS[plan])
    estimate = code_bytes(made.source) + table_bytes(made.source)
    assert estimate == pytest.approx(measure_step_bytes(tmp_path).total(), rel=0.1)


def test_weights_that_exceed_the_flash_are_refused_before_tiles(tmp_path, monkeypatch):
    """The refusal names the flash, whatever the RAM is, and no size of tiles was tried."""

    def tiled_never(*_, **__):
        raise AssertionError("tiles were tried")

    monkeypatch.setattr("poetmodel.tiling.choice.choose_tiles", tiled_never)
    for ram in ("3KiB", None):
        with pytest.raises(FlashError, match=r"first weights .* B at least, and device") as caught:
            exported(tmp_path / "c", device_of(1024, "nrf52840"), ram=ram)
        assert "ram" not in caught.value.faults[0]
    assert not (tmp_path / "c").exists()


@pytest.mark.torch
def test_weights_that_exceed_the_flash_are_refused_before_a_capture(tmp_path, monkeypatch):
    """Trained weights count, but for zeros and for those that lie in the same memory."""
    torch = pytest.importorskip("torch")
    from poetmodel.torch import export
    from poetmodel.torch.target import trained_weight_bytes

    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    with torch.no_grad():
        model[0].bias.zero_()
        model[1].bias.fill_(1.0)
    model[1].weight = model[0].weight
    assert trained_weight_bytes(model) == 4 * (16 * 16 + 16)
    model[1].bias.requires_grad_(False)
    assert trained_weight_bytes(model) == 4 * 16 * 16
    monkeypatch.setattr("poetmodel.torch.exporting.lower", solved_never)
    rows = torch.ones(2, 16), torch.ones(2, 16)
    loss = torch.nn.functional.mse_loss
    with pytest.raises(FlashError, match="first weights alone are 1,024 B at least"):
        export(model, loss, rows, folder=tmp_path / "c", device=device_of(1000, "nrf52840"))
    with pytest.raises(TypeError, match="rma"):
        export(model, loss, rows, folder=tmp_path / "c", rma="32KiB")
