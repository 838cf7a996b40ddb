"""The built site as readers meet it, in a browser: `nox -s site` and `nox -s firefox`.

What is marked `chromium` is not asked of Firefox, for the reason beside it.
"""

import io
from collections import defaultdict

import pytest
from record import record, text_digest
from pair import ROOT
from published import SITE, Firefox
from pypdf import PdfReader

PAGES = sorted(
    str(path.relative_to(SITE))
    for folder in ("book", "notebooks", ".")
    for path in (SITE / folder).glob("*.html")
    if path != SITE / "index.html"  # it leads to book/index.html
)
CHAPTERS = [name for name in PAGES if name.startswith("notebooks/")]
MODES = {
    "light": {"color_scheme": "light", "viewport": {"width": 1280, "height": 900}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1280, "height": 900}},
    "phone": {"color_scheme": "light", "viewport": {"width": 360, "height": 740}},
}
# Firefox reports what it has painted only once the typefaces are there.
PAINTED = """performance.getEntriesByType('paint').length ||
  navigator.userAgent.includes('Firefox')"""
STAND_INS = """[...document.fonts].filter(face => face.family.includes('for '))
  .every(face => face.status == 'loaded')"""
PLACES = """[...document.querySelectorAll('article :is(h1, h2, p, pre, img)')]
  .filter(element => element.checkVisibility()).slice(0, 5)
  .map(element => element.getBoundingClientRect().top)"""
ERRORS = "book/errors.html"
SEARCHES = {
    "gather scatter exchange": "notebooks/05_collectives.html",
    "ensemble": "notebooks/08_ensembles.html",
    "save and restore a checkpoint": "notebooks/15_checkpoints.html",
    "logical axis rules": "notebooks/14_logical_axes.html",
    "BatchNorm statistics": "notebooks/07_data_parallel_classifier.html",
    "ring attention": "notebooks/20_long_context.html",
    "1F1B schedule": "notebooks/18_pipelines.html",
    "ZeRO stages": "notebooks/16_fsdp.html",
    "experts capacity factor": "notebooks/19_experts.html",
    "which API should I choose": "book/which_api.html",
    "xmap": "book/porting.html",
    "ValueError: Received incompatible devices for jitted computation. Got argument a "
    "of f with shape float32[8] and device ids [0] on platform CPU": ERRORS,
    "jax.errors.ShardingTypeError: Contracting dimensions are sharded and it is "
    "ambiguous how the output should be sharded. Please specify the output sharding "
    "via the `out_sharding` parameter. Got lhs_contracting_spec=('x',)": ERRORS,
    "AttributeError: jax.device_put_replicated is deprecated; use jax.device_put "
    "instead. See https://docs.jax.dev/en/latest/migrate_pmap.html"
    "#drop-in-replacements for a drop-in replacement.": "book/old_names.html",
    "ImportError: cannot import name 'maps' from 'jax.experimental' (/usr/local/lib/"
    "python3.12/dist-packages/jax/experimental/__init__.py)": "book/old_names.html",
    "/usr/local/lib/python3.12/dist-packages/jax/_src/core.py in step\n"
    "TypeError: 'jaxlib._jax.Device' object is not callable": ERRORS,
    "ValueError: Too few leaves for PyTreeDef; expected 1, got 0": ERRORS,
    "train.py F1121 parse_flags_from_env.cc:234] Unknown flag in XLA_FLAGS: "
    "--xla_gpu_graph_level=0": ERRORS,
    'RuntimeError: Array has been deleted with shape=float32[8].\n  File "/home/me/'
    'train.py", line 42, in <module>': ERRORS,
}


@pytest.fixture(scope="module")
def measured(request, browser):
    """What the tests find, by page; `--record` writes it for the status page."""
    numbers = defaultdict(dict)
    yield numbers
    if request.config.getoption("--record"):
        for name, found in numbers.items():
            source = (ROOT / name).with_suffix(".md")
            found["text"] = text_digest(source) if source.exists() else ""
        record("site", {"browser": f"Chromium {browser.version}", "pages": numbers})


