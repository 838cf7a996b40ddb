"""The rendered site in _build/html: complete, linked, and with its results."""

import json
import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup
from pair import ROOT
from published import PREFIX, SITE

pytestmark = pytest.mark.built
OLD = ROOT / "book/_moved"
MOVED = [SITE / path.relative_to(OLD) for path in OLD.rglob("*.html")]
CALLOUT = r"^(Predict|Pitfall|Takeaway)\.$"
CHAPTERS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.md"))


@cache
def page(path: Path) -> BeautifulSoup:
    """Parse a page, without the colours of its code, which are most of its tags."""
    plain = re.sub("</?span[^>]*>", "", path.read_text())
    return BeautifulSoup(plain, "html.parser")


@cache
def anchors(path: Path) -> set[str]:
    return {tag["id"] for tag in page(path).find_all(id=True)}


def pages() -> list[Path]:
    found = sorted(SITE.glob("*.html")) + sorted(SITE.glob("[bn]*/*.html"))
    assert found, "there is no site: run nox -s book"
    return [path for path in found if path not in MOVED]


def chapters() -> list[tuple[str, BeautifulSoup]]:
    return [(name, page(SITE / f"notebooks/{name}.html")) for name in CHAPTERS]


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


def test_moved_pages_redirect_to_a_page():
    for path in MOVED:
        meta = page(path).find("meta", {"http-equiv": "refresh"})
        target, anchor = meta["content"].removeprefix("0; url=").split("#")
        assert path.parent / target in pages(), path
        assert anchor in anchors(path.parent / target), path
        assert path.name not in (SITE / "sitemap.xml").read_text(), path


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


def test_images_have_alt_text():
    silent = [
        f"{path.name}: {image.get('src')}"
        for path in pages()
        for image in page(path).select("article img")
        if len(image.get("alt", "")) < 20 or image["alt"].endswith((".svg", ".png"))
    ]
    assert not silent, "\n".join(silent)


def test_chapters_begin_with_their_devices():
    for name, chapter in chapters():
        first = chapter.select_one("div.cell_output").get_text().strip()
        told = re.match(r"JAX [\d.]+, \d+ .* devices", first)
        assert told, f"{name}: the setup cell prints no devices but {first[:80]!r}"


def test_callouts_look_like_callouts():
    plain = [
        f"{name}: {label.text} is plain text: begin its blockquote with it"
        for name, chapter in chapters()
        for label in chapter.find_all("strong", string=re.compile(CALLOUT))
        if not label.find_parent(class_=label.text.rstrip(".").lower())
    ]
    assert not plain, "\n".join(plain)


def test_folds_name_their_content():
    drawings = ".tag_hide-input:has(img):not(.tag_check, .tag_shared-setup)"
    contents = {drawings: "drawing's code", ".tag_check": "check"}
    contents |= {".tag_solution": "answer", ".tag_shared-setup": "setup"}
    for name, chapter in chapters():
        labels = [fold.get_text() for fold in chapter.select(".cell summary > p")]
        assert len({*labels}) == len(labels) > 0, f"{name}: two folds have one name"
        for cells, content in contents.items():
            for fold in chapter.select(f".cell{cells} > details"):
                show, hide = (label.get_text() for label in fold.summary("p"))
                assert show.startswith(f"Show the {content}"), name
                assert hide == show.replace("Show", "Hide", 1), name


def test_exercises_link_to_where_they_run():
    for name, chapter in chapters():
        exercises = chapter.select("section[id^='exercise-']")
        assert exercises, name
        for exercise in exercises:
            links = exercise.select("p.where a")
            assert [urlsplit(link["href"]).netloc for link in links] == [
                "colab.research.google.com",
                "kaggle.com",
            ], f"{name}: {exercise['id']}"


def test_downloads_carry_outputs():
    bare = []
    for name, chapter in chapters():
        text = (SITE / f"_sources/notebooks/{name}.ipynb").read_text()
        held = sum(bool(cell.get("outputs")) for cell in json.loads(text)["cells"])
        if held < len(chapter.select("div.cell_output")):
            bare.append(
                f"{name}.ipynb holds {held} outputs, its page more: build afresh"
            )
    assert not bare, "\n".join(bare)
