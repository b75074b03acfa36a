"""Binary plans of a few hundred bytes, for a device that has the graph.

``docs/reference/formats.md`` specifies the format bit by bit. First computations in graph order are
not stored. Waits and frees that `add_waits_and_frees` derives are not stored, unless this function
cannot restore the program: then all waits and frees are stored.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from poetmodel.device import StorageMode
from poetmodel.errors import PlanError
from poetmodel.graph.catalogue import find_model_by_hash
from poetmodel.plan.derivation import add_waits_and_frees, strip_derived_instructions
from poetmodel.plan.program import Plan
from poetmodel.plan.simulation import check_identity
from poetmodel.schedule import GraphIdentity
from poetmodel.schedule.instructions import Instruction, Op, Program

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from poetmodel.graph import Graph
    from poetmodel.schedule.homes import Homes

MAGIC: Final = b"\x89PLN"
"""The first bytes of every binary plan; no text begins with these bytes."""
VERSION: Final = 1
"""Version of binary plans without homes of state."""
VERSION_WITH_STATE: Final = 2
"""Version of binary plans with homes of state."""

FINGERPRINT_BYTES: Final = 8
"""Length of the stored prefix of the graph's SHA-256."""
CHECKSUM_BYTES: Final = 4
"""Size of the CRC-32 at the end."""

DMA: Final = 1
"""Flag: transfers run in parallel with the core."""
LITERAL: Final = 2
"""Flag: every wait and free is stored, because the program waits or frees at positions that cannot
be derived."""
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
    VERSION_WITH_STATE: DMA | LITERAL | HAS_BUDGET | HAS_DEVICE | MEMORY_MAPPED | HAS_COMMIT,
}
"""The flags of each version."""

_OPS_BY_CODE: Final = (Op.COMPUTE, Op.PAGE_IN, Op.PAGE_OUT, Op.WAIT, Op.FREE)
"""Operations, indexed by their code."""
_LENGTH_POSITION: Final = len(MAGIC) + 2 + FINGERPRINT_BYTES
"""Position of the length of the body."""
_MAX_BITS: Final = 63
"""Maximum length of a number [bits]."""
_HOMES_PER_BYTE: Final = 8
"""Number of homes of state that one byte stores."""
_GROUP_BITS: Final = 7
"""Number of bits of a number in one byte."""
_GROUP_MASK: Final = 0x7F
"""Mask of the bits of a byte that store bits of a number."""
_CONTINUATION_BIT: Final = 0x80
"""The bit of a byte that is set if more bytes of the number follow."""


def encode(plan: Plan, graph: Graph | None = None) -> bytes:
    """Encode a plan as bytes, without metrics and arena.

    Parameters
    ----------
    plan : Plan
        A valid plan.
    graph : Graph, optional
        The graph of the plan. Default: ``plan.graph``, or the built-in network with the name and
        SHA-256 of the plan, at any batch size, or with state or in-place operators.

    Returns
    -------
    bytes
        The binary plan, from which `decode` restores an equal plan.

    Raises
    ------
    PlanError
        If the graph is neither given nor found, or is not the graph of the plan; if `decode` would
        not restore the program, for example a program without all nodes; if the program has
        indices that the graph lacks; if resident tensors are not state; if a number is negative or
        has more than 63 bits; or if `memory_mapped` or `commit` is set without `resident`.
    """
    graph = graph or plan.graph or _find_built_in_graph(plan)
    check_identity(graph, plan)
    _check_indices(graph, plan.program)
    homes = plan.homes(graph)
    instructions = strip_derived_instructions(homes, plan.program, plan.mode)
    flags = DMA if plan.mode == StorageMode.DMA else 0
    if instructions is None:
        flags |= LITERAL
        instructions = homes.expand_first_reads(plan.program)
    if plan.memory_mapped:
        flags |= MEMORY_MAPPED
    header = bytearray()
    if plan.ram_budget_bytes is not None:
        flags |= HAS_BUDGET
        header += _encode_number(plan.ram_budget_bytes)
    if plan.device is not None:
        flags |= HAS_DEVICE
        name = plan.device.encode("utf-8", "surrogatepass")
        header += _encode_number(len(name)) + name
    if plan.commit is not None:
        flags |= HAS_COMMIT
        header += _encode_number(plan.commit)
    if plan.resident is not None:
        header += _pack_bits(state in plan.resident for state in graph.state_tensors)
    body = bytes(header) + _encode_instructions(homes, instructions)
    version = VERSION if plan.resident is None else VERSION_WITH_STATE
    if flags & ~_FLAGS[version]:
        raise PlanError("memory_mapped and commit: expected only in plans that list resident state")
    prefix = MAGIC + bytes((version, flags)) + _fingerprint(graph)
    content = prefix + _encode_number(len(body)) + body
    encoded_plan = content + _checksum(content)
    decoded = decode(encoded_plan, graph)
    if decoded.program != plan.program:
        raise PlanError(
            "the program does not compute every node of the graph, or violates another rule; see "
            "check_plan"
        )
    if decoded.resident != plan.resident:
        raise PlanError("the plan lists resident tensors that are not state of the graph")
    return encoded_plan


