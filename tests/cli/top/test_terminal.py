"""Keys come in pieces, and a frame writes what has changed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cli.top.terminal import Key, Keys, Terminal

SEQUENCES = {
    b"q": [Key.QUIT],
    b"\033[A": [Key.UP],
    b"\033OB": [Key.DOWN],
    b"z": [Key.ZOOM],
    b"k": [Key.UP],
    b"x": [],
    b"\f": [Key.REDRAW],
    b"\033[1;5C": [],
    b"\033[15~": [],
    b"\xc3\xa9": [],
    b"\033OP": [],
}


@given(st.lists(st.sampled_from(list(SEQUENCES))), st.lists(st.integers(0, 40)))
def test_keys_are_the_same_in_whatever_pieces_they_come(typed: list[bytes], cuts: list[int]) -> None:
    data, keys, found = b"".join(typed), Keys(), []
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in pairwise(places):
        found += keys.feed(data[start:end])
    assert found == [key for sequence in typed for key in SEQUENCES[sequence]]


@given(st.binary())
def test_whatever_is_typed_q_can_be_typed_after_it(data: bytes) -> None:
    keys = Keys()
    keys.feed(data)
    assert Key.QUIT in keys.feed(b"q" * 17)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_only_what_has_changed_is_written_and_all_at_once(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    with Terminal(writer, keys=None) as terminal:
        assert terminal.size() == (80, 24), "of what is no terminal"
        os.read(reader, 10_000)
        terminal.show(["one", "two", "three"], (80, 24))
        assert re.findall(rb"one|two|three", os.read(reader, 10_000)) == [b"one", b"two", b"three"]
        terminal.show(["one", "2", "three"], (80, 24))
        assert os.read(reader, 10_000) == b"\033[?2026h\033[2;1H\033[K2\033[?2026l"
        terminal.show(["one", "2", "three"], (80, 24))  # writes nothing
        terminal.show(["one", "2", "three"], (80, 25))
        written = os.read(reader, 10_000)
        assert written.startswith(b"\033[?2026h\033[2J")
        assert re.findall(rb"one|2(?=\033)|three", written) == [b"one", b"2", b"three"]
    assert os.read(reader, 10_000).endswith(b"\033[?7h\033[?25h\033[?1049l")
