"""Proofs by row generation, begun from any schedule, bound and rows."""

from poetmodel.solver import lazy
from poetmodel.solver.lazy.session import Session
from poetmodel.solver.search import Search


def prove(problem, request, *, start=None, first_grouping=None):
    """Prove a bound by row generation; return the search."""
    search = Search(problem=problem, request=request, best=start)
    lazy.prove(search, first_grouping=first_grouping)
    return search


def make_session(problem, request, start=None, **fields):
    """Return the session of a search that begins with a schedule, or with none."""
    return Session(Search(problem=problem, request=request, best=start, **fields))