def decode(data: bytes, graph: Graph) -> Plan:
    """Decode a plan from bytes of `encode`.

    Parameters
    ----------
    data : bytes
        The whole binary plan.
    graph : Graph
        The graph of the plan.

    Returns
    -------
    Plan
        Equal to the plan that was encoded; its `graph` is the given graph, and its `identity` that
        of the graph.

    Raises
    ------
    PlanError
        If the bytes are no binary plan, are truncated or corrupt, have an unknown version or flag,
        or belong to another graph.
    """
    version, flags, body = _parse_body(data, graph)
    reader = _ByteReader(body)
    budget = reader.read_number() if flags & HAS_BUDGET else None
    device = reader.read_text() if flags & HAS_DEVICE else None
    commit = reader.read_number() if flags & HAS_COMMIT else None
    plan = Plan(
        program=(),
        mode=StorageMode.DMA if flags & DMA else StorageMode.BLOCKING,
        identity=GraphIdentity.from_graph(graph),
        ram_budget_bytes=budget,
        device=device,
        resident=None if version == VERSION else tuple(_read_resident(graph, reader)),
        memory_mapped=bool(flags & MEMORY_MAPPED),
        commit=commit,
        graph=graph,
    )
    homes = plan.homes(graph)
    instructions = tuple(_decode_instructions(homes, reader))
    if flags & LITERAL:
        return replace(plan, program=homes.collapse_first_reads(instructions))
    return replace(plan, program=add_waits_and_frees(homes, instructions, plan.mode))


def is_binary(data: bytes) -> bool:
    """Return whether bytes begin with `MAGIC`, as each binary plan does."""
    return data.startswith(MAGIC)


def stored_fingerprint(data: bytes) -> bytes:
    """Return the stored prefix of the graph's SHA-256; raise `PlanError` for damaged bytes."""
    return _parse_container(data).fingerprint


def _find_built_in_graph(plan: Plan) -> Graph:
    """Return the built-in network that `encode` finds; raise `PlanError` if it finds none."""
    identity = plan.identity
    graph_and_shape = (
        None if identity is None else find_model_by_hash(identity.name, identity.sha256)
    )
    if graph_and_shape is None:
        raise PlanError("the plan does not contain its graph: pass it, encode(plan, graph)")
    return graph_and_shape[0]


def _check_indices(graph: Graph, program: Program) -> None:
    """Raise `PlanError` for the first index of the program that the graph lacks."""
    indices_of_op = dict.fromkeys(_OPS_BY_CODE, range(len(graph.tensors)))
    indices_of_op[Op.COMPUTE] = range(len(graph.nodes))
    for position, (op, index) in enumerate(program):
        if index not in indices_of_op[op]:
            raise PlanError(f"instruction {position}, {op} {index}: the graph has no such index")


# -- records -----------------------------------------------------------------------------------


