"""Byte inputs: they stay bytes, and the conversion of each has the bits of PyTorch."""

import copy
import json
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from kit.commands import invoke, invoke_refused
from kit.export_agreement import Exported
from kit.kernel_calls import execute_steps, list_kernels
from kit.programs import require_programs
from kit.rotation import mark_seeds_except
from kit.shared_objects import QUICK_BUILD, build
from poetmodel.errors import InputError
from poetmodel.export.board import Target, run_program
from poetmodel.export.exporting import export_step
from poetmodel.export.reserves import STACK_BYTES, input_bytes, reserved_bytes
from poetmodel.lowered.io import load_step, save_step
from poetmodel.lowered.tables import with_byte_inputs
from poetmodel.tiling.tiles import tile_step
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.lowering.inference import with_inference
from poetmodel.torch.lowering.step import lower

LABELS = torch.tensor([3, 1])
BYTES = torch.arange(256, dtype=torch.uint8)
KINDS = (torch.uint8, torch.int8)


class Seen(nn.Module):
    """A convolution of a function's result for an image, or for sequences of numbers."""

    def __init__(self, look=lambda _, x: x):
        super().__init__()
        self.look = look
        self.mean = nn.Buffer(torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))
        self.std = nn.Parameter(torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1))
        self.std.requires_grad_(requires_grad=False)
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        """Return four numbers for each image."""
        x = functional.relu(self.norm(self.first(self.look(self, x))))
        return self.head(x.mean((2, 3)))


def from_lists(_, x):
    """Normalize like torchvision, by lists of numbers."""
    x = x.to(torch.float32).div(255)
    mean, std = (torch.as_tensor(each, dtype=x.dtype) for each in ([0.5, 0.4, 0.3], [0.2] * 3))
    return x.clone().sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))


LOOKS = {
    "scaled": (1, lambda _, x: x.to(torch.float32) / 255),
    "divided": (1, lambda _, x: x / 255),
    "normalized": (3, lambda own, x: (x.float() / 255 - own.mean) / own.std),
    "of lists": (3, from_lists),
    "alike": (1, lambda _, x: (x.float() - torch.full((3, 1, 1), 127.5)) * 0.01),
    "rows first": (
        3, lambda own, x: ((x.permute(0, 3, 1, 2).float() - own.mean) / own.std).contiguous()
    ),
    "rows": (
        3, lambda own, x: ((x / 255 - own.mean.view(3)) / own.std.view(3)).permute(0, 3, 1, 2)
    ),
    "wrapped": (1, lambda _, x: (x * 3 + 7).float().clamp(3, 200).sqrt()),
    "chosen": (1, lambda _, x: torch.where(x > 100, x.float(), 0.5)),
}  # fmt: skip
"""What models make of bytes: the rows of the table, and the function."""


def image(look, kind=torch.uint8):
    """Return images of every byte."""
    pixels = BYTES[torch.randperm(2 * 3 * 8 * 8, generator=torch.manual_seed(0)) % 256].view(kind)
    return pixels.view((2, 8, 8, 3) if look.startswith("rows") else (2, 3, 8, 8))


