"""What several tests share: the served site, a browser, axe, and what marks a test.

Tests that use a browser are marked `browser`, so that no list names their files, and
`essential` too, but for what they ask of the rest of many pages.
"""

from contextlib import ExitStack

import psutil
import pytest
from pair import ROOT
from published import Firefox, chromium, published

AXE = ROOT / "tests/node_modules/axe-core/axe.min.js"
SETTLED = """Promise.all(document.getAnimations()
  .filter((motion) => motion instanceof CSSTransition)
  .map((motion) => motion.finished.catch(() => {})))"""  # half-way, a colour is another
# Most elements of a page are words of code: axe judges one of each colour in a block.
THIN = """document.querySelectorAll('pre').forEach((block) => {
  const copy = block.cloneNode(true), kinds = new Set();
  for (const word of copy.querySelectorAll('span[class]'))
    if (kinds.has(word.className)) word.replaceWith(...word.childNodes);
    else kinds.add(word.className);
  block.replaceWith(copy);
})"""
# What axe leaves out unless asked, or did once. It has more: a stricter contrast, and
# focus-order-semantics, for which a box that scrolls should not take the focus.
MORE_RULES = {
    "css-orientation-lock",
    "label-content-name-mismatch",
    "p-as-heading",
    "table-fake-caption",
    "target-size",
    "td-has-header",
}
BROWSERS = {"chromium": chromium, "firefox": Firefox}
MODES = {"light": (1280, 900), "dark": (1280, 900), "phone": (360, 740)}


def pytest_addoption(parser):
    parser.addoption(
        "--browser",
        choices=BROWSERS,
        default="chromium",
        help="what reads the site; in firefox add -m 'browser and not chromium'",
    )


def pytest_collection_modifyitems(items):
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):  # a notebook has none
            item.add_marker("browser")
            if not item.get_closest_marker("rest"):
                item.add_marker("essential")


def pytest_keyboard_interrupt():
    """End pytest-xdist's workers at Ctrl-C; a kernel ends when its worker is gone."""
    for worker in psutil.Process().children():
        worker.kill()


@pytest.fixture
def begin(tmp_path):
    """A function that begins a Run of launch/train.py; at the end none is left."""
    from runs import Run

    def begin(*words, **how):
        run = Run(tmp_path, *words, **how)
        runs.callback(run.kill)
        return run

    with ExitStack() as runs:
        yield begin


@pytest.fixture
def quiet(monkeypatch):
    """Leaves pytest its signals where a run of launch/train.py ends in this process."""
    monkeypatch.setattr("lifecycle.hear_no_more", lambda: None)


@pytest.fixture(scope="session")
def site():
    with published() as address:
        yield address


@pytest.fixture(scope="session")
def browser(request):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = BROWSERS[request.config.getoption("--browser")](playwright)
        yield opened
        opened.close()


@pytest.fixture
def quiet_page(browser, site):
    """A function that opens a page of the site, which must not ask another host nor
    write an error to the console; `page.asked` is what it asks the site for."""
    complaints = []

    def open_page(name, **options):
        width, height = MODES["light"]
        options = {"viewport": {"width": width, "height": height}} | options
        page = contexts.enter_context(browser.new_context(**options)).new_page()
        page.asked = set()

        def note(request):
            if request.url.startswith(site):
                page.asked.add(request.url.removeprefix(site))
            elif not request.url.startswith("data:"):
                complaints.append(f"{name} asks another host: {request.url}")

        def note_error(line):
            if line.type == "error":
                complaints.append(f"{name}: {line.text}")

        page.on("request", note)
        page.on("console", note_error)
        page.on("pageerror", lambda error: complaints.append(f"{name}: {error}"))
        page.goto(site + name)
        return page

    with ExitStack() as contexts:
        yield open_page
    assert not complaints, "\n".join(complaints)


@pytest.fixture(scope="session")
def barriers(request):
    """A function that asks axe-core what is wrong with a page, or with a part of it."""
    if request.config.getoption("--browser") != "chromium":
        return lambda *_: []  # axe judges what is on the page: one engine is enough
    assert AXE.exists(), "no axe-core: run npm ci --prefix tests --ignore-scripts"
    more = {rule: {"enabled": True} for rule in MORE_RULES}
    options = {"rules": more, "resultTypes": ["violations"]}

    def find(page, part="html"):
        """Each element of the part that breaks a rule, and what would mend it."""
        page.evaluate(SETTLED)
        page.evaluate(THIN)
        page.evaluate(AXE.read_text())
        found = page.evaluate("asked => axe.run(...asked)", [part, options])
        outcomes = ["passes", "violations", "incomplete", "inapplicable"]
        ran = {rule["id"] for outcome in outcomes for rule in found[outcome]}
        assert ran >= MORE_RULES, MORE_RULES - ran
        return [
            f"{rule['id']}: {node['html'][:160]}\n    {node['failureSummary'][:200]}"
            for rule in found["violations"]
            for node in rule["nodes"]
        ]

    return find


@pytest.fixture(scope="session")
def wrong_with(barriers):
    """A function that lists what is wrong with a page as it is, and once it is loaded
    in dark or on a phone: sideways scrolling, and each barrier that axe knows."""

    def look(page, part="html", shows="h1"):
        wrong = []
        for mode, (width, height) in MODES.items():
            if mode != "light":
                page.emulate_media(color_scheme="dark" if mode == "dark" else "light")
                page.set_viewport_size({"width": width, "height": height})
                page.reload()
            page.wait_for_selector(f"article {shows}")
            wide = page.evaluate("document.documentElement.scrollWidth")
            if wide > width:
                wrong.append(f"{mode}: it is {wide} pixels wide, of {width}")
            wrong += [f"{mode}: {barrier}" for barrier in barriers(page, part)]
        return wrong

    return look
