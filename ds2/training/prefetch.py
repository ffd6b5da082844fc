"""Batches of the epochs to come, which the loader's workers prepare ahead, and their inputs, made while a step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from ds2.data.batching import deal
from ds2.data.loader import Batch, SpeechLoader
from ds2.distributed.communicator import Communicator
from ds2.training.inputs import Inputs

Plan = list[list[int]]


class EpochBatches:
    """This rank's parts of the batches of epochs; workers go on from one epoch to the next without a restart.

    Args:
        loader: of the training utterances.
        plan: the batches of an epoch, by its number.
        last_epoch: number of the last epoch.
        comm: the ranks among whom batches are dealt.
    """

    def __init__(self, loader: SpeechLoader, plan: Callable[[int], Plan], last_epoch: int, comm: Communicator) -> None:
        self._loader, self._plan, self._last_epoch, self._comm = loader, plan, last_epoch, comm
        self._next: tuple[int, int] | None = None  # epoch and batch that `_batches` yields next
        self._batches: Iterator[Batch] = iter(())

    def remaining(self, epoch: int, batch: int, count: int) -> Iterator[Batch]:
        """Yield the `count` batches of an epoch from its batch number `batch` on."""
        if self._next != (epoch, batch):
            self._batches = self._loader.epochs(self._parts(epoch, batch))
        self._next = None  # until all batches of the epoch are taken: whoever stops early starts workers anew
        yield from islice(self._batches, count)
        self._next = epoch + 1, 0

    def _parts(self, epoch: int, batch: int) -> Iterator[tuple[int, Plan]]:
        for number in range(epoch, max(epoch, self._last_epoch) + 1):
            yield number, [deal(whole, self._comm.rank, self._comm.world) for whole in self._plan(number)[batch:]]
            batch = 0


class PreparedBatches(Iterator[tuple[Batch, Inputs]]):
    """Batches with their inputs; `prepare_next` makes the next inputs while the device is busy with the last.

    Args:
        batches: of a rank.
        make_inputs: makes the inputs of a batch.
    """

    def __init__(self, batches: Iterator[Batch], make_inputs: Callable[[Batch], Inputs]) -> None:
        self._batches, self._make_inputs = batches, make_inputs
        self._next: tuple[Batch, Inputs] | None = None

    def __next__(self) -> tuple[Batch, Inputs]:
        """Return the next batch and its inputs."""
        self.prepare_next()
        prepared, self._next = self._next, None
        if prepared is None:
            raise StopIteration
        return prepared

    def prepare_next(self) -> None:
        """Make the next inputs, unless they are made or no batch is left."""
        if self._next is None and (batch := next(self._batches, None)) is not None:
            self._next = batch, self._make_inputs(batch)
