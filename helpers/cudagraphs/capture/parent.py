# SPDX-License-Identifier: Apache-2.0
"""Starts one process a variant, gives them their commands in turns, and survives whatever they do. Never imports torch.

A command goes to one or several children at once (`Session.ask`); each child has the phase's time limit, and one that
dies, reports a failure or passes its limit leaves the session with a `Failure`, while the others go on. Commands that
measure (capture, profile, time) are given to one child at a time, so that nobody else uses the GPU; the rest run
together.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from cudagraphs.capture import errors
from cudagraphs.capture.gpulock import GpuLock
from cudagraphs.capture.ranks import Ranks

HELPERS = Path(__file__).resolve().parents[2]
# Seconds a child gets after SIGUSR1 to write down where it stands, before it is killed.
LAST_WORDS = 1.0
# Phases that measure: one child has the GPU to itself, also against other runs of this tool on the same GPU.
MEASURING = ("capture", "profile", "time")
# How often waiting looks for news from other ranks.
TICK = 0.5


class StartError(RuntimeError):
    """The processes that run variants cannot be started; the text says what is missing."""


@dataclass
class Child:
    """A running variant as the parent sees it."""

    name: str
    pid: int
    commands: object
    replies: object
    log: Path
    status: Callable[[float], int | None]
    failure: errors.Failure | None = None
    last: str = ""
    answers: dict[str, dict] = field(default_factory=dict)
    ended: float | None = None
    _buffer: bytes = b""

    @property
    def alive(self) -> bool:
        return self.failure is None and self.ended is None

    def send(self, command: dict) -> None:
        try:
            os.write(self.commands, (json.dumps(command) + "\n").encode())
        except BrokenPipeError:
            pass  # its end shows on the reply pipe

    def read(self) -> list[dict] | None:
        """The messages that have arrived; None at the end of the pipe. Lines that are no JSON object are dropped."""
        data = os.read(self.replies, 1 << 20)
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        out = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict):
                out.append(message)
        return out

    def tail(self, size: int = 4000) -> str:
        """The end of what the process wrote to its log."""
        try:
            data = self.log.read_bytes()
        except OSError:
            return ""
        return data[-size:].decode(errors="replace")

    def kill(self) -> None:
        """SIGKILL to the process and to what it started."""
        for kill in (os.killpg, os.kill):
            try:
                kill(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue

    def close(self) -> None:
        for fd in (self.commands, self.replies):
            os.close(fd)


def _environment() -> dict[str, str]:
    """The user's environment, which is what is being tested, with defaults that only matter for many processes at
    once."""
    out = dict(os.environ)
    out["PYTHONPATH"] = os.pathsep.join([str(HELPERS), *filter(None, [out.get("PYTHONPATH")])])
    # One compile worker a process: each variant would start as many as there are cores.
    out.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    out.setdefault("OMP_NUM_THREADS", "1")
    # torch.cuda.is_available() must not initialize CUDA in the process that forks.
    out.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return out


class SpawnLauncher:
    """A fresh interpreter a variant: slow, but independent of what the stack does at import."""

    def __init__(self, logs: Path, command: list[str] | None = None):
        self._logs = logs
        self._command = command or [sys.executable, "-m", "cudagraphs.capture.child"]

    def start(self, job: dict) -> Child:
        commands_r, commands_w = os.pipe()
        replies_r, replies_w = os.pipe()
        log = self._logs / f"{_file_name(job['name'])}.log"
        with open(log, "wb") as target:
            process = subprocess.Popen(
                [*self._command, str(commands_r), str(replies_w)],
                pass_fds=(commands_r, replies_w),
                stdout=target,
                stderr=target,
                stdin=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,
            )
        os.close(commands_r)
        os.close(replies_w)

        def status(limit: float) -> int | None:
            try:
                return process.wait(limit)
            except subprocess.TimeoutExpired:
                return None

        child = Child(job["name"], process.pid, commands_w, replies_r, log, status)
        child.send(job)
        return child

    def close(self) -> None:
        pass


class ForkLauncher:
    """Forks variants from a server that has imported the stack. Raises StartError where the imports fail."""

    def __init__(self, logs: Path, modules: Iterable[str], limit_s: float = 300.0):
        self._logs = logs
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        answers_r, answers_w = os.pipe()
        self._answers = answers_r
        self._buffer = b""
        self._statuses: dict[int, int] = {}
        self._log = logs / "server.log"
        with open(self._log, "ab") as target:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "cudagraphs.capture.forkserver", str(other.fileno()), str(answers_w), *modules],
                pass_fds=(other.fileno(), answers_w),
                stdout=target,
                stderr=target,
                stdin=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,
            )
        other.close()
        os.close(answers_w)
        ready = self._wait(lambda message: "ready" in message, limit_s)
        if ready is None or not ready["ready"]:
            problem = (ready or {}).get("error") or self._log.read_text(errors="replace")[-2000:] or "no answer"
            self.close()
            raise StartError(f"the stack cannot be imported: {problem}")
        self.seconds = ready["seconds"]

    def _wait(self, wanted: Callable[[dict], bool], limit_s: float) -> dict | None:
        """The next message that is wanted; exit statuses met on the way are kept. None after the limit or the server's
        end."""
        end = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while True:
                while b"\n" in self._buffer:
                    line, self._buffer = self._buffer.split(b"\n", 1)
                    message = json.loads(line)
                    if "status" in message:
                        self._statuses[message["pid"]] = message["status"]
                    if wanted(message):
                        return message
                if not selector.select(max(0.0, end - time.monotonic())):
                    return None
                data = os.read(self._answers, 65536)
                if not data:
                    return None
                self._buffer += data

    def _fork(self, request: dict, log: Path) -> tuple[int, int, int]:
        commands_r, commands_w = os.pipe()
        replies_r, replies_w = os.pipe()
        with open(log, "wb") as target:
            socket.send_fds(self._control, [json.dumps(request).encode()], [commands_r, replies_w, target.fileno()])
        started = self._wait(lambda message: message.get("started") == request["name"], 30.0)
        os.close(commands_r)
        os.close(replies_w)
        if started is None:
            raise StartError(
                f"the fork server did not start {request['name']}: {self._log.read_text(errors='replace')[-2000:]}"
            )
        return started["pid"], commands_w, replies_r

    def probe(self, limit_s: float = 120.0) -> dict:
        """What `forkserver.probe` found, with `error` where it found no usable GPU."""
        pid, commands, replies = self._fork({"name": "probe", "probe": True}, self._logs / "probe.log")
        child = Child("probe", pid, commands, replies, self._logs / "probe.log", self._status(pid))
        text, end = b"", time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(replies, selectors.EVENT_READ)
            while selector.select(max(0.0, end - time.monotonic())):
                data = os.read(replies, 65536)
                if not data:
                    break
                text += data
        child.kill()
        child.close()
        try:
            return json.loads(text)
        except ValueError:
            return {"devices": 0, "error": f"the GPU probe gave no answer: {child.tail(500)}"}

    def _status(self, pid: int) -> Callable[[float], int | None]:
        def status(limit: float) -> int | None:
            if pid not in self._statuses:
                self._wait(lambda message: message.get("pid") == pid and "status" in message, limit)
            return self._statuses.get(pid)

        return status

    def start(self, job: dict) -> Child:
        log = self._logs / f"{_file_name(job['name'])}.log"
        pid, commands, replies = self._fork({"name": job["name"], "job": job}, log)
        return Child(job["name"], pid, commands, replies, log, self._status(pid))

    def close(self) -> None:
        self._control.close()
        os.close(self._answers)
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)


class Session:
    """The children of one run. `limits` holds seconds by phase, with `default`; `rules` maps assert texts to rule
    codes."""

    def __init__(
        self,
        launcher,
        limits: dict[str, float],
        ranks: Ranks,
        progress=lambda text: None,
        rules=lambda text: (),
        lock: GpuLock | None = None,
    ):
        self._launcher, self._limits, self._ranks, self._lock = launcher, limits, ranks, lock or GpuLock(None)
        self._progress, self._rules = progress, rules
        self.seconds: dict[str, float] = {}

    def start(self, job: dict) -> Child:
        return self._launcher.start(job)

    def limit(self, phase: str) -> float:
        return self._limits.get(phase, self._limits["default"])

    def ask(self, children: Iterable[Child], command: dict) -> list[Child]:
        """Gives the command to every child that is alive. Returns those that answered it on every rank.

        All children work at once on one GPU, one after the other on several: collectives of different process groups
        that wait for one another on the same GPUs make hardly any progress.
        """
        phase = command["do"]
        asked = [child for child in children if child.alive]
        for group in [asked] if self._ranks.world == 1 else [[child] for child in asked]:
            with self._lock.held(alone=phase in MEASURING):
                begin = time.monotonic()
                for child in group:
                    child.answers.pop(phase, None)
                    child.send(command)
                self._collect(group, phase, begin + self.limit(phase))
            for child in group:
                self._agree(child, phase)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - begin
        return [child for child in asked if child.failure is None]

    def _collect(self, asked: list[Child], phase: str, end: float) -> None:
        waiting = {child.replies: child for child in asked}
        with selectors.DefaultSelector() as selector:
            for fd in waiting:
                selector.register(fd, selectors.EVENT_READ)

            def done(child: Child) -> None:
                selector.unregister(child.replies)
                del waiting[child.replies]

            while waiting:
                left = end - time.monotonic()
                if left <= 0:
                    for child in list(waiting.values()):
                        self._stop_hung(child, phase)
                        done(child)
                    break
                ready = selector.select(min(left, TICK))
                for key, _ in ready:
                    child = waiting[key.fd]
                    if self._take(child, phase):
                        done(child)
                if not ready:
                    for child in list(waiting.values()):
                        news = self._ranks.failed(child.name)
                        if news:
                            child.failure = errors.peer(phase, *news)
                            child.kill()
                            done(child)

    def _take(self, child: Child, phase: str) -> bool:
        """Reads what arrived. True once the child has answered the phase or is gone."""
        messages = child.read()
        if messages is None:
            status = child.status(5.0)
            child.failure = errors.died(phase, status, child.tail())
            self._settle(child)
            return True
        for message in messages:
            if "progress" in message:
                child.last = message["progress"]
            elif message.get("reply") == phase:
                if message["ok"]:
                    child.answers[phase] = message
                else:
                    child.failure = errors.explain(message["failure"], self._rules)
                    self._settle(child)
                return True
        return False

    def _stop_hung(self, child: Child, phase: str) -> None:
        try:
            os.kill(child.pid, signal.SIGUSR1)
            time.sleep(LAST_WORDS)
        except ProcessLookupError:
            pass
        child.failure = errors.hung(phase, self.limit(phase), child.last, child.tail())
        self._settle(child)

    def _settle(self, child: Child) -> None:
        """A failed child goes at once, and the other ranks hear of it."""
        child.kill()
        self._ranks.tell_failed(child.name, child.failure.message)
        self._progress(f"{child.name}: {child.failure.kind} in {child.failure.phase}: {child.failure.message}")

    def _agree(self, child: Child, phase: str) -> None:
        """One rank's failure is every rank's: a process group with a member missing hangs at its next collective."""
        outcomes = self._ranks.agree(f"{child.name}/{phase}", child.failure.message if child.failure else None)
        for rank, message in enumerate(outcomes):
            if message is not None and child.failure is None:
                child.failure = errors.peer(phase, rank, message)
                child.kill()

    def finish(self, children: Iterable[Child]) -> dict[str, dict]:
        """Closes every child alive and waits for its exit: `{name: {"seconds", "exit_s", "status", "within_limit",
        ...}}`."""
        out = {}
        closed = self.ask(children, {"do": "close"})
        for child in closed:
            begin = time.monotonic()
            status = child.status(self.limit("exit"))
            waited = time.monotonic() - begin
            child.ended = waited
            if status is None:
                child.failure = errors.hung("exit", self.limit("exit"), "process group destroyed", child.tail())
                child.kill()
            answer = child.answers["close"]
            out[child.name] = {
                "deleted": answer["deleted"],
                "seconds": answer["seconds"],
                "exit_s": waited,
                "status": status,
                "memory": answer["memory"],
            }
        return out

    def close(self, children: Iterable[Child]) -> None:
        """Kills what is left and lets go of every descriptor. The launcher stays: another session may use it."""
        for child in children:
            if child.ended is None:
                child.kill()
            child.close()


def temporary_logs() -> tempfile.TemporaryDirectory:
    """Where the processes' logs go; removed at the end."""
    return tempfile.TemporaryDirectory(prefix="smoke-capture-")
