"""Print the built site as one PDF, in the order of _toc.yml: run by `nox -s pdf`.

Each page is printed by headless Chromium; links between pages become links inside the
file, and the parts and chapters its outline.
"""

import io

import yaml
from pair import ROOT
from playwright.sync_api import sync_playwright
from published import SITE, chromium, published
from pypdf import PdfReader, PdfWriter
from pypdf.annotations import Link
from pypdf.generic import Fit

FOOTER = """<div style="font: 8px sans-serif; color: #555; width: 100%; margin: 0 18mm;
display: flex; justify-content: space-between"><span class="title"></span><span>
<span class="pageNumber"></span> / <span class="totalPages"></span></span></div>"""

UNFOLD = """for (const solution of document.querySelectorAll(".tag_solution details"))
  solution.open = true"""


def contents() -> list[tuple[str | None, str]]:
    """The pages in reading order, as (part or None, path without its suffix)."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    pages = [(None, toc["root"])]
    for part in toc["parts"]:
        pages += [(part["caption"], page["file"]) for page in part["chapters"]]
    return pages


def print_book(address: str, browser) -> PdfWriter:
    """Print every page of the site at address, and join them."""
    book, firsts, part, parent = PdfWriter(), {}, None, None
    page = browser.new_page(color_scheme="light", reduced_motion="reduce")
    for caption, name in contents():
        page.goto(f"{address}{name}.html", wait_until="networkidle")
        page.evaluate(UNFOLD)
        title = page.locator("article h1").first.inner_text().rstrip("#")
        sheet = page.pdf(
            format="A4",
            print_background=True,
            display_header_footer=True,
            header_template="<span></span>",
            footer_template=FOOTER,
            margin=dict(top="16mm", bottom="18mm", left="18mm", right="18mm"),
        )
        first = firsts[page.url] = len(book.pages)
        book.append(PdfReader(io.BytesIO(sheet)), import_outline=False)
        if caption != part:
            part, parent = (
                caption,
                book.add_outline_item(title=caption, page_number=first),
            )
        book.add_outline_item(title=title, page_number=first, parent=parent)
    turn_links_inward(book, firsts)
    book.add_metadata({"/Title": "Parallel JAX", "/Author": "The Parallel JAX authors"})
    return book


def turn_links_inward(book: PdfWriter, firsts: dict[str, int]) -> None:
    """Let a link to a page of the site lead to that page's place in the file."""
    for number, page in enumerate(book.pages):
        kept, inward = [], []
        for reference in page.get("/Annots") or []:
            note = reference.get_object()
            target = note.get("/A", {}).get("/URI", "").split("#")[0]
            if target in firsts:
                inward.append((note["/Rect"], firsts[target]))
            else:
                kept.append(reference)
        if inward:
            page["/Annots"].clear()
            page["/Annots"].extend(kept)
        for rect, goal in inward:
            link = Link(rect=rect, target_page_index=goal, fit=Fit.fit_horizontally())
            book.add_annotation(number, link)


if __name__ == "__main__":
    with published() as address, sync_playwright() as playwright:
        book = print_book(address, chromium(playwright))
    book.compress_identical_objects()
    path = SITE / "parallel-jax.pdf"
    book.write(path)
    size = path.stat().st_size / 1e6
    print(f"{path.relative_to(ROOT)}: {len(book.pages)} pages, {size:.1f} MB")
