"""Texts from this package's templates: the HTML pages, and the files of a new task."""

from functools import cache
from typing import Any

import jinja2


def render(template: str, **values: Any) -> str:
    """Fills in `templates/<template>`. In HTML and SVG values are escaped, unless Markup."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pipelinerl_cli"),
        autoescape=jinja2.select_autoescape(("html.j2", "svg.j2")),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["px"] = "{:.1f}".format
    return environment
