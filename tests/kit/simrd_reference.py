"""The runtime of DTR's simulator, literally and recursively: our own transcription, for tests.

Kirisame et al., Dynamic Tensor Rematerialization, ICLR 2021; ``RuntimeV2Eager`` and the heuristics
``DTR`` and ``DTREqClass`` of simrd, github.com/uwsampl/dtr-prototype. Each output of a node has a
storage of its own, whose cost is that of the whole node. There are no aliases here.
"""

import math


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
        neighbours = [self._find(self._root[u]) for u in self._evicted_beside(i)]
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

    def _evicted_beside(self, i):
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
        roots = {self._find(self._root[u]) for u in self._evicted_beside(i)}
        return self._per_byte_second(i, own + sum(self._class_cost[root] for root in roots))

    def _per_byte_second(self, i, cost):
        weight = self.graph.tensor_bytes[i] * (self.clock - self.last_access[i])
        return cost / weight if weight > 0 else math.inf
