"""Storage that another network uses, too, and a chip that does not respond."""

import pytest

from kit.digits import STEP, linear_step
from kit.nor_flash import C
from kit.programs import require_programs, run_command
from kit.rotation import mark_seeds_except
from kit.shared_objects import link_program
from poetmodel.export.exporting import export_step
from poetmodel.lowered.io import load_step

PAGE, EMPTY, OTHER = 2, 8, 16
PLAN = {"ram": "90%", "commit": True, "gap": 0.5}
NETWORKS = {"foo": "digits", "bar": "digits", "lin": "linear", "huge": "digits"}
"""Two copies of one network, one with another layout, and one that takes more storage."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return exported networks by prefix."""
    require_programs("cc")
    made = {}
    for prefix, name in NETWORKS.items():
        made[prefix] = tmp_path_factory.mktemp(prefix)
        step = load_step(STEP) if name == "digits" else linear_step()
        plan = PLAN if name == "digits" else PLAN | {"ram": "150%"}
        export_step(step, made[prefix], prefix=prefix, **plan)
    return made


@pytest.fixture(scope="module")
def chip(folders, tmp_path_factory):
    """Return the output of two networks on one chip, with flags of their build."""
    made = {}

    def say(first, second, words, *flags):
        key = first, second, flags
        if key not in made:
            app = tmp_path_factory.mktemp("chip") / "app"
            names = {"FIRST": first, "SECOND": second}
            names |= {f"{name}_HEADER": f'"{prefix}.h"' for name, prefix in names.items()}
            options = [f"-D{name}={value}" for name, value in names.items()]
            sources = [str(__file__).replace("test_shared_storage.py", "library/one_chip.c")]
            for prefix in (first, second):
                sources += sorted((folders[prefix] / "src").glob("*.c"))
                sources.append(folders[prefix] / "port" / "driver_spi_flash.c")
            includes = [folders[prefix] / "include" for prefix in (first, second)]
            link_program([*C, *options, *flags], sources, includes, app)
            made[key] = app
        lines = run_command([made[key], *words.split()], made[key].parent).splitlines()
        return [line.split(" ", 1)[1] for line in lines]

    return say


TRAINED = "resume1 start1 step1 step1 step1"


@pytest.mark.parametrize("second", [pytest.param("bar", marks=pytest.mark.slow), "lin"])
def test_state_of_another_network_is_neither_resumed_nor_wiped(chip, second):
    """Another network, or a copy of it, at the same place: PM_ERROR_OTHER, without changes."""
    said = chip("foo", second, f"{TRAINED} resume2 start2 step2 resume1")
    assert said[4] == "0 3 changed"
    assert said[5:7] == [f"{OTHER} 0"] * 2
    assert said[7].startswith("17 ")  # a step without state
    assert said[8] == "0 3"


