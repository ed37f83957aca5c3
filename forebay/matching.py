"""The longest prefix of a prompt that can be had without computing it, over host and device, across groups."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.engine import DevicePool
from forebay.groups import KVLayout
from forebay.ids import BlockId, Key, Slot
from forebay.pool import HostPool


@dataclass(slots=True)
class Sources:
    """Where the blocks [start, stop) of one group can be had. Block start + i is in exactly one of the two."""

    start: int
    stop: int
    host_at: list[int] = field(default_factory=list)  # block indexes, ascending
    host: list[Slot] = field(default_factory=list)
    device_at: list[int] = field(default_factory=list)
    device: list[BlockId] = field(default_factory=list)

    def cut(self, stop: int) -> None:
        """Keep only the blocks before `stop`."""
        if stop < self.stop:
            self.stop = stop
            for at, what in ((self.host_at, self.host), (self.device_at, self.device)):
                first = bisect_left(at, stop)
                del at[first:]
                del what[first:]


@dataclass(slots=True)
class Match:
    tokens: int
    """Tokens beyond those the engine has already."""
    sources: list[Sources]
    """One per group; empty if there is no match."""
    gaps: list[Key]
    """Keys that would have to appear somewhere for the match to become longer: it stays what it is until one
    of them does."""
    witnesses: list[Key] = field(default_factory=list)
    """Keys of the blocks after the hit that a drafter wants to match too. They are not copied, so not pinned."""

    @property
    def num_copies(self) -> int:
        return sum(len(each.host) + len(each.device) for each in self.sources)


def longest_match(
    layout: KVLayout,
    keys: Sequence[Sequence[Key]],
    have_tokens: int,
    limit_tokens: int,
    pool: HostPool,
    device: DevicePool | None,
) -> Match:
    """The longest hit of at most `limit_tokens` tokens in all, where the engine has `have_tokens` already.

    Blocks are looked for on the host and, if `device` is given, on the device too. Every group says which blocks a
    hit of some length needs. If one of them is nowhere, no longer hit can do without it either (the first block
    needed never falls as the hit grows), so the search goes on at the hit that ends before it. It ends at a length
    that every group accepts.
    """
    length = limit_tokens - limit_tokens % layout.alignment_tokens
    found: dict[int, Sources] = {}
    gaps: list[Key] = []
    # Groups that need the whole prefix first: they bound the search at once, and are walked only once.
    order = sorted(range(len(keys)), key=lambda g: not layout.groups[g].needs_whole_prefix)
    while length > have_tokens:
        for number in order:
            group = layout.groups[number]
            span = group.span_tokens
            start = max(group.first_needed(length), have_tokens // span)
            stop = length // span + group.blocks_beyond_hit
            known = found.get(number)
            if known is None or known.start != start or known.stop < stop:
                known = found[number] = _walk(keys[number], start, stop, pool, device)
            if known.stop < stop:
                if known.stop < len(keys[number]):
                    gaps.append(keys[number][known.stop])
                length = max(0, known.stop - group.blocks_beyond_hit) * span
                length -= length % layout.alignment_tokens
                break
        else:
            witnesses: list[Key] = []
            for number, sources in found.items():
                stop = length // layout.groups[number].span_tokens
                witnesses += keys[number][stop : stop + layout.groups[number].blocks_beyond_hit]
                sources.cut(stop)
            return Match(length - have_tokens, [found[g] for g in range(len(keys))], gaps, witnesses)
    return Match(0, [], gaps)


def _walk(keys: Sequence[Key], start: int, stop: int, pool: HostPool, device: DevicePool | None) -> Sources:
    """Find the blocks from `start` on until one is nowhere; a gap on one side is bridged by the other."""
    sources = Sources(start, start)
    at, end = start, min(stop, len(keys))
    while at < end:
        slots = pool.find_run(keys, at, end)
        sources.host += slots
        sources.host_at += range(at, at + len(slots))
        at += len(slots)
        if at < end:
            blocks = device.find_run(keys, at, end) if device is not None else []
            if not blocks:
                break
            sources.device += blocks
            sources.device_at += range(at, at + len(blocks))
            at += len(blocks)
    sources.stop = at
    return sources
