"""Test the built site in Chromium, and its main functions in Firefox: `nox -s site`."""

import io
import re
from collections.abc import Iterator

import pytest
from pair import ROOT, listed
from playwright.sync_api import Page, expect
from published import SITE
from pypdf import PdfReader

from conftest import PHONE, WINDOW

INDEX = "book/index.html"
ERRORS = "book/errors.html"
COLLECTIVES = "notebooks/05_collectives.html"
SHARDINGS = "notebooks/09_shardings.html"
MEMORY = "notebooks/21_memory.html"
TOOLS = [f"book/{name}.html" for name in ("explorer", "calculator")]
UNUSUAL = [INDEX, ERRORS, "search.html", COLLECTIVES, MEMORY, *TOOLS]
CHAPTERS = sorted(f"notebooks/{path.stem}.html" for path in ROOT.glob("notebooks/*.md"))
PAGES = sorted(
    str(path.relative_to(SITE))
    for folder in ("book", "notebooks", ".")
    for path in (SITE / folder).glob("*.html")
    if 'http-equiv="refresh"' not in path.read_text().lower()
)
MOVING = [(COLLECTIVES, ".ring"), (SHARDINGS, ".swap")]
STATUS = (ROOT / "book/status.md").read_text()
SHARED, OWN = map(int, re.findall(r"(\d+) kB", STATUS))
SIZES = """performance.getEntries().filter(file => file.decodedBodySize)
  .map(file => [file.name, file.decodedBodySize])"""
FONTS_ARE_LOADED = "document.fonts.status == 'loaded'"
OPEN = "folds => folds.forEach(fold => { fold.open = true })"
HIDDEN = """parts => parts
  .filter(part => !part.closest('details') &&
    !part.checkVisibility({opacityProperty: true, visibilityProperty: true}))
  .map(part => part.outerHTML.slice(0, 100))"""
COLUMNS = """boxes => boxes
  .filter(box => box.checkVisibility() && !box.closest('.running'))
  .map(box => {
    const line = box.appendChild(document.createElement('span'));
    line.textContent = 'x'.repeat(100);
    const { paddingLeft, paddingRight } = getComputedStyle(box);
    const room = box.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
    return 100 * room / line.getBoundingClientRect().width;
  })"""
DOTS = """links => links
  .map(link => [link, getComputedStyle(link, '::before')])
  .filter(([, dot]) => dot.content != 'none' && parseFloat(dot.borderTopWidth) > 2)
  .map(([link, dot]) => link.getBoundingClientRect().x + parseFloat(dot.left))"""

in_firefox = pytest.mark.parametrize("browser", ["firefox"], indirect=True)
in_both = pytest.mark.parametrize("browser", ["chromium", "firefox"], indirect=True)


def too_heavy(page: Page) -> Iterator[str]:
    """Yield messages if a page has more bytes than the limits in book/status.md."""
    page.wait_for_function(FONTS_ARE_LOADED)
    sizes = dict(page.evaluate(SIZES))
    shared = sum(size for name, size in sizes.items() if "/_static/" in name)
    own = sum(sizes.values()) - shared
    for kind, size, limit in [("shared", shared, SHARED), ("own", own, OWN)]:
        if not 1 < size / 1000 <= limit:
            yield f"{size} bytes of {kind} files, limit {limit} kB: {sizes}"


@pytest.mark.parametrize("name", PAGES)
def test_page_is_sound(quiet_page, find_problems, name):
    """No error, other host, excess bytes, horizontal scrolling or violation of axe."""
    page = quiet_page(name, reduced_motion="reduce")
    page.locator("article details").evaluate_all(OPEN)
    problems = [*too_heavy(page), *find_problems(page, axe_on_phone=name in UNUSUAL)]
    assert not problems, "\n".join(problems)


