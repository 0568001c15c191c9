"""Writes the options on the pages of doc/manual from their declarations:
`python doc/site/manual_pages.py`.

A page marks the place, and names its part of the input and what other pages have of it::

    <!-- options: model without model.descriptor -->
    <!-- end of options -->

The site has a directive there (options.py), with anchors and links.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from deepmd_ema.config.manual import Entry, manual_entries

PAGES = Path(__file__).parents[1] / "manual"
OPTIONS = re.compile(
    r"<!-- options: (\S+)(?: without (.*))? -->\n(?:.*\n)*?<!-- end of options -->"
)
_MAX_LEVEL = 6  # of headings


def entries_of(topic: str, left_out: Sequence[str]) -> list[Entry]:
    """Return the entries at and under ``topic``, but for those of other pages.

    Raises:
        ValueError: if there are none.
    """
    chosen = [
        e
        for e in manual_entries()
        if _is_in(e, topic) and not any(_is_in(e, part) for part in left_out)
    ]
    if not chosen:
        raise ValueError(f"no option is under {topic}")
    return chosen


def children(
    place: str, entries: Sequence[Entry]
) -> Iterator[tuple[str, list[Entry], bool]]:
    """Yield the paths directly under ``place``, each with the entries at or under it, and whether
    it is a section.
    """
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        below = (
            re.match(r"\.?[^.[]+|\[[^]]*]", entry.path.removeprefix(place))
            if entry.path != place
            else None
        )
        if below:
            found.setdefault(place + below[0], []).append(entry)
    for child, inside in found.items():
        is_kind = inside[0].option is None and not child.endswith(".type")
        yield child, inside, len(inside) > 1 or is_kind


def with_options(page: str) -> str:
    """Return the text of a page with its options as they are declared."""
    return OPTIONS.sub(_part, page)


def _part(found: re.Match[str]) -> str:
    topic, left_out = found[1], (found[2] or "").split()
    first, last = found[0].splitlines()[:1], found[0].splitlines()[-1:]
    return "\n".join(
        [*first, "", *_lines(topic, entries_of(topic, left_out), 2), *last]
    )


def _lines(place: str, entries: Sequence[Entry], level: int) -> Iterator[str]:
    """Yield what ``place`` itself is, its options as a list, and a section for each that has
    options of its own.
    """
    for entry in entries:
        if entry.path == place:
            yield from ("\\\n".join(_texts(entry)), "")
    listed = list(children(place, entries))
    options = [
        (child, inside[0]) for child, inside, is_section in listed if not is_section
    ]
    for child, entry in options:
        yield f"- `{child.rpartition('.')[2]}`: " + "\\\n  ".join(_texts(entry))
    if options:
        yield ""
    for child, inside, is_section in listed:
        if is_section:
            yield from (f"{'#' * level} `{child}`", "")
            yield from _lines(child, inside, min(level + 1, _MAX_LEVEL))


def _texts(entry: Entry) -> list[str]:
    """Return facts and meaning of an entry, in which stars outside of code are no emphasis."""
    texts = [text for text in (entry.facts, entry.doc) if text]
    return [
        re.sub(r"(`+[^`]+`+)|\*", lambda found: found[1] or r"\*", text)
        for text in texts
    ]


def _is_in(entry: Entry, place: str) -> bool:
    return re.match(rf"{re.escape(place)}($|[.[])", entry.path) is not None


if __name__ == "__main__":
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(with_options(path.read_text()))
