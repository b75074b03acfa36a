"""Addresses of plans: figures by hand, each rule broken once, and files."""

import json
from dataclasses import replace

import pytest

from kit.plans import HELD, PAGED_AND_FREED, STORED, parse_plan, state_step
from kit.worked import skip_graph
from poetmodel.errors import PlanError
from poetmodel.graph import Graph, operation
from poetmodel.plan import Arena, Plan, check_arena
from poetmodel.plan.arena_check import Rectangle
from poetmodel.plan.document import load_document
from poetmodel.schedule import GraphIdentity

OUT, W = "output", "workspace"

OF_SKIP = (
    (0, OUT, 0, 8),  # a, 4 B
    (2, OUT, 1, 0),  # b, 6 B
    (2, W, 1, 16),  # its workspace, 1 B
    (5, OUT, 2, 8),  # c, 5 B
    (7, OUT, 0, 0),  # a again, paged in
    (9, OUT, 3, 16),  # d, 3 B
)
"""Addresses of `FOLLOWS`, aligned to 8: a, b and the workspace are in RAM together."""

OF_PAGED = (
    (0, OUT, 0, 0),  # x, 10 B
    (1, OUT, 1, 16),  # w, 8 B, read for the first time
    (2, OUT, 2, 0),  # y, 6 B, in place of x
    (5, OUT, 1, 8),  # w again
    (6, OUT, 3, 16),  # v, 3 B
    (7, OUT, 4, 24),  # g, 9 B
)
"""Addresses of the program `STORED`, aligned to 8; w+ is where the second copy of w is."""


def of_skip(**changes):
    """Return a graph, a plan with its budget, and addresses, changed."""
    keys = {"bytes": 24, "lower_bound_bytes": 24, "offsets": OF_SKIP}
    found = parse_plan(PAGED_AND_FREED, ram_budget_bytes=24)
    return skip_graph(workspace=True), found, Arena(alignment=8, **keys | changes)


def of_state(**changes):
    """Return a graph with state on storage, a plan with an operator in place, and addresses."""
    keys = {"bytes": 40, "lower_bound_bytes": 40, "offsets": OF_PAGED}
    return (
        state_step(),
        parse_plan(STORED, "blocking", resident=()),
        Arena(alignment=8, **keys | changes),
    )


def changed(offsets, n, *to):
    """Return offsets with one of them changed, or without it."""
    return (*offsets[:n], *to, *offsets[n + 1 :])


def test_valid_addresses_have_no_violation():
    """8 B each for a, b and the workspace, worked by hand; a copy is there until it is freed."""
    graph, found, arena = of_skip()
    check = check_arena(graph, found, arena)
    assert check.violations == ()
    assert (check.bytes, check.lower_bound_bytes, arena.fragmentation_ratio) == (24, 24, 0.0)
    assert check.rectangles == (
        Rectangle(0, 4, 8, 4, OUT, 0),
        Rectangle(2, 6, 0, 6, OUT, 1),
        Rectangle(2, 3, 16, 1, W, 1),
        Rectangle(5, 11, 8, 5, OUT, 2),
        Rectangle(7, 10, 0, 4, OUT, 0),
        Rectangle(9, 12, 16, 3, OUT, 3),
    )


def test_state_on_storage_and_operators_in_place():
    """The output y has the address of x, w+ that of w, which is never freed."""
    graph, found, arena = of_state()
    check = check_arena(graph, found, arena)
    assert check.violations == ()
    assert check.rectangles[1:4] == (
        Rectangle(1, 4, 16, 8, OUT, 1),
        Rectangle(2, 8, 0, 6, OUT, 2),
        Rectangle(5, 13, 8, 8, OUT, 1),
    )


