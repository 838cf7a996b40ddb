"""Fixtures of several tests: the served site, a browser, axe-core."""

from contextlib import ExitStack

import psutil
import pytest
from pair import ROOT
from published import chromium, firefox, published

AXE = ROOT / "tests/node_modules/axe-core/axe.min.js"
BROWSERS = {"chromium": chromium, "firefox": firefox}
WINDOW, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
MODES = {"light": WINDOW, "dark": WINDOW, "phone": PHONE}
# Colours change for a while after the theme has.
SETTLED = """Promise.all(document.getAnimations()
  .filter((motion) => motion instanceof CSSTransition)
  .map((motion) => motion.finished.catch(() => {})))"""
# Most elements of a page are words of code: axe gets one of each colour in a block.
THIN = """document.querySelectorAll('pre').forEach((block) => {
  const kinds = new Set();
  for (const word of block.querySelectorAll('span[class]'))
    if (kinds.has(word.className)) word.replaceWith(...word.childNodes);
    else kinds.add(word.className);
})"""
# Rules that axe runs on request only. Not used: a stricter contrast, and
# focus-order-semantics, which forbids to focus a box that scrolls.
MORE_RULES = [
    "css-orientation-lock",
    "label-content-name-mismatch",
    "p-as-heading",
    "table-fake-caption",
    "target-size",
    "td-has-header",
]
RULES = {"rules": {rule: {"enabled": True} for rule in MORE_RULES}}
RULES_IN_DARK = {"runOnly": ["color-contrast", "link-in-text-block"]}


def pytest_collection_modifyitems(items):
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):  # a notebook has none
            item.add_marker("browser")


def pytest_keyboard_interrupt():
    """End pytest-xdist's workers at Ctrl-C; a kernel ends when its worker is gone."""
    for worker in psutil.Process().children():
        worker.kill()


@pytest.fixture
def start_run(tmp_path):
    """Return a function that starts launch/train.py; kill what is left of its runs."""
    from runs import Run

    def start_run(*words, **how):
        run = Run(tmp_path, *words, **how)
        runs.callback(run.kill)
        return run

    with ExitStack() as runs:
        yield start_run


@pytest.fixture
def keep_lifecycle(monkeypatch):
    """Let a run in this process leave the signals and the state of lifecycle.py."""
    monkeypatch.setattr("lifecycle.hear_no_more", lambda: None)
    monkeypatch.setattr("lifecycle.claimed", ())


@pytest.fixture(scope="session")
def site():
    with published() as address:
        yield address


@pytest.fixture(scope="session")
def playwright():
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=60_000)  # a busy machine takes its time
    with sync_playwright() as playwright:
        yield playwright


@pytest.fixture(scope="session")
def browser(playwright, request):
    """Chromium, or the browser that a test names as the fixture's parameter."""
    with BROWSERS[getattr(request, "param", "chromium")](playwright) as browser:
        yield browser


@pytest.fixture
def quiet_page(browser, site):
    """A function that opens a page of the site in a context of its own.

    The test fails if the page asks another host for anything or logs an error.
    """
    complaints = []

    def open_page(name, **options):
        options = {"viewport": WINDOW} | options
        page = contexts.enter_context(browser.new_context(**options)).new_page()

        def note(request):
            if not request.url.startswith((site, "data:")):
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
def wrong_with():
    """A function that lists what is wrong with a page in light, in dark and on a phone:
    sideways scrolling, and what breaks a rule of axe-core.

    In dark only the rules about colours run, on a phone none if not `axe_on_phone`.
    """
    assert AXE.exists(), "no axe-core: run npm ci --prefix tests --ignore-scripts"

    def look(page, part="html", shows="h1", axe_on_phone=True):
        wrong = []
        for mode, size in MODES.items():
            page.emulate_media(color_scheme="dark" if mode == "dark" else "light")
            page.set_viewport_size(size)
            if mode == "phone" and axe_on_phone:
                page.reload()  # the theme decides once which boxes take the focus
            if mode == "light" or mode == "phone" and axe_on_phone:
                page.wait_for_selector(f"article {shows}")
                page.evaluate(THIN)
                page.evaluate(AXE.read_text())
            page.evaluate(SETTLED)
            width = page.evaluate("document.documentElement.scrollWidth")
            if width > size["width"]:
                wrong.append(f"{mode}: it is {width} pixels wide, of {size['width']}")
            if mode == "phone" and not axe_on_phone:
                continue
            options = RULES_IN_DARK if mode == "dark" else RULES
            found = page.evaluate("asked => axe.run(...asked)", [part, options])
            wrong += [
                f"{mode}: {rule['id']}: {node['html'][:160]}\n    "
                f"{node['failureSummary'][:200]}"
                for rule in found["violations"]
                for node in rule["nodes"]
            ]
        return wrong

    return look
