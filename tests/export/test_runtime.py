"""The runtime around a step: pm_run, page drivers, faults, boards."""

import subprocess
import zlib

import numpy as np
import pytest

from kit.digits import BATCHES, LEARNING_RATE, Toys, batches
from kit.programs import require_programs
from kit.rotation import mark_seeds_except
from poetmodel.errors import MissingExtraError
from poetmodel.export import board
from poetmodel.export.board import (
    FAULT_STATUS,
    STOPPED_STATUS,
    ProgramResult,
    Target,
    ToolchainError,
    build_program,
    run_program,
)

BOARDS = [Target.M4, *mark_seeds_except([Target.M3, Target.M7], ())]
STEPS = BATCHES + 2
CHECKSUM = 5


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """Programs that the tests of this module share."""
    return Toys(tmp_path_factory.mktemp("toys"))


@pytest.mark.parametrize("target", BOARDS)
def test_boards_give_the_bits_of_the_host(toys, tmp_path, target):
    """Soft and hard floats, and the text of losses, are the same on every core."""
    host = toys.run(Target.HOST, (), tmp_path, steps=STEPS).require_success()
    board = toys.run(target, (), tmp_path, steps=STEPS).require_success()
    assert (board.state, board.losses) == (host.state, host.losses)


def test_poisoned_and_late_runs_give_equal_bits(toys, tmp_path):
    """NaN in free memory, and transfers that take place at their wait, change no result."""
    plain = toys.run(Target.HOST, (), tmp_path, steps=STEPS).require_success()
    late = toys.run(Target.HOST, ("LATE=1", "POISON=1"), tmp_path, steps=STEPS)
    assert late.require_success().state == plain.state


@pytest.mark.parametrize("kind", ["flip", "old", "empty"])
def test_pages_that_changed_are_caught_by_checksums(toys, tmp_path, kind):
    """A flipped bit, a lost write and an empty read are errors with checksums, silent without."""
    words = {"flip": ("flip:3",), "old": ("old:5",), "empty": ("empty:3",)}[kind]
    plain = toys.run(Target.HOST, ("FAULTS=1", "POISON=1"), tmp_path, steps=2)
    silent = toys.run(Target.HOST, ("FAULTS=1", "POISON=1"), tmp_path, steps=2, words=words)
    assert silent.status == 0
    assert silent.state != plain.state
    settings = ("FAULTS=1", "POISON=1", "CHECKSUM=1")
    for call in range(3, 7):
        # What a lost write leaves is what the run before has written.
        toys.run(Target.HOST, settings, tmp_path, steps=2).require_success()
        found = toys.run(Target.HOST, settings, tmp_path, steps=2, words=(f"{kind}:{call}",))
        assert found.error_number == CHECKSUM


def test_checksum_is_that_of_zlib(toys, tmp_path):
    """A page on storage is followed by the CRC-32 of its slot's number and of itself."""
    toys.run(Target.HOST, ("CHECKSUM=1",), tmp_path, steps=1).require_success()
    stored = (tmp_path / "pm_storage.bin").read_bytes()
    start, size = 16, 20  # slot 0 has one block; slot 1 is w
    page = stored[start : start + size]
    sum_ = int.from_bytes(stored[start + size : start + size + 4], "little")
    assert sum_ == zlib.crc32(page, zlib.crc32((1).to_bytes(4, "little")))


@pytest.mark.parametrize("words", [("cut",), ("flood:3",), ("fail:3",)])
def test_unknown_words_are_refused(toys, tmp_path, words):
    """Unknown arguments, or a file that is too short, end with status 2."""
    found = toys.run(Target.HOST, (), tmp_path, steps=1, words=words)
    assert found.status == 2
    assert words[0].split(":")[0] in found.messages
    program = toys.program(Target.HOST)
    short = batches(Target.HOST)[:23]
    found = run_program(
        program, Target.HOST, tmp_path, inputs=short, steps=1, learning_rate=LEARNING_RATE
    )
    assert found.status == 2
    assert "batch" in found.messages


