"""The best schedule of a small problem by exhaustive search, from the rules of execution alone.

It shares no code with simulator, formulations and planner. Best-first search over the steps
``(t, k)`` of the stages: a state is the next step, the tensors in RAM and the tensors on storage;
at a step the search tries every combination of computing, paging in and out and letting go.

Why this covers every schedule. A tensor goes after its last use in a stage (or after its own step,
where nothing in the stage uses it) unless the next stage begins with it. So at step ``k`` only the
tensors of node ``k`` and, if ``k`` is computed, its inputs can go; letting one go or holding it, at
each such step, is a choice of ``S_RAM`` of the next stage together with the later uses. Held to no
use, it is in the next ``S_RAM``. Tensors whose step lies ahead stay.

A decision is *rewarded* where an objective or a limit has it with a negative coefficient: one more
of it can be better although it serves nothing else. All sums are exact: integers, in units of the
finest binary digit that a coefficient has. What is left out, none of which can be better (where a
decision that nothing rewards is struck out of a schedule, only costs, times, bytes and RAM in use
shrink, and nothing else changes):

1. paging out after the first computation: done there, it takes no more RAM, the page-ins are the
   same, and each tensor goes out once;
2. paging out what lay on storage from the start, and paging a tensor in at a step that computes it
   anew, unless rewarded;
3. tensors that no step still ahead may read (``useful``): holding them; paging them in or out, and
   recomputing what makes no others, unless rewarded;
4. dropping an entry of ``S_AUX``: storage keeps what it has, so all of it is always listed.

State tensors: every set of them that may be resident is tried. For one such set the rest is a
problem without homes. What is resident, or read where it lies, is always there and not searched;
resident state takes its bytes off the budget. Other state is on storage from the start, and the
step of its node is its first read; nothing that reads it runs once it is replaced. What replaces
state takes no RAM, and its write-back, like the first read, is what every schedule pays. With
commits that is paid for resident state too, with erases and records.

An operator in place takes less RAM at those choices in which the input goes at its step.

Own rows that count in stages are upper limits without negative coefficients, so what is struck out
keeps them. They are counted apart.

A label that is no better than an earlier one in any sum that is minimized or limited, at the same
state, is dropped too: whatever follows the one may follow the other. A lower limit is an upper one
of the negated sum. A limit is passed, and a label comes late, with all rewards that lie ahead.
"""

import heapq
import itertools
from fractions import Fraction
from math import floor, lcm
from typing import NamedTuple

from poetmodel.schedule import Schedule

TOLERANCE = Fraction(1, 10**9)
"""What times and energies may be beyond a limit, relative to it."""


class Optimum(NamedTuple):
    """The least value of the minimized quantity, and a schedule that has it."""

    value: float
    """Energy [J], time [s], peak RAM or bytes written [B], with what every schedule pays; or the
    value of an own objective."""
    schedule: Schedule
    """One of the best."""


class _Move(NamedTuple):
    """What one step does, and the state after it."""

    computes: bool
    paged_in: int
    paged_out: int
    ram: int
    aux: int
    peak_bytes: int


class _Quantity(NamedTuple):
    """One summed quantity: what every schedule pays, and what each choice adds."""

    base: Fraction
    compute: list[Fraction]
    page_in: list[Fraction]
    page_out: list[Fraction]

    def times(self, weight):
        """Return a multiple."""
        columns = [[weight * value for value in column] for column in self[1:]]
        return _Quantity(weight * self.base, *columns)

    def plus(self, other):
        """Return the sum of two."""
        columns = [
            list(map(Fraction.__add__, *both)) for both in zip(self[1:], other[1:], strict=True)
        ]
        return _Quantity(self.base + other.base, *columns)


class _InStages(NamedTuple):
    """What an own row counts in stages: the weights of decisions, and how much there may be."""

    weights: dict[tuple[str, int, int], int]
    """By count, stage and node or tensor, in units of the finest digit."""
    slack: int


