"""Methods beside implementations that were written from the papers alone, on small problems.

They share the simulator with the package, and the executor of a plan of gaps, but no decision.
"""

import itertools
import math
from functools import cache

import pytest

from kit.instances import make_rng, random_training_graph
from kit.rotation import mark_seeds_except, parametrize_parts
from kit.worked import chain_costs, training_chain
from poetmodel.baselines import recompute_once
from poetmodel.baselines.capuchin import capuchin
from poetmodel.baselines.paging import IdleInterval, execute_evictions
from poetmodel.baselines.pofo import pofo
from poetmodel.baselines.saved_sets import min_cut
from poetmodel.device import Costs
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.planner import verify
from poetmodel.problem import Problem

CLOSE = 1.05


def priced(graph, seed):
    """Return costs of nodes and transfers that are all different."""
    rng = make_rng(seed)
    seconds = [rng.uniform(1, 10) for _ in graph.nodes]
    pages = [(rng.uniform(1, 12), rng.uniform(1, 12)) for _ in graph.tensors]
    return Costs.from_arrays(
        graph, compute_time_s=seconds, compute_energy_j=seconds, page_in=pages, page_out=pages
    )


# -- Capuchin (ASPLOS 2020, section 4) -------------------------------------------------------------
class TensorAccesses:
    """Capuchin from its paper: a list of accesses for each tensor, free times, MSPS."""

    def __init__(self, problem, rule):
        self.problem, self.rule, graph = problem, rule, problem.graph
        table, energy = problem.table, problem.energy.coefficients
        joules = rule == "energy"
        self.compute = energy.compute if joules else table.compute_time_s
        self.page_in = energy.page_in if joules else table.page_in_time_s
        self.page_out = energy.page_out if joules else table.page_out_time_s
        self.accesses = {
            i: (graph.node_of[i], *users) for i, users in enumerate(graph.users_of) if users
        }
        self.out = {}
        """How tensors leave between two accesses: ``swap`` or ``again``."""

    def excess(self):
        """Return how much of each step is above the budget by the plan so far."""
        graph = self.problem.graph
        found = []
        for t, node in enumerate(graph.nodes):
            held = sum(
                graph.tensor_bytes[i]
                for i, (first, *_, last) in self.accesses.items()
                if first < t <= last and not self.is_away(i, t)
            )
            found.append(held + node.output_bytes + node.workspace_bytes)
        return [load - self.problem.usable_ram_bytes for load in found]

    def is_away(self, i, t):
        """Return whether a tensor is out of RAM in a step by the plan."""
        return any(i == j and a < t < b for j, a, b in self.out)

    def swap_overhead(self, i, a, b):
        """Return the delay of a swap; if negative, it is minus the free time."""
        written = self.rule != "published" and any(
            i == j and how == "swap" for (j, *_), how in self.out.items()
        )
        moves = self.page_in[i] + (0.0 if written else self.page_out[i])
        hidden = sum(self.problem.table.compute_time_s[a + 1 : b])
        return moves - (hidden if self.rule == "published" else 0.0)

    def recomputation(self, i, t, met):
        """Return the time to recompute a tensor in step `t`, with all of its missing inputs."""
        graph = self.problem.graph
        k = graph.node_of[i]
        if not graph.nodes[k].recomputable:
            return math.inf
        met.add(k)
        total = self.compute[k]
        for p in graph.inputs_of[k]:
            there = self.accesses[p][-1] >= t and not self.is_away(p, t)
            swapped = any(p == j and how == "swap" for (j, *_), how in self.out.items())
            if swapped and not there:
                total += self.page_in[p]
            elif not there and graph.node_of[p] not in met:
                total += self.recomputation(p, t, met)
        return total

    def candidates(self):
        """Yield the gaps that cross a step above the budget."""
        over = [load > 0 for load in self.excess()]
        for i, times in self.accesses.items():
            for a, b in itertools.pairwise(times):
                crosses = self.problem.graph.tensor_bytes[i] and any(over[a + 1 : b])
                if crosses and (i, a, b) not in self.out:
                    yield i, a, b

    def plan(self):
        """Return the schedule; None if the recomputed tensors do not fit, which is not planned."""
        order = sorted(self.candidates(), key=lambda gap: self.swap_overhead(*gap))
        for gap in order:
            if self.swap_overhead(*gap) <= 0 and gap in set(self.candidates()):
                self.out[gap] = "swap"
        while max(self.excess()) > 0:
            best = None
            for gap in self.candidates():
                swap = self.swap_overhead(*gap)
                again = self.recomputation(gap[0], gap[2], set())
                saving = self.problem.graph.tensor_bytes[gap[0]] / max(min(swap, again), 1e-12)
                if best is None or saving > best[0]:
                    best = saving, gap, "swap" if swap <= again else "again"
            if best is None:
                return None
            self.out[best[1]] = best[2]
        pages = {IdleInterval(*gap): how == "swap" for gap, how in self.out.items()}
        schedule = execute_evictions(self.problem, pages)
        peak = verify(self.problem, schedule).simulation.peak_ram_bytes
        return schedule if peak <= self.problem.usable_ram_bytes else None


