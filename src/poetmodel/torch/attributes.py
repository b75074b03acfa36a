"""What the forward pass of a module sets: attributes and buffers, found and put back."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from poetmodel.torch.annotation import shown_path
from poetmodel.torch.failures import CaptureError
from poetmodel.torch.measures import storage_key, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch


class Attributes:
    """The attributes of all modules as they are now, to be put back after a capture.

    The values that tensors have meanwhile are no numbers, and whoever reads them later gets an
    error of PyTorch. Lists, dicts, sets and deques that a module holds are put back too.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        import torch

        self._modules = dict(model.named_modules())
        self._own = frozenset(vars(torch.nn.Module()))
        """What every module has: parameters, buffers, hooks, the mode."""
        self._attributes = {path: dict(vars(module)) for path, module in self._modules.items()}
        self._contents = {
            (path, key): _content(value)
            for path, attributes in self._attributes.items()
            for key, value in attributes.items()
            if isinstance(value, list | dict | set | deque)
        }

    def put_back(self, *, within: bool = False) -> tuple[tuple[str, str], ...]:
        """Put everything back; return path and attribute of the tensors that had been set.

        Parameters
        ----------
        within : bool
            Whether the capture goes on, which has put other parameters, buffers and hooks in place.
        """
        skipped = self._own if within else frozenset()
        changed = []
        for path, module in self._modules.items():
            before, now = self._attributes[path], module.__dict__
            for key in (before.keys() | now.keys()) - skipped:
                if key not in before:
                    changed.append((path, key, now.pop(key)))
                elif key not in now or now[key] is not before[key]:
                    changed.append((path, key, now.get(key)))
                    now[key] = before[key]
        for (path, key), content in self._contents.items():
            if key in skipped:
                continue
            value = self._attributes[path][key]
            found = _content(value)
            if not _same(found, content):
                changed.append((path, key, found))
                _fill(value, content)
        return tuple(
            sorted(
                (path, key)
                for path, key, value in changed
                if tensors_in(value) and not self._is_derived(path, key)
            )
        )

    def _is_derived(self, path: str, key: str) -> bool:
        """Return whether a hook makes an attribute of parameters, as ``weight_norm`` does."""
        hooks = self._modules[path]._forward_pre_hooks.values()  # noqa: SLF001 - no other way
        return any(getattr(hook, "name", None) == key for hook in hooks)


class AssignedBuffers:
    """Buffers that the forward pass assigns, in place of changing them in place.

    A capture sees what happens to the tensor that a buffer is, and nothing of another tensor that
    is put in its stead. So the new value is copied into the buffer at the end of the forward pass.
    What the pass has read is a copy of the buffer: the backward pass needs it as it was.
    """

    def __init__(self, model: torch.nn.Module, *, name: str) -> None:
        self._modules = dict(model.named_modules())
        self._name = name
        self._found: set[tuple[str, str]] = set()
        self._known: frozenset[tuple[str, str]] = frozenset()
        self.at_start: Callable[[], object] | None = None
        """What to do before each forward pass."""

    def learn(self) -> bool:
        """Copy what was found to be assigned from now on; return whether that is anything new.

        Raises
        ------
        CaptureError
            If such a buffer shares its memory with another, which must not change with it.
        """
        new = not self._known.issuperset(self._found)
        buffers = self._buffers()
        for place in sorted(self._found):
            for other, buffer in buffers.items():
                if other != place and storage_key(buffer) == storage_key(buffers[place]):
                    path, key = other
                    twin = ".".join(part for part in (shown_path(path), key) if part)
                    raise CaptureError(self._told(place, f"{_ASSIGNED} with {twin}"))
        self._known = self._known.union(self._found)
        return new

    @contextmanager
    def around(self) -> Iterator[None]:
        """Note what a forward pass assigns; give the buffers that are known their new values.

        Raises
        ------
        CaptureError
            If what is assigned is no plain new value: another shape or type, or with a gradient.
        """
        import torch

        if self.at_start is not None:
            self.at_start()
        before = self._buffers()
        for (path, key), buffer in before.items():
            if (path, key) in self._known:
                self._set(path, key, buffer.detach().clone())
        try:
            yield
            after = self._buffers()
            for place in sorted(after.keys() - before.keys()):
                raise CaptureError(self._told(place, _NEW))
            for place, buffer in before.items():
                if after.get(place) is buffer:
                    continue
                self._found.add(place)
                self._check(place, buffer, after.get(place))
                if place in self._known:
                    with torch.no_grad():
                        buffer.copy_(after[place])
        finally:
            for (path, key), buffer in before.items():
                if (path, key) in self._known:
                    self._set(path, key, buffer)

    def _buffers(self) -> Mapping[tuple[str, str], torch.Tensor]:
        return {
            (path, key): buffer
            for path, module in self._modules.items()
            for key, buffer in module._buffers.items()  # noqa: SLF001 - shared ones count twice
            if buffer is not None
        }

    def _set(self, path: str, key: str, value: torch.Tensor) -> None:
        self._modules[path]._buffers[key] = value  # noqa: SLF001 - past what modules redefine

    def _check(self, place: tuple[str, str], old: torch.Tensor, new: torch.Tensor | None) -> None:
        key = place[1]
        if new is None:
            fault = "is taken away in forward; leave it there, and change its values"
        elif new.shape != old.shape or new.dtype != old.dtype:
            fault = (
                f"was {_form(old)} and is assigned {_form(new)} in forward; assign the same form, "
                f"or use self.{key}.copy_(...)"
            )
        elif new.requires_grad:
            fault = (
                "is assigned a value that depends on parameters, and would keep the graph of the "
                f"step; assign it with .detach(), or use self.{key}.copy_(...)"
            )
        else:
            return
        raise CaptureError(self._told(place, fault))

    def _told(self, place: tuple[str, str], fault: str) -> str:
        path, key = place
        at = f" of module {shown_path(path)!r}" if shown_path(path) else ""
        return f"{self._name}: buffer {key!r}{at} {fault}"


_NEW: Final = "is new after forward; register it, with a tensor, in __init__"
_ASSIGNED: Final = (
    "is assigned in forward, which would make two buffers of one; use copy_(...), or give each a "
    "tensor of its own: it shares its memory"
)


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _content(value: Any) -> Any:
    """Return what is in a container, as a copy: a dict, or a list."""
    return dict(value) if isinstance(value, dict) else list(value)


def _same(one: Any, other: Any) -> bool:
    """Return whether two contents are the very same objects, in the same order."""
    if isinstance(one, dict):
        return list(map(id, one)) == list(map(id, other)) and _same(
            list(one.values()), list(other.values())
        )
    return list(map(id, one)) == list(map(id, other))


def _fill(value: Any, content: Any) -> None:
    value.clear()
    if isinstance(value, dict | set):
        value.update(content)
    else:
        value.extend(content)
