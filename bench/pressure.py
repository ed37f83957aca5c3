"""What a step costs the scheduler when things are tight: `python bench/pressure.py`.

Four situations in which a cache manager can fall off a cliff. The host pool has 100,000 slots and is full, or
too small for what is asked of it. Milliseconds of the scheduler's thread for a whole step, or for a whole
round of questions. No bytes move.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable

from scheduler_cost import BYTES_PER_BLOCK, SEED, TOKENS_PER_BLOCK, ListDevice, Prompt, expect, header

from forebay import (
    FullAttention,
    KVLayout,
    NotYet,
    OffloadConfig,
    OffloadManager,
    Outcome,
    Progress,
    Rank,
    Report,
    Step,
)
from forebay.ids import BlockId, RequestId
from forebay.policies import POLICIES

SLOTS = 100_000
LAYOUT = KVLayout((FullAttention(TOKENS_PER_BLOCK),), TOKENS_PER_BLOCK, BYTES_PER_BLOCK)


class Bench:
    def __init__(self, policy: str, slots: int = SLOTS) -> None:
        config = OffloadConfig(slots * BYTES_PER_BLOCK, eviction_policy=policy)
        self.manager = OffloadManager(LAYOUT, config, ListDevice(1_000_000), slots=slots)
        self.rng = random.Random(SEED)
        self.requests = 0
        self.blocks = 0

    def prompt(self, blocks: int) -> Prompt:
        self.requests += 1
        return Prompt(RequestId(f"r{self.requests}"), [self.rng.randbytes(32) for _ in range(blocks)])

    def take(self, count: int) -> list[BlockId]:
        self.blocks += count
        return [BlockId(i) for i in range(self.blocks - count + 1, self.blocks + 1)]

    def admit(self, prompt: Prompt) -> None:
        self.manager.allocated(prompt, [self.take(len(prompt.hashes))], 0, 0)

    def grow(self, prompt: Prompt) -> Progress:
        """One block decoded."""
        prompt.hashes.append(self.rng.randbytes(32))
        prompt.num_tokens += TOKENS_PER_BLOCK
        return Progress(prompt.id, len(prompt.hashes) * TOKENS_PER_BLOCK, [self.take(1)])

    def step(self, progress: Iterable[Progress]) -> float:
        """Milliseconds of one step: its planning and the reports of all it ordered."""
        progress = list(progress)
        started = time.perf_counter()
        planned: Step = self.manager.step(progress)
        self.manager.report(
            [Report(order.id, Rank(0), Outcome.DONE) for order in (*planned.loads, *planned.stores)]
        )
        return (time.perf_counter() - started) * 1e3

    def store(self, prompt: Prompt) -> float:
        self.admit(prompt)
        return self.step([Progress(prompt.id, len(prompt.hashes) * TOKENS_PER_BLOCK)])


def full_pool(policy: str) -> list[float]:
    """50 chats of 2,000 blocks that ended with three decoded blocks each; then small prompts that evict."""
    bench = Bench(policy)
    chats = [bench.prompt(1997) for _ in range(SLOTS // 2000)]
    for chat in chats:
        bench.store(chat)
    for _ in range(3):
        bench.step([bench.grow(chat) for chat in chats])
    for chat in chats:
        bench.manager.finish(chat.id, chat.num_tokens - 1)
    expect(bench.manager.pool.free == 0, "the pool is not full")
    times = [bench.store(bench.prompt(16)) for _ in range(200)]
    expect(bench.manager.pool.evictions == 200 * 16, "nothing was evicted")
    return times


def too_much_running(policy: str) -> list[float]:
    """256 running requests of 400 blocks, half of which fit, each decoding a block in every step."""
    bench = Bench(policy, SLOTS // 2)
    running = [bench.prompt(400) for _ in range(256)]
    for request in running:
        bench.store(request)
    before = bench.manager.stats.stored_blocks
    times = [bench.step([bench.grow(request) for request in running]) for _ in range(32)]
    expect(bench.manager.stats.stored_blocks - before <= 256 * 32, "blocks were stored more than once")
    return times


def larger_than_the_pool(policy: str) -> list[float]:
    """One prompt of 110,000 blocks that goes on decoding."""
    bench = Bench(policy)
    prompt = bench.prompt(110_000)
    bench.store(prompt)
    return [bench.step([bench.grow(prompt) if i % 16 == 0 else Progress(prompt.id, 0)]) for i in range(64)]


def many_wait_for_one_load(policy: str) -> list[float]:
    """256 equal prompts of 2,000 blocks ask again while one of them is being loaded."""
    bench = Bench(policy)
    first = bench.prompt(2000)
    bench.store(first)
    bench.manager.finish(first.id, first.num_tokens - 1)
    equal = [Prompt(RequestId(f"w{i}"), list(first.hashes)) for i in range(257)]
    bench.manager.match(equal[0], 0)
    bench.manager.allocated(equal[0], [bench.take(2001)], 0, 32_000)
    bench.manager.step()
    times = []
    for _ in range(20):
        started = time.perf_counter()
        answers = [bench.manager.match(request, 0) for request in equal[1:]]
        times.append((time.perf_counter() - started) * 1e3)
        expect(all(isinstance(answer, NotYet) for answer in answers), "somebody was not told to wait")
    return times


SITUATIONS: dict[str, Callable[[str], list[float]]] = {
    "full pool, 16 blocks evicted and stored": full_pool,
    "256 running, half of them fit": too_much_running,
    "one prompt larger than the pool": larger_than_the_pool,
    "256 wait for one load of 2,000 blocks": many_wait_for_one_load,
}


def main() -> None:
    for name, value in header(with_vllm=False).items():
        print(f"{name:<12} {value}")
    print(f"\n{'milliseconds: median / worst':<42}" + "".join(f"{policy:>20}" for policy in POLICIES))
    for name, situation in SITUATIONS.items():
        cells = []
        for policy in POLICIES:
            times = situation(policy)
            cells.append(f"{statistics.median(times):.2f} / {max(times):.2f}")
        print(f"{name:<42}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
