"""Latent replay: steps on stored samples are those on their batches, and samples outlive cuts."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from kit.digits import STEP, build_and_run, digit_batches, exporter, freeze_front
from kit.nor_flash import C
from kit.programs import require_programs, run_command
from kit.rotation import mark_seeds_except, parametrize_parts
from kit.shared_objects import link_program
from poetmodel.device import Device
from poetmodel.device.generation import GenerationLayout
from poetmodel.errors import BudgetError, InputError
from poetmodel.export.board import Target
from poetmodel.export.exporting import export_step
from poetmodel.export.flash import make_smallest_program
from poetmodel.export.replay import create_replay, find_front, list_cuts
from poetmodel.lowered.io import load_step

SAMPLES = 6
PLANS = {
    "in RAM": {"ram": "150%", "commit": True, "replay": SAMPLES},
    "paged": {"ram": "90%", "recompute": False, "replay": SAMPLES},
    "recomputed": {"ram": "90%", "commit": True, "replay": SAMPLES},
    "in place": {"ram": "90%", "device": "nano33ble", "commit": True, "replay": SAMPLES},
    "dma": {"ram": "90%", "device": "stm32h743", "commit": True, "replay": SAMPLES},
    "tiles": {"ram": "150%", "tile": 1024, "commit": True, "replay": SAMPLES},
    "cut": {"ram": "150%", "commit": True, "replay": SAMPLES, "replay_cut": "0/convolution"},
}
FLASHES = {"alone": (4, 4096, 4096), "shared": (16, 256, 65536), "several blocks": (8, 64, 1024)}
"""Write unit, what an operation programs, erase block [B]; of which samples take a part or more."""
CUTS = 900
PARTS = 8


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Return programs that run an application on flash of a kind, by the name of its plan."""
    require_programs("cc")
    folders, made = exporter(tmp_path_factory, PLANS), {}

    def run(plan, flash, *words, flags=()):
        key = plan, flash, flags
        if key not in made:
            unit, operation, block = FLASHES[flash]
            folder, app = folders(plan), tmp_path_factory.mktemp("flash") / "app"
            sizes = {"PM_STORAGE_UNIT": unit, "PM_STORAGE_BLOCK": block, "OPERATION": operation}
            own = [f"-D{macro}={size}u" for macro, size in sizes.items()]
            main = str(__file__).replace("test_replay.py", "library/replay.c")
            sources = [p for p in folder.glob("src/*.c") if p.name != "pm_replay.c"]
            includes = (folder / "include", folder)
            made[key] = link_program([*C, *own, *flags], [*sources, main], includes, app)
        return run_command([made[key], *words], made[key].parent)

    return run


@pytest.mark.parametrize(
    ("plan", "flags"),
    mark_seeds_except(
        [*((plan, ()) for plan in PLANS), ("recomputed", ("-DPM_REAL=double",))],
        {("paged", ()), ("in place", ()), ("cut", ())},
    ),
)
def test_steps_on_samples_have_the_bits_of_steps_on_batches(programs, plan, flags):
    """Losses and state are bitwise equal, whole and in slices; a refused sample has no effect."""
    assert programs(plan, "shared", "bits", flags=flags) == "equal\n"


