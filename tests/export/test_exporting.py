"""Whole exports: fit in a device, and content of the folder."""

import json
import re
from dataclasses import replace
from itertools import product

import pytest
import torch

from kit.digits import STEP
from kit.export_agreement import Exported, lower_training, make_batches_like, train_in_torch
from kit.programs import require_programs
from kit.rotation import mark_seeds_except
from kit.shared_objects import build
from kit.traced_models import FunctionModule
from poetmodel.device import Device
from poetmodel.device.costs import Costs
from poetmodel.device.io import device_names
from poetmodel.errors import BudgetError, InputError
from poetmodel.export.board import Target
from poetmodel.export.exporting import export_step, export_with
from poetmodel.export.options import ExportOptions
from poetmodel.lowered.io import load_step, save_step
from poetmodel.torch import trace
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.exporting import export
from poetmodel.torch.lowering.step import lower

CARDS = ("a100", "h100", "rtx4090")


def test_state_that_is_read_in_place_needs_no_ram(tmp_path):
    """A weight that is larger than the RAM is none of its floor on a board that maps its flash."""
    nn = torch.nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    training = (model, nn.functional.cross_entropy, (torch.randn(1, 64), torch.tensor([1])))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    limits = {"ram": "16KiB", "tile": "none", "optimizer": optimizer}
    made = export(*training, folder=tmp_path, device="nano33ble", **limits)
    assert made.plan.memory_mapped
    assert repr(made).startswith("Deployment('Sequential', 16.00 KiB RAM, ")
    assert len(repr(made)) < 200
    document = json.loads((tmp_path / "manifest.json").read_text())
    assert document["budget"]["ram_bytes"] == 16 * 1024
    assert "optimizer=optimizer" in document["command"]
    assert "ram='16KiB'" in document["command"]
    with pytest.raises(BudgetError, match="one node alone of the step, whole, needs 16"):
        export(*training, folder=tmp_path, device="nrf52840", **limits)


def sums():
    """Return parameters whose gradients have no dense layout: constants, one number, transposed."""

    def loss(own, x):
        y = x @ own.a @ own.b + x @ own.b.t() @ own.a.t()
        return y.pow(2).mean() + (own.a.t() * own.b).mean() + own.c.sum() + own.d

    shapes = {"a": (4, 6), "b": (6, 4), "c": (3,), "d": ()}
    return FunctionModule(
        loss, **{n: torch.nn.Parameter(torch.randn(s)) for n, s in shapes.items()}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "device"), [("gradients", "nrf52840"), ("clipped", "nano33ble")]
)
def test_rare_layouts_and_types(tmp_path, optimizer, device):
    """The compiler accepts the code, and its results are those of PyTorch."""
    torch.manual_seed(0)
    training = (sums(), None, (torch.randn(2, 4),))
    batches = make_batches_like(training[2], 2)
    exported = Exported(lower_training(training, optimizer), tmp_path, share=0.1, device=device)
    found = exported.outcome(batches, 1)
    apart = found.differences(train_in_torch(training, batches, 1, optimizer))
    assert max(apart.values()) <= 1e-12, apart


def test_earlier_export_leaves_no_kernels(tmp_path):
    """A folder that is written again has, and compiles, the kernels of the new step."""
    nn = torch.nn
    for activation in (nn.Tanh(), nn.ReLU()):
        model = nn.Sequential(nn.Linear(4, 4), activation)
        export(model, nn.MSELoss(), (torch.randn(2, 4), torch.randn(2, 4)), folder=tmp_path)
    kernels = {path.stem for path in (tmp_path / "src").glob("*.c")}
    called = json.loads((tmp_path / "manifest.json").read_text())["nodes"]
    runtime = {"pm_finite", "pm_step", "pm_slices", "pm_state", "pm_weights"}
    assert kernels == runtime | {name for node in called for name in node["kernels"]}


def test_a_profile_is_read_before_the_work(tmp_path):
    """Its file may go then, and its costs are those of the answer."""
    step, board = load_step(STEP), Device.load("nrf52840")
    costs = Costs.estimate(step.graph, board)
    twice = {name: cost * 2 for name, cost in costs.compute.items()}
    energies = []
    for name, profile in (("one", costs), ("two", replace(costs, compute=twice))):
        profile.save(tmp_path / "profile.csv")
        options = ExportOptions.parse(
            tmp_path / name, device=board, tile="none", profile=tmp_path / "profile.csv"
        )
        (tmp_path / "profile.csv").unlink()
        energies.append(export_with(step, options).result.energy_j)
    assert energies[1] > 1.5 * energies[0]