# -- boards ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("target", BOARDS)
def test_board_says_what_it_takes(toys, tmp_path, target):
    """RAM holds stack, arena and inputs; instructions are the same each time."""
    found = [toys.run(target, (), tmp_path, steps=2).require_success() for _ in range(2)]
    figures = found[0].metrics
    assert figures["stack_limit_bytes"] == 2048
    assert figures["ram_limit_bytes"] == 16384
    assert 0 < figures["stack_bytes"] < 2048 < figures["ram_bytes"] < 4096
    assert 4096 < figures["flash_bytes"] < 20000
    assert 100 < figures["step_instructions"] < 20000
    assert found[1].metrics == figures


def test_stack_is_painted(toys, tmp_path):
    """The used part of the stack is visible after the step."""
    plain = toys.run(Target.M4, (), tmp_path, steps=1).metrics["stack_bytes"]
    settings = ("EXTRA=-DTOY_DEEP=1200",)
    deep = toys.run(Target.M4, settings, tmp_path, steps=1).require_success()
    assert 1200 <= deep.metrics["stack_bytes"] < 1200 + plain


@pytest.mark.parametrize("target", BOARDS)
def test_full_stack_ends_in_a_fault(toys, tmp_path, target):
    """A step that needs more than the stack changes no data: the core stops."""
    found = toys.run(target, ("EXTRA=-DTOY_DEEP=6000",), tmp_path, steps=1)
    assert found.status == FAULT_STATUS
    assert "stack" in found.messages
    assert not found.losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("src/pm_step.c", "PM_C(0.125)", "PM_C(0.25)"), ("include/pm.h", "BYTES 64", "BYTES 128")],
)
def test_objects_are_made_again_where_flags_or_texts_differ(toys, name, old, new):
    """Objects of other flags or other sources are compiled again."""
    require_programs(Target.HOST)
    folder = toys.sources()

    def built(*settings):
        return build_program(folder, Target.HOST, settings=settings).read_bytes()

    plain = built()
    assert built("EXTRA=-DTOY_GRADIENTS") != plain
    assert built() == plain
    text = (folder / name).read_text(encoding="utf-8")
    (folder / name).write_text(text.replace(old, new), encoding="utf-8")
    assert built() != plain


def test_program_of_the_user_takes_the_place_of_pm_run(toys):
    """MAIN=FILE builds it, also where an object of another one is left."""
    require_programs(Target.HOST)
    folder = toys.sources()
    includes = '#include "pm_platform.h"\n#include "pm.h"\n'
    for name in ("first", "second"):
        (toys.folder / f"{name}.c").write_text(
            f'{includes}int main(void) {{ pm_say("{name}"); return pm_init(); }}\n',
            encoding="utf-8",
        )
    for name in ("second", "first"):
        program = build_program(folder, Target.HOST, settings=(f"MAIN=../{name}.c",))
        done = subprocess.run(
            [program], capture_output=True, text=True, check=True, cwd=toys.folder
        )
        assert done.stdout == name
    done = board.execute([build_program(folder, Target.HOST)], folder, time_limit_s=60)
    assert "usage: pm_run" in done.stderr


def test_linker_refuses_too_little_ram(toys):
    """Without the RAM that it needs, or with a heap, a step is no program."""
    with pytest.raises(ToolchainError, match="overflowed"):
        toys.program(Target.M4, "RAM_SIZE=2200")
    with pytest.raises(ToolchainError, match="heap"):
        toys.program(Target.M4, "EXTRA=-DTOY_HEAP")


def test_instructions_are_counted_by_node(toys, tmp_path):
    """Each node has the instructions of its computation; transfers are of no node."""
    found = [
        toys.run(Target.M4, ("PROFILE=1",), tmp_path, steps=4).require_success() for _ in range(2)
    ]
    nodes = found[0].node_instructions
    assert set(nodes) == {0, 1, 2}
    assert nodes[0] > nodes[2]
    # Reading the clock is of no node either, and not counted.
    other = found[0].metrics["other_instructions"]
    assert 0 < other < found[0].metrics["step_instructions"] - sum(nodes.values())
    assert found[1].node_instructions == nodes


# -- power cuts ------------------------------------------------------------------------------------
COMMIT = ("FAULTS=1", "CHECKSUM=1", "EXTRA=-DPM_COMMIT=1")


