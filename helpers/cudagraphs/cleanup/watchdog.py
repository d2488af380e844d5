# SPDX-License-Identifier: Apache-2.0
"""The deadline of a teardown: on the way a rescue, at the end stacks, culprit and exit.

Three layers, because a hung teardown may hold the interpreter lock or outlive the interpreter:
  1. a thread: at a share of the time it starts the rescue, at the deadline it dumps the stacks of all threads, says
     which object keeps graphs alive, and leaves with os._exit(status);
  2. faulthandler's own thread, which needs no interpreter lock, dumps the stacks half a second later;
  3. SIGALRM with its default action one second later: the kernel ends the process, shell status 142. It is also what
     ends a hang in a C++ destructor after Python is gone. Left out where the program uses SIGALRM itself.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

EXIT_TEARDOWN_HUNG = 75
_DUMP_AFTER_S = 0.5
_KILL_AFTER_S = 1.0
_STDERR = 2


@dataclass(frozen=True)
class Deadline:
    """When (time.monotonic() seconds) to leave, with which exit status, and the words that say why."""

    armed_at: float
    at: float
    rescue_at: float
    reason: str
    status: int


class Watchdog:
    """Deadlines of one process, the earliest first. Threads may arm and disarm at any time.

    rescue: called once for a deadline, in a thread of its own, when a share of its time is gone.
    explain: gives the lines that say which object keeps graphs alive.
    """

    def __init__(self, rescue: Callable[[], None], explain: Callable[[], list[str]]) -> None:
        self._rescue = rescue
        self._explain = explain
        self._deadlines: dict[int, Deadline] = {}
        self._tokens = itertools.count()
        self._changed = threading.Condition(threading.RLock())  # re-entrant: a signal handler may interrupt it
        self._owns_alarm = False
        # Started here, not when it is needed: a thread cannot be started while the interpreter is going down.
        threading.Thread(target=self._run, name="cuda-graph-watchdog", daemon=True).start()

    def arm(self, seconds: float, reason: str, status: int = EXIT_TEARDOWN_HUNG, rescue_share: float = 0.5) -> int:
        """Leave with `status` in `seconds` unless disarm() is called with the returned token.

        rescue_share: the part of the time after which the rescue starts.
        """
        now = time.monotonic()
        with self._changed:
            token = next(self._tokens)
            self._deadlines[token] = Deadline(now, now + seconds, now + rescue_share * seconds, reason, status)
            self._set_backstop()
            self._changed.notify()
        return token

    def disarm(self, token: int) -> None:
        """Forget one deadline; unknown tokens are ignored, so that it may be called twice."""
        with self._changed:
            if self._deadlines.pop(token, None) is not None:
                self._set_backstop()
                self._changed.notify()

    def move(self, token: int, seconds: float, rescue_after: float) -> None:
        """Give a deadline another end and a rescue that has not started another begin, both in seconds from when it was
        armed; unknown tokens are ignored."""
        with self._changed:
            if (deadline := self._deadlines.get(token)) is not None:
                begin = deadline.armed_at
                self._deadlines[token] = replace(deadline, at=begin + seconds, rescue_at=begin + rescue_after)
                self._set_backstop()
                self._changed.notify()

    def _set_backstop(self) -> None:
        """Point the lock-free layers at the earliest deadline, or switch them off."""
        left = min((d.at for d in self._deadlines.values()), default=None)
        free = signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
        if free and (self._owns_alarm or signal.getitimer(signal.ITIMER_REAL)[0] == 0):
            self._owns_alarm = left is not None
            signal.setitimer(
                signal.ITIMER_REAL, 0 if left is None else max(left - time.monotonic(), 0.0) + _KILL_AFTER_S
            )
        if left is None:
            faulthandler.cancel_dump_traceback_later()
            return
        try:
            faulthandler.dump_traceback_later(max(left - time.monotonic(), 0.0) + _DUMP_AFTER_S, file=_STDERR)
        except (OSError, RuntimeError, ValueError):  # stderr is closed
            pass

    def _run(self) -> None:
        rescued: set[int] = set()
        while True:
            with self._changed:
                token, deadline = min(self._deadlines.items(), key=lambda item: item[1].at, default=(None, None))
                if deadline is None:
                    self._changed.wait()
                    continue
                until = deadline.at if token in rescued else deadline.rescue_at
                if (left := until - time.monotonic()) > 0:
                    self._changed.wait(left)
                    continue
            if token in rescued:
                self._expire(deadline)
            rescued.add(token)
            try:
                threading.Thread(target=self._rescue, name="cuda-graph-rescue", daemon=True).start()
            except RuntimeError:  # too late in the interpreter's life: the deadline stands
                pass

    def _expire(self, deadline: Deadline) -> None:
        say(f"{deadline.reason}: still here at the limit. Stacks of all threads follow.")
        try:
            faulthandler.dump_traceback(file=_STDERR, all_threads=True)
            for line in self._explain() or ["no live CUDA graph was found"]:
                say(line)
        finally:
            say(f"leaving with exit code {deadline.status}")
            os._exit(deadline.status)


def say(text: str) -> None:
    """One line on the process's stderr, past Python's buffers and locks."""
    try:
        sys.stderr.flush()
    except Exception:  # stderr is closed or broken: the line below may still get out
        pass
    try:
        os.write(_STDERR, f"delete_graphs: {text}\n".encode(errors="replace"))
    except OSError:
        pass
