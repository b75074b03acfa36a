"""Code that a forward pass executes: names that its lines read, and the code after each read.

Instructions are CPython's. If a subscript or an attribute follows a read, only that item or
attribute of the value is read; otherwise all of the value may be read.
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

# Names of instructions that read a value:
READ_GLOBAL: Final = ("LOAD_GLOBAL", "LOAD_NAME")
READ_CLOSURE: Final = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
READ_ATTRIBUTE: Final = ("LOAD_ATTR", "LOAD_METHOD")
# Names of instructions that set or delete a variable:
STORE_GLOBAL: Final = ("STORE_GLOBAL", "DELETE_GLOBAL")
STORE_CLOSURE: Final = ("STORE_DEREF", "DELETE_DEREF")
_READ_LOCAL: Final = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK")
_READ_CONSTANT: Final = ("LOAD_CONST", "LOAD_SMALL_INT")
_SKIPPED: Final = frozenset(
    ("CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "PRECALL", "PUSH_NULL", "RESUME")
)
"""Names of instructions that affect no value."""
_WRITE_METHODS: Final = frozenset(
    ("add", "append", "appendleft", "clear", "discard", "extend", "insert", "update")
)
"""Methods that change containers, and whose result does not depend on the content."""
_UNTRACED_ORIGINS: Final = frozenset((CodeOrigin.TORCH, CodeOrigin.OWN, CodeOrigin.STANDARD))
"""Origins of functions whose executed lines are not recorded."""
_MAX_LISTINGS: Final = 10_000
"""The cache of instructions is cleared above this number of code objects."""


def find_user_line(frame: FrameType | None) -> Line | None:
    """Return the innermost line of a user's or package's code on the stack of `frame`.

    PyTorch, poetmodel and the standard library are no packages here. Returns None if there is none.
    """
    while frame is not None:
        if code_origin(frame.f_code.co_filename) in (CodeOrigin.USER, CodeOrigin.LIBRARY):
            return (frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


class ExecutedCode:
    """The code object of a function that was executed, with the executed lines."""

    def __init__(self, code: CodeType, global_values: dict[str, Any]) -> None:
        self.code = code
        self.global_values = global_values
        origin = code_origin(code.co_filename)
        self.is_traced = origin not in _UNTRACED_ORIGINS
        """Whether executed lines are recorded, and the names in them guarded."""
        self.is_library = origin is CodeOrigin.LIBRARY
        """Whether the code is that of an installed package, except PyTorch and poetmodel."""
        self.first_closure_values: dict[int, Any] = {}
        """Values of closure variables of all functions with this code at the first call, or
        `ABSENT`, by the ``id`` of the cell. Empty if the code sets no closure variable."""
        self._lines: set[int] = set()
        if not self.is_traced:
            return
        self.listing = InstructionList.from_code(code)
        find_names = self.listing.find_names
        self.global_names = find_names(READ_GLOBAL) | find_names(STORE_GLOBAL)
        """Names of globals that the code reads, sets or deletes."""
        self.stored_global_names = find_names(STORE_GLOBAL)
        free_names = frozenset(code.co_freevars)
        self.stored_closure_names = find_names(STORE_CLOSURE) & free_names

    def trace_line(self, frame: FrameType, event: str, _: Any) -> Any:
        """Record an executed line; a local trace function for `sys.settrace`."""
        if event == "line":
            self._lines.add(frame.f_lineno)
        return self.trace_line

    def find_uses(self, opnames: tuple[str, ...]) -> Iterator[tuple[str, FollowingCode]]:
        """Yield (variable or attribute, code after it) of executed instructions in `opnames`."""
        listing = self.listing
        for position, instruction in enumerate(listing.instructions):
            if instruction.opname in opnames and listing.lines[position] in self._lines:
                following_code = FollowingCode(None, listing=listing, position=position + 1)
                following_code.line = (self.code.co_filename, listing.lines[position])
                yield str(instruction.argval), following_code


@dataclass(slots=True, eq=False)
class InstructionList:
    """The instructions of a code object, without those that affect no value, such as ``NOP``."""

    code: CodeType
    instructions: list[dis.Instruction] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Offset of each instruction in the code object [B]."""
    lines: list[int] = field(default_factory=list)
    """Line number of each instruction; of the previous one if the instruction has none."""

    @staticmethod
    def from_code(code: CodeType) -> InstructionList:
        """Return the instructions of a code object; cached in `_LISTINGS`."""
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

    def find_names(self, opnames: tuple[str, ...]) -> frozenset[str]:
        """Return the names of variables or attributes in all instructions named in `opnames`."""
        return frozenset(
            str(instruction.argval)
            for instruction in self.instructions
            if instruction.opname in opnames
        )


_LISTINGS: Final[dict[int, InstructionList]] = {}
"""Cached lists, by the ``id`` of the code object."""