def _resumed(toys, target, folder, *, printed):
    """Return the state after all steps of a run that was interrupted; None without a generation."""
    probe = toys.run(target, COMMIT, folder, steps=0, words=("resume",))
    if probe.error_number:
        assert printed == 0
        return None
    done = probe.metrics["resumed"]
    assert done in {printed, printed + 1}  # the last step may have been committed, and not printed
    rest = toys.run(target, COMMIT, folder, steps=STEPS - done, words=("resume",))
    return rest.require_success().state


@pytest.mark.slow
def test_power_cut_in_any_write_leaves_a_whole_generation(toys, tmp_path):
    """Training continues from the last whole step, to the same state; without commits from none."""
    whole = toys.run(Target.HOST, COMMIT, tmp_path, steps=STEPS).require_success()
    lost = 0
    for write in range(1, whole.metrics["storage_writes"] + 1):
        (tmp_path / "pm_storage.bin").unlink()
        cut = toys.run(Target.HOST, COMMIT, tmp_path, steps=STEPS, words=(f"cut:{write}",))
        assert cut.status == STOPPED_STATUS
        state = _resumed(toys, Target.HOST, tmp_path, printed=len(cut.losses))
        lost += state is None
        assert state in {None, whole.state}
    # pm_init writes a record, two tensors, each with its sum, and a seal.
    assert lost == 6
    found = toys.run(Target.HOST, (), tmp_path, steps=1, words=("resume",))
    assert found.error_number == 8


@pytest.mark.slow
def test_board_stopped_at_any_instruction_goes_on(toys, tmp_path):
    """The emulator ends at random moments; the storage is then valid."""
    whole = toys.run(Target.M4, COMMIT, tmp_path, steps=STEPS).require_success()
    random = np.random.default_rng(3)
    resumed = 0
    for tick in random.integers(50, STEPS * whole.metrics["step_instructions"] // 40, 25):
        (tmp_path / "pm_storage.bin").unlink(missing_ok=True)
        stopped = toys.run(Target.M4, COMMIT, tmp_path, steps=STEPS, words=(f"stop:{tick}",))
        assert stopped.status == STOPPED_STATUS
        state = _resumed(toys, Target.M4, tmp_path, printed=len(stopped.losses))
        assert state in {None, whole.state}
        resumed += state is not None
    assert 5 < resumed < 25


# -- programs that are missing, refuse, or take too long ------------------------------------------
@pytest.fixture
def no_programs(monkeypatch, tmp_path):
    """Look for programs where there are none."""
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_programs")
@pytest.mark.parametrize(
    ("target", "package"),
    [
        (Target.HOST, "apt-get install make gcc"),
        (Target.M4, "apt-get install make gcc-arm-none-eabi libnewlib-arm-none-eabi qemu-system"),
    ],
)
def test_missing_programs_are_named_with_their_packages(target, package):
    """One sentence names the missing programs and Debian packages; a build needs no QEMU."""
    with pytest.raises(MissingExtraError, match=package):
        board.require_programs(target)
    assert board.list_missing_programs(Target.M7, emulate=False) == ("make", "arm-none-eabi-gcc")
    assert "qemu-system-arm" in board.list_missing_programs(Target.M7)


def test_errors_of_the_compiler_are_shown(tmp_path):
    """Errors and timeouts of make are reported with its own output."""
    require_programs(Target.HOST)
    (tmp_path / "Makefile").write_text(
        "host:\n\t@echo 'step.c:3: error: no such thing' >&2; false\n"
    )
    with pytest.raises(ToolchainError, match=r"make host failed: step\.c:3: error: no such"):
        build_program(tmp_path, Target.HOST)
    with pytest.raises(ToolchainError, match=r"sleep: expected to end within 0.1 s"):
        board.execute(["sleep", "60"], tmp_path, time_limit_s=0.1)
    failed = ProgramResult(
        status=12,
        losses={},
        state=b"",
        metrics={},
        node_instructions={},
        messages="pm_run: step 3: error 2\n",
    )
    assert failed.error_number == 2
    with pytest.raises(ToolchainError, match="status 12: pm_run: step 3: error 2"):
        failed.require_success()
