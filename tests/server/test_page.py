"""Claim: the page at / shows both answers in a real browser, and loads nothing from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from peagle.server.page import page
from tests.browser import Browser, find_browser, started_browser

from .running import NAME, RunningServer, wait_for

PROGRAM = find_browser()
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="no Chromium: see `make browser`")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert PROGRAM is not None
    with started_browser(PROGRAM) as started:
        yield started


def test_the_page_names_no_other_host_and_its_policy_allows_none(server: RunningServer) -> None:
    answer = httpx.get(server.url)
    assert not re.search(r"https?://|//[a-z]", answer.text.partition("<script>")[0])
    policy = answer.headers["content-security-policy"]
    assert policy == page()[1]
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy


def show(browser: Browser, server: RunningServer, width: int) -> None:
    browser.open(f"{server.url}/", width=width)
    wait_for(lambda: browser.evaluate("at('model').textContent") == NAME)


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [1400, 390])
def test_both_answers_are_shown_and_are_the_same(
    browser: Browser, server: RunningServer, width: int, tmp_path: Path
) -> None:
    show(browser, server, width)
    browser.evaluate("at('tokens').value = 40; at('temperature').value = 1; at('run').click()")
    wait_for(lambda: browser.evaluate("!at('run').disabled && at('verdict').textContent != ''"))
    assert browser.evaluate("at('verdict').textContent").startswith("Same text, ")
    plain, drafted = (
        browser.evaluate(f"document.querySelector('#{panel} .answer').textContent")
        for panel in ("plain", "drafted")
    )
    assert plain == drafted != ""
    assert browser.evaluate("document.querySelectorAll('.positions div').length") == 4
    nodes = browser.evaluate("document.querySelectorAll('#drafted .tree g').length")
    assert nodes >= 3  # the token before the step, a draft, the target's own
    assert browser.evaluate("document.querySelectorAll('#drafted .tree path').length") == nodes - 1
    assert browser.evaluate("document.querySelectorAll('.tree g.bonus').length") == 1
    assert re.fullmatch(
        r"step \d+: \d of \d drafts accepted, .*",
        browser.evaluate("document.querySelector('.tree p').textContent"),
    )
    assert browser.evaluate("document.querySelectorAll('#plain mark').length") == 0
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    browser.evaluate("at('replay').click()")
    replayed = "document.querySelector('#drafted .answer').textContent"
    wait_for(lambda: browser.evaluate(replayed) == drafted)
    assert browser.complaints() == []
    assert all(url.startswith((server.url, "data:")) for url in browser.requested())
    browser.screenshot(tmp_path / f"page-{width}.png")


@needs_browser
@pytest.mark.slow
def test_a_refusal_is_shown(browser: Browser, server: RunningServer) -> None:
    show(browser, server, 800)
    browser.evaluate("at('prompt').value = 'a'.repeat(2000); at('run').click()")
    wait_for(lambda: "tokens, the context" in browser.evaluate("at('verdict').textContent"))
    assert browser.evaluate("at('run').disabled") is False
