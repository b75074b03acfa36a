"""Drivers for the flash of Zephyr, of ESP-IDF and on a bus, over flash that keeps its rules."""

import os
import re
import subprocess
from itertools import product

import pytest

from kit.digits import STEP, build_and_run, compute_state, digit_batches, exporter
from kit.nor_flash import DRIVERS, FLASH, C, build_over_nor, count_step_writes
from kit.programs import require_programs
from kit.rotation import mark_seeds_except
from kit.shared_objects import QUICK_BUILD, build
from poetmodel.export.board import INPUTS_FILE, STATE_FILE, STOPPED_STATUS, Target, run_program
from poetmodel.export.exporting import export_step
from poetmodel.lowered.io import load_step

PLANS = {
    "paged": {"ram": "90%", "recompute": False},
    "commits": {"ram": "90%", "commit": True},
    "mapped": {"ram": "90%", "device": "nano33ble", "commit": True},
}
RATE = "0.1"
STEPS = 4
"""So that the last generation is another one than the first."""
BATCHES = digit_batches(STEPS, seed=5)
TORN, PAGE = 1, 2
CALLS = re.compile(r"nor_calls (\d+)")


class Trainer:
    """A program with a driver over the flash of a test, in a folder of its own."""

    def __init__(self, program, folder):
        self.program = program
        self.folder = folder
        (folder / INPUTS_FILE).write_bytes(BATCHES)

    def train(self, *words, fault="", unit=1):
        """Run all steps; return the status and how many calls the flash had."""
        (self.folder / STATE_FILE).unlink(missing_ok=True)
        done = subprocess.run(
            [self.program, str(STEPS), RATE, INPUTS_FILE, STATE_FILE, *words],
            cwd=self.folder,
            env=os.environ | {"NOR_FAULT": fault, "NOR_UNIT": str(unit)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode >= 0, done.stderr
        calls = CALLS.search(done.stderr)
        return done.returncode, int(calls[1]) if calls else 0

    def finish(self, steps):
        """Continue from the last whole step, for some steps; return the status."""
        command = [self.program, str(steps), RATE, INPUTS_FILE, STATE_FILE, "resume"]
        return subprocess.run(command, cwd=self.folder, capture_output=True, check=False).returncode

    def resumed(self):
        """Return how many steps were whole when the power went; negative: an error."""
        command = [self.program, "0", RATE, INPUTS_FILE, STATE_FILE, "resume"]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        said = re.search(r"resumed (\d+)", done.stderr)
        return int(said[1]) if done.returncode == 0 and said else -done.returncode

    @property
    def state(self):
        """All state tensors, as the last run wrote them."""
        return (self.folder / STATE_FILE).read_bytes()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return exported folders for each use of storage."""
    require_programs(Target.HOST)
    return exporter(tmp_path_factory, PLANS)


@pytest.fixture(scope="module")
def trainers(folders, tmp_path_factory):
    """Return programs by plan and driver."""
    made = {}

    def trainer(plan, driver, *flags):
        key = (plan, driver, *flags)
        if key not in made:
            work = tmp_path_factory.mktemp(driver)
            made[key] = Trainer(build_over_nor(folders(plan), driver, work / "app", *flags), work)
        return made[key]

    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the state after all steps of a plan that keeps everything in RAM."""
    folder = tmp_path_factory.mktemp("whole")
    return compute_state(load_step(STEP), folder, BATCHES, STEPS, rate=float(RATE))


@pytest.mark.parametrize(
    ("driver", "unit"),
    mark_seeds_except(
        [("flash_area", 1), ("flash_area", 32), ("esp_partition", 1), ("esp_partition", 16)],
        [("flash_area", 32), ("esp_partition", 1)],
    ),
)
@pytest.mark.parametrize(
    "plan",
    ["commits", *(pytest.param(plan, marks=pytest.mark.seeds) for plan in ("paged", "mapped"))],
)
def test_flash_holds_what_the_step_pages(trainers, whole, plan, driver, unit):
    """Each block is erased before it is written, in whole units; the state has the same bits.

    The flash is not erased at first, and a second training begins over the first.
    """
    for flags in ((), ("-DPM_CHECKSUM",)):
        if plan == "mapped" and flags:
            continue
        trainer = trainers(plan, driver, *flags)
        for _ in range(2):
            assert trainer.train(unit=unit)[0] == 0
            assert trainer.state == whole


@pytest.mark.parametrize("driver", DRIVERS)
def test_failing_flash_is_noticed(trainers, driver):
    """If any call fails, the step reports it, and the restarted program succeeds."""
    trainer = trainers("commits", driver)
    status, calls = trainer.train()
    assert status == 0
    errors = set()
    for call in range(1, calls + 1, max(1, calls // 25)):
        status, _ = trainer.train(fault=f"fail:{call}")
        errors.add(status)
    assert errors == {10 + TORN, 10 + PAGE}
    assert trainer.train() == (0, calls)


@pytest.mark.parametrize(
    ("plan", "driver"),
    [
        ("commits", "spi_flash"),
        ("mapped", "flash_area"),
        pytest.param("mapped", "esp_partition", marks=pytest.mark.slow),
        *(pytest.param("commits", driver, marks=pytest.mark.slow) for driver in DRIVERS),
    ],
)
def test_power_cut_leaves_a_whole_generation(trainers, whole, plan, driver):
    """During an erase, a write or a transfer: training continues to the same end."""
    trainer = trainers(plan, driver)
    _, calls = trainer.train()
    resumed = set()
    for call in range(2, calls + 1, max(1, calls // 40)):
        assert trainer.train(fault=f"cut:{call}")[0] == STOPPED_STATUS
        done = trainer.resumed()
        resumed.add(done)
        if done >= 0:
            assert trainer.finish(STEPS - done) == 0
            assert trainer.state == whole
    assert resumed > set(range(STEPS))


@pytest.mark.parametrize("driver", DRIVERS)
def test_flash_that_is_read_where_it_lies_needs_commits(folders, driver):
    """A step reads a block while it replaces it, and an erase would lose that: no such build."""
    folder = folders("mapped")
    includes = (f"-I{folder / 'include'}", f"-I{FLASH}")
    sources = folder / "port" / f"driver_{driver}.c"
    text = (folder / "include" / "pm.h").read_text(encoding="utf-8")
    assert "#define PM_COMMIT 1" in text
    plain = folder / "plain"
    plain.mkdir(exist_ok=True)
    (plain / "pm.h").write_text(text.replace("#define PM_COMMIT 1", "#define PM_COMMIT 0"))
    command = [*C, f"-I{plain}", *includes, "-c", sources, "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "export with --commit" in done.stderr


@pytest.mark.parametrize("driver", DRIVERS)
def test_partition_that_is_too_small_is_refused_at_once(trainers, driver):
    """Before anything is written, not in the middle of a step."""
    trainer = trainers("paged", driver, "-DNOR_BYTES=69632u")
    assert trainer.train() == (10 + PAGE, 0)


def worn(folder, target, steps, settings=(), flags=""):
    """Run each number of steps over storage that is like the flash of the device."""
    how = ("DRIVER=nor", *settings, f"{QUICK_BUILD} {flags}")
    program = build(folder, target, settings=how)
    given = {"inputs": digit_batches(3, seed=8), "learning_rate": 0.1}
    return [run_program(program, target, folder, steps=count, **given) for count in steps]


@pytest.mark.parametrize(
    ("plan", "target"),
    mark_seeds_except(
        list(product(["nrf52840", "nano33ble"], [Target.HOST, Target.M4])),
        [("nrf52840", Target.M4)],
        [("nano33ble", Target.HOST)],
    ),
)
def test_storage_like_the_flash_of_the_device(plan, target, tmp_path):
    """The driver counts the stated bytes and erases, trains as RAM does, and wears out."""
    require_programs(target)
    made = export_step(load_step(STEP), tmp_path, ram="90%", device=plan, commit=True, gap=0.5)
    few, more = (each.require_success() for each in worn(tmp_path, target, (1, 4)))
    written, erases = (
        (more.metrics[name] - few.metrics[name]) / 3 for name in ("storage_bytes", "storage_erases")
    )
    least, most, erased = count_step_writes(made)
    assert least <= written <= most
    assert erases == erased
    turns = -(-5 // made.generations)  # pm_init writes a generation too
    assert more.metrics["storage_worn"] == max(turns, 4 * bool(made.page_writes))
    inputs = digit_batches(3, seed=8)
    kept = ("DRIVER=ram", QUICK_BUILD)
    other = build_and_run(tmp_path, target, settings=kept, inputs=inputs, steps=4)
    assert other.state == more.state
    (tired,) = worn(tmp_path, target, (4,), ("ENDURANCE=1",), "-DPM_GENERATIONS=2u")
    assert tired.error_number in {TORN, PAGE}