class FollowingCode:
    """The code after a read, if known: from `position` of `listing`, or where `frame` reads."""

    def __init__(
        self,
        frame: FrameType | None,
        *,
        listing: InstructionList | None = None,
        position: int | None = None,
        may_call: bool = False,
        max_assignments: int = 3,
    ) -> None:
        self._max_assignments = max_assignments
        """Maximum number of successive assignments to local variables that are followed.

        The count starts again after a subscript or an attribute."""
        self._frame = frame
        self._listing = listing
        self._position = position
        self.line: Line | None = None
        """Line of the read; None if unknown."""
        if frame is None or listing is not None:
            return
        self._listing = InstructionList.from_code(frame.f_code)
        position = bisect_right(self._listing.offsets, frame.f_lasti) - 1
        opname = self._listing.instructions[position].opname if position >= 0 else ""
        if opname in READ_ATTRIBUTE or (may_call and opname.startswith("CALL")):
            self._position = position + 1

    @classmethod
    def unknown(cls, line: Line | None) -> FollowingCode:
        """Return unknown following code after a read in `line`: all of the value may be read."""
        following_code = cls(None)
        following_code.line = line
        return following_code

    def _instruction_after(self, count: int) -> dis.Instruction | None:
        """Return the instruction after the next `count` ones; None if unknown or past the end."""
        if self._listing is None or self._position is None:
            return None
        index = self._position + count
        instructions = self._listing.instructions
        return instructions[index] if index < len(instructions) else None

    def _skip(self, count: int) -> FollowingCode:
        """Return the code after the next `count` instructions."""
        position = None if self._position is None else self._position + count
        following_code = FollowingCode(self._frame, listing=self._listing, position=position)
        following_code.line = self.line
        return following_code

    def find_read_attribute(self) -> tuple[str | None, FollowingCode]:
        """Return (attribute that is read next, code after it); (None, self) for other code."""
        instruction = self._instruction_after(0)
        if instruction is None or instruction.opname not in READ_ATTRIBUTE:
            return None, self
        return str(instruction.argval), self._skip(1)

    def find_read_keys(self, value: Any) -> list[tuple[Any, FollowingCode]] | None:
        """Return (key, following code) of each key that the code reads from a container, `value`.

        Returns None if unknown keys, or the whole container, may be read. Omits keys only set.
        """
        next_instruction = self._instruction_after(0)
        if next_instruction is None or self._listing is None:
            return None
        if next_instruction.opname == "STORE_FAST" and self._max_assignments:
            return self._find_keys_read_by_variable(str(next_instruction.argval), value)
        name, following_code = self.find_read_attribute()
        if name is not None:
            return self._keys_by_attribute(name, following_code, value)
        is_known, key = self._loaded_key(next_instruction)
        if not is_known:
            return None
        count = 1
        while (
            instruction := self._instruction_after(count)
        ) is not None and instruction.opname == "COPY":
            count += 1
        if instruction is not None and _is_subscript(instruction):
            # After COPY instructions (``d[k] += 1``) the item is read too, and used by later code.
            return [(key, self._skip(count + 1))]
        if instruction is not None and instruction.opname == "STORE_SUBSCR":
            return []
        return None

    def _keys_by_attribute(
        self, name: str, following_code: FollowingCode, value: Any
    ) -> list[tuple[Any, FollowingCode]] | None:
        """Return (key, following code) of each key that attribute `name` reads; None if unknown."""
        content = content_of(value)
        if content is not value and not isinstance(value, CONTAINERS[4:6]):  # UserDict, UserList
            return [(name, following_code)]  # an attribute of a namespace
        if name in _WRITE_METHODS:
            return []
        if name == "get" and isinstance(content, dict):
            argument = following_code._instruction_after(0)
            if argument is not None and argument.opname in _READ_CONSTANT:
                return [(argument.argval, FollowingCode.unknown(self.line))]
        is_subclass_attribute = not hasattr(dict, name) and not hasattr(list, name)
        return [] if is_subclass_attribute and type(value) not in CONTAINERS else None

    def _find_keys_read_by_variable(
        self, name: str, value: Any
    ) -> list[tuple[Any, FollowingCode]] | None:
        """Return (key, following code) of each key that is read by local variable `name`.

        Returns None if unknown keys may be read, or if the variable is not set exactly once.
        """
        listing, n_stores, keys = self._listing, 0, []
        if listing is None:
            return None
        for position, instruction in enumerate(listing.instructions):
            argument = instruction.argval
            if not any(word in instruction.opname for word in ("FAST", "DEREF", "CLOSURE")):
                continue
            if argument != name and not (isinstance(argument, tuple) and name in argument):
                continue
            if instruction.opname == "STORE_FAST":
                n_stores += 1
                continue
            if instruction.opname not in _READ_LOCAL:
                return None
            following_code = FollowingCode(
                None,
                listing=listing,
                position=position + 1,
                max_assignments=self._max_assignments - 1,
            )
            following_code.line = self.line
            variable_keys = following_code.find_read_keys(value)
            if variable_keys is None:
                return None
            keys += variable_keys
        return keys if n_stores == 1 else None

    def _loaded_key(self, instruction: dis.Instruction) -> tuple[bool, Any]:
        """Return (whether an instruction loads a known key of a container, the key)."""
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
