"""Two chapters as a reader works through them in JupyterLab: run by `nox -s site`."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
import pytest
from pair import FOLDED, ROOT
from playwright.sync_api import Locator, Page, expect

pytestmark = pytest.mark.chromium  # it reads a program of others, not the book's pages

CHAPTERS = ["06_data_parallel_regression", "09_shardings"]
SETTINGS = {  # a long notebook stands in the page as a whole, and no news before it
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false"},
}
UNRENDERED = r"\$|\*\*|`|\{[\w:-]+\}|:::|\]\(|^#+ |^\||^- "
OUTPUT = ".jp-OutputArea-output"
FIGURE = ":is(img, [role=img])"
FAILURES = {f"application/vnd.jupyter.{kind}" for kind in ("error", "stderr")}
SEEN = """cells => cells.map(cell => {
  const editor = cell.querySelector('.jp-InputArea-editor');
  const prose = cell.querySelector('.jp-RenderedMarkdown')?.cloneNode(true);
  prose?.querySelectorAll('code, mjx-container').forEach(part => part.remove());
  return {
    code: editor?.checkVisibility() ? editor.innerText : null,
    prose: prose?.textContent,
    kinds: [...cell.querySelectorAll('[data-mime-type]')]
      .map(output => output.dataset.mimeType),
  };
})"""
WIDTHS = "figures => figures.map(figure => figure.getBoundingClientRect().width)"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A copy of the book that a JupyterLab serves, its address and its token."""
    home, copy = tmp_path_factory.mktemp("lab"), tmp_path_factory.mktemp("book")
    for folder in ("notebooks", "book"):
        shutil.copytree(ROOT / folder, copy / folder)
    for name, values in SETTINGS.items():
        path = home / f"lab/user-settings/@jupyterlab/{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    folders = ["JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"]
    env = os.environ | dict.fromkeys(folders, str(home))
    options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0"]
    command = [sys.executable, "-m", "jupyterlab", *options, copy]
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as server:
        about = home / f"jpserver-{server.pid}.json"
        while not about.exists():
            assert server.poll() is None, "JupyterLab ended"
            time.sleep(0.1)
        told = json.loads(about.read_text())
        yield copy, told["url"], told["token"]
        server.terminate()


@pytest.fixture
def opened(lab, browser):
    """A function that opens a notebook; returns its page and its cells as written."""
    copy, address, token = lab
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:

        def open_notebook(name: str) -> tuple[Page, list]:
            written = nbformat.read(copy / name, as_version=4).cells
            page = context.new_page()
            page.goto(f"{address}lab/tree/{name}?reset&token={token}")
            cells = page.locator(".jp-Notebook .jp-Cell")
            expect(cells).to_have_count(len(written), timeout=60_000)
            return page, written

        yield open_notebook


def run_all(page: Page) -> None:
    """Choose *Run All Cells* and wait until the kernel is done."""
    expect(page.locator("#jp-main-statusbar")).to_contain_text("| Idle", timeout=60_000)
    kernel = page.locator(".jp-Notebook-ExecutionIndicator")
    expect(kernel).to_have_attribute("data-status", "idle", timeout=60_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    expect(kernel).to_have_attribute("data-status", "busy", timeout=60_000)
    expect(kernel).to_have_attribute("data-status", "idle", timeout=300_000)


def is_furniture(tags: set[str]) -> bool:
    """Whether a reader meets a cell with these tags folded."""
    shared = any(tag.startswith("shared-") for tag in tags)
    return shared or bool(tags & {*FOLDED, "check", "solution"})


def solve(page: Page, cells: Locator, written: list, place: int) -> None:
    """Fill in the stub at a place, wrong and then right, and read the two verdicts."""
    stub, check = cells.nth(place), cells.nth(place + 1)
    [name] = re.findall(r"^def (\w+)\(", written[place].source, re.MULTILINE)
    solution = written[place + 2].source
    answers, calls = re.split(r"^(?=check\()", solution, flags=re.MULTILINE)
    expect(check.locator(OUTPUT)).to_contain_text("Open. Write your answer")
    [wrong, *_] = re.findall(r"reject\(check, (\w+)\)", calls)
    for answer, words in [(wrong, "Not yet."), ("answer", "Right.")]:
        stub.locator(".cm-content").click()
        page.keyboard.press("Control+A")
        page.keyboard.insert_text(f"{answers}{name} = {answer}")
        page.keyboard.press("Shift+Enter")  # it runs, and goes on to the check
        page.keyboard.press("Shift+Enter")
        expect(check.locator(OUTPUT)).to_contain_text(words, timeout=30_000)


@pytest.mark.parametrize("name", CHAPTERS)
def test_chapter_in_jupyterlab(lab, opened, site, name):
    page, written = opened(f"notebooks/{name}.ipynb")
    run_all(page)
    cells = page.locator(".jp-Notebook .jp-Cell")
    for cell, seen in zip(written, cells.evaluate_all(SEEN)):
        assert not {*seen["kinds"]} & FAILURES, cell.source
        if cell.cell_type == "markdown":
            left = re.findall(UNRENDERED, seen["prose"], re.MULTILINE)
            assert not left, (left, seen["prose"])
        else:
            folded = is_furniture({*cell.metadata.get("tags", [])})
            assert (seen["code"] is None) == folded, cell.source
            assert folded or not cell.source.startswith("# @title"), cell.source
    unknown = page.locator("mjx-merror, mjx-container [style*='color: red']")
    expect(unknown).to_have_count(0)

    widths = page.locator(f"{OUTPUT} {FIGURE}").evaluate_all(WIDTHS)
    on_site = page.context.new_page()
    on_site.goto(f"{site}notebooks/{name}.html")
    count = on_site.locator(f".cell_output {FIGURE}").count()
    assert len(widths) == count > 2 and min(widths) > 200, widths

    page.locator(".jp-InputPlaceholder").first.click()
    opened_setup = page.locator(".jp-InputArea-editor", has_text="# @title Setup")
    expect(opened_setup).to_be_visible()

    for place, cell in enumerate(written):
        if "exercise" in cell.metadata.get("tags", []):
            solve(page, cells, written, place)

    links = page.locator(".jp-RenderedMarkdown a[href*='/files/']")
    assert links.count() > 3
    for link in links.all():
        path = urlsplit(link.get_attribute("href")).path.partition("/files/")[2]
        assert (lab[0] / path).exists(), path
    links.last.click()
    expect(page.get_by_role("tab", name=Path(path).name)).to_be_visible()


def test_without_jax_the_setup_alone_fails_and_says_what_to_do(lab, opened):
    folder = lab[0] / "without_jax"  # where no kernel runs that has JAX already
    folder.mkdir()
    (folder / "jax.py").write_text('raise ModuleNotFoundError("No module named jax")\n')
    shutil.copy(lab[0] / f"notebooks/{CHAPTERS[1]}.ipynb", folder)
    page, _ = opened(f"without_jax/{CHAPTERS[1]}.ipynb")
    run_all(page)
    failed = page.locator(OUTPUT).filter(has_text="Traceback (most recent")
    expect(failed.first).to_be_visible(timeout=60_000)
    page.wait_for_timeout(5000)  # in which others would come
    expect(failed).to_have_count(1)
    expect(failed).to_contain_text("pip install -U jax flax optax")