@pytest.fixture
def visit(browser, site):
    """Open a page in a mode; returns it with what it asked for and complained of."""
    contexts = []

    def open_page(name, mode="light", **options):
        context = browser.new_context(**MODES[mode] | options)
        contexts.append(context)
        page = context.new_page()
        page.complaints, page.answers = [], {}
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on(
            "console",
            lambda line: line.type == "error" and page.complaints.append(line.text),
        )

        def note(request):
            if request.url.startswith(site):
                page.answers[request.url.removeprefix(site)] = request.response()
            elif not request.url.startswith("data:"):
                page.complaints.append(f"asks another host: {request.url}")

        page.on("requestfinished", note)
        page.on(
            "requestfailed",
            lambda request: page.complaints.append(f"failed: {request.url}"),
        )
        page.goto(site + name)
        if not isinstance(browser, Firefox):  # which reports no end of some requests
            page.wait_for_load_state("networkidle")
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PAGES)
def test_page_is_sound(visit, barriers, measured, name, mode):
    """No other host, no error, no sideways scrolling, no barrier that axe knows."""
    page = visit(name, mode)
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= MODES[mode]["viewport"]["width"]
    assert not page.complaints, "\n".join(page.complaints)
    found = barriers(page)
    assert not found, "\n".join(found)
    measured[name][mode] = len(found)


@pytest.mark.chromium  # bytes are bytes
@pytest.mark.parametrize("name", PAGES)
def test_page_is_light(visit, measured, name):
    """At most 800 kB of shared files, and 500 kB of its own text and figures."""
    page = visit(name)
    page.mouse.wheel(0, 10**6)
    page.wait_for_load_state("networkidle")
    weights = {n: len(answer.body()) for n, answer in page.answers.items()}
    shared = {n: w for n, w in weights.items() if n.startswith("_static/")}
    own = {n: w for n, w in weights.items() if n not in shared}
    measured[name] |= {
        "requests": len(weights),
        "shared_kB": round(sum(shared.values()) / 1000),
        "own_kB": round(sum(own.values()) / 1000),
    }
    assert sum(shared.values()) <= 800_000, shared
    assert sum(own.values()) <= 500_000, own


@pytest.mark.parametrize("name", [CHAPTERS[8], ERRORS])
def test_a_full_line_of_code_fits(visit, name):
    """88 columns beside both sidebars, in an output and in an exercise too."""
    page = visit(name)
    page.wait_for_function("document.fonts.status == 'loaded'")
    columns = page.evaluate(
        """() => [...document.querySelectorAll('article .cell pre')]
          .filter(box => box.checkVisibility() && !box.closest('.running'))
          .map(box => {
            const line = box.appendChild(document.createElement('span'));
            line.textContent = 'x'.repeat(100);
            const style = getComputedStyle(box);
            const [left, right] = [style.paddingLeft, style.paddingRight];
            const room = box.clientWidth - parseFloat(left) - parseFloat(right);
            return 100 * room / line.getBoundingClientRect().width;
          })"""
    )
    assert len(columns) > 10 and min(columns) >= 88, columns


def test_messages_wrap_on_a_phone(visit):
    page = visit(ERRORS, "phone")
    boxes = page.locator(".cell_output pre:text-matches('^[A-Za-z.]*Error: ')")
    assert boxes.count() > 10
    wide = "boxes => boxes.filter(box => box.scrollWidth > box.clientWidth).length"
    assert boxes.evaluate_all(wide) == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["book/index.html", CHAPTERS[4], ERRORS])
def test_nothing_moves_when_the_typefaces_arrive(browser, site, name, mode):
    """Chromium adds up what moved; in Firefox nothing moves by more than a line."""
    with browser.new_context(**MODES[mode]) as context:
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
        page.wait_for_function(PAINTED)
        page.wait_for_timeout(500)  # what stands in for them has been drawn
        assert page.evaluate(STAND_INS)
        before = page.evaluate(PLACES)
        for route in held:
            route.continue_()
        page.wait_for_function("document.fonts.status == 'loaded'")
        page.wait_for_timeout(500)
        faces = (
            "[...document.fonts].filter(f => f.status == 'loaded').map(f => f.family)"
        )
        assert {"Literata", "Inter", "Iosevka"} <= set(page.evaluate(faces))
        assert page.evaluate("window.moved") < 0.02
        after = page.evaluate(PLACES)
        assert max(abs(a - b) for a, b in zip(before, after)) < 30


@pytest.mark.parametrize("width, height", [(1280, 800), (360, 740)])
def test_landing_page_begins_with_its_figure_and_buttons(visit, width, height):
    page = visit("book/index.html", viewport={"width": width, "height": height})
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


@pytest.mark.parametrize("name", CHAPTERS)
def test_chapter_reads_without_scripts(visit, name):
    """Text, formulas, code and figures are there before any script has run."""
    page = visit(name, java_script_enabled=False)
    hidden = page.evaluate(
        """() => [...document.querySelectorAll(
            'article :is(h1, h2, p, math, .cell_input pre, .cell_output img)')]
          .filter(element => !element.closest('details') &&
            !element.checkVisibility({opacityProperty: true, visibilityProperty: true}))
          .map(element => element.outerHTML.slice(0, 100))"""
    )
    assert not hidden, hidden
    assert len(page.inner_text("article").split()) > 1500


