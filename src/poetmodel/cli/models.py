"""``poetmodel models``: the built-in networks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from poetmodel.cli import completion, options
from poetmodel.cli.inspect import as_dict, tables
from poetmodel.cli.output import count, listing, print_json, print_text, show
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

EPILOG: Final = "Example: poetmodel models resnet18-cifar"

NameArgument = Annotated[
    str | None,
    typer.Argument(
        autocompletion=completion.one(completion.models),
        metavar="NAME",
        help="A built-in network.",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("models", epilog=EPILOG)(models)


def models(
    name: NameArgument = None,
    *,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,  # noqa: ARG001 - acts while it is parsed
) -> None:
    """List the built-in networks, or show one."""
    from poetmodel.graph.catalogue import describe_model, load_model, model_names

    if name is None:
        entries = [_entry(key) for key in model_names()]
        if json:
            print_json(entries)
        else:
            heads = ("model", "nodes", "parameters", "keep-all", "minimum RAM")
            show(listing("Models", heads, _rows(entries)))
            print_text("'poetmodel models NAME' shows one of them.")
        return
    description, graph = describe_model(name), load_model(name)
    if json:
        print_json({"model": name, "description": description, **as_dict(graph)})
    else:
        print_text(description)
        show(*tables(graph))


def _entry(name: str) -> dict[str, Any]:
    from poetmodel.graph.catalogue import describe_model, load_model

    return {"model": name, "description": describe_model(name), **as_dict(load_model(name))}


def _rows(entries: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for entry in entries:
        yield (
            entry["model"],
            f"{entry['nodes']}",
            count(entry["parameters"]),
            format_bytes(entry["checkpoint_all_peak_bytes"]),
            format_bytes(entry["floor_bytes"]),
        )
