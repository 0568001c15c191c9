"""A directive that writes the manual of the options of an input from their declarations.

It takes the place of the Markdown of the options on the pages of the manual (manual_pages.py), for
other readers than the site.

Each option has an anchor, its dotted path. Code on any page that is such a path with a dot links
there. An option that is on no page is a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from docutils import nodes
from manual_pages import OPTIONS, children, entries_of
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from deepmd_ema.config.manual import Entry, manual_entries

KIND = "input-option"
_CODE = re.compile(r"`+([^`]+)`+")

logger = logging.getLogger(__name__)


class Options(SphinxDirective):
    """The options of a part of the input, one section for each part of it."""

    required_arguments = 1
    option_spec = {"without": str.split}  # noqa: RUF012 - docutils reads it from the class

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        topic, left_out = self.arguments[0], self.options.get("without", [])
        return self._sections(topic, entries_of(topic, left_out))

    def _sections(self, place: str, entries: Sequence[Entry]) -> list[nodes.Node]:
        """Return what ``place`` itself is, its options, and a section for each of them that has
        options of its own.
        """
        own = [e for e in entries if e.path == place]
        found: list[nodes.Node] = (
            [*self._about(own[0], nodes.paragraph(ids=[self._anchor(own[0])]))]
            if own
            else []
        )
        options = nodes.definition_list(classes=["options"])
        sections = []
        for child, inside, is_section in children(place, entries):
            if is_section:
                title = nodes.title("", "", nodes.literal("", child, classes=["own"]))
                sections.append(
                    nodes.section(
                        "",
                        title,
                        *self._sections(child, inside),
                        ids=[f"in-{_id(child)}"],
                    )
                )
                continue
            entry = inside[0]
            name = nodes.literal("", child.rpartition(".")[2], classes=["own"])
            term = nodes.term("", "", name, ids=[self._anchor(entry)])
            term += nodes.reference(
                "", "¶", refuri=f"#{_id(child)}", classes=["headerlink"]
            )
            options += nodes.definition_list_item(
                "", term, nodes.definition("", *self._about(entry))
            )
        return [*found, *([options] if options.children else []), *sections]

    def _about(
        self, entry: Entry, first: nodes.Element | None = None
    ) -> Iterator[nodes.Node]:
        texts = [
            (text, kind)
            for text, kind in ((entry.facts, "facts"), (entry.doc, "meaning"))
            if text
        ]
        for number, (text, kind) in enumerate(texts):
            paragraph = (
                first if first is not None and number == 0 else nodes.paragraph()
            )
            paragraph["classes"] += [kind]
            paragraph.extend(_inline(text))
            yield paragraph

    def _anchor(self, entry: Entry) -> str:
        """Return the anchor of an option, which is known under its path from here on."""
        known, here = (
            self.env.domains.standard_domain.objects,
            (self.env.docname, _id(entry.path)),
        )
        known[KIND, entry.path] = here
        known.setdefault(
            (KIND, entry.plain_path), here
        )  # of several types, the first that has it
        return _id(entry.path)


@cache
def _paths() -> frozenset[str]:
    return frozenset(
        path for entry in manual_entries() for path in (entry.path, entry.plain_path)
    )


def _id(path: str) -> str:
    """Return the anchor of a path, which has no brackets: ``model.descriptor.dpa2.smooth``."""
    return re.sub(r"\[(.*?)]", r".\1", path)


def _inline(text: str) -> list[nodes.Node]:
    """Return text in which `code` is marked."""
    parts = _CODE.split(text)
    return [
        nodes.literal("", part) if k % 2 else nodes.Text(part)
        for k, part in enumerate(parts)
        if part
    ]


def use_directive(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the directive in the place of the Markdown of the options."""

    def directive(found: re.Match[str]) -> str:
        without = [f":without: {found[2]}"] if found[2] else []
        return "\n".join([f"```{{options}} {found[1]}", *without, "```"])

    source[0] = OPTIONS.sub(directive, source[0])


def link_options(app: Sphinx, doctree: nodes.document) -> None:
    """Make code that is the path of an option a link to it."""
    for code in list(doctree.findall(nodes.literal)):
        path, around = (
            code.astext(),
            (nodes.title, nodes.reference, addnodes.pending_xref),
        )
        is_own = "own" in code["classes"] or any(
            isinstance(code.parent, kind) for kind in around
        )
        if (
            "." in path and path in _paths() and not is_own
        ):  # `training` alone may be something else
            target = {
                "refdomain": "std",
                "reftype": KIND,
                "reftarget": path,
                "refdoc": app.env.docname,
            }
            link = addnodes.pending_xref("", **target, refexplicit=True, refwarn=True)
            code.replace_self(link)
            link += code


def check_all_shown(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn about options that no page of the manual has."""
    shown = {name for kind, name in env.domains.standard_domain.objects if kind == KIND}
    for path in sorted(_paths() - shown):
        logger.warning("%s is on no page of doc/manual", path)


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directive."""
    app.add_directive("options", Options)
    app.add_object_type(KIND, KIND, objname="option of the input")
    app.connect("source-read", use_directive)
    app.connect("doctree-read", link_options)
    app.connect("env-check-consistency", check_all_shown)
    return {"parallel_read_safe": False}
