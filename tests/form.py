"""Helpers for tests of the explorer and the calculator: form, script, chapters."""

import __future__

import ast
import re
from html import unescape
from types import ModuleType
from urllib.parse import parse_qsl

import nbformat
from pair import ROOT
from playwright.sync_api import Browser, Locator, Page

FUTURE = __future__.annotations.compiler_flag
FIELDS = """form => Object.fromEntries(
  [...form.elements].filter(field => field.name).map(field => [field.name, field.value])
)"""


def state(page: Page) -> dict[str, str]:
    """Return the value of each field by name."""
    return page.locator("#explorer form").evaluate(FIELDS)


def type_in(page: Page, **values: object) -> None:
    """Type values into the fields with these names, or select them."""
    for name, value in values.items():
        field = page.locator(f"#explorer [name={name}]")
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(str(value))
        else:
            field.fill(str(value))


def table(page: Page, body: str = "tbody") -> list[list[str]]:
    """Return the texts of the cells of a table, row by row."""
    rows = page.locator(f"#explorer {body} tr").all()
    return [row.locator("th, td").all_inner_texts() for row in rows]


def answer(page: Page) -> Locator:
    """Return the locator of the paragraph with the answer."""
    return page.locator("#explorer .answer")


def source(page: str) -> str:
    """Return the source of a page in book/."""
    return (ROOT / f"book/{page}.md").read_text()


def linked(page: str) -> dict[str, dict[str, str]]:
    """Return the fields that each link to a state of the page sets, by its text."""
    found = re.findall(r'href="\?([^"#]*)#explorer">(.*?)</a>', source(page))
    assert len({text for _, text in found}) == len(found)
    return {text: dict(parse_qsl(unescape(query))) for query, text in found}


def cell(page: str, tag: str) -> str:
    """Return the code of the cell of a page that has this tag."""
    header = r"```\{code-cell\} ipython3\n:tags: \[" + tag + r"\]\n"
    return re.search(header + "(.*?)\n```\n", source(page), re.DOTALL)[1]


def evaluate(browser: Browser, script: str, code: str, argument: object = None):
    """Evaluate JavaScript in an empty page with form.js and the script of a page."""
    with browser.new_context() as context:
        page = context.new_page()
        for name in ("form.js", script):
            page.add_script_tag(path=ROOT / "book/_static" / name)
        return page.evaluate(code, argument)


def counted(browser: Browser, script: str, count: str, cases: list[dict]) -> list:
    """Evaluate `count`, the body of a function of `texts`, for each case; return its
    result, or [field, message] of the error that rejects the case."""
    function = f"""cases => cases.map(texts => {{
      try {{ {count} }} catch (error) {{
        if (error.field) return [error.field, error.message]; else throw error;
      }}
    }})"""
    texts = [{name: str(value) for name, value in case.items()} for case in cases]
    return evaluate(browser, script, function, texts)


def check_rejected(
    browser: Browser, script: str, count: str, first: dict, rejected: list[tuple]
) -> None:
    """Check each rejected (changes of the first case, field, part of the message)."""
    cases = [first | changes for changes, _, _ in rejected]
    for (changes, field, message), found in zip(
        rejected, counted(browser, script, count, cases)
    ):
        assert found[0] == field and message in found[1], (changes, found)


def defined(chapter: str, names: str, **others) -> ModuleType:
    """Return a module with the first definition of each name in a chapter and with
    `others`; nothing else of the chapter runs."""
    cells = nbformat.read(ROOT / f"notebooks/{chapter}.ipynb", 4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    module = ModuleType("chapter")
    vars(module).update(others)
    for node in ast.parse(code).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else node
        name = getattr(target, "name", getattr(target, "id", None))
        if name in names.split() and name not in vars(module):
            code = compile(ast.Module([node], []), "chapter", "exec", FUTURE)
            exec(code, vars(module))
    return module
