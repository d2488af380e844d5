# SPDX-License-Identifier: Apache-2.0
"""Imports torch and the stack once, touches no CUDA, and forks a process for each variant.

Reads requests from a UNIX socket: JSON with the job, and two file descriptors, commands and replies, beside it, and a
third for the child's log. Answers `{"pid"}` for a start, and `{"pid", "status"}` when a child ends (as
Popen.returncode). The answers come through a pipe of lines, because they are not tied to requests.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import sys
import time
from importlib import import_module

from cudagraphs.versions import dotted_cudnn


def _status(raw: int) -> int:
    return os.waitstatus_to_exitcode(raw)


def probe() -> dict:
    """The GPU as torch sees it, asked in a forked process so that this one stays free of CUDA."""
    import torch

    out = {"torch": torch.__version__, "torch_cuda": torch.version.cuda, "devices": 0}
    if not torch.cuda.is_available():
        return {**out, "error": "torch.cuda.is_available() is False"}
    torch.cuda.init()
    device = int(os.environ.get("LOCAL_RANK", "0"))
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    try:
        cudnn = dotted_cudnn(torch.backends.cudnn.version())
    except RuntimeError as error:
        # Transformer Engine may have loaded another cuDNN than torch was built with; torch then refuses to work with
        # it.
        built, loaded = re.findall(r"\((\d+, \d+, \d+)\)", str(error))[:2] or ("", str(error))
        cudnn = f"{loaded.replace(', ', '.')} (torch was built with {built.replace(', ', '.')})"
    return {
        **out,
        "devices": torch.cuda.device_count(),
        "gpu": properties.name,
        "capability": [properties.major, properties.minor],
        "uuid": str(getattr(properties, "uuid", "0")),
        "memory_bytes": total,
        "free_bytes": free,
        "multiprocessors": properties.multi_processor_count,
        "cudnn": cudnn,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def serve(control: socket.socket, answers, modules: list[str]) -> int | None:
    """Forks until the socket closes. Returns None in the parent at its end, and the exit status in a forked child."""
    start = time.perf_counter()
    problem = None
    for name in modules:
        try:
            import_module(name)
        except Exception as error:
            problem = f"{name}: {type(error).__name__}: {error}"
            break

    def tell(message: dict) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    tell({"ready": problem is None, "error": problem, "seconds": time.perf_counter() - start})
    alive: set[int] = set()
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([control, wake_r], [], [])
        if wake_r in ready:
            os.read(wake_r, 4096)
        for pid in list(alive):
            done, raw = os.waitpid(pid, os.WNOHANG)
            if done:
                alive.discard(pid)
                tell({"pid": pid, "status": _status(raw)})
        if control not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not data:
            return None
        request = json.loads(data)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            for fd in fds:
                os.close(fd)
            alive.add(pid)
            tell({"started": request["name"], "pid": pid})
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        control.close()
        answers.close()
        os.close(wake_r)
        os.close(wake_w)
        commands_fd, replies_fd, log_fd = fds
        os.dup2(log_fd, 2)
        os.close(log_fd)
        replies = os.fdopen(replies_fd, "w")
        if request.get("probe"):
            try:
                replies.write(json.dumps(probe()) + "\n")
            except Exception as error:
                replies.write(json.dumps({"error": f"{type(error).__name__}: {error}", "devices": 0}) + "\n")
            replies.flush()
            os._exit(0)
        from cudagraphs.capture import child

        return child.serve(request["job"], os.fdopen(commands_fd, "r"), replies)


def main() -> int:
    control = socket.socket(fileno=int(sys.argv[1]))
    answers = os.fdopen(int(sys.argv[2]), "w")
    return serve(control, answers, sys.argv[3:]) or 0


if __name__ == "__main__":
    sys.exit(main())
