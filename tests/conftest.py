"""Fixtures shared by several tests: the served site, browsers, axe-core."""

from contextlib import ExitStack

import psutil
import pytest
from pair import ROOT
from published import chromium, firefox, published

AXE = ROOT / "tests/node_modules/axe-core/axe.min.js"
BROWSERS = {"chromium": chromium, "firefox": firefox}
WINDOW, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
MODES = {"light": WINDOW, "dark": WINDOW, "phone": PHONE}
# Resolves when the colour transitions after a change of theme have ended.
SETTLED = """Promise.all(document.getAnimations()
  .filter((motion) => motion instanceof CSSTransition)
  .map((motion) => motion.finished.catch(() => {})))"""
# Most elements are words of code: leave one element per colour and block for axe.
THIN = """document.querySelectorAll('pre').forEach((block) => {
  const kinds = new Set();
  for (const word of block.querySelectorAll('span[class]'))
    if (kinds.has(word.className)) word.replaceWith(...word.childNodes);
    else kinds.add(word.className);
})"""
# Rules that axe does not run by default. Not used: color-contrast-enhanced, and
# focus-order-semantics, which forbids focus on a box that scrolls.
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
        if "browser" in getattr(item, "fixturenames", ()):  # notebooks have no fixtures
            item.add_marker("browser")


def pytest_keyboard_interrupt():
    """End the workers of pytest-xdist at Ctrl-C; kernels end with their workers."""
    for worker in psutil.Process().children():
        worker.kill()


@pytest.fixture
def start_run(tmp_path):
    """Return a function that starts launch/train.py; kill its runs after the test."""
    from runs import Run

    def start_run(*args, **options):
        run = Run(tmp_path, *args, **options)
        runs.callback(run.kill)
        return run

    with ExitStack() as runs:
        yield start_run


@pytest.fixture
def keep_lifecycle(monkeypatch):
    """Keep runs in this process from changing signals and state of lifecycle.py."""
    monkeypatch.setattr("lifecycle.ignore_signals", lambda: None)
    monkeypatch.setattr("lifecycle.claimed", ())


@pytest.fixture(scope="session")
def site():
    with published() as address:
        yield address


@pytest.fixture(scope="session")
def playwright():
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=60_000)  # for busy machines
    with sync_playwright() as playwright:
        yield playwright


@pytest.fixture(scope="session")
def browser(playwright, request):
    """Start Chromium, or the browser that a test names as the fixture's parameter."""
    with BROWSERS[getattr(request, "param", "chromium")](playwright) as browser:
        yield browser


@pytest.fixture
def quiet_page(browser, site):
    """Return a function that opens a page of the site in a new context.

    The test fails if the page sends a request to another host or logs an error.
    """
    problems = []

    def open_page(name, **options):
        options = {"viewport": WINDOW} | options
        page = contexts.enter_context(browser.new_context(**options)).new_page()

        def note_request(request):
            if not request.url.startswith((site, "data:")):
                problems.append(f"{name}: request to another host: {request.url}")

        def note_error(line):
            if line.type == "error":
                problems.append(f"{name}: {line.text}")

        def note_exception(error):
            # Firefox says this of formulas that have arrived in part. test_site counts.
            if not str(error).startswith("Incorrect number of children for <m"):
                problems.append(f"{name}: {error}")

        page.on("request", note_request)
        page.on("console", note_error)
        page.on("pageerror", note_exception)
        page.goto(site + name)
        return page

    with ExitStack() as contexts:
        yield open_page
    assert not problems, "\n".join(problems)


@pytest.fixture(scope="session")
def find_problems():
    """Return a function that lists the problems of a page in light and dark and on a
    phone: horizontal scrolling, and violations of axe-core's rules.

    In dark only the rules about colours run; on a phone none run unless `axe_on_phone`.
    """
    assert AXE.exists(), "no axe-core: run npm ci --prefix tests --ignore-scripts"

    def find(page, part="html", shows="h1", axe_on_phone=True):
        problems = []
        for mode, size in MODES.items():
            page.emulate_media(color_scheme="dark" if mode == "dark" else "light")
            page.set_viewport_size(size)
            if mode == "phone" and axe_on_phone:
                page.reload()  # the theme sets which boxes take the focus on load
            if mode == "light" or mode == "phone" and axe_on_phone:
                page.wait_for_selector(f"article {shows}")
                page.evaluate(THIN)
                page.evaluate(AXE.read_text())
            page.evaluate(SETTLED)
            width = page.evaluate("document.documentElement.scrollWidth")
            if width > size["width"]:
                problems.append(f"{mode}: {width} pixels wide, window {size['width']}")
            if mode == "phone" and not axe_on_phone:
                continue
            options = RULES_IN_DARK if mode == "dark" else RULES
            found = page.evaluate("args => axe.run(...args)", [part, options])
            problems += [
                f"{mode}: {rule['id']}: {node['html'][:160]}\n    "
                f"{node['failureSummary'][:200]}"
                for rule in found["violations"]
                for node in rule["nodes"]
            ]
        return problems

    return find
