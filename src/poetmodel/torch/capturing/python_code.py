"""Code that a forward pass executes: names that its lines read, and the code after each read.

Instructions are CPython's. Only certain facts of the code after a read are used: a subscript or an
attribute names the part that is read; otherwise all of the value may be read.
"""

from __future__ import annotations

import dis
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from poetmodel.torch.capturing.python_values import ABSENT, CONTAINERS, content_of
from poetmodel.torch.errors import CodeOrigin, code_origin

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType

Line = tuple[str, int]
"""File name and line number."""

READ_GLOBAL: Final = ("LOAD_GLOBAL", "LOAD_NAME")
READ_CLOSURE: Final = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
READ_ATTRIBUTE: Final = ("LOAD_ATTR", "LOAD_METHOD")
_READ_LOCAL: Final = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK")
_READ_CONSTANT: Final = ("LOAD_CONST", "LOAD_SMALL_INT")
_SKIPPED: Final = frozenset(
    ("CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "PRECALL", "PUSH_NULL", "RESUME")
)
_WRITES: Final = frozenset(
    ("add", "append", "appendleft", "clear", "discard", "extend", "insert", "update")
)
"""Methods that change containers, and whose result does not depend on the content."""
_NOT_FOLLOWED: Final = frozenset((CodeOrigin.TORCH, CodeOrigin.OWN, CodeOrigin.STANDARD))
"""Origins of functions whose globals and closures are not the user's."""
_MAX_LISTINGS: Final = 10_000
"""The cache of instructions is cleared above this number of code objects."""


def user_line_of(frame: FrameType | None) -> Line | None:
    """Return the innermost line of a user or a package; None if there is none."""
    while frame is not None:
        if code_origin(frame.f_code.co_filename) in (CodeOrigin.USER, CodeOrigin.LIBRARY):
            return (frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


class ExecutedCode:
    """The code object of a function that was executed, with the executed lines."""

    def __init__(self, code: CodeType, global_values: dict[str, Any]) -> None:
        """Find the names that `code` reads and sets; `global_values` are its globals."""
        self.code = code
        self.globals = global_values
        origin = code_origin(code.co_filename)
        self.is_followed = origin not in _NOT_FOLLOWED
        self.is_library = origin is CodeOrigin.LIBRARY
        self.first: dict[str, Any] = {}
        """Values of the globals when the function was first called."""
        self.first_cells: dict[str, Any] = {}
        """Values of the closure's variables when the function was first called."""
        self._lines: set[int] = set()
        if not self.is_followed:
            return
        self.listing = InstructionList.of(code)
        names_of = self.listing.names
        self.global_names = names_of(READ_GLOBAL) | names_of(("STORE_GLOBAL", "DELETE_GLOBAL"))
        self.stored_globals = names_of(("STORE_GLOBAL", "DELETE_GLOBAL"))
        free_names = frozenset(code.co_freevars)
        self.stored_cells = names_of(("STORE_DEREF", "DELETE_DEREF")) & free_names

    def trace_line(self, frame: FrameType, event: str, _: Any) -> Any:
        """Record an executed line; a local trace function for `sys.settrace`."""
        if event == "line":
            self._lines.add(frame.f_lineno)
        return self.trace_line

    def reads(self, kinds: tuple[str, ...]) -> Iterator[tuple[str, FollowingCode]]:
        """Yield (name, following code) of each read by some instructions, in executed lines."""
        listing = self.listing
        for position, instruction in enumerate(listing.instructions):
            if instruction.opname in kinds and listing.lines[position] in self._lines:
                following_code = FollowingCode(None, listing=listing, position=position + 1)
                following_code.line = (self.code.co_filename, listing.lines[position])
                yield str(instruction.argval), following_code


@dataclass(slots=True, eq=False)
class InstructionList:
    """The instructions of a code object, without those that affect no value, such as ``NOP``."""

    code: CodeType
    instructions: list[dis.Instruction] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)

    @staticmethod
    def of(code: CodeType) -> InstructionList:
        """Return the instructions of a code object, cached."""
        cached_listing = _LISTINGS.get(id(code))
        if cached_listing is not None and cached_listing.code is code:
            return cached_listing
        listing = InstructionList(code)
        # From Python 3.13 on some instructions have no line.
        starts: dict[int, Any] = dict(dis.findlinestarts(code))
        line = code.co_firstlineno
        for instruction in dis.get_instructions(code):
            line = starts.get(instruction.offset) or line
            if instruction.opname not in _SKIPPED:
                listing.instructions.append(instruction)
                listing.offsets.append(instruction.offset)
                listing.lines.append(line)
        if len(_LISTINGS) > _MAX_LISTINGS:
            _LISTINGS.clear()
        _LISTINGS[id(code)] = listing
        return listing

    def names(self, kinds: tuple[str, ...]) -> frozenset[str]:
        """Return the names in instructions of some kinds."""
        return frozenset(str(i.argval) for i in self.instructions if i.opname in kinds)


_LISTINGS: Final[dict[int, InstructionList]] = {}


class FollowingCode:
    """The instructions after the read of a value."""

    def __init__(
        self,
        frame: FrameType | None,
        *,
        listing: InstructionList | None = None,
        position: int | None = None,
        calls: bool = False,
        depth: int = 3,
    ) -> None:
        """Start after the instruction that `frame` executes, or at `position` of `listing`.

        Only a read of an attribute, or a call if `calls`, has known following code.
        """
        self._depth = depth
        """Maximum number of assignments from local variable to local variable that are followed."""
        self._frame = frame
        self._listing = listing
        self._position = position
        self.line: Line | None = None
        if frame is None or listing is not None:
            return
        self._listing = InstructionList.of(frame.f_code)
        position = bisect_right(self._listing.offsets, frame.f_lasti) - 1
        opname = self._listing.instructions[position].opname if position >= 0 else ""
        if opname in READ_ATTRIBUTE or (calls and opname.startswith("CALL")):
            self._position = position + 1

    @classmethod
    def unknown(cls, line: Line | None) -> FollowingCode:
        """Return unknown following code: all of a value may be read."""
        following_code = cls(None)
        following_code.line = line
        return following_code

    def _instruction(self, ahead: int) -> dis.Instruction | None:
        if self._listing is None or self._position is None:
            return None
        index = self._position + ahead
        instructions = self._listing.instructions
        return instructions[index] if index < len(instructions) else None

    def _skip(self, ahead: int) -> FollowingCode:
        position = None if self._position is None else self._position + ahead
        following_code = FollowingCode(self._frame, listing=self._listing, position=position)
        following_code.line = self.line
        return following_code

    def attribute(self) -> tuple[str | None, FollowingCode]:
        """Return the attribute that is read next, or None, and the code after that read."""
        instruction = self._instruction(0)
        if instruction is None or instruction.opname not in READ_ATTRIBUTE:
            return None, self
        return str(instruction.argval), self._skip(1)

    def read_keys(self, value: Any) -> list[tuple[Any, FollowingCode]] | None:
        """Return (key, following code) of each key that is read from a container.

        None if the whole container may be read. Keys that are only set are omitted.
        """
        next_instruction = self._instruction(0)
        if next_instruction is None or self._listing is None:
            return None
        if next_instruction.opname == "STORE_FAST" and self._depth:
            return self._keys_by_variable(str(next_instruction.argval), value)
        name, following_code = self.attribute()
        if name is not None:
            return self._keys_by_attribute(name, following_code, value)
        is_known, key = self._loaded_key(next_instruction)
        if not is_known:
            return None
        ahead = 1
        while (
            instruction := self._instruction(ahead)
        ) is not None and instruction.opname == "COPY":
            ahead += 1
        if instruction is not None and _is_subscript(instruction):
            # ``d[k] += 1`` reads the item too: the code after the COPY instructions uses the value.
            return [(key, self._skip(ahead + 1))]
        if instruction is not None and instruction.opname == "STORE_SUBSCR":
            return []
        return None

    def _keys_by_attribute(
        self, name: str, following_code: FollowingCode, value: Any
    ) -> list[tuple[Any, FollowingCode]] | None:
        """Return the keys that a read of attribute `name` reads; None if all may be read."""
        content = content_of(value)
        if content is not value and not isinstance(value, CONTAINERS[4:6]):
            return [(name, following_code)]  # an attribute of a namespace
        if name in _WRITES:
            return []
        if name == "get" and isinstance(content, dict):
            argument = following_code._instruction(0)
            if argument is not None and argument.opname in _READ_CONSTANT:
                return [(argument.argval, FollowingCode.unknown(self.line))]
        is_own = not hasattr(dict, name) and not hasattr(list, name)
        return [] if is_own and type(value) not in CONTAINERS else None

    def _keys_by_variable(self, name: str, value: Any) -> list[tuple[Any, FollowingCode]] | None:
        """Return the keys by which a local variable is read; None unless it is set once."""
        listing, n_stores, keys = self._listing, 0, []
        if listing is None:
            return None
        for position, instruction in enumerate(listing.instructions):
            argument = instruction.argval
            if not any(kind in instruction.opname for kind in ("FAST", "DEREF", "CLOSURE")):
                continue
            if argument != name and not (isinstance(argument, tuple) and name in argument):
                continue
            if instruction.opname == "STORE_FAST":
                n_stores += 1
                continue
            if instruction.opname not in _READ_LOCAL:
                return None
            following_code = FollowingCode(
                None, listing=listing, position=position + 1, depth=self._depth - 1
            )
            following_code.line = self.line
            variable_keys = following_code.read_keys(value)
            if variable_keys is None:
                return None
            keys += variable_keys
        return keys if n_stores == 1 else None

    def _loaded_key(self, instruction: dis.Instruction) -> tuple[bool, Any]:
        """Return (whether the key that an instruction loads is known, the key)."""
        if instruction.opname in _READ_CONSTANT:
            return not isinstance(instruction.argval, slice | tuple), instruction.argval
        if instruction.opname in _READ_LOCAL and self._frame is not None:
            key = self._frame.f_locals.get(str(instruction.argval), ABSENT)
            return isinstance(key, str | int) and type(key) in (str, int), key
        return False, None


def _is_subscript(instruction: dis.Instruction) -> bool:
    return instruction.opname == "BINARY_SUBSCR" or (
        instruction.opname == "BINARY_OP" and instruction.argrepr == "[]"
    )
