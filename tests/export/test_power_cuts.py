"""Power cuts in every operation of flash, whatever it programs at a time."""

import pytest

from kit.digits import exporter
from kit.nor_flash import build_power_cuts
from kit.programs import require_programs, run_command
from kit.rotation import mark_seeds_except, parametrize_parts

CUTS = 30_000
"""All that are tried, with every seed."""
PARTS = 32
FLASHES = {
    "4 B": (4, 4, 1024, 2, "storage"),
    "8 B": (8, 8, 1024, 3, "storage"),
    "16 B": (16, 16, 16384, 8, "storage"),
    "32 B": (32, 32, 1024, 2, "RAM"),
    "64 B": (64, 64, 16384, 12, "RAM"),
    "256 B": (256, 256, 4096, 2, "storage"),
    "any byte of a page": (1, 256, 32768, 17, "storage"),
    "words of a page": (4, 64, 4096, 2, "RAM"),
    "read in place": (4, 4, 16384, 8, "in place"),
    "the best": (8, 8, 1024, 2, "best storage"),
    "the best, shared": (16, 16, 16384, 8, "best RAM"),
    "the best, in place": (4, 64, 4096, 3, "best in place"),
}
"""Write unit, what an operation programs, erase block [B]; generations, of which large blocks have
several; where state lives."""
PLANS = {
    "storage": {"ram": "90%", "commit": True},
    "RAM": {"ram": "150%", "commit": True},
    "in place": {"ram": "90%", "device": "nano33ble", "commit": True},
}
PLANS |= {f"best {name}": plan | {"evaluate": True} for name, plan in [*PLANS.items()]}


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    """Return a function that runs trials on flash of a kind from a number on, with their output."""
    require_programs("cc")
    folders, made = exporter(tmp_path_factory, PLANS), {}

    def run(name, first, count):
        if name not in made:
            *flash, home = FLASHES[name]
            app = tmp_path_factory.mktemp("flash") / "app"
            made[name] = build_power_cuts(folders(home), app, *flash)
        return run_command([made[name], str(first), str(count)], made[name].parent)

    return run


@pytest.mark.parametrize(
    "flash",
    mark_seeds_except(FLASHES, {"any byte of a page", "read in place"}, {"8 B", "the best"}),
)
@parametrize_parts(PARTS)
def test_no_cut_loses_or_invents_anything(trials, flash, part):
    """A restart finds the last whole generation, or none before the first one.

    No cut leaves a permanently wrong checksum, or reports damage that does not exist.
    """
    count = part.divide(CUTS // len(FLASHES)) + 1
    assert trials(flash, part.number * count, count) == f"{count} trials\n"
