"""A copier for engines whose device memory the host can address, such as vLLM on CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forebay.copier.arena import Arena
from forebay.copier.checksum import Checksums, Verify
from forebay.copier.faults import InjectedFaults, Spoil
from forebay.copier.orders import fault_of
from forebay.copier.threaded import Job, Jobs, ThreadedCopier
from forebay.errors import ConfigError
from forebay.ids import Key, Rank
from forebay.transfers import CopyOrder, Direction, Outcome


class TorchCopier(ThreadedCopier):
    """Its thread copies. What it has done is done, so there is nothing to wait for."""

    def __init__(
        self,
        regions: Sequence[torch.Tensor],
        slots: int,
        *,
        rank: Rank = Rank(0),  # noqa: B008 - a number to everybody but the type checker
        faults: InjectedFaults | None = None,
        verify: Verify = Verify.ALL,
    ) -> None:
        """`regions` as `block_regions()` returns them. Raises LayoutError or CapacityError if they do not do.
        `verify` says which blocks of a load have to be what was stored; those of orders without keys never are."""
        if faults is not None and faults.spoil == Spoil.EARLY.value:
            raise ConfigError("spoil", faults.spoil, "flip or reuse: on a CPU no copy can be reported too early")
        super().__init__(rank, faults)
        self._arena = Arena(regions, slots)
        self._checksums = Checksums(slots, verify)
        self._begin()

    @property
    def slots(self) -> int:
        return self._arena.slots

    @property
    def ready(self) -> int:
        """All of them: plain memory can be used as soon as it was asked for."""
        return self._arena.slots

    @property
    def bytes_per_block(self) -> int:
        """What the regions hold of a block: the padding of the engine's pages is not copied."""
        return self._arena.bytes_per_block

    @property
    def arena(self) -> torch.Tensor:
        """uint8 [slots, bytes_per_block]: in each slot the rows of all regions, one after the other. Without slots
        once the copier is closed."""
        return self._arena.memory

    def _release(self) -> None:
        self._arena.release()

    # --- the copying thread -------------------------------------------------------------------------------

    def _serve(self, jobs: Jobs) -> None:
        # Engines allocate in inference mode. Such memory can be written in that mode only, and modes are a
        # thread's own.
        with torch.inference_mode():
            while isinstance(job := jobs.get(), Job):
                self._ended.append((job, self._carry_out(job)))

    def _carry_out(self, job: Job) -> Outcome:
        order, fate = job.order, job.fate
        try:
            fault = fault_of(order, self._arena.num_blocks, self._arena.slots)
            if fault is None and (fate.fails or fate.kills):
                self._arena.garble(order)
            if fate.kills:
                raise SystemExit("injected")
            if fault is not None:
                self._warn("refused", "transfer %d was refused: %s", order.id, fault)
            if fault is not None or fate.fails:
                return Outcome.FAILED
            if fate.spoils is Spoil.REUSE and order.keys:
                self._reuse(order)
            wrong = self._copy(order)
            if fate.spoils is Spoil.FLIP and order.slots:
                self._arena.memory[order.slots[0], 0] ^= 1
        except Exception as error:  # noqa: BLE001 - every order ends in a report
            self._warn(type(error).__name__, "transfer %d could not be copied", order.id, exc_info=True)
            return Outcome.FAILED
        if wrong:
            text = "transfer %d found other bytes than were stored in slots %s"
            self._warn("mismatch", text, order.id, wrong)
        return Outcome.MISMATCH if wrong else Outcome.DONE

    def _copy(self, order: CopyOrder) -> list[int]:
        """Returns the slots that had other bytes than were stored under the key."""
        sums = self._checksums.begin(order)
        self._arena.copy(order, sums)
        if order.direction is Direction.STORE:
            self._checksums.keep(order, sums)
            return []
        return list(self._checksums.wrong_slots(order, sums))

    def _reuse(self, order: CopyOrder) -> None:
        """An injected fault: the first slot of a load is filled with something else before it is read."""
        other = [Key(bytes([key[0] ^ 1]) + key[1:]) for key in order.keys[:1]]
        self._copy(CopyOrder(order.id, Direction.STORE, order.blocks[:1], order.slots[:1], [], [], other))
