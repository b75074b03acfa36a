"""Violations and RAM of a schedule in closed form, without executing it.

The simulator executes a schedule with a state. Here each rule is one condition on the relations,
and the RAM of each step one sum over them, so that both can be compared. With

    has_copy(t, i) = S_RAM[t,i] or M_in[t,i] or R[t,node(i)]

the RAM in use at step ``(t, k)`` is the sum of

- ``m_i * S_RAM[t,i]`` over the tensors whose step is later, ``node(i) > k``;
- ``m_i * (S_RAM[t,i] + M_in[t,i] + R[t,k])`` over ``i in out(k)``: an old copy counts as well;
- ``m_i`` over tensors with ``node(i) < k`` and ``has_copy(t, i)`` that are read at ``k`` or later
  in the stage, or that stage ``t + 1`` begins with;
- ``workspace_k * R[t,k]``;
- state that is resident, once at every step; state on memory-mapped storage and replacements of
  state never count;
- minus the smaller of the two sizes of an in-place pair, if its input is not needed after the step.

This module reads only nodes and names of the graph, none of its indices.
"""

from typing import NamedTuple

Entry = tuple[str, int, int]


class ClosedForm(NamedTuple):
    """Violations of a schedule or, without violations, its RAM and transfers."""

    violations: set[Entry]
    """Invalid or missing entries: relation, stage, and node or tensor.

    Entries of ``resident`` have stage -1.
    """
    curve: dict[tuple[int, int], int]
    """RAM in use at each step, by (stage, node) [B]."""
    held: dict[tuple[int, int], tuple[int, ...]]
    """The tensors in RAM at each step."""
    kinds: dict[tuple[int, int], dict[str, int]]
    """RAM of each step for state, activations, gradients and workspace [B]."""
    storage_bytes: int
    """Storage in use at the end of the schedule [B]."""
    reads: dict[int, int]
    """Number of page-ins of each tensor, first reads of state included."""
    writes: dict[int, int]
    """Number of page-outs of each tensor that is paged out."""


def simulate_in_closed_form(graph, schedule, *, mapped=False):
    """Return violations, RAM and transfers of a schedule; `mapped`: storage is memory-mapped."""
    return _Judge(graph, schedule, mapped=mapped).verdict()