def test_resident_state_has_one_offset_before_the_program():
    """State w and v are there throughout, and no other block overlaps them.

    Memory-mapped w, v and w+ have no offset.
    """
    graph, found = state_step(), parse_plan(HELD, "blocking", resident=(1, 3))
    offsets = ((-1, OUT, 1, 0), (-1, OUT, 3, 8), (0, OUT, 0, 16), (2, OUT, 2, 16), (5, OUT, 4, 24))
    arena = Arena(bytes=40, lower_bound_bytes=40, alignment=8, offsets=offsets)
    check = check_arena(graph, found, arena)
    assert check.violations == ()
    assert check.rectangles[:2] == (Rectangle(-1, 9, 0, 8, OUT, 1), Rectangle(-1, 9, 8, 3, OUT, 3))
    over = replace(arena, offsets=changed(offsets, 4, (5, OUT, 4, 0)))
    (first, *_) = check_arena(graph, found, over).violations
    assert "tensor 'g' is at 0 to 9 and overlaps tensor 'w' at 0 to 8" in first
    graph = state_step()
    found = parse_plan(HELD.replace("f4", "f4 o5 f5"), "blocking", resident=(), memory_mapped=True)
    offsets = ((0, OUT, 0, 0), (2, OUT, 2, 0), (5, OUT, 4, 16))
    arena = Arena(bytes=32, lower_bound_bytes=24, alignment=8, offsets=offsets)
    assert check_arena(graph, found, arena).violations == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bytes": 32}, "arena: bytes is 24, stated is 32"),
        ({"lower_bound_bytes": 16}, "arena: lower_bound_bytes is 24, stated is 16"),
        ({"offsets": changed(OF_SKIP, 4)}, "instruction 7: tensor 'a' has no offset"),
        ({"offsets": changed(OF_SKIP, 2)}, "the workspace of 'b' has no offset"),
        ({"offsets": (*OF_SKIP, OF_SKIP[0])}, "instruction 0: tensor 'a' has two offsets"),
        (
            {"offsets": (*OF_SKIP, (7, OUT, 1, 0))},
            "tensor 'b' has an offset, but the program makes",
        ),
        ({"offsets": (*OF_SKIP, (-1, OUT, 1, 0))}, "before the program: tensor 'b' has an offset"),
        ({"offsets": (*OF_SKIP, (5, W, 2, 0))}, "the workspace of 'c' has an offset, but"),
        ({"offsets": changed(OF_SKIP, 0, (0, OUT, 0, 12))}, "is at 12, no multiple of 8"),
        ({"offsets": changed(OF_SKIP, 1, (2, OUT, 1, 8))}, "'b' is at 8 to 14 and overlaps"),
        ({"offsets": changed(OF_SKIP, 2, (2, W, 1, 0))}, "workspace of 'b' is at 0 to 1 and"),
        ({"offsets": changed(OF_SKIP, 2, (2, W, 1, 8))}, "overlaps tensor 'a' at 8 to 12"),
        ({"offsets": changed(OF_SKIP, 5, (9, OUT, 3, 24))}, "'d' ends at 27, outside of the 24"),
        ({"offsets": changed(OF_SKIP, 5, (9, OUT, 3, 8))}, "overlaps tensor 'c' at 8 to 13"),
    ],
)
def test_every_broken_rule_is_told(changes, words):
    """One change causes one violation, with its place."""
    violations = check_arena(*of_skip(**changes)).violations
    assert any(words in violation for violation in violations), violations


def test_who_may_lie_over_whom():
    """An in-place output at another address than its input is wrong, even if it fits.

    If x is read again later, y may not overlap it. No block overlaps w+ while it is paged out.
    A node computed again does not write over its old output while it runs.
    """
    moved = changed(OF_PAGED, 2, (2, OUT, 2, 40))
    (violation,) = check_arena(*of_state(offsets=moved, bytes=48)).violations
    assert violation == (
        "arena: instruction 2: tensor 'y' is at 40, but is made in place of tensor 'x' at 0"
    )
    graph, _, arena = of_state()
    longer = parse_plan(STORED.replace("c2 f0", "c2 o2 f0"), "blocking", resident=())
    offsets = tuple((p + (p > 2), *rest) for p, *rest in OF_PAGED)
    check = check_arena(graph, longer, replace(arena, offsets=offsets))
    assert any("'y' is at 0 to 6 and overlaps tensor 'x'" in words for words in check.violations)
    after = operation("z", output_bytes=8, inputs=("g",))
    graph = Graph(name="after", nodes=(*state_step().nodes, after))
    found = parse_plan("c0 c1 c2 f0 f1 i1 c3 c4 f2 f3 c5 c6 f4 o5 f5", "blocking", resident=())
    arena = of_state(offsets=(*OF_PAGED, (11, OUT, 6, 8)))[-1]
    violations = check_arena(graph, found, arena).violations
    assert any("tensor 'z' is at 8 to 16 and overlaps tensor 'w' at 8" in one for one in violations)
    offsets = ((0, OUT, 0, 0), (1, OUT, 0, 0), (2, OUT, 1, 8), (3, OUT, 2, 16), (5, OUT, 3, 8))
    arena = Arena(bytes=24, lower_bound_bytes=24, alignment=8, offsets=offsets)
    (violation,) = check_arena(
        skip_graph(), parse_plan("c0 c0 c1 c2 f1 c3 f0 f2 f3"), arena
    ).violations
    assert "instruction 1: tensor 'a' is at 0 to 4 and overlaps tensor 'a' at 0 to 4" in violation


