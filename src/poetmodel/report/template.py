"""Rendering of pages from jinja2 templates; each page contains plotly's script, compressed."""

from __future__ import annotations

import base64
import gzip
import json
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from poetmodel.report.charts import list_action_kinds, list_ram_kinds
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LIBRARIES: Final = ("jinja2", "plotly")
"""Packages that pages need."""
REQUIRED_SCRIPTS: Final = {"timeline": ("bands",)}
"""Scripts that must precede the script of a chart, by its type."""
SHARED_PACKAGE: Final = "poetmodel.report"
"""Package whose assets all pages share."""


def render(
    template: str,
    *,
    chart_scripts: Sequence[str],
    charts: Mapping[str, Any],
    package: str = SHARED_PACKAGE,
    **values: Any,
) -> str:
    """Render a page that extends ``base.html.jinja``; equal values give equal text.

    `chart_scripts` are the types of `charts`. Assets that `package` lacks come from
    `SHARED_PACKAGE`.
    """
    page_text: str = (
        _environment(package)
        .get_template(template)
        .render(
            chart_scripts=chart_scripts,
            scripts=[
                name
                for chart_script in chart_scripts
                for name in (*REQUIRED_SCRIPTS.get(chart_script, ()), chart_script)
            ],
            kinds=list_action_kinds(),
            ram_kinds=list_ram_kinds(),
            charts={
                "kinds": list_action_kinds(),
                "parts": list_ram_kinds(),
                **charts,
            },
            plotly=packed_plotly(),
            **values,
        )
    )
    return page_text


@cache
def packed_plotly() -> str:
    """Return plotly's script, compressed by gzip and encoded in base 85; cached.

    The digits are those of `base64.b85encode`, with a comma in place of ``<``, which could begin a
    tag.
    """
    from plotly.offline import get_plotlyjs

    library = gzip.compress(get_plotlyjs().encode("utf-8"), compresslevel=9, mtime=0)
    return base64.b85encode(library).decode("ascii").replace("<", ",")


@cache
def _environment(package: str) -> Any:
    """Return the jinja2 environment for the templates of a package, with filters; cached."""
    import jinja2

    loaders = [
        jinja2.PackageLoader(name, "assets") for name in dict.fromkeys((package, SHARED_PACKAGE))
    ]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bytes=format_bytes, joules=format_joules, seconds=format_seconds, plain=json.dumps
    )
    return environment
