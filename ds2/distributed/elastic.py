"""Sums over ranks that come and go while a run goes on."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ds2.config.schema import CommConfig
from ds2.distributed.communicator import OrderedCommunicator, Pending
from ds2.distributed.launcher import Launched
from ds2.distributed.members import BEAT_S, LOOK_S, POLL_S, Members, View
from ds2.distributed.nccl import NcclError, NcclSums, why_no_nccl
from ds2.distributed.process_group import LostRankError
from ds2.distributed.tcp import CLOSED, TcpGroup, alone
from ds2.distributed.watchdog import Hang

log = logging.getLogger(__name__)


class ElasticCommunicator(OrderedCommunicator):
    """Sums over ranks that come and go. A process is alone until its first `regroup`.

    Where each rank of a view has a GPU of its own, gradients and statistics are summed by NCCL. When a rank is lost, a
    kernel of NCCL waits for it until it is aborted, ends with wrong values then, and may have sent them to other ranks.
    So a step changes no weight before all ranks have confirmed its sums. Elsewhere sums go through host memory.

    Args:
        config: how many ranks there may be, and how long they wait.
        device: its name, see `Members.take_device`.
    """

    elastic = True

    def __init__(self, config: CommConfig, device: str, run_dir: Path) -> None:
        self.members = Members(run_dir / "members", config)
        self._facts: dict[str, str] = {}
        self._looked_s = 0.0
        self._nccl: NcclSums | None = None  # of the view
        self._why_no_nccl = ""  # why this process tries no NCCL any more
        try:
            super().__init__(alone(), self.members.take_device(device), config.timeout_s)
            self._on_the_host = self.name, self.path
        except BaseException:
            self.members.close()
            raise

    @property
    def view(self) -> View | None:
        """The ranks; None before the first `regroup`."""
        return self.members.view

    def _end_hang(self, hang: Hang) -> None:
        """Take the rank that hangs out of the group: its transfers fail."""
        self._tcp.lose(hang.rank, hang.reason)

    @property
    def _tcp(self) -> TcpGroup:
        assert isinstance(self.group, TcpGroup)
        return self.group

    def agree(self, facts: Mapping[str, object], remedy: str) -> None:
        """As `Communicator.agree`; before the first view, the facts become those of this process."""
        if self.view is None:
            self._facts.update({key: str(value) for key, value in facts.items()})
        else:
            super().agree(facts, remedy)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        if self.view is not None:
            with super().in_turn():
                yield
        else:
            with self.members.one_at_a_time():
                yield

    def check(self) -> None:
        if self._tcp.lost:
            raise LostRankError(self._tcp.reason)

    def joiners_wait(self) -> bool:
        now_s = time.monotonic()
        if self.rank != 0 or now_s - self._looked_s < LOOK_S:
            return False
        self._looked_s = now_s
        return self.members.others_wait()

    def superseded(self) -> bool:
        return self.members.superseded()

    def regroup(self, position: int, stop_signal: Callable[[], int]) -> View:
        """Leave the group, wait for the next view, and connect its ranks.

        Args:
            position: the number of the last commit of this process, or `JOINER`. The rank with the highest is rank 0.
            stop_signal: see `Members.next_view`.

        Raises:
            LostRankError: the new group has broken: call this again.
            LeftBehindError: the others went on without this process: call this again as a `JOINER`.
            UserError, Stopped: as `Members.next_view` and `Members.connect`.
        """
        lost = {}
        if self.view is not None:
            # A connection that was closed says nothing: its process may wait for the next view, as this one does.
            lost = {
                self.view.members[rank].id: reason
                for rank, reason in self._tcp.lost.items()
                if 0 <= rank != self.rank and not reason.startswith(CLOSED)
            }
        self._leave_group()
        if self.device.type == "cuda":  # what a broken step launched must not write over what comes next
            torch.cuda.synchronize(self.device)
        self.rank, self.world = 0, 1
        try:
            with self.status.waiting("a group of ranks"):
                view = self.members.next_view(position, self._facts, lost, stop_signal)
                group = self.members.connect(view)
        except BaseException:
            self._use(alone())
            raise
        self._use(group)
        self.barrier()
        self._choose_path()
        return view

    def _choose_path(self) -> None:
        """Connect the GPUs of a view by NCCL where all ranks can; raises LostRankError where one was lost meanwhile."""
        self.name, self.path = self._on_the_host
        if self.world == 1 or self.device.type != "cuda":
            return
        reason = self.group.first_nonempty(self._why_no_nccl) or why_no_nccl(self.group, self.device)
        if not reason:
            with self._calling_nccl():  # the others may wait for this rank, inside NCCL
                self._nccl = NcclSums(self)
            self._tcp.on_loss = self._nccl.abort
            self.barrier()
            self.name, self.path = NcclSums.name, NcclSums.path
        if self.rank == 0:
            log.info("gradients travel %s%s", self.path, f", not over nccl: {reason}" if reason else "")

    def _end_nccl(self) -> None:
        if self._nccl is not None:
            self._nccl.abort()
        self._nccl = None

    @property
    def confirms(self) -> bool:
        return self._nccl is not None

    def confirm_sums(self) -> None:
        if self.confirms:
            self.barrier()

    def sum_(self, tensor: Tensor) -> None:
        if self._nccl is None or not tensor.is_cuda:
            super().sum_(tensor)
            return
        with self._calling_nccl():
            self._nccl.sum_(tensor)

    def start_sum(self, tensor: Tensor, *, overlapped: bool = False) -> Pending:
        if self._nccl is None:
            return super().start_sum(tensor, overlapped=overlapped)
        with self._calling_nccl():
            return self._nccl.start(tensor, overlapped=overlapped)

    @contextmanager
    def _calling_nccl(self) -> Iterator[None]:
        """Raise LostRankError for an error of NCCL; unless a rank was lost, later views do without NCCL."""
        self.check()
        try:
            yield
        except NcclError as error:
            until_s = time.monotonic() + BEAT_S
            while not self._tcp.lost and time.monotonic() < until_s:
                time.sleep(POLL_S)
            if not self._tcp.lost:
                self._why_no_nccl = f"rank {self.rank} on {self.host}: {error}"
            raise LostRankError(self._tcp.reason or str(error)) from error

    def _leave_group(self) -> None:
        self.end_sums()
        self._end_nccl()
        self.watchdog.drop()
        self.group.close()

    def leave(self) -> None:
        """End the part of this process; the others go on."""
        self._leave_group()
        self.members.close()

    def close(self) -> None:
        self.end_sums()
        try:
            self.barrier()
            self._end_nccl()
            self.watchdog.stop()
        except LostRankError:  # all work is done
            self._end_nccl()
            self.watchdog.drop()
        self.group.close()
        self.members.close()


def why_not_elastic(config: CommConfig, start: Launched) -> str:
    """Return why ranks cannot come and go here, or ''."""
    if start.by == "mpi":
        return (
            f"mpirun or srun started {start.world} ranks, and MPI ends all of them when one is gone and takes none in: "
            "start each rank by itself, ds2 train ..., with the same run_dir"
        )
    if start.by:
        return (
            "torchrun started this rank; it ends all ranks of a host when one of them is gone, and starts all again "
            "when a host joins: start each rank by itself, ds2 train ..., with the same run_dir"
        )
    if config.backend != "auto":
        return f"comm={config.backend} has a fixed number of ranks: leave comm=auto"
    return ""
