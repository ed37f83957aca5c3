"""A run that is cut loses the engine it was at, and goes on from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_peers
import pytest
from _children import End

ASKED = ["--device", "cpu", "--only", "none,forebay-eager,forebay-lazy", "--no-cold-start"]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Lets no engine start: whether each was lazy. The second is cut, and one asked for with 7 bytes fails."""
    runs: list[bool] = []

    def run_child(script: Path, spec: dict[str, Any], folder: Path, **more: Any) -> End:
        extra = spec["engine_args"].get("kv_transfer_config", {}).get("kv_connector_extra_config", {})
        runs.append(extra.get("lazy_offload", False))
        if len(runs) == 2:
            raise SystemExit(143)
        return End("failed in start: KeyError" if extra.get("cpu_bytes_to_use") == 7 else None, 1.0, {}, [])

    monkeypatch.setattr(gpu_peers, "run_child", run_child)
    return runs


def rows(record: Path) -> list[tuple[str, str | None]]:
    return [(row["engine"], row["problem"]) for row in json.loads(record.read_text())["rows"]]


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_peers.py", *ASKED, *arguments])
    monkeypatch.setattr(gpu_peers, "end_on_signal", lambda: None)
    gpu_peers.main()


def test_it_goes_on_where_it_was_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ran: list[bool]) -> None:
    record = tmp_path / "peers.json"
    main(monkeypatch, "--json", str(record))
    assert rows(record) == [("none", None), ("forebay-eager", "cut short")]
    main(monkeypatch, "--json", str(record), "--resume")
    assert rows(record) == [("none", None), ("forebay-eager", None), ("forebay-lazy", None)]
    assert ran == [False, False, False, True]


def test_other_numbers_are_not_mixed_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ran: list[bool]) -> None:
    record = tmp_path / "peers.json"
    main(monkeypatch, "--json", str(record))
    with pytest.raises(SystemExit, match="another shape"):
        main(monkeypatch, "--json", str(record), "--resume", "--device-blocks", "99")


def test_an_engine_that_fails_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ran: list[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "peers.json"
    ran.extend([False, False])  # nothing is cut
    main(monkeypatch, "--json", str(record), "--host-bytes", "7")
    assert [problem for _, problem in rows(record)] == [None, *["failed in start: KeyError"] * 2]
    assert "Forebay lazy: failed in start: KeyError" in capsys.readouterr().out


def test_no_engine_begins_that_may_not_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ran: list[bool]
) -> None:
    record = tmp_path / "peers.json"
    main(monkeypatch, "--json", str(record), "--budget", "0")
    assert ran == []
    assert {problem for _, problem in rows(record)} == {"not run: 0 s were left"}
