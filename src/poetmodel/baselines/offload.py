"""Every tensor that the backward pass reads goes to storage and comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poetmodel.baselines.planned import carry_out, fitting, gaps_of
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import Phase

if TYPE_CHECKING:
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule

_BACKWARD = frozenset((Phase.BACKWARD, Phase.UPDATE))


def offload_all(problem: Problem) -> Schedule:
    """Page out every tensor that is saved for the backward pass, page it in at each use there.

    Parameters
    ----------
    problem : Problem
        What to schedule. Nothing is recomputed.

    Returns
    -------
    Schedule
        Within the RAM budget.

    Raises
    ------
    MethodNotApplicableError
        If nothing can be paged, if the graph has no backward pass, or if that is not enough for
        the budget.

    Notes
    -----
    Saved is what input, forward and loss nodes make and backward or update nodes read. It stays in
    RAM until its last use before the backward pass, is paged in for each node that reads it there,
    and stays no longer than the next node if that one reads it too. The method looks at no budget;
    gradients stay in RAM from the first to the last use, as do tensors of 0 bytes. Samples that lie
    on storage from the start are not written. Takes linear time.

    References
    ----------
    Rhu, Gimelshein, Clemons, Zulfiqar, Keckler: vDNN. MICRO 2016, section 3, policy "vDNN-all";
    ``torch.autograd.graph.save_on_cpu`` does the same with what autograd saves.
    """
    graph = problem.graph
    if not problem.can_page:
        msg = "it pages every saved tensor out, and the problem allows no paging"
        raise MethodNotApplicableError(msg)
    phases = [node.phase for node in graph.nodes]
    if _BACKWARD.isdisjoint(phases):
        msg = "it pages what the backward pass reads, and the graph has no backward nodes"
        raise MethodNotApplicableError(msg)
    saved = {
        gap: True
        for gap in gaps_of(graph)
        if graph.tensor_bytes[gap.tensor]
        and phases[graph.node_of[gap.tensor]] not in _BACKWARD
        and phases[gap.after] in _BACKWARD
    }
    return fitting(problem, carry_out(problem, saved))
