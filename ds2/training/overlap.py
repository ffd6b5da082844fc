"""Whether sums of gradients go beside the backward pass, and how, or behind it: what steps took each way decides."""

from __future__ import annotations

import logging
import statistics

from ds2.distributed.gradients import GradientReducer

log = logging.getLogger(__name__)

_WAYS = {"behind": (False, False), "beside": (True, False), "as copies beside": (True, True)}  # overlap, copied

_ENOUGH = 12  # steps each way that count
_MOST = 1000  # steps until what there is must do


class OverlapTrial:
    """Lets steps take turns until it knows which way is faster; then all go that way.

    On GPUs only: there the blocks that sum take multiprocessors from kernels that need many at once. Bits are the same
    every way, so ranks that stop and resume may choose anew. All ranks make the same calls with the same numbers.

    Args:
        gradients: whose `overlap` and `copied` are set; where overlap is off, it stays so.
    """

    def __init__(self, gradients: GradientReducer) -> None:
        self._gradients = gradients
        self.over = not gradients.overlaps or gradients.comm.device.type != "cuda"
        ways = list(_WAYS)[: 2 + (not self.over and gradients.can_copy)]
        self._took: dict[str, list[float]] = {way: [] for way in ways}
        self._way = ways[0]
        self._last: tuple[str, float, bool] | None = None
        self._steps = 0

    def begin(self) -> None:
        """A step begins."""
        if not self.over:
            self._take(list(self._took)[self._steps % len(self._took)])

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
            way, audio_before_s, counts = self._last
            if counts and former_s > 0 and audio_before_s > 0:
                self._took[way].append(former_s / audio_before_s)
        self._last = self._way, audio_s, usual
        if self._steps >= _MOST or min(map(len, self._took.values())) >= _ENOUGH:
            self._decide()

    def _take(self, way: str) -> None:
        self._way = way
        self._gradients.overlap, self._gradients.copied = _WAYS[way]

    def _decide(self) -> None:
        self.over = True
        took = {way: statistics.median(times) for way, times in self._took.items() if times}
        whole = len(took) == len(self._took)
        self._take(min(took, key=took.__getitem__) if whole else "behind")
        if self._gradients.comm.rank == 0:
            words = ", ".join(f"{1000 * seconds:.3f} {way}" for way, seconds in took.items())
            log.info("sums of gradients go %s the backward pass; ms a second of audio: %s", self._way, words)
