"""Attention in recorded steps: a new plan for the batch's present values before each repetition."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pagedkv.compute.backend import AttentionBatch
from pagedkv.compute.cpu import attention_args as at
from pagedkv.compute.cpu.attention_plan import AttentionPlan
from pagedkv.compute.cpu.threads import Recording, address_of

RenewPlan = Callable[[AttentionBatch, int | None], tuple[AttentionPlan, npt.NDArray[np.float32]]]


class _Group:
    """Calls of one record that share batch and window."""

    def __init__(self, recording: Recording, batch: AttentionBatch, window: int | None, renew: RenewPlan) -> None:
        self.recording, self.batch, self.window = recording, batch, window
        self.args: list[npt.NDArray[np.int64]] = []
        self._renew = renew
        self._held: tuple[AttentionPlan, npt.NDArray[np.float32], npt.NDArray[np.int64]] | None = None
        recording.before_replay(self._refresh)

    def _refresh(self) -> None:
        plan, partials = self._renew(self.batch, self.window)
        counters = np.tile(plan.counters, (len(self.args), 1))
        first, stride = address_of(counters), counters.strides[0]
        num_items, num_early = plan.num_items, plan.num_claimed_early
        records, place = address_of(plan.records), address_of(partials)
        for call, args in enumerate(self.args):
            args[1] = num_items
            args[at.NUM_CLAIMED_EARLY // 8] = num_early
            args[at.ITEMS // 8] = records
            args[at.PARTIALS // 8] = place
            args[at.COUNTERS // 8] = first + call * stride
        self._held = plan, partials, counters


class AttentionReplays:
    """Remembers the arguments of recorded calls and renews what depends on the batch's values."""

    def __init__(self, renew: RenewPlan) -> None:
        self._renew = renew
        self._groups: list[_Group] = []  # of the record being made; each lives on in its refresher

    def note(
        self, recording: Recording, batch: AttentionBatch, window: int | None, args: npt.NDArray[np.int64]
    ) -> None:
        """Remember a recorded call. The batch's arrays will hold new values at each repetition."""
        if self._groups and self._groups[0].recording is not recording:
            self._groups = []
        for group in self._groups:
            if group.batch is batch and group.window == window:
                break
        else:
            group = _Group(recording, batch, window, self._renew)
            self._groups.append(group)
        group.args.append(args)
