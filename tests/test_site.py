"""The rendered site in _build/html: whole, self-contained, and with its results.

Run by `nox -s book`, but for the downloads, and in full by `nox -s publish`.
"""

import json
import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup
from twins import ROOT

SITE = ROOT / "_build/html"
CHAPTERS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.md"))


@cache
def page(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text(), "html.parser")


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


def test_internal_links_lead_somewhere():
    broken = []
    for path in pages():
        for link in page(path).find_all("a", href=True):
            parts = urlsplit(link["href"])
            if parts.scheme or parts.netloc:
                continue
            target = (
                (path.parent / unquote(parts.path)).resolve() if parts.path else path
            )
            if not target.is_file():
                broken.append(f"{path.name}: {link['href']}")
            elif target.suffix == ".html" and parts.fragment:
                if not page(target).find(id=unquote(parts.fragment)):
                    broken.append(f"{path.name}: {link['href']}")
    assert not broken, "\n".join(broken)


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
def test_download_carries_outputs(name):
    notebook = json.loads((SITE / f"_sources/notebooks/{name}.ipynb").read_text())
    assert sum(bool(cell.get("outputs")) for cell in notebook["cells"]) >= 10