class _Counted(NamedTuple):
    """A quantity as a label counts it: in integers, without what every schedule pays."""

    base: Fraction
    scale: int
    """How many units are one of the quantity."""
    columns: tuple[list[int], list[int], list[int]]
    """What computing a node again, paging a tensor in, and out, add."""
    slack: int | None
    """How much may be added; None for no limit."""

    @classmethod
    def of(cls, quantity, limit=None):
        """Return a quantity that is not to exceed a limit, its tolerance included."""
        scale = lcm(*(value.denominator for column in quantity[1:] for value in column))
        columns = ([int(scale * value) for value in column] for column in quantity[1:])
        slack = None if limit is None else floor((limit - quantity.base) * scale)
        return cls(quantity.base, scale, (*columns,), slack)


class TooManyLabelsError(Exception):
    """A search took more labels than it may."""


def optimum(problem, *, most_labels=None):
    """Find the best schedule of a problem, or show that there is none (None).

    It may have about six nodes: the number of states grows as ``4 ** tensors``, and with own
    constraints the number of labels at each; five nodes, where decisions are rewarded.
    `TooManyLabelsError` is raised beyond `most_labels`, and ValueError for the meaning ``overlap``
    with a deadline or idle power: that takes a plan of transfers.
    """
    name = str(problem.minimize)
    best = None
    if not _has_generations(problem):
        return None
    for resident in _homes(problem):
        search = _Search(problem, name, resident)
        search.most_labels = most_labels
        found = search.least_ram() if name == "ram" else search.run()
        if found is not None and (best is None or found.value < best.value):
            best = found
    return best


def _has_generations(problem):
    """Return whether storage, or flash beside one that forgets, has two generations of state."""
    commit, device = problem.table.commit, problem.costs.device
    room = problem.aux_limit_bytes
    if device is not None and device.storage is not None and device.storage.volatile:
        room = room if device.flash is None else device.flash.storage_bytes
    return commit is None or room is None or 2 * commit.generation_bytes <= room


def _homes(problem):
    """Yield every set of state tensors that may be in RAM; all of them are where nothing pages."""
    made = [node for node in problem.graph.nodes for _ in node.outputs]
    state = [i for i, node in enumerate(made) if str(node.phase) == "state"]
    if not (problem.paging and problem.table.has_storage):
        yield frozenset(state)
        return
    for size in range(len(state) + 1):
        yield from map(frozenset, itertools.combinations(state, size))