@pytest.mark.parametrize("rule", ["published", "time", "energy"])
@parametrize_parts(3)
def test_capuchin_is_as_good_as_an_independent_one(rule, part):
    """Over 60 training graphs at three budgets; where the paper's plan fits as it is."""
    compared = 0
    for seed in part.select(range(60)):
        graph = random_training_graph(make_rng(f"capuchin/{seed}"), 6)
        costs = priced(graph, f"capuchin costs/{seed}")
        for share in (0.3, 0.6, 0.9):
            least, most = floor(graph).bytes, checkpoint_all_peak_bytes(graph)
            ram = round(least + share * (most - least))
            problem = Problem(graph, costs, ram=ram, deadline_counts="serial")
            expected = TensorAccesses(problem, rule).plan()
            if expected is None:
                continue
            found = capuchin(problem, rule, refined=False)
            paid, due = (
                verify(problem, schedule).simulation.overhead_j for schedule in (found, expected)
            )
            assert due / CLOSE - 1e-9 <= paid <= due * CLOSE + 1e-9
            compared += 1
    assert compared > part.divide(60)


# -- a minimum cut with a knapsack (PyTorch's partitioner) -----------------------------------------
def every_subset(items):
    """Yield all subsets."""
    for count in range(len(items) + 1):
        yield from map(frozenset, itertools.combinations(items, count))


def saved_by_trying(graph, once, forward):
    """Return the fewest bytes from which the backward pass is reached without some nodes."""
    free = {i for i, k in enumerate(graph.node_of) if k in forward}

    def needs_none_of_them(saved):
        todo = {
            i
            for k, n in enumerate(graph.nodes)
            if n.phase == "backward"
            for i in graph.inputs_of[k]
        }
        while todo:
            i = todo.pop()
            if i in free and i not in saved:
                if graph.node_of[i] in once:
                    return False
                todo |= set(graph.inputs_of[graph.node_of[i]])
        return True

    sets = (saved for saved in every_subset(sorted(free)) if needs_none_of_them(saved))
    return min(sets, key=lambda saved: (sum(graph.tensor_bytes[i] for i in saved), sorted(saved)))


@pytest.mark.parametrize("seed", mark_seeds_except(range(12), range(2)))
def test_minimum_cuts_are_as_good_as_those_by_trying_everything(seed):
    """Knapsacks and cuts by exhaustive search, 201 of each, and the quickest schedule that fits."""
    rng = make_rng(f"independent cut/{seed}")
    graph = training_chain([rng.randint(20, 200) for _ in range(6)], gradient_bytes=7)
    costs = priced(graph, f"cut costs/{seed}")
    time_s = Problem(graph, costs, ram="100%").table.compute_time_s
    forward = [k for k, n in enumerate(graph.nodes) if n.phase in ("forward", "loss")]
    size = {k: graph.nodes[k].output_bytes for k in forward}
    chosen = set()
    for n in range(201):
        room = sum(size.values()) * n // 200
        fit = (once for once in every_subset(forward) if sum(size[k] for k in once) <= room)
        chosen.add(max(fit, key=lambda once: sum(time_s[k] for k in once)))
    schedules = [recompute_once(graph, saved_by_trying(graph, once, forward)) for once in chosen]
    for share in ("90%", "75%", "60%"):
        problem = Problem(graph, costs, ram=share)
        found = [verify(problem, schedule).simulation for schedule in schedules]
        able = [s.compute_s for s in found if s.peak_ram_bytes <= problem.usable_ram_bytes]
        if not able:
            with pytest.raises(MethodNotApplicableError):
                min_cut(problem)
            continue
        again_s = verify(problem, min_cut(problem)).simulation.compute_s - sum(time_s)
        due_s = min(able) - sum(time_s)
        assert due_s / CLOSE - 1e-9 <= again_s <= due_s * CLOSE + 1e-9


