"""A schedule: the relations of the paper, the state in RAM, the graph, and their file."""

from __future__ import annotations

import gc
import json
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import chain, groupby, islice, repeat
from operator import index, itemgetter, lt
from typing import TYPE_CHECKING, Any, Final

from poetmodel.clock import check_time_limit, watched
from poetmodel.errors import InputError, ScheduleError, TooLargeError, shown
from poetmodel.files import write_text
from poetmodel.units import brief

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from poetmodel.graph import Graph

RELATIONS: Final = ("R", "S_RAM", "S_AUX", "M_in", "M_out")
"""The relations of a schedule, as the paper names them (POET, ICML 2022, section 5.2)."""

RESIDENT: Final = "resident"
"""Key of a schedule file for the state tensors whose home is RAM."""

FORMAT: Final = "poetmodel-schedule"
VERSION: Final = 1

OBJECTIVE_VALUE: Final = "objective.value"
OBJECTIVE_BOUND: Final = "objective.bound"
"""What a file claims of the minimized quantity, and of its bound."""
STATED: Final = (
    "energy_j",
    "bound_j",
    "baseline_energy_j",
    "overhead_j",
    "overhead_bound_j",
    "gap",
    "peak_ram_bytes",
    "compute_s",
    "transfer_s",
    "makespan_s",
    "build_s",
    "solve_s",
)
"""The figures of a schedule file."""

HISTORY: Final = "history"
"""Key of a schedule file for how incumbent and bound met."""
WEAR: Final = ("written_bytes", "steps_until_worn")
"""The figures of a schedule file about storage that wears."""

MOST_PAIRS: Final = 30_000_000
"""Most pairs of one relation: each takes about 64 bytes, so that these take some 2 GB."""

