"""The batches to come, epoch after epoch, of which the loader's workers are ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from ds2.data.batching import deal
from ds2.data.loader import Batch, SpeechLoader
from ds2.distributed.communicator import Communicator

Plan = list[list[int]]


class ComingBatches:
    """This rank's parts of the batches of epochs; as long as one epoch follows the other, workers never start anew.

    Args:
        loader: of the training utterances.
        plan: the batches of an epoch, by its number.
        last: number of the last epoch.
        comm: the ranks among whom batches are dealt.
    """

    def __init__(self, loader: SpeechLoader, plan: Callable[[int], Plan], last: int, comm: Communicator) -> None:
        self._loader, self._plan, self._last, self._comm = loader, plan, last, comm
        self._place: tuple[int, int] | None = None  # (epoch, batch) that comes next
        self._batches: Iterator[Batch] = iter(())

    def rest(self, epoch: int, batch: int, count: int) -> Iterator[Batch]:
        """Yield the `count` batches of an epoch from its batch number `batch` on."""
        if self._place != (epoch, batch):
            self._batches = self._loader.epochs(self._parts(epoch, batch))
        self._place = None  # until all of them are taken: who leaves early starts anew
        yield from islice(self._batches, count)
        self._place = epoch + 1, 0

    def _parts(self, epoch: int, batch: int) -> Iterator[tuple[int, Plan]]:
        for number in range(epoch, max(epoch, self._last) + 1):
            yield number, [deal(whole, self._comm.rank, self._comm.world) for whole in self._plan(number)[batch:]]
            batch = 0
