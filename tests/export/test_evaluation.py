"""Evaluation on a device: loss and correct classes are those of PyTorch in evaluation mode."""

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from kit.kernel_calls import Memory
from kit.programs import require_programs
from kit.rotation import mark_seeds_except
from kit.shared_objects import build
from kit.traced_models import FunctionModule
from poetmodel.errors import InputError
from poetmodel.export.board import Target, run_program
from poetmodel.export.exporting import export_step
from poetmodel.export.state import load_state_tensors, read_state
from poetmodel.lowered.io import load_step, save_step
from poetmodel.tiling.tiles import tile_step
from poetmodel.torch.lowering.inference import with_evaluation, with_inference
from poetmodel.torch.lowering.step import lower

CLASSES = 4


def convolutional():
    """Return convolutions with batch norm, and dropout: in evaluation mode others."""
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.4), nn.Linear(128, CLASSES),
    )  # fmt: skip


def scoring(loss):
    """Return a model that returns its loss."""
    layer = nn.Linear(6, CLASSES)
    return FunctionModule(lambda parts, x, y: loss(parts[0](x), y), layer)


IMAGES, ROWS = (torch.randn(2, 2, 8, 8), torch.tensor([3, 1])), (torch.randn(3, 6),)
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])
CASES = {
    "classes": (convolutional, functional.cross_entropy, IMAGES),
    "weights of classes": (
        lambda: nn.Linear(6, CLASSES),
        nn.CrossEntropyLoss(weight=WEIGHTS),
        (*ROWS, torch.tensor([2, 0, 3])),
    ),
    "ignored": (
        lambda: nn.Linear(6, CLASSES),
        functional.cross_entropy,
        (*ROWS, torch.tensor([2, -100, 1])),
    ),
    "places": (
        lambda: nn.Conv1d(3, CLASSES, 1),
        functional.cross_entropy,
        (torch.randn(2, 3, 5), torch.randint(CLASSES, (2, 5))),
    ),
    "one sample": (
        lambda: nn.Linear(6, CLASSES),
        functional.cross_entropy,
        (torch.randn(6), torch.tensor(2)),
    ),
    "numbers": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5)),
        nn.MSELoss(),
        (torch.randn(3, 6), torch.randn(3, 5)),
    ),
    "its loss": (lambda: scoring(functional.mse_loss), None, (*ROWS, torch.randn(3, CLASSES))),
}
LATER = {"classes", "one sample"}
"""Cases whose kernels other cases call, too."""


def captured(model, loss, inputs):
    """Return a step with momentum, and its evaluation."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = lower(model, loss, inputs, optimizer=optimizer)
    return with_evaluation(step, model, loss, inputs)


def expected(model, loss, inputs):
    """Return PyTorch's loss in double, and the number of correct samples if there are classes."""
    twin = copy.deepcopy(model).double().eval()
    loss = copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss
    reals = [x.double() if x.is_floating_point() else x for x in inputs]
    with torch.no_grad():
        if loss is None:
            return [twin(*reals).item()]
        *given, target = reals
        output = twin(*given)
        found = [loss(output, target).item()]
        if not target.is_floating_point():
            found.append((output.argmax(1 if output.ndim > 1 else 0) == target).sum().item())
    return found


@pytest.fixture(scope="module")
def imaged():
    """Return a model of convolutions, and its step with an evaluation, which tests only read."""
    torch.manual_seed(0)
    model = convolutional()
    return model, captured(model, functional.cross_entropy, IMAGES)


@pytest.mark.parametrize("name", mark_seeds_except(CASES, {*CASES} - LATER, LATER))
def test_evaluation_computes_what_torch_does(name):
    """Its calls, in order, make the loss of evaluation mode, and count the correct classes."""
    torch.manual_seed(0)
    make, loss, inputs = CASES[name]
    model = make()
    step = captured(model, loss, inputs)
    np.testing.assert_allclose(computed(step, inputs), expected(model, loss, inputs), rtol=1e-12)
    assert [value.name for value in step.evaluation.inputs] == [v.name for v in step.inputs]
    assert all(module.training for module in model.modules())


def computed(step, inputs):
    """Return the results of the calls of an evaluation, in order, in double."""
    part = step.evaluation
    memory = Memory(part.buffers)
    for name in memory.buffers.keys() & (step.values.keys() | part.values.keys()):
        memory[name][...] = {**step.values, **part.values}[name]
    for value, given in zip(part.inputs, inputs, strict=True):
        memory[value.pieces[0].buffer][...] = given.flatten()
    for node, calls in zip(part.graph.nodes, part.calls, strict=True):
        memory.execute(calls, workspace_bytes=node.workspace_bytes)
    return memory[part.output.pieces[0].buffer]


