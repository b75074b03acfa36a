"""Counts of the result table."""

from __future__ import annotations

from poetmodel.cli.summary import Treatment
from poetmodel.graph import Graph, Node, Tensor, operation
from poetmodel.schedule import Schedule, checkpoint_all


def graph() -> Graph:
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


def test_everything_kept_counts_tensors_with_readers() -> None:
    """Kept to the last use: a, pair, mask, b; not a tensor that nobody reads."""
    done = Treatment.of(graph(), checkpoint_all(graph()))
    assert (done.kept, done.kept_bytes) == (4, 10 + 3 + 4 + 5)
    assert (done.recomputed, done.recomputed_bytes, done.paged_out, done.paged_in) == (0, 0, 0, 0)


def test_paged_and_recomputed_tensors_are_not_kept() -> None:
    """Computing a node again makes all its tensors anew; a paged tensor is not kept."""
    schedule = Schedule(
        R=((0, 0), (1, 1), (2, 2), (3, 1), (3, 3)),
        M_out=((0, 0),),
        M_in=((2, 0), (3, 0)),
    )
    done = Treatment.of(graph(), schedule)
    assert (done.recomputed, done.recomputed_bytes) == (1, 3 + 4)
    assert (done.paged_out, done.paged_in) == (1, 2)
    assert (done.kept, done.kept_bytes) == (1, 5)