@in_firefox
@pytest.mark.parametrize("name", PAGES)
def test_page_opens(quiet_page, name):
    page = quiet_page(name)
    expect(page.locator("article h1")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= WINDOW["width"]


@pytest.mark.parametrize("name", CHAPTERS + TOOLS)
def test_page_reads_without_scripts(quiet_page, name):
    """Text, formulas, code and figures are visible without any script."""
    page = quiet_page(name, java_script_enabled=False)
    kinds = "h1, h2, p, math, .cell_input pre, .cell_output img"
    parts = page.locator(f"article :is({kinds}):not(#explorer *)")
    assert parts.count() > 10
    assert parts.evaluate_all(HIDDEN) == []
    notice = page.get_by_text("needs JavaScript, which is turned off")
    assert notice.is_visible() if name in TOOLS else not notice.count()


@pytest.mark.parametrize("name", [SHARDINGS, ERRORS])
def test_a_full_line_of_code_fits(quiet_page, name):
    """88 columns fit between the sidebars, also in outputs and exercises."""
    page = quiet_page(name)
    page.wait_for_function(FONTS_ARE_LOADED)
    columns = page.locator("article .cell pre").evaluate_all(COLUMNS)
    assert len(columns) > 10 and min(columns) >= 88, columns


def test_messages_wrap_on_a_phone(quiet_page):
    page = quiet_page(ERRORS, viewport=PHONE)
    boxes = page.locator(".cell_output pre:text-matches('^[A-Za-z.]*Error: ')")
    assert boxes.count() > 10
    wide = "boxes => boxes.filter(box => box.scrollWidth > box.clientWidth).length"
    assert boxes.evaluate_all(wide) == 0


@pytest.mark.parametrize("width, height", [(1280, 800), (360, 740)])
def test_landing_page_begins_with_its_figure_and_buttons(quiet_page, width, height):
    page = quiet_page(INDEX, viewport={"width": width, "height": height})
    for part in page.locator(".hero img, .start-here a").all():
        box = part.bounding_box()
        assert box["y"] > 0 and box["y"] + box["height"] <= height, box


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_first_paint_has_the_preferred_theme(browser, site, scheme):
    with browser.new_page(color_scheme=scheme) as page:
        page.route("**/*.js*", lambda route: route.abort())  # the theme's script
        page.goto(site + INDEX)
        assert page.get_attribute("html", "data-theme") == scheme


@in_both
@pytest.mark.parametrize("name", [CHAPTERS[0], CHAPTERS[-1], "book/glossary.html"])
def test_sidebar_shows_the_search_and_the_current_page(quiet_page, name):
    page = quiet_page(name)
    entry = page.locator(".bd-sidebar-primary [aria-current=page]")
    for part in (entry, page.locator(".bd-sidebar-primary .search-button-field")):
        expect(part).to_be_in_viewport(ratio=0.9)
    page.click("a.left-prev")
    expect(entry).to_be_in_viewport(ratio=0.9)


@pytest.mark.parametrize("size", [WINDOW, PHONE], ids=["window", "phone"])
def test_sidebar_marks_the_course(quiet_page, size):
    """Each chapter of the course has a dot, in sight, and a title for tooltips."""
    page = quiet_page(CHAPTERS[0], viewport=size)
    if size == PHONE:
        page.locator("button.primary-toggle:visible").first.click()
    sidebar = page.locator(".bd-sidebar-primary")
    expect(sidebar.get_by_text("In the course", exact=True)).to_be_in_viewport()
    marked = sidebar.get_by_title("In the course").all_text_contents()
    course = [int(path.stem[:2]) for path in listed(ROOT, "course")]
    assert [int(text.split(".")[0]) for text in marked] == course
    dots = sidebar.locator(".bd-links a").evaluate_all(DOTS)
    assert len(dots) == len(course) and min(dots) >= 0


@in_both
def test_keys_turn_pages_and_search(quiet_page):
    page = quiet_page(CHAPTERS[8])
    page.keyboard.press("ArrowRight")
    page.wait_for_url(f"**/{CHAPTERS[9]}")
    page.keyboard.press("ArrowLeft")
    page.wait_for_url(f"**/{CHAPTERS[8]}")
    page.locator("article .drawing").first.focus()
    page.keyboard.press("ArrowRight")  # scrolls the box
    page.keyboard.press("Tab")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("/")
    expect(page.locator("dialog[open] input[type=search]")).to_be_focused()
    assert page.url.endswith(CHAPTERS[8])
    page.keyboard.type("unbound axis name")
    page.keyboard.press("Enter")
    expect(page.locator("#search-results li a").first).to_be_visible()


def test_next_follows_the_chosen_path_and_what_was_read_has_a_mark(quiet_page):
    page = quiet_page(INDEX)
    follow = page.get_by_role("button", name="The course")
    follow.click()
    expect(follow).to_have_attribute("aria-pressed", "true")
    ways = page.locator("#the-course li > p > a:first-of-type").evaluate_all(
        "links => links.map(link => link.href)"
    )
    gap = next(i for i, way in enumerate(ways) if int(way.split("/")[-1][:2]) != i + 1)
    page.goto(ways[gap - 1])
    onward = page.locator("a.right-next")
    expect(onward).to_contain_text("next on the path “The course”")
    page.locator("section#recap").scroll_into_view_if_needed()
    page.wait_for_function("localStorage.getItem('read')")
    onward.click()
    page.wait_for_url(ways[gap])
    expect(page.locator(".bd-sidebar-primary a.read")).to_have_count(1)


def test_copy_button_copies_only_the_code(quiet_page):
    page = quiet_page("notebooks/04_pmap.html", permissions=["clipboard-read"])
    assert page.locator(".cell_output .copybtn").count() == 0
    cell = page.locator(".cell:not(:has(details)) .cell_input").nth(3)
    cell.locator(".copybtn").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.strip() == cell.locator("pre").inner_text().strip()


def test_missing_page_links_to_the_first_page(browser, site):
    with browser.new_page() as page:
        assert page.goto(site + "no/such/page.html").status == 404
        assert page.inner_text("article h1").startswith("Page not found")
        page.click("article a")
        expect(page).to_have_title(re.compile("^Parallel JAX"))


def test_print_has_solutions_and_no_navigation(quiet_page):
    page = quiet_page(COLLECTIVES)
    sheets = PdfReader(io.BytesIO(page.pdf())).pages
    printed = "".join("".join(sheet.extract_text() for sheet in sheets).split())
    solutions = page.locator(".tag_solution pre").all_text_contents()
    assert solutions
    for solution in solutions:
        assert "".join(solution.splitlines()[0].split()) in printed
    for link in page.locator(".bd-sidebar-primary .caption-text").all():
        assert "".join(link.text_content().split()) not in printed


def test_cheatsheet_has_two_pages_and_programs_of_twelve_lines(quiet_page):
    page = quiet_page("book/cheatsheet.html")
    assert len(PdfReader(io.BytesIO(page.pdf(format="A4"))).pages) == 2
    programs = page.locator(".cell:not(:has(details)) .cell_input pre")
    for program in programs.all_inner_texts()[1:]:  # the first prepares the others
        assert len([line for line in program.splitlines() if line.strip()]) <= 12


@pytest.mark.parametrize("name, drawing", MOVING)
def test_animations_respect_reduced_motion(quiet_page, name, drawing):
    moving = "document.getAnimations().filter(a => a.playState == 'running').length"
    for motion in ("no-preference", "reduce"):
        page = quiet_page(name, reduced_motion=motion)
        page.hover(drawing)  # starts a finished animation again
        assert (page.evaluate(moving) > 0) == (motion != "reduce")


def test_pages_are_printed_into_one_pdf(browser, site):
    import pdf

    pages = [("", "book/index"), ("Start", "book/running"), ("Start", "book/glossary")]
    book = pdf.print_book(site, browser, pages)
    first, start, below = book.outline
    assert [first.title, start.title] == ["Parallel JAX", "Start"]
    assert [entry.title for entry in below] == ["Run the book", "Glossary"]
    running = book.pages[book.get_destination_page_number(below[0])].indirect_reference
    notes = [note.get_object() for note in book.pages[0]["/Annots"]]
    assert any(note.get("/Dest", [None])[0] == running for note in notes)
