"""Write the search page's index, sections.bin: the text of every section.

A Sphinx extension. The text is that of paragraphs, code and printed results, without
folded code. It replaces Sphinx's own index, which knows pages only.
"""

import gzip
import json
from pathlib import Path

from docutils import nodes

LEFT_OUT = nodes.section | nodes.title | nodes.raw | nodes.comment | nodes.Text
FOLDED = {"tag_hide-input", "tag_hide-cell", "tag_remove-input"}


def parts(node):
    """Yield a node's children but for sections, the code of folded cells and images."""
    folded = FOLDED & set(node.get("classes", ()))
    for child in node.children:
        if isinstance(child, LEFT_OUT):
            continue
        if folded and child.get("nb_element") == "cell_code_source":
            continue
        kind = child.get("mime_type", "text/markdown")
        is_repr = kind == "text/plain" and child.astext().startswith("<")
        if kind in ("text/plain", "text/markdown") and not is_repr:
            yield child


def lines(node):
    """Yield a line of text for each paragraph, row of a table and line of code."""
    for child in parts(node):
        if isinstance(child, nodes.row):
            yield " | ".join(entry.astext() for entry in child)
        elif isinstance(child, nodes.TextElement):
            text = child.astext()
            is_code = isinstance(child, nodes.literal_block)
            wraps = not is_code or "running" in child["classes"]
            yield from [" ".join(text.split())] if wraps else text.splitlines()
        else:
            yield from lines(child)


def sections(doctree):
    """Yield each section's anchor, title and passages of ten lines."""
    for section in doctree.findall(nodes.section):
        text = [line.strip() for line in lines(section) if line.strip()]
        passages = ["\n".join(text[i : i + 10]) for i in range(0, len(text) or 1, 10)]
        yield section["ids"][0], section[0].astext(), passages


def write_sections(app, error):
    """Pack the sections of all pages."""
    if error or app.builder.format != "html":
        return
    pages = {
        f"{name}.html": [*sections(app.env.get_doctree(name))]
        for name in sorted(app.env.found_docs)
    }
    packed = gzip.compress(json.dumps(pages, ensure_ascii=False).encode(), mtime=0)
    Path(app.outdir, "sections.bin").write_bytes(packed)  # some hosts unpack .gz


def replace_search(app):
    """Make the search page without Sphinx's index."""
    app.builder.search = False
    app.config.html_additional_pages["search"] = "search.html"


def setup(app):
    app.connect("builder-inited", replace_search)
    app.connect("build-finished", write_sections)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
