"""Test the rendered site in _build/html: links, figures, folds and outputs."""

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
    """Parse a page without the spans of highlighted code, which are most tags."""
    plain = re.sub("</?span[^>]*>", "", path.read_text())
    return BeautifulSoup(plain, "html.parser")


@cache
def anchors(path: Path) -> set[str]:
    return {tag["id"] for tag in page(path).find_all(id=True)}


def pages() -> list[Path]:
    found = sorted(SITE.glob("*.html")) + sorted(SITE.glob("[bn]*/*.html"))
    assert found, "the site is not built: run nox -s book"
    return [path for path in found if path not in MOVED]


def chapters() -> list[tuple[str, BeautifulSoup]]:
    return [(name, page(SITE / f"notebooks/{name}.html")) for name in CHAPTERS]


def test_internal_links_have_targets():
    broken = []
    for path in pages():
        for link in page(path).find_all("a", href=True):
            parts = urlsplit(link["href"])
            if parts.scheme or parts.netloc:
                continue
            base = SITE if parts.path.startswith(PREFIX) else path.parent
            relative = unquote(parts.path).removeprefix(PREFIX)
            target = (base / relative).resolve() if relative else path
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


def test_pages_have_metadata_and_are_in_the_sitemap():
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


def test_footer_has_the_version():
    version = re.search(r"## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text())[1]
    assert f"version: {version}" in (ROOT / "CITATION.cff").read_text()
    for path in [path for path in pages() if path != SITE / "index.html"]:
        footer = page(path).select_one("footer.bd-footer-content").get_text()
        assert re.search(rf"Version {version}, built with JAX [\d.]+ on", footer), path


def test_images_have_alt_text():
    missing = [
        f"{path.name}: {image.get('src')}"
        for path in pages()
        for image in page(path).select("article img")
        if len(image.get("alt", "")) < 20 or image["alt"].endswith((".svg", ".png"))
    ]
    assert not missing, "\n".join(missing)


def test_formulas_are_complete():
    """Each element of MathML has the number of children that it needs."""
    needed = {"msup": 2, "msub": 2, "mfrac": 2, "munder": 2, "mover": 2, "mroot": 2}
    needed |= {"msubsup": 3, "munderover": 3}
    found = [(path, tag) for path in pages() for tag in page(path).find_all([*needed])]
    assert len(found) > 100
    for path, tag in found:
        assert len(tag.find_all(recursive=False)) == needed[tag.name], (path, tag)


def test_setup_prints_the_devices():
    for name, chapter in chapters():
        first = chapter.select_one("div.cell_output").get_text().strip()
        found = re.match(r"JAX [\d.]+, \d+ .* devices", first)
        assert found, f"{name}: the setup cell prints {first[:80]!r}, not the devices"


def test_callouts_have_their_class():
    plain = [
        f"{name}: {label.text} does not begin its blockquote or paragraph"
        for name, chapter in chapters()
        for label in chapter.find_all("strong", string=re.compile(CALLOUT))
        if not label.find_parent(class_=label.text.rstrip(".").lower())
    ]
    assert not plain, "\n".join(plain)


def test_labels_of_folds_name_their_content():
    drawings = ".tag_hide-input:has(img):not(.tag_check, .tag_shared-setup)"
    contents = {drawings: "drawing's code", ".tag_check": "check"}
    contents |= {".tag_solution": "answer", ".tag_shared-setup": "setup"}
    for name, chapter in chapters():
        labels = [fold.get_text() for fold in chapter.select(".cell summary > p")]
        assert len({*labels}) == len(labels) > 0, f"{name}: two folds have one label"
        for cells, content in contents.items():
            for fold in chapter.select(f".cell{cells} > details"):
                show, hide = (label.get_text() for label in fold.summary("p"))
                assert show.startswith(f"Show the {content}"), name
                assert hide == show.replace("Show", "Hide", 1), name


def test_exercises_link_to_colab_and_kaggle():
    for name, chapter in chapters():
        exercises = chapter.select("section[id^='exercise-']")
        assert exercises, name
        for exercise in exercises:
            links = exercise.select("p.where a")
            assert [urlsplit(link["href"]).netloc for link in links] == [
                "colab.research.google.com",
                "kaggle.com",
            ], f"{name}: {exercise['id']}"


def test_downloads_have_outputs():
    missing = []
    for name, chapter in chapters():
        text = (SITE / f"_sources/notebooks/{name}.ipynb").read_text()
        found = sum(bool(cell.get("outputs")) for cell in json.loads(text)["cells"])
        if found < len(chapter.select("div.cell_output")):
            missing.append(f"{name}.ipynb has {found} outputs, its page more: rebuild")
    assert not missing, "\n".join(missing)
