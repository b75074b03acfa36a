"""Where in the user's module an operation was recorded: annotations of nodes, and paths."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from torch import fx

ANNOTATION: Final = "poetmodel.module"
"""Key under a node's ``custom`` annotations: the path of the module it was recorded in."""

BODY: Final = "model"
"""Where the user's module lies in the captured one."""


def shown_path(path: str) -> str:
    """Return the path of a module below the user's, for people."""
    return path.removeprefix(BODY).lstrip(".")


def in_module(node: fx.Node) -> str:
    """Return words that say in which module an operation was recorded, where that is known."""
    path = shown_path(node.meta.get("custom", {}).get(ANNOTATION, ""))
    return f" in module {path!r}" if path else ""


@contextmanager
def annotated(
    stepped: torch.nn.Module, trail: list[str], check: Callable[[Sequence[str]], object]
) -> Iterator[None]:
    """Let every node that is recorded inside carry the path of the module it came from.

    PyTorch 2.9 cannot do that; names then say the operator only. The modules that run when
    something is raised are left in the trail, the innermost one last; it is checked where one of
    them begins and ends.
    """
    from torch.fx import traceback

    annotate = getattr(traceback, "annotate", None)
    if annotate is None:
        yield
        return
    open_contexts: list[Any] = []
    trail.clear()

    def enter(path: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, *_: Any) -> None:
            check(trail)
            context = annotate({ANNOTATION: path})
            context.__enter__()
            open_contexts.append(context)
            shown = shown_path(path)
            kind = type(module).__name__
            trail.append(f"module {shown!r} ({kind})" if shown else f"module {kind}")

        return hook

    def leave(*_: Any) -> None:
        check(trail)
        open_contexts.pop().__exit__(None, None, None)
        trail.pop()

    handles = []
    for path, module in stepped.named_modules():
        handles.append(module.register_forward_pre_hook(enter(path)))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        while open_contexts:
            open_contexts.pop().__exit__(None, None, None)
