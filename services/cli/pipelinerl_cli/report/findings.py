"""What `pipelinerl doctor` says of the run."""

import html
from collections.abc import Sequence

from pipelinerl_cli.doctor.rules import Named


def findings(found: Sequence[Named]) -> str:
    """The most severe first, each with what to turn."""
    if not found:
        return '<p class="sub">Nothing found.</p>'
    return f'<ul class="findings">{"".join(map(_item, found))}</ul>'


def _item(named: Named) -> str:
    finding = named.finding
    advice = "".join(f"<li>{html.escape(each)}</li>" for each in finding.turn)
    severity = html.escape(finding.severity.value)
    return (
        f'<li><span class="badge {severity}">{severity}</span> '
        f"{html.escape(finding.message)}<ul>{advice}</ul></li>"
    )
