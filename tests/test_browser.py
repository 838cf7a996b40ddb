"""The built site as readers meet it, in a browser: run by `nox -s site`.

What is marked `chromium` is not asked of Firefox, for the reason beside it.
"""

import io
from collections.abc import Iterator

import pytest
from conftest import MODES
from pair import ROOT
from playwright.sync_api import Page, expect
from published import SITE, Firefox
from pypdf import PdfReader

ERRORS = "book/errors.html"
COLLECTIVES = "notebooks/05_collectives.html"
FEW = [
    "book/index.html",
    ERRORS,
    "search.html",
    COLLECTIVES,
    "notebooks/21_memory.html",
]
TOOLS = [f"book/{name}.html" for name in ("explorer", "layouts", "calculator")]
PAGES = sorted(
    str(path.relative_to(SITE))
    for folder in ("book", "notebooks", ".")
    for path in (SITE / folder).glob("*.html")
    if path != SITE / "index.html"  # it leads to book/index.html
)
CHAPTERS = sorted(f"notebooks/{path.stem}.html" for path in ROOT.glob("notebooks/*.md"))
STAND_INS = """[...document.fonts].filter(face => face.family.includes('for '))
  .every(face => face.status == 'loaded')"""
ROOM = """boxes => boxes
  .filter(box => box.checkVisibility() && !box.closest('.running'))
  .map(box => {
    const line = box.appendChild(document.createElement('span'));
    line.textContent = 'x'.repeat(100);
    const { paddingLeft, paddingRight } = getComputedStyle(box);
    const room = box.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
    return 100 * room / line.getBoundingClientRect().width;
  })"""
HIDDEN = """parts => parts
  .filter(part => !part.closest('details') &&
    !part.checkVisibility({opacityProperty: true, visibilityProperty: true}))
  .map(part => part.outerHTML.slice(0, 100))"""


def of_each(names: list[str]) -> pytest.MarkDecorator:
    """Ask a test of each of these pages, and mark what is not asked of the few."""
    rest = {name for name in names if name not in FEW + TOOLS}
    marks = {name: [pytest.mark.rest] if name in rest else [] for name in names}
    names = [pytest.param(name, marks=marks[name]) for name in names]
    return pytest.mark.parametrize("name", names)


def too_heavy(page: Page) -> Iterator[str]:
    """At most 800 kB of shared files, and 600 kB of a page's own.

    The search page alone may have 800 kB of its own, since it reads the whole book.
    """
    own = 800 if page.url.endswith("/search.html") else 600
    page.mouse.wheel(0, 10**6)
    page.wait_for_load_state("networkidle")
    files = {address.partition("?")[0] for address in page.asked}
    shared = {name for name in files if name.startswith("_static/")}
    for what, names, most in [("shared", shared, 800), ("own", files - shared, own)]:
        kilobytes = sum((SITE / name).stat().st_size for name in names) / 1000
        if not 1 < kilobytes <= most:
            yield f"{kilobytes:.0f} kB of {what} files, at most {most}: {sorted(names)}"


def misnamed_folds(page: Page) -> Iterator[str]:
    """What a fold is called is what one reads on it; leaves them all open."""
    folds = page.locator("article details.hide > summary")
    closed = folds.all_inner_texts()
    folds.evaluate_all("folds => folds.forEach(fold => fold.click())")
    for before, after in zip(closed, folds.all_inner_texts(), strict=True):
        if (before[:5], after) != ("Show ", before.replace("Show ", "Hide ", 1)):
            yield f"a fold is called {before!r}, and once it is open {after!r}"


@of_each(PAGES)
def test_page_is_sound(browser, quiet_page, wrong_with, name):
    """No error, no other host, no weight, no sideways scrolling, no known barrier."""
    page = quiet_page(name, reduced_motion="reduce")
    reports_all = not isinstance(browser, Firefox)  # the end of every request
    wrong = [*too_heavy(page)] if reports_all else []
    if name in CHAPTERS:
        assert page.locator("article details.hide").count(), "it folds its setup away"
    wrong += [*misnamed_folds(page), *wrong_with(page)]
    assert not wrong, "\n".join(wrong)


