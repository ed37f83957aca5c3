"""Breaks the core and the vLLM adapter on purpose, one line at a time, and says which test notices: `make mutants`.

Every entry is a file, a line of it, and the same line broken. A mutant that no test kills is a hole in the tests. The
working tree is not touched: mutants live in a temporary copy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
SUITES = (
    ["tests/test_manager.py", "tests/test_design.py", "tests/test_field_notes.py"],
    ["tests/test_pool.py", "tests/test_transfers.py", "tests/test_groups.py", "tests/policies"],
    ["tests/test_ghost.py", "tests/test_recency.py", "tests/test_reuse.py"],
    ["tests/test_room.py"],
    ["tests/test_state_machine.py"],
)
VLLM_SUITES = (
    ["tests/vllm/test_worker.py", "tests/vllm/test_device.py", "tests/vllm/test_config.py"],
    ["tests/vllm/test_scheduler.py"],
)
COPIER_SUITES = (["tests/copier"],)
MUTANTS = [
    ("pool.py", "self._pins.add(slots)", "pass", "a match pins nothing"),
    ("pool.py", "if slot in pins or key in keep or slot in self._filling:", "if key in keep:", "pinned slots may go"),
    ("pool.py", "key: Key | None = self._chains.tail(candidate)", "key: Key | None = candidate", "heads may go before tails"),
    ("pool.py", "self._exhausted = short > 0 and not kept_one", "self._exhausted = short > 0",
     "what one caller keeps binds the next"),
    ("pool.py", "if slots[key] in pins or key in keep)]", "if key in keep)]",
     "pinned slots may go with others"),
    ("chains.py", "if ends != keys:  # also if one is a tuple", "if False:",
     "keys go together that are no end of a chain"),
    ("recency.py", "sampled.append((newer, blocks, sums[i]))", "sampled.append((newer, blocks >> self._thinned, sums[i]))",
     "a sampled block stands for itself alone"),
    ("recency.py", "alike = not (start < self._far_until <= next_start or start < self._new_from <= next_start)", "alike = True",
     "a batch that is known in full becomes one with a sample"),
    ("recency.py", "stays = head is not None and head & _LOW == size << _PLACE_BITS", "stays = head is not None",
     "what lies behind a path that is used again comes with it"),
    ("recency.py", "if len(self._moved) > self._most_moved:", "if False:", "turns that nobody has are kept"),
    ("recency.py", "self._moved.get(turn, turn)", "turn", "what is used again stays where it was"),
    ("recency.py", "for block, each in self._old.items()\n            if not hash(block) & mask and (value := settled(each)) >= oldest", "for block, value in self._old.items()\n            if not hash(block) & mask and value >= oldest",
     "a sample has what was used again where it was before"),
    ("ghost.py", "if before >= on_device and number < len(self._found):", "if number < len(self._found):",
     "what is on the device is counted again in a sample"),
    ("pool.py", "self._lost |= in_use", "self._unused += in_use", "a reset frees slots under running copies"),
    ("matching.py", "stop = length // span + group.blocks_beyond_hit", "stop = length // span", "no block for a drafter"),
    ("matching.py", "length -= length % layout.alignment_tokens", "pass", "hits end off a block of another group"),
    ("groups.py", "return max(0, tokens - self.window_tokens + 1) // self.span_tokens",
     "return max(0, tokens - self.window_tokens + self.span_tokens) // self.span_tokens", "a window one block too short"),
    ("loads.py", "state.request.num_tokens - 1, bridge)", "state.request.num_tokens, bridge)", "the last token is not computed"),
    ("loads.py", "and held.epoch == self._books.pool.epoch", "", "an answer outlives its keys"),
    ("loads.py", "and held.loads_planned == self._planned", "", "an answer ignores loads that began since"),
    ("loads.py", "and all(self._is_there(key, bridge) for key in held.match.witnesses)", "", "a drafter's block may go"),
    ("loads.py", "return self._books.device.num_free >= self._own_blocks(device_tokens) + 2 * wanted", "return True", "bridges starve their request"),
    ("loads.py", "if self._engine_reserves or not self._reserved:", "if True:", "loaded requests fill the device"),
    ("loads.py", "if self._engine_reserves and self._is_out_of_room(found):", "if False:", "all that wait are asked in every step"),
    ("loads.py", "elif stopped_at is not None and not self._engine_reserves and (idle or stopped_at.waited_enough):", "elif False:",
     "an engine that stopped before loaded requests stays there"),
    ("loads.py", "if idle and self._reserved and not self._engine_reserves:", "if False:", "one is preempted over and over"),
    ("loads.py", "and bool(self._reserved) and self._books.device.num_free <= free", "", "who was passed over is not asked about again"),
    ("loads.py", "if self._in_the_way and state.request.id != next(iter(self._in_the_way)):", "if False:", "who was passed over starves"),
    ("loads.py", "self.end_reservation(state.request.id)  #", "pass  #", "others wait for a load that has failed"),
    ("loads.py", "and held.out_of_room == self._is_out_of_room(held.match)", "", "what was held without room is loaded twice"),
    ("loads.py", "if any(map(Brings.overlaps, transfer.brings, needs)):", "if False:", "equal prompts load N times"),
    ("stores.py", "if self._has_lost_its_head(state, number):", "if False:", "tails are stored without their heads"),
    ("stores.py", "return min(confirmed_tokens // span, len", "return min(confirmed_tokens // span + 1, len", "unconfirmed blocks are stored"),
    ("stores.py", "if books.device.keys_of(blocks) != wanted:", "if False:", "a window stores blocks of others"),
    ("stores.py", "self._ancestry.remember(state.keys[number])", "pass", "lazy stores do not know chains"),
    ("stores.py", "todo = [i for i in todo if wanted[i] not in self._refused]", "pass", "lazy keeps what must not be kept"),
    ("ahead.py", "return not soon", "return True", "loads outrun lazy stores"),
    ("ends.py", "if transfer.failed:", "if False:", "bad keys are offered again"),
    ("ends.py", "state.computes = True", "pass", "a failed load is tried without end"),
    ("ends.py", "self._books.device.pin(transfer.order.blocks + transfer.order.move_to)", "pass", "an abort frees blocks under a load"),
    ("ends.py", "transfer.orphaned = True", "pass", "and never unpins them"),
    ("ends.py", " and not transfer.must_end:", ":", "a load is given up where its request computes into the same blocks"),
    ("ends.py", "elif transfer.state is State.FAILED:", "elif False:", "a failed store keeps its slots"),
    ("transfers.py", "transfer.waiting_on.remove(report.rank)", "transfer.waiting_on.clear()", "one rank speaks for all"),
    ("transfers.py", "transfer.failed |= report.outcome.failed", "transfer.failed = report.outcome.failed", "the last rank decides"),
    ("manager.py", "self._stores.flush(state, confirmed_tokens)", "pass", "nothing is flushed at the end"),
    ("manager.py", "if not waited and not self._draining:", "if not self._draining:", "an aborted load stores garbage"),
    ("manager.py", "self._stores.room_has_grown(self._requests.values())", "pass", "growth does not wake stores"),
    ("manager.py", "self._loads.has_moved(state)", "pass", "the engine counts as stopped at one that it admitted"),
    ("manager.py", "state.waiting_since, state.waited_enough = None, False", "pass", "a wait is remembered for ever"),
    ("requests.py", "        self.table = []", "        pass", "a preempted request keeps its table"),
    ("vllm/scheduler.py", "finished.discard(request_id)", "pass", "what was reset is used when it arrives"),
    ("vllm/scheduler.py", "self._give_verdict(known.id, failed=False)", "pass", "an aborted load holds the engine up"),
    ("vllm/scheduler.py", "self._settle((), set())", "pass", "no deadline without reports"),
    ("vllm/scheduler.py", "            self.manager.preempt(request_id)", "            pass", "a preempted request keeps its table in vLLM"),
    ("vllm/scheduler.py", "if self._loading and not compat.recovers(self.kv_cache_config):", "if False:", "a reset that cannot be obeyed"),
    ("vllm/compat.py", "return not recovers(kv_cache_config) or (device_tokens > 0 and not REPORTS_FAILED_REQUESTS)",
     "return not recovers(kv_cache_config)", "vLLM computes into blocks that a late load still writes"),
    ("vllm/compat.py", "return not recovers(kv_cache_config) or (device", "return (device",
     "a late load that cannot be taken back is given up"),
    ("vllm/worker.py", "if load is None or load.request_id is None:", "if load is None:", "a load is told twice"),
    ("vllm/worker.py", "if failed and not self._recovers:", "if False:", "an engine goes on with what it cannot take back"),
    ("vllm/worker.py", "if self._has_caches and metadata.slots > self.num_cpu_blocks:", "if False:", "a rank with fewer slots goes on"),
    ("vllm/device.py", "self._waiting -= seen", "pass", "a block that was used goes back to its old place"),
    ("vllm/device.py", "queue.prepend_n(merged)", "queue.prepend_n(ahead + returning)", "stored blocks go behind others"),
    ("vllm/request.py", "return computed if self.has_run else min(computed, self.device_tokens)", "return computed", "what others load is stored"),
    ("vllm/config.py", "if blocks * self.per_rank(ranks) >= size:", "if True:", "less than a block is not named"),
    ("vllm/events.py", "*self.translate(events), ", "", "a reset loses what was to be said before it"),
    ("copier/checksum.py", "at[(self._sums[at] != _numbers(sums)) | ~self._known[at]].tolist()", "[]", "checksums are compared with nothing"),
    ("copier/checksum.py", "map(xxh3_64_intdigest, keys)", "[0] * len(keys)", "seeds ignore the key"),
    ("copier/stager.py", "after.append(work.mark)", "pass", "copies do not wait for the engine"),
    ("copier/stager.py", "self._control.wait(lane.last)", "pass", "an order ends before its lanes do"),
    ("copier/stager.py", " | (np.diff(memory.pieces(slots)) != 0)", "", "a copy reaches over the end of a piece"),
    ("copier/stager.py", "self._control.wait(stream.record())", "pass", "a refused order still writes"),
    ("copier/stager.py", "after = [uploaded]", "after = []", "a kernel reads a table that is still uploaded"),
    ("copier/stager.py", "self._control.wait(uploaded)", "pass", "an order without rows ends before its table is there"),
    ("copier/stager.py", "after.append(self._move(flight, work, after))", "self._move(flight, work, after)", "a load writes what a move still reads"),
    ("copier/staged.py", "if differ is None:", "if False:", "a copy that is not done is reported as done"),
    ("copier/staged.py", "self._stagers[flight.direction].synchronize()", "pass", "what was reported too early still runs"),
    ("copier/staged.py", "jobs[-1].mark,  #", "jobs[0].mark,  #", "stores that fly together wait for the first only"),
    ("copier/staged.py", "            and job.fate == Fate()\n", "", "the engine's thread is killed instead"),
    ("copier/staged.py", "self._give_loads(_AT_ONCE)", "pass", "the engine's thread begins nothing"),
    ("copier/staged.py", "self._give_loads(_LOW[Direction.LOAD])", "pass", "a device that runs dry waits for the thread"),
    ("copier/staged.py", "self._begun = _begun()  # or", "pass  # or", "what a dead thread left is given to the device after it was told"),
    ("copier/staged.py", "self._left_to_give > 0\n            and ", "", "the engine's thread gives all there is"),
    ("copier/staged.py", "            and self._pages.pinned\n", "", "the engine's thread waits for bytes"),
    ("copier/staged.py", "raise RuntimeError(job.cause_of_death)", "pass", "an error in the engine's thread is lost"),
    ("copier/threaded.py", "self._settle_down()\n            self._collect()", "self._collect()", "a dead thread's copies still run"),
    ("vllm/worker.py", "if early and order.move_to:", "if False:", "moves read what the step has not computed"),
    ("vllm/worker.py", "self._metadata = replace(metadata, loads=loads, waiting=waiting)", "pass", "a load is submitted twice"),
    ("vllm/worker.py", "self._meanwhile if self._is_asked else", "self._meanwhile if False else", "loads that ended are told late"),
    ("copier/staged.py", "begun[Direction.LOAD] and self._runs_dry(Direction.LOAD)", "False", "a thread rests while the bus stands still"),
    ("copier/staged.py", "sleep(_BREATH_S)", "pass", "the copier's thread never lets go"),
    ("copier/staged.py", "else:\n                self._rests.caught_up()", "else:\n                pass", "a thread that was held up once never rests again"),
    ("copier/staged.py", "if breathes or (job is None and wait_s):", "if True:", "breaks that are none"),
    ("copier/staged.py", "and not self._runs_dry(direction)", "", "a break while the device has nothing to do"),
    ("copier/staged.py", "self._rests.holds_up and not self._stopped", "self._rests.holds_up", "a copier that has stopped collects wakes"),
    ("copier/rests.py", "if self._held_up_since_s is None:", "if True:", "one rest after the other holds a store up"),
    ("vllm/worker.py", "self._staged.rest()  # the device", "pass  # the device", "the copier works while the step behind a load is made"),
    ("ahead.py", "if len(near) == len(blocks) else None)", "if blocks else None)", "lazy overlooks what has left the order"),
    ("ahead.py", "if done and in_place == count:", "if done:", "lazy trusts in places"),
    ("ahead.py", "and (not self._took or self._is_nearly_safe)", "", "lazy looks too late"),
    ("ahead.py", " and self._has_same_head", "", "lazy trusts everybody to tell"),
    ("ahead.py", "self._put_off = admits and ", "self._put_off = ", "walks are put off without end"),
    ("ahead.py", "admits and self._has_time and self._has_same_host", "admits and self._has_time", "lazy does not see what the host has lost"),
    ("manager.py", "self._books.pool.settle(leave=_PUT_OFF)", "pass", "one first token waits for the hits of many"),
    ("loads.py", "state.still_waits = state.waiting_since = None", "pass", "a wait that has ended counts for the next one"),
    ("manager.py", "if self._hits_are_due:  # nobody", "if True:  # nobody", "the first token waits for the policy"),
    ("pool.py", "return self._chains.hold(head, key)", "return False", "every prompt is looked up key by key"),
    ("ahead.py", "self._has_time and not self._put_off and ", "self._has_time and ", "a walk that was put off does not come"),
    ("ahead.py", "return self._free == self._books.device.num_free and ", "return ", "planners pass over steps that walk"),
    ("chains.py", "return run.keys[0] == head", "return True", "a tail whose head is not known counts as a whole chain"),
    ("policies/lru.py", "if last_put.get(key) is batch:", "if key in last_put:", "hits do not count"),
]  # fmt: skip


def main() -> int:
    survivors = 0
    for number, (name, line, broken, what) in enumerate(MUTANTS, 1):
        killer = first_to_notice(name, line, broken)
        survivors += killer is None
        print(f"{number:>2}/{len(MUTANTS)} {name}: {what}: {killer or 'SURVIVED'}", flush=True)
    print(f"{len(MUTANTS) - survivors} of {len(MUTANTS)} noticed")
    return 1 if survivors else 0


def first_to_notice(name: str, line: str, broken: str) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("forebay", "tests", "pyproject.toml"):
            source = ROOT / part
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / part)
        file = copy / "forebay" / name
        text = file.read_text()
        if text.count(line) != 1:
            raise SystemExit(f"tools/mutants.py: {name} has {text.count(line)} times, expected once: {line}")
        file.write_text(text.replace(line, broken))
        environment = {
            **os.environ,
            "PYTHONPATH": folder,
            "PYTHONDONTWRITEBYTECODE": "1",
            "FOREBAY_PROFILE": "no-shrink",
        }
        room = name.partition("/")[0]
        for suite in {"vllm": VLLM_SUITES, "copier": COPIER_SUITES}.get(room, SUITES):
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "--timeout=60",
                "-p",
                "no:cacheprovider",
                *suite,
            ]
            run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
            if run.returncode:
                failed = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
                return failed[1] if failed else f"{suite[0]} (did not end)"
    return None


if __name__ == "__main__":
    sys.exit(main())