@pytest.mark.parametrize("second", ["bar", "lin"])
def test_start_over_another_network_is_a_call_of_its_own(chip, second):
    """``pm_init`` replaces the state of the other network, which then gets PM_ERROR_OTHER."""
    said = chip("foo", second, f"{TRAINED} start2 init2 step2 resume2 resume1")
    assert said[5:8] == [f"{OTHER} 0", "0 0 changed", "0 1 changed"]
    assert said[8] == "0 1"
    said = chip("foo", second, "start1 resume1 start2 init2 step2 step2 resume1 start1")
    assert said[-2:] == [f"{OTHER} 0"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("second", mark_seeds_except(["bar", "lin"], ["bar"]))
def test_networks_behind_each_other_do_not_meet(chip, second):
    """With a start of its own, the second one trains, and so does the first one, over restarts."""
    start = f"-D{second.upper()}_FLASH_START=0x10000"
    said = chip("foo", second, f"{TRAINED} start2 step2 resume1 step1 resume2 resume1", start)
    assert said[5:] == ["0 0 changed", "0 1 changed", "0 3", "0 4 changed", "0 1", "0 4"]


@pytest.mark.slow
@pytest.mark.parametrize("second", mark_seeds_except(["bar", "lin"], ["lin"]))
def test_regions_that_overlap_are_noticed(chip, second):
    """A generation in any block of the region is found, also where no record of ours would be."""
    for start in range(4096, 8192, 4096):
        flag = f"-D{second.upper()}_FLASH_START={start}"
        assert chip("foo", second, f"{TRAINED} start2 resume1", flag)[5:] == [f"{OTHER} 0", "0 3"]
    flag = "-DFOO_FLASH_START=4096"
    assert chip("foo", "huge", f"{TRAINED} start2", flag, "-DHUGE_GENERATIONS=8")[5] == f"{OTHER} 0"


SAME = ("-DFOO_INSTANCE_ID=7u", "-DBAR_INSTANCE_ID=7u")
BUILDS = {
    "unit": ("-DBAR_STORAGE_UNIT=8u",),
    "block": ("-DBAR_STORAGE_BLOCK=8192u",),
    "start": ("-DFOO_STORAGE_BLOCK=8192u", "-DFOO_FLASH_START=8192", "-DBAR_FLASH_START=4096"),
}
"""What differs in another build of the same instance."""


@pytest.mark.slow
@pytest.mark.parametrize("build", mark_seeds_except(BUILDS, {"unit"}))
def test_own_state_elsewhere_is_no_empty_storage(chip, build):
    """In a build with other units or blocks, or a start where no generation of its own begins."""
    said = chip("foo", "bar", f"{TRAINED} start2 resume1", *SAME, *BUILDS[build])
    assert said[5:] == [f"{OTHER} 0", "0 3"]


@pytest.mark.slow
def test_builds_with_fewer_generations_resume_no_older_state(chip):
    """The newest state lies where they do not look: an error, and it stays; more resume it."""
    flags = (*SAME, "-DFOO_GENERATIONS=4u", "-DBAR_GENERATIONS=2u")
    said = chip("foo", "bar", f"{TRAINED} resume2 start2 resume1", *flags)
    assert said[5:] == [f"{OTHER} 0", f"{OTHER} 0", "0 3"]
    said = chip("foo", "bar", "start2 step2 step2 step2 resume1 step1 step1", *flags)
    assert said[4:] == ["0 3", "0 4 changed", "0 5 changed"]


@pytest.mark.slow
def test_own_state_is_found_where_a_generation_begins(chip):
    """The same instance in another program, and behind a start that is another place of its own."""
    assert chip("foo", "bar", f"{TRAINED} resume2", *SAME)[5] == "0 3"
    flags = ("-DFOO_FLASH_START=4096", "-DFOO_GENERATIONS=2u", "-DBAR_GENERATIONS=3u")
    assert chip("foo", "bar", "start1 resume2", *SAME, *flags)[1] == "0 0"


def test_generations_in_one_block_of_sectors(chip):
    """All sectors of a block are erased for its first generation, also those that gaps begin."""
    flags = ("-DFOO_STORAGE_BLOCK=20480u", "-DFOO_GENERATIONS=12u")
    said = chip("foo", "bar", f"start1 {'step1 step1 step1 resume1 ' * 14}", *flags)
    assert said[4::4] == [f"0 {3 * k}" for k in range(1, 15)]


def test_chip_without_room_is_refused(chip):
    """The size in the identification of the chip is the limit: no access is beyond it."""
    said = chip("foo", "bar", "start1 resume2 start2 init2", "-DBAR_FLASH_START=0x100000")
    assert said == ["0 0 changed", *[f"{PAGE} 0"] * 3]


@pytest.mark.parametrize("value", [0x00, 0xFF])
def test_bus_that_reads_nothing_changes_nothing(chip, value):
    """At the start, or from any transfer on: an error, and the training is there afterwards."""
    said = chip("foo", "bar", f"{TRAINED} stuck:{value} start1 init1 stuck:-1 resume1")
    assert said[5:] == [f"{PAGE} 3", f"{PAGE} 3", "0 3"]
    for first in range(1, 40, 3):
        said = chip("foo", "bar", f"{TRAINED} stuck:{value}:{first}:9999 resume1 stuck:-1 resume1")
        assert said[5].split()[0] in {str(PAGE), "0"}
        assert not said[5].endswith("changed")
        assert said[6] == "0 3"
