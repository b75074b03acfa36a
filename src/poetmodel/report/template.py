"""Sources of all pages: jinja2's templates, and plotly's script, packed into the page."""

from __future__ import annotations

import base64
import gzip
import json
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from poetmodel.report.charts import kinds, parts
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LIBRARIES: Final = ("jinja2", "plotly")
"""Packages of a page."""
NEEDED: Final = {"timeline": ("bands",)}
"""Scripts that those of charts need before them."""
USER_OBJECTIVE: Final = "poetmodel.report"
"""The package whose assets all pages share."""


def render(
    template: str,
    *,
    chart_scripts: Sequence[str],
    charts: Mapping[str, Any],
    package: str = USER_OBJECTIVE,
    **values: Any,
) -> str:
    """Return a page as text; the same values give the same text.

    Parameters
    ----------
    template : str
        A template that extends ``base.html.jinja``.
    chart_scripts : sequence of str
        The types of its charts, each a file in ``assets/scripts``.
    charts : mapping
        What the scripts read: ``graph`` (see `poetmodel.report.charts.graph_chart`) and ``charts``,
        each with ``type`` and ``id``.
    package : str
        The package whose ``assets`` have the template.
    **values
        What the template reads.
    """
    text: str = (
        _environment(package)
        .get_template(template)
        .render(
            chart_scripts=chart_scripts,
            scripts=[name for chart in chart_scripts for name in (*NEEDED.get(chart, ()), chart)],
            kinds=kinds(),
            parts_of_ram=parts(),
            charts={
                "kinds": kinds(),
                "parts": parts(),
                **charts,
            },
            plotly=packed_plotly(),
            **values,
        )
    )
    return text


@cache
def packed_plotly() -> str:
    """Return plotly's script, compressed and in base 85.

    The digits are those of `base64.b85encode` but for a comma in place of ``<``, which could end
    the element that holds them.
    """
    from plotly.offline import get_plotlyjs

    library = gzip.compress(get_plotlyjs().encode("utf-8"), compresslevel=9, mtime=0)
    return base64.b85encode(library).decode("ascii").replace("<", ",")


@cache
def _environment(package: str) -> Any:
    import jinja2

    loaders = [
        jinja2.PackageLoader(name, "assets") for name in dict.fromkeys((package, USER_OBJECTIVE))
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
