"""The site: the Markdown pages of the repository as they are, the manual of all options and the
Python interface.

    sphinx-build -W --keep-going -n -c doc . build/site

The source is the repository, so that links between its pages are the same on the site and on a
forge.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from pygments.lexers.data import JsonLexer
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "site")]

from deepmd_ema.utils import __version__  # noqa: E402

project = "dp-ema"
release = version = __version__
copyright = "the developers of dp-ema"
root_doc = "doc/README"
highlight_language = "text"
smartquotes = False  # `--pt` in a table stays as it is
include_patterns = [
    "*.md",
    "doc/**.md",
    "benchmarks/**.md",
    "examples/README.md",
    "examples/infrared/README.md",
    "examples/distill/README.md",
    "configs/README.md",
]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "options",
]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # as a forge makes them

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"ArrayLike": "ArrayLike"}
napoleon_attr_annotations = False
napoleon_use_ivar = True
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(?!deepmd_ema\.).*",
    ),  # names of other packages: a build needs no network
    (
        "py:class",
        r"deepmd_ema\.(distributed|infer\.load|training\.trainer)\..*",
    ),  # internal, in public signatures
]

templates_path = ["site"]
html_additional_pages = {"index": "redirect.html"}
html_theme = "furo"
html_title = "dp-ema"
html_copy_source = False
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"

# pages whose lists of links are the table of contents
CONTENTS = ("doc/README", "doc/manual/README", "benchmarks/README")
_ROW = re.compile(r"^(?:- |\| )\[([^]]+)\]\(([^)#\s]+)\.md\)", re.M)


def add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the pages to which the lists and tables of a README lead under it, by headings where
    there are some.
    """
    if docname not in CONTENTS:
        return
    folder, blocks = posixpath.dirname(docname), []
    for part in re.split(r"^(?=## )", source[0], flags=re.M):
        heading = part.partition("\n")[0]
        caption = (
            heading.removeprefix("## ")
            if docname == root_doc and heading.startswith("## ")
            else ""
        )
        pages = [
            f"{text} </{posixpath.normpath(posixpath.join(folder, page))}>"
            for text, page in _ROW.findall(part)
        ]
        blocks += [_toctree([f":caption: {caption}"] * bool(caption), pages)] * bool(
            pages
        )
    source[0] += "\n" + "\n".join(blocks)


def _toctree(options: list[str], pages: list[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", *options, "", *pages, "```", ""])


def write_math(translator: Any, node: nodes.math | nodes.math_block) -> None:
    """Write a formula as MathML, which browsers show without a script."""
    try:
        translator.body.append(
            tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block))
        )
    except MathError as error:
        logger.warning("%s: %s", node.astext(), error, location=node)
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Connect what is above."""
    app.connect("source-read", add_contents)
    app.add_lexer("jsonc", JsonLexer)  # it reads comments
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))