@pytest.mark.parametrize("name", CHAPTERS)
def test_folds_open_and_say_so(visit, barriers, name):
    """What a fold is called is what one reads on it, closed and open."""
    page = visit(name, reduced_motion="reduce")
    folds = page.locator("details.hide > summary")
    closed = folds.all_inner_texts()
    assert closed and all(text.startswith("Show ") for text in closed)
    for fold in folds.all():
        fold.click()
    opened = [text.replace("Show ", "Hide ", 1) for text in closed]
    assert folds.all_inner_texts() == opened
    found = barriers(page, "details.hide")
    assert not found, "\n".join(found)


@pytest.mark.chromium  # it asks axe alone
@pytest.mark.parametrize("name, wrong", [("Search the book", False), ("Find", True)])
def test_a_name_that_is_not_the_text_is_a_barrier(browser, barriers, name, wrong):
    with browser.new_context() as context:
        page = context.new_page()
        page.set_content(f"<button aria-label='{name}'>Search</button>")
        found = "\n".join(barriers(page))
    assert ("label-content-name-mismatch" in found) == wrong


@pytest.mark.parametrize("query", SEARCHES)
def test_search_finds(visit, query):
    page = visit("search.html")
    page.fill("main textarea", query)
    page.wait_for_selector("[role=status]:has-text('Found')")
    links = page.locator("#search-results li > a")
    addresses = [links.nth(i).get_attribute("href") for i in range(links.count())]
    assert addresses and SEARCHES[query] in addresses[0], addresses[:5]


def test_copy_button_copies_the_code_alone(visit):
    page = visit("notebooks/04_pmap.html")
    assert page.locator(".cell_output .copybtn").count() == 0
    open_cells = page.locator(".cell:not(:has(details)) .cell_input")
    cell = open_cells.filter(has=page.locator(".copybtn")).nth(3)
    cell.hover()
    cell.locator(".copybtn").click()
    page.evaluate("document.body.prepend(document.createElement('textarea'))")
    page.press("textarea", "Control+V")
    copied = page.input_value("textarea")
    assert copied.strip() == cell.locator("pre").inner_text().strip()


def test_missing_page_helps(visit, site):
    page = visit("no/such/page.html")
    assert "no page" in page.inner_text("article h1")
    page.click("article a")
    assert page.title().startswith("Parallel JAX")


def test_print_opens_solutions_and_drops_navigation(visit):
    page = visit("notebooks/05_collectives.html")
    sheets = PdfReader(io.BytesIO(page.pdf())).pages
    printed = "".join("".join(sheet.extract_text() for sheet in sheets).split())
    for solution in page.locator(".tag_solution pre").all():
        [first, *_] = solution.text_content().splitlines()
        assert "".join(first.split()) in printed
    for link in page.locator(".bd-sidebar-primary .caption-text").all():
        assert "".join(link.text_content().split()) not in printed


@pytest.mark.parametrize(
    "name, drawing",
    [
        ("notebooks/05_collectives.html", ".ring"),
        ("notebooks/09_shardings.html", ".swap"),
    ],
)
def test_motion_stops_for_those_who_ask(visit, name, drawing):
    moving = "document.getAnimations().filter(a => a.playState == 'running').length"

    def count_moving(**options):
        page = visit(name, **options)
        page.hover(drawing)  # what has come to its end plays again
        return page.evaluate(moving)

    assert count_moving() > 0
    assert count_moving(reduced_motion="reduce") == 0


@pytest.mark.chromium  # which `nox -s pdf` prints with
def test_pages_print_into_one_file(browser, site, monkeypatch):
    import pdf

    pages = [
        (None, "book/index"),
        ("Start", "book/running"),
        ("Start", "book/glossary"),
    ]
    monkeypatch.setattr(pdf, "contents", lambda: pages)
    book = pdf.print_book(site, browser)
    first, start, below = book.outline
    assert [first.title, start.title] == ["Parallel JAX", "Start"]
    assert [entry.title for entry in below] == ["Run the book", "Glossary"]
    running = book.pages[book.get_destination_page_number(below[0])].indirect_reference
    notes = [note.get_object() for note in book.pages[0]["/Annots"]]
    assert any(note.get("/Dest", [None])[0] == running for note in notes)