@of_each(CHAPTERS + TOOLS)
def test_page_reads_without_scripts(browser, site, name):
    """Text, formulas, code and figures are there before any script has run."""
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(site + name)
        kinds = "h1, h2, p, math, .cell_input pre, .cell_output img"
        parts = page.locator(f"article :is({kinds}):not(#explorer *)")
        assert parts.count() > 10
        hidden = parts.evaluate_all(HIDDEN)
        told = page.get_by_text("needs JavaScript, which is off here")
        assert told.is_visible() if name in TOOLS else not told.count()
    assert not hidden, hidden


@pytest.mark.parametrize("name", [CHAPTERS[8], ERRORS])
def test_a_full_line_of_code_fits(quiet_page, name):
    """88 columns beside both sidebars, in an output and in an exercise too."""
    page = quiet_page(name)
    page.wait_for_function("document.fonts.status == 'loaded'")
    columns = page.locator("article .cell pre").evaluate_all(ROOM)
    assert len(columns) > 10 and min(columns) >= 88, columns


def test_messages_wrap_on_a_phone(quiet_page):
    page = quiet_page(ERRORS, viewport={"width": 360, "height": 740})
    boxes = page.locator(".cell_output pre:text-matches('^[A-Za-z.]*Error: ')")
    assert boxes.count() > 10
    wide = "boxes => boxes.filter(box => box.scrollWidth > box.clientWidth).length"
    assert boxes.evaluate_all(wide) == 0


@pytest.mark.chromium  # which adds up what moves
@pytest.mark.parametrize("mode", ["light", "phone"])
@pytest.mark.parametrize("name", ["book/index.html", CHAPTERS[4], ERRORS])
def test_nothing_moves_when_the_typefaces_arrive(browser, site, name, mode):
    width, height = MODES[mode]
    with browser.new_context(viewport={"width": width, "height": height}) as context:
        page = context.new_page()
        held = []
        page.route("**/*.woff2", lambda route: held.append(route))
        page.add_init_script(
            """window.moved = 0;
            new PerformanceObserver(list => list.getEntries().forEach(
              shift => { window.moved += shift.value }
            )).observe({type: 'layout-shift', buffered: true})"""
        )
        page.goto(site + name, wait_until="domcontentloaded")
        page.wait_for_function("performance.getEntriesByType('paint').length")
        page.wait_for_timeout(500)  # what stands in for them has been drawn
        assert page.evaluate(STAND_INS)
        for route in held:
            route.continue_()
        page.wait_for_function("document.fonts.status == 'loaded'")
        page.wait_for_timeout(500)
        faces = (
            "[...document.fonts].filter(f => f.status == 'loaded').map(f => f.family)"
        )
        assert {"Literata", "Inter", "Iosevka"} <= set(page.evaluate(faces))
        assert page.evaluate("window.moved") < 0.02


@pytest.mark.parametrize("width, height", [(1280, 800), (360, 740)])
def test_landing_page_begins_with_its_figure_and_buttons(quiet_page, width, height):
    page = quiet_page("book/index.html", viewport={"width": width, "height": height})
    for part in page.locator(".hero img, .start-here a").all():
        box = part.bounding_box()
        assert box["y"] > 0 and box["y"] + box["height"] <= height, box


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_first_paint_is_light_or_dark_already(browser, site, scheme):
    with browser.new_context(color_scheme=scheme) as context:
        page = context.new_page()
        page.route("**/*.js*", lambda route: route.abort())  # the theme comes later
        page.goto(site + "book/index.html")
        assert page.get_attribute("html", "data-theme") == scheme


@pytest.mark.parametrize("name", [CHAPTERS[0], CHAPTERS[-1], "book/glossary.html"])
def test_sidebar_shows_the_search_and_where_one_is(quiet_page, name):
    page = quiet_page(name)
    entry = page.locator(".bd-sidebar-primary [aria-current=page]")
    for part in (entry, page.locator(".bd-sidebar-primary .search-button-field")):
        expect(part).to_be_in_viewport(ratio=0.9)
    page.click("a.left-prev")
    expect(entry).to_be_in_viewport(ratio=0.9)


def test_keys_turn_pages_and_ask(quiet_page):
    page = quiet_page(CHAPTERS[8])
    page.keyboard.press("ArrowRight")
    page.wait_for_url(f"**/{CHAPTERS[9]}")
    page.keyboard.press("ArrowLeft")
    page.wait_for_url(f"**/{CHAPTERS[8]}")
    page.locator("article .drawing").first.focus()
    page.keyboard.press("ArrowRight")  # it scrolls the box
    page.keyboard.press("Tab")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("/")
    expect(page.locator("dialog[open] input[type=search]")).to_be_focused()
    assert page.url.endswith(CHAPTERS[8])


