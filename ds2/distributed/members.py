"""Processes of a run find each other, and agree on who its ranks are.

The run folder is where ranks meet: it outlives every rank and every host. Each process has a locked file there, so that
all see when it ends, whose time it renews, so that all see when it is stopped, and a file with what it waits for. Who
the ranks are is a numbered view, a file that is created once and never changed: whoever creates it first decides, all
others read it. A view follows the one before when a rank was lost or a process wants to join; then all ranks of the
former view leave their group and wait for the next view.
"""

import errno
import fcntl
import json
import logging
import os
import platform
import re
import secrets
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from ds2.config.device import resolve_device
from ds2.config.schema import CommConfig, ConfigError
from ds2.distributed.communicator import differing_facts
from ds2.distributed.process_group import LostRankError
from ds2.distributed.tcp import STREAMS, TcpGroup
from ds2.distributed.watchdog import SILENT_S
from ds2.system import UserError
from ds2.system.files import name_errors
from ds2.system.machine import reachable_address
from ds2.system.plain import from_plain, parse_json
from ds2.system.signals import Stopped

log = logging.getLogger(__name__)

POLL_S = 0.02
LOOK_S = 0.5  # from one look for processes that want to join to the next
BEAT_S = 1.0  # from one sign of life to the next
_ASLEEP_S = 3.0  # a process that did nothing for so long cannot say that another was silent
_CONNECT_S = 5.0
_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE)
_HELLO = struct.Struct("<IB16s")  # number of the view, stream, id of the sender
_VIEW, _REQUEST = re.compile(r"view-\d{6}\.json"), re.compile(r"[0-9a-f]{32}\.json")  # other files are not ours
_PREPARING = "preparing"
JOINER = -1  # for the number of its last commit, in a process without the state of the run


class LeftBehindError(LostRankError):
    """The others went on without this process: its state is no part of the run any more, and it may join again."""


@dataclass(frozen=True)
class Member:
    """A process of a run: a random id that only those know who can read the run folder, and where it listens."""

    id: str
    host: str
    process: int
    address: str
    port: int


@dataclass
class View:
    """The ranks of a run from some step on, in order."""

    number: int  # counts views
    members: list[Member]
    joined: int = 0  # the number of those, the last ones, that were not in the view before
    left: list[str] = field(default_factory=list)  # who of the view before is gone, and why
    enough: bool = True  # whether they are at least `comm.min_ranks`
    fresh: bool = True  # whether no rank holds the state of the run, so that it is read from the run folder
    facts: dict[str, str] = field(default_factory=dict)  # settings, versions and data, equal on all ranks

    def rank(self, member: str) -> int | None:
        """Return the rank of a process by its id; None if it has none."""
        return next((rank for rank, m in enumerate(self.members) if m.id == member), None)


@dataclass
class _Request:
    """What a process that waits for the next view writes down."""

    member: Member
    after: int  # the number of the view that it belonged to; -1 if none
    position: int  # the number of its last commit, or `JOINER`
    facts: dict[str, str]
    lost: dict[str, str] = field(default_factory=dict)  # ids of processes that it has lost, with the reasons
    stop_signal: int = 0  # the signal that asked it to end; 0: none


