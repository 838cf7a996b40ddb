"""Make each page light and whole: it needs no other host, and to be read no script.

A Sphinx extension. Formulas become MathML, which browsers draw by themselves. Figures
follow the reader's choice of light or dark. Callouts get a class that book.css knows,
and folds say what they hold. Printed sentences may wrap. What no page asks for is not
published.
"""

import datetime
import re
import shutil
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

# Ink and paper change places; the colours of the devices stay.
DARK = """<style>@media (prefers-color-scheme: dark) {
svg { fill: #ced6dd }
[style*="fill: #ffffff"] { fill: #14181e !important }
[style*="stroke: #ffffff"] { stroke: #14181e !important }
[style*="fill: #000000"] { fill: #ced6dd !important }
[style*="stroke: #000000"] { stroke: #ced6dd !important }
}</style></svg>"""
UNUSED = [
    "scripts/fontawesome.js",
    "vendor",
    "webpack-macros.html",
    "searchtools.js",
    "language_data.js",
]
MISSING = """<h1>There is no page here</h1>
<p>The address may be old or mistyped. <a href="{0}book/index.html">The first page</a>
has a map of all chapters. <a href="{0}search.html">The search</a> knows every page, and
finds an error message that you paste from a terminal.</p>"""
CALLOUTS = {"Predict.", "Pitfall.", "Takeaway."}
EXERCISE = re.compile(r"exercise-\d")
OPENS = re.compile(r"Open in (Colab|Kaggle)$")
FOLDS = {
    "check": "check",
    "solution": "answer",
    "shared-setup": "setup",
    "hide-output": "table",
}
to_mathml = LatexToMathML().convert_with_local_state


def read_again(app, env, added, changed, removed):
    """Make the state of the build anew when any page has changed."""
    app.something_read = bool(added | changed | removed)
    known = "book/status" in env.all_docs
    return ["book/status"] if known and app.something_read else []


def write_again(app, env):
    """Write all pages if one was read again: the others may name its headings."""
    return sorted(env.found_docs) if app.something_read else []


def inline_formula(translator, node):
    translator.body.append(to_mathml(node.astext(), displaystyle=False))
    raise nodes.SkipNode


def displayed_formula(translator, node):
    formula = to_mathml(node.astext(), displaystyle=True)
    translator.body.append(f'<div class="formula" tabindex="0">{formula}</div>')
    raise nodes.SkipNode


def mark_callouts(app, doctree):
    """Give the box or paragraph that a label of CALLOUTS starts the label's class."""
    for strong in doctree.findall(nodes.strong):
        paragraph = strong.parent
        label = strong.astext()
        if label in CALLOUTS and paragraph.astext().startswith(label):
            quoted = isinstance(paragraph.parent, nodes.block_quote)
            box = paragraph.parent if quoted else paragraph
            box["classes"] += ["callout", label.rstrip(".").lower()]


def name_folds(app, doctree):
    """Let each fold say what it opens and where, and once it is open, what it hides."""
    times = Counter()
    for cell in doctree.findall(nodes.container):
        if "hide_mode" in cell:
            section = cell.parent
            while not isinstance(section, nodes.section):
                section = section.parent
            what, where = content(cell), section[0].astext()
            what += "" if where.lower() == what else f": {where}"
            times[what] += 1
            what += f", {times[what]}" if times[what] > 1 else ""
            cell["prompt_show"] = f"Show the {what}"
            cell["prompt_hide"] = f"Hide the {what}"


def say_where_exercises_run(app, doctree):
    """Put a chapter's links to Colab and Kaggle under the heading of each exercise."""
    references = doctree.findall(nodes.reference)
    links = [link for link in references if OPENS.match(link.astext())]
    for section in doctree.findall(nodes.section):
        if EXERCISE.match(section["ids"][0]) and links:
            where = nodes.paragraph("", "This page runs nothing. ", classes=["where"])
            for before, link in zip(["", " · "], links):
                where += [nodes.Text(before), link.deepcopy()]
            section.insert(1, where)


def let_outputs_run(app, doctree):
    """Mark printed text without columns or indents: it may wrap and loses nothing."""
    for output in doctree.findall(nodes.literal_block):
        if {"output", "stream"} <= set(output["classes"]):
            if not re.search(r"^ |  |[│─]", output.astext(), re.MULTILINE):
                output["classes"].append("running")


def content(cell):
    """What a folded cell holds, by its tags and by what came out of it."""
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


def call_folds_by_their_text(app, pagename, templatename, context, doctree):
    """Drop the label that MyST-NB gives every fold, which is not what one reads."""
    label = ' aria-label="Toggle hidden content"'
    if "body" in context:
        context["body"] = context["body"].replace(f"<summary{label}>", "<summary>")


def describe_build(app, config):
    """Say what made the site, and give each part of it its address."""
    base = urlsplit(config.html_baseurl).path
    config.notfound_urls_prefix = base
    config.notfound_context = {"title": "Page not found", "body": MISSING.format(base)}
    config.ogp_site_url = config.html_baseurl
    jax, today = version("jax"), f"{datetime.date.today():%-d %B %Y}"
    app.passed = versions.passed_on(record.read("versions"))
    config.html_theme_options["extra_footer"] = (
        f"Version {config.version}, built with JAX {jax} on {today}."
    )
    config.myst_substitutions["pdf"] = (
        f"[one PDF]({config.html_baseurl}parallel-jax.pdf)"
        f" and [one EPUB]({config.html_baseurl}parallel-jax.epub)"
    )
    config.myst_substitutions["build"] = (
        f"{len(app.passed)} chapters, executed and checked with JAX {jax}"
    )


