"""What gpu_peers.py prints at its end: one table, and what of the targets was reached."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
"""One run of one engine: engine, label, kind (of KINDS), problem, and what its process has recorded."""

KINDS = ("cold", "none", "peer", "forebay")

DOCUMENTS_REPEAT_S = 0.40
DOCUMENTS_FIRST = 1.01
SHARE_CACHED = 0.998
CHAT_FIRST = 1.02
CHAT_LATER = 0.9
WITHIN = 1.02
START_S = 2.0
RESIDENT = 1.02
CAME_BACK = 1.0


def percentile(values: Iterable[float], percent: float) -> float | None:
    """The smallest that so many percent of all do not exceed."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, -(-len(ordered) * percent // 100).__trunc__() - 1)]


def phases(row: Row, workload: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = row.get("workloads", {}).get(workload, [])
    return found


def measures(row: Row) -> dict[str, float | None]:
    """The numbers of one row, by name; None for what it did not get to."""
    documents, chat = phases(row, "documents"), phases(row, "chat")
    # Without offload every round computes everything: all of them say what a first round takes.
    first = documents if row["kind"] == "none" else documents[:1]
    found: dict[str, float | None] = {
        "documents first": statistics.median(each["seconds"] for each in first) if first else None,
        "documents repeat": max((each["seconds"] for each in documents[1:]), default=None),
        "documents cached": min((each["share_cached"] for each in documents[1:]), default=None),
        "start": row.get("start_s"),
        "resident": row.get("resident_bytes"),
        "available drop": row.get("available_drop_bytes"),
        "came back": _came_back(row),
    }
    for turn, each in enumerate(chat, 1):
        found |= {f"chat turn {turn}": each["seconds"], f"chat cached {turn}": each["share_cached"]}
    later = [each["seconds"] for each in chat[1:]]
    found["chat later"] = sum(later) if later else None
    for workload, of in (
        ("documents repeat", documents[1:]),
        ("chat later", chat[1:]),
        ("miss", phases(row, "miss")),
        ("fits", phases(row, "fits")),
    ):
        ttft = [value for each in of for value in each["ttft_s"]]
        token = [value for each in of for value in each["token_s"]]
        found |= {
            f"{workload} ttft p50": percentile(ttft, 50),
            f"{workload} ttft p99": percentile(ttft, 99),
            f"{workload} per token p50": percentile(token, 50),
        }
    for workload in ("miss", "fits"):
        seconds = [each["seconds"] for each in phases(row, workload)]
        # Requests of a slice decode at two speeds, as others are still prefilled or not: a median of all of them
        # would jump from one to the other.
        means = [statistics.fmean(each["token_s"]) for each in phases(row, workload) if each["token_s"]]
        found[f"{workload} per token"] = statistics.median(means) if means else None
        if seconds:
            middle = statistics.median(seconds)
            found |= {
                workload: middle,
                f"{workload} spread": (max(seconds) - min(seconds)) / middle,
                f"{workload} tokens/s": statistics.median(each["tokens_per_s"] for each in phases(row, workload)),
                f"{workload} cached": statistics.median(each["share_cached"] for each in phases(row, workload)),
            }
    return found


def _came_back(row: Row) -> float | None:
    """Of the blocks that the engine said were cached, the share that held what was computed. A peer that cached
    nothing is not wrong."""
    found = row.get("came_back")
    if found is None:
        return None
    if not found["cached"]:
        return 0.0 if row["kind"] == "forebay" else None
    share: float = found["right"] / found["cached"]
    return share


@dataclass(frozen=True)
class Column:
    """All runs of one engine: the median of those that went well."""

    name: str
    label: str
    kind: str
    runs: int
    problem: str | None
    values: Mapping[str, float | None]
    not_proven: str | None = None
    """Why it is not known whether it brings back the right bytes."""

    def __getitem__(self, measure: str) -> float | None:
        return self.values.get(measure)

    @property
    def is_right(self) -> bool:
        """Not if it is known to bring back other bytes than were computed: then its times say nothing."""
        share = self["came back"]
        return share is None or share >= CAME_BACK


def columns(rows: Iterable[Row]) -> list[Column]:
    by_engine: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: KINDS.index(row["kind"])):
        if row["kind"] != "cold":
            by_engine.setdefault(row["engine"], []).append(row)
    result = []
    for name, mine in by_engine.items():
        good = [row for row in mine if row["problem"] is None] or mine  # half a run is better than none
        measured = [measures(row) for row in good]
        values: dict[str, float | None] = {}
        for measure in dict.fromkeys(key for each in measured for key in each):
            known = [value for each in measured if (value := each.get(measure)) is not None]
            # Bytes that were wrong once are wrong.
            of_runs = min if measure == "came back" else statistics.median
            values[measure] = of_runs(known) if known else None
        problem, not_proven = (
            next((row[key] for row in mine if row.get(key) is not None), None) for key in ("problem", "not_proven")
        )
        result.append(Column(name, mine[0]["label"], mine[0]["kind"], len(good), problem, values, not_proven))
    return result


