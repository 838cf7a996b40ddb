"""Run the pages that have changed, several at a time, into the cache of the build.

`nox -s book` does this before it renders: the builder itself runs one page at a time,
and looks at a page's own code only. Here a page is also run again when a file has
changed that it names under `reads` at its head, or the lock of all packages.
"""

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from glob import glob
from pathlib import Path

import yaml
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from jupyter_cache.executors.utils import ExecutionResult, single_nb_execution
from measured import ROOT, earlier, text_digest
from myst_nb.core.read import myst_nb_reader_plugin

CACHE = ROOT / "_build/.jupyter_cache"
LIMIT = yaml.safe_load((ROOT / "_config.yml").read_text())["execute"]["timeout"]


def pages() -> list[Path]:
    """The pages with code, but the one that each build runs; the longest first."""
    seconds = earlier("legs")["tests"]["chapters"]
    found = [*(ROOT / "notebooks").glob("*.md"), *(ROOT / "book").glob("*.md")]
    texts = {path: path.read_text() for path in found}
    found = [path for path, text in texts.items() if "{code-cell}" in text]
    found = [path for path in found if "execution_mode: force" not in texts[path]]
    return sorted(found, key=lambda path: -seconds.get(path.stem, 30))


def run(path: Path) -> ExecutionResult:
    """Run all cells of a page in its folder, with a compilation cache of its own."""
    if folder := os.environ.get("KEEP_COMPILED_IN"):
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(folder, path.stem))
    notebook = myst_nb_reader_plugin(str(path))
    return single_nb_execution(notebook, str(path.parent), LIMIT, allow_errors=False)


def inputs(path: Path) -> str:
    """The digests of the files that a page reads, and of the lock."""
    head = next(yaml.safe_load_all(path.read_text()))
    files = [ROOT / "requirements.lock"]
    for pattern in head.get("reads", []):
        files += sorted(map(Path, glob(str(path.parent / pattern))))
    return " ".join(map(text_digest, files))


def is_kept(cache, path: Path) -> bool:
    """Whether the cache has what comes out of a page and its inputs as they stand."""
    try:
        record = cache.match_cache_notebook(myst_nb_reader_plugin(str(path)))
    except KeyError:
        return False
    return record.data.get("inputs") == inputs(path)


def main() -> str | None:
    """Run what the cache does not have; name the pages that fail."""
    cache = get_cache(CACHE)
    wanted = [path for path in pages() if not is_kept(cache, path)]
    failed = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for path, result in zip(wanted, pool.map(run, wanted)):
            if result.err:
                print(f"{path}\n{result.exc_string}")
                failed.append(path.name)
                continue
            print(f"{path.stem}: {result.time:.1f} s", flush=True)
            path.touch()  # so that the builder reads it again
            data = {"execution_seconds": result.time, "inputs": inputs(path)}
            bundle = CacheBundleIn(result.nb, str(path), data=data)
            cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
    return f"failed: {', '.join(failed)}" if failed else None


if __name__ == "__main__":
    sys.exit(main())
