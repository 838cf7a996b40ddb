"""Test that the search finds the right page for words and pasted errors."""

import json
import re
from statistics import mean

import pytest
from pair import ROOT
from playwright.sync_api import expect
from published import SITE
from search import ranks, search

LIBRARY = ROOT / "tests/node_modules/minisearch"
MIN_SHARES = {"asked": (0.87, 0.97), "held out": (0.92, 1), "questions": (0.82, 0.95)}
TOPICS = json.loads((ROOT / "tests/topics.json").read_text())
TERMS = {  # of the field, each with the chapter that is about it
    "pmap": "04_pmap",
    "collectives": "05_collectives",
    "explicit sharding": "11_explicit_sharding",
    "logical axes": "14_logical_axes",
    "FSDP": "16_fsdp",
    "pipeline parallelism": "18_pipelines",
    "MoE": "19_experts",
    "mixture of experts": "19_experts",
    "KV cache": "30_generate",
}
UNKNOWN = {  # status message for words that do not occur in the book
    "pizza recipe": "nothing with “pizza”",
    "train a GAN": "nothing with “GAN”",
    "pandas merge dataframes": "nothing with “pandas”, “dataframes”",
    "how to cook rice": "Found nothing. Paste the whole",
}
MESSAGES = [
    "jax.errors.TracerBoolConversionError: Attempted boolean conversion of traced array"
    " with shape bool[].",
    "RuntimeError: Array has been deleted with shape=float32[8].",
    "NameError: Found an unbound axis name: batch.",
    "ValueError: Checkpoint path should be absolute. Got runs/1",
]
FRAMES = (
    "Traceback (most recent call last):\n"
    '  File "/home/me/checkpoints/old_mesh/train.py", line 42, in restore_or_init\n'
    "    state = manager.restore(step, args=ocp.args.StandardRestore(target))\n"
    "            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
    '  File "/opt/venv/lib/python3.12/site-packages/jax/_src/pjit.py", line 647, in f\n'
    "{}"
)
NOISE = [  # text around a message that must not change the results
    FRAMES,
    "{} (/home/me/checkpoints/restore_mesh) checkpoints/restore.py",
    "{}, line 42, in restore_mesh in <cell line: 0>() at 0x7f3a5c0d1e40",
    "\x1b[0;31m{}\x1b[0m",
    "2026-04-05 18:39:10.837611: E1121 07:01:02.345678     387 {}",
    "{} float32[128,4096] bf16[8@data,16] i32[]{{V:model}} key<fry>[2]",
    "{} 0.12.3 0.10.2.dev",
    "{} See https://docs.jax.dev/en/latest/201/shard-map.html#scan-vma",
    "For simplicity, JAX has removed its internal frames from the traceback of the "
    "following exception. Set JAX_TRACEBACK_FILTERING=off to include these. {}",
    "{} [... skipping hidden 9 frame]",
    "{} During handling of the above exception, another exception occurred:",
    "{} The above exception was the direct cause of the following exception:",
    "{} The preceding stack trace is the source of the JAX operation that, "
    "once transformed by JAX, triggered the following exception.",
]


@pytest.fixture
def search_for(browser, site):
    return lambda queries: search(browser, site, list(queries))


@pytest.fixture
def typed(quiet_page):
    """Return a function that types a query and returns the page with results."""

    def type_query(query):
        page = quiet_page("search.html")
        page.get_by_role("main").get_by_role("textbox").fill(query)
        expect(page.get_by_role("status")).to_contain_text("Found")
        return page

    return type_query


@pytest.mark.browser
def test_minisearch_equals_the_published_package():
    """book/_static has a copy, because the site is built without npm."""
    version = json.loads((LIBRARY / "package.json").read_text())["version"]
    licence = (LIBRARY / "LICENSE.txt").read_text()
    code = (LIBRARY / "dist/es/index.js").read_text()
    head = f"/* MiniSearch {version}, dist/es/index.js of the npm package minisearch."
    copied = (ROOT / "book/_static/minisearch.js").read_text()
    assert copied == f"{head}\n\n{licence}*/\n{code}"


