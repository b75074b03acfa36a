"""Migration: state of an earlier export is copied by name, atomically under power cuts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kit.digits import STEP, add_evaluation, freeze_front
from kit.nor_flash import C
from kit.programs import require_programs, run_command
from kit.rotation import mark_seeds_except, parametrize_parts
from kit.shared_objects import link_program
from poetmodel.device.generation import GenerationLayout
from poetmodel.errors import InputError
from poetmodel.export.exporting import export_step
from poetmodel.export.manifest import describe_samples
from poetmodel.export.migration import match_samples
from poetmodel.export.replay import create_replay
from poetmodel.lowered.io import load_step
from poetmodel.lowered.step import LoweredNode

CUTS = 900
PARTS = 8
IN_PLACE = {"ram": "95%", "device": "nano33ble"}
WAYS = {
    "to fewer": ({"ram": "150%"}, {"ram": "150%"}, 4096, 4),
    "to more": ({"ram": "150%"}, {"ram": "150%"}, 1024, 8),
    "to tiles": ({"ram": "150%"}, {"ram": "150%", "tile": 200}, 1024, 16),
    "moved": ({"ram": "150%"}, {"ram": "150%"}, 2432, 4),
    "from storage": ({"ram": "90%"}, {"ram": "110%"}, 4096, 32),
    "in place": (
        {"ram": "95%", "device": "nano33ble"},
        {"ram": "95%", "device": "nano33ble"},
        4096,
        4,
    ),
}
"""Options of both folders, the erase block and the write unit [B]; the old generation of
``moved`` is in all blocks of the new step, and moves behind them."""
FEWER = {"to fewer", "moved", "from storage"}
"""Ways to a step that trains fewer tensors; the others go to one that trains more."""


def build(base, program, macros):
    """Build a program with the steps in the folders ``old`` and ``new``; return its path."""
    (base / "drivers").mkdir()
    for name in ("old", "new"):
        text = f'#include "{name}.h"\n#define {name.upper()}_FLASH_DRIVER\n'
        text += f'#include "{base / name}/port/{name}_pages.h"\n'
        (base / "drivers" / f"{name}.c").write_text(text)
    flags = [f"-D{macro}={value}" for macro, value in macros.items()]
    includes = [base / name / "include" for name in ("old", "new")]
    files = [p for f in ("old/src", "new/src", "drivers") for p in (base / f).glob("*.c")]
    main = Path(__file__).with_name("library") / program
    return link_program([*C, *flags], [*files, main], includes, base / "app")


def flash_macros(unit, block):
    """Return the parameters of flash, of both steps."""
    sizes = {"NEW_OLD_COMMIT_UNIT": unit, "NEW_OLD_COMMIT_BLOCK": block, "OPERATION": 64}
    for name in ("OLD", "NEW"):
        sizes |= {f"{name}_STORAGE_UNIT": unit, f"{name}_STORAGE_BLOCK": block}
    return {macro: f"{size}u" for macro, size in sizes.items()}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Return programs that run migrations on flash with power cuts, by name."""
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
            macros = {"OLD_GENERATIONS": "2u", "NEW_GENERATIONS": "2u", "PAIRS": pairs}
            made[way] = build(base, "migrate.c", flash_macros(unit, block) | macros)
        return run_command([made[way], *words], made[way].parent)

    return run