def test_next_follows_the_chosen_path_and_what_was_read_has_a_mark(quiet_page):
    page = quiet_page("book/index.html")
    follow = page.locator("th", has_text="From NumPy").get_by_role("button")
    follow.click()
    expect(follow).to_have_attribute("aria-pressed", "true")
    ways = page.locator(".map-of-paths tbody tr").evaluate_all(
        """rows => rows.filter(row => row.cells[0].innerText.trim())
        .map(row => row.querySelector('a').href)"""
    )
    gap = next(i for i, way in enumerate(ways) if int(way.split("/")[-1][:2]) != i + 1)
    page.goto(ways[gap - 1])
    onward = page.locator("a.right-next")
    expect(onward).to_contain_text("next on the path “From NumPy”")
    page.locator("section#recap").scroll_into_view_if_needed()
    page.wait_for_function("localStorage.getItem('read')")
    onward.click()
    page.wait_for_url(ways[gap])
    expect(page.locator(".bd-sidebar-primary a.read")).to_have_count(1)


def test_copy_button_copies_the_code_alone(quiet_page):
    page = quiet_page("notebooks/04_pmap.html")
    assert page.locator(".cell_output .copybtn").count() == 0
    open_cells = page.locator(".cell:not(:has(details)) .cell_input")
    cell = open_cells.filter(has=page.locator(".copybtn")).nth(3)
    cell.hover()
    cell.locator(".copybtn").click()
    page.evaluate("document.body.prepend(document.createElement('textarea'))")
    page.press("textarea", "Control+V")
    copied = page.input_value("textarea")
    assert copied.strip() == cell.locator("pre").inner_text().strip()


def test_missing_page_helps(browser, site):
    with browser.new_context() as context:
        page = context.new_page()
        assert page.goto(site + "no/such/page.html").status == 404
        assert "no page" in page.inner_text("article h1")
        page.click("article a")
        assert page.title().startswith("Parallel JAX")


def test_print_opens_solutions_and_drops_navigation(quiet_page):
    page = quiet_page(COLLECTIVES)
    sheets = PdfReader(io.BytesIO(page.pdf())).pages
    printed = "".join("".join(sheet.extract_text() for sheet in sheets).split())
    solutions = page.locator(".tag_solution pre").all_text_contents()
    assert solutions
    for solution in solutions:
        assert "".join(solution.splitlines()[0].split()) in printed
    for link in page.locator(".bd-sidebar-primary .caption-text").all():
        assert "".join(link.text_content().split()) not in printed


@pytest.mark.chromium  # which prints as most readers do
def test_the_book_on_two_pages_has_two_and_programs_of_twelve_lines(quiet_page):
    page = quiet_page("book/cheatsheet.html")
    assert len(PdfReader(io.BytesIO(page.pdf(format="A4"))).pages) == 2
    programs = page.locator(".cell:not(:has(details)) .cell_input pre")
    for program in programs.all_inner_texts()[1:]:  # after what all start from
        assert len([line for line in program.splitlines() if line.strip()]) <= 12


@pytest.mark.parametrize(
    "name, drawing", [(COLLECTIVES, ".ring"), ("notebooks/09_shardings.html", ".swap")]
)
def test_motion_stops_for_those_who_ask(quiet_page, name, drawing):
    moving = "document.getAnimations().filter(a => a.playState == 'running').length"

    def count_moving(**options):
        page = quiet_page(name, **options)
        page.hover(drawing)  # what has come to its end plays again
        return page.evaluate(moving)

    assert count_moving() > 0
    assert count_moving(reduced_motion="reduce") == 0


@pytest.mark.chromium  # which `nox -s pdf` prints with
def test_pages_print_into_one_file(browser, site):
    import pdf

    pages = [("", "book/index"), ("Start", "book/running"), ("Start", "book/glossary")]
    book = pdf.print_book(site, browser, pages)
    first, start, below = book.outline
    assert [first.title, start.title] == ["Parallel JAX", "Start"]
    assert [entry.title for entry in below] == ["Run the book", "Glossary"]
    running = book.pages[book.get_destination_page_number(below[0])].indirect_reference
    notes = [note.get_object() for note in book.pages[0]["/Annots"]]
    assert any(note.get("/Dest", [None])[0] == running for note in notes)
