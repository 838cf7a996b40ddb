"""Mark the chapters of the course in the sidebar.

A Sphinx extension. The chapters are those of meta.course in _toc.yml. An entry of the
sidebar gets the class "course", for book.css, and a title, which browsers show as a
tooltip and screen readers read.
"""

from pathlib import Path

import yaml
from docutils import nodes


def mark_course(app, env):
    """Set the class and the title of every page's entry, as env.tocs may be kept."""
    toc = yaml.safe_load(Path(app.srcdir, "_toc.yml").read_text())
    for name, entry in env.tocs.items():
        marked = name in toc["meta"]["course"]
        entry[0]["classes"] = ["course"] if marked else []
        link = next(entry.findall(nodes.reference))
        link.attributes.pop("reftitle", None)
        if marked:
            link["reftitle"] = "In the course"


def setup(app):
    app.connect("env-updated", mark_course)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
