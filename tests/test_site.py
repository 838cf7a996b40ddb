"""The rendered site in _build/html: whole, self-contained, and with its results.

Run by `nox -s book`, but for the downloads, and in full by `nox -s publish`.
"""

import gc
import json
import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from bs4 import BeautifulSoup
from packaging.version import Version
from pair import ROOT
from published import PREFIX, SITE
from selfcontained import slim

CHAPTERS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.md"))


@cache
def page(path: Path) -> BeautifulSoup:
    """A page without the colours of its code, which are most of its tags."""
    plain = re.sub("</?span[^>]*>", "", path.read_text())
    parsed = BeautifulSoup(plain, "html.parser")
    gc.freeze()  # kept to the end: nobody need look through it for garbage
    return parsed


@cache
def anchors(path: Path) -> set[str]:
    return {tag["id"] for tag in page(path).find_all(id=True)}


def pages() -> list[Path]:
    found = sorted(SITE.glob("*.html")) + sorted(SITE.glob("[bn]*/*.html"))
    assert found, "there is no site: run nox -s book"
    return found


def test_no_page_asks_another_host():
    foreign = []
    for path in pages():
        for tag in page(path).find_all(["script", "link", "img", "iframe", "source"]):
            address = tag.get("src") or tag.get("href") or ""
            if tag.get("rel") not in (["canonical"],) and re.match(
                r"(https?:)?//", address
            ):
                foreign.append(f"{path.name}: {address}")
        for script in page(path).find_all("script", src=False):
            if "://" in script.get_text():
                foreign.append(f"{path.name}: {script.get_text()[:80]}")
    for style in SITE.glob("_static/**/*.css"):
        for address in re.findall(
            r"(?:url\(|@import )['\"]?((?:https?:)?//[^'\")]+)", style.read_text()
        ):
            foreign.append(f"{style.name}: {address}")
    assert not foreign, "\n".join(foreign)


def test_drawings_are_slimmed_but_for_their_texts():
    drawing = '<text x="1.23456">Adam at 0.003</text>\n<path d="M 0.98765 4"/>'
    thin = '<text x="1.23">Adam at 0.003</text>\n<path d="M 0.98 4"/>'
    assert slim(drawing) == thin


def test_internal_links_lead_somewhere():
    broken = []
    for path in pages():
        for link in page(path).find_all("a", href=True):
            parts = urlsplit(link["href"])
            if parts.scheme or parts.netloc:
                continue
            base = SITE if parts.path.startswith(PREFIX) else path.parent
            way = unquote(parts.path).removeprefix(PREFIX)
            target = (base / way).resolve() if way else path
            if not target.is_file():
                broken.append(f"{path.name}: {link['href']}")
            elif target.suffix == ".html" and parts.fragment:
                if unquote(parts.fragment) not in anchors(target):
                    broken.append(f"{path.name}: {link['href']}")
    assert not broken, "\n".join(broken)


def test_next_follows_the_contents():
    contents = yaml.safe_load((ROOT / "_toc.yml").read_text())
    order = [contents["root"]]
    order += [c["file"] for part in contents["parts"] for c in part["chapters"]]
    for here, there in zip(order, order[1:], strict=False):
        path = SITE / f"{here}.html"
        follow = page(path).select_one("a.right-next")["href"]
        back = page(SITE / f"{there}.html").select_one("a.left-prev")["href"]
        assert (path.parent / follow).resolve() == SITE / f"{there}.html"
        assert (SITE / f"{there}.html").parent.joinpath(back).resolve() == path


def test_landing_page_has_every_chapter():
    links = {
        Path(a["href"]).stem for a in page(SITE / "book/index.html").select("td a")
    }
    assert links == set(CHAPTERS)


def test_pages_can_be_shared_and_found():
    addresses = (SITE / "sitemap.xml").read_text()
    for path in [path for path in pages() if path.parent != SITE]:
        meta = {
            tag.get("property") or tag.get("name"): tag["content"]
            for tag in page(path).find_all("meta", content=True)
        }
        assert str(path.relative_to(SITE)) in addresses
        assert meta["og:title"] and len(meta["description"]) > 40, path
        assert urlsplit(meta["og:image"]).path.startswith(PREFIX), path
        assert (SITE / urlsplit(meta["og:image"]).path.removeprefix(PREFIX)).is_file()


def test_every_page_names_its_version():
    version = re.search(r"## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text())[1]
    assert f"version: {version}" in (ROOT / "CITATION.cff").read_text()
    for path in [path for path in pages() if path != SITE / "index.html"]:
        footer = page(path).select_one("footer.bd-footer-content").get_text()
        assert re.search(rf"Version {version}, built with JAX [\d.]+ on", footer), path


def test_every_page_names_the_versions_that_pass():
    legs = json.loads((ROOT / "book/measured/legs.json").read_text())
    passed = {
        leg["jax"]
        for leg in legs.values()
        if all(leg["chapters"].get(name, "failed") != "failed" for name in CHAPTERS)
    }
    for path in [path for path in pages() if path != SITE / "index.html"]:
        footer = page(path).select_one("footer.bd-footer-content").get_text()
        said = re.findall(r"Every chapter passes on JAX (.*)\.$", footer, re.MULTILINE)
        named = [name for names in said for name in re.split(", | and ", names)]
        assert named == sorted(passed, key=Version), path


def test_images_say_what_they_show():
    silent = [
        f"{path.name}: {image.get('src')}"
        for path in pages()
        for image in page(path).select("article img")
        if len(image.get("alt", "")) < 20 or image["alt"].endswith((".svg", ".png"))
    ]
    assert not silent, "\n".join(silent)


@pytest.mark.parametrize("name", CHAPTERS)
def test_chapter_shows_its_results(name):
    outputs = page(SITE / f"notebooks/{name}.html").select("div.cell_output")
    assert len(outputs) >= 10
    assert re.match(r"JAX [\d.]+, \d+ .* devices", outputs[0].get_text().strip())


@pytest.mark.parametrize("name", CHAPTERS)
def test_callouts_look_like_callouts(name):
    chapter = page(SITE / f"notebooks/{name}.html")
    for label in ("Predict", "Pitfall", "Takeaway"):
        said = [tag for tag in chapter.find_all("strong") if tag.text == f"{label}."]
        assert said
        assert all(tag.find_parent(class_=label.lower()) for tag in said)


@pytest.mark.parametrize("name", CHAPTERS)
def test_folds_say_what_they_hold(name):
    """A tag decides, and for the cells without one what came out of them."""
    tagged = {"check": "check", "solution": "answer", "shared-setup": "setup"}
    for cell in page(SITE / f"notebooks/{name}.html").select(".cell:has(> details)"):
        tags = [mark.removeprefix("tag_") for mark in cell["class"]]
        held = [what for tag, what in tagged.items() if tag in tags]
        if not held and any(tag.startswith("shared-") for tag in tags):
            held = ["helper"]
        if not held and cell.select('.cell_output :is(img, [role="img"])'):
            held = ["drawing's code"]
        [what] = held or ["code" if cell.select(".cell_output") else "helper"]
        texts = [text.get_text() for text in cell.select("summary > p")]
        assert texts == [f"Show the {what}", f"Hide the {what}"], cell


@pytest.mark.parametrize("name", CHAPTERS)
def test_download_carries_outputs(name):
    notebook = json.loads((SITE / f"_sources/notebooks/{name}.ipynb").read_text())
    assert sum(bool(cell.get("outputs")) for cell in notebook["cells"]) >= 10
