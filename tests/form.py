"""What the tests of a page that calculates share: its form, its script, its chapter."""

import __future__

import ast
import re
from collections.abc import Iterable
from html import unescape
from types import ModuleType
from urllib.parse import parse_qsl

import nbformat
from pair import ROOT
from playwright.sync_api import Browser, Locator, Page

HINTS_UNREAD = __future__.annotations.compiler_flag
FIELDS = """form => Object.fromEntries(
  [...form.elements].filter(field => field.name).map(field => [field.name, field.value])
)"""


def state(page: Page) -> dict[str, str]:
    """What the fields hold."""
    return page.locator("#explorer form").evaluate(FIELDS)


def type_in(page: Page, **values: object) -> None:
    """Type values into the fields with these names, or choose them."""
    for name, value in values.items():
        field = page.locator(f"#explorer [name={name}]")
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(str(value))
        else:
            field.fill(str(value))


def table(page: Page, body: str = "tbody") -> list[list[str]]:
    """The texts of the rows in a part of the answer."""
    rows = page.locator(f"#explorer {body} tr").all()
    return [row.locator("th, td").all_inner_texts() for row in rows]


def answer(page: Page) -> Locator:
    """The sentence that answers."""
    return page.locator("#explorer .answer")


def sizes_at_first(page: str) -> dict[str, int]:
    """The numbers that the fields of a page hold at first, by its source."""
    text = (ROOT / f"book/{page}.md").read_text()
    fields = re.findall(r'<input name="(\w+)" value="(\d+)"', text)
    return {name: int(value) for name, value in fields}


def section(page: str, title: str) -> str:
    """The source of a section of a page, its numbers as a reader sees them."""
    text = (ROOT / f"book/{page}.md").read_text().replace("{,}", ",")
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def check_worked(
    page: str,
    title: str,
    least: int,
    numbers: Iterable[float],
    spans: Iterable[str] = (),
    words: Iterable[str] = (),
) -> None:
    """Check that a section has these numbers from `least` on and these spans of time,
    and no others, and these words."""
    text = section(page, title)
    written = re.findall(r"\b\d{1,3}(?:,\d{3})+", text)
    written = {int(number.replace(",", "")) for number in written}
    assert {n for n in written if n >= least} == {round(n) for n in numbers}
    assert set(re.findall(r"\b[\d.]+ (?:s|ms|µs)\b", text)) == set(spans)
    assert [each for each in words if each not in text] == []


def changes(query: str) -> dict[str, int | str]:
    """The values that the query of an address has for the fields."""
    texts = dict(parse_qsl(query, keep_blank_values=True))
    return {name: int(t) if t.isdigit() else t for name, t in texts.items()}


def linked(page: str, first: dict) -> list[dict]:
    """The state that each link of a page's text opens, by its source, in order."""
    text = unescape((ROOT / f"book/{page}.md").read_text())
    found = [changes(query) for query in re.findall(r'href="\?([^"#]*)', text)]
    assert set().union(*found) <= first.keys()
    return [first | change for change in found]


def asked(browser: Browser, script: str, question: str, given: object = None) -> object:
    """What a page's script answers, without the page."""
    with browser.new_context() as context:
        page = context.new_page()
        for name in ("form.js", script):
            page.add_script_tag(path=ROOT / "book/_static" / name)
        return page.evaluate(question, given)


def counted(browser: Browser, script: str, count: str, cases: list[dict]) -> list:
    """What a page's script counts for each case, by the body of a function of its
    texts; or the field and the words of a refusal."""
    question = f"""cases => cases.map(texts => {{
      try {{ {count} }} catch (error) {{
        if (error.field) return [error.field, error.message]; else throw error;
      }}
    }})"""
    texts = [{name: str(value) for name, value in case.items()} for case in cases]
    return asked(browser, script, question, texts)


def check_refusals(
    browser: Browser, script: str, count: str, first: dict, refused: list[tuple]
) -> None:
    """Check that each change of the first case is refused for a field, with words."""
    cases = [first | changes for changes, _, _ in refused]
    for wrong, found in zip(refused, counted(browser, script, count, cases)):
        assert found[0] == wrong[1] and wrong[2] in found[1], (wrong, found)


def defined(
    chapter: str, names: str, changes: dict | None = None, **given
) -> ModuleType:
    """What a chapter defines first under these names, beside what is given, after
    changes of its text; no more of it runs."""
    cells = nbformat.read(ROOT / f"notebooks/{chapter}.ipynb", 4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    for old, new in (changes or {}).items():
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    module = ModuleType("chapter")
    vars(module).update(given)
    for node in ast.parse(code).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else node
        name = getattr(target, "name", getattr(target, "id", None))
        if name in names.split() and name not in vars(module):
            code = compile(ast.Module([node], []), "chapter", "exec", HINTS_UNREAD)
            exec(code, vars(module))
    return module