Pair = tuple[int, int]
_IN_A_PAIR: Final = 2
Span = tuple[int, int, int]
"""Tensor, first stage and last stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphIdentity:
    """Which graph a schedule belongs to."""

    name: str
    sha256: str
    """SHA-256 of its canonical JSON."""
    nodes: tuple[str, ...] = field(repr=False)
    """Their names, in order."""
    tensors: tuple[str, ...] = field(repr=False)
    """Their names, in order."""

    @classmethod
    def of(cls, graph: Graph) -> GraphIdentity:
        """Return the identity of a graph."""
        return cls(
            name=graph.name,
            sha256=graph.sha256,
            nodes=tuple(node.name for node in graph.nodes),
            tensors=tuple(tensor.name for tensor in graph.tensors),
        )

    def check(self, graph: Graph, *, made: str, error: type[InputError]) -> None:
        """Raise an error unless what was made (a schedule, a plan) is for this graph."""
        if self.sha256 != graph.sha256:
            raise error(
                f"the {made} was made for graph {self.name!r} (sha256 {self.sha256[:12]}...), not "
                f"for this {graph.name!r} (sha256 {graph.sha256[:12]}...); give the graph it was "
                "made for"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What is computed, kept, stored and moved in every stage.

    Each relation is a sorted tuple of pairs ``(t, k)``: stage and node for `R`, stage and tensor
    for the others. Pairs given in any order, or twice, are put in order.

    Raises
    ------
    ScheduleError
        If a relation is anything but pairs of whole numbers.
    """

    R: tuple[Pair, ...]
    """Node `k` is computed in stage `t`; `k < t` is a recomputation."""
    S_RAM: tuple[Pair, ...] = ()
    """Tensor `i` is in RAM when stage `t` begins."""
    S_AUX: tuple[Pair, ...] = ()
    """Tensor `i` is on auxiliary storage when stage `t` begins."""
    M_in: tuple[Pair, ...] = ()
    """Tensor `i` is paged in, storage to RAM, in stage `t`."""
    M_out: tuple[Pair, ...] = ()
    """Tensor `i` is paged out, RAM to storage, in stage `t`."""
    resident: tuple[int, ...] = ()
    """The state tensors whose home is RAM, ascending; the others lie on storage between steps."""
    identity: GraphIdentity | None = field(default=None, compare=False, repr=False)
    """The graph it was made for, where known."""

    def __post_init__(self) -> None:
        for name in RELATIONS:
            given: Iterable[Pair] = getattr(self, name)
            try:
                pairs = tuple(given)
                if not {_IN_A_PAIR}.issuperset(map(len, pairs)):
                    raise ValueError  # noqa: TRY301 - as other things that are no pairs
                numbers = (map(index, map(itemgetter(at), pairs)) for at in range(_IN_A_PAIR))
                whole = list(zip(*numbers, strict=True))
            except (TypeError, ValueError):
                raise ScheduleError(
                    f"{name}: expected pairs of whole numbers (stage, index)"
                ) from None
            object.__setattr__(self, name, _ordered(whole))
        object.__setattr__(self, "resident", _ascending(self.resident))

    @property
    def kept(self) -> tuple[Span, ...]:
        """`S_RAM` as spans."""
        return spans_of_pairs(self.S_RAM)

    @property
    def stored(self) -> tuple[Span, ...]:
        """`S_AUX` as spans."""
        return spans_of_pairs(self.S_AUX)

    def __repr__(self) -> str:
        graph = "no graph named" if self.identity is None else shown(self.identity.name)
        counts = [f"{name} {len(getattr(self, name))}" for name in RELATIONS]
        held = f"resident {len(self.resident)}" if self.resident else ""
        return brief(self, graph, *counts, held)

    @classmethod
    def of_stages(
        cls,
        *,
        identity: GraphIdentity | None,
        resident: Iterable[int] = (),
        **relations: Iterable[Iterable[int]],
    ) -> Schedule:
        """Make a schedule of the indices of each stage; quick where there are many pairs.

        Parameters
        ----------
        identity : GraphIdentity or None
            The graph it is made for.
        resident : iterable of int
            The state tensors whose home is RAM.
        **relations : iterable of iterable of int
            For each relation and stage, from 0 on, the whole numbers of its pairs: ascending, each
            once. They are not checked.
        """
        schedule = object.__new__(cls)
        object.__setattr__(schedule, "identity", identity)
        object.__setattr__(schedule, "resident", _ascending(resident))
        collects = gc.isenabled()
        gc.disable()  # new pairs are no garbage, and looking for some doubles the time
        try:
            for name in RELATIONS:
                rows = enumerate(relations.get(name, ()))
                pairs = tuple(chain.from_iterable(_pairs(t, row) for t, row in rows))
                object.__setattr__(schedule, name, pairs)
        finally:
            if collects:
                gc.enable()
        return schedule

    @classmethod
    def of_entries(cls, entries: Mapping[str, Any], identity: GraphIdentity | None) -> Schedule:
        """Make a schedule of the keys of a schedule file that say what is done.

        Without the key of resident state there is none.
        """
        relations = {name: entries[name] for name in RELATIONS}
        return cls(**relations, resident=entries.get(RESIDENT, ()), identity=identity)

    def entries(self, *, has_state: bool) -> dict[str, Any]:
        """Return the keys of a schedule file that say what is done.

        Resident state is among them where the graph has state, or the schedule names some.
        """
        relations = {name: [list(pair) for pair in getattr(self, name)] for name in RELATIONS}
        listed = has_state or self.resident
        return relations | ({RESIDENT: list(self.resident)} if listed else {})

    def to_dict(self) -> dict[str, Any]:
        """Return the schedule as plain values: format, graph, names, relations."""
        identity = self.identity
        return {
            "format": FORMAT,
            "version": VERSION,
            "graph": identity and {"name": identity.name, "sha256": identity.sha256},
            "nodes": list(identity.nodes) if identity else None,
            "tensors": list(identity.tensors) if identity else None,
            **self.entries(has_state=False),
        }

    def save(self, path: str | Path) -> None:
        """Write a ``*.schedule.json`` file with the relations and the graph's identity.

        Raises
        ------
        ScheduleError
            If the schedule does not say which graph it belongs to.
        """
        if self.identity is None:
            raise ScheduleError(
                "the schedule names no graph; make it with identity=GraphIdentity.of(graph)"
            )
        write_text(path, dump(self.to_dict()))

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """Read the relations of a ``*.schedule.json`` file; figures in it are left aside."""
        from poetmodel.schedule.io import load_document

        return load_document(path).schedule


def dump(document: dict[str, Any]) -> str:
    """Return the JSON text of a schedule or plan file: one key a line, each value on one line."""
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, allow_nan=False, ensure_ascii=False)}"
        for key, value in document.items()
    ]
    return "{" + ",\n ".join(lines) + "}\n"


def _pairs(t: int, row: Iterable[int]) -> Iterator[Pair]:
    check_time_limit()
    return zip(repeat(t), row)


