"""Sphinx settings of the documentation site: `make docs`.

The source folder is the repository's root, so that links between README.md, docs/ and
experiments/reports/ work on the site as they do in the repository.
"""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent

project = "bert_jax"
author = "the authors of bert_jax"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["docs/*.md", "docs/log/*.md", "CONTRIBUTING.md", "experiments/reports/*.md"]
exclude_patterns = [".venv*", "runs", ".git"]
html_theme = "furo"
html_title = "bert_jax"
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_extra_path = ["static/index.html"]  # Leads from the site's root to the first page.
html_show_copyright = False

highlight_language = "none"  # Of code blocks without a language, mostly commands and logs.
myst_heading_anchors = 3  # As on code hosts: a link to "page.md#title-of-a-section" works.
napoleon_use_ivar = True  # One list of attributes, not an entry for each.
autodoc_member_order = "bysource"
default_role = "code"  # Docstrings have single backticks, as in Markdown.


def adapt_source(app, docname: str, source: list[str]) -> None:
    """Begins the first page with the README, and links to a page instead of to a folder."""
    if docname == root_doc:
        readme = (ROOT / "README.md").read_text()
        source[0] = re.sub(r"\]\((?=docs/|CONTRIBUTING)", "](/", readme) + source[0]
    source[0] = re.sub(r"\]\((\.\./)?experiments/reports/?\)", "](/docs/reports.md)", source[0])


def setup(app) -> None:
    app.connect("source-read", adapt_source)
