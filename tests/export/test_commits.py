"""Bytes, wear and recovery of commits: programs in C++ over NOR flash that counts."""

import os
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from kit.digits import STEP, build_runner, digit_batches
from kit.nor_flash import DRIVERS, PARTS, C, build_over_nor, count_step_writes
from kit.programs import require_programs, run_command
from kit.rotation import mark_seeds_except
from kit.shared_objects import QUICK_BUILD, compile_objects
from poetmodel.device import Device
from poetmodel.device.generation import RECORD_BYTES, SEAL_BYTES, GenerationLayout
from poetmodel.errors import BudgetError, InputError, NoScheduleError
from poetmodel.export.board import Target, ToolchainError
from poetmodel.export.deployment import Deployment
from poetmodel.export.exporting import export_step
from poetmodel.lowered.io import load_step

FORGETFUL = Device.load("rp2350-psram")
FORGETFUL = replace(FORGETFUL, flash=replace(FORGETFUL.flash, storage_bytes=64 * 1024))
"""A board whose storage forgets, and whose flash has few generations."""
PAGED = replace(FORGETFUL, storage=replace(FORGETFUL.storage, memory_mapped=False))
"""The same, whose core does not read storage in place."""
PLANS = {
    "paged": {"ram": "90%", "recompute": False},
    "on storage": {"ram": "90%", "commit": True},
    "in RAM": {"ram": "150%", "commit": True},
    "read in place": {"ram": "90%", "device": "nano33ble", "commit": True},
    "without sums": {"ram": "90%", "device": "nano33ble", "commit": True, "checksum": False},
    "each third": {"ram": "150%", "device": "nano33ble", "commit_every": 3},
    "forgets": {"ram": "90%", "device": FORGETFUL, "commit": True},
    "forgets, paged": {"ram": "90%", "device": PAGED, "commit": True},
    "forgets, in RAM": {"ram": "150%", "device": "stm32f746-sdram", "commit": True},
    "forgets, each third": {"ram": "90%", "device": FORGETFUL, "commit_every": 3},
}
FORGETS = ("forgets", "forgets, paged", "forgets, in RAM")
LATER = {"without sums", "forgets, paged"}
"""Plans whose programs only the slow tests build."""
CPP = ("c++", "-O0", "-Wall", "-Wextra", "-Werror")
STEPS = 9
BATCHES = digit_batches(STEPS, seed=8)
OLDER, DAMAGED, EMPTY, OTHER, PAGE, SHORT = 13, 5, 8, 16, 2, 3


