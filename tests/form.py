"""What a reader does with the form of a page that calculates, and what it shows."""

from playwright.sync_api import Locator, Page

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