def test_budget_and_graph_are_those_of_the_plan():
    """The budget of the plan is for the block; a plan of another graph is refused."""
    graph, found, arena = of_skip()
    (violation,) = check_arena(graph, replace(found, ram_budget_bytes=20), arena).violations
    assert violation == "arena: 24 B are 4 B above the 20 B that tensors may use"
    with pytest.raises(PlanError, match="sha256"):
        check_arena(graph, replace(found, identity=GraphIdentity.from_graph(state_step())), arena)


# -- files -------------------------------------------------------------------------------------
def document(**changes):
    """Return a plan file with addresses, which are changed."""
    graph, found, arena = of_skip()
    named = replace(found, identity=GraphIdentity.from_graph(graph))
    content = named.to_dict(arena=arena)
    content["arena"] = {key: v for key, v in (content["arena"] | changes).items() if v is not ...}
    return content


def test_addresses_are_saved_and_loaded(tmp_path):
    """They are the last key of the plan file; other plan files have no such key."""
    graph, found, arena = of_skip()
    path, named = (
        tmp_path / "skip.plan.json",
        replace(found, identity=GraphIdentity.from_graph(graph)),
    )
    named.save(path, arena=arena)
    assert Arena.load(path) == arena == load_document(path).arena
    assert Plan.load(path) == found
    content = json.loads(path.read_text(encoding="utf-8"))
    assert list(content)[-1] == "arena"
    assert content["arena"]["offsets"][2] == [2, "workspace", 1, 16]
    named.save(path)
    assert load_document(path).arena is None
    with pytest.raises(PlanError, match=r"arena: missing; 'poetmodel plan --arena'"):
        Arena.load(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bytes": -1}, "arena.bytes"),
        ({"bytes": ...}, "arena.bytes: missing"),
        ({"size": 1}, "arena.size: unknown key"),
        ({"lower_bound_bytes": "24"}, "arena.lower_bound_bytes"),
        ({"alignment": 12}, "arena.alignment: expected a power of two, got 12"),
        ({"alignment": 0}, "arena.alignment"),
        ({"offsets": {}}, "arena.offsets"),
        ({"offsets": [[0, "output", 0]]}, "arena.offsets[0]: expected a list of a position"),
        ({"offsets": [[0, "input", 0, 0]]}, "arena.offsets[0][1]: expected 'output' or 'workspace"),
        ({"offsets": [[-2, "output", 0, 0]]}, "arena.offsets[0][0]"),
        ({"offsets": [[13, "output", 0, 0]]}, "[0][0]: expected a position in the program of 13"),
        ({"offsets": [[0, "output", 4, 0]]}, "[0][2]: expected the number of one of the 4 tensors"),
        ({"offsets": [[0, "workspace", 4, 0]]}, "[0][2]: expected the number of one of the 4 node"),
        ({"offsets": [[0, "output", 0, -8]]}, "arena.offsets[0][3]"),
        ({"offsets": [[0, "output", 0, True]]}, "arena.offsets[0][3]"),
    ],
)
def test_faults_of_addresses_are_told_by_field(changes, words):
    """The message names the file, the key and the accepted values."""
    with pytest.raises(PlanError) as caught:
        load_document("skip.plan.json", json.dumps(document(**changes)).encode())
    assert all(fault.startswith("skip.plan.json: ") for fault in caught.value.faults)
    assert any(words in fault for fault in caught.value.faults), caught.value.faults


def test_negative_sizes_and_offsets_are_told_together():
    """All faults are named at once; the alignment is a power of two."""
    with pytest.raises(PlanError) as caught:
        Arena(bytes=-1, lower_bound_bytes=0, offsets=((0, OUT, 0, -16),))
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["bytes", "offsets[0][3]"]
    for alignment in (0, -4, 12):
        with pytest.raises(PlanError, match="alignment"):
            Arena(bytes=0, lower_bound_bytes=0, alignment=alignment, offsets=())