@pytest.mark.parametrize(
    ("plan", "flash"),
    mark_seeds_except([("in RAM", flash) for flash in FLASHES], {("in RAM", "several blocks")}),
)
@parametrize_parts(PARTS)
def test_no_cut_mixes_samples(programs, plan, flash, part):
    """A restart finds the earlier samples or those with one more, and continues from there."""
    count = part.divide(CUTS // len(FLASHES)) + 1
    said = programs(plan, flash, "cuts", str(part.number * count), str(count))
    assert said == f"{count} trials\n"


@pytest.mark.parametrize(
    ("plan", "flash"),
    mark_seeds_except(
        [*(("in RAM", flash) for flash in FLASHES), ("in place", "shared"), ("paged", "alone")],
        {("in RAM", "shared"), ("in place", "shared")},
    ),
)
def test_draws_pass_over_damaged_samples(programs, plan, flash):
    """They are drawn as often as others; a damaged one can be dropped, for good."""
    assert programs(plan, flash, "damage") == "passed over\n"


def test_all_samples_are_equally_likely(programs):
    """Of 18 offered six are there, each in a third of the seeds; draws are even."""
    said = programs("in RAM", "shared", "chance").splitlines()
    kept, drawn = (np.array(line.split(), float) for line in said)
    assert kept.sum() == 4000 * SAMPLES
    spread = np.sqrt(4000 / 3 * 2 / 3)
    assert np.abs(kept - 4000 / 3).max() < 5 * spread
    assert np.abs(drawn - 4000 / SAMPLES).max() < 5 * np.sqrt(4000 / SAMPLES)


def test_front_is_cut_where_a_sample_is_the_smallest():
    """Behind the pool, whose results are a quarter of the convolution's; labels are kept too."""
    step = freeze_front(load_step(STEP))
    front = find_front(step)
    assert front is not None
    assert front.outputs == ("2/max_pool2d_with_indices:0",)
    assert [step.inputs[k].name for k in front.inputs] == ["inputs[1]"]
    names = {step.graph.nodes[k].name for k in front.nodes}
    assert names == {"0/convolution", "1/relu", "2/max_pool2d_with_indices"}
    assert find_front(load_step(STEP)) is None


def test_another_cut_is_chosen_by_name(tmp_path):
    """Its samples are others, and the step is the same; what each cut costs and saves is stated."""
    step, documents = freeze_front(load_step(STEP)), []
    for name, cut in (("smallest", None), ("stated", "0/convolution")):
        options = {**PLANS["in RAM"], "replay_cut": cut}
        made = export_step(step, tmp_path / name, gap=0.5, **options)
        documents.append(json.loads((tmp_path / name / "manifest.json").read_text()))
    first, second = (document["replay"] for document in documents)
    assert second["holds"] == ["0/convolution", "inputs[1]"]
    assert {step.graph.nodes[k].name for k in made.replay.front.nodes} == {"0/convolution"}
    assert first["sample_id"] != second["sample_id"]
    for key in ("step_id", "layout_id"):
        assert documents[0]["generation"][key] == documents[1]["generation"][key]
    assert first["cuts"] == [
        {
            "node": "2/max_pool2d_with_indices",
            "is_chosen": True,
            "instructions": first["stored_step"]["instructions"],
            **{key: first[key] for key in ("sample_bytes", "stored_bytes")},
        }
    ]
    (chosen,) = (cut for cut in second["cuts"] if cut["is_chosen"])
    assert (chosen["node"], chosen["sample_bytes"]) == ("0/convolution", second["sample_bytes"])
    assert chosen["instructions"] == second["stored_step"]["instructions"]
    assert first["cuts"][0] | {"is_chosen": False} in second["cuts"]


def test_cuts_that_cost_more_and_save_more_are_listed():
    """If the smallest sample saves next to nothing, the next cuts are larger, and save more."""
    step = freeze_front(load_step(STEP))
    plan = make_smallest_program(step).plan
    nodes = tuple(
        replace(node, instructions=1) if node.name == "2/max_pool2d_with_indices" else node
        for node in step.graph.nodes
    )
    whole = create_replay(step, 4, GenerationLayout())
    small = replace(whole, front=find_front(step, "0/convolution"))
    assert [cut.node for cut in list_cuts(whole, step, plan)] == ["2/max_pool2d_with_indices"]
    cuts = list_cuts(small, replace(step, graph=replace(step.graph, nodes=nodes)), plan)
    assert [cut.is_chosen for cut in cuts] == [False, True]
    assert cuts[0].sample_bytes < cuts[1].sample_bytes
    assert cuts[0].instructions < cuts[1].instructions


def test_chosen_cut_is_listed_beside_one_that_costs_and_saves_as_much():
    """Where the next node takes no instruction and its result has the same size."""
    step = freeze_front(load_step(STEP))
    plan = make_smallest_program(step).plan
    nodes = tuple(
        replace(node, instructions=0) if node.name == "1/relu" else node
        for node in step.graph.nodes
    )
    step = replace(step, graph=replace(step.graph, nodes=nodes))
    replay = create_replay(step, 4, GenerationLayout())
    for name in ("0/convolution", "1/relu"):
        cuts = list_cuts(replace(replay, front=find_front(step, name)), step, plan)
        assert [cut.node for cut in cuts if cut.is_chosen] == [name]


def test_cuts_that_do_not_exist_are_refused(tmp_path):
    """The names of frozen nodes are listed; without samples there is nothing to cut."""
    step, options = freeze_front(load_step(STEP)), {**PLANS["in RAM"], "replay_cut": "0/conv"}
    words = "expected one of 0/convolution, 1/relu, 2/max.*did you mean 0/convolution"
    with pytest.raises(InputError, match=words):
        export_step(step, tmp_path / "x", **options)
    with pytest.raises(InputError, match="replay_cut: cuts stored samples, and there are none"):
        export_step(step, tmp_path / "x", **options | {"replay": 0})
    assert not (tmp_path / "x").exists()


def test_a_cut_of_tiles_is_behind_their_last_piece():
    """The name is that of the whole node; one piece can be named, too."""
    step = freeze_front(load_step(STEP))
    pieces = {"0/convolution": "0/convolution[0:2]", "1/relu": "0/convolution[2:4]"}
    nodes = tuple(replace(node, name=pieces.get(node.name, node.name)) for node in step.graph.nodes)
    step = replace(step, graph=replace(step.graph, nodes=nodes))
    assert find_front(step, "0/convolution") == find_front(step, "0/convolution[2:4]")
    assert len(find_front(step, "0/convolution").nodes) == 2


@pytest.mark.torch
def test_missing_front_is_explained_by_tensors_of_no_input():
    """A frozen layer behind positions has no front; with the positions in a buffer it has one."""
    torch = pytest.importorskip("torch")
    from poetmodel.torch.lowering.step import lower

    class Positions(torch.nn.Module):
        def __init__(self, is_stored):
            super().__init__()
            self.first = torch.nn.Linear(8, 8).requires_grad_(False)
            self.last = torch.nn.Linear(8, 4)
            self.register_buffer("positions", torch.arange(8) if is_stored else None)

        def forward(self, x):
            positions = torch.arange(8) if self.positions is None else self.positions
            return self.last(torch.relu(self.first(x + positions)))

    def make_step(is_stored):
        model = Positions(is_stored)
        optimizer = torch.optim.SGD(model.last.parameters(), lr=0.1)
        batch = (torch.randn(4, 8), torch.randint(0, 4, (4,)))
        return lower(model, torch.nn.functional.cross_entropy, batch, optimizer=optimizer)

    layout = GenerationLayout()
    with pytest.raises(InputError, match=r"computed from no input.* in a buffer"):
        create_replay(make_step(is_stored=False), 4, layout)
    assert create_replay(make_step(is_stored=True), 4, layout).front.nodes


def test_manifest_states_both_ways(tmp_path):
    """Manifest and header state RAM, instructions and storage of both kinds of steps."""
    made = export_step(freeze_front(load_step(STEP)), tmp_path, gap=0.5, **PLANS["in RAM"])
    document = json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))
    found = document["replay"]
    assert found["sample_bytes"] == 2304 + 16 + 4
    assert found["stored_bytes"] == made.replay_bytes == SAMPLES * 4096 + 4096
    for key in ("ram_bytes", "instructions", "nodes"):
        assert found["stored_step"][key] < found["step"][key]
    assert found["step"]["ram_bytes"] + document["ram"]["free"] == document["budget"]["ram_bytes"]
    header = (tmp_path / "include" / "pm.h").read_text(encoding="utf-8")
    assert int(re.findall(r"STORED_BYTES (\d+)u", header)[0]) == made.stored_bytes
    assert found["sample_id"] in header


