"""Run stale pages with nbmake and cache their outputs for the builder.

`nox -s book` and `nox -s tests` both start with this. Each stale page is copied as a
notebook into a temporary folder that mirrors the repository, and nbmake runs the copies
in parallel. The outputs of pages that pass are stored in the cache that MyST-NB reads,
so the site shows exactly the cells that were tested.

A page is stale if jupyter-cache finds that its code has changed, or if there is a new
version of Python, of a file that its front matter lists under `reads`, or of a package
that can change a number or a figure.
"""

import hashlib
import os
import platform
import re
import sys
import tempfile
from contextlib import chdir
from glob import glob
from itertools import pairwise
from pathlib import Path

import nbformat
import psutil
import pytest
import yaml
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn, JupyterCacheAbstract
from jupyter_cache.cache.db import NbCacheRecord
from jupyter_cache.readers import get_reader
from nbformat import NotebookNode
from pair import ROOT

CACHE = ROOT / "_build/.jupyter_cache"
DOCTREES = ROOT / "_build/.doctrees"
TIMEOUT = yaml.safe_load((ROOT / "_config.yml").read_text())["execute"]["timeout"]
PINS = re.compile(
    r"^(?:jax|jaxlib|numpy|flax|optax|orbax-checkpoint|grain|equinox|keras|matplotlib"
    r"|scikit-learn)==\S+",
    re.MULTILINE,
)
PROFILE = ROOT / "_build/ipython"  # replaces the user's own IPython settings
READ = get_reader({"name": "myst_nb_md", "type": "plugin"})
# Pages that start several processes mostly wait, so two cores run three pages at once.
WORKERS = (os.cpu_count() or 2) * 3 // 2


def pages() -> list[Path]:
    """Return the pages with code, except those that every build executes itself."""
    found = [*(ROOT / "book").glob("*.md"), *(ROOT / "notebooks").glob("*.md")]
    texts = {path: path.read_text() for path in found}
    return sorted(
        path
        for path, text in texts.items()
        if "{code-cell}" in text and "execution_mode: force" not in text
    )


def digest(*parts: str) -> str:
    """Return a digest of the given texts."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def inputs(page: Path) -> str:
    """Return a digest of what the outputs of a page depend on, besides its code."""
    head = next(yaml.safe_load_all(page.read_text()))
    patterns = [str(page.parent / pattern) for pattern in head.get("reads", [])]
    files = sorted(file for pattern in patterns for file in glob(pattern))
    pins = PINS.findall((ROOT / "requirements.lock").read_text())
    texts = [Path(file).read_text() for file in files]
    return digest(platform.python_version(), *pins, *texts)


def mirror(folder: Path, stale: list[Path]) -> dict[str, Path]:
    """Write stale pages as notebooks, and link all files that a page may read.

    Return the page of each notebook, keyed by the notebook's path in the folder.
    """
    book = [path for path in (ROOT / "book").iterdir() if path.suffix != ".md"]
    for path in [ROOT / "conftest.py", ROOT / "lab", ROOT / "launch", *book]:
        link = folder / path.relative_to(ROOT)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(path)
    (folder / "notebooks").mkdir()
    copies = {}
    for page in stale:
        copy = page.relative_to(ROOT).with_suffix(".ipynb")
        nbformat.write(READ(str(page)), folder / copy)
        copies[str(copy)] = page
    return copies


def faults(notebook: NotebookNode) -> str:
    """Return what a page wrote to stderr, or where it stopped.

    nbmake does not report an error whose traceback a page has replaced by a message.
    """
    cells = [c for c in notebook.cells if c.cell_type == "code" and c.source.strip()]
    for before, cell in pairwise(cells):
        if cell.execution_count is None:
            return f"stopped in this cell:\n{before.source}"
    outputs = [out for cell in cells for out in cell.outputs]
    text = "".join(out.text for out in outputs if out.get("name") == "stderr")
    return text and f"wrote to stderr:\n{text}"


class CacheOutputs:
    """A pytest plugin that caches the outputs of each page as soon as it passes."""

    def __init__(self, folder: Path, copies: dict[str, Path]) -> None:
        self.folder, self.copies = folder, copies
        self.cache = get_cache(CACHE)
        self.faults: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" or not report.passed:
            return
        copy = report.nodeid.partition("::")[0]
        page = self.copies[copy]
        executed = nbformat.read(self.folder / copy, nbformat.NO_CONVERT)
        if text := faults(executed):
            self.faults.append(f"{page} {text}")
            return
        notebook = READ(str(page))  # the cache key depends on its source and metadata
        notebook.metadata["language_info"] = executed.metadata["language_info"]
        for cell, ran in zip(notebook.cells, executed.cells, strict=True):
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = ran.outputs, ran.execution_count
        data = {"text": digest(page.read_text()), "inputs": inputs(page)}
        data["execution_seconds"] = report.duration
        bundle = CacheBundleIn(nb=notebook, uri=str(page), data=data)
        self.cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
        doctree = DOCTREES / page.relative_to(ROOT).with_suffix(".doctree")
        doctree.unlink(missing_ok=True)  # so that the builder reads the page again

    def pytest_keyboard_interrupt(self) -> None:
        for worker in psutil.Process().children():
            worker.kill()  # a kernel ends with its worker


def is_stale(cache: JupyterCacheAbstract, page: Path, cached: NbCacheRecord | None):
    """Return whether the cached outputs are missing, or from other code or inputs.

    A page is parsed, which takes time, only if its text has changed.
    """
    if cached is None or cached.data.get("text") != digest(page.read_text()):
        try:
            cached = cache.match_cache_notebook(READ(str(page)))
        except KeyError:
            return True
    if cached.data.get("inputs") == inputs(page):
        return False
    cache.remove_cache(cached.pk)
    return True


def main() -> int | str:
    """Run the stale pages; return pytest's status, or the faults of pages."""
    cache = get_cache(CACHE)
    cached = {record.uri: record for record in cache.list_cache_records()}
    stale = [page for page in pages() if is_stale(cache, page, cached.get(str(page)))]
    print(f"{len(stale)} of {len(pages())} pages are stale.", flush=True)
    if not stale:
        return 0
    settings = PROFILE / "profile_default/ipython_kernel_config.py"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text("c.IPKernelApp.log_level = 40  # no warning for each kernel\n")
    os.environ["IPYTHONDIR"] = str(PROFILE)
    with tempfile.TemporaryDirectory(prefix="pages-") as name:
        plugin = CacheOutputs(Path(name), mirror(Path(name), stale))
        nbmake = ["--nbmake", f"--nbmake-timeout={TIMEOUT}", "--overwrite"]
        parallel = [f"-n{min(WORKERS, len(stale))}", "--dist=worksteal"]
        shown = ["-v", "--durations=10", "-p", "no:cacheprovider"]
        with chdir(name):
            args = [*nbmake, *parallel, *shown, "--rootdir=.", "."]
            status = pytest.main(args, plugins=[plugin])
    return "\n".join(plugin.faults) or int(status)


if __name__ == "__main__":
    sys.exit(main())
