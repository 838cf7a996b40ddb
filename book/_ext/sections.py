"""Write what the search page reads: every section's address, titles and text.

A Sphinx extension. The text is that of paragraphs, code and printed results; folded
code is left out. Sphinx's own index, which knows pages only, is not made.
"""

import gzip
import json
from pathlib import Path

from docutils import nodes

UNREAD = nodes.section | nodes.title | nodes.raw | nodes.comment | nodes.Text
FOLDED = {"tag_hide-input", "tag_hide-cell", "tag_remove-input"}


def parts(node):
    """What is below a node, less other sections, the code of folded cells, pictures."""
    folded = FOLDED & set(node.get("classes", ()))
    for child in node.children:
        if isinstance(child, UNREAD):
            continue
        if folded and child.get("nb_element") == "cell_code_source":
            continue
        kind = child.get("mime_type")
        names_an_object = kind == "text/plain" and child.astext().startswith("<")
        if kind in (None, "text/plain", "text/markdown") and not names_an_object:
            yield child


def lines(node):
    """The text in a node, a line for each paragraph, row of a table or line of code."""
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
    """The anchor, the title and the passages, of ten lines each, of every section."""
    for section in doctree.findall(nodes.section):
        text = [line.strip() for line in lines(section) if line.strip()]
        passages = ["\n".join(text[i : i + 10]) for i in range(0, len(text) or 1, 10)]
        yield section["ids"][0], section[0].astext(), passages


def write_sections(app, error):
    """Pack the sections of all pages, if any page was read again."""
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
    packed_at.write_bytes(packed)  # as .gz, some hosts would unpack it


def replace_search(app):
    """Make the search page, and not the index that it would have."""
    app.builder.search = False
    app.config.html_additional_pages["search"] = "search.html"


def setup(app):
    app.connect("builder-inited", replace_search)
    app.connect("build-finished", write_sections)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
