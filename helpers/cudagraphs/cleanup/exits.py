# SPDX-License-Identifier: Apache-2.0
"""install(): graphs are deleted on every way out of this process that Python can see."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType, TracebackType
from typing import Any

from cudagraphs.cleanup import groups
from cudagraphs.cleanup.deletion import delete_cuda_graphs, who_keeps_graphs
from cudagraphs.cleanup.report import DeletionReport
from cudagraphs.cleanup.watchdog import Watchdog, say

DEFAULT_LIMIT_S = 8.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
# An orderly end may be slow on a busy machine, and cutting it makes a failure of a run that succeeded.
ORDERLY_FACTOR = 4
# With peers two processes leave one after the other: first the one that failed, and then, once its launcher has seen that
# and signalled them, those that wait for it in a collective. Neither may use up the limit (8 s, out within 10 s of the
# fault): half of it for the first, 4 s, and for the others, whose main thread does not react, five eighths, 5 s.
_FAULT_SHARE_WITH_PEERS = 0.5
# After a signal: the share of the limit that a main thread has to react, before it counts as stuck in a collective and is
# rescued, and the share after which a process leaves whose main thread has not reacted then. Once it has reacted, the
# program's own cleanup has the whole limit, or three quarters where a rescue had to free it, as its peers have left the
# communicators by then; a rescue comes at half of the limit.
_STUCK_SHARE, _STUCK_END_SHARE, _FREED_END_SHARE, _UNWINDING_SHARE = 0.25, 0.625, 0.75, 0.5
_LAST_STAGE_SHARE = 0.125  # what a stage of the way out has at least, when those before it took the time
_RESCUE_LOCK_S = 0.5
_ABORT_BESIDE_S = 0.5  # a deletion that takes longer after a fault with peers waits for kernels that wait for a peer
_ABORT_LOCK_S = 1.0  # how long to wait for an abort that the other thread is in
_LISTENER_LAG_S = 2.0  # how late the listener may read of a signal that the main thread has handled already


class SignalExit(SystemExit):
    """Raised in the main thread by a signal whose default action is to end the process; unwinds like sys.exit()."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


