"""Published methods as their authors implement them, transcribed for comparisons in tests.

`Rotor` is the dynamic program of rotor: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, Optimal
checkpointing for heterogeneous chains: how to train deep neural networks with limited memory, 2019,
arXiv:1911.13214, section 4.

`Simrd` is the runtime of DTR's simulator, literally and recursively: Kirisame et al., Dynamic
Tensor Rematerialization, ICLR 2021; ``RuntimeV2Eager`` and the heuristics ``DTR`` and
``DTREqClass`` of simrd, github.com/uwsampl/dtr-prototype. Each output of a node has a storage of
its own, whose cost is that of the whole node. There are no aliases here.
"""

import math
from dataclasses import dataclass
from functools import cache
from math import inf

from poetmodel.graph import Graph, Node, Tensor, operation
from poetmodel.heuristics.execution import Execution
from poetmodel.schedule.instructions import Instruction, Op


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Step `l` of a chain: ``F_l`` makes the activation ``a_l`` and, if required, the tape.

    ``B_l`` reads the gradient of ``a_l``, the tape, ``a_(l-1)`` and, if `reads_own`, ``a_l``.
    """

    forward_s: int
    backward_s: int
    activation_bytes: int
    tape_bytes: int = 0
    """Bytes that ``F_l`` makes for ``B_l`` in addition to ``a_l``."""
    reads_own: bool = True
    gradient_bytes: int = 0
    """Bytes of the gradient that ``B_l`` makes."""
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0


def random_layers(rng, count):
    """Return `count` random layers and a loss."""
    sizes = [rng.randint(1, 9) for _ in range(count)]
    reads_own_output = rng.random() < 0.7
    has_tapes = rng.random() < 0.3
    workspaces = (0, 0, 3) if rng.random() < 0.3 else (0,)
    layers = [
        Layer(
            forward_s=rng.randint(1, 9),
            backward_s=rng.randint(1, 9),
            activation_bytes=size,
            tape_bytes=rng.randint(0, 6) if has_tapes else 0,
            reads_own=reads_own_output,
            gradient_bytes=previous_size,
            forward_workspace_bytes=rng.choice(workspaces),
            backward_workspace_bytes=rng.choice(workspaces),
        )
        for size, previous_size in zip(sizes, (1, *sizes), strict=False)
    ]
    loss = Layer(
        forward_s=0, backward_s=0, activation_bytes=0, reads_own=False, gradient_bytes=sizes[-1]
    )
    return [*layers, loss]


def chain_graph(layers):
    """Return the training graph of a chain: ``x, F0, F1, ..., loss, Bn, ..., B0``."""
    nodes = [operation("x", output_bytes=1, phase="input", recomputable=False)]
    last = len(layers) - 1
    for index, layer in enumerate(layers):
        outputs = [Tensor(name=f"a{index}", bytes=layer.activation_bytes)]
        if layer.tape_bytes:
            outputs.append(Tensor(name=f"tape{index}", bytes=layer.tape_bytes))
        nodes.append(
            Node(
                name=f"F{index}",
                op="f",
                phase="loss" if index == last else "forward",
                inputs=(f"a{index - 1}" if index else "x",),
                outputs=tuple(outputs),
                workspace_bytes=layer.forward_workspace_bytes,
            )
        )
    for index in reversed(range(len(layers))):
        layer = layers[index]
        inputs = [f"g{index + 1}"] if index < last else []
        inputs.append(f"a{index - 1}" if index else "x")
        inputs += [f"a{index}"] * layer.reads_own + [f"tape{index}"] * bool(layer.tape_bytes)
        nodes.append(
            operation(
                f"g{index}",
                output_bytes=layer.gradient_bytes,
                phase="backward",
                inputs=tuple(inputs),
                workspace_bytes=layer.backward_workspace_bytes,
                recomputable=False,
            )
        )
    return Graph(name="chain", nodes=tuple(nodes))


def node_times_s(layers):
    """Return the compute time of every node of `chain_graph` [s]."""
    forward = [layer.forward_s for layer in layers]
    return [0, *forward, *(layer.backward_s for layer in reversed(layers))]


class Rotor:
    """``C(m, s, t)``: the minimum time of steps ``s..t`` and their backward parts with `m` bytes.

    `m` does not include ``a_(s-1)`` but includes the gradient of ``a_t``. As in the paper, the
    saved set of a step (``a-bar``) includes its activation.
    """

    def __init__(self, layers):
        self.layers = layers
        self.graph = chain_graph(layers)
        self.cost = cache(self._cost)
        self._node = {node.name: k for k, node in enumerate(self.graph.nodes)}
        self._tensor = {tensor.name: i for i, tensor in enumerate(self.graph.tensors)}

    def output_gradient_bytes(self, t):
        """Return the bytes of the gradient of ``a_t``."""
        return self.layers[t + 1].gradient_bytes if t + 1 < len(self.layers) else 0

    def saved_bytes(self, s):
        """Return the bytes of step `s` that ``F_all`` keeps."""
        return self.layers[s].activation_bytes + self.layers[s].tape_bytes

    def _cost(self, m, s, t):
        """Return the minimum time, and the step before which an activation is stored, or None."""
        layer = self.layers[s]
        if s == t:
            backward = layer.gradient_bytes + layer.backward_workspace_bytes
            peak = self.saved_bytes(s) + self.output_gradient_bytes(s)
            fits = m >= peak + max(backward, layer.forward_workspace_bytes)
            return (layer.forward_s + layer.backward_s if fits else inf), None
        if m < self.min_bytes(s, t):
            return inf, None
        best = (inf, None)
        free_bytes = m - self.saved_bytes(s)
        if free_bytes >= 0:
            best = self.cost(m, s, s)[0] + self.cost(free_bytes, s + 1, t)[0], None
        forward_s = 0
        for stored_step in range(s + 1, t + 1):
            forward_s += self.layers[stored_step - 1].forward_s
            free_bytes = m - self.layers[stored_step - 1].activation_bytes
            if free_bytes >= 0:
                value = (
                    forward_s
                    + self.cost(free_bytes, stored_step, t)[0]
                    + self.cost(m, s, stored_step - 1)[0]
                )
                best = min(best, (value, stored_step), key=lambda found: found[0])
        return best

    def min_bytes(self, s, t):
        """Return the bytes that forward steps up to the first decision need at least."""
        first_layer = self.layers[s]
        required_bytes = first_layer.activation_bytes + first_layer.forward_workspace_bytes
        for index in range(s + 1, t):
            layer, previous_layer = self.layers[index], self.layers[index - 1]
            activation_bytes = previous_layer.activation_bytes + layer.activation_bytes
            required_bytes = max(required_bytes, activation_bytes + layer.forward_workspace_bytes)
        return required_bytes + self.output_gradient_bytes(t)

    def find_schedule(self, m):
        """Return the schedule for `m` bytes beside the sample; None if there is none."""
        last = len(self.layers) - 1
        if self.cost(m, 0, last)[0] == inf:
            return None
        sample = self._compute("x")
        execution = Execution(self.graph)
        for op, index in (sample, *self._list_events(m, 0, last)):
            if op == Op.COMPUTE:
                execution.compute(index)
            elif index in execution.ram:
                execution.free(index)
        return execution.schedule()

    def _list_events(self, m, s, t):
        stored_step = None if s == t else self.cost(m, s, t)[1]
        if stored_step is None:
            yield self._compute(f"F{s}")  # F_all
            if s < t:
                yield from self._list_events(m - self.saved_bytes(s), s + 1, t)
            yield self._compute(f"g{s}")
            yield from self._free(f"g{s + 1}", f"a{s}", f"tape{s}")
            return
        for index in range(s, stored_step):  # F_ck, then F_none
            yield self._compute(f"F{index}")
            yield from self._free(f"tape{index}", *([f"a{index - 1}"] if index > s else ()))
        free_bytes = m - self.layers[stored_step - 1].activation_bytes
        yield from self._list_events(free_bytes, stored_step, t)
        yield from self._free(f"a{stored_step - 1}")
        yield from self._list_events(m, s, stored_step - 1)

    def _compute(self, node):
        return Instruction(Op.COMPUTE, self._node[node])

    def _free(self, *names):
        tensors = (self._tensor[name] for name in names if name in self._tensor)
        yield from (Instruction(Op.FREE, i) for i in tensors)


class Simrd:
    """DTR's simulated runtime with a memory budget [B]; `run` returns the compute time [s].

    With `uses_classes`, scores approximate the neighbourhood by equivalence classes.
    """

    def __init__(self, graph, cost, budget, *, uses_classes=False):
        self.graph = graph
        self.cost = cost
        self.budget = budget
        self.clock = 0.0
        self.usage = 0
        self.material = set()
        self.created = set()
        self.locked = {}
        self.pinned = set()
        self.last_access = {}
        self.limit = math.inf
        """Compute time above which `TimeoutError` is raised [s]."""
        self._score = self._score_by_class if uses_classes else self._score_by_region
        self._root = {}
        self._class_cost = {}
        self._parent = {}

    def run(self):
        """Compute every node in order; tensors that cannot be recomputed are pinned."""
        graph = self.graph
        for k, node in enumerate(graph.nodes):
            self.created.update(graph.outputs_of[k])
            self._materialize(k)
            for i in graph.outputs_of[k]:
                self.last_access[i] = self.clock
                if not node.recomputable:
                    self.pinned.add(i)
            for i in {*graph.inputs_of[k], *graph.outputs_of[k]}:
                users = graph.users_of[i]
                if (users[-1] if users else graph.node_of[i]) == k and self._is_evictable(i):
                    self._evict(i)
        return self.clock

    def _materialize(self, k):
        graph = self.graph
        inputs = graph.inputs_of[k]
        for p in inputs:
            self.last_access[p] = self.clock
        missing = [p for p in inputs if p not in self.material]
        for p in inputs:
            if p not in missing:
                self.locked[p] = self.locked.get(p, 0) + 1
        for p in missing:
            if p not in self.material:
                self._materialize(graph.node_of[p])
            self.locked[p] = self.locked.get(p, 0) + 1
        self._free(sum(graph.tensor_bytes[o] for o in graph.outputs_of[k]))
        self._compute(k)
        for p in inputs:
            self.locked[p] -= 1

    def _free(self, required_bytes):
        graph = self.graph
        while self.usage + required_bytes > self.budget:
            evictable_tensors = [
                i for i in self.material if self._is_evictable(i) and graph.tensor_bytes[i]
            ]
            if not evictable_tensors:
                raise MemoryError
            self._evict(min(evictable_tensors, key=lambda i: (self._score(i), i)))

    def _compute(self, k):
        graph = self.graph
        self.clock += self.cost[k]
        if self.clock > self.limit:
            raise TimeoutError
        for o in graph.outputs_of[k]:
            if o not in self.material:
                self.material.add(o)
                self.usage += graph.tensor_bytes[o]
                if o in self._root:
                    self._class_cost[self._find(self._root.pop(o))] -= self.cost[k]

    def _is_evictable(self, i):
        return i in self.material and not self.locked.get(i) and i not in self.pinned

    def _evict(self, i):
        self.material.remove(i)
        self.usage -= self.graph.tensor_bytes[i]
        new_class = object()
        neighbour_classes = [self._find(self._root[u]) for u in self._evicted_neighbours(i)]
        self._parent[new_class] = new_class
        self._class_cost[new_class] = self.cost[self.graph.node_of[i]]
        self._root[i] = new_class
        for root in set(neighbour_classes):
            self._parent[root] = new_class
            self._class_cost[new_class] += self._class_cost[root]

    def _find(self, node):
        while self._parent[node] is not node:
            node = self._parent[node]
        return node

    def _parents(self, i):
        return self.graph.inputs_of[self.graph.node_of[i]]

    def _children(self, i):
        outputs = (o for k in self.graph.users_of[i] for o in self.graph.outputs_of[k])
        return [o for o in outputs if o in self.created]

    def _evicted_neighbours(self, i):
        neighbours = {*self._parents(i), *self._children(i)}
        return {u for u in neighbours if u not in self.material and u in self._root}

    def _region_cost(self, i, neighbours):
        region = set()
        pending = [i]
        while pending:
            for u in neighbours(pending.pop()):
                if u not in self.material and u in self._root and u not in region:
                    region.add(u)
                    pending.append(u)
        return math.fsum(self.cost[self.graph.node_of[u]] for u in region)

    def _score_by_region(self, i):
        node_cost = self.cost[self.graph.node_of[i]]
        cost = (
            node_cost + self._region_cost(i, self._parents) + self._region_cost(i, self._children)
        )
        return self._per_byte_second(i, cost)

    def _score_by_class(self, i):
        node_cost = self.cost[self.graph.node_of[i]]
        roots = {self._find(self._root[u]) for u in self._evicted_neighbours(i)}
        return self._per_byte_second(i, node_cost + sum(self._class_cost[root] for root in roots))

    def _per_byte_second(self, i, cost):
        weight = self.graph.tensor_bytes[i] * (self.clock - self.last_access[i])
        return cost / weight if weight > 0 else math.inf
