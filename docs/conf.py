"""Sphinx configuration of the documentation; `bash scripts/docs.sh` builds it."""

import itertools
import os
import pathlib
import tomllib

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
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]
nitpicky = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

# Notebooks show their stored outputs; docs/notebooks/execute.py makes them.
nb_execution_mode = "off"

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
    """Lets docstrings have tables in Markdown, which Sphinx does not read."""
    app.connect("autodoc-process-docstring", _convert_tables)


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