class Exits:
    """What install() put in place in this process. One at most; uninstall() takes it back."""

    def __init__(self, limit: float, report_path: str | None, own_files: tuple[str, ...]) -> None:
        self.limit = limit
        self.report_path = report_path
        self.own_files = (__file__, *own_files)
        self.pid = os.getpid()
        self.signum: int | None = None  # the signal that ends this process
        self.fault = False
        self.leaving = False
        self.finished = False
        self.aborted = False
        self.had_peers = False  # an abort forgets the groups
        self._fault_ends: float | None = None
        self._aborting = threading.Lock()
        self.last_report: DeletionReport | None = None
        self.watchdog = Watchdog(self._rescue, who_keeps_graphs)
        self.previous: dict[int, Any] = {}
        self._signal_tokens: dict[int, int] = {}
        self._signalled_at = float("inf")
        self._interrupted_at = float("-inf")
        self._wakeup: tuple[int, int] | None = None
        self._token = -1

        # atexit runs last in, first out: deletion before everything that was registered until now, the deadline of the
        # interpreter's own end after everything that will be registered from now on.
        atexit.register(self._last_at_exit)
        atexit.register(self._on_exit)
        self.previous_hook = sys.excepthook
        sys.excepthook = self._excepthook
        groups.wrap(self._before_teardown, imported=self.delete_first_at_exit)
        self._take_signals()
        _at_multiprocessing_exit(self._on_exit)

    # --- taking and giving back -------------------------------------------------------------------------------------

    def _take_signals(self) -> None:
        """Handlers for signals whose action is the default or a Python handler; ignored and foreign ones stay."""
        if threading.current_thread() is not threading.main_thread():
            return  # Python lets only the main thread set handlers; every other way out still works
        for signum in SIGNALS:
            previous = signal.getsignal(signum)
            if previous is not None and previous != signal.SIG_IGN:
                self.previous[signum] = previous
                signal.signal(signum, self._on_signal)
        # Python runs a handler only between two bytecodes of the main thread. The wake-up pipe tells a thread at once,
        # so that a main thread stuck in a collective cannot keep the process.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        other = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if other != -1:  # an event loop owns it
            signal.set_wakeup_fd(other, warn_on_full_buffer=False)
            os.close(reader)
            os.close(writer)
            return
        self._wakeup = (reader, writer)
        threading.Thread(target=self._listen, args=(reader,), name="cuda-graph-signals", daemon=True).start()

    def release(self) -> None:
        """Put back what was there, except what somebody else has replaced since."""
        atexit.unregister(self._on_exit)
        atexit.unregister(self._last_at_exit)
        groups.unwrap()
        if sys.excepthook == self._excepthook:
            sys.excepthook = self.previous_hook
        if threading.current_thread() is threading.main_thread():
            for signum, previous in self.previous.items():
                if signal.getsignal(signum) == self._on_signal:
                    signal.signal(signum, previous)
            if self._wakeup is not None:
                signal.set_wakeup_fd(-1)
                os.close(self._wakeup[1])  # ends the listener, which closes the other end
        self._wakeup = None

    def delete_first_at_exit(self) -> None:
        """Move the deletion before every atexit callback registered so far."""
        atexit.unregister(self._on_exit)
        atexit.register(self._on_exit)

    # --- signals ----------------------------------------------------------------------------------------------------

    def _ends_process(self, signum: int) -> bool:
        """Whether this signal, as things are now, ends the process: our handler, and no handler of the program's."""
        previous = self.previous.get(signum)
        return signal.getsignal(signum) == self._on_signal and (
            previous == signal.SIG_DFL or previous is signal.default_int_handler
        )

    def _listen(self, reader: int) -> None:
        """A thread: start the deadline at the moment a signal arrives, whatever the main thread is doing."""
        while data := os.read(reader, 64):
            for signum in data:
                handled = time.monotonic() - self._interrupted_at < _LISTENER_LAG_S and signum == signal.SIGINT
                if self._ends_process(signum) and self.signum is None and not self.leaving and not handled:
                    self._arm_signal(signum)
        os.close(reader)

    def _arm_signal(self, signum: int) -> None:
        if signum not in self._signal_tokens:
            name = signal.Signals(signum).name
            self.had_peers = self.had_peers or groups.world_size() > 1
            share = _STUCK_END_SHARE if self.had_peers else 1.0
            self._signalled_at = time.monotonic()
            self._signal_tokens[signum] = self.watchdog.arm(
                share * self.limit, f"leaving on {name}", 128 + signum, rescue_share=_STUCK_SHARE / share
            )

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Light: decides who acts on the signal. The deletion happens when the main thread has unwound."""
        previous = self.previous[signum]
        if not self._ends_process(signum):
            # The program's handler: it was there before, or it came later and passes on to what it found. A default
            # action is nothing that it could have passed on to.
            if callable(previous):
                previous(signum, frame)
            return
        if self.leaving or self.signum is not None:
            return  # on the way out already, and the deadline bounds it
        if signum == signal.SIGINT:
            # A program may catch KeyboardInterrupt and go on; a deadline starts once it really leaves.
            self._interrupted_at = time.monotonic()
            self.watchdog.disarm(self._signal_tokens.pop(signum, -1))
            raise KeyboardInterrupt
        self.signum, self.fault = signum, True
        self._arm_signal(signum)
        freed = self.had_peers and time.monotonic() - self._signalled_at > _STUCK_SHARE * self.limit
        end = (_FREED_END_SHARE if freed else 1.0) * self.limit
        self.watchdog.move(self._signal_tokens[signum], end, _UNWINDING_SHARE * self.limit)
        raise SignalExit(signum)

    def _rescue(self) -> None:
        """Much of the time is gone: delete and abort from this thread, to free a main thread stuck in a collective."""
        self.fault = self.fault or bool(self._signal_tokens)
        groups.use_device_of_process()
        try:
            self._delete(self.fault, lock_timeout=_RESCUE_LOCK_S)
        except TimeoutError as error:
            say(str(error))
        if self.fault:
            self._abort()

    # --- the way out ------------------------------------------------------------------------------------------------

    def _time_to_leave(self, fault: bool) -> float:
        """Seconds for what is left of the way out. After a fault with peers the stages share one deadline."""
        if not fault:
            return ORDERLY_FACTOR * self.limit
        if not self.had_peers:
            return self.limit
        now = time.monotonic()
        if self._fault_ends is None or now > self._fault_ends:  # past it, the program had caught that fault and went on
            self._fault_ends = now + _FAULT_SHARE_WITH_PEERS * self.limit
        return max(self._fault_ends - now, _LAST_STAGE_SHARE * self.limit)

    def leave(self, fault: bool) -> None:
        """Delete every graph, abort communicators after a fault. Called again, it deletes what was captured since."""
        self.fault = self.fault or fault
        self.had_peers = self.had_peers or groups.world_size() > 1
        if not self.leaving:
            self.leaving = True
            status = {"status": 128 + self.signum} if self.signum is not None else {}
            self._token = self.watchdog.arm(self._time_to_leave(self.fault), "teardown", **status)
            self.watchdog.disarm(self._signal_tokens.pop(signal.SIGINT, -1))
        self._delete(self.fault)
        if self.fault:
            self._abort()

    def _delete(self, fault: bool, lock_timeout: float = -1) -> None:
        with self._abort_beside() if fault and groups.world_size() > 1 else nullcontext():
            report = delete_cuda_graphs(release_memory=False, lock_timeout=lock_timeout)
        for line in report.problems():
            say(line)
        if self.last_report is None or report.found:
            self.last_report = report

    @contextmanager
    def _abort_beside(self) -> Iterator[None]:
        """Abort the communicators beside a deletion that does not end, after a fault with peers.

        Deleting a graph waits for its kernels (cudaGraphExecDestroy), and a collective's wait for a peer until an abort
        frees them. The abort in turn waits for the graphs, so neither can go before the other.
        """
        timer = threading.Timer(_ABORT_BESIDE_S, self._abort)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # the interpreter is going down
            yield
            return
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _abort(self) -> None:
        if groups.world_size() == 1 or not self._aborting.acquire(timeout=_ABORT_LOCK_S):
            return
        try:
            if groups.world_size() == 1:  # the other thread has done it
                return
            groups.use_device_of_process()
            reason = groups.abort()
        finally:
            self._aborting.release()
        if reason is None:
            self.aborted = True
        else:
            say(f"communicators were not aborted: {reason}")

    @contextmanager
    def _before_teardown(self, name: str) -> Iterator[bool]:
        """Gives True when the groups are gone already and nothing is left to tear down.

        That is after a failure with peers: they are most likely in a collective, where NCCL's destroy waits for them
        and they for this rank, with or without graphs (reported for torch 2.13 with NCCL 2.29). So a
        destroy_process_group() in a finally block becomes an abort, which waits for nobody.
        """
        failing = self.fault or _failing()
        self.had_peers = self.had_peers or groups.world_size() > 1
        token = self.watchdog.arm(self._time_to_leave(failing), f"torch.distributed.{name}()")
        gone = False
        try:
            self._delete(failing)
            if failing and name == groups.DESTROY and groups.world_size() > 1:
                self._abort()
                gone = groups.world_size() == 1
            yield gone
        finally:
            self.watchdog.disarm(token)

    def _excepthook(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        trace = _without_own_frames(trace, self.own_files)
        self.previous_hook(kind, value.with_traceback(trace), trace)
        interactive = hasattr(sys, "ps1") or sys.flags.inspect
        if os.getpid() == self.pid and not interactive:
            self.leave(fault=True)

    def _on_exit(self) -> None:
        if os.getpid() != self.pid or self.finished:
            return
        self.finished = True
        self.leave(fault=False)
        if self.report_path is not None:
            self._write_report(self.report_path)
        if not self.fault:  # after an orderly end, what else runs at exit may take its time
            self.watchdog.disarm(self._token)

    def _write_report(self, path: str) -> None:
        if self.last_report is None:
            return
        body = {**self.last_report.as_dict(), "signal": self.signum, "fault": self.fault, "aborted": self.aborted}
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump(body, file)
        except OSError as error:
            say(f"could not write the report: {error}")

    def _last_at_exit(self) -> None:
        """After every callback registered since install(): a deadline for the interpreter's own end, or the signal."""
        if os.getpid() != self.pid:
            return
        if self.signum is not None:
            self._die_by(self.signum)
        self.watchdog.arm(self._time_to_leave(self.fault), "end of the interpreter")

    def _die_by(self, signum: int) -> None:
        """End as the signal itself would have ended the process."""
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # a closed pipe cannot be helped
                pass
        signal.signal(signum, signal.SIG_DFL)  # atexit runs in the main thread, which alone may do this
        os.kill(os.getpid(), signum)
        os._exit(128 + signum)


