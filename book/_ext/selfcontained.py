"""Sphinx extension: pages load nothing from other hosts and work without scripts.

Formulas become MathML, which browsers render natively. Figures follow the light or dark
theme. Callouts get a class for book.css, and the label of each folded cell names its
content. Printed sentences may wrap. The footer names the versions on which chapters
pass, and downloaded notebooks have outputs.
"""

import datetime
import re
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
from docutils import nodes
from jupyter_cache import get_cache
from math_core import LatexToMathML
from packaging.version import Version

sys.path.append(str(Path(__file__).parents[2] / "lab"))
import record  # noqa: E402
import versions  # noqa: E402

# Swaps black and white, but not the colours of the devices.
DARK = """<style>@media (prefers-color-scheme: dark) {
svg { fill: #ced6dd }
[style*="fill: #ffffff"] { fill: #14181e !important }
[style*="stroke: #ffffff"] { stroke: #14181e !important }
[style*="fill: #000000"] { fill: #ced6dd !important }
[style*="stroke: #000000"] { stroke: #ced6dd !important }
}</style></svg>"""
MISSING = """<h1>Page not found</h1>
<p>The address may be outdated or mistyped. Start from the <a href="{0}book/index.html">
first page</a>, or use the <a href="{0}search.html">search</a>: it covers every page and
finds error messages that you paste from a terminal.</p>"""
DRAWING = re.compile(r'<img alt="[^"]*" src="[./]*_images/[^>]*>')
BOX = r'<div class="drawing" role="group" aria-label="Drawing" tabindex="0">\g<0></div>'
CALLOUTS = {"Predict.", "Pitfall.", "Takeaway."}
CODE = re.compile(r"(?<=<pre><span></span>).*?(?=\n</pre>)", re.DOTALL)
EXERCISE = re.compile(r"exercise-\d")
OPENS = re.compile(r"Open in (Colab|Kaggle)$")
FOLDS = {
    "check": "check",
    "solution": "answer",
    "shared-setup": "setup",
    "hide-output": "table",
}
to_mathml = LatexToMathML().convert_with_local_state


def read_summaries_again(app, env, added, changed, removed):
    """Read the pages that summarise other pages again when any page has changed."""
    app.something_read = bool(added | changed | removed)
    summaries = {"book/status", "book/teach"} & env.all_docs.keys()
    return [*summaries] if app.something_read else []


def write_all_pages(app, env):
    """Write all pages if any was read again: others may link to its headings."""
    return sorted(env.found_docs) if app.something_read else []


def inline_formula(translator, node):
    translator.body.append(to_mathml(node.astext(), displaystyle=False))
    raise nodes.SkipNode


def displayed_formula(translator, node):
    formula = to_mathml(node.astext(), displaystyle=True)
    translator.body.append(f'<div class="formula" tabindex="0">{formula}</div>')
    raise nodes.SkipNode


def mark_callouts(app, doctree):
    """Add a class to each quote or paragraph that starts with a label of CALLOUTS."""
    for strong in doctree.findall(nodes.strong):
        paragraph = strong.parent
        label = strong.astext()
        if label in CALLOUTS and paragraph.astext().startswith(label):
            quoted = isinstance(paragraph.parent, nodes.block_quote)
            box = paragraph.parent if quoted else paragraph
            box["classes"] += ["callout", label.rstrip(".").lower()]


def name_folds(app, doctree):
    """Give each fold of a page a unique label: its content and its section."""
    times = Counter()
    for cell in doctree.findall(nodes.container):
        if "hide_mode" in cell:
            section = cell.parent
            while not isinstance(section, nodes.section):
                section = section.parent
            label, title = content(cell), section[0].astext()
            label += "" if title.lower() == label else f": {title}"
            times[label] += 1
            label += f", {times[label]}" if times[label] > 1 else ""
            cell["prompt_show"] = f"Show the {label}"
            cell["prompt_hide"] = f"Hide the {label}"


def link_exercises(app, doctree):
    """Repeat a chapter's links to Colab and Kaggle below each exercise's heading."""
    references = doctree.findall(nodes.reference)
    links = [link for link in references if OPENS.match(link.astext())]
    for section in doctree.findall(nodes.section):
        if EXERCISE.match(section["ids"][0]) and links:
            line = nodes.paragraph("", "Run this exercise: ", classes=["where"])
            for before, link in zip(["", " · "], links):
                line += [nodes.Text(before), link.deepcopy()]
            section.insert(1, line)


def wrap_outputs(app, doctree):
    """Mark printed text without columns or indents, so that book.css wraps it."""
    for output in doctree.findall(nodes.literal_block):
        if {"output", "stream"} <= set(output["classes"]):
            if not re.search(r"^ |  |[│─]", output.astext(), re.MULTILINE):
                output["classes"].append("running")


