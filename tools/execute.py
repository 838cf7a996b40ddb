"""Run the pages that have changed, several at a time, and keep what comes out of them.

`nox -s book` does this before it renders, and `nox -s tests` instead of running every
chapter again: whichever comes first does the work for both. The builder itself runs one
page at a time, and looks at a page's own code only. Here a page is also run again when
a file has changed that it names under `reads` at its head, the lock of all packages, or
Python.
"""

import json
import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

import yaml
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from jupyter_cache.executors.utils import ExecutionResult, single_nb_execution
from kernels import PreparedKernelManager
from versions import REPORTS, versions
from record import ROOT, earlier, text_digest
from myst_nb.core.read import myst_nb_reader_plugin
from nbformat import NotebookNode

CACHE = ROOT / "_build/.jupyter_cache"
LIMIT = yaml.safe_load((ROOT / "_config.yml").read_text())["execute"]["timeout"]
AT_ONCE = os.cpu_count() + 1  # some pages do little but wait for their processes


def pages() -> list[Path]:
    """The pages with code, but the one that each build runs; those that may take
    longest first."""
    seconds = earlier("legs")["tests"]["chapters"]
    found = [*(ROOT / "book").glob("*.md"), *(ROOT / "notebooks").glob("*.md")]
    texts = {path: path.read_text() for path in found}
    found = [path for path, text in texts.items() if "{code-cell}" in text]
    found = [path for path in found if "execution_mode: force" not in texts[path]]
    return sorted(found, key=lambda path: -seconds.get(path.stem, LIMIT))


def run(path: Path, notebook: NotebookNode) -> ExecutionResult:
    """Run all cells of a page in its folder."""
    return single_nb_execution(
        notebook,
        str(path.parent),
        LIMIT,
        allow_errors=False,
        kernel_manager_class=PreparedKernelManager,
    )


def complaints(notebook: NotebookNode) -> str:
    """What a page wrote to stderr, which the builder would not take."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    return "".join(out.text for out in outputs if out.get("name") == "stderr")


def inputs(path: Path) -> str:
    """Python's version, and digests of the lock and of the files that a page reads."""
    head = next(yaml.safe_load_all(path.read_text()))
    files = [ROOT / "requirements.lock"]
    for pattern in head.get("reads", []):
        files += sorted(map(Path, glob(str(path.parent / pattern))))
    return " ".join([platform.python_version(), *map(text_digest, files)])


def kept(cache, path: Path, notebook: NotebookNode) -> float | None:
    """The seconds that a page took, if the cache has it with its inputs of today."""
    try:
        record = cache.match_cache_notebook(notebook)
    except KeyError:
        return None
    return (
        record.data["execution_seconds"]
        if record.data.get("inputs") == inputs(path)
        else None
    )


def main() -> str | None:
    """Run what the cache does not have; name the pages that fail."""
    cache = get_cache(CACHE)
    notebooks = {path: myst_nb_reader_plugin(str(path)) for path in pages()}
    seconds = {path: kept(cache, path, book) for path, book in notebooks.items()}
    wanted = [path for path, took in seconds.items() if took is None]
    failed = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = pool.map(run, wanted, map(notebooks.get, wanted))
        for path, result in zip(wanted, results):
            if problem := result.exc_string or complaints(result.nb):
                print(f"{path}\n{problem}", flush=True)
                failed.append(path.name)
                continue
            print(f"{path.stem}: {result.time:.1f} s", flush=True)
            seconds[path] = result.time
            path.touch()  # so that the builder reads it again
            data = {"execution_seconds": result.time, "inputs": inputs(path)}
            bundle = CacheBundleIn(result.nb, str(path), data=data)
            cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
    if failed:
        return f"failed: {', '.join(failed)}"
    print(f"All {len(seconds)} pages hold; {len(wanted)} of them were run now.")
    chapters = {
        p.stem: round(s, 1) for p, s in seconds.items() if p.parent.stem == "notebooks"
    }
    REPORTS.mkdir(parents=True, exist_ok=True)
    leg = versions() | {"chapters": dict(sorted(chapters.items()))}
    (REPORTS / "tests.json").write_text(json.dumps(leg))
    return None


if __name__ == "__main__":
    sys.exit(main())
