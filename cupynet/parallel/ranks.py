"""The processes that one mpiexec started, as workers of a run: `MpiLauncher` makes this process the one that it is.

Where one fails all must end, with its error told once. Whoever fails, or stops because another did, says so to the
others and waits, for a grace period, for what they say; then all know whose error is told: that of the lowest rank that
has one of its own. The others pass on `PeerFailed` with the same exit code. At the very end of its program a rank waits
until all have come there, for `timeout_s`. If one failed, or does not come, it takes the rest down with it: MPI would
wait for a rank that hangs. (How it is before MPI is up: start.py.)
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import TracebackType
from typing import TypeVar

import numpy as np

from cupynet.backend import usable_cores
from cupynet.checks import number, setting
from cupynet.errors import ConfigError, CupynetError, Interrupted, annotate
from cupynet.parallel.communicator import Communicator, PeerFailed, SerialCommunicator, WorkerTimeout
from cupynet.parallel.mpi import MpiCommunicator, library
from cupynet.parallel.start import HAND_ON_S, coming_together, let_output_go
from cupynet.parallel.team import RankTeam, Word
from cupynet.parallel.waiting import Patience

T = TypeVar("T")

GRACE_S = 4.0  # how long the others may take to notice a failure, and again to put their affairs in order
LONGEST_PAUSE_S = 0.02  # between two looks at what others say, at the end of the program

log = logging.getLogger(__name__)


class MpiJob:
    """All ranks of this job, seen from this one. One for each process: `job()`.

    Attributes:
        rank, size: this process's number, and how many there are.
        seats: of each rank its number on its machine.
        machines: the names of the ranks' machines.
        sharing: how many ranks share this one's cores, itself included.
    """

    def __init__(self) -> None:
        self._mpi = library()
        world = self._mpi.COMM_WORLD
        self.rank, self.size = world.Get_rank(), world.Get_size()
        self.team = RankTeam(self._mpi, world.Dup())
        self._comm = world.Dup()
        self._outcome: BaseException | None = None  # what became of this rank, once anything failed
        communicator, here = self.communicator(), world.Split_type(self._mpi.COMM_TYPE_SHARED)
        seats = communicator.gather_numbers(here.Get_rank())
        self.seats = tuple(int(seat) for seat in seats[:, 0])
        name = np.frombuffer(self._mpi.Get_processor_name().encode(), np.uint8)
        self.machines = [text.tobytes().decode() for text in communicator.all_gather_ragged(name)]
        leader = np.array([self.rank])
        here.Bcast(leader, 0)
        neighbours, mine = communicator.split(int(leader[0]), self.rank), usable_cores()
        theirs = neighbours.all_gather_ragged(np.array(sorted(mine), np.int64))
        self.sharing = sum(not mine.isdisjoint(cores.tolist()) for cores in theirs)
        if self.size > 1:
            atexit.register(self._leave)
            self._excepthook, sys.excepthook = sys.excepthook, self._uncaught

    def communicator(self) -> Communicator:
        """All ranks; what it sends is counted from 0."""
        return SerialCommunicator() if self.size == 1 else MpiCommunicator(self._comm, self.team)

    @property
    def timeout_s(self) -> float:
        """How long a rank waits for the others before it takes them for dead."""
        return self.team.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self.team.timeout_s = seconds

    def agree(self, settings: Mapping[str, object]) -> None:
        """Make sure that all ranks were given the same; ConfigError, on all of them, that names a difference."""
        text = json.dumps(settings, default=repr).encode()
        communicator = self.communicator()
        digests = communicator.all_gather(np.frombuffer(hashlib.sha256(text).digest(), np.uint8))
        if (digests == digests[0]).all():
            return
        texts = communicator.all_gather_ragged(np.frombuffer(text, np.uint8))
        given = [json.loads(text.tobytes()) for text in texts]
        keys = dict.fromkeys(key for each in given for key in each)
        key = next((key for key in keys if any(_shown(each, key) != _shown(given[0], key) for each in given)), None)
        if key is None:
            raise ConfigError("the settings stand in another order on some ranks: give all ranks the same")
        others: dict[str, list[int]] = {}
        for rank, each in enumerate(given):
            others.setdefault(_shown(each, key), []).append(rank)
        found = ", ".join(f"{value} on rank {_listed(there)}" for value, there in others.items())
        raise ConfigError(f"{key}: is {found}: all ranks must be given the same settings, of the same cupynet")

    def share(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        content = np.frombuffer(text.encode(), np.uint8)
        return self.communicator().all_gather_ragged(content)[0].tobytes().decode()

    def first_word(self, text: str) -> str:
        """Of the texts that ranks give, "" for none, that of the lowest; on all of them."""
        texts = self.communicator().all_gather_ragged(np.frombuffer(text.encode(), np.uint8))
        return next((each.tobytes().decode() for each in texts if len(each)), "")

    def where(self) -> str:
        """Which rank is on which machine, for people: `n01 (0, 1), n02 (2, 3)`."""
        there: dict[tuple[str, int], list[int]] = {}
        for rank, (name, seat) in enumerate(zip(self.machines, self.seats, strict=True)):
            # two machines may bear one name: a number that is already taken there begins another
            number = sum(self.seats[r] == seat and self.machines[r] == name for r in range(rank))
            there.setdefault((name, number), []).append(rank)
        return ", ".join(f"{name} ({', '.join(map(str, found))})" for (name, _), found in there.items())

    # failing --------------------------------------------------------------------------------------------------------

    def settle(self, error: BaseException) -> BaseException:
        """This rank has met `error`. What it must raise, or tell: `error` itself, or PeerFailed if another one is told.

        Takes as long as the others need to answer, at most the grace period. The first error decides: what comes after
        it is a consequence.
        """
        if self._outcome is not None or self.size == 1:
            return self._outcome or error
        word = Word.STOPPED if isinstance(error, PeerFailed) else Word.FAILED
        word = Word.LATE if isinstance(error, WorkerTimeout) else word
        self.team.say(word, _exit_code(error))
        self._listen_until(lambda: len(self.team.ended.keys() | self.team.leaving) == self.size, GRACE_S)
        first = self.team.first()
        if first is None or first == self.rank:
            self._outcome = error
        else:
            self._outcome = PeerFailed(f"worker {self.rank} stops because worker {first} failed")
            self._outcome.exit_code = self.team.ended[first][1]
        return self._outcome

    def speaks(self, error: BaseException) -> bool:
        """This rank has met `error`: whether it is the one to tell it. See `settle`."""
        return self.settle(error) is error and not isinstance(error, PeerFailed)

    def _listen_until(self, enough: Callable[[], bool], longest_s: float = float("inf")) -> bool:
        """Listen to the others, more and more seldom, until that is enough; False if it was not in time."""
        began, patience = time.monotonic(), Patience(longest_s)
        self.team.hear()
        while not enough():
            waited = time.monotonic() - began
            if patience.over():
                return False
            time.sleep(min(max(waited / 8, 0.0001), LONGEST_PAUSE_S))
            self.team.hear()
        return True

    def _uncaught(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """In place of sys.excepthook: of the ranks that end with an exception, one shows it."""
        told = self.settle(error)
        if told is error and not isinstance(error, PeerFailed):
            self._excepthook(kind, error, traceback)

    def _leave(self) -> None:
        """The end of this rank's program: wait for the others; if anybody failed or does not come, end them all."""
        team, everybody = self.team, set(range(self.size))
        if self._mpi.Is_finalized():
            return
        team.say(Word.LEAVING)
        if self._outcome is None:
            if not self._listen_until(lambda: team.leaving == everybody or team.first() is not None, team.timeout_s):
                self._give_up(everybody - team.leaving)
            elif team.first() is None:
                team.close()
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # MPI itself waits for all once more, and for ever
                signal.setitimer(signal.ITIMER_REAL, team.timeout_s)
                return
        first = self.rank if team.first() is None else team.first()
        # who has been heard of is on the way out, too; who has not hangs
        self._listen_until(lambda: team.leaving >= set(team.ended), GRACE_S)
        if first != self.rank:
            time.sleep(GRACE_S)  # the other ends this process meanwhile, unless something went wrong there
        sys.stdout.flush()
        sys.stderr.flush()
        let_output_go()
        code = team.ended[self.rank if first is None else first][1] if team.ended else 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # MPI's own words add nothing
        self._mpi.COMM_WORLD.Abort(code or 1)

    def _give_up(self, missing: set[int]) -> None:
        """At the end of the program the others have not come for too long: of those that waited one says so."""
        self.team.say(Word.LATE, WorkerTimeout.exit_code)
        self._listen_until(lambda: False, HAND_ON_S)  # another may have lost its patience at this very moment
        if self.team.first() == self.rank:
            log.error(
                "worker %s has not come to the end of its program, where worker %d waited for it for %g s, and is "
                "taken for dead: raise %s if it only had more to do",
                _listed(missing),
                self.rank,
                self.timeout_s,
                setting("parallel", "timeout_s"),
            )


