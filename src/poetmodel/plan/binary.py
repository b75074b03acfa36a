"""Plans in a few hundred bytes, for a device that knows the graph.

``docs/reference/formats.md`` states the format bit by bit. First computations in graph order are
not stored, nor are waits and frees that follow from the other instructions.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from poetmodel.device import StorageMode
from poetmodel.errors import PlanError
from poetmodel.graph.catalogue import find_model_by_hash
from poetmodel.plan.derivation import explicit_steps, with_waits_and_frees
from poetmodel.plan.program import Plan
from poetmodel.plan.simulation import check_identity
from poetmodel.schedule import GraphIdentity
from poetmodel.schedule.instructions import Instruction, Op, Program

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from poetmodel.graph import Graph
    from poetmodel.schedule.homes import Homes

MAGIC: Final = b"\x89PLN"
"""The first bytes of every binary plan; no text begins with them."""
VERSION: Final = 1
VERSION_OF_STATE: Final = 2
"""Version of plans that state the homes of state."""

FINGERPRINT_BYTES: Final = 8
"""Length of the stored prefix of the graph's SHA-256."""
CHECKSUM_BYTES: Final = 4
"""Size of the CRC-32 at the end."""

DMA: Final = 1
"""Flag: transfers run beside the core."""
LITERAL: Final = 2
"""Flag: every wait and free is stored, because they do not follow from the rest."""
HAS_BUDGET: Final = 4
"""Flag: the RAM budget is stored."""
HAS_DEVICE: Final = 8
"""Flag: the name of the device is stored."""
MEMORY_MAPPED: Final = 16
"""Flag of version 2: the core reads state on storage in place."""
HAS_COMMIT: Final = 32
"""Flag of version 2: the number of steps between commits is stored."""
_FLAGS: Final = {
    VERSION: DMA | LITERAL | HAS_BUDGET | HAS_DEVICE,
    VERSION_OF_STATE: DMA | LITERAL | HAS_BUDGET | HAS_DEVICE | MEMORY_MAPPED | HAS_COMMIT,
}
"""The flags of each version."""

_CODES: Final = (Op.COMPUTE, Op.PAGE_IN, Op.PAGE_OUT, Op.WAIT, Op.FREE)
"""Operations by their code."""
_START: Final = len(MAGIC) + 2 + FINGERPRINT_BYTES
"""Position of the length of the body."""
_MAX_BITS: Final = 63
"""Maximum length of a number."""
_BYTE: Final = 8
"""Homes of state in one byte."""
_GROUP: Final = 7
"""Bits of a number in one byte."""
_LOW: Final = 0x7F
_MORE: Final = 0x80


def encode(plan: Plan, graph: Graph | None = None) -> bytes:
    """Return a plan in binary form, without its addresses.

    Parameters
    ----------
    plan : Plan
        A valid plan.
    graph : Graph, optional
        The graph of the plan. By default that of the planner, or the built-in network of this
        name and SHA-256, with a usual batch size.

    Returns
    -------
    bytes
        `decode` turns them into an equal plan.

    Raises
    ------
    PlanError
        If the graph is not given and not known, or is not the graph of the plan, or if the program
        leaves out nodes of the graph or has indices that the graph lacks.
    """
    graph = graph or plan.graph or _built_in_graph(plan)
    check_identity(graph, plan)
    _check_indices(graph, plan.program)
    homes = plan.homes(graph)
    steps = explicit_steps(homes, plan.program, plan.mode)
    flags = DMA if plan.mode == StorageMode.DMA else 0
    if steps is None:
        flags |= LITERAL
        steps = homes.steps_of(plan.program)
    if plan.memory_mapped:
        flags |= MEMORY_MAPPED
    head = bytearray()
    if plan.ram_budget_bytes is not None:
        flags |= HAS_BUDGET
        head += _varint(plan.ram_budget_bytes)
    if plan.device is not None:
        flags |= HAS_DEVICE
        name = plan.device.encode("utf-8", "surrogatepass")
        head += _varint(len(name)) + name
    if plan.commit is not None:
        flags |= HAS_COMMIT
        head += _varint(plan.commit)
    if plan.resident is not None:
        head += _bits(state in plan.resident for state in graph.state_tensors)
    body = bytes(head) + _records(homes, steps)
    version = VERSION if plan.resident is None else VERSION_OF_STATE
    if flags & ~_FLAGS[version]:
        raise PlanError("memory_mapped and commit: expected in plans of graphs with state alone")
    start = MAGIC + bytes((version, flags)) + _fingerprint(graph)
    content = start + _varint(len(body)) + body
    data = content + _checksum(content)
    decoded = decode(data, graph)
    if decoded.program != plan.program:
        raise PlanError(
            "the program does not compute every node of the graph; check_plan says what is wrong"
        )
    if decoded.resident != plan.resident:
        raise PlanError("the plan lists tensors as resident that are no state of the graph")
    return data


