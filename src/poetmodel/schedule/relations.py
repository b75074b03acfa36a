"""Schedules: the relations of the paper, homes of state, graph identity, and their files."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import chain, groupby, islice, repeat
from operator import index, itemgetter, lt
from typing import TYPE_CHECKING, Any, Final

from poetmodel.clock import check_time_limit, iterate_in_time, no_gc
from poetmodel.errors import ScheduleError, TooLargeError, quote
from poetmodel.files import write_text
from poetmodel.headers import THIS_VERSION, WRITTEN_BY
from poetmodel.schedule.identity import FORMAT, RELATIONS, RESIDENT, VERSION, GraphIdentity
from poetmodel.units import brief

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from poetmodel.graph import Graph
    from poetmodel.schedule.io import ScheduleFile

_SPANS: Final = {"S_RAM": "kept", "S_AUX": "stored"}
"""Relations that are stored as spans, with the attribute that has the spans."""

MAX_PAIRS: Final = 30_000_000
"""Maximum number of pairs of one relation listed from spans: 64 bytes each, 2 GB together."""

Pair = tuple[int, int]
"""Stage, and node or tensor."""
_PAIR_LENGTH: Final = 2
"""Number of values of a pair."""
Span = tuple[int, int, int]
"""Tensor, first stage and last stage, which is included."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Nodes computed, and tensors kept, stored and paged, in each stage.

    Each relation is a sorted tuple of pairs ``(t, k)``: stage and node for `R`, stage and tensor
    for the other relations. Arguments may have pairs in any order and repeated. The numbers of
    pairs of `S_RAM` and `S_AUX` grow with the square of the graph, so both relations are stored as
    spans; their pairs are listed on first access.

    Raises
    ------
    ScheduleError
        If a relation contains anything except pairs of integers, or `resident` anything except
        integers.
    TooLargeError
        On access to `S_RAM` or `S_AUX`, if it has more than `MAX_PAIRS` pairs.
    TimeLimitError
        If a time limit of the calling context passes; also on access to `S_RAM` or `S_AUX`.
    """

    R: tuple[Pair, ...]
    """Node `k` is computed in stage `t`; `k < t` is a recomputation."""
    S_RAM: tuple[Pair, ...] = field(default_factory=tuple, compare=False)
    """Tensor `i` is in RAM when stage `t` begins."""
    S_AUX: tuple[Pair, ...] = field(default_factory=tuple, compare=False)
    """Tensor `i` is on auxiliary storage when stage `t` begins."""
    M_in: tuple[Pair, ...] = ()
    """Tensor `i` is paged in, storage to RAM, in stage `t`."""
    M_out: tuple[Pair, ...] = ()
    """Tensor `i` is paged out, RAM to storage, in stage `t`."""
    resident: tuple[int, ...] = ()
    """The state tensors whose home is RAM, ascending; other state is on storage between steps."""
    identity: GraphIdentity | None = field(default=None, compare=False, repr=False)
    """The graph that the schedule was made for; None if unknown."""
    kept: tuple[Span, ...] = field(init=False, repr=False)
    """`S_RAM` as maximal spans of stages, by tensor."""
    stored: tuple[Span, ...] = field(init=False, repr=False)
    """`S_AUX` as maximal spans of stages, by tensor."""

    def __post_init__(self) -> None:
        """Validate and sort pairs; `kept` and `stored` replace ``S_RAM`` and ``S_AUX`` by spans."""
        for name in RELATIONS:
            entries: Iterable[Pair] = getattr(self, name)
            try:
                pairs = tuple(entries)
                if not {_PAIR_LENGTH}.issuperset(map(len, pairs)):
                    raise ValueError  # noqa: TRY301 - handled below with other invalid pairs
                columns = (
                    map(index, map(itemgetter(position), pairs)) for position in range(_PAIR_LENGTH)
                )
                valid_pairs = list(zip(*columns, strict=True))
            except (TypeError, ValueError):
                raise ScheduleError(
                    f"{name}: expected pairs of whole numbers (stage, index)"
                ) from None
            if name in _SPANS:
                del self.__dict__[name]
                object.__setattr__(self, _SPANS[name], spans_of_pairs(_sort_pairs(valid_pairs)))
            else:
                object.__setattr__(self, name, _sort_pairs(valid_pairs))
        object.__setattr__(self, "resident", _sort_tensors(self.resident))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> tuple[Pair, ...]:
            """Return `S_RAM` or `S_AUX`, listing the pairs of its spans on first access."""
            if name not in _SPANS:
                raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
            pairs = self.__dict__[name] = pairs_of_spans(getattr(self, _SPANS[name]))
            return pairs

    def __repr__(self) -> str:
        graph = "no graph named" if self.identity is None else quote(self.identity.name)
        pair_counts = {name: len(getattr(self, name)) for name in RELATIONS if name not in _SPANS}
        pair_counts |= {name: count_pairs(getattr(self, spans)) for name, spans in _SPANS.items()}
        counts = [f"{name} {pair_counts[name]}" for name in RELATIONS]
        resident = f"resident {len(self.resident)}" if self.resident else ""
        return brief(self, graph, *counts, resident)

    @classmethod
    def from_spans(
        cls,
        *,
        R: Iterable[Pair],
        kept: Iterable[Span],
        stored: Iterable[Span] = (),
        M_in: Iterable[Pair] = (),
        M_out: Iterable[Pair] = (),
        resident: Iterable[int] = (),
        identity: GraphIdentity | None,
    ) -> Schedule:
        """Make a schedule from spans of kept and stored tensors, without listing their pairs.

        Pairs and spans must be tuples of integers; this is not checked. Spans of a tensor may touch
        or overlap; a span that ends before it begins is empty. Raises `ScheduleError` if `resident`
        contains anything except integers, and `TimeLimitError` if a time limit of the calling
        context passes.
        """
        schedule = cls(R=(), resident=_sort_tensors(resident), identity=identity)
        for name, pairs in (("R", R), ("M_in", M_in), ("M_out", M_out)):
            object.__setattr__(schedule, name, _sort_pairs(list(pairs)))
        for name, spans in (("kept", kept), ("stored", stored)):
            object.__setattr__(schedule, name, _merge_spans(spans))
        return schedule

    @classmethod
    def from_stages(
        cls,
        *,
        identity: GraphIdentity | None,
        R: Iterable[Iterable[int]] = (),
        S_RAM: Iterable[Iterable[int]] = (),
        S_AUX: Iterable[Iterable[int]] = (),
        M_in: Iterable[Iterable[int]] = (),
        M_out: Iterable[Iterable[int]] = (),
        resident: Iterable[int] = (),
    ) -> Schedule:
        """Make a schedule from the indices of each stage.

        Parameters
        ----------
        identity : GraphIdentity or None
            The graph that the schedule is made for.
        R, S_RAM, S_AUX, M_in, M_out : iterable of iterable of int
            The indices of each stage from 0 on, ascending and without repeats. They are not
            checked.
        resident : iterable of int
            The state tensors whose home is RAM.
        """
        return cls.from_spans(
            R=pairs_of_rows(R),
            kept=spans_of_rows(S_RAM),
            stored=spans_of_rows(S_AUX),
            M_in=pairs_of_rows(M_in),
            M_out=pairs_of_rows(M_out),
            resident=resident,
            identity=identity,
        )

    @classmethod
    def from_order(cls, graph: Graph, order: Iterable[int]) -> Schedule:
        """Make a schedule without paging from an execution order, such as other solvers return.

        Each tensor is kept from its computation to its last read before it is recomputed. No
        state is resident, and replacements are not paged out, so the schedule of a graph that
        replaces state is not valid.

        Parameters
        ----------
        graph : Graph
            The training graph.
        order : iterable of int
            Indices of the computed nodes. A repeated node is recomputed. First computations are in
            the order of the graph, and so are the recomputations between two of them.

        Raises
        ------
        ScheduleError
            If a node is missing, unknown or out of order, or reads a tensor before its computation.

        Examples
        --------
        >>> import poetmodel as pm
        >>> graph = pm.Graph(name="two", nodes=(
        ...     pm.operation("a", output_bytes=4), pm.operation("b", output_bytes=4, inputs=["a"])))
        >>> pm.Schedule.from_order(graph, [0, 1]).S_RAM
        ((1, 0),)
        """
        pairs = _stages_of_order(graph, list(order))
        computed: dict[int, int] = {}
        spans: list[Span] = []
        for t, k in pairs:
            for i in graph.inputs_of[k]:
                if i not in computed:
                    node, tensor = graph.nodes[k].name, graph.tensors[i].name
                    raise ScheduleError(f"order: {node!r} reads {tensor!r} before it is computed")
                spans.append((i, computed[i] + 1, t))
            computed |= dict.fromkeys(graph.outputs_of[k], t)
        return cls.from_spans(R=pairs, kept=spans, identity=GraphIdentity.from_graph(graph))

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any], identity: GraphIdentity | None) -> Schedule:
        """Make a schedule from relations, as pairs, and resident state, by key of a schedule file.

        Other keys are ignored. Without the key of resident state, all state is on storage. Raises
        `KeyError` for a missing relation, and the errors of the class.
        """
        relations = {name: entries[name] for name in RELATIONS}
        return cls(**relations, resident=entries.get(RESIDENT, ()), identity=identity)

    @classmethod
    def from_file(cls, file: ScheduleFile) -> Schedule:
        """Make a schedule from the content of a schedule file."""
        return cls.from_entries(vars(file), file.identity())

    def entries(self, *, has_state: bool) -> dict[str, Any]:
        """Return relations, as lists of pairs, and resident state, by key of a schedule file.

        Resident state is included if the graph has state (`has_state`) or the schedule lists
        resident tensors. Raises `TooLargeError` like `S_RAM` and `S_AUX`.
        """
        relations = {name: [list(pair) for pair in getattr(self, name)] for name in RELATIONS}
        lists_resident = has_state or self.resident
        return relations | ({RESIDENT: list(self.resident)} if lists_resident else {})

    def is_kept(self, t: int, i: int) -> bool:
        """Return whether `S_RAM` lists tensor `i` in stage `t`; False for resident state."""
        position = bisect_right(self.kept, (i, t, math.inf)) - 1
        return position >= 0 and self.kept[position][0] == i and t <= self.kept[position][2]

    def to_dict(self) -> dict[str, Any]:
        """Return format, versions, graph, names, relations and resident state, as JSON values.

        Graph, and names of nodes and tensors, are None without an identity. The key of resident
        state is absent if no state is resident. Raises `TooLargeError` like `S_RAM` and `S_AUX`.
        """
        identity = self.identity
        return {
            "format": FORMAT,
            "version": VERSION,
            WRITTEN_BY: THIS_VERSION,
            "graph": identity and {"name": identity.name, "sha256": identity.sha256},
            "nodes": list(identity.nodes) if identity else None,
            "tensors": list(identity.tensors) if identity else None,
            **self.entries(has_state=False),
        }

    def save(self, path: str | Path) -> None:
        """Write a ``*.schedule.json`` file with the content of `to_dict`; replace an existing file.

        Raises
        ------
        ScheduleError
            If the schedule has no graph identity.
        InputError
            If the file cannot be written.
        TooLargeError
            If `S_RAM` or `S_AUX` has more than `MAX_PAIRS` pairs.
        """
        if self.identity is None:
            raise ScheduleError(
                "the schedule names no graph; make it with identity=GraphIdentity.from_graph(graph)"
            )
        write_text(path, format_document(self.to_dict()))

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """Read a schedule from a ``*.schedule.json`` file; its problem and metrics are ignored.

        Logs a warning on unknown keys at the top level, which are ignored, too. Raises
        `ScheduleError` if the file cannot be read, is invalid, or contains no schedule.
        """
        from poetmodel.schedule.io import load_file, log_notes

        file = load_file(path)
        log_notes(file, path)
        return cls.from_file(file)


def format_document(document: dict[str, Any]) -> str:
    """Return the JSON text of a schedule or plan file, with one top-level key per line."""
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, allow_nan=False, ensure_ascii=False)}"
        for key, value in document.items()
    ]
    return "{" + ",\n ".join(lines) + "}\n"


def _stages_of_order(graph: Graph, order: list[int]) -> list[Pair]:
    """Return the (stage, node) pairs of an execution order; a first computation ends a stage."""
    names = [node.name for node in graph.nodes]
    pairs: list[Pair] = []
    t = 0
    last_node = -1
    for k in order:
        if not 0 <= k < len(names):
            raise ScheduleError(f"order: expected nodes from 0 to {len(names) - 1}, got {k}")
        if t == len(names):
            raise ScheduleError(f"order: {names[k]!r} comes after the last node of the graph")
        if k > t:
            raise ScheduleError(f"order: {names[k]!r} comes before {names[t]!r}")
        if k <= last_node:
            raise ScheduleError(
                f"order: {names[k]!r} comes after {names[last_node]!r} and before {names[t]!r}; "
                "recomputations between two first computations are in the order of the graph"
            )
        pairs.append((t, k))
        t, last_node = (t + 1, -1) if k == t else (t, k)
    if t < len(names):
        raise ScheduleError(f"order: {names[t]!r} is missing")
    return pairs


def pairs_of_rows(rows: Iterable[Iterable[int]]) -> Iterator[Pair]:
    """Yield (stage, index) pairs from the indices of each stage, from 0 on."""
    for t, row in enumerate(rows):
        check_time_limit()
        yield from zip(repeat(t), row)


def _sort_tensors(tensors: Iterable[int]) -> tuple[int, ...]:
    """Return sorted tensors without repeats; raise `ScheduleError` unless all are integers."""
    try:
        return tuple(sorted({index(i) for i in tensors}))
    except (TypeError, ValueError):
        raise ScheduleError("resident: expected whole numbers (tensors)") from None


def _sort_pairs(pairs: list[Pair]) -> tuple[Pair, ...]:
    """Return sorted pairs without repeats; sort each stage by itself, which is faster."""
    check_time_limit()
    if all(map(lt, pairs, islice(pairs, 1, None))):
        return tuple(pairs)
    stages: dict[int, set[int]] = {}
    for t, k in iterate_in_time(pairs):
        stages.setdefault(t, set()).add(k)
    return tuple((t, k) for t in sorted(stages) for k in sorted(stages[t]))


def storage_entries(
    graph: Graph, page_ins: Iterable[Pair], resident: Collection[int] = ()
) -> tuple[Pair, ...]:
    """Return the pairs of ``S_AUX`` for page-ins, samples on storage and state on storage.

    From the stage after the node: a paged-in tensor until its last page-in, a sample to the end,
    state until it is replaced.
    """
    return pairs_of_spans(sorted(_storage_spans(graph, page_ins, resident)))


def _storage_spans(graph: Graph, page_ins: Iterable[Pair], resident: Collection[int]) -> list[Span]:
    """Return `storage_entries` as unsorted spans (tensor, first stage, last stage)."""
    last_stages: dict[int, int] = {}
    for t, i in page_ins:
        last_stages[i] = max(t, last_stages.get(i, 0))
    last_stages |= dict.fromkeys(graph.on_aux, len(graph.nodes) - 1)
    last_stages |= {
        i: graph.last_page_in_stage(i) for i in set(graph.state_tensors).difference(resident)
    }
    return [(i, graph.node_of[i] + 1, last_stage) for i, last_stage in last_stages.items()]


def with_immediate_page_outs(
    graph: Graph,
    *,
    R: Iterable[Pair],
    kept: Iterable[Span],
    M_in: Iterable[Pair],
    identity: GraphIdentity | None,
    M_out: Iterable[Pair] = (),
    resident: Iterable[int] = (),
) -> Schedule:
    """Return a schedule that pages out paged-in tensors and replacements when first computed.

    Not those on storage at first, or of resident state. `M_out` lists further page-outs.
    """
    page_ins, homes = tuple(M_in), set(resident)
    paged_out = {i for _, i in page_ins if not graph.starts_on_storage[i]}
    paged_out.update(new for old, new in graph.replacement_of.items() if old not in homes)
    return Schedule.from_spans(
        R=R,
        kept=kept,
        stored=_storage_spans(graph, page_ins, homes),
        M_in=page_ins,
        M_out=(*M_out, *((graph.node_of[i], i) for i in paged_out)),
        resident=homes,
        identity=identity,
    )


def spans_of_pairs(pairs: Iterable[Pair]) -> tuple[Span, ...]:
    """Return (stage, tensor) pairs as maximal spans (tensor, first stage, last stage), sorted.

    The stages of successive pairs must not descend.
    """
    spans: list[Span] = []
    first_stages: dict[int, int] = {}
    last_stage = 0
    for t, group in groupby(pairs, key=itemgetter(0)):
        check_time_limit()
        stage_tensors = {i for _, i in group}
        ended_tensors = (
            first_stages.keys() - stage_tensors if t == last_stage + 1 else tuple(first_stages)
        )
        spans.extend((i, first_stages.pop(i), last_stage) for i in ended_tensors)
        first_stages.update((i, t) for i in stage_tensors - first_stages.keys())
        last_stage = t
    spans.extend((i, first, last_stage) for i, first in first_stages.items())
    return tuple(sorted(spans))


def spans_of_rows(rows: Iterable[Iterable[int]]) -> tuple[Span, ...]:
    """Return maximal spans from the tensors of each stage, from 0 on, sorted by tensor."""
    return spans_of_pairs(pairs_of_rows(rows))


def _merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return sorted spans without empty ones; merge spans of a tensor that overlap or touch."""
    merged_spans: list[Span] = []
    for span in sorted(span for span in spans if span[1] <= span[2]):
        i, first, last = merged_spans[-1] if merged_spans else span
        if merged_spans and span[0] == i and span[1] <= last + 1:
            merged_spans[-1] = (i, first, max(last, span[2]))
        else:
            merged_spans.append(span)
    return tuple(merged_spans)