@pytest.mark.slow
def test_evaluation_reads_the_state_of_its_step_in_tiles_too(imaged):
    """It has no weights of its own, and shares constants of evaluation mode with `pm_infer`."""
    model, step = imaged
    step = with_evaluation(
        with_inference(step, model, functional.cross_entropy, IMAGES),
        model, functional.cross_entropy, IMAGES,
    )  # fmt: skip
    assert not step.evaluation.values
    found = computed(tile_step(step, 200), IMAGES)
    np.testing.assert_allclose(found, expected(model, functional.cross_entropy, IMAGES), rtol=1e-12)


PLACES = {
    "ram": ({"ram": "64KiB", "paging": False}, ()),
    "storage": ({"ram": "13KiB", "commit": True}, ()),
    "mapped": ({"ram": "13KiB", "device": "nano33ble", "commit": True}, ("DRIVER=ram",)),
    "tiles": ({"ram": "13KiB", "tile": 200}, ()),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "target"),
    [
        *((place, Target.HOST_DOUBLE) for place in PLACES),
        *mark_seeds_except(
            [("storage", target) for target in (Target.M3, Target.M4, Target.M7)],
            {("storage", Target.M4)},
        ),
    ],
)
def test_evaluation_after_steps_is_that_of_torch(place, target, tmp_path):
    """Wherever the state is, for every batch; the state stays as the steps left it."""
    require_programs(target)
    torch.manual_seed(0)
    model = convolutional()
    batches = [(torch.randn(2, 2, 8, 8), torch.randint(CLASSES, (2,))) for _ in range(3)]
    options, settings = PLACES[place]
    step = captured(model, functional.cross_entropy, batches[0])
    export_step(step, tmp_path, evaluate=True, gap=0.5, **options)
    is_double = target is Target.HOST_DOUBLE
    data = b"".join(
        x.numpy().astype("<f8" if is_double else "<f4").tobytes() + y.int().numpy().tobytes()
        for x, y in batches
    )
    program = build(tmp_path, target, settings=("POISON=1", *settings))
    given = {"inputs": data, "steps": 3, "learning_rate": 0.1}
    without = run_program(program, target, tmp_path, **given).require_success()
    (tmp_path / "pm_storage.bin").unlink(missing_ok=True)
    found = run_program(program, target, tmp_path, words=("evaluate",), **given).require_success()
    assert found.state == without.state
    twin = copy.deepcopy(model).double()
    states = read_state(tmp_path / "state.bin", load_state_tensors(tmp_path))
    named = {name: torch.tensor(array) for name, array in states.items()}
    twin.load_state_dict(named, strict=False)
    for number, batch in enumerate(batches, 1):
        loss, correct = expected(twin, functional.cross_entropy, batch)
        assert found.evaluations[number][1] == correct
        assert found.evaluations[number][0] == pytest.approx(loss, rel=1e-9 if is_double else 1e-4)


def test_step_file_keeps_the_evaluation(imaged, tmp_path):
    """A folder made from a step file is the one made from the step."""
    _, step = imaged
    save_step(step, tmp_path / "x.step.json")
    loaded = load_step(tmp_path / "x.step.json")
    options = {"evaluate": True, "commit": True, "ram": "16KiB", "gap": 0.5}
    for folder, each in (("a", step), ("b", loaded)):
        export_step(each, tmp_path / folder, **options)
    for name in ("src/pm_step.c", "include/pm.h", "src/pm_weights.c", "README.md"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    document = json.loads((tmp_path / "a/manifest.json").read_text(encoding="utf-8"))
    assert document["evaluation"] == {"gives": ["loss", "correct"], "keeps_best": True}
    assert document["budget"]["arena_bytes"] == max(document["arena_bytes_of"].values())


def test_folder_without_it_knows_nothing_of_it(imaged, tmp_path):
    """A step that was captured with it may leave it out; one without it cannot have it."""
    _, step = imaged
    deployment = export_step(step, tmp_path, commit=True, gap=0.5)
    assert deployment.evaluation is None
    assert "pm_evaluate(" not in (tmp_path / "include/pm.h").read_text(encoding="utf-8")
    assert not deployment.stores_best
    plain = lower(nn.Linear(6, 4), functional.cross_entropy, (torch.randn(2, 6), IMAGES[1]))
    with pytest.raises(InputError, match="evaluate: Linear was captured without"):
        export_step(plain, tmp_path, evaluate=True)
