from __future__ import annotations

import pytest

from demo.results import as_text, equal_answers, gain, percentile, rows, verdict
from tests.demo.builders import make_run, make_runs


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([3.0], 50, 3.0),
        ([3.0], 99, 3.0),
        ([4.0, 1.0, 3.0, 2.0], 50, 2.0),
        ([4.0, 1.0, 3.0, 2.0], 99, 4.0),
        ([float(i) for i in range(1, 101)], 50, 50.0),
        ([float(i) for i in range(1, 101)], 99, 99.0),
        ([float(i) for i in range(1, 102)], 99, 100.0),
        ([1.0, 2.0], 0, 1.0),
    ],
)
def test_percentiles_are_values_that_were_measured(values: list[float], percent: int, expected: float) -> None:
    assert percentile(values, percent) == expected


def test_no_values_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_repeat_turns_are_all_but_the_first() -> None:
    assert make_run("none", 9.0, 1.0, 2.0, sessions=1).repeat_ttft_s == [1.0, 2.0]


def test_the_gain_is_of_medians_on_repeat_turns() -> None:
    none, eager, _ = make_runs()
    assert gain(eager, none) == pytest.approx(12.0)
    assert verdict([none, eager]) == "TTFT p50 on repeat turns: 12.0 x lower with eager."
    assert verdict([eager, none]) == "TTFT p50 on repeat turns: 12.0 x higher with none."


def test_the_table_fits_into_80_columns_and_says_what_there_is_to_say() -> None:
    text = as_text(rows(make_runs()))
    assert all(len(line) <= 80 for line in text.splitlines())
    cells = {line[:30].strip(): line[30:].split("  ") for line in text.splitlines()}
    values = {label: [value.strip() for value in line if value.strip()] for label, line in cells.items()}
    assert values["prefill tokens computed"] == ["600", "216", "216"]
    assert values["tokens loaded from the host"] == ["0", "192", "192"]
    assert values["share of prompt tokens cached"] == ["0 %", "64.0 %", "64.0 %"]
    assert values["TTFT p50, repeat turns"] == ["1,200 ms", "100 ms", "300 ms"]
    assert values["TTFT p99, repeat turns"] == ["1,400 ms", "200 ms", "300 ms"]
    assert values["total time of all chats"] == ["12.3 s"] * 3
    assert values["answers equal"] == ["reference", "100 %", "100 %"]


def test_one_other_token_is_another_answer_and_never_rounded_away() -> None:
    same = make_run("none", *[1.0] * 3, sessions=1000)
    first, *others = same.answers
    other = make_run("eager", *[1.0] * 3, sessions=1000)
    object.__setattr__(other, "answers", (make_run("eager", 1.0, tokens=(7, 9)).answers[0], *others))
    assert first.tokens == (7, 8)
    assert equal_answers(other, same) < 1
    assert rows([same, other])[-1] == ["answers equal", "reference", "99.9 %"]
