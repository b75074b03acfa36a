"""Schedules as values: order, identity, and the checkpoint-all schedule."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poetmodel.errors import ScheduleError
from poetmodel.graph import Graph, operation
from poetmodel.schedule import RELATIONS, GraphIdentity, Schedule, checkpoint_all, simulate
from strategies import graphs


@pytest.fixture
def skip() -> Graph:
    """Return x, y(x), z(y), w(z, x); x lies on storage."""
    return Graph(
        name="skip",
        nodes=(
            operation("x", output_bytes=8, on_aux=True),
            operation("y", output_bytes=8, inputs=("x",)),
            operation("z", output_bytes=8, inputs=("y",)),
            operation("w", output_bytes=1, inputs=("z", "x")),
        ),
    )


def test_pairs_are_put_in_order() -> None:
    """Pairs in any order, from any iterable, twice or as lists, become one sorted tuple."""
    pairs: Any = [[2, 2], (0, 0), (1, 1), (2, 2), (2, 0)]
    schedule = Schedule(R=pairs, S_RAM=iter([(2, 1), (1, 0)]))  # type: ignore[arg-type]
    assert schedule.R == ((0, 0), (1, 1), (2, 0), (2, 2))
    assert schedule.S_RAM == ((1, 0), (2, 1))
    assert (schedule.S_AUX, schedule.M_in, schedule.M_out) == ((), (), ())


def test_numpy_integers_become_plain_ones() -> None:
    """Indices out of numpy arrays are stored as Python integers, which JSON can hold."""
    schedule = Schedule(R=tuple(zip(np.arange(2), np.arange(2), strict=True)))
    assert schedule.R == ((0, 0), (1, 1))
    assert all(type(number) is int for pair in schedule.R for number in pair)


@pytest.mark.parametrize("pairs", [((0, 0.0),), ((0,),), ((0, 1, 2),), (0, 1), ("ab",), None])
def test_anything_but_pairs_of_whole_numbers_is_refused(pairs: Any) -> None:
    """A fraction is never rounded to an index; the error names the relation."""
    with pytest.raises(ScheduleError, match="M_in: expected pairs of whole numbers"):
        Schedule(R=(), M_in=pairs)


def test_schedules_are_values(skip: Graph) -> None:
    """Equal relations are equal schedules, whichever graph they name; they hash, and stay."""
    one = checkpoint_all(skip)
    other = replace(one, identity=None)
    assert one == other
    assert hash(one) == hash(other)
    assert one != replace(one, M_out=((0, 0),))
    assert pickle.loads(pickle.dumps(one)) == one  # noqa: S301 - made on the line itself
    with pytest.raises(FrozenInstanceError):
        one.R = ()  # type: ignore[misc]


def test_identity_names_the_graph(skip: Graph) -> None:
    """A schedule made for a graph carries its name, hash and the names of nodes and tensors."""
    identity = checkpoint_all(skip).identity
    assert identity == GraphIdentity.of(skip)
    assert identity is not None
    assert (identity.name, identity.sha256) == ("skip", skip.sha256)
    assert identity.nodes == identity.tensors == ("x", "y", "z", "w")


def test_checkpoint_all_keeps_to_the_last_use(skip: Graph) -> None:
    """Tensor x to stage 3, y to 2, z to 3, w nowhere; x is listed on storage after its node."""
    schedule = checkpoint_all(skip)
    assert schedule.R == ((0, 0), (1, 1), (2, 2), (3, 3))
    assert schedule.S_RAM == ((1, 0), (2, 0), (2, 1), (3, 0), (3, 2))
    assert schedule.S_AUX == ((1, 0), (2, 0), (3, 0))
    assert (schedule.M_in, schedule.M_out) == ((), ())


@given(graph=graphs(on_aux=True), data=st.data())
@settings(deadline=None)
def test_order_of_pairs_means_nothing(graph: Graph, data: st.DataObject) -> None:
    """A schedule is a set of entries: shuffled relations are the same schedule to the judge."""
    schedule = checkpoint_all(graph)
    shuffled = Schedule(
        **{name: tuple(data.draw(st.permutations(getattr(schedule, name)))) for name in RELATIONS}
    )
    assert shuffled == schedule
    assert simulate(graph, None, shuffled) == simulate(graph, None, schedule)
