"""The best schedule of a small problem by exhaustive search, from the rules of execution alone.

The search shares no code with simulator, formulations and planner. It is a best-first search over
the steps ``(t, k)`` of the stages. A state is the next step, the tensors in RAM and the tensors on
storage. At a step the search tries every combination of computing, paging in, paging out and
freeing.

Why this covers every schedule. A tensor is freed after its last use in a stage (without a use in
the stage, after its own step) unless the next stage begins with it. So at step ``k`` only the
tensors of node ``k`` and, if ``k`` is computed, its inputs can be freed. Freeing or keeping such a
tensor is a choice of ``S_RAM`` of the next stage together with the later uses. A tensor that is
kept without a later use in the stage is in the next ``S_RAM``. Tensors whose step comes later in
the stage stay.

A decision is *rewarded* if the objective or a limit has a negative coefficient for it: one more
such decision can be better although no node needs it. All sums are exact: integers, in units of
the finest binary digit of any coefficient. The search omits the following choices, none of which
can be better. (Removing a decision that is not rewarded from a schedule reduces only costs, times,
bytes and RAM in use.)

1. Paging out later than the first computation: right after it, a page-out takes no more RAM,
   page-ins are the same, and each tensor is paged out once.
2. Paging out tensors that are on storage from the start, and paging in a tensor at a step that
   recomputes it, unless rewarded.
3. For tensors that no later step may read (``_find_useful_tensors``): keeping them; and, unless
   rewarded, paging them in or out and recomputing nodes without other outputs.
4. Removing an entry of ``S_AUX``: tensors stay on storage, so all entries are always listed.

State tensors: every set of state tensors that may be resident is tried. For one such set, the
remaining problem has no homes. State that is resident or read in place is always present and not
searched; the bytes of resident state are subtracted from the budget. Other state is on storage from
the start, and the step of its node is its first read; no node reads it after its replacement. A
replacement takes no RAM. Every schedule pays for its write-back and for the first read. With
commits, every schedule pays for write-backs of resident state, too, and for erases and records.

An in-place operator takes less RAM in the choices in which its input is freed at its step.

User-defined per-stage constraints are upper limits without negative coefficients, so schedules
still meet them after a decision is removed. They have sums of their own.

A label is dropped if an earlier label of the same state is at least as good in each sum that is
minimized or limited: each continuation of the one is a continuation of the other. A lower limit is
an upper limit on the negated sum. Limits and the order of labels include all rewards of later
steps.
"""

import heapq
import itertools
from fractions import Fraction
from math import floor, lcm
from typing import NamedTuple

from poetmodel.schedule import Schedule

TOLERANCE = Fraction(1, 10**9)
"""Relative tolerance of limits on times and energies."""


class Optimum(NamedTuple):
    """The minimum of the objective, and a schedule that attains it."""

    value: float
    """Energy [J], time [s], peak RAM or bytes written [B], baseline included; or the value of a
    user-defined objective."""
    schedule: Schedule
    """One of the optimal schedules."""


class _Move(NamedTuple):
    """Decisions of one step, and the state after it. Sets of tensors are bit masks."""

    computes: bool
    paged_in: int
    paged_out: int
    ram_tensors: int
    stored_tensors: int
    peak_bytes: int


class _Quantity(NamedTuple):
    """A sum over decisions: its baseline, and the coefficient of each decision."""

    base: Fraction
    compute: list[Fraction]
    page_in: list[Fraction]
    page_out: list[Fraction]

    def scale(self, weight):
        """Return the quantity multiplied by `weight`."""
        columns = [[weight * value for value in column] for column in self[1:]]
        return _Quantity(weight * self.base, *columns)

    def add(self, other):
        """Return the sum of this quantity and `other`."""
        columns = [
            list(map(Fraction.__add__, *both)) for both in zip(self[1:], other[1:], strict=True)
        ]
        return _Quantity(self.base + other.base, *columns)


class _StageRow(NamedTuple):
    """A user-defined per-stage constraint: weights of decisions, and the limit on their sum."""

    weights: dict[tuple[str, int, int], int]
    """By kind of decision, stage and node or tensor, in units of the finest digit."""
    limit: int


