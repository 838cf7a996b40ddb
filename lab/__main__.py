"""Measure what pages show: `nox -s lab -- NAME [PART ...] [--record]`.

A measurement is a module of this folder, or tools/mutants.py, with

    measure(*parts)        yield the name and the result of these parts, or of all
    files(part)            return the measured files, relative to the repository
    versions()             return the versions used, by name
    cell(parts)            return the text of book/cells/recorded_NAME.py (optional)
    same(recorded, found)  return whether two results agree (optional; default: ==)

`--record` writes each part to book/measured as soon as it is measured. Without it, each
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
    """Write the shared cell that shows a record in chapters, formatted by ruff."""
    path = record.ROOT / f"book/cells/recorded_{name}.py"
    path.write_text(text)
    subprocess.run(["pre-commit", "run", "ruff-format", "--files", path])
    print(f"wrote {path.relative_to(record.ROOT)}: now run nox -s pair")


def main(name: str = "", *args: str) -> str | None:
    """Measure; record the results, or return a message with the parts that differ."""
    modules = [p.stem for p in HERE.glob("*.py") if "\ndef measure(" in p.read_text()]
    if name not in (names := sorted([*modules, "mutants"])):
        return f"usage: nox -s lab -- NAME [PART ...] [--record]; {names}"
    lab = importlib.import_module(name)
    same = getattr(lab, "same", operator.eq)
    recorded, differ = record.read(name), []
    parts = [arg for arg in args if arg != "--record"]
    try:
        for part, found in lab.measure(*parts):
            if "--record" in args:
                record.save(name, part, found, lab.files(part), lab.versions())
                print(f"{part}: written to book/measured/{name}.json", flush=True)
            elif part in recorded and same(recorded[part]["found"], found):
                print(f"{part}: as recorded", flush=True)
            else:
                differ.append(part)
                old = recorded.get(part, {}).get("found")
                print(f"{part}: found {found},\n  recorded {old}", flush=True)
    finally:  # after an error, write the parts that were recorded before it
        if "--record" in args and hasattr(lab, "cell"):
            write_cell(name, lab.cell(record.read(name)))
    return f"not as recorded: {', '.join(differ)}" if differ else None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
