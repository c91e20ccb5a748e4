"""Sphinx configuration of the documentation; `bash scripts/docs.sh` builds it."""

import itertools
import os
import pathlib
import re
import tempfile
import tomllib
import zlib

from docutils import nodes
from sphinx import addnodes

# The API reference imports the package, which must not look for accelerators.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

_PROJECT = tomllib.loads(
    (pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text()
)["project"]

project = "tpu_embedding"
author = _PROJECT["authors"][0]["name"]
copyright = author
release = version = _PROJECT["version"]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]
nitpicky = False

myst_enable_extensions = ["alert"]
myst_heading_anchors = 4

# Notebooks show their stored outputs; docs/notebooks/execute.py makes them.
nb_execution_mode = "off"

# Names of other libraries become links where the lists of their names can be loaded. An
# empty list stands in without a network, and DOCS_OFFLINE does not ask for any.
_NO_NAMES = pathlib.Path(tempfile.mkdtemp()) / "objects.inv"
_NO_NAMES.write_bytes(
    b"# Sphinx inventory version 2\n# Project: none\n# Version: 0\n"
    b"# The remainder of this file is compressed using zlib.\n" + zlib.compress(b"")
)
_ASKED = [] if os.environ.get("DOCS_OFFLINE") else [None]  # None asks the address.
intersphinx_mapping = {
    name: (address, (*_ASKED, str(_NO_NAMES)))
    for name, address in {
        "jax": "https://docs.jax.dev/en/latest/",
        "flax": "https://flax.readthedocs.io/en/latest/",
        "optax": "https://optax.readthedocs.io/en/latest/",
    }.items()
}
intersphinx_timeout = 10

# Docstrings write code between single backticks.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "sphinx_book_theme"
html_title = "tpu_embedding"
html_static_path = ["_static"]
html_css_files = ["tpu_embedding.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_theme_options = {
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "home_page_in_toc": True,
    "navbar_persistent": [],
    "article_header_end": ["theme-switcher"],
}


def setup(app):
    """Connects the functions below to the events of a build."""
    app.connect("source-read", _show_hidden)
    app.connect("autodoc-process-docstring", _convert_tables)
    app.connect("doctree-read", _summarize)
    app.connect("doctree-read", _link_names)
    # Before Sphinx collects the pictures' files.
    app.connect("doctree-read", _inline_pictures, priority=400)


_HIDDEN = re.compile(r"^<!-- sphinx\n((?:.*\n)*?)-->\n(?:\n(?:\|.*\n)+)?", re.MULTILINE)


def _show_hidden(app, docname, source):
    """Shows what pages hide from GitHub, instead of the table after it.

    `update_pages.py` writes the tables.
    """
    del app, docname
    source[0] = _HIDDEN.sub(r"\1", source[0])


_MODULES = {
    "te": "tpu_embedding",
    "nnx": "flax.nnx",
    "jnp": "jax.numpy",
    "jax": "jax",
    "optax": "optax",
}


_SUMMARIZED = 2
"""Minimum number of names for a table of them at the top of a reference page."""


def _summarize(app, doctree):
    """Puts a table of its names at the top of a page of the API reference."""
    entries = [
        entry
        for entry in doctree.findall(addnodes.desc)
        if not isinstance(entry.parent, addnodes.desc_content)
    ]
    if not app.env.docname.startswith("api/") or len(entries) < _SUMMARIZED:
        return
    body = nodes.tbody()
    for entry in entries:
        signature, content = entry[0], entry[-1]
        name = nodes.reference(
            "", "", nodes.literal("", signature["fullname"]), internal=True
        )
        name["refid"] = signature["ids"][0]
        first = next(iter(content.findall(nodes.paragraph)), nodes.paragraph())
        body += nodes.row(
            "",
            nodes.entry("", nodes.paragraph("", "", name)),
            nodes.entry("", first.deepcopy()),
        )
    columns = [nodes.colspec(colwidth=width) for width in (30, 70)]
    page = doctree.next_node(nodes.section)
    place = 1 + isinstance(page[1], nodes.paragraph)  # below the title and its sentence
    table = nodes.tgroup("", *columns, body, cols=2)
    page.insert(place, nodes.table("", table, classes=["names"]))


def _link_names(app, doctree):
    """Makes links of `te.make_plan`, `optax.adam(0.1)` and the like.

    Pages write plain code, which reads well everywhere. A name that is in no list of
    names stays as it is.
    """
    del app
    for literal in list(doctree.findall(nodes.literal)):
        found = re.fullmatch(r"(\w+)((?:\.\w+)+)(?:\(.*\))?", literal.astext())
        is_link = isinstance(literal.parent, nodes.reference | addnodes.pending_xref)
        if found is None or found[1] not in _MODULES or is_link:
            continue
        link = addnodes.pending_xref(
            refdomain="py",
            reftype="obj",
            reftarget=_MODULES[found[1]] + found[2],
            refwarn=False,
        )
        literal.replace_self(link)
        link += literal


def _inline_pictures(app, doctree):
    """Puts each SVG into the page itself, where it takes the theme's colours.

    Its frame scrolls on a narrow screen.
    """
    folder = pathlib.Path(app.env.doc2path(app.env.docname)).parent
    for image in list(doctree.findall(nodes.image)):
        if image["uri"].endswith(".svg"):
            file = folder / image["uri"]
            app.env.note_dependency(str(file))
            svg = nodes.raw("", file.read_text(), format="html")
            is_alone = len(image.parent) == 1  # in its paragraph
            place = image.parent if is_alone else image
            place.replace_self(nodes.container("", svg, classes=["picture"]))


def _convert_tables(app, what, name, obj, options, lines):
    del app, what, name, obj, options
    converted = []
    for is_table, group in itertools.groupby(lines, lambda line: line.startswith("|")):
        block = list(group)
        converted += _list_table(block) if is_table else block
    lines[:] = converted


def _list_table(table):
    rows = [line.strip("|").split("|") for line in table]
    del rows[1]  # the rule below the head
    result = ["", ".. list-table::", "   :header-rows: 1", ""]
    for row in rows:
        marks = ["   * -", *["     -"] * (len(row) - 1)]
        result += [f"{m} {cell.strip()}" for m, cell in zip(marks, row, strict=True)]
    return [*result, ""]