class _Search:
    """The tables of one search, for one set of resident state; tensors are bits."""

    def __init__(self, problem, minimize, resident):
        graph, table = problem.graph, problem.table
        self.most_labels = None
        self.n = len(graph.nodes)
        self.bytes = [tensor.bytes for node in graph.nodes for tensor in node.outputs]
        maker = {tensor.name: k for k, node in enumerate(graph.nodes) for tensor in node.outputs}
        self.number = {name: i for i, name in enumerate(maker)}
        self.node_number = {node.name: k for k, node in enumerate(graph.nodes)}
        number = self.number
        self.inputs = [sum(1 << number[name] for name in set(v.inputs)) for v in graph.nodes]
        self.outputs = [sum(1 << number[made.name] for made in v.outputs) for v in graph.nodes]
        self.workspace = [node.workspace_bytes for node in graph.nodes]
        self.pages = problem.paging and table.has_storage
        self.from_start = sum(self.outputs[k] for k, node in enumerate(graph.nodes) if node.on_aux)
        self._place_state(problem, resident)
        self.again = [
            problem.recompute and node.recomputable and str(node.phase) != "state"
            for node in graph.nodes
        ]
        self.pairs = [
            [
                (1 << number[x], min(self.bytes[number[y]], self.bytes[number[x]]))
                for y, x in dict(node.in_place).items()
            ]
            for node in graph.nodes
        ]
        self.steps = [(t, k) for t in range(self.n) for k in range(t + 1)]
        self.counted = list(self._label_amounts(problem, minimize))
        self.in_stages = list(self._in_stages(problem))
        self._rewards()
        self.useful = self._useful()
        self.sums = {0: 0}
        self.paid = {}
        self.ahead = [self._min_remaining_costs(of) for of in self.counted]

    def _place_state(self, problem, resident):
        """Take state and what replaces it out of the search, or put it on storage."""
        device = problem.costs.device
        storage = None if device is None else device.storage
        mapped = storage is not None and storage.memory_mapped
        nodes = problem.graph.nodes
        made = [(k, tensor) for k, node in enumerate(nodes) for tensor in node.outputs]
        state = {i for i, (k, _) in enumerate(made) if str(nodes[k].phase) == "state"}
        self.made_by = [k for k, _ in made]
        self.state = sum(1 << i for i in state)
        self.resident = resident
        self.new = {
            self.number[tensor.replaces]: i
            for i, (_, tensor) in enumerate(made)
            if tensor.replaces is not None
        }
        self.stored = state - resident
        self.read_first = frozenset() if mapped else self.stored
        apart = resident | (self.stored - self.read_first) | set(self.new.values())
        self.last = [self.n] * self.n
        """For each node the last stage in which it may run, or its state be paged in."""
        for w, new in self.new.items():
            for k, node in enumerate(nodes):
                if made[w][0] == k or made[w][1].name in node.inputs:
                    self.last[k] = min(self.last[k], made[new][0])
        seen = ~sum(1 << i for i in apart)
        self.inputs = [mask & seen for mask in self.inputs]
        self.outputs = [mask & seen for mask in self.outputs]
        self.from_start = (self.from_start | sum(1 << i for i in self.stored)) & seen
        self.home_bytes = sum(self.bytes[i] for i in resident)
        self.budget = problem.usable_ram_bytes - self.home_bytes
        self.room = problem.aux_limit_bytes
        if self.room is not None:
            self.room -= sum(self.bytes[i] for i in self.stored)

    def _useful(self):
        """Return for each step the tensors that a step after it may read to any avail."""
        after = 0
        masks = []
        for t, k in reversed(self.steps):
            masks.append(after)
            if k == t or (self.reruns(t, k) and (self.outputs[k] & after or self.pays_again[k])):
                after |= self.inputs[k]
        return masks[::-1]

    def reruns(self, t, k):
        """Return whether node `k` may be computed once more in stage `t`."""
        return self.again[k] and t <= self.last[k]

    def _label_amounts(self, problem, minimize):
        """Yield the amounts of a label: the minimized quantity first, then the limited ones."""
        total = self._totals(problem)
        time = total["compute_s"]
        if str(problem.deadline_counts) == "serial":
            time = time.plus(total["transfer_s"])
        if minimize != "ram":
            own = self._sum(total, problem.user_objective)
            by_name = {"energy": total["energy_j"], "writes": total["bytes_written"]}
            yield _Counted.of({**by_name, "time": time, "own": own}[minimize])
        for quantity, given in (
            (time, problem.deadline_s),
            (total["energy_j"], problem.energy_budget_j),
        ):
            if given is not None:
                yield _Counted.of(quantity, Fraction(given) * (1 + TOLERANCE))
        for row in problem.constraints:
            if any("@" in key for key in row.terms):
                continue
            quantity = self._sum(total, row.terms.items())
            near = max(
                map(abs, (Fraction(row.lower or 0), Fraction(row.upper or 0), quantity.base))
            )
            slack = Fraction(0) if _is_whole(row.terms.items()) else TOLERANCE * near
            if row.upper is not None:
                yield _Counted.of(quantity, Fraction(row.upper) + slack)
            if row.lower is not None:
                yield _Counted.of(quantity.times(Fraction(-1)), slack - Fraction(row.lower))

    def _in_stages(self, problem):
        """Yield the own rows that count in stages."""
        for row in problem.constraints:
            weights = {}
            for key, weight in row.terms.items():
                when, _, name = key.partition(":")
                count, _, stage = when.partition("@")
                if stage:
                    index = self.node_number if count == "recomputations" else self.number
                    weights[count, int(stage), index[name]] = Fraction(weight)
            if weights:
                scale = lcm(*(weight.denominator for weight in weights.values()))
                near = 0 if _is_whole(row.terms.items()) else TOLERANCE * abs(Fraction(row.upper))
                slack = floor((Fraction(row.upper) + near) * scale)
                yield _InStages({key: int(scale * w) for key, w in weights.items()}, slack)

    def _totals(self, problem):
        """Return the sums over all nodes and tensors, by the names that own constraints use."""
        table, device = problem.table, problem.costs.device
        idle_w = Fraction(device.idle_power_w if device is not None else 0)
        counts = str(problem.deadline_counts)
        if counts == "overlap" and (idle_w or problem.deadline_s is not None):
            msg = "the search knows no overlap of transfers and computation"
            raise ValueError(msg)
        nodes, tensors = [Fraction(0)] * self.n, [Fraction(0)] * len(self.bytes)
        compute_s = list(map(Fraction, table.compute_time_s))
        in_s = list(map(Fraction, table.page_in_time_s)) or tensors
        out_s = list(map(Fraction, table.page_out_time_s)) or tensors
        commit = table.commit
        rest_s = rest_j = committed = Fraction(0)
        if commit is not None:
            rest_s, rest_j = (
                Fraction(commit.other_cost.time_s),
                Fraction(commit.other_cost.energy_j),
            )
            committed = Fraction(commit.written_bytes)
        self.parts = frozenset(() if commit is None else commit.replacements)
        compute = _Quantity(sum(compute_s, Fraction(0)), compute_s, tensors, tensors)
        transfer = _Quantity(rest_s, nodes, in_s, out_s)
        compute_j = list(map(Fraction, table.compute_energy_j))
        in_j = list(map(Fraction, table.page_in_energy_j)) or tensors
        out_j = list(map(Fraction, table.page_out_energy_j)) or tensors
        energy = _Quantity(sum(compute_j, rest_j), compute_j, in_j, out_j)
        energy = energy.plus(compute.times(idle_w))
        if counts == "serial":
            energy = energy.plus(transfer.times(idle_w))
        sizes = list(map(Fraction, self.bytes))
        paged = [Fraction(0) if i in self.parts else size for i, size in enumerate(sizes)]
        totals = {
            "energy_j": energy,
            "compute_s": compute,
            "transfer_s": transfer,
            "bytes_written": _Quantity(committed, nodes, tensors, paged),
            "bytes_read": _Quantity(Fraction(0), nodes, sizes, tensors),
        }
        return {name: self._with_homes(quantity) for name, quantity in totals.items()}

    def _with_homes(self, of):
        """Return a quantity with the first reads and the write-backs of state on storage."""
        reads = sum(of.page_in[i] for i in self.read_first)
        written = {self.new[i] for i in self.stored if i in self.new} | self.parts
        writes = sum(of.page_out[i] for i in written)
        return of._replace(base=of.base + reads + writes)

    def _sum(self, totals, terms):
        """Return a sum over totals, each at its coefficient."""
        tensors = len(self.bytes)
        found = _Quantity(Fraction(0), *([Fraction(0)] * m for m in (self.n, tensors, tensors)))
        for key, coefficient in terms:
            weight = Fraction(coefficient)
            kind, _, name = key.partition(":")
            if key == "constant":
                found = found._replace(base=found.base + weight)
            elif kind == "recomputations":
                found.compute[self.node_number[name]] += weight
            elif kind == "resident":
                home = weight * (self.number[name] in self.resident)
                found = found._replace(base=found.base + home)
            elif kind == "page_ins":
                i = self.number[name]
                found.page_in[i] += weight
                found = found._replace(base=found.base + weight * (i in self.read_first))
            elif kind == "page_outs":
                i = self.number[name]
                found.page_out[i] += weight
                back = i in {new for w, new in self.new.items() if w in self.stored}
                found = found._replace(base=found.base + weight * back)
            else:
                found = found.plus(totals[key].times(weight))
        return found

    def _rewards(self):
        """Note which decisions a quantity rewards; page-ins and page-outs as masks."""
        columns = list(zip(*(of.columns for of in self.counted), strict=True)) or [(), (), ()]
        again, into, out = (
            [any(value < 0 for value in values) for values in zip(*column, strict=True)]
            for column in columns
        )
        self.pays_again = again or [False] * self.n
        self.pays_in = sum(1 << i for i, pays in enumerate(into) if pays)
        self.pays_out = sum(1 << i for i, pays in enumerate(out) if pays)

    def _min_remaining_costs(self, of):
        """Return for each step and the end the minimum cost of this step and all later ones."""
        compute, page_in, page_out = ([min(0, value) for value in each] for each in of.columns)
        least = [0]
        for t, k in reversed(self.steps):
            more = 0
            if k < t and self.reruns(t, k):
                more += compute[k]
            for i in _bits(self.outputs[k]) if self.pages else ():
                more += page_in[i] if k < t else page_out[i]
            least.append(least[-1] + more)
        return least[::-1]

    def size(self, mask):
        """Return the bytes of a set of tensors."""
        total = self.sums.get(mask)
        if total is None:
            low = mask & -mask
            total = self.bytes[low.bit_length() - 1] + self.size(mask ^ low)
            self.sums[mask] = total
        return total

    def least_ram(self):
        """Search for any schedule within ever less RAM, by halving what is left open."""
        low = max(
            self.size(self.inputs[k])
            + self.size(self.outputs[k])
            + self.workspace[k]
            - sum(saved for _, saved in self.pairs[k])
            for k in range(self.n)
        )
        high = self.budget
        best = None
        self.budget = high
        while low <= self.budget <= high:
            found = self.run()
            if found is None:
                if best is None:
                    return None
                low = self.budget + 1
            else:
                best = Optimum(self.home_bytes + self.peak_bytes, found.schedule)
                high = self.peak_bytes - 1
            self.budget = (low + high) // 2
        return best

    def run(self):
        """Expand labels from the least value on; the first that is through is the best."""
        order = itertools.count()
        start = (0,) * (len(self.counted) + len(self.in_stages))
        heap = [(0, 0, next(order), start, 0, self.from_start, -1)]
        trail = []
        seen = {}
        first = self.ahead[0] if self.ahead else [0] * (len(self.steps) + 1)
        while heap:
            _, minus_step, _, cost, ram, aux, parent = heapq.heappop(heap)
            step = -minus_step
            if step == len(self.steps):
                self.peak_bytes = max(move.peak_bytes for _, move in _path(trail, parent))
                return Optimum(self._value(cost), self._schedule(trail, parent))
            if not _is_new(seen.setdefault((step, ram, aux), []), cost):
                continue
            for move in self.moves(step, ram, aux):
                total = self._pay(cost, step, move)
                if total is None:
                    continue
                trail.append((parent, step, move))
                if self.most_labels is not None and len(trail) > self.most_labels:
                    raise TooManyLabelsError
                least = total[0] + first[step + 1] if total else 0
                entry = (least, -step - 1, next(order), total, move.ram, move.aux)
                heapq.heappush(heap, (*entry, len(trail) - 1))
        return None

    def _value(self, cost):
        """Return the minimized quantity of a label."""
        if not self.counted:
            return 0.0
        of = self.counted[0]
        return float(of.base + Fraction(cost[0], of.scale))

    def moves(self, step, ram, aux):
        """Yield everything that a step may do within RAM and storage."""
        t, k = self.steps[step]
        out, useful = self.outputs[k], self.useful[step]
        readable = out & aux & ~ram if self.pages and k < t else 0
        if t > self.last[k]:
            readable &= ~self.from_start  # state that is replaced
        wanted = k == t or (self.reruns(t, k) and (bool(out & useful) or self.pays_again[k]))
        if wanted and not self.inputs[k] & ~ram:
            for paged_in in _subsets(readable & self.pays_in):
                peak = self.size(ram | paged_in) + self.size(out) + self.workspace[k]
                touched = out | self.inputs[k]
                for move in self._leave(step, ram | out, aux, touched, (True, paged_in, peak)):
                    saved = sum(least for x, least in self.pairs[k] if not x & move.ram)
                    if peak - saved <= self.budget:
                        yield move._replace(peak_bytes=peak - saved)
        if k == t:
            return
        for paged_in in _subsets(readable & (useful | self.pays_in)):
            held = ram | paged_in
            peak = self.size(held)
            if peak <= self.budget:
                yield from self._leave(step, held, aux, out, (False, paged_in, peak))

    def _leave(self, step, ram, aux, touched, done):
        """Yield every choice of page-outs and of tensors let go at the end of a step."""
        computes, paged_in, peak = done
        useful = self.useful[step]
        idle = ram & ~useful
        if idle & ~touched:
            return  # held until now for nothing: the same without it is tried as well
        for paged_out in _subsets(self._writable(step)):
            stored = aux | paged_out
            if self.room is not None and self.size(stored & ~self.from_start) > self.room:
                continue
            for gone in _subsets(ram & touched & useful):
                kept = ram & ~gone & ~idle
                yield _Move(computes, paged_in, paged_out, kept, stored, peak)

    def _writable(self, step):
        """Return the tensors that may be paged out at a step."""
        t, k = self.steps[step]
        if k < t or not self.pages:
            return 0
        read = (self.useful[step] | self.pays_in) & ~self.from_start
        return self.outputs[k] & (read | self.pays_out) & ~self.state

    def _pay(self, cost, step, move):
        """Add what a move costs; None where a limit is passed, whatever follows."""
        t, k = self.steps[step]
        key = (k, move.computes and k < t, move.paged_in, move.paged_out)
        more = self.paid.get(key)
        if more is None:
            more = []
            for compute, page_in, page_out in (of.columns for of in self.counted):
                more.append(
                    (compute[k] if key[1] else 0)
                    + sum(page_in[i] for i in _bits(move.paged_in))
                    + sum(page_out[i] for i in _bits(move.paged_out))
                )
            self.paid[key] = more
        beside = [self._in_stage(row.weights, t, k, move) for row in self.in_stages]
        total = tuple(map(int.__add__, cost, (*more, *beside)))
        slacks = zip(total[len(more) :], self.in_stages, strict=True)
        if any(sum_ > row.slack for sum_, row in slacks):
            return None
        for of, sum_, ahead in zip(self.counted, total[: len(more)], self.ahead, strict=True):
            if of.slack is not None and sum_ + ahead[step + 1] > of.slack:
                return None
        return total

    def _in_stage(self, weights, t, k, move):
        """Return what a move adds to an own row that counts in stages."""
        again = weights.get(("recomputations", t, k), 0) if move.computes and k < t else 0
        return again + sum(weights.get(("page_ins", t, i), 0) for i in _bits(move.paged_in))

    def _schedule(self, trail, last):
        """Write down the moves that lead to a label."""
        relations = {name: [] for name in ("R", "S_RAM", "S_AUX", "M_in", "M_out")}
        for step, move in _path(trail, last):
            t, k = self.steps[step]
            if move.computes:
                relations["R"].append((t, k))
            relations["M_in"].extend((t, i) for i in _bits(move.paged_in))
            relations["M_out"].extend((t, i) for i in _bits(move.paged_out))
            if k == t and t + 1 < self.n:
                made = sum(self.outputs[: t + 1])
                relations["S_RAM"].extend((t + 1, i) for i in _bits(move.ram))
                relations["S_AUX"].extend((t + 1, i) for i in _bits(move.aux & made))
        made_by = self.made_by
        ends = {w: made_by[self.new[w]] if w in self.new else self.n for w in self.stored}
        relations["S_AUX"] = [(t, i) for t, i in relations["S_AUX"] if i not in ends]
        for w, end in ends.items():
            last = min(end, self.n - 1)
            relations["S_AUX"] += [(t, w) for t in range(made_by[w] + 1, last + 1)]
            if w in self.new:
                relations["M_out"].append((end, self.new[w]))
        return Schedule(
            R=tuple(relations["R"]),
            S_RAM=tuple(relations["S_RAM"]),
            S_AUX=tuple(relations["S_AUX"]),
            M_in=tuple(relations["M_in"]),
            M_out=tuple(relations["M_out"]),
            resident=tuple(self.resident),
        )


def _path(trail, last):
    """Yield the steps and moves that lead to a label, the last first."""
    while last >= 0:
        last, step, move = trail[last]
        yield step, move


def _is_new(labels, cost):
    """Note a label unless an earlier one is at least as good in everything."""
    for label in labels:
        if all(map(_at_most, label, cost)):
            return False
    labels.append(cost)
    return True


_at_most = int.__le__


def _is_whole(terms):
    """Return whether a sum has whole values only: whole coefficients, no times and energies."""
    return all(
        isinstance(coefficient, int) and key not in ("energy_j", "compute_s", "transfer_s")
        for key, coefficient in terms
    )


def _bits(mask):
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _subsets(mask):
    subset = mask
    while True:
        yield subset
        if not subset:
            return
        subset = (subset - 1) & mask
