"""Print the built site as one PDF, in the order of _toc.yml: run by `nox -s pdf`.

Headless Chromium prints each page. Links between pages become links inside the file;
parts and chapters become its outline.
"""

import io

from pair import ROOT
from playwright.sync_api import Browser, sync_playwright
from published import SITE, chromium, contents, published
from pypdf import PdfReader, PdfWriter
from pypdf.annotations import Link
from pypdf.generic import Fit

FOOTER = """<div style="font: 8px sans-serif; color: #555; width: 100%; margin: 0 18mm;
display: flex; justify-content: space-between"><span class="title"></span><span>
<span class="pageNumber"></span> / <span class="totalPages"></span></span></div>"""

UNFOLD = """for (const solution of document.querySelectorAll(".tag_solution details"))
  solution.open = true"""


def print_book(address: str, browser: Browser, pages: list) -> PdfWriter:
    """Print pages, given as (part, name), of the site at address into one PDF."""
    book, first_pages, part, parent = PdfWriter(), {}, "", None
    page = browser.new_page(color_scheme="light", reduced_motion="reduce")
    for caption, name in pages:
        page.goto(f"{address}{name}.html", wait_until="networkidle")
        page.evaluate(UNFOLD)
        title = page.locator("article h1").first.inner_text().rstrip("#")
        printed = page.pdf(
            format="A4",
            print_background=True,
            display_header_footer=True,
            header_template="<span></span>",
            footer_template=FOOTER,
            margin={"top": "16mm", "bottom": "18mm", "left": "18mm", "right": "18mm"},
        )
        first = first_pages[page.url] = len(book.pages)
        book.append(PdfReader(io.BytesIO(printed)), import_outline=False)
        if caption != part:
            part = caption
            parent = book.add_outline_item(title=part, page_number=first)
        book.add_outline_item(title=title, page_number=first, parent=parent)
    make_links_internal(book, first_pages)
    book.add_metadata({"/Title": "Parallel JAX", "/Author": "The Parallel JAX authors"})
    return book


def make_links_internal(book: PdfWriter, first_pages: dict[str, int]) -> None:
    """Replace links to pages of the site by links to their first page in the file."""
    for index, page in enumerate(book.pages):
        internal = {}
        for reference in page.get("/Annots") or []:
            annotation = reference.get_object()
            target = annotation.get("/A", {}).get("/URI", "").split("#")[0]
            if target in first_pages:
                internal[reference] = annotation["/Rect"], first_pages[target]
        for reference, (rect, goal) in internal.items():
            page["/Annots"].remove(reference)
            link = Link(rect=rect, target_page_index=goal, fit=Fit.fit_horizontally())
            book.add_annotation(index, link)


if __name__ == "__main__":
    with published() as address, sync_playwright() as playwright:
        book = print_book(address, chromium(playwright), contents())
    book.compress_identical_objects()
    path = SITE / "parallel-jax.pdf"
    book.write(path)
    size = path.stat().st_size / 1e6
    print(f"{path.relative_to(ROOT)}: {len(book.pages)} pages, {size:.1f} MB")
