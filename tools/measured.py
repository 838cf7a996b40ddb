"""What a run measured, kept in book/measured for the pages that show it."""

import datetime
import json

from pair import ROOT


def earlier(name: str) -> dict:
    """What an earlier run found, or nothing."""
    path = ROOT / f"book/measured/{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def record(name: str, numbers: dict) -> None:
    """Keep what a run found in book/measured, with its date, for the status page."""
    path = ROOT / f"book/measured/{name}.json"
    when = {"recorded": f"{datetime.date.today()}"}
    path.write_text(json.dumps(when | numbers, indent=1) + "\n")
