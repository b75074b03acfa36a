"""One meaning of the texts of ``--ram`` and ``--tile``."""

import json
from fractions import Fraction

import pytest

import poetmodel as pm
from kit.commands import invoke
from kit.digits import linear_step
from poetmodel.budgets import Budget, TileChoice
from poetmodel.cli.explore import initial_state
from poetmodel.cli.options import CostOptions, GraphOptions
from poetmodel.errors import BudgetError, InputError
from poetmodel.export.exporting import export_step
from poetmodel.export.reserves import parse_stack, reserved_bytes
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.graph.catalogue import Variant
from poetmodel.lowered.io import save_step
from poetmodel.problem import Limits
from poetmodel.sweeps.runs import grid
from poetmodel.tiling.choice import divide_step, parse_tile

BOARD = "nrf52840"
GAP = 0.5
"""Schedules do not matter here."""


@pytest.mark.parametrize(
    ("stated", "share", "size_bytes"),
    [
        ("60%", Fraction(3, 5), None),
        (" 12.5 % ", Fraction(1, 8), None),
        ("256KiB", None, 262_144),
        (1230, None, 1230),
    ],
)
def test_a_budget_is_a_share_or_a_size(stated, share, size_bytes):
    """A share is of the keep-all peak, rounded down; a size is the same whatever the peak is."""
    budget = Budget.parse(stated)
    assert (budget.fraction, budget.size_bytes) == (share, size_bytes)
    for peak in (0, 1001):
        expected = size_bytes if share is None else int(share * peak)
        assert budget.resolve(peak) == budget.to_size(peak).size_bytes == expected
    assert Budget.parse(budget) is budget


def test_what_is_reserved_is_in_a_size_and_beside_a_share():
    """The stack of exported C is no part of the peak of which a share is meant."""
    assert Budget.parse("50%").tensor_bytes(1000, reserved_bytes=300) == 500
    assert Budget.parse("1000B").tensor_bytes(1000, reserved_bytes=300) == 700
    assert [Budget.parse(text).keeps_all for text in ("99.9%", "100%", "8GiB")] == [0, 1, 0]


@pytest.mark.parametrize("stated", ["lots", "5 XB", -1, True, "1.5", "%"])
def test_no_budget_is_refused_under_its_name(stated):
    """The error names the budget."""
    with pytest.raises(BudgetError, match=r"^region inner: expected a size such as"):
        Budget.parse(stated, field="region inner")


def test_tiles_are_of_a_size_or_chosen_or_none():
    """None is no tiles, never a choice; the text of a choice is parsed as itself."""
    assert TileChoice.parse(None) == TileChoice.parse("none") == TileChoice.WHOLE
    assert TileChoice.parse("auto") == TileChoice.AUTO != TileChoice.WHOLE
    for choice in (TileChoice.WHOLE, TileChoice.AUTO, TileChoice.parse("2KiB")):
        assert TileChoice.parse(str(choice)) == TileChoice.parse(choice) == choice
    assert (TileChoice.WHOLE.require_size(), TileChoice.parse(64).require_size()) == (None, 64)
    with pytest.raises(InputError, match="auto is chosen for the RAM of a device"):
        TileChoice.AUTO.require_size()
    with pytest.raises(InputError, match="expected a size above 0"):
        TileChoice.parse(0)
    with pytest.raises(BudgetError, match="expected at least 16 B"):
        parse_tile(8)


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """Return a step file."""
    path = tmp_path_factory.mktemp("step") / "net.step.json"
    save_step(linear_step(), path)
    return path


@pytest.mark.parametrize("text", ["100%", " 130 % "])
@pytest.mark.parametrize("tile", [None, "256B"])
def test_a_share_is_the_same_bytes_at_every_door(text, tile, step, tmp_path):
    """Tensors get as much RAM in the library, commands, sweeps, the explorer and exported C."""
    whole = linear_step()
    bytes_ = int(Budget.parse(text).fraction * checkpoint_all_peak_bytes(whole.graph))
    costs = pm.Costs.estimate(whole.graph, pm.Device.load(BOARD))
    assert pm.Problem(whole.graph, costs, ram=text).ram_budget_bytes == bytes_
    tiles = () if tile is None else ("--tile", tile)
    options = (*tiles, "--device", BOARD, "--json", "--ram", text)
    names = ("solve", "limits")
    documents = {name: json.loads(invoke(name, step, *options).out) for name in names}
    found = {name: made["problem"]["ram_budget_bytes"] for name, made in documents.items()}
    shapes = [Variant(tile=tile)]
    (run,) = grid([str(step)], [BOARD], ram=[text], shapes=shapes)
    found["sweep"] = run.build_problem().ram_budget_bytes
    *_, first = initial_state(
        GraphOptions(model=str(step), tile=tile), CostOptions(device=BOARD), Limits(ram=text)
    )
    found["explore"] = first["ram_bytes"]
    made = export_step(whole, tmp_path / "c", device=BOARD, ram=text, tile=tile, gap=GAP)
    found["export"] = made.result.problem.ram_budget_bytes
    assert made.step.graph == divide_step(whole, tile).graph
    assert made.ram_bytes == bytes_ + reserved_bytes(whole, parse_stack(None, commit=False))
    assert found == dict.fromkeys(found, bytes_)


def test_verify_takes_a_share_of_the_whole_step(step, tmp_path):
    """The schedule of a step in tiles needs 816 of the 1,584 B of the whole one."""
    schedule, given = tmp_path / "net.schedule.json", ("--tile", "256B", "--device", BOARD)
    invoke("solve", step, *given, "--ram", "52%", "--out", schedule, status=0)
    for share, status in (("52%", 0), ("51%", 3)):
        invoke("verify", schedule, "--graph", step, *given, "--ram", share, status=status)
