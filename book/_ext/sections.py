"""Sphinx extension: write the index of the search page.

The index has address, title and text of every section: paragraphs, code and printed
results, without folded code. Sphinx's own index, which has only pages, is not built.
"""

import gzip
import json
from pathlib import Path

from docutils import nodes

SKIPPED = nodes.section | nodes.title | nodes.raw | nodes.comment | nodes.Text
FOLDED = {"tag_hide-input", "tag_hide-cell", "tag_remove-input"}


def parts(node):
    """Yield the children of a node, except sections, folded code and figures."""
    folded = FOLDED & set(node.get("classes", ()))
    for child in node.children:
        if isinstance(child, SKIPPED):
            continue
        if folded and child.get("nb_element") == "cell_code_source":
            continue
        kind = child.get("mime_type")
        is_repr = kind == "text/plain" and child.astext().startswith("<")
        if kind in (None, "text/plain", "text/markdown") and not is_repr:
            yield child


def lines(node):
    """Yield the text of a node, one line per paragraph, table row or line of code."""
    for child in parts(node):
        if isinstance(child, nodes.row):
            yield " | ".join(entry.astext() for entry in child)
        elif (
            isinstance(child, nodes.literal_block) and "running" not in child["classes"]
        ):
            yield from child.astext().splitlines()
        elif isinstance(child, nodes.TextElement):
            yield " ".join(child.astext().split())
        else:
            yield from lines(child)


def sections(doctree):
    """Yield anchor, title and passages of ten lines for each section."""
    for section in doctree.findall(nodes.section):
        text = [line.strip() for line in lines(section) if line.strip()]
        passages = ["\n".join(text[i : i + 10]) for i in range(0, len(text) or 1, 10)]
        yield section["ids"][0], section[0].astext(), passages


def write_sections(app, error):
    """Write the sections of all pages, compressed, if any page was read again."""
    if error or app.builder.format != "html":
        return
    packed_at = Path(app.outdir, "sections.bin")
    read = [path.stat().st_mtime for path in Path(app.doctreedir).glob("*/*.doctree")]
    if packed_at.exists() and max(read) < packed_at.stat().st_mtime:
        return
    pages = {
        f"{name}.html": [*sections(app.env.get_doctree(name))]
        for name in sorted(app.env.found_docs)
    }
    packed = gzip.compress(json.dumps(pages, ensure_ascii=False).encode(), mtime=0)
    packed_at.write_bytes(packed)  # some hosts would unpack a .gz file


def replace_search(app):
    """Build the search page without Sphinx's index."""
    app.builder.search = False
    app.config.html_additional_pages["search"] = "search.html"


def setup(app):
    app.connect("builder-inited", replace_search)
    app.connect("build-finished", write_sections)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
