"""Indices out of their range: a step refuses them without changes."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from kit.programs import require_programs, run_command
from kit.shared_objects import link_program
from kit.traced_models import FunctionModule
from poetmodel.export.board import Target
from poetmodel.export.exporting import export_step
from poetmodel.lowered.calls import Call, Ref
from poetmodel.lowered.io import load_step, save_step
from poetmodel.lowered.loops import make_shape_table
from poetmodel.lowered.ranges import Indices, find_index_operands, trace_copies
from poetmodel.torch.lowering.inference import with_inference
from poetmodel.torch.lowering.step import lower

SOURCE = Path(__file__).with_name("library") / "refuse.c"
SANITIZED = (
    *("gcc", "-std=c11", "-O1", "-g", "-ffp-contract=off"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)


def normed():
    """Return a classifier with batch norm."""
    return nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(32, 5))


def language():
    """Return scores of the next token, from an embedding that is the last layer too."""
    return FunctionModule(
        lambda parts, x: torch.tanh(parts[0](x)) @ parts[0].weight.T, nn.Embedding(11, 6)
    )


def bags(mode):
    """Return a module that gathers columns of the sum of bags and of selected rows."""

    def chosen(own, tokens, rows, columns):
        return (own.bags(tokens) + own.rows[rows]).gather(1, columns)

    rows = nn.Parameter(torch.randn(7, 6))
    return FunctionModule(chosen, bags=nn.EmbeddingBag(20, 6, mode=mode), rows=rows)


def indexed(function, *shape):
    """Return a module that reads a parameter at the indices that a function computes."""
    values = nn.Parameter(torch.randn(shape))
    return FunctionModule(lambda own, *given: own.values[function(*given)], values=values)


def next_token(scores, tokens):
    """Return the cross entropy of the next token; tokens of 10 do not count."""
    wanted = tokens[:, 1:].reshape(-1)
    return functional.cross_entropy(scores[:, :-1].reshape(-1, 11), wanted, ignore_index=10)


def labelled(scores, labels):
    """Return the cross entropy, without labels of -1."""
    return functional.cross_entropy(scores, labels, ignore_index=-1)


def tokens_of(*shape):
    """Return integers of 0 to 3, each in turn."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % 4


SCORES = torch.randn(2, 3, 10)
BAG = (tokens_of(3, 5), torch.tensor([1, -2, 3]), tokens_of(3, 2), torch.randn(3, 2))
GRID = (torch.tensor([3, -4, 0]), torch.tensor([8, 0, 1]), torch.randn(3))
CASES = {
    "label": (normed, functional.cross_entropy, (SCORES, torch.tensor([4, 0]))),
    "ignored": (normed, labelled, (SCORES, torch.tensor([4, -1]))),
    "language": (language, next_token, (tokens_of(2, 6), tokens_of(2, 6))),
    "bags": (lambda: bags("max"), functional.mse_loss, BAG),
    "means": (lambda: bags("mean"), functional.mse_loss, BAG),
    "grid": (lambda: indexed(lambda *two: two, 4, 9), functional.mse_loss, GRID),
    "counted": (
        lambda: indexed(lambda index: index * 2 + 1, 5, 3),
        functional.mse_loss,
        (torch.tensor([0, 1]), torch.randn(2, 3)),
    ),
}


def captured(case, *, infer=False):
    """Return the step of a case, with Adam."""
    torch.manual_seed(1)
    make, loss, inputs = CASES[case]
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = lower(model, loss, inputs, optimizer=optimizer)
    return with_inference(step, model, loss, inputs) if infer else step


@pytest.mark.parametrize(
    ("case", "elements"),
    [
        ("label", {(1, 1): (5, 100_000, -1, -2_147_483_648)}),
        pytest.param("ignored", {(1, 0): (5, -2, -100)}, marks=pytest.mark.seeds),
        pytest.param(
            "language",
            {(0, 11): (11, -1, 2_147_483_647), (1, 11): (11, -1, -100)},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "bags", {(0, 14): (20, -1), (1, 0): (7, -8), (2, 5): (6, -1)}, marks=pytest.mark.slow
        ),
        pytest.param("means", {(0, 0): (20, -1)}, marks=pytest.mark.seeds),
        ("grid", {(0, 2): (4, -5), (1, 2): (9, -10)}),
        ("counted", {(0, 1): (2, -4)}),
    ],
)
@pytest.mark.parametrize("device", ["nrf52840", pytest.param("nano33ble", marks=pytest.mark.seeds)])
def test_what_is_out_of_range_is_refused(tmp_path, case, elements, device):
    """No memory besides is accessed, no state and no loss is written, and training continues."""
    require_programs(Target.HOST)
    step = captured(case, infer=case in ("language", "bags"))
    export_step(step, tmp_path, gap=0.5, device=device, infer=step.inference is not None)
    batch = b"".join(
        tensor.detach().numpy().astype("<f4" if tensor.is_floating_point() else "<i4").tobytes()
        for tensor in CASES[case][2]
    )
    (tmp_path / "batch.bin").write_bytes(batch)
    sources = [*sorted((tmp_path / "src").glob("*.c")), SOURCE]
    link_program(SANITIZED, sources, [tmp_path / "include"], tmp_path / "refuse")
    for element, values in elements.items():
        assert (
            run_command(["./refuse", "batch.bin", *map(str, (14, *element, *values))], tmp_path)
            == ""
        )


