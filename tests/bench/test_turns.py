"""Engines that take turns."""

from __future__ import annotations

from contextlib import closing
from multiprocessing.connection import Client
from pathlib import Path
from threading import Thread

import _turns
import pytest


def test_who_has_gone_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_turns, "PAUSE_S", 0.0)
    with closing(_turns.Turnstile(tmp_path / "turns", ["stays", "never came", "goes", "leaves"])) as turnstile:
        turnstile.ended("never came")
        engines = {}
        for name in ("stays", "goes", "leaves"):
            engines[name] = Client(str(tmp_path / "turns"))
            engines[name].send(name)
            engines[name].send("here")
        stays, goes, leaves = engines.values()
        assert stays.recv() == "go"
        goes.close()  # before its turn
        stays.send("done")
        assert leaves.recv() == "go"
        leaves.close()  # in its turn
        stays.send("here")
        assert stays.recv() == "go"
        stays.close()


def test_who_has_ended_can_say_so_when_nobody_listens_any_more(tmp_path: Path) -> None:
    names = ["first", "second", "third", "fourth"]
    with closing(_turns.Turnstile(tmp_path / "turns", names)) as turnstile:
        for _ in range(2):  # each has ended before it came; then the turnstile has, too
            for name in names:
                told = Thread(target=turnstile.ended, args=(name,), daemon=True)
                told.start()
                told.join(10)
                assert not told.is_alive()
