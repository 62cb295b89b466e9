from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from p2pavg.optim import interrupts
from p2pavg.optim.interrupts import Interrupts


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises, where a shell started the tests in its background, too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def holding(notice_s: float = 60.0, began: bool = True) -> Interrupts:
    held = Interrupts()
    held.hold(lambda: began, notice_s)
    return held


def strike() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_waits_for_the_end_of_a_step() -> None:
    """Ctrl-C in a step is raised at its end, and one in a later step is held again."""
    held = holding()
    for _ in range(2):
        held.begins()
        assert held.inside
        strike()
        with pytest.raises(KeyboardInterrupt):
            held.ended()
        assert not held.waits
        assert not held.inside
    held.release()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_interrupts_at_once() -> None:
    """Who presses Ctrl-C twice waits for nothing, and is not interrupted once more."""
    held = holding()
    strike()
    with pytest.raises(KeyboardInterrupt):
        strike()
    held.ended()
    held.release()


def test_after_the_first_was_raised_none_is_held() -> None:
    """Who presses Ctrl-C again while the block is left waits for nothing."""
    held = holding()
    strike()
    with pytest.raises(KeyboardInterrupt):
        held.ended()
    with pytest.raises(KeyboardInterrupt):
        strike()
    held.release()


def test_a_step_on_another_thread_ends_the_wait_too() -> None:
    """Ctrl-C comes to the main thread, though another one trains."""
    held = holding()
    thread = threading.Thread(target=held.ended)

    def idle() -> None:
        strike()
        thread.start()
        threading.Event().wait(60)

    with pytest.raises(KeyboardInterrupt):
        idle()
    thread.join()
    held.release()


def test_a_block_that_has_ended_passes_all_on() -> None:
    """A handler that was put there inside the block may bring the block's own back after it."""
    held = holding()
    own = signal.getsignal(signal.SIGINT)
    held.release()
    signal.signal(signal.SIGINT, own)
    with pytest.raises(KeyboardInterrupt):
        strike()


def test_before_training_nothing_is_held() -> None:
    """Who waits for peers, and has nothing to hand over, is interrupted at once."""
    held = holding(began=False)
    with pytest.raises(KeyboardInterrupt):
        strike()
    held.release()


def test_without_a_step_it_comes_after_the_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that calls no step() any more is interrupted when the notice is over."""
    monkeypatch.setattr(interrupts, "SLACK_S", 0.0)
    held = holding(notice_s=0.0)

    def idle() -> None:
        strike()
        threading.Event().wait(60)

    with pytest.raises(KeyboardInterrupt):
        idle()
    held.release()


def test_what_came_is_delivered_at_the_end() -> None:
    """Ctrl-C while the block is left reaches the program when it was left."""
    held = holding()
    strike()
    with pytest.raises(KeyboardInterrupt):
        held.release()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_program_is_called() -> None:
    """A handler that was there before is called at the end of the step; one that came later is left alone."""
    calls: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: calls.append(number))
    held = holding()
    strike()
    assert calls == []
    held.ended()
    assert calls == [signal.SIGINT]

    def mine(*_: Any) -> None:
        calls.append(0)

    signal.signal(signal.SIGINT, mine)
    strike()
    held.release()
    assert calls == [signal.SIGINT, 0]
    assert signal.getsignal(signal.SIGINT) is mine


def test_other_threads_and_ignored_signals_change_nothing() -> None:
    """Interrupts stay ignored where a shell's background ignores them, and other threads hold none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    holding().release()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=holding)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nested_blocks_pass_it_on() -> None:
    """Of two optimizers, as a GAN has them, each holds it until its own step has ended."""
    outer, inner = holding(), holding()
    strike()
    inner.ended()
    assert outer.waits
    with pytest.raises(KeyboardInterrupt):
        outer.ended()
    inner.release()
    outer.release()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("ended", [False, True])
def test_the_second_interrupts_nested_blocks_at_once(ended: bool) -> None:
    """However many blocks hold it, and whether the inner one has passed it on."""
    outer, inner = holding(), holding()
    strike()
    if ended:
        inner.ended()
    with pytest.raises(KeyboardInterrupt):
        strike()
    assert not outer.waits
    inner.release()
    outer.release()


def test_nested_blocks_may_end_in_any_order() -> None:
    """The inner one leaves nothing behind of an outer one that was closed before it."""
    outer, inner = holding(), holding()
    outer.release()
    inner.release()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_workers_of_a_loader_work_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C goes to all processes of a terminal: a forked loader of data is ended by its parent, any other
    child by the interrupt.
    """
    held = holding()
    monkeypatch.setattr(held, "_owner", -1)
    monkeypatch.setattr(interrupts, "get_worker_info", lambda: "here")
    strike()
    monkeypatch.setattr(interrupts, "get_worker_info", lambda: None)
    with pytest.raises(KeyboardInterrupt):
        strike()
    held.release()
