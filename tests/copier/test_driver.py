"""What can be said of calls of the driver without one. The rest is in tests/gpu."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from forebay.copier.cuda.driver import Driver
from forebay.copier.staged import LOAD_STAGING_BYTES


@pytest.mark.parametrize(
    ("block_bytes", "keeps"), [(2 << 20, True), (1 << 20, True), (512 << 10, True), (8192, False)]
)
def test_a_chunk_of_large_blocks_is_given_without_giving_the_turn_away(block_bytes: int, keeps: bool) -> None:
    """The engine's thread gives chunks of loads, and beside a busy thread its turn comes back 5 ms later."""
    driver = object.__new__(Driver)  # nobody needs a GPU to see which call is made
    driver._batch_copy = lambda *_: called.append(True)
    driver._large_batch_copy = lambda *_: called.append(False)
    driver._attributes, driver._attributes_from = ctypes.c_int(), ctypes.c_size_t()  # type: ignore[assignment]
    called: list[bool] = []
    apart = np.zeros(LOAD_STAGING_BYTES // block_bytes, dtype=np.uint64)
    driver.copy(0, apart, apart, apart)
    assert called == [keeps]
