"""What has to hold for every page that we write."""

from __future__ import annotations

import re
from html.parser import HTMLParser


def assert_nothing_is_fetched(html: str) -> None:
    assert not re.search(r"https?:|//|url\(|@import|<script|<link|<img|<iframe|\bsrc=|\bhref=|\bon\w+=", html)


def assert_every_element_is_closed(html: str) -> None:
    checker = _Checker()
    checker.feed(html)
    assert checker.open == []


class _Checker(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass
