"""An exported folder as a library that an application compiles, links and calls."""

import json
import re
import subprocess
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from kit.digits import STEP, build_and_run, digit_batches, exporter
from kit.page_examples import parse_blocks
from kit.programs import require_programs, run_command
from kit.rotation import mark_seeds_except
from kit.shared_objects import build, compile_objects, link_program, read_flags
from poetmodel.errors import InputError
from poetmodel.export.board import Target
from poetmodel.export.emitter import IntegerLists
from poetmodel.export.exporting import export_step
from poetmodel.export.kernels import make_kernel_header
from poetmodel.export.state import load_state_tensors
from poetmodel.lowered.io import load_step
from poetmodel.lowered.kernels import SOURCES as KERNELS
from poetmodel.lowered.kernels import find_kernel, kernel_names

CONVERSIONS = ("-Wconversion", "-Wsign-conversion")
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", *CONVERSIONS, "-Wmissing-prototypes", "-Werror")
C = ("cc", "-std=c11", "-O0", "-ffp-contract=off", "-fno-math-errno")
CORES = (
    ("-mcpu=cortex-m3",),
    ("-mcpu=cortex-m4", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16"),
)
SOURCES = Path(__file__).with_name("library")
LICENCE = Path(__file__).parents[2] / "LICENSE"
STEPS = 3
BATCHES = digit_batches(STEPS, seed=3)


def sources(folder):
    """Return the sources of a folder that an application compiles."""
    return sorted((folder / "src").glob("*.c"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return folders by the prefix of their names; ``vww`` has state and pages on storage."""
    require_programs(Target.HOST)
    mapped = {"device": "nano33ble"}
    plans = {
        "pm": {"ram": "100%"},
        "kws": {"ram": "100%", "paging": False, "prefix": "kws"},
        "vww": {"ram": "90%", "commit": True, "prefix": "vww"},
        "ble": {"ram": "100%", "prefix": "ble", **mapped},
        "commits": {"ram": "150%", "commit": True, **mapped},
        "mapped": {"ram": "90%", "commit": True, **mapped},
        "kept": {
            "ram": "100%",
            "commit": True,
            "evaluate": True,
            "replay": 4,
            "prefix": "kept",
        },
        "samples": {"ram": "150%", "paging": False, "replay": 4, "prefix": "samples"},
    }
    made = exporter(tmp_path_factory, plans)
    plans["moved"] = {**plans["kept"], "prefix": "moved", **mapped}

    def folder(prefix):
        if prefix == "moved":
            plans["moved"]["migrate_from"] = made("kept")
        return made(prefix)

    return folder


@pytest.mark.parametrize(
    ("prefix", "flags"),
    [
        pytest.param("vww", (), id="plain"),
        pytest.param("ble", (), id="mapped storage without slots", marks=pytest.mark.seeds),
        pytest.param("kept", (), id="evaluation, the best, samples", marks=pytest.mark.slow),
        pytest.param("samples", (), id="samples alone", marks=pytest.mark.seeds),
        pytest.param("kept", ("-fanalyzer",), id="analyzed", marks=pytest.mark.slow),
        pytest.param("moved", ("-fanalyzer",), id="analyzed migration", marks=pytest.mark.seeds),
        pytest.param("kws", (), id="no slots", marks=pytest.mark.seeds),
        pytest.param("pm", ("-flto",), id="flto", marks=pytest.mark.seeds),
        pytest.param("vww", ("-DPM_REAL=double",), id="double", marks=pytest.mark.seeds),
    ],
)
def test_sources_compile_without_warnings(folders, tmp_path, prefix, flags):
    """All of ``src/``, ``port/`` and ``host/`` that any machine supports, with one include path."""
    folder = folders(prefix)
    own = [flag.replace("PM_", f"{prefix.upper()}_") for flag in flags]
    files = [
        *sources(folder),
        *(folder / "port").glob("driver_[rs]*.c"),
        *(folder / "host").glob("*.c"),
    ]
    if "-flto" in own or "-fanalyzer" in own:
        run_command([*C, *WARNINGS, *own, f"-I{folder / 'include'}", "-c", *files], tmp_path)
    else:
        compile_objects([*C, *WARNINGS, *own], files, [folder / "include"])


@pytest.mark.parametrize(
    "compiler",
    [
        pytest.param(("cc",), marks=pytest.mark.slow),
        *(
            pytest.param(compiler, marks=pytest.mark.seeds)
            for compiler in (
                ("cc", "-DPM_REAL=double"),
                *(("arm-none-eabi-gcc", "-mthumb", *flags) for flags in CORES),
            )
        ),
    ],
    ids=" ".join,
)
def test_kernels_compile_without_warnings(tmp_path, compiler):
    """Each kernel, on cores with instructions of their own too: no number changes its sign."""
    require_programs(compiler[0])
    texts = {name: find_kernel(name).source for name in sorted(kernel_names())}
    (tmp_path / "pm_kernels.h").write_text(make_kernel_header(texts), encoding="utf-8")
    folder = Path(str(KERNELS))
    includes = (f"-I{folder / 'kernels'}", f"-I{folder / 'src'}", f"-I{tmp_path}")
    files = [folder / "kernels" / f"{name}.c" for name in texts]
    run_command([*compiler, "-std=c11", "-fsyntax-only", *WARNINGS, *includes, *files], tmp_path)


@pytest.mark.slow
def test_two_networks_link_into_one_application_in_cpp(folders, tmp_path):
    """Each trains as it does alone; only the one with slots on storage has a driver."""
    require_programs("cc", "c++")
    (tmp_path / "inputs.bin").write_bytes(BATCHES)
    kws, vww = folders("kws"), folders("vww")
    includes = (kws / "include", vww / "include")
    parts = [*sources(kws), *sources(vww), vww / "port" / "driver_ram.c"]
    strict = [word for word in WARNINGS if word != "-Wmissing-prototypes"]
    objects = compile_objects([*C, *WARNINGS], parts, includes)
    command = ["c++", "-std=c++17", *strict]
    objects += compile_objects(command, [SOURCES / "two_networks.cpp"], includes)
    run_command(["c++", *objects, "-lm", "-o", "app"], tmp_path)
    said = run_command(["./app", "inputs.bin"], tmp_path).split()
    given = {"settings": ("EXTRA=-O0",), "inputs": BATCHES, "steps": STEPS}
    alone = {folder: build_and_run(folder, **given) for folder in (kws, vww)}
    losses = [float(word) for word in said[:-1]]
    assert losses[::2] == list(alone[kws].losses.values())
    assert losses[1::2] == list(alone[vww].losses.values())
    first = (36 + 4) * 4
    assert np.float32(said[-1]) == np.frombuffer(alone[vww].state[first : first + 4], "<f4")[0]


def test_mapped_storage_without_slots_needs_no_driver(folders, tmp_path):
    """Without paging, an application can read and write state all the same."""
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
    parts = (tmp_path / "main.c", *sources(folder))
    app = link_program([*C, *WARNINGS], parts, [folder / "include"], tmp_path / "app")
    run_command([app], tmp_path)


@pytest.mark.slow
def test_mapped_storage_without_an_address_is_an_error_of_storage(folders, tmp_path):
    """A driver that has no address for a slot returns 0: no state is read or written there."""
    require_programs(Target.HOST)
    folder = folders("mapped")
    states = json.loads((folder / "manifest.json").read_text())["states"]
    index = [state["home"] for state in states].index("mapped")
    (tmp_path / "main.c").write_text(
        """\
#include "pm.h"
#include <stdio.h>

static float state[4096];
static int lost;
const void *__real_pm_page_address(uint32_t slot);
const void *__wrap_pm_page_address(uint32_t slot);

const void *__wrap_pm_page_address(uint32_t slot)
{
    return lost ? 0 : __real_pm_page_address(slot);
}

int main(void)
{
    if (pm_init()) return 1;
    for (lost = 0; lost < 2; lost++) {
        printf("%d ", pm_read_state(MAPPED_STATE, state));
        printf("%d ", pm_write_state(MAPPED_STATE, state));
    }
    return 0;
}
""",
        encoding="utf-8",
    )
    command = [*C, *WARNINGS, f"-DMAPPED_STATE={index}"]
    parts = (tmp_path / "main.c", *sources(folder), folder / "port" / "driver_ram.c")
    wrap = "-Wl,--wrap=pm_page_address"
    app = link_program(command, parts, [folder / "include"], tmp_path / "app", wrap)
    assert run_command([app], tmp_path).split() == ["0", "0", "2", "2"]


def test_networks_share_one_copy_of_the_kernels(folders, tmp_path):
    """Each network adds its kernels to the folder, and trains bitwise as with its own kernels."""
    require_programs(Target.HOST)
    step, shared = load_step(STEP), tmp_path / "kernels"
    options = {"ram": "100%", "gap": 0.5, "shared_kernels": shared}
    export_step(step, tmp_path / "kws", prefix="kws", **options)
    (shared / "src" / "poetmodel_elu.c").write_text("/* of an earlier version */\n")
    export_step(step, tmp_path / "vww", prefix="vww", commit=True, **options)
    assert "poetmodel_elu(" in (shared / "src" / "poetmodel_elu.c").read_text()
    given = {"settings": ("EXTRA=-O0",), "inputs": BATCHES, "steps": STEPS}
    every = (tmp_path / "kws", tmp_path / "vww", folders("pm"))
    states = [build_and_run(folder, **given).state for folder in every]
    assert states[0] == states[1] == states[2]
    assert (shared / "LICENSE").read_text() == LICENCE.read_text()
    parts = [path for folder in (*every[:2], shared) for path in sources(folder)]
    parts.append(tmp_path / "vww" / "port" / "driver_ram.c")
    includes = [folder / "include" for folder in (*every[:2], shared)]
    objects = compile_objects([*C, *WARNINGS], parts, includes)
    objects += compile_objects(["c++", "-std=c++17"], [SOURCES / "two_networks.cpp"], includes)
    run_command(["c++", *objects, "-lm", "-o", "app"], tmp_path)
    names = {line.split()[-1] for line in run_command(["nm", "app"], tmp_path).splitlines()}
    assert {"poetmodel_conv2d", "kws_step", "vww_step"} <= names
    assert not names & {"kws_conv2d", "vww_conv2d"}


def test_lists_are_named_by_their_first_reader(folders):
    """By node and parameter; no name is defined twice, whatever nodes are called."""
    text = (folders("pm") / "src" / "pm_step.c").read_text()
    names = re.findall(r"static const int32_t (pm_list_\w+)\[\]", text)
    assert {"pm_list_0_convolution_shape", "pm_list_1_relu_shape"} <= set(names)
    lists = IntegerLists()
    readers = ("a/b", "a_b", "a.b", "\u00e9", "x" * 90 + "/1", "y" * 90 + "/1")
    made = [lists.register((k,), reader, "shape") for k, reader in enumerate(readers)]
    assert made[:4] == [
        *("pm_list_a_b_shape", "pm_list_a_b_shape_2", "pm_list_a_b_shape_3", "pm_list_shape")
    ]
    assert len(set(made)) == len(readers)
    assert max(map(len, made)) < 60
    assert lists.register((0,), "another", "strides") == made[0]


def test_names_of_a_prefix_are_all_of_its_names(folders):
    """All names have the prefix except ``pm_run``; all sources but the weights have the licence."""
    folder = folders("kws")
    for path in (*folder.rglob("*.[ch]"), folder / "Makefile", folder / "README.md"):
        text = path.read_text(encoding="utf-8")
        assert "pm_" not in text.lower().replace("pm_run", ""), path
        ours = path.stem not in ("kws_weights", "README")
        assert ("SPDX-License-Identifier: Apache-2.0" in text) is ours, path
    assert not [path for path in folder.rglob("pm_*") if "run" not in path.name]
    assert (folder / "LICENSE").read_text() == LICENCE.read_text()
    assert (folder / "include" / "kws.h").is_file()
    assert json.loads((folder / "manifest.json").read_text())["prefix"] == "kws"


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        *(
            (name, "expected small letters")
            for name in ("", "Kws", "2kws", "a-b", "a b", 5, Path("kws"))
        ),
        *((name, "another one") for name in ("string", "time", "test", "m", "poetmodel")),
    ],
)
def test_prefixes_that_are_no_names_or_names_of_others_are_refused(tmp_path, prefix, words):
    """One sentence, and no folder: a header would hide one of C, or a library be one there is."""
    with pytest.raises(InputError, match=f"^prefix: .*{words}"):
        export_step(load_step(STEP), tmp_path / "folder", prefix=prefix)
    assert not (tmp_path / "folder").exists()


def test_weights_in_a_file_are_the_same_program(folders, tmp_path):
    """Their path is a definition, of any folder that the compiler runs in."""
    export_step(load_step(STEP), tmp_path, ram="100%", weights="binary", gap=0.5)
    assert (tmp_path / "src" / "pm_weights.bin").is_file()
    runs = [build_and_run(each, inputs=BATCHES, steps=2) for each in (tmp_path, folders("pm"))]
    assert runs[0].state == runs[1].state
    export_step(load_step(STEP), tmp_path, ram="100%", gap=0.5)
    assert not (tmp_path / "src" / "pm_weights.bin").exists()


@pytest.mark.slow
def test_program_is_a_board_program_with_the_optimizer_of_the_linker(folders):
    """Symbols that only assembly calls stay in it; it trains bitwise as the plain one."""
    require_programs(Target.M4)
    folder = folders("pm")
    given = {"inputs": BATCHES, "steps": 2}
    runs = [
        build_and_run(folder, Target.M4, settings=how, **given) for how in ((), ("EXTRA=-flto",))
    ]
    assert runs[0].state == runs[1].state


# -- slices, the hook, the arena -------------------------------------------------------------------
@pytest.fixture(scope="module")
def called(folders, tmp_path_factory):
    """Return the output of an application, built with its own header and run with an argument."""
    folder = tmp_path_factory.mktemp("caller")
    (folder / "inputs.bin").write_bytes(BATCHES)

    def call(config, nodes):
        name = str(abs(hash(config)))
        if not (folder / name).exists():
            text = (SOURCES / "config.h").read_text(encoding="utf-8")
            (folder / "config.h").write_text(text + config, encoding="utf-8")
            own = folders("pm")
            flags = (f"-I{own / 'include'}", f"-I{folder}", '-DPM_CONFIG="config.h"')
            parts = [*sources(own), SOURCES / "caller.c", "-lm", "-o", name]
            run_command([*C, *WARNINGS, *flags, *parts], folder)
        ran = subprocess.run(
            [f"./{name}", "inputs.bin", nodes], cwd=folder, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        return ran.stdout.split(), [int(word) for word in ran.stderr.split()]

    return call


@pytest.mark.parametrize(
    ("kind", "options"),
    [("fail", {"commit": True}), ("fail", {"device": "stm32h743"}), ("short", {"commit": True})],
)
def test_a_step_that_fails_may_be_done_again(tmp_path, kind, options):
    """After a failure of any call of storage, the error number states how to continue."""
    require_programs(Target.HOST)
    folder = tmp_path / "folder"
    export_step(load_step(STEP), folder, ram="90%", gap=0.5, **options)
    homes = {tensor.home for tensor in load_state_tensors(folder)}
    assert homes == {"ram", "storage"}  # of one the other generation is in RAM
    driver = (folder / "port" / "driver_ram.c", folder / "host" / "driver_faults.c")
    parts = (*sources(folder), SOURCES / "retry.c", *driver)
    includes = (folder, folder / "include")
    app = link_program([*C, *WARNINGS, "-DPM_FAULTS"], parts, includes, tmp_path / "app")
    torn, before = map(int, re.findall(r"\d+", run_command([app, kind], tmp_path)))
    assert torn > 0
    assert before > 0


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"commit": True}, id="on storage", marks=pytest.mark.slow),
        pytest.param({"commit": True, "ram": "150%"}, id="in RAM"),
        pytest.param({"recompute": False}, id="without commits", marks=pytest.mark.slow),
        pytest.param({"commit": True, "device": "nano33ble"}, id="mapped"),
    ],
)
def test_a_step_without_state_is_an_error_that_writes_nothing(tmp_path, options):
    """Before a successful start, after a failed one, and after a torn step."""
    require_programs(Target.HOST)
    folder = tmp_path / "folder"
    export_step(load_step(STEP), folder, gap=0.5, **{"ram": "90%"} | options)
    command = [*C, *WARNINGS, "-DPM_GENERATIONS=2u"]
    parts, includes = (*sources(folder), SOURCES / "unstarted.c"), (folder, folder / "include")
    run_command([link_program(command, parts, includes, tmp_path / "app")], tmp_path)


@pytest.mark.parametrize("nodes", [1, 7, 1000])
def test_slices_are_the_step(called, nodes):
    """For any number of nodes per slice: same losses, same state, and the expected slices."""
    whole, (none, seen) = called("", "0")
    sliced, (slices, again) = called("", str(nodes))
    assert sliced == whole
    assert none == 0
    assert seen == again == STEPS
    computed = sum(not node.is_state for node in load_step(STEP).graph.nodes)
    assert slices == STEPS * -(-computed // nodes)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param("#define PM_ARENA_EXTERN\n", id="given"),
        pytest.param(
            '#define PM_ARENA_SECTION ".slow_memory"\n', id="placed", marks=pytest.mark.slow
        ),
    ],
)
def test_arena_is_where_the_application_wants_it(called, config):
    """In memory of the caller, or in a section of the linker: the step is the same."""
    assert called(config, "0")[0] == called("", "0")[0]


def test_arena_is_aligned_to_cache_lines_where_dma_passes_them(tmp_path):
    """On a Cortex-M7 with DMA every offset, and the arena itself, begins a line."""
    made = export_step(load_step(STEP), tmp_path, device="stm32h743", ram="95%", gap=0.5)
    assert made.arena.alignment == 32
    assert all(placed.offset % 32 == 0 for placed in made.arena.offsets)
    assert "#define PM_ALIGNMENT 32 " in (tmp_path / "include" / "pm.h").read_text()


def test_task_of_the_page_compiles(folders, tmp_path):
    """The task of FreeRTOS that the page of the interface shows, without a warning."""
    page = Path(__file__).parents[2] / "docs" / "guides" / "c-interface.md"
    (task,) = (b for b in parse_blocks(page.read_text(encoding="utf-8")) if b.title == "task.c")
    (tmp_path / "task.c").write_text(task.code, encoding="utf-8")
    warnings = [word for word in WARNINGS if word != "-Wmissing-prototypes"]
    includes = (f"-I{SOURCES / 'freertos'}", f"-I{folders('commits') / 'include'}")
    run_command([*C, *warnings, *includes, "-c", "task.c"], tmp_path)


# -- levels of optimization ------------------------------------------------------------------------
LEVELS = ("-O0", "-Og", "-Os", "-O3")
PLANS = {
    "paged": {"ram": "90%", "recompute": False},
    "read in place": {"ram": "90%", "device": "nano33ble", "commit": True},
}
NETWORKS = (
    "resnet8-thin", "ds-cnn", "autoencoder", "mobilenetv2-035", "lenet", "bert-block",
    "encoder-layer", "vit-block", "unet", "m5", "mlp",
)  # fmt: skip
"""Those of the export tests whose steps differ."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "level"),
    mark_seeds_except(product(PLANS, LEVELS), {("read in place", "-Og")}),
)
def test_levels_warn_of_nothing(plan, level, tmp_path):
    """The Makefile turns each warning into an error."""
    target = Target.M4 if level == "-Og" else Target.HOST
    require_programs(target)
    export_step(load_step(STEP), tmp_path, gap=0.5, **PLANS[plan])
    assert build(tmp_path, target, settings=(f"EXTRA={level}",)).is_file()


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "schedule"),
    mark_seeds_except(
        product(NETWORKS, ("keep-all", "dma", "mapped", "commits")), {("ds-cnn", "commits")}
    ),
)
def test_levels_warn_of_nothing_in_any_network(name, schedule, tmp_path):
    """Each with another optimizer, whichever way it keeps its budget; kernels have a test alone."""
    pytest.importorskip("torch")
    from kit.export_agreement import BATCH, OPTIMIZERS, SCHEDULES, Exported, lower_training
    from mcu.networks import NETWORKS as MADE

    require_programs(Target.HOST, Target.M4)
    optimizers = [each for each in OPTIMIZERS if each != "gradients"]
    optimizer = optimizers[NETWORKS.index(name) % len(optimizers)]
    options = SCHEDULES.get(schedule, {"share": 0.5, "commit": True})
    if schedule == "mapped":  # storage with room for the state of all
        options = options | {"device": "imxrt1062-flash"}
    Exported(lower_training(MADE[name](*BATCH.get(name, ())), optimizer), tmp_path, **options)
    for target, level in product((Target.HOST, Target.M4), LEVELS):
        flags = read_flags(tmp_path, target, (f"EXTRA={level}",))
        own = [word for word in flags if not word.startswith("-Wl,")]
        assert {level, "-Werror"} <= set(own)
        run_command([*own, "-c", *tmp_path.glob("src/pm_s*.c")], tmp_path)
