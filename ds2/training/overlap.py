"""Whether sums of gradients go beside the backward pass or behind it: what steps took both ways decides."""

from __future__ import annotations

import logging
import statistics

from ds2.distributed.gradients import GradientReducer

log = logging.getLogger(__name__)

_ENOUGH = 12  # steps each way that count
_MOST = 1000  # steps until what there is must do


class OverlapTrial:
    """Lets steps take turns until it knows which way is faster; then all go that way.

    On GPUs only: there the blocks that sum take multiprocessors from kernels that need many at once. Bits are the same
    either way, so ranks that stop and resume may choose anew. All ranks make the same calls with the same numbers.

    Args:
        gradients: whose `overlap` is set; where it is off, it stays so.
    """

    def __init__(self, gradients: GradientReducer) -> None:
        self._gradients = gradients
        self.over = not gradients.overlaps or gradients.comm.device.type != "cuda"
        self._took: dict[bool, list[float]] = {False: [], True: []}
        self._last: tuple[bool, float, bool] | None = None
        self._steps = 0

    def begin(self) -> None:
        """A step begins."""
        if not self.over:
            self._gradients.overlap = self._steps % 2 == 1

    def end(self, audio_s: float, *, usual: bool, former_s: float) -> None:
        """A step has ended.

        Args:
            audio_s: seconds of audio that all ranks took together.
            usual: whether it took as long as later ones will, on every rank: recorded passes were only launched.
            former_s: what the step before it took, in seconds; the mean over ranks.
        """
        if self.over:
            return
        self._steps += 1
        if self._last is not None:
            beside, audio_before_s, counts = self._last
            if counts and former_s > 0 and audio_before_s > 0:
                self._took[beside].append(former_s / audio_before_s)
        self._last = self._gradients.overlap, audio_s, usual
        if self._steps >= _MOST or min(map(len, self._took.values())) >= _ENOUGH:
            self._decide()

    def _decide(self) -> None:
        self.over = True
        behind, beside = (statistics.median(self._took[way]) if self._took[way] else 0.0 for way in (False, True))
        self._gradients.overlap = bool(behind and beside) and beside < behind
        if self._gradients.comm.rank == 0:
            log.info(
                "sums of gradients go %s the backward pass: %.3f ms a second of audio beside it, %.3f behind it",
                "beside" if self._gradients.overlap else "behind", 1000 * beside, 1000 * behind,
            )  # fmt: skip
