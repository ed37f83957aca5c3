"""What is a page of metrics, and what is not."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cli.top.exposition import ExpositionError, Sample, samples
from tests.cli.top.fake import labels

NAMES = st.from_regex(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,12}", fullmatch=True)
LABELS = st.dictionaries(
    st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True), st.text(max_size=12), max_size=4
)
VALUES = st.floats(allow_nan=False)
BLANK_LINES = st.sampled_from(["", "  ", "\t", "# HELP x y", "# TYPE x counter", "# {} 1"])


def _written(sample: Sample) -> str:
    inside = f"{{{labels(**sample.labels)}}}" if sample.labels else ""
    return f"{sample.name}{inside} {sample.value!r}".replace(" inf", " +Inf").replace(" -inf", " -Inf")


@given(st.lists(st.tuples(st.builds(Sample, NAMES, LABELS, VALUES), BLANK_LINES)))
def test_what_was_written_is_read(page: list[tuple[Sample, str]]) -> None:
    text = "".join(f"{_written(sample)}\n{other}\n" for sample, other in page)
    assert list(samples(text)) == [sample for sample, _ in page]


@given(st.text(max_size=80))
def test_whatever_comes_is_read_or_refused(text: str) -> None:
    with suppress(ExpositionError):
        list(samples(text))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("up 1", Sample("up", {}, 1.0)),
        ("up{} 1", Sample("up", {}, 1.0)),
        ('  up{ a = "b" , }\t1e3 \r', Sample("up", {"a": "b"}, 1000.0)),
        ("up 1 1700000000000", Sample("up", {}, 1.0)),
        ('up{a="}"} 1.5 # {trace="x y"} 0.5 1700000000.1', Sample("up", {"a": "}"}, 1.5)),
        (r'up{a="\\ \" \n \x"} +Inf', Sample("up", {"a": '\\ " \n \\x'}, math.inf)),
        ('up{a="\u2028"} -1', Sample("up", {"a": "\u2028"}, -1.0)),
    ],
)
def test_forms_that_exporters_write(line: str, expected: Sample) -> None:
    assert list(samples(f"{line}\n")) == [expected]


def test_not_a_number_is_a_value() -> None:
    [sample] = samples("up NaN")
    assert math.isnan(sample.value)


@pytest.mark.parametrize(
    "line",
    [
        "<!doctype html>",
        '{"detail": "Not Found"}',
        "up",
        "up one",
        "up 1_000",
        "up 1 2 3",
        'up{a="b} 1',
        "up{a=b} 1",
        'up{a="b"',
        'up{a="b" c="d"} 1',
        "1up 1",
    ],
)
def test_what_is_not_a_sample_is_named_with_its_line(line: str) -> None:
    with pytest.raises(ExpositionError) as raised:
        list(samples(f"# a comment\nup 1\n{line}\n"))
    assert str(raised.value) == f"line 3: expected a name, labels and a number, got {line!r}"
