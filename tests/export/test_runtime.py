"""The runtime around a step: pm_run, page drivers, faults, boards."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kit.programs import needs
from kit.toy_export import BATCHES, LEARNING_RATE, Toys, batches, expected, samples
from poetmodel.export.board import (
    FAULT_STATUS,
    STEP_STATUS,
    STOPPED_STATUS,
    Target,
    ToolchainError,
    build,
    run,
)

if TYPE_CHECKING:
    from pathlib import Path

BOARDS = [Target.M4, *(pytest.param(t, marks=pytest.mark.slow) for t in (Target.M3, Target.M7))]
STEPS = BATCHES + 2
TORN, SHORT, CHECKSUM = 1, 3, 5
PAGE = 2


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    """Programs that the tests of this module share."""
    return Toys(tmp_path_factory.mktemp("toys"))


def parameters(state: bytes, kind: str) -> tuple[np.ndarray, int]:
    """Return the six parameters of the toy, and its integer."""
    return np.frombuffer(state[:-4], kind), int(np.frombuffer(state[-4:], np.int32)[0])


@pytest.mark.parametrize(
    ("target", "kind", "tolerance"),
    [(Target.HOST_DOUBLE, "<f8", 1e-14), (Target.HOST, "<f4", 1e-5), (Target.M4, "<f4", 1e-5)],
)
def test_run_trains(
    toys: Toys, tmp_path: Path, target: Target, kind: str, tolerance: float
) -> None:
    """Losses and state are those of the step, batches begin again, integers stay integers."""
    found = toys.run(target, (), tmp_path, steps=STEPS).require_success()
    losses, w, b = expected(STEPS)
    assert list(found.losses) == list(range(1, STEPS + 1))
    assert list(found.losses.values()) == pytest.approx(losses, rel=tolerance)
    trained, scale = parameters(found.state, kind)
    assert trained == pytest.approx([*w, b], rel=tolerance)
    assert scale == 7


@pytest.mark.parametrize("target", BOARDS)
def test_boards_give_the_bits_of_the_host(toys: Toys, tmp_path: Path, target: Target) -> None:
    """Soft and hard floats, and the text of losses, are the same on every core."""
    host = toys.run(Target.HOST, (), tmp_path, steps=STEPS).require_success()
    board = toys.run(target, (), tmp_path, steps=STEPS).require_success()
    assert (board.state, board.losses) == (host.state, host.losses)


@pytest.mark.parametrize("target", [Target.HOST_DOUBLE, Target.M4])
def test_gradients_are_written_without_an_optimizer(
    toys: Toys, tmp_path: Path, target: Target
) -> None:
    """The file has the gradients of the last step, and none of the state."""
    found = toys.run(target, ("EXTRA=-DTOY_GRADIENTS",), tmp_path, steps=1).require_success()
    kind = "<f8" if target is Target.HOST_DOUBLE else "<f4"
    x, k = samples()[0]
    slope = 2 * k * (k * (0.125 * np.arange(5) @ x + 0.5) - 1)
    assert np.frombuffer(found.state, kind) == pytest.approx([*(slope * x), slope], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["file", "ram", "spi_flash"])
@pytest.mark.parametrize(
    "checksum",
    [pytest.param((), marks=pytest.mark.slow, id="plain"), pytest.param(("CHECKSUM=1",), id="sum")],
)
@pytest.mark.parametrize("target", [Target.HOST_DOUBLE, Target.M4])
def test_drivers_give_equal_bits(
    toys: Toys, tmp_path: Path, driver: str, checksum: tuple[str, ...], target: Target
) -> None:
    """Whatever the storage is, pages come back as they were."""
    plain = toys.run(target, (), tmp_path, steps=STEPS).require_success()
    settings = (f"DRIVER={driver}", *checksum)
    found = toys.run(target, settings, tmp_path, steps=STEPS).require_success()
    assert (found.state, found.losses) == (plain.state, plain.losses)


def test_poisoned_and_late_runs_give_equal_bits(toys: Toys, tmp_path: Path) -> None:
    """NaN in free memory, and transfers that happen at their wait, change nothing."""
    plain = toys.run(Target.HOST, (), tmp_path, steps=STEPS).require_success()
    late = toys.run(Target.HOST, ("LATE=1", "POISON=1"), tmp_path, steps=STEPS)
    assert late.require_success().state == plain.state


def test_late_driver_notices_a_missing_wait(toys: Toys, tmp_path: Path) -> None:
    """Where a wait is left out, the step reads NaN and the next transfer of the slot fails."""
    settings = ("LATE=1", "EXTRA=-DTOY_FORGETS_WAIT")
    found = toys.run(Target.HOST, settings, tmp_path, steps=1)
    assert found.status > STEP_STATUS


@pytest.mark.parametrize(("kind", "error"), [("fail", PAGE), ("short", SHORT)])
def test_storage_that_fails_ends_the_step(
    toys: Toys, tmp_path: Path, kind: str, error: int
) -> None:
    """At whichever call: before the first update state stays, after it the step says torn."""
    settings = ("FAULTS=1",)
    before = [toys.run(Target.HOST, settings, tmp_path, steps=k) for k in range(3)]
    calls = [sum(each.figures[f"storage_{way}"] for way in ("reads", "writes")) for each in before]
    # Reading the state at the end takes calls too, two of them: w has at most 64 elements.
    per_step = calls[1] - calls[0]
    assert calls[2] - calls[1] == per_step == 4
    torn = 0
    for call in range(1, calls[2]):
        found = toys.run(Target.HOST, settings, tmp_path, steps=2, words=(f"{kind}:{call}",))
        assert found.error in {error, TORN}
        torn += found.error == TORN
        if found.error == error and found.state and found.losses:
            assert found.state == before[len(found.losses)].state
    assert torn == 2


@pytest.mark.parametrize("kind", ["flip", "old", "empty"])
def test_pages_that_changed_are_caught_by_checksums(toys: Toys, tmp_path: Path, kind: str) -> None:
    """A flipped bit, a lost write and a read that does nothing: silent without, an error with."""
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
        assert found.error == CHECKSUM


def test_checksum_is_that_of_zlib(toys: Toys, tmp_path: Path) -> None:
    """A page on storage is followed by the CRC-32 of its slot's number and of itself."""
    toys.run(Target.HOST, ("CHECKSUM=1",), tmp_path, steps=1).require_success()
    stored = (tmp_path / "pm_storage.bin").read_bytes()
    start, size = 16, 20  # slot 0 has one block; slot 1 is w
    page = stored[start : start + size]
    sum_ = int.from_bytes(stored[start + size : start + size + 4], "little")
    assert sum_ == zlib.crc32(page, zlib.crc32((1).to_bytes(4, "little")))


