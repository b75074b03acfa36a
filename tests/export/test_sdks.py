"""An exported folder in build systems: CMake for two processors, and substitutes for three SDKs.

Neither Zephyr nor ESP-IDF nor Arduino is installed. Their functions that use the folder's files are
defined like theirs, by a few functions of CMake and headers of C++.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest

from kit.digits import digit_batches, exporter
from kit.nor_flash import C
from kit.programs import require_programs, run_command
from kit.shared_objects import compile_objects, link_program
from poetmodel.export.board import Target

SOURCES = Path(__file__).with_name("library")
OPTIONS = {
    "kept": {"ram": "100%", "paging": False},
    "commits": {"ram": "90%", "commit": True},
    "file": {"ram": "90%", "commit": True, "weights": "binary"},
    "kws": {"ram": "100%", "paging": False, "prefix": "kws"},
    "vww": {"ram": "90%", "commit": True, "prefix": "vww"},
}
OPTIONS["stored"] = OPTIONS["commits"] | {"evaluate": True, "replay": 4}
BATCHES = 3


SHARING = ("kws", "vww")
"""Folders whose kernels are in a third one."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return exported folders by name."""
    require_programs(Target.HOST)
    shared = {"shared_kernels": tmp_path_factory.getbasetemp() / "kernels"}
    plans = {name: OPTIONS[name] | (shared if name in SHARING else {}) for name in OPTIONS}
    return exporter(tmp_path_factory, plans)


def built(project, folder, **settings):
    """Build one of the projects by CMake, and return the program."""
    require_programs("cmake", "cc")
    words = [f"-D{name}={value}" for name, value in {"SOURCES": SOURCES, **settings}.items()]
    run_command(["cmake", "-S", SOURCES / "cmake" / project, "-B", folder, *words], folder)
    run_command(["cmake", "--build", folder, "--parallel", "2"], folder)
    return folder / "app"


def trained(program, folder):
    """Run a program over three batches of digits; return its losses and its output about state."""
    (folder / "inputs.bin").write_bytes(digit_batches(BATCHES, seed=3))
    return [float(word) for word in run_command([program, "inputs.bin"], folder).split()]


@pytest.fixture(scope="module")
def expected(folders, tmp_path_factory):
    """Return losses and state of the plan that keeps everything in RAM."""
    folder, work = folders("kept"), tmp_path_factory.mktemp("expected")
    parts = [*sorted((folder / "src").glob("*.c")), SOURCES / "caller.c"]
    return trained(link_program(C, parts, [folder / "include"], work / "app"), work)


@pytest.mark.slow
def test_cmake_builds_an_application_with_two_networks(folders, expected, tmp_path):
    """One by FetchContent, one by add_subdirectory after its driver is set; kernels are shared."""
    kws, vww = folders("kws"), folders("vww")
    said = trained(built("two", tmp_path, KWS=kws, VWW=vww), tmp_path)
    assert said[:-1:2] == said[1:-1:2] == expected[:BATCHES]


def application(readme):
    """Return the ten lines of a README's application, with the functions that they call."""
    block = re.search(r"## Your application\n\n```c\n(.*?)```", readme, re.DOTALL)
    assert block is not None
    head, begin = block[1].split("int error", 1)
    own = "static float x0[576], weights[288];\nstatic int x1[4];\n"
    own += "static int next_batch(void) { static int left = 3; return left-- > 0; }\n"
    return f"{own}{head}int main(void)\n{{\nint error{begin}return error;\n}}\n"


@pytest.mark.parametrize("name", ["commits", pytest.param("file", marks=pytest.mark.seeds)])
@pytest.mark.parametrize("board", [True, pytest.param(False, marks=pytest.mark.seeds)])
def test_cmake_builds_the_application_of_the_readme(folders, tmp_path, name, *, board):
    """For this machine, where it runs, and with the tools for a Cortex-M4, where it links."""
    if board:
        require_programs(Target.M4)
    folder = folders(name)
    text = application((folder / "README.md").read_text(encoding="utf-8"))
    (tmp_path / "application.c").write_text(text, encoding="utf-8")
    tools = SOURCES / "cmake" / "board" / "cortex-m4.cmake"
    settings = {"CMAKE_TOOLCHAIN_FILE": tools} if board else {}
    program = built(
        "board", tmp_path, FOLDER=folder, APPLICATION=tmp_path / "application.c",
        PM_STORAGE="ram", **settings,
    )  # fmt: skip
    if board:
        said = run_command(["arm-none-eabi-nm", program], tmp_path)
        assert " T pm_step" in said
    else:
        run_command([program], tmp_path)


@pytest.mark.parametrize("sdk", ["esp", pytest.param("zephyr", marks=pytest.mark.seeds)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("commits", marks=pytest.mark.seeds),
        pytest.param("file", marks=pytest.mark.slow),
    ],
)
def test_component_and_module_train(folders, expected, tmp_path, sdk, name):
    """With pages in a partition of flash, the files for CMake in the folder suffice."""
    program = built(sdk, tmp_path, FOLDER=folders(name))
    assert trained(program, tmp_path) == expected


