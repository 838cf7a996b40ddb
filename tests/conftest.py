"""What several tests share: the served site, a browser, and the option --record."""

import pytest
from published import chromium, published


def pytest_addoption(parser):
    parser.addoption(
        "--record", action="store_true", help="write what was measured to book/measured"
    )


@pytest.fixture(scope="session")
def site():
    with published() as address:
        yield address


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = chromium(playwright)
        yield opened
        opened.close()