class _IntegerQuantity(NamedTuple):
    """A quantity in integers, without its baseline, as labels add it up."""

    base: Fraction
    scale: int
    """Integers per unit of the quantity."""
    columns: tuple[list[int], list[int], list[int]]
    """Coefficients of recomputations by node, and of page-ins and page-outs by tensor."""
    limit: int | None
    """Limit on the sum, without the baseline; None for no limit."""

    @classmethod
    def from_quantity(cls, quantity, limit=None):
        """Return `quantity` in integers; `limit` includes the tolerance."""
        scale = lcm(*(value.denominator for column in quantity[1:] for value in column))
        columns = ([int(scale * value) for value in column] for column in quantity[1:])
        integer_limit = None if limit is None else floor((limit - quantity.base) * scale)
        return cls(quantity.base, scale, (*columns,), integer_limit)


class TooManyLabelsError(Exception):
    """A search exceeded its maximum number of labels."""


def optimum(problem, *, max_labels=None):
    """Return the `Optimum` of a problem, or None if the problem is infeasible.

    Problems may have about six nodes, or five if decisions are rewarded: the number of states grows
    as ``4 ** tensors``, and user-defined constraints increase the number of labels of a state.
    Raises `TooManyLabelsError` above `max_labels` labels, and ValueError if the deadline counts
    ``overlap`` and there is a deadline or idle power, because that requires a plan of transfers.
    """
    minimized = str(problem.minimize)
    best = None
    if not _has_generations(problem):
        return None
    for resident in _list_resident_sets(problem):
        search = _Search(problem, minimized, resident)
        search.max_labels = max_labels
        candidate = search.search_min_ram() if minimized == "ram" else search.search()
        if candidate is not None and (best is None or candidate.value < best.value):
            best = candidate
    return best


def _has_generations(problem):
    """Return whether storage, or the flash beside volatile storage, fits two state generations."""
    commit, device = problem.table.commit, problem.costs.device
    size_bytes = problem.aux_limit_bytes
    if device is not None and device.storage is not None and device.storage.volatile:
        size_bytes = size_bytes if device.flash is None else device.flash.storage_bytes
    return commit is None or size_bytes is None or 2 * commit.generation_bytes <= size_bytes


def _list_resident_sets(problem):
    """Yield each set of state tensors that may be resident; without paging, only that of all."""
    maker_nodes = [node for node in problem.graph.nodes for _ in node.outputs]
    state_tensors = [i for i, node in enumerate(maker_nodes) if str(node.phase) == "state"]
    if not (problem.paging and problem.table.has_storage):
        yield frozenset(state_tensors)
        return
    for size in range(len(state_tensors) + 1):
        yield from map(frozenset, itertools.combinations(state_tensors, size))