@pytest.mark.parametrize("way", mark_seeds_except(WAYS, {"to tiles"}, {"moved"}))
@parametrize_parts(PARTS)
def test_a_cut_leaves_the_old_state_or_the_new_one(programs, way, part):
    """Tensors of equal names have the old values, others first ones, and steps go on."""
    count = part.divide(CUTS // len(WAYS)) + 1
    assert programs(way, str(part.number * count), str(count)) == f"{count} trials\n"


SAMPLES = {
    "same places": ({"replay": 4}, {"replay": 4}, (4096, 4), (2, None)),
    "places one further": ({"replay": 4}, {"replay": 5}, (4096, 4), (2, 3)),
    "other places": ({"replay": 4}, {"replay": 4}, (4096, 32), (10, 2)),
    "fewer places": ({"replay": 5}, {"replay": 4}, (4096, 4), (3, 4)),
    "large blocks": ({"replay": 6}, {"replay": 9, "tile": None}, (65536, 16), (10, 12)),
    "small blocks": ({"replay": 4}, {"replay": 4}, (1024, 8), (3, 5)),
    "in place": ({"replay": 4, **IN_PLACE}, {"replay": 4, **IN_PLACE}, (4096, 4), (3, None)),
    "the best": (
        {"replay": 4, "evaluate": True}, {"replay": 4, "evaluate": True}, (4096, 4), (4, 3)
    ),
    "fewer classes": ({"replay": 4}, {"replay": 4}, (4096, 4), (2, 3)),
    "another front": ({"replay": 4}, {"replay": 4}, (4096, 4), (2, 3)),
}  # fmt: skip
"""Options of both folders, erase block and write unit [B], generations of both steps; None: the
number of the other step is the default of this one."""
NOT_TAKEN = {"fewer classes", "another front"}


def changed(step, way):
    """Return a step with weight decay and, for some ways, other classes or another front."""

    def change(call):
        if way == "fewer classes" and call.index_range is not None:
            return replace(call, index_range=(0, 3))
        return call.with_arguments(decay=0.01) if "decay" in call else call

    operations = (LoweredNode(node, tuple(map(change, calls))) for node, calls in step.operations)
    step = step.with_operations(operations)
    if way == "another front":
        values = {n: x * 2 if n.endswith("0.weight") else x for n, x in step.values.items()}
        step = replace(step, values=values)
    return step


@pytest.fixture(scope="module")
def carriers(tmp_path_factory):
    """Return programs that run updates with stored samples, by name."""
    require_programs("cc")
    made = {}

    def run(way, *words):
        if way not in made:
            base = tmp_path_factory.mktemp("samples")
            before, after, (block, unit), (older, newer) = SAMPLES[way]
            step, given = freeze_front(load_step(STEP)), {"commit": True, "gap": 0.5}
            step = add_evaluation(step) if "evaluate" in before else step
            given |= {} if "device" in before else {"ram": "150%"}
            export_step(step, base / "old", prefix="old", **given, **before)
            after = {"prefix": "new", "migrate_from": base / "old", **given, **after}
            export_step(changed(step, way), base / "new", **after)
            document = json.loads((base / "new" / "manifest.json").read_text(encoding="utf-8"))
            assert document["migrates"]["samples"] == (way not in NOT_TAKEN)
            macros = {"OLD_GENERATIONS": f"{older}u", "NEW_GENERATIONS": f"{newer or older}u"}
            macros |= {"NEW_OLD_GENERATIONS": f"{older}u"} if newer else {}
            macros |= {"TAKES": int(way not in NOT_TAKEN)}
            made[way] = build(base, "carry.c", flash_macros(unit, block) | macros)
        return run_command([made[way], *words], made[way].parent)

    return run


@pytest.mark.parametrize(
    "way", mark_seeds_except(SAMPLES, (), {"places one further", "in place", "fewer classes"})
)
@parametrize_parts(PARTS)
def test_a_cut_leaves_the_old_samples_or_the_new_ones(carriers, way, part):
    """After a cut, all samples are old or all are new, with their state.

    Samples that pm_init deletes stay deleted, also for the other firmware.
    """
    count = part.divide(3 * CUTS // len(SAMPLES)) + 1
    assert carriers(way, str(part.number * count), str(count)) == f"{count} trials\n"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("classes", "is_taken"),
    [((4, 6), True), pytest.param((4, 4), True, marks=pytest.mark.slow), ((6, 4), False)],
)
def test_labels_of_all_samples_are_labels_of_the_new_step(classes, is_taken):
    """As many classes or more, of the same front; an ignored label stays permitted."""
    import torch
    from torch import nn

    from poetmodel.torch.lowering.step import lower

    described = []
    for count in classes:
        torch.manual_seed(0)
        front = nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU()).requires_grad_(requires_grad=False)
        model = nn.Sequential(front, nn.Flatten(), nn.Linear(24, count))
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
        batch = (torch.randn(2, 2, 10), torch.tensor([1, 3]))
        step = lower(model, nn.functional.cross_entropy, batch, optimizer=optimizer)
        described.append(describe_samples(step, create_replay(step, 4, GenerationLayout())))
    earlier, now = described
    assert earlier.identity == now.identity
    assert match_samples(now, earlier) is is_taken
    assert not match_samples(now, earlier.model_copy(update={"identity": "another"}))
    assert not match_samples(None, earlier)
    assert not match_samples(now, None)


def test_state_that_no_step_replaces_is_not_beside_migrated_state(tmp_path):
    """Its first values would be written where the earlier state is, also if it stays in RAM."""
    step, given = load_step(STEP), {"ram": "150%", "gap": 0.5, "commit": True}
    export_step(step, tmp_path / "old", **given)
    operations = (
        operation
        for operation in step.operations
        if "3.weight" not in {tensor.replaces for tensor in operation.node.outputs}
    )
    constant = step.with_operations(operations)
    made = export_step(constant, tmp_path / "alone", **given)
    assert "3.weight" in made.resident_names
    assert "3.weight" in made.slots
    with pytest.raises(InputError, match=r"no step replaces 3\.weight"):
        export_step(constant, tmp_path / "new", migrate_from=tmp_path / "old", **given)


def test_folder_states_what_is_taken_over(tmp_path):
    """The folder lists the names; one without commits, or without common state, is refused."""
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
