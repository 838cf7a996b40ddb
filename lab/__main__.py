"""Measure what a page shows: `nox -s lab -- NAME [PART ...] [--record]`.

A measurement is a module of this folder, or tools/mutants.py, with

    measure(*words)   yields parts: a name, and what was found, as plain data
    files(part)       the files that a part measures, from the root of the repository
    versions()        what it was measured with, by name
    cell(parts)       the text of book/cells/recorded_NAME.py, if chapters show it
    same(kept, found) whether two results agree; without it they must be equal

`--record` keeps each part in book/measured as soon as it is found. Without it, what was
found is compared with what is kept.
"""

import importlib
import operator
import subprocess
import sys
from pathlib import Path

import record

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / folder) for folder in ("tools", "book")]


def measurements() -> list[str]:
    """The names of all measurements."""
    modules = [p for p in HERE.glob("*.py") if "\ndef measure(" in p.read_text()]
    return sorted([path.stem for path in modules] + ["mutants"])


def write_cell(name: str, text: str) -> None:
    """Write the cell by which chapters show a record, in the layout that ruff gives."""
    path = record.ROOT / f"book/cells/recorded_{name}.py"
    path.write_text(text)
    layout = ["pre-commit", "run", "ruff-format", "--files", path]
    subprocess.run(layout, stdout=subprocess.DEVNULL)  # it complains of what it mends
    print(f"wrote {path.relative_to(record.ROOT)}: now run nox -s pair")


def main(name: str = "", *words: str) -> str | None:
    """Measure by name; keep what is found, or say what is not as it was kept."""
    if name not in measurements():
        return f"usage: nox -s lab -- NAME [PART ...] [--record]; {measurements()}"
    lab = importlib.import_module(name)
    same = getattr(lab, "same", operator.eq)
    parts = [word for word in words if word != "--record"]
    kept, differ = record.read(name), []
    try:
        for part, found in lab.measure(*parts):
            if "--record" in words:
                record.keep(name, part, found, lab.files(part), lab.versions())
                print(f"{part}: kept in book/measured/{name}.json", flush=True)
            elif part not in kept or not same(kept[part]["found"], found):
                differ.append(part)
                known = kept.get(part, {}).get("found")
                print(f"{part}: found {found},\n  kept {known}", flush=True)
            else:
                print(f"{part}: as recorded", flush=True)
    finally:
        if "--record" in words and hasattr(lab, "cell"):
            write_cell(name, lab.cell(record.read(name)))
    return f"not as recorded: {', '.join(differ)}" if differ else None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
