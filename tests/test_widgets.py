"""What the three pages that calculate have in common, in a browser."""

from typing import NamedTuple

import pytest
from form import answer, state, type_in
from playwright.sync_api import expect


class Tool(NamedTuple):
    """A page that calculates, and what to try on it."""

    typed: dict  # changes of its first state
    states: dict[str, str]  # addresses that show each further kind of answer


TOOLS = {
    "explorer": Tool(
        {"spec": 'P(None, "b")', "mesh": "a=2, b=3", "shape": "4, 6, 8"},
        {
            "copies": "?spec=P(y)",
            "rank-3": "?shape=4,64,128&mesh=data=2,seq=2,model=2"
            "&spec=P(data,seq,model)",
            "rank-0": "?shape=&spec=P()",
            "wide": "?shape=1048576&mesh=data=64&spec=P(data)",
            "64-copies": "?shape=64,64&mesh=data=64&spec=P()",
            "refused": "?shape=9,8&spec=P(x)",
        },
    ),
    "layouts": Tool(
        {"sequences": "1024", "room": "0.5", "layers": "8", "cut": "yes"},
        {
            "one-device": "?pipe=1&data=1&microbatches=1",
            "mixed": "?pipe=2&data=2&seq=2&cut=yes&microbatches=4",
            "large": "?layers=96&width=12288&hidden=49152&heads=96&vocabulary=49152"
            "&bytes=2&sequences=2048&tokens=2048&pipe=8&data=32&seq=2&tensor=8"
            "&microbatches=64&room=80",
            "no-room": "?room=0.000001",
            "refused": "?tensor=3",
        },
    ),
    "calculator": Tool(
        {"tokens": "1048576", "layers": "8", "gated": "no", "chip": "TPU v6e"},
        {
            "one-device": "?devices=1&fsdp=1",
            "mixed": "?data=2&fsdp=8&model=4&gathers=once",
            "large": "?layers=126&width=16384&hidden=53248&heads=128&tokens=16777216"
            "&chip=TPU7x&sequence=8192&devices=16384&data=16&fsdp=128&model=8&axes=3",
            "refused": "?model=3",
        },
    ),
}
every_tool = pytest.mark.parametrize("name", TOOLS)


@pytest.mark.parametrize(
    "address",
    [f"{name}.html{query}" for name in TOOLS for query in TOOLS[name].states.values()],
    ids=[f"{name}-{kind}" for name in TOOLS for kind in TOOLS[name].states],
)
def test_every_answer_fits_and_has_no_barrier(quiet_page, wrong_with, address):
    wrong = wrong_with(quiet_page(f"book/{address}"), "#explorer")
    assert not wrong, "\n".join(wrong)


@every_tool
def test_address_carries_the_state(quiet_page, name):
    page = quiet_page(f"book/{name}.html")
    tool = TOOLS[name]
    type_in(page, **tool.typed)
    assert state(page).items() >= tool.typed.items()
    assert "%" not in page.url
    again = quiet_page(f"book/{name}.html?{page.url.partition('?')[2]}")
    assert state(again) == state(page)
    expect(again.locator("#explorer .result")).to_be_visible()
    for part in (".answer", ".result"):
        shown = page.locator(f"#explorer {part}").inner_text()
        expect(again.locator(f"#explorer {part}")).to_have_text(
            shown, use_inner_text=True
        )


@every_tool
def test_back_and_forward(quiet_page, name):
    """One step back for all the letters that were typed into a field."""
    page = quiet_page(f"book/{name}.html")
    states = [state(page)]
    for field, text in [*TOOLS[name].typed.items()][:2]:
        page.locator(f"#explorer [name={field}]").press("Control+a")
        page.keyboard.type(text)
        states.append(state(page))
    for seen in (states[1], states[0]):
        page.go_back()
        assert state(page) == seen
    page.go_forward()
    page.go_forward()
    assert state(page) == states[2]


@every_tool
def test_refusals_lose_nothing(quiet_page, name):
    page = quiet_page(f"book/{name}.html")
    type_in(page, **TOOLS[name].typed)
    before, said = state(page), answer(page).inner_text()
    [field, *_] = before
    type_in(page, **{field: "many"})
    for _ in range(2):
        expect(answer(page)).to_contain_text('annot read "many" as')
        assert state(page)[field] == "many"
        invalid = page.locator("#explorer [aria-invalid]")
        assert invalid.get_attribute("name") == field
        assert page.locator("#explorer .result[inert]").count()
        page.reload()
    type_in(page, **{field: before[field]})
    expect(answer(page)).to_have_text(said)
    assert not page.locator("#explorer :is([aria-invalid], [inert])").count()


@every_tool
def test_an_address_cannot_add_markup(quiet_page, name):
    page = quiet_page(f"book/{name}.html")
    first = state(page)
    [field, *_] = first
    selects = page.locator("#explorer select").all()
    choices = [select.get_attribute("name") for select in selects]
    fields = "&".join(f"{choice}=<b>" for choice in choices)
    page.goto(f"{page.url.partition('?')[0]}?{field}=<b>4</b>&{fields}")
    expect(answer(page)).to_contain_text("<b>4</b>")
    assert page.locator("#explorer b").count() == 0
    assert {choice: state(page)[choice] for choice in choices} == {
        choice: first[choice] for choice in choices
    }
    unknown = page.locator("#explorer > [role=status]")
    expect(unknown).to_contain_text(f"It shows {first[choices[0]]} instead")
    type_in(page, **{field: first[field]})
    expect(unknown).to_have_text("")
