"""Three chapters as a reader works through them in JupyterLab: run by `nox -s site`."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from pair import FOLDED, ROOT
from playwright.sync_api import Locator, Page, expect
from published import SITE

pytestmark = pytest.mark.chromium  # it reads a program of others, not the book's pages

CHAPTERS = ["06_data_parallel_regression", "09_shardings", "12_shard_map"]
SETTINGS = {  # a long notebook stands in the page as a whole, and no news before it
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false"},
}
UNRENDERED = r"\$|\*\*|`|\{[\w:-]+\}|:::|\]\(|^#+ |^\|"
PROSE = """cell => {
  const copy = cell.querySelector('.jp-RenderedMarkdown').cloneNode(true);
  copy.querySelectorAll('code, mjx-container').forEach(part => part.remove());
  return copy.textContent;
}"""
ROOM = "image => image.getBoundingClientRect().width"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The folder that a JupyterLab serves, its address, and what follows a name in it."""
    home = tmp_path_factory.mktemp("lab")
    notebooks = home / "notebooks"
    notebooks.mkdir()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy(path, notebooks)
    for name, values in SETTINGS.items():
        path = home / f"lab/user-settings/@jupyterlab/{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    folders = ["JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"]
    env = os.environ | dict.fromkeys(folders, str(home))
    options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0"]
    command = [sys.executable, "-m", "jupyterlab", *options, notebooks]
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as server:
        about = home / f"jpserver-{server.pid}.json"
        while not about.exists():
            assert server.poll() is None, "JupyterLab ended"
            time.sleep(0.1)
        told = json.loads(about.read_text())
        yield notebooks, told["url"], f"?token={told['token']}"
        server.terminate()


@pytest.fixture
def opened(lab, browser):
    """A function that opens a notebook; returns its cells, as written and in the page."""
    notebooks, address, token = lab
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:

        def open_notebook(name: str) -> tuple[Page, list, list[Locator]]:
            written = nbformat.read(notebooks / name, as_version=4).cells
            page = context.new_page()
            page.goto(f"{address}lab/tree/{name}{token}")
            cells = page.locator(".jp-Notebook .jp-Cell")
            expect(cells).to_have_count(len(written), timeout=60_000)
            return page, written, cells.all()

        yield open_notebook


def run_all(page: Page) -> None:
    """Choose *Run All Cells* and wait for the kernel to be done."""
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    state = page.locator(".jp-Notebook-ExecutionIndicator")
    expect(state).to_have_attribute("data-status", "busy", timeout=60_000)
    expect(state).to_have_attribute("data-status", "idle", timeout=120_000)