class _IndexPredictor:
    """Predicts the index of the next record, identically in encoder and decoder."""

    def __init__(self, homes: Homes) -> None:
        self.node_of = homes.graph.node_of
        self.new_nodes = [k for k in range(len(homes.graph.nodes)) if k not in homes.first_reads]
        """Nodes in graph order, except nodes of first reads."""
        self.n_computed = 0
        """Number of nodes of `new_nodes` that were computed without a record."""
        self._last_index_of = dict.fromkeys(_OPS_BY_CODE, 0)
        self._last_index_of[Op.COMPUTE] = -1
        self._last_computed = 0

    def predict_index(self, op: Op) -> int:
        """Return the predicted index of an operation.

        ``compute``: the node after its last record. ``page_out``: the first tensor of the last
        computed node. Otherwise the index of the operation's last record, 0 before any.
        """
        if op == Op.COMPUTE:
            return self._last_index_of[op] + 1
        if op == Op.PAGE_OUT:
            return bisect_left(self.node_of, self._last_computed)
        return self._last_index_of[op]

    def is_due(self, k: int, *, n_unregistered: int) -> bool:
        """Return whether computing node `k` needs no record, as the next one of `new_nodes`."""
        position = self.n_computed + n_unregistered
        return position < len(self.new_nodes) and self.new_nodes[position] == k

    def register_first_computations(self, count: int) -> None:
        """Mark the next `count` nodes of `new_nodes` as computed."""
        if count:
            self.n_computed += count
            self._last_computed = self.new_nodes[self.n_computed - 1]

    def register_record(self, op: Op, index: int) -> None:
        """Update the predictions with the operation and index of a record."""
        self._last_index_of[op] = index
        if op == Op.COMPUTE:
            self._last_computed = index


def _encode_instructions(homes: Homes, instructions: Iterable[Instruction]) -> bytes:
    """Return the records of instructions; first computations in graph order are only counted."""
    encoded = bytearray()
    predictor = _IndexPredictor(homes)
    n_first = 0
    for op, index in instructions:
        if op == Op.COMPUTE and predictor.is_due(index, n_unregistered=n_first):
            n_first += 1
            continue
        predictor.register_first_computations(n_first)
        encoded += _encode_number(n_first * len(_OPS_BY_CODE) + _OPS_BY_CODE.index(op))
        encoded += _encode_number(_encode_signed(index - predictor.predict_index(op)))
        predictor.register_record(op, index)
        n_first = 0
    return bytes(encoded)


def _decode_instructions(homes: Homes, reader: _ByteReader) -> Iterator[Instruction]:
    """Yield the instruction of each record, and the computations without a record."""
    predictor = _IndexPredictor(homes)
    new_nodes, n_tensors = predictor.new_nodes, len(homes.graph.tensors)
    while not reader.is_at_end:
        n_first, code = divmod(reader.read_number(), len(_OPS_BY_CODE))
        op = _OPS_BY_CODE[code]
        n_computed = predictor.n_computed
        if n_first > len(new_nodes) - n_computed:
            raise PlanError(
                "the bytes name more first computations than the graph has nodes "
                f"({len(new_nodes)})"
            )
        yield from (
            Instruction(Op.COMPUTE, k) for k in new_nodes[n_computed : n_computed + n_first]
        )
        predictor.register_first_computations(n_first)
        index = predictor.predict_index(op) + _decode_signed(reader.read_number())
        if not 0 <= index < (len(homes.graph.nodes) if op == Op.COMPUTE else n_tensors):
            raise PlanError(f"the bytes name the index {index} in {op}, which the graph lacks")
        yield Instruction(op, index)
        predictor.register_record(op, index)
    yield from (Instruction(Op.COMPUTE, k) for k in new_nodes[predictor.n_computed :])


