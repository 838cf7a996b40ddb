"""Test the form of the explorer and the calculator, whose state is in the address."""

import pytest
from form import answer, state, type_in
from playwright.sync_api import expect

TYPED = {
    "explorer": {"spec": 'P(None, "b")', "mesh": "a=2, b=3", "shape": "4, 6, 8"},
    "calculator": {
        "tokens": "1048576",
        "layers": "8",
        "gated": "no",
        "chip": "TPU v6e",
    },
}
STATES = {  # addresses with each kind of answer
    "explorer-copies": "?spec=P(y)",
    "explorer-rank-3": "?shape=4,64,128&mesh=a=2,b=2,c=2&spec=P(a,b,c)",
    "explorer-rank-0": "?shape=&spec=P()",
    "explorer-wide": "?shape=1048576&mesh=data=64&spec=P(data)",
    "explorer-64-copies": "?shape=64,64&mesh=data=64&spec=P()",
    "explorer-rejected": "?shape=9,8&spec=P(x)",
    "calculator-one-device": "?devices=1&fsdp=1",
    "calculator-adapters": "?for=adapters&data=2&fsdp=8&model=4&gathers=once",
    "calculator-generate": "?for=generate",
    "calculator-large": "?layers=126&width=16384&hidden=53248&heads=128&tokens=16777216"
    "&chip=TPU7x&sequence=8192&devices=16384&data=16&fsdp=128&model=8&axes=3",
    "calculator-rejected": "?model=3",
}


@pytest.fixture
def page(quiet_page):
    return quiet_page("book/calculator.html")


@pytest.mark.parametrize("kind", STATES)
def test_every_kind_of_answer_is_accessible(quiet_page, find_problems, kind):
    address = f"book/{kind.partition('-')[0]}.html{STATES[kind]}"
    problems = find_problems(quiet_page(address), "#explorer")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", TYPED)
def test_address_stores_the_state(quiet_page, name):
    page = quiet_page(f"book/{name}.html")
    type_in(page, **TYPED[name])
    assert state(page).items() >= TYPED[name].items()
    assert "%" not in page.url
    again = quiet_page(f"book/{name}.html?{page.url.partition('?')[2]}")
    assert state(again) == state(page)
    for part in (".answer", ".result"):
        shown = page.locator(f"#explorer {part}").inner_text()
        same = again.locator(f"#explorer {part}")
        expect(same).to_have_text(shown, use_inner_text=True)


def test_back_undoes_one_field_at_a_time(page):
    states = [state(page)]
    for field, text in [*TYPED["calculator"].items()][:2]:
        page.locator(f"#explorer [name={field}]").press("Control+a")
        page.keyboard.type(text)
        states.append(state(page))
    for expected in (states[1], states[0]):
        page.go_back()
        assert state(page) == expected
    page.go_forward()
    page.go_forward()
    assert state(page) == states[2]


def test_errors_keep_the_typed_values(page):
    text = answer(page).inner_text()
    type_in(page, layers="many")
    for _ in range(2):
        expect(answer(page)).to_contain_text('annot read "many" as')
        assert state(page)["layers"] == "many"
        invalid = page.locator("#explorer [aria-invalid]")
        assert invalid.get_attribute("name") == "layers"
        assert page.locator("#explorer .result[inert]").count()
        page.reload()
    type_in(page, layers=32)
    expect(answer(page)).to_have_text(text)
    assert not page.locator("#explorer :is([aria-invalid], [inert])").count()


@pytest.mark.parametrize(
    "name, field", [("explorer", "shape"), ("calculator", "layers")]
)
def test_address_cannot_inject_markup(quiet_page, name, field):
    page = quiet_page(f"book/{name}.html")
    first = state(page)
    selects = page.locator("#explorer select").all()
    choices = [select.get_attribute("name") for select in selects]
    query = "&".join(f"{name}=<b>4</b>" for name in [field, *choices])
    page.goto(f"{page.url.partition('?')[0]}?{query}")
    expect(answer(page)).to_contain_text("<b>4</b>")
    assert page.locator("#explorer b").count() == 0
    assert {each: state(page)[each] for each in choices}.items() <= first.items()
    notice = page.locator("#explorer > [role=status]")
    for choice in choices:
        text = f'{choice}="<b>4</b>", which is not an option here.'
        expect(notice).to_contain_text(f"{text} Shown: {first[choice]}.")
    type_in(page, **{field: first[field]})
    expect(notice).to_have_text("")
