"""An exported folder as a library: what an application compiles, links and calls."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest

from kit.toy_export import needs
from poetmodel.errors import InputError
from poetmodel.export.board import Target, build, run
from poetmodel.export.exporting import export_step
from poetmodel.export.io import load_step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STEP: Final = Path(__file__).parents[2] / "docs" / "digits.step.json"
WARNINGS: Final = ("-Wall", "-Wextra", "-Wpedantic", "-Wmissing-prototypes", "-Werror")
C: Final = ("cc", "-std=c11", "-O1", "-ffp-contract=off", "-fno-math-errno")
RATE: Final = 0.1
STEPS: Final = 3

APPLICATION: Final = """
#include "kws.h"
#include "vww.h"

#include <cstdio>

static float image[576];
static int32_t label[4];
static float weight[288];

static_assert(KWS_INPUTS == 2 && VWW_STATES == 6, "both headers are there");

template <typename Step> static int train(std::FILE *file, Step step)
{
    const void *const inputs[KWS_INPUTS] = {image, label};
    float loss = 0;
    if (std::fread(image, sizeof image, 1, file) != 1) return 100;
    if (std::fread(label, sizeof label, 1, file) != 1) return 100;
    const int error = step(inputs, 0.1f, &loss);
    if (!error) std::printf("%.9g\\n", static_cast<double>(loss));
    return error;
}

int main(int, char **words)
{
    std::FILE *const file = std::fopen(words[1], "rb");
    int error = kws_init();
    if (!error) error = vww_init();
    for (int k = 0; k < 3 && !error; k++) {
        const long before = std::ftell(file);
        error = train(file, kws_step);
        std::fseek(file, before, SEEK_SET);
        if (!error) error = train(file, vww_step);
    }
    if (!error) error = vww_read_state(VWW_STATE_3_WEIGHT, weight);
    std::printf("%.9g\\n", static_cast<double>(weight[0]));
    return error;
}
"""


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
    }
    made: dict[str, Path] = {}

    def folder(prefix: str) -> Path:
        if prefix not in made:
            made[prefix] = tmp_path_factory.mktemp(prefix)
            export_step(step, made[prefix], prefix=prefix, gap=0.5, **options[prefix])
        return made[prefix]

    return folder


def batches() -> bytes:
    """Return three batches of digits."""
    random = np.random.default_rng(3)
    return b"".join(
        random.normal(size=576).astype("<f4").tobytes()
        + random.integers(0, 4, 4).astype("<i4").tobytes()
        for _ in range(STEPS)
    )


@pytest.mark.parametrize("prefix", ["pm", "kws", "vww"])
@pytest.mark.parametrize("flags", [(), ("-flto",), ("-DPM_REAL=double",)], ids=" ".join)
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
    if shutil.which("c++") is None:
        pytest.skip("no c++ on PATH")
    (tmp_path / "app.cpp").write_text(APPLICATION, encoding="utf-8")
    (tmp_path / "inputs.bin").write_bytes(batches())
    kws, vww = folders("kws"), folders("vww")
    includes = (f"-I{kws / 'include'}", f"-I{vww / 'include'}")
    parts = [*sources(kws), *sources(vww), vww / "port" / "driver_ram.c"]
    compiled([*C, *includes, "-c", *parts], tmp_path)
    strict = [word for word in WARNINGS if word != "-Wmissing-prototypes"]
    compiled(["c++", "-std=c++17", *strict, *includes, "-c", "app.cpp"], tmp_path)
    objects = sorted(tmp_path.glob("*.o"))
    compiled(["c++", *objects, "-lm", "-o", "app"], tmp_path)
    said = subprocess.run(
        ["./app", "inputs.bin"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.split()
    alone = {}
    for folder in (kws, vww):
        program = build(folder, Target.HOST)
        alone[folder] = run(
            program, Target.HOST, folder, inputs=batches(), steps=STEPS, learning_rate=RATE
        ).require_success()
    losses = [float(word) for word in said[:-1]]
    assert losses[::2] == list(alone[kws].losses.values())
    assert losses[1::2] == list(alone[vww].losses.values())
    first = (36 + 4) * 4
    assert np.float32(said[-1]) == np.frombuffer(alone[vww].state[first : first + 4], "<f4")[0]


def test_names_of_a_prefix_are_all_of_its_names(folders: Callable[[str], Path]) -> None:
    """No file and no symbol of another prefix is left, but for the program ``pm_run``."""
    folder = folders("kws")
    for path in (*folder.rglob("*.[ch]"), folder / "Makefile", folder / "README.md"):
        assert "pm_" not in path.read_text(encoding="utf-8").lower().replace("pm_run", ""), path
    assert not [path for path in folder.rglob("pm_*") if "run" not in path.name]
    assert (folder / "include" / "kws.h").is_file()
    assert json.loads((folder / "manifest.json").read_text())["prefix"] == "kws"


@pytest.mark.parametrize("prefix", ["", "Kws", "2kws", "a-b", "a b"])
def test_prefixes_that_are_no_names_are_refused(tmp_path: Path, prefix: str) -> None:
    """One sentence, and no folder."""
    with pytest.raises(InputError, match="prefix: expected small letters"):
        export_step(load_step(STEP), tmp_path / "folder", prefix=prefix)
    assert not (tmp_path / "folder").exists()


def test_weights_in_a_file_are_the_same_program(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """Their path is a definition, of any folder that the compiler runs in."""
    export_step(load_step(STEP), tmp_path, ram="100%", weights="binary", gap=0.5)
    assert (tmp_path / "src" / "pm_weights.bin").is_file()
    runs = [
        run(build(each, Target.HOST), Target.HOST, each, inputs=batches(), steps=2,
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
        run(build(folder, Target.M4, settings=settings), Target.M4, folder, inputs=batches(),
            steps=2, learning_rate=RATE).require_success()
        for settings in ((), ("EXTRA=-flto",))
    ]  # fmt: skip
    assert runs[0].state == runs[1].state
