"""Power cuts in every operation of flash, whatever it programs at a time."""

import pytest

from kit.digits import exporter
from kit.nor_flash import C
from kit.programs import done, needs
from kit.rotation import parts

CUTS = 30_000
"""All that are tried, with every seed."""
PARTS = 25
FLASHES = {
    "4 B": (4, 4, "storage"),
    "8 B": (8, 8, "storage"),
    "16 B": (16, 16, "RAM"),
    "32 B": (32, 32, "storage"),
    "64 B": (64, 64, "RAM"),
    "256 B": (256, 256, "storage"),
    "any byte of a page": (1, 256, "storage"),
    "words of a page": (4, 64, "RAM"),
}
"""Write unit and what an operation programs [B], and where state lives."""
PLANS = {"storage": {"ram": "90%", "commit": True}, "RAM": {"ram": "150%", "commit": True}}


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    """Return what runs trials on flash of a kind, from a number on, and returns what they say."""
    needs("cc")
    folders, made = exporter(tmp_path_factory, PLANS), {}

    def run(name, first, count):
        if name not in made:
            unit, operation, home = FLASHES[name]
            folder, app = folders(home), tmp_path_factory.mktemp("flash") / "app"
            sizes = {"PM_STORAGE_UNIT": unit, "PM_STORAGE_BLOCK": 1024, "OPERATION": operation}
            flags = [f"-D{macro}={size}u" for macro, size in sizes.items()]
            includes = (f"-I{folder / 'include'}", f"-I{folder}")
            main = str(__file__).replace("test_power_cuts.py", "library/cuts.c")
            sources = [*sorted((folder / "src").glob("*.c")), main]
            done([*C, *flags, *includes, *sources, "-lm", "-o", app], folder)
            made[name] = app
        return done([made[name], str(first), str(count)], made[name].parent)

    return run


@pytest.mark.parametrize("flash", FLASHES)
@parts(PARTS)
def test_no_cut_loses_or_invents_anything(trials, flash, part):
    """A restart finds the last whole generation, or none before the first one, and says no more.

    No cut leaves a checksum that is wrong for ever, or damage that there was not.
    """
    count = part.share(CUTS // len(FLASHES))
    assert trials(flash, part.number * count, count) == f"{count} trials\n"
