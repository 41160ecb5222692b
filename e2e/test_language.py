"""Keeps the wording plain: idioms that read translated, each with the field's word for it.

python e2e/test_language.py [FOLDER...]     lists every place
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUFFIXES = {".py", ".md", ".proto", ".yaml", ".yml", ".toml", ".tpl", ".txt", ".html", ".j2", ""}
EXEMPT = ("e2e/test_language.py", "LICENSE", "proto/gen/", "golden/")
REPLACEMENTS = {
    r"(go|goes|going|went|gone) on": "resume, continue",
    r"for ever": "indefinitely, until cancelled",
    r"(is|are|was|were|be|been|being) told": "receives, is notified",
    r"(tell|tells|told|telling)": "report, return, notify",
    r"(hear|hears|heard)": "receive, be notified",
    r"(whoever|whosoever)": "the caller, any process that",
    r"(nobody|everybody|somebody)": "no process, every caller, a process",
    r"(is|are|was|were|be|been) away": "unreachable",
    r"(put|puts|putting) right": "fix",
    r"(give|gives|gave|giving) way": "yield, be evicted",
    r"(let|lets|letting) go": "release",
    r"(pass|passes|passed|passing) over": "skip, ignore",
    r"anew": "again, from the start",
    r"in vain": "without success",
    r"is no multiple": "must be a multiple",
    r"(comes|came|come|coming) again": "is redelivered, returns",
    r"(stand|stands|stood|standing) still": "is blocked, is unchanged",
    r"(mend|mends|mended|mending)": "fix, repair",
    r"storeys?": "layer",
    r"(lie|lies|lay) (in|on|at|under|beside|within|there|here)": "is in, is stored in",
    r"till": "until",
    r"newcomers?": "new member",
    r"(dearest|dearer)": "most expensive, costliest",
    r"becom(e|es) of": "the outcome of",
    r"and the like": "and similar",
    r"(takes|take|took) notice": "notices, handles",
    r"nought": "zero",
    r"betimes|erstwhile|thereof|whereof|hitherto": "an ordinary word",
    r"companions?": "job runtime",
    r"on (its|their) own account": "independently",
    r"(is|are) (of|at) no use": "is unused",
    r"as it likes|as they like": "in any order, freely",
    r"(bells?|rings?) (rings|the bell)": "notify",
    r"(falls|fall|fell) silent": "stops responding",
    r"(gets|get|got) rid of": "remove",
    r"(makes|make|made) (up its mind|shift)": "decide",
    r"at once with": "together with",
    r"(sees|see) to it": "ensures",
    r"(has|have|had) its say": "is evaluated",
    r"to the letter|letter for letter": "exactly, byte for byte",
}
IDIOM = {re.compile(rf"\b{idiom}\b", re.IGNORECASE): word for idiom, word in REPLACEMENTS.items()}
FRAGMENT = re.compile(r"(Of|Until|For|How|Who|Whom|Whose|Nor)\b")
"""How a docstring starts that is only half a sentence without the name above it."""


def written_files(folders: Sequence[str] = ()) -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "--", *folders], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [
        Path(name)
        for name in listing
        if Path(name).suffix in SUFFIXES
        and (ROOT / name).is_file()
        and not any(part in name for part in EXEMPT)
    ]


def idioms(path: Path) -> Iterator[str]:
    for row, line in enumerate((ROOT / path).read_text(errors="replace").splitlines(), 1):
        for pattern, word in IDIOM.items():
            if match := pattern.search(line):
                yield f"{path}:{row}: {match.group()!r}: write {word}"


def fragments(path: Path) -> Iterator[str]:
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            and FRAGMENT.match(node.value.value.strip())
        ):
            start = " ".join(node.value.value.split()[:5])
            yield f"{path}:{node.lineno}: '{start} ...': write a full sentence"


def test_no_idiom_that_reads_translated() -> None:
    assert [found for path in written_files() for found in idioms(path)] == []


def test_docstrings_are_sentences_that_stand_alone() -> None:
    assert [found for path in written_files() for found in fragments(path)] == []


if __name__ == "__main__":
    for file in written_files(sys.argv[1:]):
        print(
            *idioms(file),
            *fragments(file),
            sep="\n",
            end="\n" if [*idioms(file), *fragments(file)] else "",
        )