def decode(data: bytes, graph: Graph) -> Plan:
    """Return the plan of bytes that `encode` made.

    Parameters
    ----------
    data : bytes
        The whole binary plan.
    graph : Graph
        The graph of the plan.

    Returns
    -------
    Plan
        Equal to the plan that was encoded.

    Raises
    ------
    PlanError
        If the bytes are no binary plan, are cut off or altered, have a newer version, or belong to
        another graph.
    """
    version, flags, body = _open(data, graph)
    reader = _ByteReader(body)
    budget = reader.number() if flags & HAS_BUDGET else None
    device = reader.text() if flags & HAS_DEVICE else None
    commit = reader.number() if flags & HAS_COMMIT else None
    plan = Plan(
        program=(),
        mode=StorageMode.DMA if flags & DMA else StorageMode.BLOCKING,
        identity=GraphIdentity.of(graph),
        ram_budget_bytes=budget,
        device=device,
        resident=None if version == VERSION else tuple(_resident(graph, reader)),
        memory_mapped=bool(flags & MEMORY_MAPPED),
        commit=commit,
        graph=graph,
    )
    homes = plan.homes(graph)
    steps = tuple(_steps(homes, reader))
    if flags & LITERAL:
        return replace(plan, program=homes.program_of(steps))
    return replace(plan, program=with_waits_and_frees(homes, steps, plan.mode))


def is_binary(data: bytes) -> bool:
    """Return whether bytes begin as a binary plan does."""
    return data.startswith(MAGIC)


def stored_fingerprint(data: bytes) -> bytes:
    """Return the stored prefix of the SHA-256 of the graph; raise `PlanError` for damaged bytes."""
    return _unseal(data)[2]


def _built_in_graph(plan: Plan) -> Graph:
    identity = plan.identity
    found = None if identity is None else find_model_by_hash(identity.name, identity.sha256)
    if found is None:
        raise PlanError("the plan does not hold its graph: give the graph too, encode(plan, graph)")
    return found[0]


def _check_indices(graph: Graph, program: Program) -> None:
    known = dict.fromkeys(_CODES, range(len(graph.tensors)))
    known[Op.COMPUTE] = range(len(graph.nodes))
    for position, (op, index) in enumerate(program):
        if index not in known[op]:
            raise PlanError(f"instruction {position}, {op} {index}: the graph has no such index")


# -- records -----------------------------------------------------------------------------------


class _Expectation:
    """Prediction of the index of the next record, the same for writer and reader."""

    def __init__(self, homes: Homes) -> None:
        self.node_of = homes.graph.node_of
        self.due = [k for k in range(len(homes.graph.nodes)) if k not in homes.first_reads]
        """Nodes in the order of their first computations."""
        self.first = 0
        """Number of nodes of `due` that were computed."""
        self._last = dict.fromkeys(_CODES, 0)
        self._last[Op.COMPUTE] = -1
        self._computed = 0

    def index(self, op: Op) -> int:
        """Return the predicted index of an operation."""
        if op == Op.COMPUTE:
            return self._last[op] + 1
        if op == Op.PAGE_OUT:
            return bisect_left(self.node_of, self._computed)
        return self._last[op]

    def is_due(self, k: int, *, after: int) -> bool:
        """Return whether node `k` is the next first computation after `after` other ones."""
        position = self.first + after
        return position < len(self.due) and self.due[position] == k

    def note_firsts(self, count: int) -> None:
        """Register the first computations of the next `count` nodes."""
        if count:
            self.first += count
            self._computed = self.due[self.first - 1]

    def note(self, op: Op, index: int) -> None:
        """Register a record."""
        self._last[op] = index
        if op == Op.COMPUTE:
            self._computed = index


def _records(homes: Homes, steps: Iterable[Instruction]) -> bytes:
    """Return a record of each step, except of first computations in graph order."""
    written = bytearray()
    expectation = _Expectation(homes)
    run = 0
    for op, index in steps:
        if op == Op.COMPUTE and expectation.is_due(index, after=run):
            run += 1
            continue
        expectation.note_firsts(run)
        written += _varint(run * len(_CODES) + _CODES.index(op))
        written += _varint(_zigzag(index - expectation.index(op)))
        expectation.note(op, index)
        run = 0
    return bytes(written)


def _steps(homes: Homes, reader: _ByteReader) -> Iterator[Instruction]:
    """Yield the steps of records, and the first computations between them."""
    expectation = _Expectation(homes)
    due, tensors = expectation.due, len(homes.graph.tensors)
    while not reader.at_end:
        run, code = divmod(reader.number(), len(_CODES))
        op = _CODES[code]
        first = expectation.first
        if run > len(due) - first:
            raise PlanError(
                f"the bytes name more first computations than the graph has nodes ({len(due)})"
            )
        yield from (Instruction(Op.COMPUTE, k) for k in due[first : first + run])
        expectation.note_firsts(run)
        index = expectation.index(op) + _unzigzag(reader.number())
        if not 0 <= index < (len(homes.graph.nodes) if op == Op.COMPUTE else tensors):
            raise PlanError(f"the bytes name the index {index} in {op}, which the graph lacks")
        yield Instruction(op, index)
        expectation.note(op, index)
    yield from (Instruction(Op.COMPUTE, k) for k in due[expectation.first :])


