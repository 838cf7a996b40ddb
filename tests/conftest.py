"""What several tests share: the served site, a browser, axe, and two options."""

import json

import pytest
from pair import ROOT
from published import Firefox, chromium, published

AXE = ROOT / "tests/node_modules/axe-core/axe.min.js"
SETTLED = """Promise.all(document.getAnimations()
  .filter((motion) => motion instanceof CSSTransition)
  .map((motion) => motion.finished.catch(() => {})))"""  # half-way, a colour is another
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


def pytest_addoption(parser):
    parser.addoption(
        "--record", action="store_true", help="write what was measured to book/measured"
    )
    parser.addoption(
        "--browser",
        choices=BROWSERS,
        default="chromium",
        help="what reads the site; in firefox add -m 'not chromium'",
    )


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
    """A function that opens a page, which must not write an error to the console."""
    errors = []
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:

        def open_page(name):
            page = context.new_page()
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on(
                "console",
                lambda note: errors.append(note.text) if note.type == "error" else None,
            )
            page.goto(site + name)
            return page

        yield open_page
    assert not errors, errors


@pytest.fixture(scope="session")
def barriers(request):
    """A function that asks axe-core what is wrong with a page, or with a part of it."""
    if request.config.getoption("--browser") != "chromium":
        return lambda *_: []  # axe judges what is on the page: one engine is enough
    assert AXE.exists(), "no axe-core: run npm ci --prefix tests --ignore-scripts"
    pinned = json.loads((ROOT / "tests/package.json").read_text())["devDependencies"]
    options = {
        "rules": {rule: {"enabled": True} for rule in MORE_RULES},
        "resultTypes": ["violations"],
    }

    def find(page, part="html"):
        """Each element of the part that breaks a rule, and what would mend it."""
        page.evaluate(SETTLED)
        page.evaluate(AXE.read_text())
        found = page.evaluate("asked => axe.run(...asked)", [part, options])
        assert found["testEngine"]["version"] == pinned["axe-core"]
        outcomes = ["passes", "violations", "incomplete", "inapplicable"]
        ran = {rule["id"] for outcome in outcomes for rule in found[outcome]}
        assert ran >= MORE_RULES, MORE_RULES - ran
        return [
            f"{rule['id']}: {node['html'][:160]}\n    {node['failureSummary'][:200]}"
            for rule in found["violations"]
            for node in rule["nodes"]
        ]

    return find
