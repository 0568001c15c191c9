"""Parts of the page as HTML: tables, pictures, lists, and the style for screens of any width and for paper."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

from deepmd_ema.report.panels import Figure, Key
from deepmd_ema.report.table import Table

_TYPES = {".svg": "svg+xml", ".png": "png"}
# pictures are dark on white in both modes: they are drawn once
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2730; --soft: #5b6770; --line: #d9dee3; --back: #fff; --card: #f5f7f9;
  --bar: #0072b2 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8eb; --soft: #a3adb5; --line: #3a444c; --back: #14191d;
  --card: #1f262b; --bar: #56b4e9 } }
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; color: var(--ink);
  background: var(--back) }
h1 { margin: 0; overflow-wrap: anywhere; font-size: 1.7rem; line-height: 1.2 }
h2 { margin: 2.2rem 0 .6rem; padding-top: .6rem; border-top: 1px solid var(--line); font-size: 1.25rem }
h3 { margin: 1.4rem 0 .4rem; font-size: 1.05rem }
p { margin: .4rem 0 }
a { color: inherit }
.lead { font-size: 1.05rem }
.soft, caption small, nav { color: var(--soft) }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .8rem 0; font-size: .9rem }
.wide { overflow-x: auto; margin: .5rem 0 1.2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem }
caption { text-align: left; font-weight: 600; padding-bottom: .2rem }
th { font-weight: 600; vertical-align: bottom; line-height: 1.25 }
th small { font-weight: 400; color: var(--soft) }
td, th { padding: .2rem .6rem; border-bottom: 1px solid var(--line); text-align: right }
td, th.text { white-space: nowrap }
td.text, th.text { text-align: left }
td.long { white-space: normal; overflow-wrap: anywhere; min-width: 12rem }
td:first-child, tr:first-child > th:first-child { padding-left: 0 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .6rem 0 }
dt { color: var(--soft) }
dd { margin: 0; overflow-wrap: anywhere; min-width: 0 }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 18.5rem), 1fr)); gap: .8rem }
.figures img { width: 100%; height: auto; background: #fff; border: 1px solid var(--line); border-radius: .4rem;
  padding: .3rem }
.keys { display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; padding: 0; margin: .3rem 0 .6rem; list-style: none;
  font-size: .9rem }
.keys i { display: inline-block; width: 1.6rem; margin-right: .4rem; vertical-align: middle; text-align: center;
  font-style: normal }
.bar { display: inline-block; height: .7rem; background: var(--bar); print-color-adjust: exact;
  -webkit-print-color-adjust: exact }
pre { overflow-x: auto; background: var(--card); padding: .7rem; font-size: .8rem; line-height: 1.35 }
.notice { border-left: 4px solid #d55e00; padding: .2rem .8rem; background: var(--card) }
@media (max-width: 34rem) { body { padding: .8rem } td, th { padding: .2rem .45rem }
  td.text, th.text { white-space: normal }
  dl { grid-template-columns: 1fr; gap: 0 } dt { margin-top: .4rem; font-size: .85rem } }
@media print { :root { --ink: #000; --soft: #444; --line: #bbb; --back: #fff; --card: #f5f5f5; --bar: #0072b2 }
  body { max-width: none; font-size: 10pt; padding: 0 } nav { display: none } .wide { overflow: visible }
  table { font-size: 8.5pt } td, th { padding: .1rem .35rem } h2, h3, caption { break-after: avoid }
  tr, img { break-inside: avoid } .figures { grid-template-columns: repeat(3, 1fr) } }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """Return the whole page."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def heading(title: str, anchor: str) -> str:
    """Return the heading of a part of the page."""
    return f'<h2 id="{anchor}">{escape(title)}</h2>'


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph of plain text."""
    return f"<p{f' class={kind}' if kind else ''}>{escape(text)}</p>"


def facts_list(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a list of names and texts; names without a text are left out, and a name is not repeated."""
    items, last = [], ""
    for name, text in pairs:
        if text:
            items.append(f"<dt>{escape(name) if name != last else ''}</dt><dd>{escape(text)}</dd>")
            last = name
    return f"<dl>{''.join(items)}</dl>"


def table(content: Table, long: Sequence[str] = ()) -> str:
    """Return a table; columns of text are set to the left, and those named in ``long`` may be wrapped."""
    kinds = ["" if column.spec else " class=text" for column in content.columns]
    cells_kinds = [" class='text long'" if c.name in long else kind for c, kind in zip(content.columns, kinds)]
    heads = "".join(
        f"<th{kind}>{escape(c.name)}{f'<br><small>{escape(c.unit)}</small>' if c.unit else ''}</th>"
        for c, kind in zip(content.columns, kinds)
    )
    rows = "".join(
        f"<tr>{''.join(f'<td{kind}>{escape(cell)}</td>' for cell, kind in zip(cells, cells_kinds))}</tr>\n"
        for cells in content.texts()
    )
    caption = f"<caption>{escape(content.title)}</caption>" if content.title else ""
    return f"<div class=wide><table>{caption}<tr>{heads}</tr>\n{rows}</table></div>"


def figures(drawn: Sequence[Figure]) -> str:
    """Return pictures side by side as far as there is room, with their content in the page."""
    images = []
    for figure in drawn:
        data = base64.b64encode(figure.file.read_bytes()).decode()
        kind = _TYPES[figure.file.suffix]
        images.append(f'<img alt="{escape(figure.words)}" src="data:image/{kind};base64,{data}">')
    return f"<div class=figures>{''.join(images)}</div>"


def keys(entries: Sequence[Key]) -> str:
    """Return the meaning of the lines of the pictures."""
    items = []
    for key in entries:
        line = f'<i style="border-top: {max(1.5, 1.5 * key.width):.1f}px solid {key.color}"></i>'
        items.append(f"<li>{'<i>★</i>' if key.is_star else line}{escape(key.label)}</li>")
    return f"<ul class=keys>{''.join(items)}</ul>"


def bars(title: str, rows: Sequence[tuple[str, str, float]]) -> str:
    """Return names, texts and shares (0 to 1) as bars."""
    lines = "".join(
        f"<tr><td class=text>{escape(name)}</td><td>{escape(text)}</td><td>{100 * share:.1f} %</td>"
        f'<td class=text><span class=bar style="width: {8 * share:.2f}rem"></span></td></tr>'
        for name, text, share in rows
    )
    head = "<tr><th class=text>part</th><th>time</th><th>share</th><th></th></tr>"
    return f"<div class=wide><table><caption>{escape(title)}</caption>{head}{lines}</table></div>"


def folded(summary: str, text: str) -> str:
    """Return text as it is, hidden until its summary is clicked."""
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"