def count_pairs(spans: Iterable[Span]) -> int:
    """Return the number of pairs in spans: the sum of last - first + 1."""
    return sum(last - first + 1 for _, first, last in spans)


def pairs_of_spans(spans: Sequence[Span]) -> tuple[Pair, ...]:
    """Return the pairs of disjoint spans by stage, then tensor; refuse more than `MAX_PAIRS`."""
    n_pairs = count_pairs(spans)
    if n_pairs > MAX_PAIRS:
        raise TooLargeError(
            f"a schedule lists {n_pairs:,} tensors in one relation, more than the {MAX_PAIRS:,} "
            "that fit into memory; coarsen the graph"
        )
    rows: dict[int, list[int]] = {}
    for i, first, last in spans:
        check_time_limit()
        for t in range(first, last + 1):
            rows.setdefault(t, []).append(i)
    with no_gc():  # The new pairs are not garbage; collections would double the time.
        return tuple(chain.from_iterable(zip(repeat(t), rows[t]) for t in sorted(rows)))


def checkpoint_all(graph: Graph) -> Schedule:
    """Return keep-all: nodes computed once, tensors kept until their last use, state in RAM."""
    n = len(graph.nodes)
    state = frozenset(graph.state_tensors)
    kept = (
        (i, graph.node_of[i] + 1, users[-1] if users else 0)
        for i, users in enumerate(graph.users_of)
        if i not in state
    )
    return with_immediate_page_outs(
        graph,
        R=((t, t) for t in range(n)),
        kept=kept,
        M_in=(),
        resident=state,
        identity=GraphIdentity.from_graph(graph),
    )