def test_ignored_labels_and_columns_that_nothing_reads_are_no_faults(tmp_path):
    """The label of the first token is not read, others may be ignored; each is checked once."""
    require_programs(Target.HOST)
    export_step(captured("language"), tmp_path, gap=0.5)
    code = (tmp_path / "src" / "pm_step.c").read_text()
    lines = [line.strip() for line in code.splitlines() if "pm_within" in line]
    assert [line.partition(", pm_list")[0] for line in lines] == [
        "if (!pm_within(x0",
        "if (!pm_within(x1 + 1",
    ]
    assert [line.split(", ", 2)[2] for line in lines] == [
        "0, 11, 0)) return PM_ERROR_INPUT;",
        "0, 11, 10)) return PM_ERROR_INPUT;",
    ]
    export_step(captured("bags"), tmp_path, gap=0.5)
    code = (tmp_path / "src" / "pm_step.c").read_text()
    assert [code.count(f"pm_within(x{k}") for k in range(4)] == [1, 1, 1, 0]
    assert "PM_TORN" not in code


def test_step_files_keep_the_ranges(tmp_path):
    """Calls are read back with them."""
    step = captured("label")
    save_step(step, tmp_path / "a.step.json")
    assert load_step(tmp_path / "a.step.json").calls == step.calls
    ranges = {
        call.kernel: call.index_range for calls in step.calls for call in calls if call.index_range
    }
    assert ranges == {"pm_nll_loss": (0, 5), "pm_nll_loss_backward": (0, 5)}


# -- which elements ------------------------------------------------------------------------------
def gather(ref, sizes, steps):
    """Return a call with indices."""
    table = make_shape_table((sizes, sizes, steps, steps))
    assert table is not None
    return Call("pm_gather", (Ref("out"), Ref("x"), ref, table, 1, 4), index_range=(0, 4))


def test_the_same_elements_are_known_in_any_order():
    """Loops from the end, in another order, or over an element again are about the same ones."""
    (plain,) = find_index_operands(gather(Ref("i", 2), (3, 2), (1, 3)))
    assert (plain.ref, plain.shape) == (Ref("i", 2), (1, 6, 1))
    for offset, sizes, steps in (
        (2, (2, 3), (3, 1)),
        (7, (3, 2), (-1, -3)),
        (2, (3, 5, 2), (1, 0, 3)),
    ):
        (other,) = find_index_operands(gather(Ref("i", offset), sizes, steps))
        assert other.implies(plain)
        assert plain.implies(other)
    (fewer,) = find_index_operands(gather(Ref("i", 2), (3,), (1,)))
    assert not plain.implies(fewer)
    assert list(find_index_operands(gather(Ref("i"), (0,), (1,)))) == []


@pytest.mark.parametrize(
    ("low", "high", "ignored", "implied"),
    [(0, 4, 0, True), (1, 4, 1, True), (0, 5, 0, False), (0, 4, -1, False), (0, 4, 7, False)],
)
def test_a_narrower_range_is_enough(low, high, ignored, implied):
    """A number that is ignored must be ignored, or in the range, of the other."""
    wanted = Indices(ref=Ref("i"), shape=(1, 2, 1), low=0, high=4, ignored=0)
    given = Indices(ref=Ref("i"), shape=(1, 2, 1), low=low, high=high, ignored=ignored)
    assert given.implies(wanted) == implied


def test_copies_are_traced_where_all_of_them_are_indices():
    """A copy of further elements, or one that another call writes, is checked itself."""
    wanted = Indices(ref=Ref("copy"), shape=(1, 6, 1), low=0, high=4, ignored=0)
    copy = Call("pm_copy_int", (Ref("copy"), Ref("x", 1), (2, 3, 1, 1, 2, 3, 4)))
    found = trace_copies(wanted, {"copy": [copy]})
    assert (found.ref, found.shape) == (Ref("x", 1), (2, 3, 1, 2, 4))
    more = Call("pm_copy_int", (Ref("copy"), Ref("x", 1), (1, 7, 1, 1)))
    for calls in ([more], [copy, copy], [Call("pm_add_int", copy.arguments)], []):
        assert trace_copies(wanted, {"copy": calls}) == wanted
