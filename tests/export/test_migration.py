"""Migration: state of an earlier export is taken over by name, all or nothing under power cuts."""

import json

import pytest

from kit.digits import STEP, freeze_front
from kit.nor_flash import C
from kit.programs import require_programs, run_command
from kit.rotation import mark_seeds_except, parametrize_parts
from poetmodel.errors import InputError
from poetmodel.export.exporting import export_step
from poetmodel.lowered.io import load_step

CUTS = 900
PARTS = 8
WAYS = {
    "to fewer": ({"ram": "150%"}, {"ram": "150%"}, 4096, 4),
    "to more": ({"ram": "150%"}, {"ram": "150%"}, 1024, 8),
    "to tiles": ({"ram": "150%"}, {"ram": "150%", "tile": 200}, 1024, 16),
    "from storage": ({"ram": "90%"}, {"ram": "110%"}, 4096, 32),
    "in place": (
        {"ram": "95%", "device": "nano33ble"},
        {"ram": "95%", "device": "nano33ble"},
        4096,
        4,
    ),
}
"""Options of both folders, the erase block and the write unit [B]."""
FEWER = {"to fewer", "from storage"}
"""Ways to a step that trains fewer tensors; the others go to one that trains more."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Return what runs migrations on flash with power cuts, by the name of a way."""
    require_programs("cc")
    made = {}

    def run(way, *words):
        if way not in made:
            base = tmp_path_factory.mktemp("migration")
            before, after, block, unit = WAYS[way]
            steps = [load_step(STEP), freeze_front(load_step(STEP))]
            old, new = steps if way in FEWER else steps[::-1]
            given = {"commit": True, "gap": 0.5}
            export_step(old, base / "old", prefix="old", **before, **given)
            export_step(
                new, base / "new", prefix="new", migrate_from=base / "old", **after, **given
            )
            names = [
                [
                    state["name"]
                    for state in json.loads((base / f / "manifest.json").read_text())["states"]
                ]
                for f in ("new", "old")
            ]
            taken = json.loads((base / "new" / "manifest.json").read_text())["migrates"]["taken"]
            pairs = ",".join(f"{{{names[0].index(n)},{names[1].index(n)}}}" for n in taken)
            (base / "drivers").mkdir()
            for name in ("old", "new"):
                text = f'#include "{name}.h"\n#define {name.upper()}_FLASH_DRIVER\n'
                text += f'#include "{base / name}/port/{name}_pages.h"\n'
                (base / "drivers" / f"{name}.c").write_text(text)
            sizes = {}
            for name in ("OLD", "NEW"):
                sizes |= {f"{name}_STORAGE_UNIT": unit, f"{name}_STORAGE_BLOCK": block}
                sizes |= {f"{name}_GENERATIONS": 2}
            sizes |= {"NEW_OLD_COMMIT_UNIT": unit, "NEW_OLD_COMMIT_BLOCK": block, "OPERATION": 64}
            sizes |= {"NEW_OLD_SHARED": 1}
            flags = [f"-D{macro}={size}u" for macro, size in sizes.items()]
            includes = [f"-I{base / name / 'include'}" for name in ("old", "new")]
            files = [p for f in ("old/src", "new/src", "drivers") for p in (base / f).glob("*.c")]
            main = str(__file__).replace("test_migration.py", "library/migrate.c")
            run_command(
                [
                    *C,
                    *flags,
                    f"-DPAIRS={pairs}",
                    *includes,
                    *files,
                    main,
                    "-lm",
                    "-o",
                    base / "app",
                ],
                base,
            )
            made[way] = base / "app"
        return run_command([made[way], *words], made[way].parent)

    return run


@pytest.mark.parametrize("way", mark_seeds_except(WAYS, {"to tiles"}))
@parametrize_parts(PARTS)
def test_a_cut_leaves_the_old_state_or_the_new_one(programs, way, part):
    """Tensors of equal names have the old values, others first ones, and steps go on."""
    count = part.divide(CUTS // len(WAYS)) + 1
    assert programs(way, str(part.number * count), str(count)) == f"{count} trials\n"


def test_folder_states_what_is_taken_over(tmp_path):
    """By names; a folder without commits, or with nothing in common, is refused in a sentence."""
    step, given = load_step(STEP), {"ram": "150%", "gap": 0.5}
    export_step(step, tmp_path / "old", commit=True, **given)
    export_step(step, tmp_path / "plain", **given)
    frozen = freeze_front(step)
    options = {"migrate_from": tmp_path / "old", **given}
    export_step(frozen, tmp_path / "new", commit=True, **options)
    document = json.loads((tmp_path / "new" / "manifest.json").read_text(encoding="utf-8"))
    assert document["migrates"]["taken"] == ["3.weight", "3.bias", "7.weight", "7.bias"]
    assert document["migrates"]["left"] == ["0.weight", "0.bias"]
    assert document["migrates"]["anew"] == []
    assert "pm_migrate(void)" in (tmp_path / "new" / "include" / "pm.h").read_text()
    for folder, words in (("plain", "no commits"), ("nowhere", "no such file")):
        with pytest.raises(InputError, match=f"(?i){words}"):
            export_step(
                frozen, tmp_path / "x", commit=True, **options | {"migrate_from": tmp_path / folder}
            )
    with pytest.raises(InputError, match="expected commits to the storage"):
        export_step(frozen, tmp_path / "x", **options)