@pytest.mark.slow
@pytest.mark.parametrize("target", [Target.HOST_DOUBLE, Target.M4, Target.M3, Target.M7])
def test_boards_train_on_stored_samples(tmp_path, target):
    """By the program of a folder: the same losses and state, for fewer instructions."""
    require_programs(target)
    export_step(freeze_front(load_step(STEP)), tmp_path, gap=0.5, **PLANS["paged"])
    batches = digit_batches(SAMPLES, seed=2)
    if target is Target.HOST_DOUBLE:
        size = len(batches) // SAMPLES
        rows = (batches[k : k + size] for k in range(0, len(batches), size))
        batches = b"".join(
            np.frombuffer(r[:-16], "<f4").astype("<f8").tobytes() + r[-16:] for r in rows
        )
    given = {"target": target, "inputs": batches, "steps": SAMPLES, "settings": ("POISON=1",)}
    whole, stored = (
        build_and_run(tmp_path, **given),
        build_and_run(tmp_path, words=("stored",), **given),
    )
    assert stored.losses == whole.losses
    assert stored.state == whole.state
    if target.is_board:
        front = whole.metrics["step_instructions"] - stored.metrics["step_instructions"]
        said = json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))["replay"]
        expected = said["step"]["instructions"] - said["stored_step"]["instructions"]
        assert target is Target.M3 or front == pytest.approx(expected, rel=0.2)


def test_steps_without_a_front_or_storage_are_refused(tmp_path):
    """One sentence each, and no folder."""
    step, folder = freeze_front(load_step(STEP)), tmp_path / "folder"
    with pytest.raises(InputError, match="has no frozen front"):
        export_step(load_step(STEP), folder, replay=4)
    with pytest.raises(InputError, match="has no optimizer"):
        export_step(replace(step, learning_rate=None), folder, replay=4)
    for samples in (-1, 70_000, 1.5):
        with pytest.raises(InputError, match="replay: expected a number of samples"):
            export_step(step, folder, replay=samples)
    with pytest.raises(InputError, match="is volatile"):
        export_step(step, folder, replay=4, device="rp2350-psram")
    board = replace(Device.load("nrf52840"), storage=None)
    with pytest.raises(InputError, match="no storage for samples"):
        export_step(step, folder, replay=4, device=board)
    board = Device.load("rp2350-psram")
    board = replace(board, flash=replace(board.flash, storage_bytes=16384))
    with pytest.raises(BudgetError, match=r"generations of state and samples .* fewer samples"):
        export_step(step, folder, replay=4000, device=board, commit=True)
    assert not folder.exists()