@cache
def job() -> MpiJob:
    """This process's job; MPI is started when it is first asked for. ConfigError where there is none.

    All processes that were started must ask for it within a minute of each other.
    """
    with coming_together():
        return MpiJob()


class MpiLauncher:
    """Makes this process one of the workers: as many as there are ranks. A context manager is not needed.

    After a failure nothing more can be run, and the whole job ends when this program does.

    Args:
        timeout_s: how long a worker waits for the others before it takes them for dead, in seconds; also at the end of
            the program: where one of them has long work of its own after the last fit, it must be more than that takes.
    """

    def __init__(self, timeout_s: float = 300.0) -> None:
        self._job, self._usable, self._running = job(), True, False
        self.workers, self.first, self.sharing = self._job.size, self._job.rank, self._job.sharing
        self._job.timeout_s = number("timeout_s", timeout_s, above=0, unit="seconds")
        self._communicator = self._job.communicator()

    def run(self, task: Callable[[Communicator], T]) -> T | None:
        """See `Launcher.run`. RuntimeError after a failure or `close`, and while another task is running."""
        if not self._usable:
            raise RuntimeError("these workers have failed, been interrupted or closed: make a new ParallelWrapper")
        if self._running:
            raise RuntimeError("these workers are busy: a task cannot begin in the middle of another")
        self._running = True
        try:
            result = task(self._communicator)
        except BaseException as error:
            self._usable = False
            if not isinstance(error, CupynetError) and not getattr(error, "__notes__", None):
                annotate(error, f"worker {self._job.rank}")
            raised = self._job.settle(error)
            if raised is error:
                raise
            raise raised from error
        finally:
            self._running = False
        return result if self._job.rank == 0 else None

    def close(self) -> None:
        """Nothing more is run; after a failure nobody waits for the others to let go of NCCL too."""
        if self._usable:
            self._communicator.close()
        self._usable = False


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _shown(settings: Mapping[str, object], key: str) -> str:
    """The value of a setting, for people; `missing` where there is none of that name."""
    return json.dumps(settings[key]) if key in settings else "missing"


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return Interrupted.by(error).exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return error.exit_code if isinstance(error, CupynetError) else 1