def _failing() -> bool:
    """Whether this thread is in a finally or except block of an error; sys.exit(0) and an iterator's end are none."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None and not isinstance(error, (StopIteration, StopAsyncIteration, GeneratorExit))


def _without_own_frames(trace: TracebackType | None, files: tuple[str, ...]) -> TracebackType | None:
    """The traceback that the program would have had without launcher and signal handler."""
    kept = []
    while trace is not None:
        if trace.tb_frame.f_code.co_filename not in files:
            kept.append(trace)
        trace = trace.tb_next
    for entry, following in zip(kept, [*kept[1:], None]):
        entry.tb_next = following
    return kept[0] if kept else None


_installed: Exits | None = None


def install(limit: float = DEFAULT_LIMIT_S, report_path: str | None = None, own_files: tuple[str, ...] = ()) -> Exits:
    """Put the exits in place; called again, only the deletion moves in front of newer atexit callbacks."""
    global _installed
    if not limit > 0:
        raise ValueError(f"limit must be a positive number of seconds, got {limit!r}")
    if _installed is not None and _installed.pid == os.getpid():
        _installed.delete_first_at_exit()
        return _installed
    _installed = Exits(limit, report_path, own_files)
    return _installed


def uninstall() -> None:
    """Take install() back. Harmless where nothing is installed."""
    global _installed
    if _installed is not None:
        _installed.release()
        _installed = None


def _forget_in_child() -> None:
    """A forked child (a data loader worker) owns no graph and no CUDA context: it gets the default behaviour back."""
    uninstall()


os.register_at_fork(after_in_child=_forget_in_child)


def _at_multiprocessing_exit(function: Callable[[], None]) -> None:
    """A forked multiprocessing child runs multiprocessing's finalizers, then os._exit(): atexit never runs."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, function, exitpriority=1000)
