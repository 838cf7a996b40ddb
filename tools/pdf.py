"""Print the built site as one PDF, in the order of _toc.yml: run by `nox -s pdf`.

Each page is printed by headless Chromium; links between pages become links inside the
file, and the parts and chapters its outline.
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
    """Print these pages, each with its part, of the site at address, and join them."""
    book, firsts, part, parent = PdfWriter(), {}, "", None
    page = browser.new_page(color_scheme="light", reduced_motion="reduce")
    for caption, name in pages:
        page.goto(f"{address}{name}.html", wait_until="networkidle")
        page.evaluate(UNFOLD)
        title = page.locator("article h1").first.inner_text().rstrip("#")
        sheet = page.pdf(
            format="A4",
            print_background=True,
            display_header_footer=True,
            header_template="<span></span>",
            footer_template=FOOTER,
            margin={"top": "16mm", "bottom": "18mm", "left": "18mm", "right": "18mm"},
        )
        first = firsts[page.url] = len(book.pages)
        book.append(PdfReader(io.BytesIO(sheet)), import_outline=False)
        if caption != part:
            part = caption
            parent = book.add_outline_item(title=part, page_number=first)
        book.add_outline_item(title=title, page_number=first, parent=parent)
    turn_links_inward(book, firsts)
    book.add_metadata({"/Title": "Parallel JAX", "/Author": "The Parallel JAX authors"})
    return book


def turn_links_inward(book: PdfWriter, firsts: dict[str, int]) -> None:
    """Let a link to a page of the site lead to that page's place in the file."""
    for number, page in enumerate(book.pages):
        inward = {}
        for reference in page.get("/Annots") or []:
            note = reference.get_object()
            target = note.get("/A", {}).get("/URI", "").split("#")[0]
            if target in firsts:
                inward[reference] = note["/Rect"], firsts[target]
        for reference, (rect, goal) in inward.items():
            page["/Annots"].remove(reference)
            link = Link(rect=rect, target_page_index=goal, fit=Fit.fit_horizontally())
            book.add_annotation(number, link)


if __name__ == "__main__":
    with published() as address, sync_playwright() as playwright:
        book = print_book(address, chromium(playwright), contents())
    book.compress_identical_objects()
    path = SITE / "parallel-jax.pdf"
    book.write(path)
    size = path.stat().st_size / 1e6
    print(f"{path.relative_to(ROOT)}: {len(book.pages)} pages, {size:.1f} MB")
