"""Search the built site for published queries; record the rank of the right page.

A part is a file of queries: published errors and questions for which the page of errors
was written ("asked"), errors and questions on which the search was not tuned ("held
out"), and questions of JAX users from 2025 and 2026 ("questions").
"""

import json
import re
import subprocess
from collections.abc import Iterator

from playwright.sync_api import Browser, sync_playwright
from published import CHROMIUM, chromium, program, published
from record import ROOT

FILES = {
    "asked": "tests/threads.json",
    "held out": "tests/pastes.json",
    "questions": "tests/questions.json",
}
SEARCH = """async (queries) => {
  const { load, search } = await import(new URL("_static/search.js", location));
  const index = await load("sections.bin");
  return queries.map((query) => search(index, query).pages.map(
    ([{ page, anchor, heading, passage }]) => ({ page, anchor, heading, passage })));
}"""


def entries(part: str) -> dict[str, dict]:
    """Return the queries of a part that the book answers, by name."""
    found = json.loads((ROOT / FILES[part]).read_text())
    return {e.get("thread") or e["name"]: e for e in found if e["answer"]}


def search(browser: Browser, site: str, queries: list[str]) -> list[list[dict]]:
    """Return for each query the best passage of each page found, best first."""
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(site + "search.html")
        return page.evaluate(SEARCH, queries)


def last_lines(text: str) -> str:
    """Return the last error message of a pasted text, or its last line."""
    starts = [m.start() for m in re.finditer(r"(?m)^.*(Error|Warning)\b:", text)]
    return text[starts[-1] :] if starts else text.strip().splitlines()[-1]


def ranks(browser: Browser, site: str, part: str) -> dict[str, list[int]]:
    """Return the ranks of the right page, 0 if not found, for each pasted text: for the
    full text and for its last lines."""
    ranks = {name: [] for name in entries(part)}
    for form in (str, last_lines):
        queries = [form(entry["asked"]) for entry in entries(part).values()]
        results = search(browser, site, queries)
        for (name, entry), found in zip(entries(part).items(), results):
            right = {entry["answer"].partition("#")[0], *entry["also"]}
            hits = [i for i, hit in enumerate(found, 1) if hit["page"] in right]
            ranks[name].append(min(hits, default=0))
    return ranks


def measure(*parts: str) -> Iterator[tuple[str, dict[str, list[int]]]]:
    with published() as site, sync_playwright() as playwright:
        browser = chromium(playwright)
        for part in parts or FILES:
            yield part, ranks(browser, site, part)


def files(part: str) -> list[str]:
    return ["book/_static/minisearch.js", "book/_static/search.js", FILES[part]]


def versions() -> dict[str, str]:
    printed = subprocess.check_output([program(*CHROMIUM), "--version"], text=True)
    return {"Chromium": re.search(r"[\d.]+", printed)[0]}
