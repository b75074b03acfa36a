"""Small random training steps with state tensors and in-place operators, reproducible by seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poetmodel.graph import Graph, Node, Phase, Tensor

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
