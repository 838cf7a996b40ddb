"""Ask the built site's search what people paste, and see where the right page stands.

A part is what was asked in public, for which the page of errors was written ("asked"),
what other programs print or other readers may ask, on which nothing was tuned, or
questions of 2025 and 2026 from the job, of which some were held out.
"""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright
from published import CHROMIUM, chromium, program, published
from record import ROOT

FILES = {
    "asked": "tests/threads.json",
    "held out": "tests/pastes.json",
    "questions": "tests/questions.json",
}
RANKED = """queries => queries.map(query => Search.rank(window.found, query)
  .map(([{ page, anchor, heading, passage }]) => %s))"""
Ask = Callable[[list[str]], list[list[str]]]


def pastes(part: str) -> dict[str, dict]:
    """The pastes of a part that have an answer, by their names."""
    entries = json.loads((ROOT / FILES[part]).read_text())
    return {e.get("thread") or e["name"]: e for e in entries if e["answer"]}


@contextmanager
def search(
    browser: Browser, site: str, what: str = "page + '#' + anchor"
) -> Iterator[Ask]:
    """A function that gives the addresses found for each of some queries, or what else
    of the first section of each page."""
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(site + "search.html")
        page.evaluate("Search.load('sections.bin').then(found => window.found = found)")
        yield lambda queries: page.evaluate(RANKED % what, queries)


def last_lines(text: str) -> str:
    """What a reader copies who copies little: from the last error on, or a line."""
    starts = [m.start() for m in re.finditer(r"(?m)^.*(Error|Warning)\b:", text)]
    return text[starts[-1] :] if starts else text.strip().splitlines()[-1]


def rank(entry: dict, found: list[str]) -> int:
    """The place of the first right page among the addresses found, or 0."""
    right = {entry["answer"].partition("#")[0], *entry["also"]}
    places = [i for i, at in enumerate(found, 1) if at.partition("#")[0] in right]
    return min(places, default=0)


def ranks(ask: Ask, part: str) -> dict[str, list[int]]:
    """Where the first right page is for each paste, whole and its last lines."""
    found = {}
    for name, entry in pastes(part).items():
        forms = [entry["asked"], last_lines(entry["asked"])]
        found[name] = [rank(entry, addresses) for addresses in ask(forms)]
    return found


def measure(*parts: str) -> Iterator[tuple[str, dict[str, list[int]]]]:
    with published() as site, sync_playwright() as playwright:
        with search(chromium(playwright), site) as ask:
            for part in parts or FILES:
                yield part, ranks(ask, part)


def files(part: str) -> list[str]:
    return ["book/_static/search.js", FILES[part]]


def versions() -> dict[str, str]:
    said = subprocess.check_output([program(*CHROMIUM), "--version"], text=True)
    return {"Chromium": re.search(r"[\d.]+", said)[0]}