def seconds(value: float) -> str:
    return f"{value:.3f} s" if value < 1 else f"{value:.2f} s"


def milliseconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 0.1 else f"{value * 1000:.0f} ms"


def share(value: float) -> str:
    return f"{value:.4f}"


def gigabytes(value: float) -> str:
    return f"{value / 1e9:.2f} GB"


LINES: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("documents first", seconds),
    ("documents repeat", seconds),
    ("documents cached", share),
    ("came back", share),
    ("documents repeat ttft p50", milliseconds),
    ("documents repeat ttft p99", milliseconds),
    ("chat turn 1", seconds),
    ("chat turn 2", seconds),
    ("chat turn 3", seconds),
    ("chat cached 2", share),
    ("chat cached 3", share),
    ("chat later", seconds),
    ("chat later ttft p50", milliseconds),
    ("chat later ttft p99", milliseconds),
    ("chat later per token p50", milliseconds),
    ("miss", seconds),
    ("miss spread", lambda value: f"{value:.1%}"),
    ("miss tokens/s", lambda value: f"{value:,.0f}"),
    ("miss ttft p50", milliseconds),
    ("miss ttft p99", milliseconds),
    ("miss per token", milliseconds),
    ("fits", seconds),
    ("fits spread", lambda value: f"{value:.1%}"),
    ("fits tokens/s", lambda value: f"{value:,.0f}"),
    ("fits cached", share),
    ("fits ttft p50", milliseconds),
    ("fits ttft p99", milliseconds),
    ("fits per token", milliseconds),
    ("start", seconds),
    ("resident", gigabytes),
    ("available drop", gigabytes),
)


def table(every: list[Column]) -> list[str]:
    """A line for each measure, a column for each engine. Below it, what went wrong."""
    widths = [max(12, len(column.label) + 2) for column in every]
    lines = [f"{'':<26}" + "".join(f"{each.label:>{width}}" for each, width in zip(every, widths, strict=True))]
    for measure, form in LINES:
        cells = ["-" if (value := each[measure]) is None else form(value) for each in every]
        if any(cell != "-" for cell in cells):
            lines.append(
                f"{measure:<26}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
            )
    lines += [f"{each.label}: {each.problem}" for each in every if each.problem is not None]
    lines += [
        f"{each.label}: not known whether its bytes are right: {each.not_proven}"
        for each in every
        if each.not_proven is not None
    ]
    lines += [
        f"{each.label}: brings back other bytes than were computed, so nothing is compared with it"
        for each in every
        if not each.is_right
    ]
    return lines


@dataclass(frozen=True)
class Verdict:
    what: str
    measured: str
    bound: str
    holds: bool | None
    """None: something was not measured."""

    def __str__(self) -> str:
        says = {True: "yes", False: "NO", None: "not measured"}[self.holds]
        return f"  {self.what:<38} {self.measured:>24}   must be {self.bound:<34} {says}"


