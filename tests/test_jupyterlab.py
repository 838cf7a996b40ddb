"""Work through two chapters in JupyterLab as a reader does: `nox -s site`."""

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
from playwright.sync_api import Page, expect

CHAPTERS = ["06_data_parallel_regression", "09_shardings"]
SETTINGS = {  # render all cells, and show no dialog
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false"},
}
UNRENDERED = r"\$|\*\*|`|\{[\w:-]+\}|:::|\]\(|^#+ |^\||^- "
OUTPUT = ".jp-OutputArea-output"
FIGURE = ":is(img, [role=img])"
FAILURES = {f"application/vnd.jupyter.{kind}" for kind in ("error", "stderr")}
CELLS = """cells => cells.map(cell => {
  const editor = cell.querySelector('.jp-InputArea-editor');
  const prose = cell.querySelector('.jp-RenderedMarkdown')?.cloneNode(true);
  prose?.querySelectorAll('code, mjx-container').forEach(part => part.remove());
  return {
    shows_code: editor?.checkVisibility(),
    prose: prose?.textContent ?? '',
    outputs: [...cell.querySelectorAll('[data-mime-type]')]
      .map(output => output.dataset.mimeType),
  };
})"""
WIDTHS = "figures => figures.map(figure => figure.getBoundingClientRect().width)"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Serve a copy of the book in JupyterLab; yield its folder, address and token."""
    home, copy = tmp_path_factory.mktemp("lab"), tmp_path_factory.mktemp("book")
    for folder in ("notebooks", "book"):
        shutil.copytree(ROOT / folder, copy / folder)
    settings = home / "labconfig/default_setting_overrides.json"
    settings.parent.mkdir()
    settings.write_text(json.dumps(SETTINGS))
    folders = ["JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"]
    env = os.environ | dict.fromkeys(folders, str(home))
    options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0"]
    command = [sys.executable, "-m", "jupyterlab", *options, copy]
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as server:
        about = home / f"jpserver-{server.pid}.json"
        while not about.exists():
            assert server.poll() is None, "JupyterLab ended"
            time.sleep(0.1)
        server_info = json.loads(about.read_text())
        yield copy, server_info["url"], server_info["token"]
        server.terminate()


def run_all(browser, lab, name: str) -> tuple[Page, list]:
    """Open a notebook and run all cells; return its page and the cells of its file."""
    copy, address, token = lab
    written = nbformat.read(copy / name, as_version=4).cells
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(60_000)
    page.goto(f"{address}lab/tree/{name}?reset&token={token}")
    expect(page.locator(".jp-Notebook .jp-Cell")).to_have_count(len(written))
    expect(page.locator("#jp-main-statusbar")).to_contain_text("| Idle")
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    kernel = page.locator(".jp-Notebook-ExecutionIndicator")
    expect(kernel).to_have_attribute("data-status", "busy")
    expect(kernel).to_have_attribute("data-status", "idle", timeout=300_000)
    return page, written


def solve_an_exercise(page: Page, written: list) -> None:
    """Type the solution into the first exercise, and check both verdicts."""
    tags = [cell.metadata.get("tags", []) for cell in written]
    index = next(index for index, found in enumerate(tags) if "exercise" in found)
    stub, check = (page.locator(".jp-Notebook .jp-Cell").nth(index + i) for i in (0, 1))
    [name] = re.findall(r"^def (\w+)\(", written[index].source, re.MULTILINE)
    answer = written[index + 2].source.partition("\ncheck(")[0]
    expect(check.locator(OUTPUT)).to_contain_text("Open. Write your answer")
    stub.locator(".cm-content").click()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(f"{answer}\n{name} = answer")
    page.keyboard.press("Shift+Enter")  # runs the cell and selects the check
    page.keyboard.press("Shift+Enter")
    expect(check.locator(OUTPUT)).to_contain_text("Right.")


@pytest.mark.parametrize("name", CHAPTERS)
def test_chapter_in_jupyterlab(lab, browser, site, name):
    page, written = run_all(browser, lab, f"notebooks/{name}.ipynb")
    seen_cells = page.locator(".jp-Notebook .jp-Cell").evaluate_all(CELLS)
    for cell, seen in zip(written, seen_cells, strict=True):
        folded = any(tag in FOLDED for tag in cell.metadata.get("tags", []))
        assert not {*seen["outputs"]} & FAILURES, cell.source
        assert not re.findall(UNRENDERED, seen["prose"], re.MULTILINE), seen["prose"]
        if cell.cell_type == "code":
            assert seen["shows_code"] != folded, cell.source
            assert folded or not cell.source.startswith("# @title"), cell.source
    expect(page.locator("mjx-merror, mjx-container [style*='red']")).to_have_count(0)

    widths = page.locator(f"{OUTPUT} {FIGURE}").evaluate_all(WIDTHS)
    with browser.new_page() as on_site:
        on_site.goto(f"{site}notebooks/{name}.html")
        count = on_site.locator(f".cell_output {FIGURE}").count()
    assert len(widths) == count > 2 and min(widths) > 200, widths

    page.locator(".jp-InputPlaceholder").first.click()
    setup = page.locator(".jp-InputArea-editor", has_text="# @title Setup")
    expect(setup).to_be_visible()
    solve_an_exercise(page, written)

    link = page.locator(".jp-RenderedMarkdown a[href*='/files/']").last
    linked = Path(urlsplit(link.get_attribute("href")).path).name
    link.click()
    expect(page.get_by_role("tab", name=linked)).to_be_visible()


def test_without_jax_only_setup_fails_and_prints_what_to_install(lab, browser):
    folder = lab[0] / "without_jax"  # the kernels of other folders have imported JAX
    folder.mkdir()
    (folder / "jax.py").write_text('raise ModuleNotFoundError("No module named jax")\n')
    shutil.copy(lab[0] / f"notebooks/{CHAPTERS[1]}.ipynb", folder)
    page, _ = run_all(browser, lab, f"without_jax/{CHAPTERS[1]}.ipynb")
    failed = page.locator(OUTPUT).filter(has_text="Traceback (most recent")
    expect(failed.first).to_be_visible(timeout=60_000)
    page.wait_for_timeout(5000)  # in which other cells would fail
    expect(failed).to_have_count(1)
    expect(failed).to_contain_text("pip install -U jax flax optax")