def _ascending(tensors: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(sorted({index(i) for i in tensors}))
    except (TypeError, ValueError):
        raise ScheduleError("resident: expected whole numbers (tensors)") from None


def _ordered(pairs: list[Pair]) -> tuple[Pair, ...]:
    """Return pairs sorted, each once; by stages first, which is quick where there are many."""
    check_time_limit()
    if all(map(lt, pairs, islice(pairs, 1, None))):
        return tuple(pairs)
    stages: dict[int, set[int]] = {}
    for t, k in watched(pairs):
        stages.setdefault(t, set()).add(k)
    return tuple((t, k) for t in sorted(stages) for k in sorted(stages[t]))


def storage_entries(
    graph: Graph, page_ins: Iterable[Pair], resident: Collection[int] = ()
) -> tuple[Pair, ...]:
    """Return ``S_AUX`` as page-ins need it.

    A tensor that is paged out at its first computation is listed up to its last page-in; one that
    lies on storage from the start, in every stage after its node's. State that is not resident lies
    there up to the stage that replaces it.
    """
    spans = _storage_spans(graph, page_ins, resident)
    return tuple((t, i) for i, first, last in spans for t in range(first, last + 1))


def _storage_spans(graph: Graph, page_ins: Iterable[Pair], resident: Collection[int]) -> list[Span]:
    """Return the same as spans of stages."""
    last: dict[int, int] = {}
    for t, i in page_ins:
        last[i] = max(t, last.get(i, 0))
    last |= dict.fromkeys(graph.on_aux, len(graph.nodes) - 1)
    last |= {i: graph.last_page_in(i) for i in set(graph.state_tensors).difference(resident)}
    return [(i, graph.node_of[i] + 1, end) for i, end in last.items()]


def paged_at_once(
    graph: Graph,
    *,
    R: Iterable[Iterable[int]],
    S_RAM: Iterable[Iterable[int]],
    M_in: Iterable[Sequence[int]],
    identity: GraphIdentity | None,
    resident: Iterable[int] = (),
) -> Schedule:
    """Return the schedule that pages out, right after its first computation, what it pages in.

    R, S_RAM, M_in and resident are as for `Schedule.of_stages`; S_AUX and M_out follow. What
    replaces state that is not resident is paged out where it is made.
    """
    arriving, homes = list(M_in), set(resident)
    page_ins = [(t, i) for t, tensors in enumerate(arriving) for i in tensors]
    n = len(graph.nodes)
    leaving = {i for _, i in page_ins if not graph.starts_on_storage[i]}
    leaving.update(new for old, new in graph.replacement_of.items() if old not in homes)
    out = sorted((graph.node_of[i], i) for i in leaving)
    return Schedule.of_stages(
        R=R,
        S_RAM=S_RAM,
        S_AUX=rows_of_spans(_storage_spans(graph, page_ins, homes), n),
        M_in=arriving,
        M_out=rows_of_pairs(out, n),
        resident=homes,
        identity=identity,
    )


def spans_of_pairs(pairs: Sequence[Pair]) -> tuple[Span, ...]:
    """Return the longest spans of some pairs (stage, tensor), which ascend; by tensor."""
    spans: list[Span] = []
    begun: dict[int, int] = {}
    last = 0
    for t, group in groupby(pairs, key=itemgetter(0)):
        check_time_limit()
        row = {i for _, i in group}
        ended = begun.keys() - row if t == last + 1 else tuple(begun)
        spans.extend((i, begun.pop(i), last) for i in ended)
        begun.update((i, t) for i in row - begun.keys())
        last = t
    spans.extend((i, first, last) for i, first in begun.items())
    return tuple(sorted(spans))


def pairs_of_spans(spans: Iterable[Span]) -> tuple[Pair, ...]:
    """Return the pairs (stage, tensor) of spans, ascending."""
    return tuple(sorted((t, i) for i, first, last in spans for t in range(first, last + 1)))


def rows_of_spans(spans: Iterable[Span], stages: int) -> list[list[int]]:
    """Return for each stage the tensors whose spans contain it, ascending.

    Spans of the same tensor must not overlap; one that ends before it begins is empty. More than
    `MOST_PAIRS` raise `TooLargeError`.
    """
    spans = [span for span in spans if span[1] <= span[2]]
    pairs = sum(last - first + 1 for _, first, last in spans)
    if pairs > MOST_PAIRS:
        raise TooLargeError(
            f"a schedule of these {stages:,} stages would list {pairs:,} tensors in one relation, "
            f"more than the {MOST_PAIRS:,} that fit into memory; coarsen the graph"
        )
    begins: list[list[int]] = [[] for _ in range(stages + 1)]
    ends: list[list[int]] = [[] for _ in range(stages + 1)]
    for i, first, last in spans:
        begins[first].append(i)
        ends[last + 1].append(i)
    rows = []
    present: list[int] = []
    for t in range(stages):
        check_time_limit()
        for i in ends[t]:
            del present[bisect_left(present, i)]
        for i in begins[t]:
            insort(present, i)
        rows.append(present.copy())
    return rows


def rows_of_pairs(pairs: Iterable[Pair], stages: int) -> list[list[int]]:
    """Return for each stage its indices, in the order of the pairs."""
    rows: list[list[int]] = [[] for _ in range(stages)]
    for t, k in watched(tuple(pairs)):
        rows[t].append(k)
    return rows


def checkpoint_all(graph: Graph) -> Schedule:
    """Return the schedule that computes every node once and keeps tensors to their last use.

    All state is in RAM.
    """
    n = len(graph.nodes)
    state = frozenset(graph.state_tensors)
    kept = (
        (i, graph.node_of[i] + 1, users[-1] if users else 0)
        for i, users in enumerate(graph.users_of)
        if i not in state
    )
    return paged_at_once(
        graph,
        R=((t,) for t in range(n)),
        S_RAM=rows_of_spans(kept, n),
        M_in=(),
        resident=state,
        identity=GraphIdentity.of(graph),
    )
