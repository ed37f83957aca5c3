"""A trace that was read once is the same when it is read from the spool."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.plan.request import TraceRequest
from forebay.plan.spool import Spooling

REQUESTS = st.lists(
    st.builds(
        TraceRequest,
        time_s=st.floats(0, 1e6),
        input_tokens=st.integers(0, 1 << 40),
        output_tokens=st.integers(0, 1 << 40),
        prefixes=st.lists(st.integers(0, (1 << 64) - 1), max_size=20),
    ),
    max_size=20,
)


class Listed:
    name, block_tokens, num_bytes, skipped = "listed", 16, None, 3
    bytes_read = 7

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self._requests)


def plain(request: TraceRequest) -> tuple[float, int, int, list[int]]:
    return request.time_s, request.input_tokens, request.output_tokens, list(request.prefixes)


@given(REQUESTS)
def test_what_goes_in_comes_out_as_often_as_wanted(requests: list[TraceRequest]) -> None:
    with TemporaryDirectory() as folder:
        spooling = Spooling(Listed(requests), Path(folder) / "spool")
        passed_on = [plain(each) for each in spooling]
        spool = pickle.loads(pickle.dumps(spooling.spool))
        for _ in range(2):
            assert [plain(each) for each in spool] == passed_on == [plain(each) for each in requests]
            assert spool.bytes_read == spool.num_bytes
        assert (spool.name, spool.block_tokens) == ("listed", 16)


def test_what_the_trace_holds_is_counted(tmp_path: Path) -> None:
    requests = [TraceRequest(0.0, 100, 20, [1, 2]), TraceRequest(90.5, 300, 5, [1, 2, 3])]
    spooling = Spooling(Listed(requests), tmp_path / "spool")
    assert list(spooling) == requests
    totals = spooling.totals
    assert (totals.requests, totals.input_tokens, totals.output_tokens) == (2, 400, 25)
    assert (totals.longest_tokens, totals.duration_s, totals.skipped_lines) == (305, 90.5, 3)


def test_there_is_no_spool_before_the_end(tmp_path: Path) -> None:
    spooling = Spooling(Listed([TraceRequest(0.0, 1, 1, [1])]), tmp_path / "spool")
    next(iter(spooling))
    with pytest.raises(ValueError, match="not been read to its end"):
        _ = spooling.spool


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    spooling = Spooling(Listed([TraceRequest(0.0, 1, 1, [1])]), tmp_path / "spool")
    list(spooling)
    assert spooling.spool.path.stat().st_mode & 0o077 == 0
