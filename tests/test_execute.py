"""What of the pages is run, and what was kept of an earlier run."""

import json
from multiprocessing import forkserver

import execute
import record
import pytest

PAGE = """---
reads: [numbers/*.json]
kernelspec: {{name: python3}}
---

# A page

```{{code-cell}} ipython3
{code}
```
"""


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A book of one page with code that reads one file, and a page without code."""
    for folder in ("book/measured", "notebooks/numbers"):
        (tmp_path / folder).mkdir(parents=True)
    legs = {"tests": {"chapters": {"one": 1.0}}}
    (tmp_path / "book/measured/legs.json").write_text(json.dumps(legs))
    (tmp_path / "requirements.lock").write_text("some==1")
    (tmp_path / "notebooks/numbers/few.json").write_text("[1]")
    (tmp_path / "notebooks/one.md").write_text(PAGE.format(code="print('seen')"))
    (tmp_path / "book/plain.md").write_text("# No code\n")
    for module in (execute, measured):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(execute, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(execute, "REPORTS", tmp_path / "legs")
    monkeypatch.setattr(execute, "versions", dict)
    return tmp_path


def run_again(capsys) -> tuple[str | None, str]:
    """What execute answers, and its last line."""
    answer = execute.main()
    return answer, capsys.readouterr().out.splitlines()[-1]


def test_a_page_is_run_when_what_it_depends_on_changes(book, capsys):
    ran, rested = (f"All 1 pages hold; {n} of them were run now." for n in (1, 0))
    assert run_again(capsys) == (None, ran)
    leg = json.loads((book / "legs/tests.json").read_text())
    assert list(leg["chapters"]) == ["one"] and leg["chapters"]["one"] > 0
    assert run_again(capsys) == (None, rested)
    page = book / "notebooks/one.md"
    page.write_text(page.read_text().replace("# A page", "# The page"))
    assert run_again(capsys) == (None, rested)  # its code is what it was
    for file, text in {
        "notebooks/one.md": PAGE.format(code="print('another')"),
        "notebooks/numbers/few.json": "[1, 2]",
        "notebooks/numbers/more.json": "[3]",
        "requirements.lock": "some==2",
    }.items():
        (book / file).write_text(text)
        assert run_again(capsys) == (None, ran), file
        assert run_again(capsys) == (None, rested), file


BEGINS = """import sys
loaded = {"jax", "orbax.checkpoint"} <= set(sys.modules)
import jax
jax.config.update("jax_num_cpu_devices", 3)
import matplotlib.pyplot as plt
plt.plot([1, 2])
print(loaded, jax.device_count(), *[path for path in sys.path if "tools" in path])"""


def test_a_kernel_begins_with_the_imports_and_without_devices(book):
    """A page chooses its devices still, and shows its figures as in any notebook."""
    forkserver._forkserver._stop()  # another test may have started it, for itself
    page = book / "notebooks/one.md"
    page.write_text(PAGE.format(code=BEGINS))
    read = execute.myst_nb_reader_plugin(str(page))
    [cell] = [c for c in execute.run(page, read).nb.cells if c.cell_type == "code"]
    [printed] = [out.text for out in cell.outputs if out.output_type == "stream"]
    assert printed == "True 3\n"
    assert any("image/png" in out.get("data", {}) for out in cell.outputs)


@pytest.mark.parametrize(
    "code, said",
    [
        ("assert 1 + 1 == 3, 'a wrong sum'", "a wrong sum"),
        ("import sys; print('a complaint', file=sys.stderr)", "a complaint"),
    ],
)
def test_a_page_that_fails_or_complains_is_named_and_not_kept(book, capsys, code, said):
    (book / "notebooks/one.md").write_text(PAGE.format(code=code))
    for _ in range(2):
        answer = execute.main()
        assert answer == "failed: one.md"
        assert said in capsys.readouterr().out
    assert not (book / "legs/tests.json").exists()
