"""An exported folder as a library: what an application compiles, links and calls."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from kit.digits import STEP, digit_batches
from kit.page_examples import blocks_of
from kit.programs import needs
from poetmodel.errors import InputError
from poetmodel.export.board import Target, build, run
from poetmodel.export.exporting import export_step
from poetmodel.export.io import load_step
from poetmodel.export.state import state_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WARNINGS: Final = ("-Wall", "-Wextra", "-Wpedantic", "-Wmissing-prototypes", "-Werror")
C: Final = ("cc", "-std=c11", "-O1", "-ffp-contract=off", "-fno-math-errno")
SOURCES: Final = Path(__file__).with_name("library")
RATE: Final = 0.1
STEPS: Final = 3
BATCHES: Final = digit_batches(STEPS, seed=3)


def compiled(command: Sequence[str | Path], folder: Path) -> None:
    """Run a compiler in a folder; what it warns of is an error."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def sources(folder: Path) -> list[Path]:
    """Return what an application compiles of a folder."""
    return sorted((folder / "src").glob("*.c"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return folders by the prefix of their names; ``vww`` has state and pages on storage."""
    needs(Target.HOST)
    step = load_step(STEP)
    options = {
        "pm": {"ram": "100%"},
        "kws": {"ram": "100%", "paging": False},
        "vww": {"ram": "90%", "commit": True},
        "ble": {"ram": "100%", "device": "nano33ble"},
        "commits": {"ram": "150%", "device": "nano33ble", "commit": True},
    }
    made: dict[str, Path] = {}

    def folder(prefix: str) -> Path:
        if prefix not in made:
            made[prefix] = tmp_path_factory.mktemp(prefix)
            name = "pm" if prefix == "commits" else prefix
            export_step(step, made[prefix], prefix=name, gap=0.5, **options[prefix])
        return made[prefix]

    return folder


@pytest.mark.parametrize(
    ("prefix", "flags"),
    [
        pytest.param("vww", (), id="plain"),
        pytest.param("ble", (), id="mapped storage without slots"),
        pytest.param("kws", (), id="no slots", marks=pytest.mark.slow),
        pytest.param("pm", ("-flto",), id="flto", marks=pytest.mark.slow),
        pytest.param("vww", ("-DPM_REAL=double",), id="double", marks=pytest.mark.slow),
    ],
)
def test_sources_compile_without_warnings(
    folders: Callable[[str], Path], tmp_path: Path, prefix: str, flags: tuple[str, ...]
) -> None:
    """All of ``src/``, of ``port/`` and of ``host/`` that any machine takes, one include path."""
    folder = folders(prefix)
    own = [flag.replace("PM_", f"{prefix.upper()}_") for flag in flags]
    files = [
        *sources(folder),
        *(folder / "port").glob("driver_[rs]*.c"),
        *(folder / "host").glob("*.c"),
    ]
    compiled([*C, *WARNINGS, *own, f"-I{folder / 'include'}", "-c", *files], tmp_path)


def test_two_networks_link_into_one_application_in_cpp(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each trains as it does alone; only the one with slots on storage has a driver."""
    needs("cc", "c++")
    (tmp_path / "inputs.bin").write_bytes(BATCHES)
    kws, vww = folders("kws"), folders("vww")
    includes = (f"-I{kws / 'include'}", f"-I{vww / 'include'}")
    parts = [*sources(kws), *sources(vww), vww / "port" / "driver_ram.c"]
    compiled([*C, *includes, "-c", *parts], tmp_path)
    strict = [word for word in WARNINGS if word != "-Wmissing-prototypes"]
    compiled(
        ["c++", "-std=c++17", *strict, *includes, "-c", SOURCES / "two_networks.cpp"], tmp_path
    )
    objects = sorted(tmp_path.glob("*.o"))
    compiled(["c++", *objects, "-lm", "-o", "app"], tmp_path)
    said = subprocess.run(
        ["./app", "inputs.bin"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.split()
    alone = {}
    for folder in (kws, vww):
        program = build(folder, Target.HOST)
        alone[folder] = run(
            program, Target.HOST, folder, inputs=BATCHES, steps=STEPS, learning_rate=RATE
        ).require_success()
    losses = [float(word) for word in said[:-1]]
    assert losses[::2] == list(alone[kws].losses.values())
    assert losses[1::2] == list(alone[vww].losses.values())
    first = (36 + 4) * 4
    assert np.float32(said[-1]) == np.frombuffer(alone[vww].state[first : first + 4], "<f4")[0]


def test_mapped_storage_without_slots_needs_no_driver(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """Where the plan pages nothing an application may read and write state all the same."""
    folder = folders("ble")
    (tmp_path / "main.c").write_text(
        """\
#include "ble.h"

static float state[36];

int main(void)
{
    int error = ble_init();
    if (!error) error = ble_read_state(0, state);
    if (!error) error = ble_write_state(0, state);
    return error;
}
""",
        encoding="utf-8",
    )
    flags = (f"-I{folder / 'include'}", "main.c", *sources(folder), "-lm", "-o", "app")
    compiled([*C, *flags], tmp_path)
    compiled(["./app"], tmp_path)


def test_networks_share_one_copy_of_the_kernels(tmp_path: Path) -> None:
    """Each adds what it needs to a folder, and trains as with kernels of its own, to the bit."""
    needs(Target.HOST)
    step, shared = load_step(STEP), tmp_path / "kernels"
    options = {"ram": "100%", "gap": 0.5, "shared_kernels": shared}
    export_step(step, tmp_path / "kws", prefix="kws", **options)
    (shared / "src" / "poetmodel_elu.c").write_text("/* of an earlier version */\n")
    export_step(step, tmp_path / "vww", prefix="vww", commit=True, **options)
    export_step(step, tmp_path / "pm", ram="100%", gap=0.5)
    assert "poetmodel_elu(" in (shared / "src" / "poetmodel_elu.c").read_text()
    states = [
        run(build(tmp_path / name, target), target, tmp_path / name, inputs=BATCHES, steps=STEPS,
            learning_rate=RATE).require_success().state
        for target in (Target.HOST,)
        for name in ("kws", "vww", "pm")
    ]  # fmt: skip
    assert states[0] == states[1] == states[2]
    folders = (tmp_path / "kws", tmp_path / "vww", shared)
    parts = [path for folder in folders for path in sources(folder)]
    parts.append(tmp_path / "vww" / "port" / "driver_ram.c")
    includes = [f"-I{folder / 'include'}" for folder in folders]
    work = tmp_path / "work"
    work.mkdir()
    compiled([*C, *WARNINGS, *includes, "-c", *parts], work)
    flags = ["-std=c++17", *includes, SOURCES / "two_networks.cpp", *work.glob("*.o")]
    compiled(["c++", *flags, "-lm", "-o", "app"], work)
    text = subprocess.run(["nm", "app"], cwd=work, capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in text.stdout.splitlines()}
    assert {"poetmodel_conv2d", "kws_step", "vww_step"} <= names
    assert not names & {"kws_conv2d", "vww_conv2d"}


def test_names_of_a_prefix_are_all_of_its_names(folders: Callable[[str], Path]) -> None:
    """No file and no symbol of another prefix is left, but for the program ``pm_run``."""
    folder = folders("kws")
    for path in (*folder.rglob("*.[ch]"), folder / "Makefile", folder / "README.md"):
        assert "pm_" not in path.read_text(encoding="utf-8").lower().replace("pm_run", ""), path
    assert not [path for path in folder.rglob("pm_*") if "run" not in path.name]
    assert (folder / "include" / "kws.h").is_file()
    assert json.loads((folder / "manifest.json").read_text())["prefix"] == "kws"


@pytest.mark.parametrize("prefix", ["", "Kws", "2kws", "a-b", "a b", 5])
def test_prefixes_that_are_no_names_are_refused(tmp_path: Path, prefix: Any) -> None:
    """One sentence, and no folder."""
    with pytest.raises(InputError, match="prefix: expected small letters"):
        export_step(load_step(STEP), tmp_path / "folder", prefix=prefix)
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("prefix", ["string", "time", "test", "m", "poetmodel"])
def test_prefixes_that_others_have_are_refused(tmp_path: Path, prefix: str) -> None:
    """The step's header would hide one of C, or its library be one that there is."""
    with pytest.raises(InputError, match=f"prefix: {prefix} is .* choose another one"):
        export_step(load_step(STEP), tmp_path / "folder", prefix=prefix)
    assert not (tmp_path / "folder").exists()


def test_weights_in_a_file_are_the_same_program(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """Their path is a definition, of any folder that the compiler runs in."""
    export_step(load_step(STEP), tmp_path, ram="100%", weights="binary", gap=0.5)
    assert (tmp_path / "src" / "pm_weights.bin").is_file()
    runs = [
        run(build(each, Target.HOST), Target.HOST, each, inputs=BATCHES, steps=2,
            learning_rate=RATE).require_success()
        for each in (tmp_path, folders("pm"))
    ]  # fmt: skip
    assert runs[0].state == runs[1].state
    export_step(load_step(STEP), tmp_path, ram="100%", gap=0.5)
    assert not (tmp_path / "src" / "pm_weights.bin").exists()


def test_files_say_how_they_may_be_used(folders: Callable[[str], Path]) -> None:
    """All but the weights, which are no work of ours."""
    folder = folders("pm")
    for path in (*folder.rglob("*.[ch]"), folder / "Makefile"):
        ours = "SPDX-License-Identifier: Apache-2.0" in path.read_text(encoding="utf-8")
        assert ours is (path.stem != "pm_weights"), path


def test_program_is_a_board_program_with_the_optimizer_of_the_linker(
    folders: Callable[[str], Path],
) -> None:
    """What only assembly calls stays in it; it trains to the bits of the plain one."""
    needs(Target.M4)
    folder = folders("pm")
    runs = [
        run(build(folder, Target.M4, settings=settings), Target.M4, folder, inputs=BATCHES,
            steps=2, learning_rate=RATE).require_success()
        for settings in ((), ("EXTRA=-flto",))
    ]  # fmt: skip
    assert runs[0].state == runs[1].state


# -- slices, the hook, the arena -------------------------------------------------------------------


@pytest.fixture(scope="module")
def called(
    folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], tuple[list[str], list[int]]]:
    """Return what an application prints, built with a header of its own and run with a word."""
    folder = tmp_path_factory.mktemp("caller")
    (folder / "inputs.bin").write_bytes(BATCHES)

    def call(config: str, nodes: str) -> tuple[list[str], list[int]]:
        name = str(abs(hash(config)))
        if not (folder / name).exists():
            text = (SOURCES / "config.h").read_text(encoding="utf-8")
            (folder / "config.h").write_text(text + config, encoding="utf-8")
            own = folders("pm")
            flags = (f"-I{own / 'include'}", f"-I{folder}", '-DPM_CONFIG="config.h"')
            parts = [*sources(own), SOURCES / "caller.c", "-lm", "-o", name]
            compiled([*C, *WARNINGS, *flags, *parts], folder)
        done = subprocess.run(
            [f"./{name}", "inputs.bin", nodes], cwd=folder, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.returncode
        return done.stdout.split(), [int(word) for word in done.stderr.split()]

    return call


def test_a_step_that_fails_may_be_done_again(tmp_path: Path) -> None:
    """At whichever call of storage, that of the commit too: the error number says how."""
    needs(Target.HOST)
    folder = tmp_path / "folder"
    export_step(load_step(STEP), folder, ram="90%", commit=True, gap=0.5)
    homes = {tensor.home for tensor in state_tensors(folder)}
    assert homes == {"ram", "storage"}  # of one the other generation is in RAM
    driver = (folder / "port" / "driver_ram.c", folder / "host" / "driver_faults.c")
    flags = ("-DPM_FAULTS", f"-I{folder}", f"-I{folder / 'include'}", "-lm", "-o", "app")
    compiled([*C, *sources(folder), SOURCES / "retry.c", *driver, *flags], tmp_path)
    done = subprocess.run(["./app"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    torn, before = map(int, re.findall(r"\d+", done.stdout))
    assert torn > 0
    assert before > 0


@pytest.mark.parametrize("nodes", [1, 7, 1000])
def test_slices_are_the_step(
    called: Callable[[str, str], tuple[list[str], list[int]]], nodes: int
) -> None:
    """However many nodes at a time: same losses, same state, and as many slices as that takes."""
    whole, (none, seen) = called("", "0")
    sliced, (slices, again) = called("", str(nodes))
    assert sliced == whole
    assert none == 0
    assert seen == again == STEPS
    computed = sum(not node.is_state for node in load_step(STEP).graph.nodes)
    assert slices == STEPS * -(-computed // nodes)


@pytest.mark.parametrize(
    "config",
    ["#define PM_ARENA_EXTERN\n", '#define PM_ARENA_SECTION ".slow_memory"\n'],
    ids=["given", "placed"],
)
def test_arena_is_where_the_application_wants_it(
    called: Callable[[str, str], tuple[list[str], list[int]]], config: str
) -> None:
    """In memory of the caller, or in a section of the linker: the step is the same."""
    assert called(config, "0")[0] == called("", "0")[0]


def test_arena_is_aligned_to_cache_lines_where_dma_passes_them(tmp_path: Path) -> None:
    """On a Cortex-M7 with DMA every offset, and the arena itself, begins a line."""
    made = export_step(load_step(STEP), tmp_path, device="stm32h743", ram="95%", gap=0.5)
    assert made.arena.alignment == 32
    assert all(placed.offset % 32 == 0 for placed in made.arena.offsets)
    assert "#define PM_ALIGNMENT 32 " in (tmp_path / "include" / "pm.h").read_text()


def test_task_of_the_page_compiles(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """The task of FreeRTOS that the page of the interface shows, without a warning."""
    page = Path(__file__).parents[2] / "docs" / "guides" / "c-interface.md"
    (task,) = (b for b in blocks_of(page.read_text(encoding="utf-8")) if b.title == "task.c")
    (tmp_path / "task.c").write_text(task.code, encoding="utf-8")
    warnings = [word for word in WARNINGS if word != "-Wmissing-prototypes"]
    includes = (f"-I{SOURCES / 'freertos'}", f"-I{folders('commits') / 'include'}")
    compiled([*C, *warnings, *includes, "-c", "task.c"], tmp_path)
