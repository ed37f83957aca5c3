"""Screens: nothing is wider than they are, all that matters is on them, and red is for trouble."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.cli.top import units
from forebay.cli.top.canvas import Canvas, Ink, Look, Style, clean
from forebay.cli.top.draw import frame
from forebay.cli.top.plan import plan
from forebay.cli.top.view import TROUBLE, Alarm, Screen, alarm_of
from forebay.metrics import METRICS
from tests.cli.top.screens import cells, down, screen, screens, server

PLAIN = Look(Style.NONE)
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
looks = st.builds(Look, st.sampled_from(Style), st.booleans())


def drawn(shown: Screen, width: int = 80, height: int = 24, look: Look = PLAIN) -> str:
    return "\n".join(frame(shown, width, height, look))


# --- any screen ---------------------------------------------------------------------------------------


def check_fits(shown: Screen, width: int, height: int, look: Look) -> None:
    lines = frame(shown, width, height, look)
    assert len(lines) <= height
    for line in lines:
        bare = ESCAPE.sub("", line)
        assert cells(bare) <= width, line
        assert all(unicodedata.category(character) not in ("Cc", "Cf", "Mn", "Me", "Mc") for character in bare)
        assert look.unicode or bare.isascii()
        assert look.style is not Style.NONE or bare == line
        if bare != line:
            assert ESCAPE.findall(line)[-1] == "\x1b[0m", "what comes next would be in this line's colour"


@settings(max_examples=200)
@given(screens(), st.integers(40, 200), st.integers(10, 60), looks)
def test_no_line_is_wider_than_the_screen(shown: Screen, width: int, height: int, look: Look) -> None:
    check_fits(shown, width, height, look)
    text = drawn(shown, width, height, Look(Style.NONE, look.unicode))
    assert text.startswith("forebay top")
    assert text.splitlines()[height - 1].startswith("q quit")


@given(screens(), st.integers(1, 39), st.integers(1, 9), looks)
def test_nor_than_one_that_is_too_small(shown: Screen, width: int, height: int, look: Look) -> None:
    check_fits(shown, width, height, look)


@given(screens(), st.integers(40, 200), st.integers(10, 60), st.sampled_from([Style.MONO, Style.COLOUR]))
def test_styles_change_how_it_looks_and_not_what_it_says(
    shown: Screen, width: int, height: int, style: Style
) -> None:
    text = drawn(shown, width, height, Look(style))
    assert ESCAPE.sub("", text) == drawn(shown, width, height)
    if style is Style.MONO:
        assert set(re.findall(r"\x1b\[([0-9;]*)m", text)) <= {"0", "0;1", "0;2"}


@given(
    st.lists(st.tuples(st.integers(-5, 25), st.integers(-2, 6), st.text("ab 模\x1bé", max_size=9)), max_size=12)
)
def test_a_canvas_takes_anything_anywhere(puts: list[tuple[int, int, str]]) -> None:
    canvas = Canvas(20, 4, PLAIN)
    for x, y, text in puts:
        canvas.put(x, y, text, Ink.STRONG)
    assert len(canvas.lines()) == 4
    assert all(cells(line) <= 20 for line in canvas.lines())


def test_half_of_a_wide_letter_does_not_stay() -> None:
    canvas = Canvas(6, 1, PLAIN)
    canvas.put(0, 0, "模模模")
    canvas.put(1, 0, "ab")
    assert canvas.lines() == [" ab 模"]


def test_names_of_others_are_shown_as_letters() -> None:
    assert clean("a\x1b[2J\u202eb\u0301c", Look()) == "a?[2J?b?c"
    assert clean("e\u0301 模", Look()) == "é 模"
    assert clean("é", Look(unicode=False)) == "?"


# --- what is on it --------------------------------------------------------------------------------------


def _line(text: str, begin: str) -> str:
    [line] = [line for line in text.splitlines() if line.startswith(begin)]
    return line


@pytest.mark.parametrize(("width", "height"), [(40, 10), (80, 24), (160, 50), (300, 100)])
def test_what_matters_is_on_every_screen(width: int, height: int) -> None:
    shown = screen(server(checksum_mismatches=Alarm.TROUBLE))
    text = drawn(shown, width, height)
    assert "gpu-1:8000" in text
    assert "72.3 %" in _line(text, "host pool")
    assert "77.9 %" in _line(text, "hit share")
    assert "410 MB/s" in _line(text, "to host")
    assert "7.20 GB/s" in _line(text, "to device")
    assert "12.5/s" in _line(text, "evictions")
    assert re.search(r"! checksum mismatches +3", text)
    assert "! trouble" in text.splitlines()[0]


def test_numbers_of_a_column_end_at_the_same_place() -> None:
    text = drawn(screen(server()))
    titles = next(line for line in text.splitlines() if "1 min" in line)
    for title in ("now", "1 min", "total"):
        end = titles.index(title) + len(title)
        for label in ("hit share", "to host", "to device", "evictions", "requests", "load p99"):
            line = _line(text, label)
            assert line[end - 1] != " ", (title, label)
            assert line[end : end + 2].strip() == "", (title, label)


def test_more_room_is_used() -> None:
    small, large = (drawn(screen(server(engines=2)), *size) for size in ((80, 24), (160, 50)))
    assert max(map(cells, large.splitlines())) > 150
    assert "hit tokens" in large
    assert "hit tokens" not in small
    charts = [len(re.findall(r"^.*[▁▂▃▄▅▆▇█]{20}.*$", text, re.MULTILINE)) for text in (small, large)]
    assert charts[1] >= 2 * charts[0]
    assert "10 GB/s" in large, "the end of a scale"


def test_a_chart_shows_what_was_when() -> None:
    levels = "▁▂▃▄▅▆▇█"
    assert units.chart([None, 0, 0.01, 4, 8], 8, 1, levels) == [" ▁▂▄█"]
    assert units.chart([None, 0, 0.01, 4, 8], 8, 2, levels) == ["    █", " ▁▂██"]
    assert units.chart([9], 8, 1, levels) == ["█"]


def test_engines_and_ranks_are_counted() -> None:
    assert "1 engine, 4 ranks" in drawn(screen(server()))
    text = drawn(screen(server(engines=2)))
    assert "2 engines, 4 ranks" in text  # whoever adds up is given the sum
    assert [line.split()[:2] for line in text.splitlines() if re.match(r"  \d  ", line)] == [
        ["0", "72.3"],
        ["1", "72.3"],
    ]


def test_engines_with_trouble_come_first_if_not_all_fit() -> None:
    view = server(engines=8)
    engines = list(view.engines)
    bad = server(load_failures=Alarm.TROUBLE).whole
    assert bad
    engines[6] = (engines[6][0], bad)
    text = drawn(screen(replace(view, engines=tuple(engines))))
    assert "4 of 8 engines" in text
    first = text.splitlines()[text.splitlines().index(_line(text, "  4 of 8")) + 1]
    assert first.split()[0] == "6"
    assert "! 3" in first


def test_several_servers_are_a_table_and_one_of_them_in_full() -> None:
    shown = screen(server(), server("gpu-2:8000", load_failures=Alarm.TROUBLE), down(), selected=1)
    text = drawn(shown)
    assert "2 of 3 servers up   ! trouble on 1" in text.splitlines()[0]
    assert re.match(r"  gpu-1:8000 +72.3 % +77.9 % +410 MB/s +7.20 GB/s +12.5/s  ok", _line(text, "  gpu-1"))
    assert _line(text, "▸ gpu-2").endswith("! 3")
    assert _line(text, "  gpu-3").endswith("down for 1 min 12 s: connection refused")
    assert _line(text, "gpu-2").endswith("up 3 h 12 min")
    wide = drawn(shown, 160, 50)
    assert _line(wide, "▸ gpu-2").endswith("! 3 load failures")


def test_the_server_that_is_chosen_is_among_those_shown() -> None:
    servers = [server(f"gpu-{number}:8000") for number in range(40)]
    for selected in (0, 17, 39):
        text = drawn(screen(*servers, selected=selected))
        assert f"▸ gpu-{selected}:8000" in text
        assert re.search(r"\d+ to \d+ of 40", text)


def test_a_server_that_never_answered_says_why() -> None:
    text = drawn(screen(down()))
    assert "gpu-3:8000\ndown for 1 min 12 s: connection refused\n" in text
    assert "to host" not in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"waiting_s": 5.0}, "no answer for 5 s"),
        ({"restarted_s": 12.0}, "restarted 12 s ago"),
        ({"restarted_s": 301.0}, "up 3 h 12 min"),
    ],
)
def test_what_is_said_of_a_server(changes: dict[str, float], said: str) -> None:
    assert said in drawn(screen(replace(server(), **changes)))


def test_before_the_first_step_there_is_no_pool() -> None:
    view = server()
    assert view.whole
    text = drawn(screen(replace(view, whole=replace(view.whole, gauges={}))))
    assert "no step yet" in text
    assert _line(text, "host pool").split() == ["host", "pool", PLAIN.none]
    assert "1 engine " in text


# --- alarms and colours -----------------------------------------------------------------------------------


def _codes(shown: Screen, look: Look) -> set[str]:
    text = drawn(shown, 160, 50, look)
    return {code for codes in re.findall(r"\x1b\[([0-9;]*)m", text) for code in codes.split(";")}


def test_red_is_for_trouble() -> None:
    well = _codes(screen(server(), server("b", engines=3)), Look())
    assert well == {"0", "1", "2", "32", "36"}
    assert _codes(screen(server(stores_without_room=Alarm.NOTICE)), Look()) - well == {"33"}
    assert _codes(screen(server(load_failures=Alarm.TROUBLE)), Look()) - well == {"31"}
    assert _codes(screen(server(), down()), Look()) - well == {"31"}


def test_every_metric_to_look_into_is_shown_and_can_alarm() -> None:
    for metric in METRICS:
        if metric.look:
            assert metric.key in TROUBLE
            assert alarm_of(metric.key, 5.0, grew_lately=True) > Alarm.NONE, metric.key
            assert alarm_of(metric.key, 0.0, grew_lately=False) is Alarm.NONE
            stays = metric.look.startswith("it is not 0") and "on a model" not in metric.look
            assert (alarm_of(metric.key, 5.0, grew_lately=False) > Alarm.NONE) is stays, metric.key
    for key in ("resets", "abandoned_transfers"):
        assert alarm_of(key, 5.0, grew_lately=True) is Alarm.NONE


@pytest.mark.parametrize(
    ("form", "value", "expected"),
    [
        (units.size, 0, "0 B"),
        (units.size, 999.4, "999 B"),
        (units.size, 999.6, "1.00 KB"),
        (units.size, 64e9, "64.0 GB"),
        (units.size, 1.5e16, "15000 TB"),
        (units.count, 99_999, "99,999"),
        (units.count, 123_456, "123 k"),
        (units.count, 999_600_000, "1.00 G"),
        (units.per_second, 0, "0/s"),
        (units.per_second, 0.001, "0.01/s"),
        (units.per_second, 12.34, "12.3/s"),
        (units.per_second, 123_456, "123 k/s"),
        (units.duration, 0.00025, "0.25 ms"),
        (units.duration, 0.9999, "1.00 s"),
        (units.ago, 59.9, "59 s"),
        (units.ago, 3725, "1 h 2 min"),
        (units.ago, 200_000, "2 d 7 h"),
        (units.short, 9_999, "9999"),
        (units.short, 12_345, "12k"),
        (units.short, 1_234_567, "1.2M"),
    ],
)
def test_numbers_are_short_and_not_rounded_to_what_they_are_not(form: object, value: float, expected: str) -> None:
    assert form(value) == expected  # type: ignore[operator]


@given(st.floats(0, 1e15))
def test_numbers_fit_their_columns(value: float) -> None:
    assert len(units.bytes_per_second(value)) <= 11
    assert len(units.per_second(value)) <= 10
    assert len(units.count(value)) <= 11
    assert len(units.short(value)) <= 5


@given(st.lists(st.floats(0, 1e15) | st.none()))
def test_a_scale_holds_all_values(values: list[float | None]) -> None:
    top = units.nice(values)
    known = [value for value in values if value]
    assert all(value <= top * (1 + 1e-12) for value in known)
    assert not known or top <= 10 * max(known)


# --- what there is room for -------------------------------------------------------------------------------


@given(st.integers(-5, 120), st.integers(1, 12), st.integers(1, 40), st.booleans())
def test_what_is_planned_fits_and_fills(lines: int, trouble_lines: int, engines: int, charts: bool) -> None:
    made = plan(lines, trouble_lines=trouble_lines, engines=engines, charts=charts)
    heights = [made.heights.get(label, 1) for label in made.rows]
    used = 1 + made.slots + made.titles + sum(height + (height > 1) for height in heights)
    used += 1 + trouble_lines if made.all_trouble else 1
    used += made.gap_before_pool + made.gap_before_rows + made.gap_before_trouble
    used += made.engines + 2 if made.engines else 0
    assert used <= max(lines, 6)
    assert made.engines in (0, min(engines, 4), engines)
    tallest = all(height == 8 for label, height in made.heights.items()) and len(made.heights) == 6
    assert tallest or not charts or lines - used < 2
    assert charts or not made.heights
