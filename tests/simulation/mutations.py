"""Deliberate protocol bugs. Each is a patch of the machine that the simulation has to catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from p2pavg.rounds.machine import succession
from p2pavg.rounds.machine.actions import CancelJob
from p2pavg.rounds.machine.core import Core
from p2pavg.rounds.machine.counting import Counting
from p2pavg.rounds.machine.decisions import Decisions
from p2pavg.rounds.machine.healing import Healing
from p2pavg.rounds.machine.leading import Leading
from p2pavg.rounds.machine.member import Member
from p2pavg.rounds.machine.rules.camps import Facts, LinkedPeers
from p2pavg.rounds.machine.succession import Succession
from p2pavg.rounds.machine.transfer import TransferRules
from p2pavg.rounds.machine.waiting import Waiting
from p2pavg.rounds.protocol.ballot import Stage
from p2pavg.rounds.protocol.lineage import History
from p2pavg.rounds.protocol.messages import Committed
from p2pavg.rounds.protocol.roles import Role

Original = Callable[..., Any]


@dataclass(frozen=True)
class Mutation:
    """One bug: `owner.name` is replaced by `make(original)`."""

    bug: str
    owner: Any
    name: str
    make: Callable[[Original], Original]
    seeds: tuple[int, ...] = ()  # schedules that caught it: where to look first


def _commit_early(original: Original) -> Original:
    def on_done(self: TransferRules, peer: bytes, message: Any) -> None:
        original(self, peer, message)
        proposal = self.core.proposal
        if (
            proposal is not None
            and len(proposal.voting) > 1
            and len(proposal.done) == len(proposal.voting) - 1
        ):
            self.core.lead(None)
            outcome = Committed(proposal.ballot, proposal.weights, proposal.samples, message.digests)
            for member in proposal.members:
                self.core.send(member, outcome)

    return on_done


def _no_promise(_: Original) -> Original:
    def freeze(self: Member) -> Any:
        return self.core.holding.described() if self.core.holding is not None else None

    return freeze


def _apply_when_done(original: Original) -> Original:
    def on_job_done(self: Member, event: Any) -> None:
        original(self, event)
        held = self.core.holding
        if held is not None and held.stage is Stage.DONE and held.voter:
            fact = Committed(held.ballot, held.weights, held.samples, event.digests)
            self.machine.decisions.on_committed(held.ballot.leader, fact)

    return on_job_done


def _trust_digests(original: Original) -> Original:
    def on_done(self: TransferRules, peer: bytes, message: Any) -> None:
        proposal = self.core.proposal
        if proposal is not None and proposal.done:
            first = next(iter(proposal.done.values()))
            message = replace(message, digests=first)
        original(self, peer, message)

    return on_done


def _trust_fact(original: Original) -> Original:
    def on_committed(self: Decisions, peer: bytes, message: Any) -> None:
        held = self.machine.core.holding
        if held is not None and held.ballot == message.ballot and held.stage is Stage.DONE:
            message = Committed(message.ballot, message.weights, message.samples, held.digests)
        original(self, peer, message)

    return on_committed


def _always_abort(_: Original) -> Original:
    return lambda answers: None


def _any_done(_: Original) -> Original:
    def decide(answers: dict[bytes, Any]) -> Any:
        done = [held for held in answers.values() if held is not None and held.stage is Stage.DONE]
        return max(done, key=lambda held: held.ballot, default=None)

    return decide


def _wait_for_ever(_: Original) -> Original:
    return lambda self: self.core.disarm("word")


def _any_lineage(original: Original) -> Original:
    def cannot(self: Member, ballot: Any, votes: bool) -> Any:
        why = original(self, ballot, votes)
        here = self.core.here.joining is None and self.core.here.epoch == ballot.epoch
        return None if why == "elsewhere" and here else why

    return cannot


def _same_epoch(_: Original) -> Original:
    return lambda self, facts: facts.epoch == self.here.epoch


def _anywhere(_: Original) -> Original:
    return lambda self, epoch, lineage: (
        self.epoch == epoch and not self.silent and not self.joining and self.role is Role.TRAINER
    )


def _all_camps(_: Original) -> Original:
    return lambda self, epoch, lineage: [
        facts for (at, _), camp in self._camps.items() if at == epoch for facts in camp.values()
    ]


def _forget_offers(_: Original) -> Original:
    return lambda self, epoch, transfer, samples: None


def _forget_losses(original: Original) -> Original:
    def adopt(self: History, donor: Any, unaveraged: int) -> int:
        original(self, donor, unaveraged)
        return 0

    return adopt


def _hold_on(original: Original) -> Original:
    def commit(self: Decisions, peer: bytes, held: Any, message: Any) -> None:
        original(self, peer, held, message)
        self.machine.core.holding = held  # so that the fact, told again, is committed again

    return commit


def _never_heal(_: Original) -> Original:
    return lambda self: None


def _never_forgive(_: Original) -> Original:
    return lambda self, others: False


def _found(_: Original) -> Original:
    def on_orphaned_timer(self: Healing) -> None:
        if self.core.here.joining is None:
            self.core.here.role = Role.TRAINER
            self.core.wait_at(0)

    return on_orphaned_timer


def _never_back(_: Original) -> Original:
    return lambda self, epoch, transfer: 0


def _cancel_nothing(original: Original) -> Original:
    def drop(self: Member, why: str) -> None:
        held = self.core.holding
        original(self, why)
        actions = self.core.actions
        if actions and isinstance(actions[-1], CancelJob) and held is not None and held.stage is Stage.DONE:
            self.core.holding = held  # an aborted result is kept, and may be committed later

    return drop


def _downward(original: Original) -> Original:
    def cannot(self: Member, *proposed: Any, **votes: Any) -> Any:
        why = original(self, *proposed, **votes)
        return None if why == "promised" else why

    return cannot


def _any_abort_voids(original: Original) -> Original:
    def on_aborted(self: Decisions, peer: bytes, message: Any) -> None:
        self.core.promises.released, self.core.promises.bound = True, None
        original(self, peer, message)

    return on_aborted


def _ask_nobody_else(original: Original) -> Original:
    def ask(self: Succession, voters: Any) -> None:
        if self.core.inquest is not None and not self.core.inquest.asked:
            original(self, voters)

    return ask


def _give_up_silently(_: Original) -> Original:
    def give_up(self: Succession, inquest: Any) -> None:
        self.core.inquest = None
        self.core.disarm("query")

    return give_up


def _more_than_declared(original: Original) -> Original:
    def on_ready(self: Leading, peer: bytes, message: Any) -> None:
        more = replace(message, samples=message.samples + 1, weight=message.weight + 1)
        original(self, peer, more if message.samples and peer != self.core.me else message)

    return on_ready


def _other_weights(original: Original) -> Original:
    def on_done(self: TransferRules, peer: bytes, message: Any) -> None:
        proposal = self.core.proposal
        if proposal is not None and proposal.begun:
            proposal.weights = tuple(2 * weight for weight in proposal.weights)
        original(self, peer, message)

    return on_done


def _done_after_denial(original: Original) -> Original:
    def job(self: Member, transfer: int) -> Any:
        held = self.core.holding
        denied = held is not None and held.transfer == transfer and held.frozen and held.stage is Stage.OPEN
        return held if denied else original(self, transfer)

    return job


def _whoever_has_the_name(original: Original) -> Original:
    def authority(self: Member) -> Any:
        self.core.promises.gone.clear()
        if self.core.holding is not None:
            self.core.holding.orphaned = False
        return original(self)

    return authority


def _never_replaced(_: Original) -> Original:
    return lambda self, peer: False


MUTATIONS: tuple[tuple[Mutation, ...], ...] = (
    (Mutation("commit without all voters DONE", TransferRules, "on_done", _commit_early, (0,)),),
    (Mutation("no promise to the successor", Member, "freeze", _no_promise),),
    (Mutation("apply when DONE, before COMMIT", Member, "on_job_done", _apply_when_done, (0,)),),
    (
        Mutation("digests are not compared", TransferRules, "on_done", _trust_digests, (17,)),
        Mutation("nor with the own result", Decisions, "on_committed", _trust_fact),
    ),
    (Mutation("the successor always aborts", succession, "decide", _always_abort, (207,)),),
    (Mutation("the successor commits when anybody is DONE", succession, "decide", _any_done, (59,)),),
    (Mutation("no deadline while waiting for the leader", Waiting, "watch", _wait_for_ever, (0,)),),
    (
        Mutation("the lineage of a proposal is not looked at", Member, "_cannot", _any_lineage, (94,)),
        Mutation("nor that of a member", Core, "stands_here", _same_epoch),
        Mutation("nor that of anybody", Facts, "trains_at", _anywhere),
        Mutation("nor of all together", LinkedPeers, "standing", _all_camps),
    ),
    (Mutation("what was offered to a lost round is forgotten", History, "offer", _forget_offers, (62, 65)),),
    (Mutation("healing does not name the lost samples", History, "adopt", _forget_losses, (0,)),),
    (Mutation("a fact that is told twice is applied twice", Decisions, "_commit", _hold_on, (0,)),),
    (Mutation("a peer on another lineage never heals", Healing, "consider", _never_heal, (0,)),),
    (Mutation("who missed a proposal stays out", Counting, "_readmit", _never_forgive),),
    (Mutation("a newcomer begins a run of its own", Healing, "on_orphaned_timer", _found),),
    (Mutation("what a later result holds of ours stays lost", History, "own", _never_back),),
    (Mutation("an aborted result can be committed later", Member, "drop", _cancel_nothing, (0, 13)),),
    (Mutation("a member promises downward", Member, "_cannot", _downward),),
    (Mutation("any ABORTED voids a promise to a successor", Decisions, "on_aborted", _any_abort_voids),),
    (Mutation("the successor does not ask whom answers name", Succession, "_ask", _ask_nobody_else),),
    (Mutation("a question that is given up is not told", Succession, "_give_up", _give_up_silently),),
    (Mutation("BEGIN with samples that nobody declared", Leading, "on_ready", _more_than_declared),),
    (Mutation("COMMITTED with other weights than BEGIN", TransferRules, "on_done", _other_weights),),
    (Mutation("DONE after a denial", Member, "_job", _done_after_denial),),
    (Mutation("a process that came back is waited for", Member, "authority", _whoever_has_the_name),),
    (Mutation("a ballot that was replaced is committed alone", Decisions, "_asked", _never_replaced),),
)


class Mutated:
    """`with Mutated(bugs): ...` runs with these bugs in the machine."""

    def __init__(self, mutations: tuple[Mutation, ...]) -> None:
        self.mutations = mutations
        self._originals: list[Original] = []

    def __enter__(self) -> None:
        for mutation in self.mutations:
            original = getattr(mutation.owner, mutation.name)
            self._originals.append(original)
            setattr(mutation.owner, mutation.name, mutation.make(original))

    def __exit__(self, *_: object) -> None:
        for mutation, original in zip(self.mutations, self._originals, strict=True):
            setattr(mutation.owner, mutation.name, original)