def test_folder_that_cannot_be_written_is_left_alone(tmp_path):
    """An unwritable folder is refused before the solve, unchanged; foreign files stay."""
    training = (torch.nn.Linear(2, 2), torch.nn.MSELoss(), (torch.randn(1, 2), torch.randn(1, 2)))
    (tmp_path / "file").write_text("kept")
    with pytest.raises(InputError, match="expected a folder"):
        export(*training, folder=tmp_path / "file" / "deeper")
    (tmp_path / "out" / "Makefile").mkdir(parents=True)
    with pytest.raises(InputError, match="found a folder"):
        export(*training, folder=tmp_path / "out")
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert (tmp_path / "file").read_text() == "kept"
    for name in ("README.md", "CMakeLists.txt", "manifest.json"):
        project = tmp_path / f"with {name}"
        project.mkdir()
        (project / name).write_text("{}")
        with pytest.raises(InputError, match=f"holds {name}, which no export has written"):
            export(*training, folder=project)
        assert [path.name for path in project.iterdir()] == [name]
        assert (project / name).read_text() == "{}"
    project = tmp_path / "with README.md"
    for shared in (project, tmp_path / "step"):
        export(*training, folder=tmp_path / "step")
        before = (tmp_path / "step" / "CMakeLists.txt").read_text()
        if shared == project:
            (project / "CMakeLists.txt").write_text("{}")
        with pytest.raises(InputError, match=r"holds CMakeLists\.txt, which no export"):
            export(*training, folder=tmp_path / "other", shared_kernels=shared)
        assert (tmp_path / "step" / "CMakeLists.txt").read_text() == before
    with pytest.raises(InputError, match="expected another folder for shared kernels"):
        export(*training, folder=tmp_path / "other", shared_kernels=tmp_path / "other")
    assert not (tmp_path / "other").exists()
    export(*training, folder=tmp_path / "step")


def test_any_names_compile(tmp_path):
    """For any names of a step, its modules and parameters, the compiler has no warning."""
    require_programs(Target.HOST)
    names = ("h", "slots", "gr\u00f6\u00dfe", "gr\u00fc\u00dfe", "H", "class", "int", "pm_h")
    parameters = {name: torch.nn.Parameter(torch.ones(2)) for name in names}
    model = FunctionModule(lambda own, x: x + sum(own.parameters(recurse=False)), **parameters)
    model.add_module("x/*y", torch.nn.Linear(2, 2))
    model.register_forward_hook(lambda self, _, y: getattr(self, "x/*y")(y))
    given = (torch.randn(1, 2), torch.randn(1, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    name = "a /* b */ c"
    export(model, torch.nn.MSELoss(), given, folder=tmp_path, name=name, optimizer=optimizer)
    build(tmp_path, Target.HOST)


@pytest.mark.parametrize("second", [slice(3, 5), pytest.param(slice(5, 7), marks=pytest.mark.slow)])
def test_batches_may_be_parts_of_larger_tensors(tmp_path, second):
    """A program reads each input separately, and only its elements; two of them may be equal."""
    torch.manual_seed(0)
    samples = torch.randn(20, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    training = (model, torch.nn.functional.mse_loss, (samples[3:5], samples[second]))
    batches = make_batches_like(training[2], 3)
    exported = Exported(lower_training(training, "sgd"), tmp_path / "train")
    assert [value["shape"] for value in exported.manifest["inputs"]] == [[2, 4], [2, 4]]
    assert exported.deployment.ram_map()["inputs"] == 2 * 2 * 4 * 4
    apart = exported.outcome(batches, 3).differences(train_in_torch(training, batches, 3, "sgd"))
    assert max(apart.values()) <= 1e-11, apart
    infer = tmp_path / "infer"
    export(*training, folder=infer, infer=True, gap=0.5)
    assert "pm_infer" in (infer / "include" / "pm.h").read_text()
    assert "x0 +" not in (infer / "src" / "pm_step.c").read_text()


@pytest.mark.parametrize("inputs", [3, None, torch.ones(2), (torch.ones(2), torch.ones(2).short())])
def test_what_are_no_inputs_is_said(tmp_path, inputs):
    """One sentence, which names no type that is refused itself, and no folder."""
    expected = "torch.float32, .*int8 or" if isinstance(inputs, tuple) else "a tuple such as"
    loss = lambda x, y: (x * y).sum()  # noqa: E731
    with pytest.raises(CaptureError, match=f"inputs.*expected {expected}"):
        export(torch.nn.Sequential(torch.nn.Linear(2, 2)), loss, inputs, folder=tmp_path / "f")
    assert not (tmp_path / "f").exists()


def test_parts_of_larger_tensors_are_not_written_on_mapped_storage(tmp_path):
    """A write there begins at the beginning of a tensor; on paged storage, such a weight trains."""
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 60)[20:])
    model = FunctionModule(lambda own, x: x * own.weight, weight=weight)
    training = (model, torch.nn.functional.mse_loss, (torch.randn(2, 40), torch.randn(2, 40)))
    step = lower_training(training, "sgd")
    with pytest.raises(InputError, match=r"weight/sgd: its state is a part of a larger tensor"):
        Exported(step, tmp_path / "mapped", share=0.0, device="nano33ble", minimize="ram")
    batches = make_batches_like(training[2], 2)
    exported = Exported(step, tmp_path / "paged", share=0.0)
    apart = exported.outcome(batches, 3).differences(train_in_torch(training, batches, 3, "sgd"))
    assert max(apart.values()) <= 1e-12, apart


@pytest.mark.slow
def test_windows_that_are_updated_on_the_stack_have_room_there(tmp_path):
    """On mapped storage a window is updated in a piece; a long one needs a larger stack."""
    nn = torch.nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 64, 251, stride=50), nn.Flatten(), nn.Linear(64, 4))
    training = (model, nn.functional.mse_loss, (torch.randn(1, 1, 300), torch.randn(1, 4)))
    step = lower_training(training, "sgd")
    options = {"device": "nano33ble", "share": 0.0, "minimize": "ram"}
    with pytest.raises(BudgetError, match=r"stack: windows of 0\.weight are .* up to 2,156 B"):
        Exported(step, tmp_path / "small", **options)
    exported = Exported(step, tmp_path / "large", stack=2156, **options)
    assert exported.manifest["states"][0]["home"] == "mapped"
    batches = [tuple(x.float() for x in batch) for batch in make_batches_like(training[2], 1)]
    run = exported.run(batches, 1, target=Target.M4, settings=()).require_success()
    assert run.metrics["stack_bytes"] < run.metrics["stack_limit_bytes"]