# -- POFO (NeurIPS 2021, section 4) where transfers block the core ---------------------------------
class OneActionEach:
    """A chain of layers ``1..n``, in bytes and seconds: every choice of one action per layer."""

    def __init__(self, sizes, forward, moves):
        self.sizes, self.forward, self.moves = sizes, forward, moves
        self.last = len(sizes) - 1
        self.again = cache(self._again)

    def gradient(self, s):
        """Return the bytes of the gradient that part `s` reads."""
        return 1 if s <= self.last else 0

    def part(self, s):
        """Return the memory of part `s` besides the state before it: tape and two gradients."""
        return self.sizes[s] + self.gradient(s + 1) + 1

    def _again(self, s, t, room, has):
        """Return the least time to recompute ``s..t`` for their parts by persistent checkpoints.

        The state before `s` is beside the room. The state of `t` is in it where that is there.
        """
        beside = self.gradient(t + 1) + (self.sizes[t] if has else 0)
        if s == t:
            need = max(self.part(s), 0 if has else self.sizes[s] + beside)
            return (0.0 if has else self.forward[s]) if room >= need else math.inf
        best = math.inf
        if room >= max(self.sizes[s] + beside, self.part(s)):
            best = self.forward[s] + self.again(s + 1, t, room - self.sizes[s], has)
        time_s, peak = 0.0, 0
        for cut in range(s + 1, t + 1):
            before = self.sizes[cut - 2] if cut - 1 > s else 0
            peak = max(peak, before + self.sizes[cut - 1] + beside)
            time_s += self.forward[cut - 1]
            if room < peak:
                break
            behind = self.again(cut, t, room - self.sizes[cut - 1], has)
            first = min(self.again(s, cut - 1, room, again) for again in (False, True))
            best = min(best, time_s + behind + first)
        return best

    def least(self, ram):
        """Return the minimum time in addition to a single pass; infinite if no choice fits."""
        return min(map(self.cost_within(ram), itertools.product("KORE", repeat=self.last - 1)))

    def cost_within(self, ram):
        """Return the cost of actions: keep, offload, recompute, and recompute as a run's end."""

        def cost(actions):
            if actions and actions[-1] == "R":
                return math.inf
            acts = ("K", *actions, "K")  # the sample stays; so does what the last layer makes
            kept = self.sizes[0]
            total, begin, state = 0.0, None, True
            for s in range(1, self.last + 1):
                before = 0 if state else self.sizes[s - 1]
                if kept + before + self.sizes[s] > ram:
                    return math.inf
                act = acts[s]
                if act in "RE":
                    if begin is None:
                        begin, entry = s, before if acts[s - 1] == "O" else 0
                    state = False
                    if act == "E":
                        room = ram - kept - entry
                        total += min(self.again(begin, s, room, has) for has in (False, True))
                        kept, begin, state = kept + self.sizes[s], None, True
                    continue
                if acts[s - 1] == "R" or kept + before + self.part(s) > ram:
                    return math.inf
                if act == "K":
                    kept, state = kept + self.sizes[s], True
                else:
                    total, state = total + self.moves[s], False
            return total

        return cost


@pytest.mark.parametrize("seed", mark_seeds_except(range(10), range(1)))
def test_pofo_is_as_good_as_every_choice_of_actions(seed):
    """Where transfers block the core: the same time as the best of all choices, to 5 %."""
    rng = make_rng(f"independent pofo/{seed}")
    sizes = [rng.randint(1, 9) for _ in range(6)]
    graph = training_chain(sizes, gradient_bytes=1, loss=False)
    seconds = [rng.randint(1, 20) for _ in graph.nodes]
    costs = chain_costs(graph, seconds=seconds, page_s=1, mode="blocking")
    moves = [2.0 * size for size in sizes]
    chain = OneActionEach(sizes, [float(s) for s in seconds[:6]], moves)
    compared = 0
    for ram in range(floor(graph).bytes, checkpoint_all_peak_bytes(graph) + 1):
        problem = Problem(graph, costs, ram=ram, minimize="time")
        expected = chain.least(ram)
        if expected == math.inf:
            continue
        found = verify(problem, pofo(problem)).simulation.time_s - sum(seconds)
        assert expected / CLOSE - 1e-9 <= found <= expected * CLOSE + 1e-9
        compared += 1
    assert compared