class _Search:
    """A search with one set of resident state. Sets of tensors are bit masks."""

    def __init__(self, problem, minimize, resident):
        graph, table = problem.graph, problem.table
        self.max_labels = None
        self.n_nodes = len(graph.nodes)
        self.tensor_bytes = [tensor.bytes for node in graph.nodes for tensor in node.outputs]
        maker = {tensor.name: k for k, node in enumerate(graph.nodes) for tensor in node.outputs}
        self.tensor_index = {name: i for i, name in enumerate(maker)}
        self.node_index = {node.name: k for k, node in enumerate(graph.nodes)}
        number = self.tensor_index
        self.inputs = [sum(1 << number[name] for name in set(v.inputs)) for v in graph.nodes]
        self.outputs = [sum(1 << number[made.name] for made in v.outputs) for v in graph.nodes]
        self.workspace = [node.workspace_bytes for node in graph.nodes]
        self.can_page = problem.paging and table.has_storage
        self.initially_stored = sum(
            self.outputs[k] for k, node in enumerate(graph.nodes) if node.on_aux
        )
        self._set_homes(problem, resident)
        self.may_recompute = [
            problem.recompute and node.recomputable and str(node.phase) != "state"
            for node in graph.nodes
        ]
        self.in_place_inputs = [
            [
                (1 << number[x], min(self.tensor_bytes[number[y]], self.tensor_bytes[number[x]]))
                for y, x in dict(node.in_place).items()
            ]
            for node in graph.nodes
        ]
        self.steps = [(t, k) for t in range(self.n_nodes) for k in range(t + 1)]
        self.quantities = list(self._list_quantities(problem, minimize))
        self.stage_rows = list(self._list_stage_rows(problem))
        self._find_rewards()
        self.useful_tensors = self._find_useful_tensors()
        self.size_cache = {0: 0}
        self.cost_cache = {}
        self.min_remaining_costs = [self._min_remaining_costs(of) for of in self.quantities]

    def _set_homes(self, problem, resident):
        """Put non-resident state on storage; exclude all other state and replacements."""
        device = problem.costs.device
        storage = None if device is None else device.storage
        is_memory_mapped = storage is not None and storage.memory_mapped
        nodes = problem.graph.nodes
        makers = [(k, tensor) for k, node in enumerate(nodes) for tensor in node.outputs]
        state_tensors = {i for i, (k, _) in enumerate(makers) if str(nodes[k].phase) == "state"}
        self.maker_of = [k for k, _ in makers]
        self.state_tensors = sum(1 << i for i in state_tensors)
        self.resident = resident
        self.replacement_of = {
            self.tensor_index[tensor.replaces]: i
            for i, (_, tensor) in enumerate(makers)
            if tensor.replaces is not None
        }
        self.stored_states = state_tensors - resident
        self.paged_states = frozenset() if is_memory_mapped else self.stored_states
        unsearched = (
            resident | (self.stored_states - self.paged_states) | set(self.replacement_of.values())
        )
        self.last_stage = [self.n_nodes] * self.n_nodes
        """For each node the last stage in which it may be computed, or its state be paged in."""
        for w, replacement in self.replacement_of.items():
            for k, node in enumerate(nodes):
                if makers[w][0] == k or makers[w][1].name in node.inputs:
                    self.last_stage[k] = min(self.last_stage[k], makers[replacement][0])
        searched_mask = ~sum(1 << i for i in unsearched)
        self.inputs = [mask & searched_mask for mask in self.inputs]
        self.outputs = [mask & searched_mask for mask in self.outputs]
        self.initially_stored = (
            self.initially_stored | sum(1 << i for i in self.stored_states)
        ) & searched_mask
        self.resident_bytes = sum(self.tensor_bytes[i] for i in resident)
        self.budget = problem.usable_ram_bytes - self.resident_bytes
        self.free_storage_bytes = problem.aux_limit_bytes
        if self.free_storage_bytes is not None:
            self.free_storage_bytes -= sum(self.tensor_bytes[i] for i in self.stored_states)

    def _find_useful_tensors(self):
        """Return for each step the tensors that a later step may usefully read."""
        useful = 0
        masks = []
        for t, k in reversed(self.steps):
            masks.append(useful)
            if k == t or (
                self.may_rerun(t, k) and (self.outputs[k] & useful or self.rewards_recomputation[k])
            ):
                useful |= self.inputs[k]
        return masks[::-1]

    def may_rerun(self, t, k):
        """Return whether node `k` may be recomputed in stage `t`."""
        return self.may_recompute[k] and t <= self.last_stage[k]

    def _list_quantities(self, problem, minimize):
        """Yield the quantities of labels: the minimized sum, if any, then the limited sums."""
        totals = self._sum_totals(problem)
        time = totals["compute_s"]
        if str(problem.deadline_counts) == "serial":
            time = time.add(totals["transfer_s"])
        if minimize != "ram":
            objective = self._combine_totals(totals, problem.user_objective)
            by_name = {"energy": totals["energy_j"], "writes": totals["bytes_written"]}
            yield _IntegerQuantity.from_quantity(
                {**by_name, "time": time, "own": objective}[minimize]
            )
        for quantity, limit in (
            (time, problem.deadline_s),
            (totals["energy_j"], problem.energy_budget_j),
        ):
            if limit is not None:
                yield _IntegerQuantity.from_quantity(quantity, Fraction(limit) * (1 + TOLERANCE))
        for row in problem.constraints:
            if any("@" in key for key in row.terms):
                continue
            quantity = self._combine_totals(totals, row.terms.items())
            scale_of_row = max(
                map(abs, (Fraction(row.lower or 0), Fraction(row.upper or 0), quantity.base))
            )
            tolerance = (
                Fraction(0) if _has_integer_values(row.terms.items()) else TOLERANCE * scale_of_row
            )
            if row.upper is not None:
                yield _IntegerQuantity.from_quantity(quantity, Fraction(row.upper) + tolerance)
            if row.lower is not None:
                yield _IntegerQuantity.from_quantity(
                    quantity.scale(Fraction(-1)), tolerance - Fraction(row.lower)
                )

    def _list_stage_rows(self, problem):
        """Yield the user-defined per-stage constraints."""
        for row in problem.constraints:
            weights = {}
            for key, weight in row.terms.items():
                decision, _, name = key.partition(":")
                kind, _, stage = decision.partition("@")
                if stage:
                    index = self.node_index if kind == "recomputations" else self.tensor_index
                    weights[kind, int(stage), index[name]] = Fraction(weight)
            if weights:
                scale = lcm(*(weight.denominator for weight in weights.values()))
                tolerance = (
                    0
                    if _has_integer_values(row.terms.items())
                    else TOLERANCE * abs(Fraction(row.upper))
                )
                limit = floor((Fraction(row.upper) + tolerance) * scale)
                yield _StageRow({key: int(scale * w) for key, w in weights.items()}, limit)

    def _sum_totals(self, problem):
        """Return the totals of a schedule by the names that user-defined constraints use."""
        table, device = problem.table, problem.costs.device
        idle_w = Fraction(device.idle_power_w if device is not None else 0)
        deadline_counts = str(problem.deadline_counts)
        if deadline_counts == "overlap" and (idle_w or problem.deadline_s is not None):
            msg = "the search does not support overlap of transfers and computation"
            raise ValueError(msg)
        nodes, tensors = [Fraction(0)] * self.n_nodes, [Fraction(0)] * len(self.tensor_bytes)
        compute_s = list(map(Fraction, table.compute_time_s))
        in_s = list(map(Fraction, table.page_in_time_s)) or tensors
        out_s = list(map(Fraction, table.page_out_time_s)) or tensors
        commit = table.commit
        rest_s = rest_j = committed_bytes = Fraction(0)
        if commit is not None:
            rest_s, rest_j = (
                Fraction(commit.other_cost.time_s),
                Fraction(commit.other_cost.energy_j),
            )
            committed_bytes = Fraction(commit.written_bytes)
        self.committed_replacements = frozenset(() if commit is None else commit.replacements)
        compute = _Quantity(sum(compute_s, Fraction(0)), compute_s, tensors, tensors)
        transfer = _Quantity(rest_s, nodes, in_s, out_s)
        compute_j = list(map(Fraction, table.compute_energy_j))
        in_j = list(map(Fraction, table.page_in_energy_j)) or tensors
        out_j = list(map(Fraction, table.page_out_energy_j)) or tensors
        energy = _Quantity(sum(compute_j, rest_j), compute_j, in_j, out_j)
        energy = energy.add(compute.scale(idle_w))
        if deadline_counts == "serial":
            energy = energy.add(transfer.scale(idle_w))
        sizes = list(map(Fraction, self.tensor_bytes))
        page_out_bytes = [
            Fraction(0) if i in self.committed_replacements else size
            for i, size in enumerate(sizes)
        ]
        totals = {
            "energy_j": energy,
            "compute_s": compute,
            "transfer_s": transfer,
            "bytes_written": _Quantity(committed_bytes, nodes, tensors, page_out_bytes),
            "bytes_read": _Quantity(Fraction(0), nodes, sizes, tensors),
        }
        return {name: self._add_home_costs(quantity) for name, quantity in totals.items()}

    def _add_home_costs(self, quantity):
        """Return the quantity with first reads and write-backs of state in its baseline."""
        reads = sum(quantity.page_in[i] for i in self.paged_states)
        written_replacements = {
            self.replacement_of[i] for i in self.stored_states if i in self.replacement_of
        } | self.committed_replacements
        writes = sum(quantity.page_out[i] for i in written_replacements)
        return quantity._replace(base=quantity.base + reads + writes)

    def _combine_totals(self, totals, terms):
        """Return the weighted sum of a user-defined constraint or objective as a quantity."""
        n_tensors = len(self.tensor_bytes)
        combined = _Quantity(
            Fraction(0), *([Fraction(0)] * m for m in (self.n_nodes, n_tensors, n_tensors))
        )
        for key, coefficient in terms:
            weight = Fraction(coefficient)
            kind, _, name = key.partition(":")
            if key == "constant":
                combined = combined._replace(base=combined.base + weight)
            elif kind == "recomputations":
                combined.compute[self.node_index[name]] += weight
            elif kind == "resident":
                resident_weight = weight * (self.tensor_index[name] in self.resident)
                combined = combined._replace(base=combined.base + resident_weight)
            elif kind == "page_ins":
                i = self.tensor_index[name]
                combined.page_in[i] += weight
                combined = combined._replace(base=combined.base + weight * (i in self.paged_states))
            elif kind == "page_outs":
                i = self.tensor_index[name]
                combined.page_out[i] += weight
                is_written_back = i in {
                    new for w, new in self.replacement_of.items() if w in self.stored_states
                }
                combined = combined._replace(base=combined.base + weight * is_written_back)
            else:
                combined = combined.add(totals[key].scale(weight))
        return combined

    def _find_rewards(self):
        """Find the decisions that a quantity rewards; page-ins and page-outs as bit masks."""
        columns = list(zip(*(of.columns for of in self.quantities), strict=True)) or [(), (), ()]
        recomputations, page_ins, page_outs = (
            [any(value < 0 for value in values) for values in zip(*column, strict=True)]
            for column in columns
        )
        self.rewards_recomputation = recomputations or [False] * self.n_nodes
        self.rewarded_page_ins = sum(
            1 << i for i, is_rewarded in enumerate(page_ins) if is_rewarded
        )
        self.rewarded_page_outs = sum(
            1 << i for i, is_rewarded in enumerate(page_outs) if is_rewarded
        )

    def _min_remaining_costs(self, quantity):
        """Return for each step and the end the minimum cost of this step and all later ones."""
        compute, page_in, page_out = (
            [min(0, value) for value in column] for column in quantity.columns
        )
        min_costs = [0]
        for t, k in reversed(self.steps):
            min_cost = 0
            if k < t and self.may_rerun(t, k):
                min_cost += compute[k]
            for i in _list_bits(self.outputs[k]) if self.can_page else ():
                min_cost += page_in[i] if k < t else page_out[i]
            min_costs.append(min_costs[-1] + min_cost)
        return min_costs[::-1]

    def size(self, mask):
        """Return the bytes of a set of tensors."""
        size_bytes = self.size_cache.get(mask)
        if size_bytes is None:
            lowest_bit = mask & -mask
            size_bytes = self.tensor_bytes[lowest_bit.bit_length() - 1] + self.size(
                mask ^ lowest_bit
            )
            self.size_cache[mask] = size_bytes
        return size_bytes

    def search_min_ram(self):
        """Return the optimum for the peak RAM, by bisection of the RAM budget."""
        low = max(
            self.size(self.inputs[k])
            + self.size(self.outputs[k])
            + self.workspace[k]
            - sum(saved_bytes for _, saved_bytes in self.in_place_inputs[k])
            for k in range(self.n_nodes)
        )
        high = self.budget
        best = None
        self.budget = high
        while low <= self.budget <= high:
            candidate = self.search()
            if candidate is None:
                if best is None:
                    return None
                low = self.budget + 1
            else:
                best = Optimum(self.resident_bytes + self.peak_bytes, candidate.schedule)
                high = self.peak_bytes - 1
            self.budget = (low + high) // 2
        return best

    def search(self):
        """Expand labels in the order of their lower bounds; the first complete label is optimal."""
        tie_breaker = itertools.count()
        start = (0,) * (len(self.quantities) + len(self.stage_rows))
        heap = [(0, 0, next(tie_breaker), start, 0, self.initially_stored, -1)]
        trail = []
        labels_of_state = {}
        first_remaining_costs = (
            self.min_remaining_costs[0] if self.min_remaining_costs else [0] * (len(self.steps) + 1)
        )
        while heap:
            _, negative_step, _, cost, ram, aux, parent = heapq.heappop(heap)
            step = -negative_step
            if step == len(self.steps):
                self.peak_bytes = max(move.peak_bytes for _, move in _walk_moves(trail, parent))
                return Optimum(self._objective_value(cost), self._build_schedule(trail, parent))
            if not _add_undominated(labels_of_state.setdefault((step, ram, aux), []), cost):
                continue
            for move in self.list_moves(step, ram, aux):
                total_cost = self._add_costs(cost, step, move)
                if total_cost is None:
                    continue
                trail.append((parent, step, move))
                if self.max_labels is not None and len(trail) > self.max_labels:
                    raise TooManyLabelsError
                lower_bound = total_cost[0] + first_remaining_costs[step + 1] if total_cost else 0
                entry = (
                    lower_bound,
                    -step - 1,
                    next(tie_breaker),
                    total_cost,
                    move.ram_tensors,
                    move.stored_tensors,
                )
                heapq.heappush(heap, (*entry, len(trail) - 1))
        return None

    def _objective_value(self, cost):
        """Return the objective of a label, baseline included; 0 without a minimized sum."""
        if not self.quantities:
            return 0.0
        of = self.quantities[0]
        return float(of.base + Fraction(cost[0], of.scale))

    def list_moves(self, step, ram, aux):
        """Yield each possible move of a step within RAM and storage."""
        t, k = self.steps[step]
        outputs, useful = self.outputs[k], self.useful_tensors[step]
        readable = outputs & aux & ~ram if self.can_page and k < t else 0
        if t > self.last_stage[k]:
            readable &= ~self.initially_stored  # replaced state cannot be read
        is_useful = k == t or (
            self.may_rerun(t, k) and (bool(outputs & useful) or self.rewards_recomputation[k])
        )
        if is_useful and not self.inputs[k] & ~ram:
            for paged_in in _list_subsets(readable & self.rewarded_page_ins):
                peak = self.size(ram | paged_in) + self.size(outputs) + self.workspace[k]
                freeable = outputs | self.inputs[k]
                for move in self._choose_transfers_and_evictions(
                    step, ram | outputs, aux, freeable, (True, paged_in, peak)
                ):
                    saved_bytes = sum(
                        size for x, size in self.in_place_inputs[k] if not x & move.ram_tensors
                    )
                    if peak - saved_bytes <= self.budget:
                        yield move._replace(peak_bytes=peak - saved_bytes)
        if k == t:
            return
        for paged_in in _list_subsets(readable & (useful | self.rewarded_page_ins)):
            ram_tensors = ram | paged_in
            peak = self.size(ram_tensors)
            if peak <= self.budget:
                yield from self._choose_transfers_and_evictions(
                    step, ram_tensors, aux, outputs, (False, paged_in, peak)
                )

    def _choose_transfers_and_evictions(self, step, ram, aux, freeable, partial_move):
        """Yield the moves of a step for each choice of page-outs and of freed tensors.

        `partial_move` is (computes, paged_in, peak_bytes); only tensors of `freeable` may be freed.
        """
        computes, paged_in, peak = partial_move
        useful = self.useful_tensors[step]
        useless = ram & ~useful
        if useless & ~freeable:
            return  # a useless tensor was kept until now; the search also tries freeing it earlier
        for paged_out in _list_subsets(self._tensors_to_page_out(step)):
            stored_tensors = aux | paged_out
            if (
                self.free_storage_bytes is not None
                and self.size(stored_tensors & ~self.initially_stored) > self.free_storage_bytes
            ):
                continue
            for freed in _list_subsets(ram & freeable & useful):
                remaining = ram & ~freed & ~useless
                yield _Move(computes, paged_in, paged_out, remaining, stored_tensors, peak)

    def _tensors_to_page_out(self, step):
        """Return the mask of tensors that may be paged out at a step."""
        t, k = self.steps[step]
        if k < t or not self.can_page:
            return 0
        useful_tensors = (
            self.useful_tensors[step] | self.rewarded_page_ins
        ) & ~self.initially_stored
        return self.outputs[k] & (useful_tensors | self.rewarded_page_outs) & ~self.state_tensors

    def _add_costs(self, cost, step, move):
        """Return the sums of a label after a move; None if no continuation can meet a limit."""
        t, k = self.steps[step]
        key = (k, move.computes and k < t, move.paged_in, move.paged_out)
        move_costs = self.cost_cache.get(key)
        if move_costs is None:
            move_costs = []
            for compute, page_in, page_out in (quantity.columns for quantity in self.quantities):
                move_costs.append(
                    (compute[k] if key[1] else 0)
                    + sum(page_in[i] for i in _list_bits(move.paged_in))
                    + sum(page_out[i] for i in _list_bits(move.paged_out))
                )
            self.cost_cache[key] = move_costs
        stage_sums = [self._stage_row_sum(row.weights, t, k, move) for row in self.stage_rows]
        total_costs = tuple(map(int.__add__, cost, (*move_costs, *stage_sums)))
        sums_and_rows = zip(total_costs[len(move_costs) :], self.stage_rows, strict=True)
        if any(total > row.limit for total, row in sums_and_rows):
            return None
        for quantity, total, remaining_costs in zip(
            self.quantities, total_costs[: len(move_costs)], self.min_remaining_costs, strict=True
        ):
            if quantity.limit is not None and total + remaining_costs[step + 1] > quantity.limit:
                return None
        return total_costs

    def _stage_row_sum(self, weights, t, k, move):
        """Return the sum of the weights of a move's decisions in a per-stage constraint."""
        recomputation_weight = (
            weights.get(("recomputations", t, k), 0) if move.computes and k < t else 0
        )
        return recomputation_weight + sum(
            weights.get(("page_ins", t, i), 0) for i in _list_bits(move.paged_in)
        )

    def _build_schedule(self, trail, last):
        """Return the schedule of the moves that lead to the label at `last`."""
        relations = {name: [] for name in ("R", "S_RAM", "S_AUX", "M_in", "M_out")}
        for step, move in _walk_moves(trail, last):
            t, k = self.steps[step]
            if move.computes:
                relations["R"].append((t, k))
            relations["M_in"].extend((t, i) for i in _list_bits(move.paged_in))
            relations["M_out"].extend((t, i) for i in _list_bits(move.paged_out))
            if k == t and t + 1 < self.n_nodes:
                computed_tensors = sum(self.outputs[: t + 1])
                relations["S_RAM"].extend((t + 1, i) for i in _list_bits(move.ram_tensors))
                relations["S_AUX"].extend(
                    (t + 1, i) for i in _list_bits(move.stored_tensors & computed_tensors)
                )
        made_by = self.maker_of
        replacement_stages = {
            w: made_by[self.replacement_of[w]] if w in self.replacement_of else self.n_nodes
            for w in self.stored_states
        }
        relations["S_AUX"] = [(t, i) for t, i in relations["S_AUX"] if i not in replacement_stages]
        for w, replacement_stage in replacement_stages.items():
            last = min(replacement_stage, self.n_nodes - 1)
            relations["S_AUX"] += [(t, w) for t in range(made_by[w] + 1, last + 1)]
            if w in self.replacement_of:
                relations["M_out"].append((replacement_stage, self.replacement_of[w]))
        return Schedule(
            R=tuple(relations["R"]),
            S_RAM=tuple(relations["S_RAM"]),
            S_AUX=tuple(relations["S_AUX"]),
            M_in=tuple(relations["M_in"]),
            M_out=tuple(relations["M_out"]),
            resident=tuple(self.resident),
        )


def _walk_moves(trail, last):
    """Yield (step, move) of the moves that lead to the label at `last`, the last move first."""
    while last >= 0:
        last, step, move = trail[last]
        yield step, move


def _add_undominated(labels, cost):
    """Append a label unless an earlier one is at least as good in each sum.

    Return whether it was appended.
    """
    for label in labels:
        if all(map(_at_most, label, cost)):
            return False
    labels.append(cost)
    return True


_at_most = int.__le__


def _has_integer_values(terms):
    """Return whether a sum is always an integer: integer coefficients, no times and energies."""
    return all(
        isinstance(coefficient, int) and key not in ("energy_j", "compute_s", "transfer_s")
        for key, coefficient in terms
    )


def _list_bits(mask):
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _list_subsets(mask):
    subset = mask
    while True:
        yield subset
        if not subset:
            return
        subset = (subset - 1) & mask