class _Judge:
    def __init__(self, graph, schedule, *, mapped):
        self.nodes, self.n, self.mapped = graph.nodes, len(graph.nodes), mapped
        outputs = [(k, tensor) for k, node in enumerate(graph.nodes) for tensor in node.outputs]
        number = {tensor.name: i for i, (_, tensor) in enumerate(outputs)}
        self.number = number
        self.maker = [k for k, _ in outputs]
        self.size = [tensor.bytes for _, tensor in outputs]
        self.old = [None if t.replaces is None else number[t.replaces] for _, t in outputs]
        self.is_state = [graph.nodes[k].phase == "state" for k in self.maker]
        self.end = {w: k for w, k in zip(self.old, self.maker, strict=True) if w is not None}
        self.inputs = [{number[name] for name in node.inputs} for node in graph.nodes]
        self.R, self.S_RAM, self.S_AUX, self.M_in, self.M_out = (
            set(pairs)
            for pairs in (schedule.R, schedule.S_RAM, schedule.S_AUX, schedule.M_in, schedule.M_out)
        )
        self.listed = set(schedule.resident)
        state = {i for i, is_state in enumerate(self.is_state) if is_state}
        self.home_ram, self.home_storage = self.listed & state, state - self.listed
        self.is_read_there = self.home_storage if mapped else set()

    def verdict(self):
        """Check every entry; compute RAM and transfers if none is invalid."""
        violations = {("resident", -1, i) for i in self.listed - self.home_ram}
        violations |= {("R", t, t) for t in range(self.n) if (t, t) not in self.R}
        violations |= {("R", t, k) for t, k in self.R if not self.may_compute(t, k)}
        violations |= {("S_RAM", t, i) for t, i in self.S_RAM if not self.may_keep(t, i)}
        violations |= {("S_AUX", t, i) for t, i in self.S_AUX if not self.may_store(t, i)}
        violations |= {("M_in", t, i) for t, i in self.M_in if not self.may_page_in(t, i)}
        violations |= {("M_out", t, i) for t, i in self.M_out if not self.may_page_out(t, i)}
        violations |= {
            ("M_out", self.maker[new], new)
            for new, w in enumerate(self.old)
            if w in self.home_storage and (self.maker[new], new) not in self.M_out
        }
        if violations:
            return ClosedForm(violations, {}, {}, {}, 0, {}, {})
        moved = {(t, self.maker[i]) for t, i in self.M_in | self.M_out}
        steps = sorted(self.R | moved)
        out = {i for _, i in self.M_out}
        counted = [i for i in out if self.old[i] is None and not self.nodes[self.maker[i]].on_aux]
        reads = {i: sum(j == i for _, j in self.M_in) for i in range(len(self.size))}
        for w in self.home_storage - self.is_read_there:
            reads[w] += 1
        return ClosedForm(
            violations,
            {(t, k): self.ram(t, k) for t, k in steps},
            {(t, k): self.held(t, k) for t, k in steps},
            {(t, k): self.kinds(t, k) for t, k in steps},
            sum(self.size[i] for i in [*counted, *self.home_storage]),
            reads,
            {i: sum(j == i for _, j in self.M_out) for i in out},
        )

    def has_copy(self, t, i):
        """Return whether tensor `i` is in RAM at some step of stage `t`, other than as a home."""
        return (t, i) in self.S_RAM or (t, i) in self.M_in or (t, self.maker[i]) in self.R

    def may_compute(self, t, k):
        """Return whether `R[t,k]` is valid."""
        if k > t or (k < t and (not self.nodes[k].recomputable or self.nodes[k].phase == "state")):
            return False
        if any(t > self.end.get(i, self.n) for i in self.inputs[k]):
            return False
        present = self.home_ram | self.is_read_there
        return all(i in present or self.has_copy(t, i) for i in self.inputs[k])

    def has_no_entries(self, i):
        """Return whether `i` is resident state, or replaces resident state."""
        return i in self.home_ram or self.old[i] in self.home_ram

    def may_keep(self, t, i):
        """Return whether `S_RAM[t,i]` is valid."""
        if self.has_no_entries(i) or i in self.is_read_there or self.old[i] is not None:
            return False
        return self.maker[i] < t <= self.end.get(i, self.n) and self.has_copy(t - 1, i)

    def is_stored(self, t, i):
        """Return whether `i` is on storage when stage `t` begins."""
        if i in self.home_storage:
            return t <= self.end.get(i, self.n)
        return self.nodes[self.maker[i]].on_aux or any((s, i) in self.M_out for s in range(t))

    def may_store(self, t, i):
        """Return whether `S_AUX[t,i]` is valid."""
        return self.maker[i] < t and not self.has_no_entries(i) and self.is_stored(t, i)

    def may_page_in(self, t, i):
        """Return whether `M_in[t,i]` is valid."""
        if self.old[i] is not None or i in self.is_read_there or not self.may_store(t, i):
            return False
        return (t, i) in self.S_AUX and (t, i) not in self.S_RAM

    def may_page_out(self, t, i):
        """Return whether `M_out[t,i]` is valid."""
        if self.is_state[i] or self.has_no_entries(i) or self.maker[i] > t:
            return False
        return self.has_copy(t, i) and (self.old[i] is None or t == self.maker[i])

    def ram(self, t, k):
        """Return the RAM in use at step `(t, k)` of a valid schedule [B]."""
        node, runs = self.nodes[k], (t, k) in self.R
        total = node.workspace_bytes if runs else 0
        for i, made in enumerate(self.maker):
            total += self.size[i] * self.copies(t, k, i, made)
        for y, x in dict(node.in_place).items() if runs else ():
            y_bytes, x_bytes = (self.size[self.number[name]] for name in (y, x))
            if not self.is_needed(t, k + 1, self.number[x]):
                total -= min(y_bytes, x_bytes)
        return total

    def held(self, t, k):
        """Return the tensors in RAM at step `(t, k)`."""
        made = enumerate(self.maker)
        return tuple(i for i, maker in made if self.copies(t, k, i, maker))

    def kinds(self, t, k):
        """Return the RAM of step `(t, k)` by kind [B]; in-place savings reduce the output kind."""
        node, runs = self.nodes[k], (t, k) in self.R
        found = dict.fromkeys(("state", "activations", "gradients"), 0)
        for i, made in enumerate(self.maker):
            phase = self.nodes[made].phase
            kind = {"state": "state", "backward": "gradients"}.get(phase, "activations")
            taken = self.size[i] * self.copies(t, k, i, made)
            for y, x in node.in_place if runs else ():
                if self.number[y] == i and not self.is_needed(t, k + 1, self.number[x]):
                    taken -= min(self.size[i], self.size[self.number[x]])
            found[kind] += taken
        return found | {"workspace": node.workspace_bytes if runs else 0}

    def copies(self, t, k, i, made):
        """Return the number of copies of tensor `i`, of node `made`, in RAM at step `(t, k)`."""
        if i in self.home_ram:
            return 1
        if i in self.is_read_there or self.old[i] is not None:
            return 0
        held = int((t, i) in self.S_RAM)
        if made > k:
            return held
        if made == k:
            return held + ((t, i) in self.M_in) + ((t, k) in self.R)
        return int(self.has_copy(t, i) and self.is_needed(t, k, i))

    def is_needed(self, t, k, i):
        """Return whether `i` is needed in stage `t` from step `k` on, or when the next begins."""
        later = any((t, j) in self.R and i in self.inputs[j] for j in range(k, t + 1))
        return later or (t + 1, i) in self.S_RAM
