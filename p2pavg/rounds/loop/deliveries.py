"""Deliveries: what the training thread is given next, once it waits for it. On the loop thread."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

from p2pavg.rounds.loop.backlog import Backlog
from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.session import Session
from p2pavg.rounds.training import Average, Contribution, Heal, Inheritance, KeepGoing, Outcome

Given = tuple[Outcome, act.Commit | None]


class Deliveries:
    """The queue of averages and states, and the training thread's wait for them.

    While a state is downloaded, averages queue up: they follow on it.
    """

    def __init__(self, session: Session, backlog: Backlog) -> None:
        self._session = session
        self.backlog = backlog
        self._answer: Future[Outcome] | None = None
        self.contribution: Contribution | None = None  # of the training thread that waits
        self._queue: deque[Given] = deque()
        self._applying: Given | None = None
        self._inherited: deque[Inheritance] = deque()
        self.downloading = False  # a state, or results that follow on it
        self.unloaded = False  # the state is not with the training thread yet: what follows on it waits
        self.departing = False  # no state is loaded any more: what was accumulated goes to somebody else
        self.stopping = False  # the training thread is wanted at its next boundary

    @property
    def waiting(self) -> bool:
        """The training thread waits at a boundary."""
        return self._answer is not None

    def wait(self, contribution: Contribution, answer: Future[Outcome]) -> None:
        """The training thread came to a boundary."""
        self._answer, self.contribution = answer, contribution

    def waits_with(self, answer: Future[Outcome]) -> bool:
        """Whether this is the wait that goes on."""
        return answer is self._answer

    def put(self, average: Average, commit: act.Commit) -> None:
        """Another epoch's average."""
        kept = self.backlog.add(average) if self.unloaded else average  # else it is wanted soon
        self._queue.append((kept, commit))

    def put_state(self, heal: Heal) -> None:
        """A downloaded state: it comes before all averages."""
        self._queue.appendleft((heal, None))

    def begin_download(self) -> None:
        """A state is on its way, or results that follow on ours; what came with another one is void."""
        self.drop_states()
        self.downloading = self.unloaded = True

    @property
    def following(self) -> int:
        """Downloaded results that wait for the training thread."""
        return sum(commit is not None and commit.following for _, commit in self._queue)

    def unapplied(self) -> list[tuple[Average, act.Commit]]:
        """Averages of rounds that the training thread has yet to apply, in order; it may be at the first."""
        waiting = self._queue if self._applying is None else (self._applying, *self._queue)
        return [(o, commit) for o, commit in waiting if isinstance(o, Average) and commit is not None]

    def drop_states(self) -> None:
        """What was downloaded and is not loaded, states and results, is void."""
        kept: deque[Given] = deque()
        for outcome, commit in self._queue:
            if isinstance(outcome, Heal):
                continue
            if commit is None or not commit.following:
                kept.append((outcome, commit))
            elif isinstance(outcome, Average):
                self.backlog.remove(outcome)
        self._queue = kept

    def _drop_own(self) -> None:
        """What this peer committed before it had a state counts no more, though it may follow on that state:
        it comes again, as a result of others.
        """
        kept: deque[Given] = deque()
        for outcome, commit in self._queue:
            if commit is not None and commit.following:
                kept.append((outcome, commit))
            elif isinstance(outcome, Average):
                self.backlog.remove(outcome)
        self._queue = kept

    def put_inheritance(self, inheritance: Inheritance) -> None:
        """It is given when the training thread comes to a boundary: no round has its sums then."""
        self._inherited.append(inheritance)

    def drop_inheritances(self) -> int:
        """They belong to what is given up; how many samples."""
        samples = sum(inheritance.samples for inheritance in self._inherited)
        self._inherited.clear()
        return samples

    def give_inheritance(self) -> bool:
        """Answer the training thread, which has just arrived, with what others left to it."""
        answer = self._answer
        if answer is None or self._applying is not None or not self._inherited:
            return False
        if self.downloading and not self.departing:
            return False
        self._answer = self.contribution = None
        answer.set_result(self._inherited.popleft())
        return True

    def give(self) -> bool:
        """Answer the waiting training thread with what is next, if it may have it."""
        answer, session = self._answer, self._session
        if self.departing:
            self.drop_states()
        while answer is not None and self._applying is None and self._queue:
            if self.unloaded and not self.departing and not isinstance(self._queue[0][0], Heal):
                return False
            outcome, commit = self._queue.popleft()
            if isinstance(outcome, Average):
                self.backlog.remove(outcome)
            if commit is not None and commit.before != session.standing[1]:
                continue  # it does not follow on the state that was loaded
            if isinstance(outcome, Heal):
                self.unloaded = False
                self._drop_own()
            self._applying = (outcome, commit)
            if commit is not None:
                session.next_standing = (commit.ballot.epoch + 1, commit.lineage)
            elif isinstance(outcome, Heal):
                session.next_standing = (outcome.state.epoch, outcome.state.lineage)
            self._answer = self.contribution = None
            answer.set_result(outcome)
            return True
        return False

    def applied(self) -> Given | None:
        """What was given last is in the parameters."""
        given, self._applying = self._applying, None
        return given

    def resume(self) -> bool:
        """Let the training thread go on, if it waits; whether it did."""
        answer, self._answer = self._answer, None
        if answer is None:
            return False
        self.contribution = None
        answer.set_result(KeepGoing())
        return True

    def fail(self, error: BaseException) -> None:
        """The training thread gets this error instead of an outcome."""
        if self._answer is not None:
            self._answer.set_exception(error)
            self._answer = self.contribution = None

    def refresh_attention(self) -> None:
        """Whether the training thread has to come to a boundary, and to stay there."""
        self._session.set_catching_up(self.downloading)
        self._session.set_attention(
            self.stopping or bool(self._queue) or bool(self._inherited) or self.downloading
        )