def _read_resident(graph: Graph, reader: _ByteReader) -> Iterator[int]:
    """Yield the state tensors whose home is RAM, ascending, from the next bits of a binary plan."""
    state = graph.state_tensors
    mask = reader.read_bytes(-(-len(state) // _HOMES_PER_BYTE))
    for position, i in enumerate(state):
        if mask[position // _HOMES_PER_BYTE] >> position % _HOMES_PER_BYTE & 1:
            yield i


# -- bytes -------------------------------------------------------------------------------------


class _Container(NamedTuple):
    """The parts of a binary plan with a correct checksum."""

    version: int
    flags: int
    fingerprint: bytes
    content: bytes
    """Length of the body, and body."""


def _parse_container(data: bytes) -> _Container:
    """Return the parts of a binary plan; refuse a damaged one, unknown versions and flags."""
    if not data.startswith(MAGIC):
        start = "no bytes" if not data else f"bytes that begin with {data[: len(MAGIC)].hex()}"
        raise PlanError(f"expected a binary plan, which begins with {MAGIC.hex()}, got {start}")
    if len(data) <= _LENGTH_POSITION + CHECKSUM_BYTES:
        raise PlanError(f"the binary plan is cut off: it has only {len(data)} bytes")
    version, flags = data[len(MAGIC)], data[len(MAGIC) + 1]
    content, checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    if checksum != _checksum(content):
        raise PlanError(_describe_damage(data))
    if version not in _FLAGS:
        raise PlanError(
            f"the binary plan has version {version}; this poetmodel reads versions "
            f"{VERSION} and {VERSION_WITH_STATE}"
        )
    if flags & ~_FLAGS[version]:
        raise PlanError(f"the binary plan has unknown flags: {flags:#04x}")
    return _Container(
        version,
        flags,
        content[_LENGTH_POSITION - FINGERPRINT_BYTES : _LENGTH_POSITION],
        content[_LENGTH_POSITION:],
    )


def _parse_body(data: bytes, graph: Graph) -> tuple[int, int, bytes]:
    """Return version, flags and body of a binary plan; refuse that of another graph."""
    version, flags, fingerprint, content = _parse_container(data)
    if fingerprint != _fingerprint(graph):
        raise PlanError(
            f"the plan was made for a graph whose sha256 begins with {fingerprint.hex()}, not for "
            f"this {graph.name!r} (sha256 {graph.sha256[:12]}...); give the graph it was made for"
        )
    reader = _ByteReader(content)
    length = reader.read_number()
    body = content[reader.position :]
    if len(body) != length:
        raise PlanError(f"the binary plan states a body of {length} bytes, and {len(body)} follow")
    return version, flags, body


def _describe_damage(data: bytes) -> str:
    """Return a message for bytes with a wrong checksum: cut off or altered, by their length."""
    reader = _ByteReader(data[_LENGTH_POSITION:])
    try:
        expected_bytes = reader.read_number() + reader.position + _LENGTH_POSITION + CHECKSUM_BYTES
    except PlanError:
        expected_bytes = len(data)
    if expected_bytes > len(data):
        return f"the binary plan is cut off or altered: {len(data)} of {expected_bytes} bytes"
    if expected_bytes < len(data):
        return f"the binary plan is altered: {len(data)} bytes instead of {expected_bytes}"
    return "the binary plan is altered: its checksum is wrong"


def _fingerprint(graph: Graph) -> bytes:
    return bytes.fromhex(graph.sha256)[:FINGERPRINT_BYTES]


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(CHECKSUM_BYTES, "little")


def _encode_number(number: int) -> bytes:
    """Encode a number in groups of 7 bits, lowest first; bit 7 is set in all but the last."""
    if not 0 <= number < 1 << _MAX_BITS:
        raise PlanError(f"expected 0 or more, below 2^{_MAX_BITS}, in a binary plan, got {number}")
    groups = bytearray()
    while number > _GROUP_MASK:
        groups.append(number & _GROUP_MASK | _CONTINUATION_BIT)
        number >>= _GROUP_BITS
    groups.append(number)
    return bytes(groups)


def _pack_bits(values: Iterable[bool]) -> bytes:
    """Pack eight Booleans per byte, the first in the lowest bit."""
    bits = list(values)
    mask = sum(1 << number for number, bit in enumerate(bits) if bit)
    return mask.to_bytes(-(-len(bits) // _HOMES_PER_BYTE), "little")


def _encode_signed(number: int) -> int:
    """Map 0, -1, 1, -2, 2 ... to 0, 1, 2, 3, 4 ..."""
    return -2 * number - 1 if number < 0 else 2 * number


def _decode_signed(number: int) -> int:
    return -(number + 1) // 2 if number % 2 else number // 2


class _ByteReader:
    """Reads numbers and texts from bytes, sequentially; raises `PlanError` at their end."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    @property
    def is_at_end(self) -> bool:
        """Whether all bytes have been read."""
        return self.position >= len(self.data)

    def read_number(self) -> int:
        """Read a number encoded by `_encode_number`."""
        number = shift = 0
        while True:
            if self.is_at_end or shift >= _MAX_BITS:
                raise PlanError(
                    "the binary plan ends in the middle of a number, or a number is too long"
                )
            group = self.data[self.position]
            self.position += 1
            number |= (group & _GROUP_MASK) << shift
            shift += _GROUP_BITS
            if not group & _CONTINUATION_BIT:
                return number

    def read_bytes(self, length: int) -> bytes:
        """Read the next `length` bytes."""
        end = self.position + length
        content, self.position = self.data[self.position : end], end
        if len(content) < length:
            raise PlanError("the binary plan ends before the homes of state or a name do")
        return content

    def read_text(self) -> str:
        """Read a text: its length, then UTF-8."""
        content = self.read_bytes(self.read_number())
        try:
            return content.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise PlanError("the binary plan contains a name that is not UTF-8") from None