def _resident(graph: Graph, reader: _ByteReader) -> Iterator[int]:
    """Yield the state tensors whose home is RAM."""
    state = graph.state_tensors
    data = reader.take(-(-len(state) // _BYTE))
    for number, i in enumerate(state):
        if data[number // _BYTE] >> number % _BYTE & 1:
            yield i


# -- bytes -------------------------------------------------------------------------------------


def _unseal(data: bytes) -> tuple[int, int, bytes, bytes]:
    """Check the checksum; return version, flags, fingerprint and the rest of a binary plan."""
    if not data.startswith(MAGIC):
        what = "nothing" if not data else f"bytes that begin with {data[: len(MAGIC)].hex()}"
        raise PlanError(f"expected a binary plan, which begins with {MAGIC.hex()}, got {what}")
    if len(data) <= _START + CHECKSUM_BYTES:
        raise PlanError(f"the binary plan is cut off: it has only {len(data)} bytes")
    version, flags = data[len(MAGIC)], data[len(MAGIC) + 1]
    content, checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    if checksum != _checksum(content):
        raise PlanError(_damage(data))
    if version not in _FLAGS:
        raise PlanError(
            f"the binary plan has version {version}; this poetmodel reads versions "
            f"{VERSION} and {VERSION_OF_STATE}"
        )
    if flags & ~_FLAGS[version]:
        raise PlanError(f"the binary plan has unknown flags: {flags:#04x}")
    return version, flags, content[_START - FINGERPRINT_BYTES : _START], content[_START:]


def _open(data: bytes, graph: Graph) -> tuple[int, int, bytes]:
    """Check checksum and graph of a binary plan; return its version, flags and body."""
    version, flags, fingerprint, rest = _unseal(data)
    if fingerprint != _fingerprint(graph):
        raise PlanError(
            f"the plan was made for a graph whose sha256 begins with {fingerprint.hex()}, not for "
            f"this {graph.name!r} (sha256 {graph.sha256[:12]}...); give the graph it was made for"
        )
    reader = _ByteReader(rest)
    length = reader.number()
    body = rest[reader.position :]
    if len(body) != length:
        raise PlanError(f"the binary plan states a body of {length} bytes, and {len(body)} follow")
    return version, flags, body


def _damage(data: bytes) -> str:
    """Describe the damage of bytes whose checksum is wrong, by their length."""
    reader = _ByteReader(data[_START:])
    try:
        whole = reader.number() + reader.position + _START + CHECKSUM_BYTES
    except PlanError:
        whole = len(data)
    if whole > len(data):
        return f"the binary plan is cut off or altered: {len(data)} of {whole} bytes"
    if whole < len(data):
        return f"the binary plan is altered: {len(data)} bytes instead of {whole}"
    return "the binary plan is altered: its checksum is wrong"


def _fingerprint(graph: Graph) -> bytes:
    return bytes.fromhex(graph.sha256)[:FINGERPRINT_BYTES]


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(CHECKSUM_BYTES, "little")


def _varint(number: int) -> bytes:
    """Return a number in groups of 7 bits, lowest first; bit 7 is set in all but the last."""
    if not 0 <= number < 1 << _MAX_BITS:
        raise PlanError(f"expected a number from 0 to 2^{_MAX_BITS} in a binary plan, got {number}")
    groups = bytearray()
    while number > _LOW:
        groups.append(number & _LOW | _MORE)
        number >>= _GROUP
    groups.append(number)
    return bytes(groups)


def _bits(values: Iterable[bool]) -> bytes:
    """Return eight values per byte, the first one in the lowest bit."""
    listed = list(values)
    mask = sum(1 << number for number, value in enumerate(listed) if value)
    return mask.to_bytes(-(-len(listed) // _BYTE), "little")


def _zigzag(number: int) -> int:
    """Return 0, 1, 2, 3, 4 ... for 0, -1, 1, -2, 2 ..."""
    return -2 * number - 1 if number < 0 else 2 * number


def _unzigzag(number: int) -> int:
    return -(number + 1) // 2 if number % 2 else number // 2


class _ByteReader:
    """Reads numbers and texts from bytes, one after the other."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    @property
    def at_end(self) -> bool:
        return self.position >= len(self.data)

    def number(self) -> int:
        """Return the next number of `_varint`."""
        number = shift = 0
        while True:
            if self.at_end or shift >= _MAX_BITS:
                raise PlanError(
                    "the binary plan ends in the middle of a number, or a number is too long"
                )
            group = self.data[self.position]
            self.position += 1
            number |= (group & _LOW) << shift
            shift += _GROUP
            if not group & _MORE:
                return number

    def take(self, length: int) -> bytes:
        """Return the next `length` bytes."""
        end = self.position + length
        content, self.position = self.data[self.position : end], end
        if len(content) < length:
            raise PlanError("the binary plan ends before the homes of state or a name do")
        return content

    def text(self) -> str:
        """Return the next text: its length, then UTF-8."""
        content = self.take(self.number())
        try:
            return content.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise PlanError("the binary plan holds a name that is no UTF-8") from None