@pytest.mark.slow
@pytest.mark.parametrize("sdk", ["esp", "zephyr"])
def test_storage_begins_where_the_build_says(folders, expected, tmp_path, sdk):
    """Storage begins behind the other data of the partition, of which no byte is accessed."""
    start = {"esp": {"PM_FLASH_START": 8192}, "zephyr": {"START": "0x2000"}}[sdk]
    program = built(sdk, tmp_path, FOLDER=folders("commits"), **start)
    assert trained(program, tmp_path) == expected
    partition = (tmp_path / "nor.bin").read_bytes()[65536:]
    assert partition[:8192] == bytes(8192)  # as a new file has it
    assert partition[8192:12288] != bytes(4096)


def test_start_that_no_erase_block_has_is_refused(folders, tmp_path):
    """The build ends with a sentence, also if the chip has no space after it."""
    require_programs("cmake", "make", "cc")
    for start, words in ((100, "begins where an erase block does"), (2**24, "does not fit behind")):
        command = ["cmake", "-S", SOURCES / "cmake" / "board", "-B", tmp_path]
        given = {"FOLDER": folders("commits"), "APPLICATION": SOURCES / "caller.c"}
        given |= {"PM_STORAGE": "spi_flash", "PM_FLASH_START": start}
        run_command([*command, *(f"-D{name}={value}" for name, value in given.items())], tmp_path)
        driver = ["make", "-C", tmp_path / "network", "port/driver_spi_flash.o"]
        built = subprocess.run(driver, capture_output=True, text=True, check=False)
        assert built.returncode != 0
        assert words in built.stderr + built.stdout


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("commits", marks=pytest.mark.seeds),
        pytest.param("stored", marks=pytest.mark.slow),
        pytest.param("kws", marks=pytest.mark.seeds),
    ],
)
def test_sketch_trains(folders, tmp_path, name):
    """The library has ``src`` as its only include path; noise that is always class 0 is learnt."""
    require_programs("cc", "c++")
    folder, arduino = folders(name), SOURCES / "arduino"
    sketch = folder / "examples" / "Train"
    libraries = [folder / "src"]
    if name in SHARING:
        libraries.append(folder.parent / "kernels" / "src")
    parts = [path for library in (*libraries, sketch) for path in library.glob("*.c")]
    objects = compile_objects(["cc", "-Os"], parts, libraries)
    includes = [f"-I{library}" for library in libraries]
    flags = ("-std=c++17", "-Wall", "-Wextra", "-Werror", *includes, f"-I{arduino}")
    as_cpp = ("-include", "Arduino.h", "-x", "c++", sketch / "Train.ino")
    run_command(["c++", *flags, "-c", *as_cpp, "-o", "sketch.o"], tmp_path)
    parts = (*objects, "sketch.o", arduino / "main.cpp", "-lm", "-o", "app")
    run_command(["c++", *flags, *parts], tmp_path)
    losses = [float(line) for line in run_command([tmp_path / "app"], tmp_path).splitlines()]
    assert len(losses) == 30
    assert losses[-1] < losses[0]
    assert (sketch / "storage.c").exists() is (name in {"commits", "stored"})


def test_sdks_read_what_the_folder_says_of_itself(folders):
    """Its names, headers and sizes, each in the format of the SDK."""
    yaml = pytest.importorskip("yaml")
    for prefix in ("kws", "vww"):
        folder = folders(prefix)
        about = json.loads((folder / "library.json").read_text(encoding="utf-8"))
        assert (about["name"], about["headers"]) == (prefix, f"{prefix}.h")
        files = {path.name for path in (folder / "examples" / "Train").iterdir()}
        assert set(about["examples"][0]["files"]) == files
    folder = folders("vww")
    for library in (folder, folder.parent / "kernels"):
        lines = (library / "library.properties").read_text(encoding="utf-8").splitlines()
        properties = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
        assert properties["includes"] == f"{properties['name']}.h"
        mandatory = {"name", "version", "author", "maintainer", "sentence", "paragraph", "url"}
        assert all(properties[key] for key in mandatory)  # of Arduino's specification, rev. 2.2
        assert properties["url"].startswith("https://")
    component = yaml.safe_load((folder / "idf_component.yml").read_text(encoding="utf-8"))
    assert component["license"] == "Apache-2.0"
    module = yaml.safe_load((folder / "zephyr" / "module.yml").read_text(encoding="utf-8"))
    assert module["name"] == "vww"
    assert (folder / module["build"]["kconfig"]).is_file()
    assert (folder / module["build"]["cmake"] / "CMakeLists.txt").is_file()
    kconfig = (folder / module["build"]["kconfig"]).read_text(encoding="utf-8")
    for option in ("FLASH_AREA", "FLASH_START", "HEADER"):
        assert f"config POETMODEL_VWW_{option}\n" in kconfig
        cmake = (folder / "zephyr" / "CMakeLists.txt").read_text(encoding="utf-8")
        assert f"CONFIG_POETMODEL_VWW_{option}" in cmake
    stored = re.search(r"VWW_STORED_BYTES (\d+)u", (folder / "include" / "vww.h").read_text())
    assert stored is not None
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert f"vww_pages, data, undefined, , {int(stored[1]):#x}" in readme