class Program(NamedTuple):
    """A deployment that was built, and a folder to run it in."""

    deployment: Deployment
    path: Path
    folder: Path

    @property
    def flash(self):
        """Return the content of the flash."""
        return self.folder / "flash.bin"

    def run(self, steps=STEPS, **faults):
        """Train to a step; return status and output."""
        done = subprocess.run(
            [self.path, self.flash, str(steps), self.path.with_name("batches"), "state"],
            cwd=self.folder, env=os.environ | {k: str(v) for k, v in faults.items()},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode >= 0, (done.stdout, done.stderr)
        return done.returncode, done.stdout

    def state(self, **faults):
        """Return the state after all steps."""
        status, said = self.run(**faults)
        assert status == 0, said
        return (self.folder / "state").read_bytes()

    def resumed(self, **faults):
        """Return the status of ``pm_resume``, and the number of steps after which it was called."""
        said = self.run(0, ONLY_RESUME=1, **faults)[1]
        error, steps = re.findall(r"resume (-?\d+) steps (\d+)", said)[0]
        return int(error), int(steps)

    def flip(self, at, bit):
        """Change a bit of the flash."""
        content = bytearray(self.flash.read_bytes())
        content[at] ^= 1 << bit
        self.flash.write_bytes(content)


@pytest.fixture(scope="module")
def deployments(tmp_path_factory):
    """Return deployments for each use of storage, and their folders."""
    made = {}

    def deployment(plan):
        if plan not in made:
            folder = tmp_path_factory.mktemp("plan")
            made[plan] = export_step(load_step(STEP), folder, gap=0.5, **PLANS[plan]), folder
        return made[plan]

    return deployment


@pytest.fixture(scope="module")
def programs(deployments, tmp_path_factory):
    """Return programs for each use of storage, each on new flash."""
    require_programs(Target.HOST, "c++")
    made = {}

    def program(plan):
        if plan not in made:
            deployment, folder = deployments(plan)
            main = str(__file__).replace("test_commits.py", "library/commits.cpp")
            includes, app = (folder / "include", folder), folder / "objects" / "app"
            app.parent.mkdir()
            objects = compile_objects(C, folder.glob("src/*.c"), includes)
            objects += compile_objects(CPP, [main], includes)
            run_command(["c++", *objects, "-o", app], app.parent)
            (app.parent / "batches").write_bytes(BATCHES)
            made[plan] = deployment, app
        return Program(*made[plan], tmp_path_factory.mktemp("flash"))

    return program


@pytest.fixture(scope="module")
def whole(programs):
    """Return the state after all steps without a fault."""
    return programs("in RAM").state()


@pytest.mark.parametrize(
    "plan", mark_seeds_except(PLANS, {"paged", "in RAM", "forgets"}, slow=PLANS)
)
def test_said_is_what_the_flash_counts(programs, plan):
    """Written bytes of each step are within the stated limits, and erases are as stated."""
    program = programs(plan)
    made = program.deployment
    status, said = program.run()
    assert status == 0
    steps = [tuple(map(int, n)) for n in re.findall(r"step 0 bytes (\d+) erases (\d+)", said)]
    assert len(steps) == STEPS
    for number, (written, erased) in enumerate(steps, start=1):
        commits = made.commit and number % made.commit_every == 0
        least, most, erases = count_step_writes(made, commits=commits)
        assert least <= written <= most
        assert erased == erases or (made.generations_per_block > 1 and erased == 0 < erases)
    commits, shared = STEPS // made.commit_every + 1, made.generations_per_block
    if made.commit and shared > 1:  # pm_init makes the first commit
        total = sum(map(int, re.findall(r"erases (\d+)", said)))
        assert total == -(-commits // shared) * made.commit_erases
    header = program.path.parents[1] / "include" / "pm.h"
    assert f"#define PM_STORED_BYTES {made.stored_bytes}u" in header.read_text()
    kept = made.saved_bytes if made.copies_to_flash else made.stored_bytes
    assert program.flash.stat().st_size == kept + 1


@pytest.mark.parametrize(
    ("plan", "driver"),
    mark_seeds_except(
        [*product(("paged", "on storage", "in RAM"), PARTS), *product(("read in place",), DRIVERS)],
        {("paged", "spi_flash")},
        {("on storage", "esp_partition"), ("read in place", "flash_area")},
    ),
)
def test_drivers_do_what_is_said(programs, tmp_path, plan, driver):
    """Each driver of flash writes as many bytes in a step, and erases as many blocks."""
    made = programs(plan).deployment
    app = build_over_nor(
        programs(plan).path.parents[1], driver, tmp_path / "app", "-DPM_GENERATIONS=2u"
    )
    (tmp_path / "batches").write_bytes(BATCHES)
    counts = []
    for steps in ("2", "6"):
        command = [app, steps, "0.1", "batches", "state"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        counts.append([int(n) for n in re.findall(r"nor_(?:written|erased) (\d+)", done.stderr)])
    written, erased = ((more - few) / 4 for few, more in zip(*counts, strict=True))
    least, most, erases = count_step_writes(made)
    assert least <= written <= most
    assert erased == erases


def test_generations_take_turns(programs):
    """No block is erased twice before each generation had its turn; so long the storage lasts."""
    program = programs("read in place")
    made = program.deployment
    assert made.generations > STEPS
    most, erases = map(int, re.findall(r"worn (\d+) of (\d+)", program.run()[1])[0])
    assert (most, erases) == (1, (STEPS + 1) * made.commit_erases)
    assert made.steps_until_worn == 10_000 * made.generations
    assert programs("each third").deployment.steps_until_worn == pytest.approx(
        3 * 10_000 * programs("each third").deployment.generations
    )
    said = programs("in RAM").run(2, COMMIT_NOW=2)[1]
    assert "now 0 bytes 0 erases 0" in said


def test_small_tensors_share_blocks():
    """Forty counters of Adam are one block, not forty."""
    layout = GenerationLayout(4, 4096)
    assert layout.n_blocks([4] * 40 + [2000]) == 1
    assert layout.size_bytes([4] * 40 + [2001]) == 32 + 40 * 8 + 2008 + 8
    assert GenerationLayout(32, 4096, checksums=False).size_bytes([5, 33]) == 32 + 32 + 64 + 32


@pytest.mark.parametrize(
    "plan",
    mark_seeds_except(
        TORN := ("on storage", "in RAM", "read in place", "without sums", *FORGETS),
        {*TORN} - LATER,
        LATER,
    ),
)
def test_power_cut_at_any_moment(programs, whole, plan):
    """In an erase, a tensor, a record, repeatedly: the final state is the same."""
    program, random = programs(plan), np.random.default_rng(4)
    cuts = 0
    for _ in range(12):
        program.flash.unlink(missing_ok=True)
        for _ in range(4):
            cuts += program.run(FUEL=int(random.integers(0, 20_000)))[0] == 99
            assert program.resumed()[0] in {0, EMPTY}
        assert program.state() == whole
    assert cuts > 12


def start_of(made, commit):
    """Return where the generation of a commit begins [B]; that of ``pm_init`` is number 0."""
    block, shared = made.commit_erases * made.layout.erase_block_bytes, made.generations_per_block
    blocks, place = divmod(commit % made.generations, shared)
    return blocks * block + place * (block // shared // 256 * 256)


def test_small_generations_share_a_large_block(programs):
    """A block of 256 KiB is erased for the first of its generations alone, and endures as long."""
    program = programs("forgets, in RAM")
    made = program.deployment
    shared = made.generations_per_block
    assert shared > 10
    assert made.generations == 2 * shared
    assert made.saved_bytes == 2 * 262_144
    assert made.steps_until_worn == made.result.simulation.steps_until_worn
    assert made.steps_until_worn == 10_000 * made.generations
    assert program.run()[0] == 0
    assert program.resumed() == (0, STEPS)
    assert re.findall(r"worn (\d+) of (\d+)", program.run()[1]) == [("0", "0")]


@pytest.mark.parametrize(
    "plan",
    mark_seeds_except(
        COMMITTED := ("on storage", "in RAM", "read in place", *FORGETS),
        {"in RAM", "read in place", "forgets"},
        COMMITTED,
    ),
)
def test_damaged_state_is_noticed(programs, whole, plan):
    """With a wrong bit in the newest generation, the one before is loaded, with a status.

    A wrong bit in the seal has no effect, because the checksums of the rest hold.
    """
    program, random = programs(plan), np.random.default_rng(5)
    made = program.deployment
    begin = start_of(made, 4)
    seal = begin + made.commit_bytes - SEAL_BYTES
    places = [*random.integers(begin, seal, 20), *range(begin, begin + RECORD_BYTES, 3)]
    program.run(4)
    content = program.flash.read_bytes()
    for at in places:
        program.flash.write_bytes(content)
        program.flip(int(at), int(random.integers(8)))
        assert program.resumed() == (OLDER, 3)
        assert program.state() == whole
        assert program.resumed() == (0, STEPS)
    for at in range(seal, seal + SEAL_BYTES):
        program.flash.write_bytes(content)
        program.flip(at, int(random.integers(8)))
        assert program.resumed() == (0, 4)


def test_damaged_state_without_another_is_no_empty_storage(programs):
    """Damage without another generation is no silence; another plan's state is no state."""
    program = programs("read in place")
    made = program.deployment
    program.run(0)
    content = program.flash.read_bytes()
    for at in (0, RECORD_BYTES - 1, RECORD_BYTES, made.commit_bytes - SEAL_BYTES - 1):
        program.flash.write_bytes(content)
        program.flip(at, 3)
        assert program.resumed()[0] == DAMAGED
    ids = {
        plan: re.findall(
            r"LAYOUT_ID (\w+)", (programs(plan).path.parents[1] / "include" / "pm.h").read_text()
        )[0]
        for plan in ("on storage", "in RAM")
    }
    assert ids["on storage"] != ids["in RAM"]
    program, other = programs("on storage"), programs("in RAM")
    program.run(3)
    shutil.copyfile(program.flash, other.flash)
    assert other.resumed() == (OTHER, 0)


@pytest.mark.parametrize(
    "code",
    mark_seeds_except(
        (-1, 1, 2, 3, 4, 5, 6, 8, 10, 11, 13), {-1, SHORT, DAMAGED, EMPTY, OLDER}, range(1, 12)
    ),
)
def test_storage_that_does_not_answer_loses_nothing(programs, whole, code):
    """For any number that a driver returns at the start: an error, no new state."""
    program = programs("read in place")
    program.run(4)
    for call in range(1, 2 * program.deployment.generations, 5):
        error, _ = program.resumed(FAIL_READ=call, CODE=code)
        if error != 0:
            assert error == (SHORT if code == SHORT else PAGE)
    assert program.resumed(FAIL_READ=1, FAILING=2, CODE=code)[0] in {SHORT, PAGE}
    assert program.state() == whole


@pytest.mark.parametrize(
    "plan",
    mark_seeds_except(
        AGAIN := ("on storage", "read in place", *FORGETS[:2]), {*AGAIN} - LATER, LATER
    ),
)
@pytest.mark.parametrize("code", [1, 6, 8, 10, 13, -1])
def test_step_whose_storage_fails_can_be_done_again(programs, whole, plan, code):
    """No number of a driver leaves a step under way: the next call is a step again."""
    program = programs(plan)
    for kind in ("STEP_READ", "STEP_WRITE"):
        for call in (1, 7, 60):
            program.flash.unlink(missing_ok=True)
            assert program.state(**{kind: call}, CODE=code) == whole


@pytest.mark.parametrize("plan", mark_seeds_except(COMMITTED, {*COMMITTED} - LATER, LATER))
def test_written_state_is_whole_or_as_before(programs, plan):
    """A power cut while state is written leaves the old value or the new one, and the others."""
    program = programs(plan)
    program.run(2)
    content, before = program.flash.read_bytes(), (program.folder / "state").read_bytes()
    assert program.run(0, CHANGE=0.5)[0] == 0
    after = (program.folder / "state").read_bytes()
    assert after != before
    assert np.all(np.frombuffer(after, "<f4", 8) == 0.5)
    found = set()
    for fuel in range(0, 9000, 450):
        program.flash.write_bytes(content)
        program.run(0, CHANGE=0.5, FUEL=fuel)
        assert program.run(0)[0] == 0
        found.add((program.folder / "state").read_bytes())
        assert program.resumed() == (0, 2)
    assert found == {before, after}


@pytest.mark.parametrize(
    "plan", ["each third", pytest.param("forgets, each third", marks=pytest.mark.slow)]
)
def test_each_third_step_commits(programs, whole, plan):
    """A restart loses the steps after the last commit, and no step is torn."""
    program = programs(plan)
    assert program.state() == whole
    assert program.resumed() == (0, STEPS)
    for steps in (1, 2, 3, 5, 8):
        program.flash.unlink()
        program.run(steps)
        assert program.resumed() == (0, steps // 3 * 3)
        assert program.state() == whole


@pytest.mark.parametrize(
    "plan", ["each third", pytest.param("forgets, each third", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("step", [1, 2, 3, 5, 8])
def test_commit_between_two_others(programs, whole, plan, step):
    """A commit after a step without one writes a generation; a failed commit tears no step."""
    program = programs(plan)
    made = program.deployment
    said = program.run(step, COMMIT_NOW=step)[1]
    written, erased = map(int, re.findall(r"now 0 bytes (\d+) erases (\d+)", said)[0])
    assert erased == (made.commit_erases if step % 3 else 0)
    assert (written > 0) == (erased > 0)
    assert program.resumed() == (0, step)
    assert program.state() == whole
    program.flash.unlink()
    before = (2 * len(made.generation_names) + 2) * (step // 3)  # tensors and sums, record and seal
    program.run(step, COMMIT_NOW=step, STEP_WRITE=before + 2)
    assert program.resumed() == (0, step // 3 * 3)
    assert program.state() == whole


def test_state_on_storage_that_forgets_goes_to_flash(deployments):
    """State in volatile memory is committed, too, in every third step; only the flash wears."""
    made, _ = deployments("forgets, each third")
    homes = {made.step.graph.tensors[i].name for i in made.step.graph.state_tensors}
    assert homes - made.resident_names
    assert set(made.generation_names) == homes
    assert made.device is not None
    assert made.device.flash is not None
    assert made.saved_bytes == made.generations * made.commit_erases * 4096
    assert made.saved_bytes <= made.device.flash.storage_bytes
    assert made.stored_bytes == sum(made.page_bytes)
    assert made.flash_map()["storage"] == made.saved_bytes
    assert made.steps_until_worn == 3 * 100_000 * made.generations
    assert deployments("forgets, paged")[0].plan.memory_mapped is False
    assert made.plan.memory_mapped


@pytest.mark.parametrize("target", mark_seeds_except(BOTH := (Target.HOST, Target.M4), (), BOTH))
def test_a_board_goes_on_where_memory_beside_it_forgets(tmp_path, target):
    """The power is cut during a write to flash: the program resumes, with the same end."""
    require_programs(target)
    export_step(load_step(STEP), tmp_path, gap=0.5, **PLANS["forgets, each third"])
    settings = ("FAULTS=1", "POISON=1", QUICK_BUILD)
    run = build_runner(tmp_path, target, settings=settings, inputs=BATCHES)
    whole = run(STEPS)
    flash = tmp_path / "pm_storage.bin"
    writes = whole.metrics["storage_writes"]
    for write in (writes // 2, 9 * writes // 10, writes):
        flash.unlink()
        with pytest.raises(ToolchainError, match="ended with status 9"):
            run(STEPS, words=(f"cut:{write}",))
        assert flash.stat().st_size > 0
        words = ("resume",)
        done = run(0, words=words).metrics["resumed"]
        assert done % 3 == 0
        rest = run(STEPS - done, words=words)
        assert rest.state == whole.state


def test_commits_that_storage_cannot_keep_are_refused(tmp_path):
    """State on storage cannot be undone over steps, nor updated if flash has large write units."""
    with pytest.raises(NoScheduleError, match="replaced state stays in RAM between commits"):
        export_step(load_step(STEP), tmp_path, ram="90%", commit_every=2, gap=0.5)
    for number in (0, -1, 1.5):
        with pytest.raises(InputError, match="commit_every: expected a number of steps from 1"):
            export_step(load_step(STEP), tmp_path, commit_every=number)
    board = Device.load("nano33ble")
    assert board.flash is not None
    board = replace(board, flash=replace(board.flash, write_unit_bytes=32))
    with pytest.raises(InputError, match="written 32 B at a time"):
        export_step(load_step(STEP), tmp_path, device=board, ram="90%", commit=True)
    board = Device.load("rp2350-psram")
    assert board.flash is not None
    without = replace(board, flash=replace(board.flash, storage_bytes=0))
    with pytest.raises(InputError, match=r"is volatile, and no \[flash\] of it may take"):
        export_step(load_step(STEP), tmp_path, device=without, ram="90%", commit=True)
    small = replace(board, flash=replace(board.flash, storage_bytes=8191))
    with pytest.raises((BudgetError, NoScheduleError), match="train fewer parameters"):
        export_step(load_step(STEP), tmp_path, device=small, ram="90%", commit=True)
    assert list(tmp_path.iterdir()) == []


def test_mapped_storage_in_a_file_outlives_a_power_cut(tmp_path):
    """The default build for storage that the core reads in place resumes, with the same end.

    Storage that has no state yet is named, not only by its number.
    """
    require_programs(Target.HOST)
    inputs = digit_batches(STEPS, seed=3)
    device = {"device": "nano33ble", "commit": True, "ram": "150%"}
    export_step(load_step(STEP), tmp_path, gap=0.5, **device)
    run = build_runner(tmp_path, settings=("FAULTS=1",), inputs=inputs)
    with pytest.raises(ToolchainError, match="train without resume first"):
        run(0, words=("resume",))
    whole = run(STEPS)
    (tmp_path / "pm_storage.bin").unlink()
    with pytest.raises(ToolchainError, match="status 9"):
        run(STEPS, words=(f"cut:{whole.metrics['storage_writes'] - 3}",))
    done = run(0, words=("resume",)).metrics["resumed"]
    assert 0 < done < STEPS
    rest = run(STEPS - done, words=("resume",))
    assert rest.state == whole.state