@pytest.mark.parametrize("words", [("cut",), ("flood:3",), ("fail:3",)])
def test_unknown_words_are_refused(toys: Toys, tmp_path: Path, words: tuple[str, ...]) -> None:
    """What a build does not know ends with status 2 and a sentence."""
    found = toys.run(Target.HOST, (), tmp_path, steps=1, words=words)
    assert found.status == 2
    assert words[0].split(":")[0] in found.messages


def test_inputs_without_a_whole_batch_are_refused(toys: Toys, tmp_path: Path) -> None:
    """A file that is too short ends with status 2."""
    program = toys.program(Target.HOST)
    short = batches(Target.HOST)[:23]
    found = run(program, Target.HOST, tmp_path, inputs=short, steps=1, learning_rate=LEARNING_RATE)
    assert found.status == 2
    assert "batch" in found.messages


# -- boards ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", BOARDS)
def test_board_says_what_it_takes(toys: Toys, tmp_path: Path, target: Target) -> None:
    """RAM holds stack, arena and inputs; instructions are the same each time."""
    found = [toys.run(target, (), tmp_path, steps=2).require_success() for _ in range(2)]
    figures = found[0].figures
    assert figures["stack_limit_bytes"] == 2048
    assert figures["ram_limit_bytes"] == 16384
    assert 0 < figures["stack_bytes"] < 2048 < figures["ram_bytes"] < 4096
    assert 4096 < figures["flash_bytes"] < 20000
    assert 100 < figures["step_instructions"] < 20000
    assert found[1].figures == figures


def test_stack_is_painted(toys: Toys, tmp_path: Path) -> None:
    """What a step takes of the stack is seen after it."""
    plain = toys.run(Target.M4, (), tmp_path, steps=1).figures["stack_bytes"]
    settings = ("EXTRA=-DTOY_DEEP=1200",)
    deep = toys.run(Target.M4, settings, tmp_path, steps=1).require_success()
    assert 1200 <= deep.figures["stack_bytes"] < 1200 + plain