def lowered(model, *inputs, infer=False):
    """Return the step of a model with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = lower(model, functional.cross_entropy, (*inputs, LABELS), optimizer=optimizer)
    given = (*inputs, LABELS)
    return with_inference(step, model, functional.cross_entropy, given) if infer else step


@cache
def lower_plain(*, infer=False):
    """Return the step of a model with real inputs; tests leave it unchanged."""
    torch.manual_seed(0)
    return lowered(Seen(), torch.randn(2, 3, 8, 8), infer=infer)


def pair(look, kind=torch.uint8, *, infer=False):
    """Return inputs and steps of a model that converts bytes and of one with converted inputs."""
    torch.manual_seed(0)
    model = Seen(LOOKS[look][1])
    x = image(look, kind)
    seen = model.look(model, x).detach().contiguous()
    return [(x, lowered(model, x, infer=infer)), (seen, lower_plain(infer=infer))]


def same(step, x, other, y):
    """Hold loss and state of two steps after some batches to each other, bit by bit."""
    found, expected = (
        execute_steps(step, x, LABELS, steps=2),
        execute_steps(other, y, LABELS, steps=2),
    )
    np.testing.assert_array_equal(found[step.loss.buffer], expected[other.loss.buffer])
    states = {value.name: value for value in other.states}
    for value in step.states:
        mine = np.concatenate([found[ref.buffer] for ref in value.pieces])
        its = np.concatenate([expected[ref.buffer] for ref in states[value.name].pieces])
        np.testing.assert_array_equal(mine, its, err_msg=value.name)


def rows_of(step):
    """Return how many rows each table has."""
    return [v.size // 256 for name, v in step.values.items() if "as reals" in name]


@pytest.mark.parametrize(
    ("look", "kind"),
    mark_seeds_except(
        product(LOOKS, KINDS),
        {
            *product(("rows first", "wrapped", "chosen"), KINDS[:1]),
            ("normalized", torch.int8),
        },
        set(product(("of lists", "rows"), KINDS[:1])),
    ),
    ids=str,
)
def test_a_table_has_the_bits_of_what_a_model_makes_of_bytes(look, kind):
    """One call replaces the formula: the step is bitwise that of real numbers."""
    (x, step), (y, plain) = pair(look, kind)
    assert rows_of(step) == [LOOKS[look][0]]
    assert list_kernels(step).count("pm_lookup") == 1
    assert list_kernels(step).count("pm_mul") == list_kernels(plain).count("pm_mul")
    assert [value.type for value in step.inputs] == [str(x.dtype).removeprefix("torch."), "int32"]
    assert input_bytes(step) == x.numel() + 8
    same(step, x, plain, y)


@pytest.mark.parametrize(
    ("rows", "look"),
    [
        ([1], lambda _, x: x.float() * torch.arange(8.0)),
        ([1], lambda own, x: x.float() - own.first.bias[:3].view(3, 1, 1)),
        ([1, 1], lambda _, x: x.float() - (x.float() / 2).mean()),
        ([1], lambda _, x: functional.dropout(x.float(), 0.5)),
        ([], lambda _, x: x.flip(3).float()),
    ],
    ids=["places", "trained", "mean", "random", "moved"],
)
def test_what_depends_on_more_than_a_byte_and_its_channel_stays(rows, look):
    """The operations before it are in a table; it is an operation of the step as any other."""
    torch.manual_seed(0)
    model, x = Seen(look), image("")
    step = lowered(model, x)
    assert rows_of(step) == rows
    expected = functional.cross_entropy(copy.deepcopy(model)(x), LABELS)
    found = execute_steps(step, x, LABELS)[step.loss.buffer]
    if "pm_dropout" not in " ".join(list_kernels(step)):
        assert found == pytest.approx(expected.item(), rel=1e-5)


def test_bytes_may_be_labels():
    """Bytes that become integers have no table."""
    model = nn.Linear(6, 4)
    loss = lambda out, y: functional.cross_entropy(out, y.long())  # noqa: E731
    x, y = torch.randn(2, 6), LABELS.to(torch.uint8)
    step = lower(model, loss, (x, y))
    expected = loss(model(x), y).item()
    assert execute_steps(step, x, y)[step.loss.buffer] == pytest.approx(expected, rel=1e-6)
    assert rows_of(step) == []


@pytest.mark.parametrize("look", [pytest.param("normalized", marks=pytest.mark.slow), "scaled"])
def test_tiles_convert_a_channel_at_a_time(look):
    """So that the image is never there as real numbers; the bits stay."""
    (x, step), (y, plain) = pair(look)
    found = tile_step(step, 600)
    names = [node.name for node in found.graph.nodes if node.op == "lookup"]
    assert names == ["lookup[0:1]", "lookup[1:2]", "lookup[2:3]"]
    assert max(t.bytes for n in found.graph.nodes if n.op == "lookup" for t in n.outputs) == 512
    same(found, x, plain, y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "kind"),
    mark_seeds_except(
        product((Target.HOST, Target.M4, Target.HOST_DOUBLE), KINDS),
        {(Target.M4, torch.uint8), (Target.HOST_DOUBLE, torch.int8)},
    ),
    ids=str,
)
def test_programs_read_bytes(target, kind, tmp_path):
    """Training and inference read files of bytes, with the bits of real numbers."""
    require_programs(target)
    found = []
    for folder, (x, step) in zip("ab", pair("normalized", kind, infer=True), strict=True):
        export_step(step, tmp_path / folder, infer=True, gap=0.5, tile=600)
        program = build(tmp_path / folder, target, settings=("POISON=1", QUICK_BUILD))
        real = "<f8" if target is Target.HOST_DOUBLE else "<f4"
        array = x.numpy() if x.dtype is kind else x.numpy().astype(real)
        inputs = array.tobytes() + LABELS.int().numpy().tobytes()
        done = run_program(
            program, target, tmp_path / folder, inputs=inputs, steps=3, learning_rate=0.1,
            words=("infer=outputs.bin",),
        )  # fmt: skip
        outputs = (tmp_path / folder / "outputs.bin").read_bytes()
        found.append((done.require_success().state, done.losses, outputs))
    assert found[0] == found[1]


def test_a_program_of_the_host_reads_bytes_and_its_folder_says_so(tmp_path):
    """Manifest: type, size and table; the header has the type; RAM has bytes."""
    (x, step), (y, plain) = pair("normalized")
    made, other = Exported(step, tmp_path / "a"), Exported(plain, tmp_path / "b")
    batches = [[(given, LABELS)] for given in (x, y)]
    outcomes = [
        each.outcome(batch, 2, target=Target.HOST, settings=(QUICK_BUILD,))
        for each, batch in zip((made, other), batches, strict=True)
    ]
    assert outcomes[0].has_same_bits(outcomes[1])
    value = made.manifest["inputs"][0]
    assert (value["dtype"], value["bytes"]) == ("uint8", 384)
    (table,) = value["tables"]
    model = Seen()
    every = BYTES.view(-1, 1, 1, 1).expand(-1, 3, 1, 1)
    expected = LOOKS["normalized"][1](model, every).detach().view(256, 3).t()
    np.testing.assert_array_equal(np.array(table, np.float32), expected)
    assert "tables" not in other.manifest["inputs"][0]
    header = (tmp_path / "a" / "include/pm.h").read_text(encoding="utf-8")
    assert "#define PM_INPUT_0 0 /* uint8_t[2][3][8][8], 384 B */" in header
    assert made.deployment.ram_map()["inputs"] == 384 + 8


def test_numbers_that_are_not_finite_are_in_a_manifest(tmp_path):
    """JSON has no infinity."""
    model = Seen(lambda _, x: x.float().log().clamp(max=1.0) * 0 + x.float().log())
    export_step(lowered(model, image("")), tmp_path)
    document = json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))
    assert document["inputs"][0]["tables"][0][0][0] == "nan"


# -- what an option says ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "look"),
    [
        pytest.param("uint8:0.0039", lambda x: x.float() * 0.0039, marks=pytest.mark.slow),
        pytest.param("uint8", lambda x: x.float(), marks=pytest.mark.slow),
        (
            "int8:0.01,0.02,0.03:-1.5,0,2",
            lambda x: (
                x.float() * torch.tensor([0.01, 0.02, 0.03]).view(3, 1, 1)
                + torch.tensor([-1.5, 0, 2]).view(3, 1, 1)
            ),
        ),
    ],
    ids=["scale", "integers", "channels"],
)
def test_an_option_says_what_bytes_mean(text, look, tmp_path):
    """The step is that of these real numbers; its inference and its file, too."""
    x = image("", torch.int8 if text.startswith("int8") else torch.uint8)
    y, plain = look(x), lower_plain(infer=True)
    step = with_byte_inputs(plain, {"inputs[0]": text})
    same(step, x, plain, y)
    same(tile_step(step, 600), x, plain, y)
    assert "pm_lookup" in list_kernels(step.inference)
    save_step(step, tmp_path / "x.step.json")
    same(load_step(tmp_path / "x.step.json"), x, plain, y)
    assert reserved_bytes(plain, STACK_BYTES) - reserved_bytes(step, STACK_BYTES) == 3 * x.numel()


@pytest.mark.parametrize(
    "given",
    [
        {"inputs[1]": "uint8"},
        {"image": "uint8"},
        {"inputs[0]": "uint16"},
        {"inputs[0]": "uint8:one"},
        {"inputs[0]": "uint8:inf"},
        {"inputs[0]": "uint8:1:0:0"},
        {"inputs[0]": "uint8:1,2"},
        {"inputs[0]": "uint8:1,2,3:1,2"},
        "uint8",
    ],
    ids=str,
)
def test_what_an_option_cannot_mean_is_refused(given, told):
    """Errors name the input, the expected and the actual value."""
    with pytest.raises(InputError) as error:
        with_byte_inputs(lower_plain(), given)
    told(str(error.value))


def test_the_command_takes_bytes(tmp_path):
    """Of a step file, for each input by its name."""
    save_step(lower_plain(), tmp_path / "x.step.json")
    words = ["export", str(tmp_path / "x.step.json"), "--out", str(tmp_path / "c")]
    invoke(*words, "--byte-input", "inputs[0]=uint8:0.0039", status=0)
    document = json.loads((tmp_path / "c/manifest.json").read_text(encoding="utf-8"))
    assert document["inputs"][0]["dtype"] == "uint8"
    invoke_refused(*words, "--byte-input", "inputs[0]")


def test_the_command_takes_bytes_of_several_inputs(tmp_path):
    """In repeated options or in one."""

    class Pair(nn.Linear):
        def forward(self, x, y):
            return super().forward(x + y)

    inputs = (torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 2))
    save_step(lower(Pair(4, 2), functional.mse_loss, inputs), tmp_path / "x.step.json")
    words = ["export", str(tmp_path / "x.step.json"), "--out", str(tmp_path / "c")]
    first, second = "inputs[0]=uint8:0.1", "inputs[1]=int8"
    for repeated in (
        ["--byte-input", first, "--byte-input", second],
        ["--byte-input", f"{first}; {second}"],
    ):
        invoke(*words, *repeated, status=0)
        document = json.loads((tmp_path / "c/manifest.json").read_text(encoding="utf-8"))
        assert [one["dtype"] for one in document["inputs"][:2]] == ["uint8", "int8"]


def test_truth_values_are_no_inputs():
    """Bytes are inputs, and buffers may be truth values; the input types of a step are listed."""
    masked = Seen(lambda own, x: x.float() * own.mask)
    masked.mask = nn.Buffer(torch.arange(8) < 5)
    assert rows_of(lowered(masked, image(""))) == [1]
    model = Seen(lambda _, x: x.float())
    with pytest.raises(CaptureError, match="truth values; expected float32, integers or bytes"):
        lowered(model, torch.ones(2, 3, 8, 8, dtype=torch.bool))
