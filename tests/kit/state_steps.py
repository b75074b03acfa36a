"""Small random training steps with state tensors and in-place operators, reproducible by seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poetmodel.graph import Graph, Node, Phase, Tensor
from poetmodel.schedule import Schedule

if TYPE_CHECKING:
    import random


def state(name: str, size: int) -> Node:
    """Return a node that holds a state tensor of its own name."""
    outputs = (Tensor(name=name, bytes=size),)
    return Node(name=name, op="parameter", phase=Phase.STATE, outputs=outputs)


def update(name: str, *inputs: str, **replaced: int) -> Node:
    """Return a node that replaces state tensors, given by name with their bytes."""
    outputs = tuple(
        Tensor(name=f"{old}+", bytes=size, replaces=old) for old, size in replaced.items()
    )
    return Node(
        name=name,
        op="sgd",
        phase=Phase.UPDATE,
        inputs=(*inputs, *replaced),
        outputs=outputs,
        recomputable=False,
    )


def random_step(
    rng: random.Random, n: tuple[int, int] = (3, 7), *, max_bytes: int = 9, flops: int = 0
) -> Graph:
    """Make a random graph of version 2: state that is read, replaced or neither, and pairs.

    Every node may have none to two plain outputs beside its replacements; small sizes, zero
    included, samples on storage, workspace and nodes that are computed once all occur.
    """
    nodes: list[Node] = []
    plain: list[str] = []
    held: dict[str, int] = {}  # state that nothing has replaced yet, with its bytes
    chance = rng.choice((0.3, 0.5, 0.7))

    def size() -> int:
        return 0 if rng.random() < 0.08 else rng.randint(1, max_bytes)

    count = rng.randint(*n)
    while len(nodes) < count:
        k = len(nodes)
        if rng.random() < 0.3:
            held[f"w{k}"] = size()
            nodes.append(state(f"w{k}", held[f"w{k}"]))
            continue
        read = [name for name in plain if rng.random() < chance]
        reads_state = [name for name in held if rng.random() < chance]
        replaced = [name for name in reads_state if rng.random() < 0.4]
        made = [Tensor(name=f"n{k}{end}", bytes=size()) for end in ("", ".b")]
        made = made[: rng.choice((0, 1, 1, 1, 2) if replaced else (1, 1, 1, 1, 2))]
        givers = rng.sample(read, len(read))
        pairs = {
            tensor.name: giver
            for tensor, giver in zip(made, givers, strict=False)
            if rng.random() < 0.6
        }
        replacements = [
            Tensor(name=f"{name}+", bytes=held.pop(name), replaces=name) for name in replaced
        ]
        outputs = [*made, *replacements]
        rng.shuffle(outputs)
        inputs = [*read, *reads_state]
        rng.shuffle(inputs)
        nodes.append(
            Node(
                name=f"n{k}",
                op="op",
                phase=Phase.UPDATE if replaced else Phase.FORWARD,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                workspace_bytes=size() if rng.random() < 0.25 else 0,
                flops=rng.randint(0, flops),
                recomputable=not replaced and rng.random() < 0.85,
                on_aux=not inputs and bool(made) and rng.random() < 0.3,
                in_place=tuple(pairs.items()),
            )
        )
        plain += [tensor.name for tensor in made]
    return Graph(name="step", nodes=tuple(nodes))


def random_state_schedule(  # noqa: C901 - one stage after the other, as `random_schedule`
    rng: random.Random, graph: Graph, *, mapped: bool = False
) -> Schedule | None:
    """Make a random schedule that is meant to be valid, in general a wasteful one.

    None where it let something go that cannot be had again: state was replaced meanwhile.
    """
    drop, waste = rng.random() * 0.7, rng.choice((0.0, 0.1, 0.4))
    share = rng.choice((0.0, 0.3, 0.6, 1.0))
    made_by = [k for k, node in enumerate(graph.nodes) for _ in node.outputs]
    names = [tensor.name for node in graph.nodes for tensor in node.outputs]
    state_tensors = {i for i, k in enumerate(made_by) if graph.nodes[k].phase == Phase.STATE}
    replaced: dict[int, int] = {}
    renewed: dict[int, int] = {}
    for k, node in enumerate(graph.nodes):
        for tensor in node.outputs:
            if tensor.replaces is not None:
                replaced[names.index(tensor.replaces)] = k
                renewed[names.index(tensor.name)] = names.index(tensor.replaces)
    resident = {i for i in state_tensors if rng.random() < share}
    apart = resident | (state_tensors if mapped else set())
    reads = [{names.index(name) for name in node.inputs} for node in graph.nodes]
    makes = [{i for i, made in enumerate(made_by) if made == k} for k in range(len(graph.nodes))]
    stored = {i for i in range(len(names)) if graph.nodes[made_by[i]].on_aux}
    stored |= state_tensors - resident
    held: set[int] = set()
    R, S_RAM, S_AUX, M_in, M_out = relations = [set[tuple[int, int]]() for _ in range(5)]  # noqa: N806
    for t in range(len(graph.nodes)):
        gone = {i for i, u in replaced.items() if u < t}
        again = [
            node.recomputable and node.phase != Phase.STATE and not reads[k] & gone
            for k, node in enumerate(graph.nodes[:t])
        ]
        listed = {i for i in stored if made_by[i] < t} - gone
        readable = listed - apart - renewed.keys()
        lost = {i for i in held if rng.random() < drop and (i in listed or again[made_by[i]])}
        kept = held - lost - gone - apart - renewed.keys()
        computed = {t} | {k for k in range(t) if again[k] and rng.random() < waste}
        read = {i for i in readable - kept if rng.random() < waste}
        for k in range(t, -1, -1):
            for i in reads[k] if k in computed else ():
                if i in kept or i in read or made_by[i] in computed or i in apart:
                    continue
                if i in readable and (not again[made_by[i]] or rng.random() < 0.5):
                    read.add(i)
                elif again[made_by[i]]:
                    computed.add(made_by[i])
                else:
                    return None
        held = kept | read | {i for k in computed for i in makes[k]}
        written = {
            i
            for i in held - state_tensors - renewed.keys()
            if rng.random() < (0.3 if made_by[i] == t else waste)
        }
        written |= {i for i in makes[t] & renewed.keys() if renewed[i] not in resident}
        stored |= written
        unread = {i for i in listed - read if rng.random() < waste}
        for relation, members in zip(
            relations, (computed, kept, listed - unread, read, written), strict=True
        ):
            relation.update((t, member) for member in members)
    return Schedule(
        R=tuple(R),
        S_RAM=tuple(S_RAM),
        S_AUX=tuple(S_AUX),
        M_in=tuple(M_in),
        M_out=tuple(M_out),
        resident=tuple(resident),
    )