def test_two_generations_have_room_on_the_storage(tmp_path):
    """State that fits once and not twice is refused with commits: in blocks, as flash keeps it."""
    board = Device.load("nano33ble")
    device = replace(board, aux_bytes=20_480)
    model = torch.nn.Linear(32, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = (model, torch.nn.MSELoss(), (torch.randn(2, 32), torch.randn(2, 64)))
    options = {"folder": tmp_path, "device": device, "optimizer": optimizer, "gap": 0.5}
    assert export(*given, **options, ram="8KiB").slots
    with pytest.raises(BudgetError, match=r"two generations of state there take 24,576 B"):
        export(*given, **options, ram="8KiB", commit=True)
    committed = export(*given, **options | {"device": board}, ram="8KiB", commit=True)
    assert committed.stack_bytes > export(*given, **options, ram="8KiB").stack_bytes


TAMPERED = {
    "there is no such kernel": lambda _, call, _refs: call.update(kernel="../../pm_mm"),
    "arguments, got": lambda _, call, _refs: call["arguments"].pop(),
    "expected ": lambda _, call, _refs: call["arguments"].__setitem__(-1, 0.5),
    "element 1000000 of": lambda _, _call, refs: refs[0].update(offset=10**6),
    "offset": lambda _, _call, refs: refs[0].update(offset=-1),
    "neither read nor made": lambda document, _, refs: refs[1].update(
        buffer=document["gradients"][0]["pieces"][0]["buffer"]
    ),
    "has 100 elements": lambda document, *_: document["inputs"][0].update(shape=[10, 10]),
    "loss: element 7": lambda document, *_: document["loss"].update(offset=7),
}
"""What the refusal says of a step file of a linear layer, and how that is spoiled."""


@pytest.mark.parametrize("expected", TAMPERED)
def test_tampered_step_files_are_refused(tmp_path, expected):
    """Files that could cause wrong accesses, or do not compile, are refused in a sentence."""
    nn = torch.nn
    step = lower(nn.Linear(2, 2), nn.MSELoss(), (torch.randn(1, 2), torch.randn(1, 2)))
    save_step(step, tmp_path / "x.step.json")
    assert load_step(tmp_path / "x.step.json").calls == step.calls
    document = json.loads((tmp_path / "x.step.json").read_text())
    call = next(calls for calls in document["calls"] if calls)[0]
    refs = [a for a in call["arguments"] if isinstance(a, dict)]
    TAMPERED[expected](document, call, refs)
    (tmp_path / "x.step.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=expected):
        load_step(tmp_path / "x.step.json")


OPERATORS = {
    "linspace": lambda x: x * torch.linspace(0, 1, 4),
    "new_empty_strided": lambda x: x + x.new_empty_strided((2, 4), (4, 1)).zero_(),
    "sort": lambda x: x.sort(-1).values,
    "eye": lambda x: x @ torch.eye(4),
    "fft_r2c": lambda x: x * torch.fft.rfft(x).abs().sum(),
    "to_copy": lambda x: x.double().float(),
    "logspace": lambda x: x * torch.logspace(0, 1, 4),
}


@pytest.mark.parametrize(
    ("name", "place"),
    mark_seeds_except(
        REFUSED := [*product(OPERATORS, ("inner", "root", "loss"))],
        {("sort", "inner"), ("sort", "root"), ("sort", "loss"), ("to_copy", "inner")},
        REFUSED,
    ),
)
def test_refused_operators_name_module_and_line(name, place):
    """So do those that the model's own forward, or the loss function, calls."""
    called = OPERATORS[name]
    inner = FunctionModule(lambda own, x: called(own.layer(x)), layer=torch.nn.Linear(8, 4))
    model, loss = inner, torch.nn.functional.mse_loss
    if place == "inner":
        model = torch.nn.Sequential(torch.nn.Identity(), inner)
    if place == "loss":
        model = torch.nn.Linear(8, 4)

        def loss(output, target):
            """Return a number for each sample that the operator makes."""
            return called(output).sum() + target.sum()

    words = {"inner": "module '1'", "root": "module FunctionModule"}
    where = words.get(place, "the loss function")
    line = rf"{re.escape(__file__)}:\d+ \("
    with pytest.raises(CaptureError, match=rf"{name}\S* in {where} at {line}"):
        lower(model, loss, (torch.ones(2, 8), torch.ones(2, 4)))


def test_refused_gradients_name_the_module_of_their_operator():
    """An operator that only the backward pass has is named with its forward module."""
    model = FunctionModule(
        lambda own, x: own.layer(x).as_strided((2, 4), (4, 1)) * 2, layer=torch.nn.Linear(8, 4)
    )
    with pytest.raises(CaptureError, match=r"as_strided_scatter\S* in module FunctionModule at "):
        lower(model, torch.nn.functional.mse_loss, (torch.ones(2, 8), torch.ones(2, 4)))


@pytest.mark.parametrize("call", [lower, trace])
def test_batches_of_no_samples_are_refused(call):
    """They are named, wherever they are."""
    rows, targets = torch.ones(0, 8), torch.ones(0, 4)
    with pytest.raises(CaptureError, match=r"inputs\[0\] has no elements \(shape \[0, 8\]\)"):
        call(torch.nn.Linear(8, 4), torch.nn.functional.mse_loss, (rows, targets))
    with pytest.raises(CaptureError, match=r"inputs\[1\] has no elements"):
        call(torch.nn.Linear(8, 4), lambda output, _: output.sum(), (torch.ones(2, 8), targets))


def test_folders_inside_an_export_are_refused(tmp_path):
    """At any depth, before anything is written; beside it and over it all is well."""
    outer = tmp_path / "outer"
    export_step(load_step(STEP), outer, ram="100%", gap=0.5)
    for inner in (outer / "inner", outer / "src" / "deep" / "er"):
        with pytest.raises(InputError, match=r"is inside .*outer, which is an exported folder"):
            export_step(load_step(STEP), inner, ram="100%", gap=0.5)
        assert not inner.exists()
    for other in (outer, str(tmp_path / "beside")):
        export_step(load_step(STEP), other, ram="100%", gap=0.5)


@pytest.mark.parametrize("card", CARDS)
def test_graphics_cards_run_no_exported_code(card, tmp_path):
    """They are devices of the back end for torch.compile; boards with large RAM are none."""
    with pytest.raises(InputError, match=f"device: {card} is a graphics card"):
        export_step(load_step(STEP), tmp_path / "c", device=card)
    others = (Device.load(name) for name in device_names() if name not in CARDS)
    assert not any(board.is_graphics_card for board in others)
