"""`forebay top` on two terminals, beside a real server that starts, serves and goes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forebay.cli.top import units
from tests.cli.top.screens import cells
from tests.cli.top.tmux import Tmux, needs_tmux
from tests.vllm.checkpoint import save_checkpoint
from tests.vllm.server import Server, wait_for
from tests.vllm.test_metrics import ARGUMENTS, OFFLOAD, SLOTS, push_out_and_come_back

pytestmark = [needs_tmux, pytest.mark.timeout(600)]  # most of it is the server's start: 40 s on two cores

SIZES = ((80, 24), (160, 50))


def _total(screen: str, label: str) -> str:
    """The third number of a row."""
    row = re.search(rf"^{label} +\S+(?: \S+)?  +\S+(?: \S+)?  +(\S+(?: [A-Z]?B)?)", screen, re.MULTILINE)
    return row[1] if row else ""


def test_a_real_server_on_a_small_and_a_large_screen(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "model")
    with (
        Tmux(*SIZES[0]) as small,
        Tmux(*SIZES[1]) as large,
        Server(model, tmp_path, *ARGUMENTS, offload=OFFLOAD) as server,
    ):
        terminals = (small, large)
        for terminal in terminals:
            terminal.top(server.url, "--interval", "0.5")
        for terminal in terminals:
            terminal.wait_for(lambda screen: "down: connection refused" in screen or "down for" in screen)
        server.wait_until_ready()
        for terminal in terminals:
            terminal.wait_for(lambda screen: "no step yet" in screen and "small   1 engine" in screen)
        push_out_and_come_back(server)
        wait_for(lambda: server.metric("forebay_slots_filling") == 0, 30, "the last store", server.log)
        evictions = f"{server.metric('forebay_evictions_total'):,.0f}"
        for terminal, (width, height) in zip(terminals, SIZES, strict=True):
            screen = terminal.wait_for(lambda screen: _total(screen, "evictions") == evictions)
            lines = screen.splitlines()
            assert len(lines) == height
            assert max(map(cells, lines)) == width
            assert "small   1 engine, 1 rank" in screen
            assert re.search(rf"slots {SLOTS}   cached \d+   filling 0 ", screen)
            assert re.search(r"^host pool +█.* (\d\d\.\d|100) % +\S+ MB of 13\.1 MB$", screen, re.MULTILINE)
            hits, misses = (server.metric(f"forebay_{name}_tokens_total") for name in ("hit", "miss"))
            assert re.search(rf"^hit share .* {100 * hits / (hits + misses):.1f} %", screen, re.MULTILINE)
            assert _total(screen, "requests") == "12"
            for label, name in (("to host", "stored"), ("to device", "loaded")):
                assert _total(screen, label) == units.size(server.metric(f"forebay_{name}_bytes_total"))
            assert re.search(r"^load p99 .* [\d.]+ m?s$", screen, re.MULTILINE)
            assert re.search("[▂▃▄▅▆▇█]", screen.partition("evictions")[2]), "no chart shows what there was"
            assert not re.search(r"!|\bdown\b", screen)
        server.kill()
        for terminal in terminals:
            terminal.wait_for(lambda screen: re.search(r"^down", screen, re.MULTILINE))
            terminal.press("q")
            terminal.wait_for_prompt()