def content(cell):
    """Return what a folded cell contains, from its tags and its output."""
    tags = {name.removeprefix("tag_") for name in cell["classes"]}
    for tag, what in FOLDS.items():
        if tag in tags:
            return what
    output = cell.children[-1]
    shared = any(tag.startswith("shared-") for tag in tags)
    if shared or output["nb_element"] != "cell_code_output":
        return "helper"
    draws = any(output.findall(nodes.image)) or 'role="img"' in output.astext()
    return "drawing's code" if draws else "code"


def describe_build(app, config):
    """Set the text about the build, and the addresses that other extensions need."""
    base = urlsplit(config.html_baseurl).path
    config.notfound_urls_prefix = base
    config.notfound_context = {"title": "Page not found", "body": MISSING.format(base)}
    config.ogp_site_url = config.html_baseurl
    jax, today = version("jax"), f"{datetime.date.today():%-d %B %Y}"
    config.html_theme_options["extra_footer"] = (
        f"Version {config.version}, built with JAX {jax} on {today}."
    )
    config.myst_substitutions["pdf"] = (
        f"[one PDF]({config.html_baseurl}parallel-jax.pdf)"
        f" and [one EPUB]({config.html_baseurl}parallel-jax.epub)"
    )
    config.myst_substitutions["build"] = (
        f"{len(versions.chapters())} chapters, executed and checked with JAX {jax}"
    )


def passes(page, passed):
    """Return a sentence with the versions of JAX on which a chapter passes, or, for
    another page, on which every chapter passes; "" if there are none."""
    chapter = passed.get(page.removeprefix("notebooks/"))
    found = set.intersection(*passed.values()) if chapter is None else chapter
    if not found:
        return ""
    *most, last = sorted(found, key=Version)
    listed = f"{', '.join(most)} and {last}" if most else last
    subject = "Every chapter" if chapter is None else "This chapter"
    return f" {subject} passes on JAX {listed}."


def wrap_lines(code: re.Match) -> str:
    """Put each line of a long cell into a span. Otherwise the theme's rules with `~ *`,
    which compare each element with all its siblings, need seconds to open a fold."""
    lines = code[0].split("\n")
    if len(lines) < 200:
        return code[0]
    return "\n".join(f"<span>{line}</span>" for line in lines)


def finish_page(app, pagename, templatename, context, doctree):
    """Let the text of folds name them, let drawings scroll, and complete the footer."""
    body = context.get("body", "").replace(' aria-label="Toggle hidden content"', "")
    is_chapter = pagename.startswith("notebooks/")
    body = CODE.sub(wrap_lines, body)
    context["body"] = DRAWING.sub(BOX, body) if is_chapter else body
    if "theme_extra_footer" in context:  # an EPUB has no footer
        passed = versions.passed_on(record.read("versions"))
        context["theme_extra_footer"] += passes(pagename, passed)


def fill_downloads(app, error):
    """Add outputs to the notebooks for download that have none.

    Whenever a page is written, the theme copies its notebook without outputs.
    """
    if error or app.builder.format != "html":
        return
    cache = get_cache(app.env.mystnb_config.execution_cache_path)
    for path in Path(app.outdir, "_sources").rglob("*.ipynb"):
        if '"output_type"' in path.read_text():
            continue  # filled by an earlier build
        notebook = nbformat.read(path, as_version=4)
        try:
            _, notebook = cache.merge_match_into_notebook(notebook)
        except KeyError:
            continue  # not cached: every build runs this page
        nbformat.write(notebook, path)


def darken_drawings(app, error):
    """Add the style of the dark theme to every SVG figure."""
    for path in Path(app.outdir, "_images").glob("*.svg"):
        svg = path.read_text()
        if "prefers-color-scheme" not in svg:
            path.write_text(DARK.join(svg.rsplit("</svg>", 1)))


def setup(app):
    app.add_html_math_renderer(
        "mathml", (inline_formula, None), (displayed_formula, None)
    )
    app.connect("config-inited", describe_build)
    app.connect("env-get-outdated", read_summaries_again)
    app.connect("env-updated", write_all_pages)
    app.connect("doctree-read", mark_callouts)
    app.connect("doctree-read", name_folds)
    app.connect("doctree-read", link_exercises)
    app.connect("doctree-read", wrap_outputs)
    app.connect("html-page-context", finish_page)
    app.connect("build-finished", fill_downloads)
    app.connect("build-finished", darken_drawings)
    return {"parallel_read_safe": True, "env_version": 5}