@pytest.mark.parametrize("target", BOARDS)
def test_full_stack_ends_in_a_fault(toys: Toys, tmp_path: Path, target: Target) -> None:
    """A step that takes more stack than there is changes no data: the core stops."""
    found = toys.run(target, ("EXTRA=-DTOY_DEEP=6000",), tmp_path, steps=1)
    assert found.status == FAULT_STATUS
    assert "stack" in found.messages
    assert not found.losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("src/pm_step.c", "PM_C(0.125)", "PM_C(0.25)"),
        ("include/pm.h", "BYTES 64", "BYTES 128"),
    ],
)
def test_objects_are_made_again_where_flags_or_texts_differ(
    toys: Toys, name: str, old: str, new: str
) -> None:
    """What make left from other settings, or from another text, is no part of a program."""
    needs(Target.HOST)
    folder = toys.sources()

    def built(*settings: str) -> bytes:
        return build(folder, Target.HOST, settings=settings).read_bytes()

    plain = built()
    assert built("EXTRA=-DTOY_GRADIENTS") != plain
    assert built() == plain
    text = (folder / name).read_text(encoding="utf-8")
    (folder / name).write_text(text.replace(old, new), encoding="utf-8")
    assert built() != plain


def test_linker_refuses_too_little_ram(toys: Toys) -> None:
    """RAM that does not suffice is no program."""
    with pytest.raises(ToolchainError, match="overflowed"):
        toys.program(Target.M4, "RAM_SIZE=2200")


def test_heap_is_refused(toys: Toys) -> None:
    """A step that asks for memory is no program."""
    with pytest.raises(ToolchainError, match="heap"):
        toys.program(Target.M4, "EXTRA=-DTOY_HEAP")


def test_instructions_are_counted_by_node(toys: Toys, tmp_path: Path) -> None:
    """Nodes have what they compute; transfers are of none."""
    found = [
        toys.run(Target.M4, ("PROFILE=1",), tmp_path, steps=4).require_success() for _ in range(2)
    ]
    nodes = found[0].node_instructions
    assert set(nodes) == {0, 1, 2}
    assert nodes[0] > nodes[2]
    # Reading the clock is of no node either, and not counted.
    other = found[0].figures["other_instructions"]
    assert 0 < other < found[0].figures["step_instructions"] - sum(nodes.values())
    assert found[1].node_instructions == nodes


# -- power cuts ------------------------------------------------------------------------------------

COMMIT = ("FAULTS=1", "CHECKSUM=1", "EXTRA=-DPM_COMMIT=1")


def _resumed(toys: Toys, target: Target, folder: Path, *, printed: int) -> bytes | None:
    """Return the state after all steps of a run that was interrupted; None without a generation."""
    probe = toys.run(target, COMMIT, folder, steps=0, words=("resume",))
    if probe.error:
        assert printed == 0
        return None
    done = probe.figures["resumed"]
    assert done in {printed, printed + 1}  # the last step may have been committed, and not printed
    rest = toys.run(target, COMMIT, folder, steps=STEPS - done, words=("resume",))
    return rest.require_success().state


def test_power_cut_in_any_write_leaves_a_whole_generation(toys: Toys, tmp_path: Path) -> None:
    """Training goes on from the last whole step, to the very state of a run without a cut."""
    whole = toys.run(Target.HOST, COMMIT, tmp_path, steps=STEPS).require_success()
    lost = 0
    for write in range(1, whole.figures["storage_writes"] + 1):
        (tmp_path / "pm_storage.bin").unlink()
        cut = toys.run(Target.HOST, COMMIT, tmp_path, steps=STEPS, words=(f"cut:{write}",))
        assert cut.status == STOPPED_STATUS
        state = _resumed(toys, Target.HOST, tmp_path, printed=len(cut.losses))
        lost += state is None
        assert state in {None, whole.state}
    # pm_init writes two tensors, each with its sum, and a record.
    assert lost == 5


def test_resuming_without_commits_says_that_storage_is_empty(toys: Toys, tmp_path: Path) -> None:
    """A build without generations has none to go on from."""
    found = toys.run(Target.HOST, (), tmp_path, steps=1, words=("resume",))
    assert found.error == 8


@pytest.mark.slow
def test_board_stopped_at_any_instruction_goes_on(toys: Toys, tmp_path: Path) -> None:
    """The emulator ends at random moments; what is on storage then is whole."""
    whole = toys.run(Target.M4, COMMIT, tmp_path, steps=STEPS).require_success()
    random = np.random.default_rng(3)
    resumed = 0
    for tick in random.integers(50, STEPS * whole.figures["step_instructions"] // 40, 25):
        (tmp_path / "pm_storage.bin").unlink(missing_ok=True)
        stopped = toys.run(Target.M4, COMMIT, tmp_path, steps=STEPS, words=(f"stop:{tick}",))
        assert stopped.status == STOPPED_STATUS
        state = _resumed(toys, Target.M4, tmp_path, printed=len(stopped.losses))
        assert state in {None, whole.state}
        resumed += state is not None
    assert resumed > 10
