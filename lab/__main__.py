"""Measure what a page shows: `nox -s lab -- NAME [PART ...] [--record]`.

A measurement is a module of this folder, or tools/mutants.py, with

    measure(*words)   yields parts: a name and its result, as plain data
    files(part)       the files that a part measures, from the root of the repository
    versions()        the versions that it was measured with, by name
    cell(parts)       the text of book/cells/recorded_NAME.py, if chapters show it
    same(kept, found) whether two results agree; without it they must be equal

`--record` writes each part to book/measured as soon as it is found. Without it, each
result is compared with the record.
"""

import importlib
import operator
import subprocess
import sys
from pathlib import Path

import record

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / folder) for folder in ("tools", "book")]


def write_cell(name: str, text: str) -> None:
    """Write the cell by which chapters show a record, formatted by ruff."""
    path = record.ROOT / f"book/cells/recorded_{name}.py"
    path.write_text(text)
    subprocess.run(["pre-commit", "run", "ruff-format", "--files", path])
    print(f"wrote {path.relative_to(record.ROOT)}: now run nox -s pair")


def main(name: str = "", *words: str) -> str | None:
    """Measure; record the results, or return which parts differ from the record."""
    modules = [p.stem for p in HERE.glob("*.py") if "\ndef measure(" in p.read_text()]
    if name not in (names := sorted([*modules, "mutants"])):
        return f"usage: nox -s lab -- NAME [PART ...] [--record]; {names}"
    lab = importlib.import_module(name)
    same = getattr(lab, "same", operator.eq)
    kept, differ = record.read(name), []
    parts = [word for word in words if word != "--record"]
    try:
        for part, found in lab.measure(*parts):
            if "--record" in words:
                record.keep(name, part, found, lab.files(part), lab.versions())
                print(f"{part}: written to book/measured/{name}.json", flush=True)
            elif part in kept and same(kept[part]["found"], found):
                print(f"{part}: as recorded", flush=True)
            else:
                differ.append(part)
                known = kept.get(part, {}).get("found")
                print(f"{part}: found {found},\n  recorded {known}", flush=True)
    finally:  # what was recorded before an error is shown, too
        if "--record" in words and hasattr(lab, "cell"):
            write_cell(name, lab.cell(record.read(name)))
    return f"not as recorded: {', '.join(differ)}" if differ else None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