class Members:
    """The files by which the processes of a run find each other.

    Args:
        folder: of these files; every process of the run uses the same one.
        config: how many ranks there may be, and how long they wait.

    Raises:
        ConfigError: the folder's file system has no locks.
    """

    def __init__(self, folder: Path, config: CommConfig) -> None:
        self._folder, self._config = folder, config
        self._listener = socket.create_server(("", 0), backlog=256)
        address, port = reachable_address() or "127.0.0.1", self._listener.getsockname()[1]
        self.me = Member(secrets.token_hex(16), platform.node(), os.getpid(), address, port)
        self.view: View | None = None
        self._gpu = ""  # that this process uses, by its id
        self._enter()
        self._read: View | None = None  # the newest one, as far as this process knows
        self._left_behind = False
        self._unreached_s: float | None = None  # since when this process has failed to reach a rank
        self._beats: dict[str, tuple[int, float]] = {}  # by process: its last sign of life, and when this one saw it
        self._looked_s = time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="ds2-beat", daemon=True).start()

    def _enter(self) -> None:
        """Make the folder, the locked file of this process and its view, if it has one, where they are missing."""
        draft = self._folder / f"{self.me.id}.lock.new"
        while not (self._folder / f"{self.me.id}.lock").exists():
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"{self._folder} cannot be made: {error}; give another run_dir=...") from error
            try:
                self._lock = draft.open("w")
                fcntl.lockf(self._lock, fcntl.LOCK_EX)
                draft.rename(self._folder / f"{self.me.id}.lock")  # under this name it is always locked
            except FileNotFoundError:  # the last process that was there has removed the folder
                continue
            except OSError as error:
                raise ConfigError(
                    f"comm.max_ranks: {self._folder} has no file locks ({error}), by which ranks see that another one "
                    "ended: give a run_dir on a file system that has them"
                ) from error
        if self._gpu:
            self._write_gpu()
        if self.view is not None:
            self._propose(self.view, "again")

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            try:
                os.utime(self._folder / f"{self.me.id}.lock")
            except FileNotFoundError:
                with suppress(OSError, ConfigError):
                    self._enter()
            except OSError:
                pass
            self._look_at_all()

    def _look_at_all(self) -> None:
        """Note the signs of life of all processes, so that one is silent since it stopped, not since it was missed."""
        now_s = time.monotonic()
        if now_s - self._looked_s > _ASLEEP_S:  # this process, or the whole machine, was stopped: it saw nobody's
            self._beats.clear()
        self._looked_s = now_s
        for lock in self._folder.glob("*.lock"):
            self.silent_s(lock.stem)

    def silent_s(self, member: str) -> float:
        """How long a process has shown no sign of life, as far as this one has looked; clocks of hosts may differ."""
        now_s = time.monotonic()
        with suppress(OSError):
            beat = (self._folder / f"{member}.lock").stat().st_mtime_ns
            if member not in self._beats or self._beats[member][0] != beat:
                self._beats[member] = beat, now_s
        return now_s - self._beats[member][1] if member in self._beats else 0.0

    def _is_silent(self, member: str) -> bool:
        return member != self.me.id and self.silent_s(member) > min(SILENT_S, self._config.timeout_s)

    def next_view(
        self, position: int, facts: dict[str, str], lost: dict[str, str], stop_signal: Callable[[], int]
    ) -> View:
        """Wait for the view that follows; the processes that wait make it.

        Args:
            position: the number of this process's last commit, or `JOINER`.
            facts: see `View`.
            lost: ids of processes that this one has lost, with the reasons.
            stop_signal: returns the signal that asked this process to end, which then waits for no others; 0: none.

        Raises:
            LeftBehindError: the next view is without this process; the call after it is that of a `JOINER`.
            Stopped: a signal asked this process to end, which has no state, or others that wait for more have it.
            UserError: this process has other facts than the ranks, or `comm.max_ranks` ranks run already.
        """
        began_s, reported = time.monotonic(), False
        written: _Request | None = None
        while True:
            newest = self._newest()
            if newest is not None and newest.number > (self.view.number if self.view else -1):
                if newest.rank(self.me.id) is not None:
                    self.view, self._left_behind = newest, False
                    (self._folder / f"{self.me.id}.json").unlink(missing_ok=True)
                    return newest
                if self.view is not None:
                    self.view, self._left_behind = None, True
                    raise LeftBehindError("the others went on without this process, which did not answer or was behind")
            waited_s = time.monotonic() - began_s
            after = self.view.number if self.view else -1
            request = _Request(self.me, after, position, facts, dict(lost), stop_signal())
            if request.stop_signal and position == JOINER:
                raise Stopped(request.stop_signal)
            if request != written:
                self._write(f"{self.me.id}.json", asdict(request))
                written = request
            view = self._following(newest, request, lost, waited_s)
            if view is not None:
                self._propose(view)
            elif self.view is None and newest is not None and waited_s > LOOK_S:
                self._check_admission(newest, facts, waited_s)
                if not reported and waited_s > _CONNECT_S:
                    reported = True
                    log.info("waiting for the ranks of the run, which take a new one in after a step")
            time.sleep(POLL_S)

    def _following(self, newest: View | None, own: _Request, lost: dict[str, str], waited_s: float) -> View | None:
        """Return the view after the newest one, None where it is not known here; raises Stopped as `next_view`."""
        requests = {request.member.id: request for request in self._requests()} | {own.member.id: own}
        old = newest.members if newest is not None else []
        number = newest.number if newest is not None else -1
        present = [requests[m.id] for m in old if m.id in requests and requests[m.id].after == number]
        declared = {member: reason for request in present for member, reason in request.lost.items()}
        ids = {request.member.id for request in present}
        missing = [m for m in old if m.id not in ids and m.id not in declared and self.alive(m.id)]
        if missing:
            if own.member.id in ids:
                silent = [m.id for m in missing if self._is_silent(m.id)]
                lost.update({member: f"has been silent for {self.silent_s(member):.0f} s" for member in silent})
            if own.member.id in ids and waited_s > self._config.timeout_s:
                lost.update({m.id: f"has not answered for {waited_s:.0f} s" for m in missing if m.id not in lost})
            return None
        if present and own.member.id not in ids:
            return None
        joiners = [request for request in requests.values() if self._may_join(request, old, own.facts)]
        ranks = {m.id: rank for rank, m in enumerate(old)}
        present.sort(key=lambda request: (-request.position, ranks[request.member.id]))
        joiners.sort(key=lambda request: request.member.id)
        chosen = [*present, *joiners][: self._config.max_ranks]
        enough = len(chosen) >= self._config.min_ranks
        if not enough and waited_s < self._config.wait_s:
            if not own.stop_signal:
                return None
            if any(request.position >= own.position and not request.stop_signal for request in chosen):
                raise Stopped(own.stop_signal)
            chosen = [own]  # saves what nobody has who stays; the others wait on, and begin from there
        left = [
            f"rank {rank} on {m.host} (process {m.process}) {declared.get(m.id) or self._how_ended(m.id)}"
            for rank, m in enumerate(old)
            if m.id not in ids
        ]
        return View(
            number + 1,
            [request.member for request in chosen],
            joined=max(0, len(chosen) - len(present)),
            left=left if present else [],
            enough=enough,
            fresh=max(request.position for request in chosen) == JOINER,
            facts=own.facts,
        )

    def _how_ended(self, member: str) -> str:
        return "was killed" if (self._folder / f"{member}.lock").exists() else "left"  # who leaves removes its files

    def _propose(self, view: View, name: str = "view") -> None:
        """Create the file of a view unless another process has; `name` is that of a draft, one for each thread."""
        draft = self._write(f"{self.me.id}.{name}", asdict(view))
        try:
            with suppress(FileExistsError):
                os.link(draft, self._folder / f"view-{view.number:06d}.json")
        except OSError as error:
            raise ConfigError(
                f"comm.max_ranks: {self._folder} has no hard links ({error}), by which ranks agree who they are: "
                "give a run_dir on a file system that has them"
            ) from error
        finally:
            draft.unlink()
        for path in self._folder.glob("view-*.json"):
            if path.name < f"view-{view.number:06d}.json":
                path.unlink(missing_ok=True)
        for lock in self._folder.glob("*.lock"):
            if not self.alive(lock.stem):
                for path in self._folder.glob(f"{lock.stem}.*"):
                    path.unlink(missing_ok=True)

    def _check_admission(self, newest: View, facts: dict[str, str], waited_s: float) -> None:
        """Check whether the ranks of a view may take this process in."""
        if not any(self.alive(m.id) for m in newest.members):
            return
        if differing := differing_facts(facts, newest.facts):
            raise UserError(
                f"this process differs from the ranks of the run: {differing}; start it with the same overrides, data "
                "and versions"
            )
        if len(newest.members) >= self._config.max_ranks and waited_s > self._config.wait_s:
            raise UserError(
                f"the run has comm.max_ranks={self._config.max_ranks} ranks, and none of them left for "
                f"comm.wait_s={self._config.wait_s:g} s: start this one when one has"
            )

    def others_wait(self) -> bool:
        """Whether a process with the facts of the view wants to join it."""
        if self.view is None or len(self.view.members) >= self._config.max_ranks:
            return False
        return any(self._may_join(request, self.view.members, self.view.facts) for request in self._requests())

    def _may_join(self, request: _Request, ranks: Sequence[Member], facts: dict[str, str]) -> bool:
        """Whether a process becomes a rank beside these; one that is stopped would be taken in and lost for ever."""
        is_new = request.after < 0 and request.member not in ranks
        return is_new and request.facts == facts and not self._is_silent(request.member.id)

    def superseded(self) -> bool:
        """Whether the others went on without this process: the newest view is a later one, and it is not a rank there.

        A later view of which it is a rank does not count: the other ranks wait until it has read that view.
        """
        newest, view = self._newest(), self.view
        if self._left_behind or newest is None or view is None:
            return self._left_behind
        return newest.number > view.number and newest.rank(self.me.id) is None

    def connect(self, view: View) -> TcpGroup:
        """Connect to all other ranks of a view.

        Raises:
            LostRankError: a rank ended, or went on to another view.
            UserError: a rank that runs cannot be reached, see `_reach`.
            OSError: this process may open no more files.
        """
        own = view.rank(self.me.id)
        assert own is not None
        links: list[dict[int, socket.socket]] = [{} for _ in range(STREAMS)]
        hello = bytes.fromhex(self.me.id)
        try:
            for rank, member in enumerate(view.members[:own]):
                for stream in range(STREAMS):
                    links[stream][rank] = self._reach(member, view, _HELLO.pack(view.number, stream, hello))
            self._accept(view, own, links)
        except BaseException as error:
            for stream_links in links:
                for link in stream_links.values():
                    link.close()
            if isinstance(error, OSError) and error.errno not in _NO_MORE_FILES:  # without files it would be so again
                raise LostRankError(f"a rank of the new group cannot be reached ({error})") from error
            raise
        for stream_links in links:
            for link in stream_links.values():
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small sums are many
        self._unreached_s = None
        return TcpGroup(own, [m.host for m in view.members], links)

    def _reach(self, member: Member, view: View, hello: bytes) -> socket.socket:
        """Connect to a rank.

        Raises:
            OSError: it cannot be reached.
            UserError: it cannot, but it runs. This process is new, or it has been so for `comm.timeout_s`: the ranks
                would meet in vain again and again, so it has to go.
        """
        try:
            address = "127.0.0.1" if member.host == self.me.host else member.address
            link = socket.create_connection((address, member.port), _CONNECT_S)
            link.sendall(hello)
            return link
        except OSError as error:
            if error.errno in _NO_MORE_FILES:
                raise
            time.sleep(BEAT_S)  # a process that is killed closes its files one after the other
            now_s = time.monotonic()
            self._unreached_s = self._unreached_s or now_s
            is_new = len(view.members) - view.joined <= view.members.index(self.me)
            if self.alive(member.id) and (is_new or now_s - self._unreached_s > self._config.timeout_s):
                raise UserError(
                    f"the rank at {member.address}, port {member.port}, host {member.host}, process {member.process}, "
                    f"runs but cannot be reached from here ({error}), so the others go on without this one: let the "
                    "hosts of a run connect to each other on all ports, then start the same command again"
                ) from error
            raise

    def _accept(self, view: View, own: int, links: list[dict[int, socket.socket]]) -> None:
        began_s = time.monotonic()
        while any(len(stream) < len(view.members) - 1 for stream in links):
            if not select.select([self._listener], [], [], 0.05)[0]:
                self._check_view(view, own, time.monotonic() - began_s)
                continue
            link, _ = self._listener.accept()
            with suppress(OSError):
                link.settimeout(_CONNECT_S)
                number, stream, sender = _HELLO.unpack(_read_exactly(link, _HELLO.size))
                rank = view.rank(sender.hex()) if number == view.number and stream < STREAMS else None
                if rank is not None and rank > own and rank not in links[stream]:
                    links[stream][rank] = link
                    continue
            link.close()

    def _check_view(self, view: View, own: int, waited_s: float) -> None:
        """Raise LostRankError if the ranks of a view cannot all meet any more."""
        gone = [r for r, m in enumerate(view.members) if r != own and not self.alive(m.id)]
        leaving = [r.member.id for r in self._requests() if r.after >= view.number]
        newest = self._newest()
        if gone or any(view.rank(member) is not None for member in leaving) or (newest and newest.number > view.number):
            raise LostRankError(f"ranks {gone} ended" if gone else "a rank has left the new group")
        if waited_s > self._config.timeout_s or any(self._is_silent(m.id) for m in view.members):
            raise LostRankError("ranks of the new group have not answered")

    def _newest(self) -> View | None:
        while True:
            names = self._names(_VIEW)
            if not names:
                return None
            newest = max(names)
            if self._read is not None and newest == f"view-{self._read.number:06d}.json":
                return self._read
            with suppress(OSError):  # removed by the process that made the next one
                self._read = from_plain(View, parse_json((self._folder / newest).read_bytes()), newest)

    def _names(self, pattern: re.Pattern[str]) -> list[str]:
        """The names in the folder that match; where it was removed, this waits until the next beat made it again."""
        until_s = time.monotonic() + _ASLEEP_S
        while True:
            try:
                return list(filter(pattern.fullmatch, os.listdir(self._folder)))
            except FileNotFoundError:
                if time.monotonic() > until_s:
                    raise
            time.sleep(POLL_S)

    def _requests(self) -> Iterator[_Request]:
        """The requests of processes that have not ended."""
        for name in sorted(self._names(_REQUEST)):
            with suppress(OSError):
                request = from_plain(_Request, parse_json((self._folder / name).read_bytes()), name)
                if self.alive(request.member.id):
                    yield request

    def alive(self, member: str) -> bool:
        """Whether a process runs or is stopped, rather than has ended: whether its file is locked."""
        if member == self.me.id:
            return True  # to open the file and close it would free the lock
        try:
            with (self._folder / f"{member}.lock").open("rb") as file:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno != errno.ENOENT
        return False

    def _write(self, name: str, value: object) -> Path:
        path, draft = self._folder / name, self._folder / f"{name}.new"
        with name_errors(path), draft.open("w", encoding="utf-8") as file:
            file.write(json.dumps(value))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        return path

    def take_device(self, name: str) -> torch.device:
        """Return the device of this process: of the GPUs that it sees, one that the fewest processes of the run use.

        A process that takes the place of a lost one gets its GPU, whatever ranks they have. It stays with it, also
        where ranks that it shared the GPU with leave. `name` is that of the config; cpu and cuda:N leave no choice.
        """
        count = 0 if name == "cpu" else torch.cuda.device_count()
        if not count:
            return resolve_device(name)
        with self.one_at_a_time():
            gpus = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
            users = Counter(self._gpus_of_others())
            device = resolve_device(name, min(range(count), key=lambda index: users[gpus[index]]))
            if device.type == "cuda":
                self._gpu = gpus[device.index or 0]
                self._write_gpu()
                log.info(
                    "this process of the run uses %s of %d GPUs, %s; other processes on it: %d",
                    device, count, self._gpu, users[self._gpu],
                )  # fmt: skip
        return device

    def _gpus_of_others(self) -> Iterator[str]:
        for lock in self._folder.glob("*.lock"):
            if lock.stem != self.me.id and self.alive(lock.stem):  # the own file must not be closed, see `alive`
                with suppress(FileNotFoundError):
                    yield lock.read_text(encoding="utf-8")

    def _write_gpu(self) -> None:
        """Write the GPU of this process into its locked file."""
        self._lock.seek(0)
        self._lock.write(self._gpu)
        self._lock.flush()

    @contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        """Run the block in one process of the run after the other."""
        with (self._folder / _PREPARING).open("w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            yield

    def close(self) -> None:
        """Remove the files of this process."""
        self._closed.set()
        for path in self._folder.glob(f"{self.me.id}.*"):
            path.unlink(missing_ok=True)
        self._lock.close()
        self._listener.close()  # last: who cannot reach a process must see that it has ended
        if self.view is None:  # a process that was refused leaves nothing
            with suppress(OSError):
                (self._folder / _PREPARING).unlink(missing_ok=True)
                self._folder.rmdir()


def _read_exactly(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (piece := link.recv(count - len(data))):
            raise ConnectionResetError("end of file")
        data += piece
    return data
