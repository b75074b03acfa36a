"""Drivers for the flash of Zephyr and of ESP-IDF, over NOR flash that holds them to its rules."""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING, Final

import pytest

from kit.digits import STEP, digit_batches
from kit.nor_flash import DRIVERS, FLASH, C, over_nor
from kit.programs import needs
from poetmodel.export.board import (
    INPUTS,
    STATE,
    STOPPED_STATUS,
    Target,
    build,
    run,
)
from poetmodel.export.exporting import export_step
from poetmodel.export.io import load_step

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from poetmodel.export.board import ProgramRun

PLANS: Final = {
    "paged": {"ram": "90%", "recompute": False},
    "commits": {"ram": "90%", "commit": True},
    "mapped": {"ram": "90%", "device": "nano33ble", "commit": True},
}
RATE: Final = "0.1"
STEPS: Final = 4
"""So that the last generation is another one than the first."""
BATCHES: Final = digit_batches(STEPS, seed=5)
TORN, PAGE = 1, 2
CALLS: Final = re.compile(r"nor_calls (\d+)")


class Trainer:
    """A program with a driver over the flash of a test, in a folder of its own."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.program = program
        self.folder = folder
        (folder / INPUTS).write_bytes(BATCHES)

    def train(self, *words: str, fault: str = "", unit: int = 1) -> tuple[int, int]:
        """Run all steps; return the status and how many calls the flash had."""
        (self.folder / STATE).unlink(missing_ok=True)
        done = subprocess.run(
            [self.program, str(STEPS), RATE, INPUTS, STATE, *words],
            cwd=self.folder,
            env=os.environ | {"NOR_FAULT": fault, "NOR_UNIT": str(unit)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode >= 0, done.stderr
        calls = CALLS.search(done.stderr)
        return done.returncode, int(calls[1]) if calls else 0

    def finish(self, steps: int) -> int:
        """Go on from what the last whole step left, for so many steps; return the status."""
        command = [self.program, str(steps), RATE, INPUTS, STATE, "resume"]
        return subprocess.run(command, cwd=self.folder, capture_output=True, check=False).returncode

    def resumed(self) -> int:
        """Return how many steps were whole when the power went; negative: an error."""
        command = [self.program, "0", RATE, INPUTS, STATE, "resume"]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        said = re.search(r"resumed (\d+)", done.stderr)
        return int(said[1]) if done.returncode == 0 and said else -done.returncode

    @property
    def state(self) -> bytes:
        """All state tensors, as the last run wrote them."""
        return (self.folder / STATE).read_bytes()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return exported folders by what their plans do with storage."""
    needs(Target.HOST)
    made: dict[str, Path] = {}

    def folder(plan: str) -> Path:
        if plan not in made:
            made[plan] = tmp_path_factory.mktemp(plan)
            deployment = export_step(load_step(STEP), made[plan], gap=0.5, **PLANS[plan])
            assert deployment.slots
        return made[plan]

    return folder


@pytest.fixture(scope="module")
def trainers(
    folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Trainer]:
    """Return programs by plan and driver."""
    made: dict[tuple[str, str], Trainer] = {}

    def trainer(plan: str, driver: str, *flags: str) -> Trainer:
        key = (plan, driver, *flags)
        if key not in made:
            work = tmp_path_factory.mktemp(driver)
            made[key] = Trainer(over_nor(folders(plan), driver, work / "app", *flags), work)
        return made[key]

    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the state after all steps of a plan that keeps everything in RAM."""
    folder = tmp_path_factory.mktemp("whole")
    export_step(load_step(STEP), folder, ram="100%", paging=False)
    return run(
        build(folder, Target.HOST), Target.HOST, folder, inputs=BATCHES, steps=STEPS,
        learning_rate=float(RATE),
    ).require_success().state  # fmt: skip


@pytest.mark.parametrize(
    ("driver", "unit"), [("flash_area", 1), ("flash_area", 32), ("esp_partition", 1),
                         ("esp_partition", 16)],
)  # fmt: skip
@pytest.mark.parametrize(
    "plan",
    ["commits", *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("paged", "mapped"))],
)
def test_flash_holds_what_the_step_pages(
    trainers: Callable[..., Trainer], whole: bytes, plan: str, driver: str, unit: int
) -> None:
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
def test_failing_flash_is_noticed(trainers: Callable[..., Trainer], driver: str) -> None:
    """Whichever call fails, the step says so, and the program that begins anew is well."""
    trainer = trainers("commits", driver)
    status, calls = trainer.train()
    assert status == 0
    errors = set()
    for call in range(1, calls + 1, max(1, calls // 25)):
        status, _ = trainer.train(fault=f"fail:{call}")
        errors.add(status)
    assert errors == {10 + TORN, 10 + PAGE}
    assert trainer.train() == (0, calls)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("plan", [pytest.param("commits", marks=pytest.mark.slow), "mapped"])
def test_power_cut_leaves_a_whole_generation(
    trainers: Callable[..., Trainer], whole: bytes, plan: str, driver: str
) -> None:
    """In the middle of an erase or of a write: training goes on to the same end."""
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
def test_flash_that_is_read_where_it_lies_needs_commits(
    folders: Callable[[str], Path], driver: str
) -> None:
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
def test_partition_that_is_too_small_is_refused_at_once(
    trainers: Callable[..., Trainer], driver: str
) -> None:
    """Before anything is written, not in the middle of a step."""
    trainer = trainers("paged", driver, "-DNOR_BYTES=69632u")
    assert trainer.train() == (10 + PAGE, 0)


def worn(folder: Path, target: Target, steps: int, *settings: str) -> ProgramRun:
    """Run steps over storage that is like the flash of the device."""
    program = build(folder, target, settings=("DRIVER=nor", *settings))
    inputs = digit_batches(3, seed=8)
    return run(program, target, folder, inputs=inputs, steps=steps, learning_rate=0.1)


@pytest.mark.parametrize("target", [Target.HOST, Target.M4])
@pytest.mark.parametrize("plan", ["nrf52840", "nano33ble"])
def test_storage_like_the_flash_of_the_device(plan: str, target: Target, tmp_path: Path) -> None:
    """It counts the bytes and erases that are said, trains as RAM does, and wears out."""
    needs(target)
    made = export_step(load_step(STEP), tmp_path, ram="90%", device=plan, commit=True, gap=0.5)
    few, more = (worn(tmp_path, target, steps).require_success() for steps in (1, 4))
    written, erases = (
        (more.figures[name] - few.figures[name]) / 3 for name in ("storage_bytes", "storage_erases")
    )
    pages = [size for size, times in made.page_writes for _ in range(times)]
    block = made.layout.erase_block_bytes
    most = made.commit_bytes + sum(pages)
    assert most - 3 * len(made.generation) <= written <= most
    assert erases == made.commit_erases + sum(-(-size // block) for size in pages)
    turns = -(-5 // made.generations)  # pm_init writes a generation too
    assert more.figures["storage_worn"] == max(turns, 4 * bool(pages))
    program = build(tmp_path, target, settings=("DRIVER=ram",))
    inputs = digit_batches(3, seed=8)
    other = run(program, target, tmp_path, inputs=inputs, steps=4, learning_rate=0.1)
    assert other.require_success().state == more.state
    tired = ("ENDURANCE=1", "EXTRA=-DPM_GENERATIONS=2u")
    assert worn(tmp_path, target, 4, *tired).error in {TORN, PAGE}