def verdicts(ours: Column, every: list[Column], *, full: bool, host_bytes: int) -> list[Verdict]:
    """Each target with its bound beside it. Absolute ones mean something for the full shape only."""
    none = next((each for each in every if each.kind == "none"), None)
    peers = [each for each in every if each.kind == "peer" and each.is_right]

    def best(measure: str, pick: Callable[..., float] = min) -> tuple[float | None, str]:
        known = {each.label: value for each in peers if (value := each[measure]) is not None}
        name = pick(known, key=known.__getitem__) if known else ""
        return known.get(name), f"best peer, {name}" if name else "best peer"

    def ratio(what: str, measure: str, to: float | None, of: str, limit: float) -> Verdict:
        value, form = ours[measure], milliseconds if "per token" in measure else seconds
        if value is None or to is None:
            return Verdict(what, "-", f"<= {limit:g} x {of}", None)
        measured = f"{form(value)} = {value / to:.3f} x"
        return Verdict(what, measured, f"<= {limit:g} x {of} ({form(to)})", value <= limit * to)

    def of_none(what: str, measure: str, limit: float) -> Verdict:
        return ratio(what, measure, none[measure] if none else None, "no offload", limit)

    found = [of_none("documents, first round", "documents first", DOCUMENTS_FIRST)]
    repeat, cached = ours["documents repeat"], ours["documents cached"]
    if full:
        holds = None if repeat is None else repeat <= DOCUMENTS_REPEAT_S
        bound = f"<= {DOCUMENTS_REPEAT_S:.2f} s"
        found.append(
            Verdict("documents, slowest repeat", "-" if repeat is None else seconds(repeat), bound, holds)
        )
        holds, bound = None if cached is None else cached >= SHARE_CACHED, f">= {SHARE_CACHED}"
        found.append(Verdict("documents, share cached", "-" if cached is None else share(cached), bound, holds))
    back = ours["came back"]
    holds, bound = None if back is None else ours.is_right, f">= {CAME_BACK}"
    found.append(Verdict("blocks back as computed", "-" if back is None else share(back), bound, holds))
    peer, label = best("documents repeat")
    found.append(ratio("documents, slowest repeat", "documents repeat", peer, label, 1.0))
    found.append(of_none("chat, turn 1", "chat turn 1", CHAT_FIRST))
    peer, label = best("chat later")
    found.append(ratio("chat, later turns together", "chat later", peer, label, CHAT_LATER))
    for turn in (2, 3):
        mine, (peer, label) = ours[f"chat cached {turn}"], best(f"chat cached {turn}", max)
        if mine is not None:
            bound = f">= {label}{f' ({peer:.4f})' if peer is not None else ''}"
            found.append(
                Verdict(
                    f"chat, share cached, turn {turn}", share(mine), bound, None if peer is None else mine >= peer
                )
            )
    for workload in ("miss", "fits"):
        found.append(of_none(f"{workload}, median of slices", workload, WITHIN))
        found.append(of_none(f"{workload}, time per token", f"{workload} per token", WITHIN))
    found += [_start(ours, none), _resident(ours, none, host_bytes, full=full)]
    return found


def _start(ours: Column, none: Column | None) -> Verdict:
    value, base = ours["start"], none["start"] if none else None
    if value is None or base is None:
        return Verdict("start", "-", f"<= no offload + {START_S:g} s", None)
    return Verdict("start", seconds(value), f"<= {seconds(base)} + {START_S:g} s", value <= base + START_S)


def _resident(ours: Column, none: Column | None, host_bytes: int, *, full: bool) -> Verdict:
    """Where processes are not charged for pinned memory the machine's own account decides; of a few megabytes it
    knows nothing."""
    for measure in ("resident", "available drop"):
        value, base = ours[measure], none[measure] if none else None
        if value is None or base is None:
            continue
        more = value - base
        if measure == "resident" and more < 0.5 * host_bytes and full:
            continue
        bound = f"<= {RESIDENT:g} x asked ({gigabytes(host_bytes)})"
        return Verdict(f"{measure}, above no offload", gigabytes(more), bound, more <= RESIDENT * host_bytes)
    return Verdict("resident, above no offload", "-", f"<= {RESIDENT:g} x asked", None)
