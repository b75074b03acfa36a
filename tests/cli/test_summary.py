"""Counts of the result table."""

from poetmodel.cli.summary import treatment
from poetmodel.graph import Graph, Node, Tensor, operation
from poetmodel.schedule import Schedule, checkpoint_all, simulate


def graph():
    """Return a graph in which ``a`` is read at once and late, ``pair`` makes two tensors.

    Tensors: 0 a (10 B), 1 pair (3 B), 2 mask (4 B), 3 b (5 B), 4 last (1 B, never read).
    """
    pair = Node(
        name="pair",
        op="op",
        phase="forward",
        inputs=("a",),
        outputs=(Tensor(name="pair", bytes=3), Tensor(name="mask", bytes=4)),
    )
    return Graph(
        name="counts",
        nodes=(
            operation("a", output_bytes=10),
            pair,
            operation("b", output_bytes=5, inputs=("pair", "mask")),
            operation("last", output_bytes=1, inputs=("b", "a")),
        ),
    )


def told(schedule, of=None):
    """Return the rows about what a schedule does, by name."""
    known = of or graph()
    facts = treatment(known, schedule, simulate(known, None, schedule))
    return {fact.name: (fact.text, fact.note) for fact in facts}


def test_everything_kept_counts_tensors_with_readers():
    """Kept to the last use: a, pair, mask, b, 22 B; not a tensor that nobody reads."""
    found = told(checkpoint_all(graph()))
    kept, size = found.pop("kept")
    assert kept == "4 tensors"
    assert size.startswith("22 B that stay in RAM")
    assert found == {
        "recomputed": ("nothing", "0 B of outputs"),
        "paged out": ("nothing", "0 B written"),
        "paged in": ("nothing", "0 B read"),
    }


def test_paged_and_recomputed_tensors_are_not_kept():
    """Computing a node again makes all its tensors anew; a paged tensor is not kept."""
    schedule = Schedule(
        R=((0, 0), (1, 1), (2, 2), (3, 1), (3, 3)), M_out=((0, 0),), M_in=((2, 0), (3, 0))
    )
    found = told(schedule)
    assert found["recomputed"] == ("once", "7 B of outputs")
    assert found["paged out"] == ("once", "10 B written")
    assert found["paged in"] == ("2 times", "20 B read")
    kept, size = found["kept"]
    assert kept == "1 tensor"
    assert size.startswith("5 B that stay in RAM")
