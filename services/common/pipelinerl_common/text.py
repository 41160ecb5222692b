"""Texts for people: numbers with their nouns, hints for misspelt names, tables in Markdown."""

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

NEAR = 0.6
"""Similarity (difflib's ratio) from which a name counts as near."""
NEAR_START = 0.75
"""Similarity of a short word to the beginning of a name from which it counts as near."""
SHORTEST_START = 3


def counted(number: float, noun: str, plural: str = "") -> str:
    """A number with its noun: counted(1, "restart") is "1 restart", counted(2, "reply", "replies")
    is "2 replies".
    """
    return f"{number:.0f} {nouns(number, noun, plural)}"


def nouns(number: float, noun: str, plural: str = "") -> str:
    """The noun alone: nouns(2, "rank") is "ranks"."""
    return noun if round(number) == 1 else plural or noun + "s"


def close_matches(word: str, candidates: Iterable[str], most: int = 1) -> list[str]:
    """Candidates that `word` may have meant, the nearest first: nearly equal, or nearly equal in
    the beginning.

    Case, "-" and "_" do not count. Examples: "my_first" is near "my-first", and "lern" near
    "learningRate".
    """
    likeness = {candidate: _likeness(_plain(word), _plain(candidate)) for candidate in candidates}
    near = [candidate for candidate, value in likeness.items() if value >= NEAR]
    return sorted(near, key=lambda candidate: (-likeness[candidate], candidate))[:most]


def did_you_mean(word: str, candidates: Iterable[str], most: int = 1) -> str:
    """A hint to append to a message about an unknown `word`; empty when no candidate is near it."""
    close = close_matches(word, candidates, most)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def did_you_mean_folder(path: Path) -> str:
    """A hint to append to a message about a missing folder: one beside it, or below runs/, with
    nearly its name.
    """
    if path.is_dir():
        return ""
    places = {
        str(place / each.name) for place in (path.parent, Path("runs")) for each in _folders(place)
    }
    by_name = {name: Path(name).name for name in sorted(places)}
    close = close_matches(path.name, by_name.values())
    found = next((name for name, last in by_name.items() if last in close), None)
    return f"; did you mean {found}?" if found else ""


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of the lines "| a | b |", "|---|---|", "| 1 | 2 |"; no newline at the end."""
    return "\n".join([_cells(head), f"|{'---|' * len(head)}", *map(_cells, rows)])


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _folders(place: Path) -> list[Path]:
    try:
        return [each for each in place.iterdir() if each.is_dir()]
    except OSError:
        return []


def _plain(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "")


def _likeness(word: str, name: str) -> float:
    whole = difflib.SequenceMatcher(None, word, name).ratio()
    if not SHORTEST_START <= len(word) < len(name):
        return whole
    start = difflib.SequenceMatcher(None, word, name[: len(word)]).ratio()
    return max(whole, 0.9 * start) if start >= NEAR_START else whole
