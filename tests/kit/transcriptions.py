"""Published methods to compare with, as their authors have them: our own transcriptions, for tests.

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
    """Step `l` of a chain: ``F_l`` makes the activation ``a_l`` and, if asked, the tape beside it.

    ``B_l`` reads the gradient of ``a_l``, the tape, ``a_l`` where `reads_own`, and ``a_(l-1)``.
    """

    forward_s: int
    backward_s: int
    activation_bytes: int
    tape_bytes: int = 0
    """What ``F_l`` makes for ``B_l`` besides ``a_l``."""
    reads_own: bool = True
    gradient_bytes: int = 0
    """Bytes of the gradient that ``B_l`` makes."""
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0


def random_layers(rng, count):
    """Return the layers of a random chain: `count` of them and a loss."""
    sizes = [rng.randint(1, 9) for _ in range(count)]
    own = rng.random() < 0.7
    tapes = rng.random() < 0.3
    workspaces = (0, 0, 3) if rng.random() < 0.3 else (0,)
    layers = [
        Layer(
            forward_s=rng.randint(1, 9),
            backward_s=rng.randint(1, 9),
            activation_bytes=size,
            tape_bytes=rng.randint(0, 6) if tapes else 0,
            reads_own=own,
            gradient_bytes=before,
            forward_workspace_bytes=rng.choice(workspaces),
            backward_workspace_bytes=rng.choice(workspaces),
        )
        for size, before in zip(sizes, (1, *sizes), strict=False)
    ]
    loss = Layer(
        forward_s=0, backward_s=0, activation_bytes=0, reads_own=False, gradient_bytes=sizes[-1]
    )
    return [*layers, loss]


def chain_graph(layers):
    """Return the training graph of a chain: ``x, F0, F1, ..., loss, Bn, ..., B0``."""
    nodes = [operation("x", output_bytes=1, phase="input", recomputable=False)]
    last = len(layers) - 1
    for place, layer in enumerate(layers):
        made = [Tensor(name=f"a{place}", bytes=layer.activation_bytes)]
        if layer.tape_bytes:
            made.append(Tensor(name=f"tape{place}", bytes=layer.tape_bytes))
        nodes.append(
            Node(
                name=f"F{place}",
                op="f",
                phase="loss" if place == last else "forward",
                inputs=(f"a{place - 1}" if place else "x",),
                outputs=tuple(made),
                workspace_bytes=layer.forward_workspace_bytes,
            )
        )
    for place in reversed(range(len(layers))):
        layer = layers[place]
        read = [f"g{place + 1}"] if place < last else []
        read.append(f"a{place - 1}" if place else "x")
        read += [f"a{place}"] * layer.reads_own + [f"tape{place}"] * bool(layer.tape_bytes)
        nodes.append(
            operation(
                f"g{place}",
                output_bytes=layer.gradient_bytes,
                phase="backward",
                inputs=tuple(read),
                workspace_bytes=layer.backward_workspace_bytes,
                recomputable=False,
            )
        )
    return Graph(name="chain", nodes=tuple(nodes))


def seconds(layers):
    """Return the compute time of every node of `chain_graph` [s]."""
    forward = [layer.forward_s for layer in layers]
    return [0, *forward, *(layer.backward_s for layer in reversed(layers))]


class Rotor:
    """``C(m, s, t)``: the least time of steps ``s..t`` and back with `m` bytes.

    Outside of `m` is ``a_(s-1)``; inside is the gradient of ``a_t``. As in the paper, the saved set
    of a step (``a-bar``) includes its activation.
    """

    def __init__(self, layers):
        self.layers = layers
        self.graph = chain_graph(layers)
        self.cost = cache(self._cost)
        self._node = {node.name: k for k, node in enumerate(self.graph.nodes)}
        self._tensor = {tensor.name: i for i, tensor in enumerate(self.graph.tensors)}

    def gradient(self, t):
        """Return the bytes of the gradient of ``a_t``."""
        return self.layers[t + 1].gradient_bytes if t + 1 < len(self.layers) else 0

    def saved(self, s):
        """Return the bytes of what ``F_all`` keeps of step `s`."""
        return self.layers[s].activation_bytes + self.layers[s].tape_bytes

    def _cost(self, m, s, t):
        """Return the least time, and the step before which an activation is stored (None: none)."""
        layer = self.layers[s]
        if s == t:
            backward = layer.gradient_bytes + layer.backward_workspace_bytes
            peak = self.saved(s) + self.gradient(s)
            fits = m >= peak + max(backward, layer.forward_workspace_bytes)
            return (layer.forward_s + layer.backward_s if fits else inf), None
        if m < self.least(s, t):
            return inf, None
        best = (inf, None)
        left = m - self.saved(s)
        if left >= 0:
            best = self.cost(m, s, s)[0] + self.cost(left, s + 1, t)[0], None
        run_s = 0
        for cut in range(s + 1, t + 1):
            run_s += self.layers[cut - 1].forward_s
            left = m - self.layers[cut - 1].activation_bytes
            if left >= 0:
                value = run_s + self.cost(left, cut, t)[0] + self.cost(m, s, cut - 1)[0]
                best = min(best, (value, cut), key=lambda found: found[0])
        return best

    def least(self, s, t):
        """Return what the forward steps before the first decision need at least."""
        first = self.layers[s]
        need = first.activation_bytes + first.forward_workspace_bytes
        for place in range(s + 1, t):
            layer, before = self.layers[place], self.layers[place - 1]
            bytes_ = before.activation_bytes + layer.activation_bytes
            need = max(need, bytes_ + layer.forward_workspace_bytes)
        return need + self.gradient(t)

    def sequence(self, m):
        """Return the sequence for `m` bytes beside the sample, None where there is none."""
        last = len(self.layers) - 1
        if self.cost(m, 0, last)[0] == inf:
            return None
        sample = self._compute("x")
        execution = Execution(self.graph)
        for op, index in (sample, *self._events(m, 0, last)):
            if op == Op.COMPUTE:
                execution.compute(index)
            elif index in execution.ram:
                execution.free(index)
        return execution.schedule()

    def _events(self, m, s, t):
        cut = None if s == t else self.cost(m, s, t)[1]
        if cut is None:
            yield self._compute(f"F{s}")  # F_all
            if s < t:
                yield from self._events(m - self.saved(s), s + 1, t)
            yield self._compute(f"g{s}")
            yield from self._free(f"g{s + 1}", f"a{s}", f"tape{s}")
            return
        for place in range(s, cut):  # F_ck, then F_none
            yield self._compute(f"F{place}")
            yield from self._free(f"tape{place}", *([f"a{place - 1}"] if place > s else ()))
        left = m - self.layers[cut - 1].activation_bytes
        yield from self._events(left, cut, t)
        yield from self._free(f"a{cut - 1}")
        yield from self._events(m, s, cut - 1)

    def _compute(self, node):
        return Instruction(Op.COMPUTE, self._node[node])

    def _free(self, *names):
        known = (self._tensor[name] for name in names if name in self._tensor)
        yield from (Instruction(Op.FREE, i) for i in known)


class Simrd:
    """A runtime with a budget; `run` returns the clock at the end [s]."""

    def __init__(self, graph, cost, budget, *, classes=False):
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
        """Where the clock stops with a `TimeoutError` [s]."""
        self._score = self._by_class if classes else self._by_region
        self._root = {}
        self._class_cost = {}
        self._parent = {}

    def run(self):
        """Compute every node in order; what cannot be recomputed is a pinned constant."""
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
                if (users[-1] if users else graph.node_of[i]) == k and self._evictable(i):
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

    def _free(self, total):
        graph = self.graph
        while self.usage + total > self.budget:
            pool = [i for i in self.material if self._evictable(i) and graph.tensor_bytes[i]]
            if not pool:
                raise MemoryError
            self._evict(min(pool, key=lambda i: (self._score(i), i)))

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

    def _evictable(self, i):
        return i in self.material and not self.locked.get(i) and i not in self.pinned

    def _evict(self, i):
        self.material.remove(i)
        self.usage -= self.graph.tensor_bytes[i]
        own = object()
        neighbours = [self._find(self._root[u]) for u in self._evicted_neighbours(i)]
        self._parent[own] = own
        self._class_cost[own] = self.cost[self.graph.node_of[i]]
        self._root[i] = own
        for root in set(neighbours):
            self._parent[root] = own
            self._class_cost[own] += self._class_cost[root]

    def _find(self, node):
        while self._parent[node] is not node:
            node = self._parent[node]
        return node

    def _parents(self, i):
        return self.graph.inputs_of[self.graph.node_of[i]]

    def _children(self, i):
        made = (o for k in self.graph.users_of[i] for o in self.graph.outputs_of[k])
        return [o for o in made if o in self.created]

    def _evicted_neighbours(self, i):
        beside = {*self._parents(i), *self._children(i)}
        return {u for u in beside if u not in self.material and u in self._root}

    def _region(self, i, neighbours):
        met = set()
        todo = [i]
        while todo:
            for u in neighbours(todo.pop()):
                if u not in self.material and u in self._root and u not in met:
                    met.add(u)
                    todo.append(u)
        return math.fsum(self.cost[self.graph.node_of[u]] for u in met)

    def _by_region(self, i):
        own = self.cost[self.graph.node_of[i]]
        cost = own + self._region(i, self._parents) + self._region(i, self._children)
        return self._per_byte_second(i, cost)

    def _by_class(self, i):
        own = self.cost[self.graph.node_of[i]]
        roots = {self._find(self._root[u]) for u in self._evicted_neighbours(i)}
        return self._per_byte_second(i, own + sum(self._class_cost[root] for root in roots))

    def _per_byte_second(self, i, cost):
        weight = self.graph.tensor_bytes[i] * (self.clock - self.last_access[i])
        return cost / weight if weight > 0 else math.inf
