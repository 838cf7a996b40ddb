"""Make each page light and whole: it needs no other host, and to be read no script.

A Sphinx extension. Formulas become MathML, which browsers draw by themselves. Figures
follow the reader's choice of light or dark. Callouts get a class that book.css knows,
and folds say what they hold. Printed sentences may wrap. What no page asks for is not
published.
"""

import datetime
import json
import re
import shutil
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

from docutils import nodes
from math_core import LatexToMathML
from packaging.version import Version

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
FOLDS = {
    "check": "check",
    "solution": "answer",
    "shared-setup": "setup",
    "hide-output": "table",
}
to_mathml = LatexToMathML().convert_with_local_state


def newest(path):
    """When a file, or what lies in a folder, was last written, in microseconds; but
    for pages, which Sphinx looks after, and what Python compiles for itself."""
    files = [path, *path.rglob("*")]
    ours = [f for f in files if f.suffix != ".md" and "__pycache__" not in str(f)]
    return max(file.stat().st_mtime_ns for file in ours) // 1000


def read_again(app, env, added, changed, removed):
    """Make the state of the build anew when anything of the site has changed."""
    parts = [Path(app.srcdir, part) for part in ("_config.yml", "book", "launch")]
    made = env.all_docs.get("book/status", 0)
    app.site_changed = max(newest(part) for part in parts) > made
    something_changed = added | changed | removed or app.site_changed
    return ["book/status"] if something_changed and made else []


def write_again(app, env):
    """Write all pages when the site has changed or a heading, which other pages may
    name; and leave none whose source is gone."""
    headings = {name: contents.astext() for name, contents in env.tocs.items()}
    app.site_changed |= headings != getattr(env, "headings", None)
    env.headings = headings
    if app.site_changed and app.builder.format == "html":
        for path in Path(app.outdir).rglob("*.html"):
            path.unlink()
        return sorted(env.found_docs)
    return []


def keep_map(app, error):
    """Leave the map of the site as it is if only some pages have been written."""
    if error or app.site_changed or not Path(app.outdir, "sitemap.xml").exists():
        return
    while not app.sitemap_links.empty():
        app.sitemap_links.get()


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
    """Let each fold say what it opens, and once it is open, what it hides."""
    for cell in doctree.findall(nodes.container):
        if "hide_mode" in cell:
            what = content(cell)
            cell["prompt_show"] = f"Show the {what}"
            cell["prompt_hide"] = f"Hide the {what}"


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


def where_all_pass(app):
    """The versions of JAX in book/measured/legs.json on which every chapter passed."""
    chapters = {path.stem for path in Path(app.srcdir).glob("notebooks/*.md")}
    legs = json.loads(Path(app.srcdir, "book/measured/legs.json").read_text())
    passed = set()
    for leg in legs.values():
        good = {name for name, took in leg["chapters"].items() if took != "failed"}
        if good >= chapters:
            passed.add(leg["jax"])
    return sorted(passed, key=Version)


def describe_build(app, config):
    """Say on every page what made it, and give each part of the site its address."""
    base = urlsplit(config.html_baseurl).path
    config.notfound_urls_prefix = base
    config.notfound_context = {"title": "Page not found", "body": MISSING.format(base)}
    config.ogp_site_url = config.html_baseurl
    jax, today = version("jax"), f"{datetime.date.today():%-d %B %Y}"
    chapters = len(list(Path(app.srcdir).glob("notebooks/*.md")))
    footer = f"Version {config.version}, built with JAX {jax} on {today}."
    if passed := where_all_pass(app):
        listed = " and ".join(", ".join(passed).rsplit(", ", 1))
        footer += f" Every chapter passes on JAX {listed}."
    config.html_theme_options["extra_footer"] = footer
    config.myst_substitutions["pdf"] = (
        f"[one PDF]({config.html_baseurl}parallel-jax.pdf)"
    )
    config.myst_substitutions["build"] = (
        f"{chapters} chapters, executed and checked with JAX {jax}"
    )


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
    app.connect("doctree-read", let_outputs_run)
    app.connect("html-page-context", call_folds_by_their_text)
    app.connect("html-page-context", let_drawings_scroll)
    app.connect("html-page-context", write_code_plainly)
    app.connect("build-finished", keep_map, priority=400)  # before it is drawn
    app.connect("build-finished", publish_lightly)
    return {"parallel_read_safe": True, "env_version": 4}
