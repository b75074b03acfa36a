"""About how much RAM a fractional answer asks for, stage by stage."""

from __future__ import annotations

import numpy as np
import pytest

from instances import random_instances, seeded
from lazy_rounds import random_rows, relaxation_of
from poetmodel.graph import checkpoint_all_profile
from poetmodel.model.grouping import Grouping
from poetmodel.problem import Problem
from poetmodel.solver.lazy.fractional import stage_loads
from worked import comb_graph, even_costs, skip_problem


def test_keeping_everything_asks_for_what_checkpoint_all_does() -> None:
    """Whatever the groups: every tensor is kept to its last use, and loads are the same bytes."""
    for number, problem in enumerate(random_instances(80, (1, 12), seed=51, recompute=False)):
        relaxation = relaxation_of(problem, random_rows(seeded(f"all/{number}"), problem))
        x = np.zeros(relaxation.form.n_columns)
        x[list(relaxation.kept.values())] = 1.0
        expected = checkpoint_all_profile(problem.graph)
        assert stage_loads(relaxation, x).tolist() == pytest.approx(expected), number


def test_half_a_tensor_asks_for_half_its_bytes() -> None:
    """Of `a` (4 B), kept over row 2 by halves and had again by halves in stage 3, half crosses."""
    relaxation = relaxation_of(skip_problem(), Grouping(4, frozenset({2})))
    x = np.zeros(relaxation.form.n_columns)
    for share, crossing in ((0.0, 11), (0.5, 13), (1.0, 15)):
        x[relaxation.kept[0, 0]] = share
        x[relaxation.recomputed[1, 0]] = 1 - share
        assert stage_loads(relaxation, x).tolist() == [4, 10, crossing, 12]


def test_what_a_group_brings_back_is_there_from_its_first_reader_on() -> None:
    """`f1`, made again in the group of stages 4-5, is there for `g1` in 4, `f0` for `g0` in 5.

    In the comb of three teeth f0 f1 f2 have 4 B each and g2 g1 g0 1 B each.
    """
    graph = comb_graph(3)
    problem = Problem(graph, even_costs(graph, page_in=None, page_out=None), ram=9)
    relaxation = relaxation_of(problem, Grouping(6, frozenset({3})))
    x = np.zeros(relaxation.form.n_columns)
    x[relaxation.recomputed[1, 0]] = x[relaxation.recomputed[1, 1]] = 1.0
    assert stage_loads(relaxation, x).tolist() == [4, 8, 8, 5, 6, 6]
    # Kept through instead: beside f2 and g2 as well.
    whole = np.zeros(relaxation.form.n_columns)
    whole[list(relaxation.kept.values())] = 1.0
    assert stage_loads(relaxation, whole).tolist() == [4, 8, 12, 13, 10, 6]