def passes(page, passed):
    """The sentence that the records of today's text support: of a chapter, on which
    versions of JAX it passes; of any other page, on which all chapters do."""
    chapter = passed.get(page.removeprefix("notebooks/"))
    found = set.intersection(*passed.values()) if chapter is None else chapter
    if not found:
        return ""
    *most, last = sorted(found, key=Version)
    listed = f"{', '.join(most)} and {last}" if most else last
    subject = "Every chapter" if chapter is None else "This chapter"
    return f" {subject} passes on JAX {listed}."


def say_what_passes(app, pagename, templatename, context, doctree):
    """Let a page's footer claim what the records of the present text say."""
    if "theme_extra_footer" in context:  # an EPUB has none
        context["theme_extra_footer"] += passes(pagename, app.passed)


def carry_outputs(app, error):
    """Put the results into the notebooks that the site offers for download."""
    if error or app.builder.format != "html":
        return
    cache = get_cache(app.env.mystnb_config.execution_cache_path)
    for path in Path(app.outdir, "_sources").rglob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        try:
            _, notebook = cache.merge_match_into_notebook(notebook)
        except KeyError:
            continue  # each build runs this page
        nbformat.write(notebook, path)


def let_drawings_scroll(app, pagename, templatename, context, doctree):
    """Put each drawing into a box that a phone can scroll, by touch or by keyboard."""
    box = (
        r'<div class="drawing" role="group" aria-label="Drawing" tabindex="0">\1</div>'
    )
    if pagename.startswith("notebooks/"):
        context["body"] = re.sub(
            r'(<img alt="[^"]*" src="[./]*_images/[^>]*>)', box, context["body"]
        )


def write_code_plainly(app, pagename, templatename, context, doctree):
    """Leave names, brackets and spaces of code without tags: they have no colour."""
    if "body" in context:
        context["body"] = re.sub(
            r'<span class="[npw]">([^<]*)</span>', r"\1", context["body"]
        )


def let_names_break(app, pagename, templatename, context, doctree):
    """Let a name in a sentence break after an underscore, a point or a slash, not in a
    word."""

    def breaks(part):
        return part[1] + re.sub(r"(?<=\w)([_./])(?=\w)", r"\1<wbr>", part[2]) + part[3]

    if "body" in context:
        name = r'(<span class="pre">)([^<]*)(</span>)'
        context["body"] = re.sub(name, breaks, context["body"])


def publish_lightly(app, error):
    if error or app.builder.format != "html":
        return
    out = Path(app.outdir)
    for name in UNUSED:
        path = out / "_static" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for path in out.glob("_static/**/*.map"):
        path.unlink()
    for path in out.glob("_images/*.svg"):
        svg = path.read_text()
        if "prefers-color-scheme" not in svg:
            path.write_text(DARK.join(slim(svg).rsplit("</svg>", 1)))


def round_places(tag):
    """Cut the numbers of a tag to a hundredth of a point; texts are between tags."""
    return re.sub(r"(\.\d\d)\d+", r"\1", tag[0])


def slim(svg):
    """Drop what a drawing by Matplotlib says twice, to a millionth of a point, or in a
    group of its own, and what a browser assumes anyway."""
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r"('DejaVu Sans(?: Mono)?'), [^;\"]*?((sans-serif|monospace)\b)", r"\1, \2", svg
    )
    svg = re.sub(r"<[^>]*>", round_places, svg)
    svg = re.sub(r"\s*\n\s*", "\n", svg)
    svg = re.sub(r'<g id="[A-Za-z.]+\d?[A-Za-z]*_\d+">', "<g>", svg)
    alone = r"<(?:path|use)\b[^>]*/>|<text\b[^>]*>[^<]*</text>"
    svg = re.sub(rf"<g>\n({alone})\n</g>", r"\1", svg)
    return svg.replace("; stroke-linejoin: miter", "")


def setup(app):
    app.add_html_math_renderer(
        "mathml", (inline_formula, None), (displayed_formula, None)
    )
    app.connect("config-inited", describe_build)
    app.connect("env-get-outdated", read_again)
    app.connect("env-updated", write_again)
    app.connect("doctree-read", mark_callouts)
    app.connect("doctree-read", name_folds)
    app.connect("doctree-read", say_where_exercises_run)
    app.connect("doctree-read", let_outputs_run)
    app.connect("html-page-context", call_folds_by_their_text)
    app.connect("html-page-context", let_drawings_scroll)
    app.connect("html-page-context", write_code_plainly)
    app.connect("html-page-context", let_names_break)
    app.connect("html-page-context", say_what_passes)
    app.connect("build-finished", carry_outputs)
    app.connect("build-finished", publish_lightly)
    return {"parallel_read_safe": True, "env_version": 5}