@pytest.mark.parametrize("part", MIN_SHARES)
def test_most_queries_find_their_page(browser, site, part):
    first_two, ten = MIN_SHARES[part]
    of_full_text = [rank for rank, _ in ranks(browser, site, part).values()]
    assert mean(1 <= rank <= 2 for rank in of_full_text) >= first_two
    assert mean(1 <= rank <= 10 for rank in of_full_text) >= ten


def test_a_few_words_find_their_page(search_for):
    """Some of these words are misspelt."""
    found = [[hit["page"] for hit in hits[:3]] for hits in search_for(TOPICS)]
    assert [
        words for words, hits in zip(TOPICS, found) if TOPICS[words] not in hits
    ] == []
    assert mean(hits[0] == page for hits, page in zip(found, TOPICS.values())) >= 0.9


def test_a_term_of_the_field_finds_its_chapter_first(search_for):
    found = {term: hits[0]["page"] for term, hits in zip(TERMS, search_for(TERMS))}
    assert found == {term: f"notebooks/{name}.html" for term, name in TERMS.items()}


@pytest.mark.parametrize("noise", NOISE)
def test_noise_does_not_change_results(search_for, noise):
    noisy = [noise.format(text) for text in MESSAGES]
    assert search_for(MESSAGES) == search_for(noisy)


def test_results_link_to_pages_and_sections(search_for):
    """The index also has pages that the last build did not read again."""
    paths = [path for f in ("book", "notebooks") for path in (ROOT / f).glob("*.md")]
    heads = [re.search("^# (.*)$", p.read_text(), re.MULTILINE)[1] for p in paths]
    for path, found in zip(paths, search_for(heads)):
        page = f"{path.parent.name}/{path.stem}.html"
        assert page in {hit["page"] for hit in found}
        ids = re.findall(r'\bid="([^"]+)"', (SITE / page).read_text())
        assert {hit["anchor"] for hit in found if hit["page"] == page} <= {*ids}


def test_typing_finds_and_shows_what_matched(typed, find_problems):
    page = typed("<img src=x onerror=alert(1)> &lt;b&gt; ring attention")
    expect(page).to_have_url(re.compile(r"search\.html\?q=.*attention$"))
    assert page.locator("main img, main b").count() == 0
    first = page.locator("#search-results li").first
    expect(first.get_by_role("link").first).to_contain_text("Ring attention")
    expect(first.locator(".where")).to_contain_text("Long context")
    marked = " ".join(first.locator("mark").all_inner_texts()).lower()
    assert {"ring", "attention"} <= {*re.findall("[a-z]+", marked)}
    problems = find_problems(page, shows="#search-results li")  # also after a reload
    assert not problems, "\n".join(problems)


def test_results_are_reached_by_keyboard(typed):
    page = typed("ensemble")
    page.keyboard.press("Enter")
    expect(page.get_by_role("main").get_by_role("textbox")).to_have_value("ensemble")
    page.keyboard.press("Tab")
    focused = page.locator("#search-results li:first-child > a:focus")
    expect(focused).to_have_count(1)
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("08_ensembles.html#"))


@pytest.mark.parametrize("query", UNKNOWN)
def test_status_names_words_that_are_not_in_the_book(typed, query):
    expect(typed(query).get_by_role("status")).to_contain_text(UNKNOWN[query])


def test_traceback_can_be_pasted_into_the_search_of_any_page(quiet_page):
    page = quiet_page("book/running.html")
    page.keyboard.press("Control+k")
    page.keyboard.insert_text(FRAMES.format(MESSAGES[-1]))
    page.keyboard.press("Enter")
    page.wait_for_url("**/search.html?q=*")
    first = page.locator("#search-results a").first
    expect(first).to_have_text("Checkpoint path should be absolute")
