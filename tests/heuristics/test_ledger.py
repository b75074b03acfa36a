"""RAM from links alone: by hand, and equal after all changes are undone."""

from kit.instances import make_rng, random_step
from kit.worked import comb_graph
from poetmodel.graph import checkpoint_all_profile
from poetmodel.heuristics.ledger import RamLedger
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.heuristics.restorations import PAGE_IN, RECOMPUTE, STORAGE_HOME, Restoration
from poetmodel.problem.working_graph import make_working_graph


def ledger_of(graph):
    """Count keep-all."""
    ledger = RamLedger(graph, make_working_graph(graph, read_in_place=False))
    ledger.count_links()
    return ledger


def test_a_step_changes_the_rows_that_count_its_links():
    """`f0` of the comb, read in stages 1 and 5, is not in rows 2 to 4 if it is restored in 5."""
    ledger = ledger_of(comb_graph(3))
    kept = [4, 8, 12, 13, 10, 6]
    assert ledger.row_bytes.tolist() == kept
    for is_recomputation in (True, False):
        ledger.change_step(5, 0, is_recomputation=is_recomputation, is_added=True)
        assert ledger.row_bytes.tolist() == [4, 8, 8, 9, 6, 6]
        ledger.change_step(5, 0, is_recomputation=is_recomputation, is_added=False)
        assert ledger.row_bytes.tolist() == kept
    ledger.change_step(3, 0, is_recomputation=True, is_added=True)
    assert ledger.row_bytes.tolist() == [4, 8, 8, 13, 10, 6]
    assert ledger.peak(3) == 13


def test_restorations_at_once_count_as_one_after_another():
    """Rows, peaks and intervals of random graphs, with homes on storage and page-ins."""
    n_restorations = 0
    for number in range(60):
        rng = make_rng(f"ledger/at once/{number}")
        graph = random_step(rng, (3, 10), max_bytes=50)
        n = len(graph.nodes)
        restorations = [
            Restoration.at_its_node(graph, i, STORAGE_HOME)
            for i in graph.state_tensors
            if rng.random() < 0.5
        ]
        for t in range(n):
            restorations += [Restoration(t, k, RECOMPUTE) for k in range(t) if rng.random() < 0.2]
            restorations += [
                Restoration(t, i, PAGE_IN)
                for i, k in enumerate(graph.node_of)
                if k < t and rng.random() < 0.1
            ]
        at_once, changed = PartialSchedule(graph, restorations), PartialSchedule(graph)
        for restoration in rng.sample(restorations, len(restorations)):
            changed.add(restoration)
        assert at_once.row_bytes.tolist() == changed.row_bytes.tolist()
        assert at_once.peaks().tolist() == changed.peaks().tolist()
        assert at_once.intervals == changed.intervals
        n_restorations += len(restorations)
    assert n_restorations > 500


def test_changes_in_any_order_leave_nothing_behind():
    """Of the rows of random graphs, with state, once all steps and homes are as before."""
    n_changes = 0
    for number in range(60):
        rng = make_rng(f"ledger/{number}")
        graph = random_step(rng, (3, 10), max_bytes=50)
        ledger = ledger_of(graph)
        assert ledger.row_bytes.tolist() == list(checkpoint_all_profile(graph))
        state, n = graph.state_tensors, len(graph.nodes)
        steps = [(t, k, True) for t in range(n) for k in range(t) if rng.random() < 0.2]
        homes = [i for i in state if rng.random() < 0.5]
        for t, k, is_recomputation in steps:
            ledger.change_step(t, k, is_recomputation=is_recomputation, is_added=True)
        for i in homes:
            ledger.change_home(i, to_storage=True)
        assert (ledger.peaks() >= ledger.row_bytes).all()
        for t, k, is_recomputation in rng.sample(steps, len(steps)):
            ledger.change_step(t, k, is_recomputation=is_recomputation, is_added=False)
        for i in rng.sample(homes, len(homes)):
            ledger.change_home(i, to_storage=False)
        assert ledger.row_bytes.tolist() == list(checkpoint_all_profile(graph))
        assert not ledger.extra_bytes.any()
        n_changes += len(steps) + len(homes)
    assert n_changes > 200
