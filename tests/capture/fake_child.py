# SPDX-License-Identifier: Apache-2.0
"""Stands in for `cudagraphs.capture.child`: speaks its protocol without torch, and misbehaves as the job's `behave`
asks.

`behave` maps a phase to what happens there: crash, kill, hang, garbage, exit, oom, error, or a number of seconds to
take.
"""

import json
import os
import signal
import sys
import time

OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.00 GiB is "
    "free. Of the allocated memory 130.00 GiB is allocated by PyTorch, with 96.50 GiB allocated in private pools "
    "(e.g., CUDA Graphs), and 1.00 GiB is reserved by PyTorch but unallocated."
)


def digest(value):
    return {"numel": 4, "norm": abs(value), "hash": repr(value), "sketch": [value, 0.0]}


def step(index, value):
    return {"index": index, "losses": [value], "gradients": {"mlp": digest(value)}}


def answers(job):
    value = job.get("value", 1.0)
    first = {"steps": [step(0, value)], "evaluations": [], "parameters": {"start": {"mlp": digest(value)}}}
    later = {
        "steps": [step(1, value)],
        "evaluations": [{"index": 0, "losses": [value]}],
        "parameters": {"end": {"mlp": digest(value)}},
    }
    none = {"steps": [], "evaluations": [], "parameters": {}}
    memory = {"peak": {"reserved": job.get("reserved", 100), "allocated": 50}}
    graphs = 0 if job["impl"] == "none" else job.get("graphs", 4)
    return {
        "build": {"parameters": 1},
        "warmup": {"record": first, "steps": 1},
        "capture": {"record": none, "captures": graphs, "seconds": 0.5},
        "parity": {
            "record": later,
            "replays": job.get("replays", [graphs, graphs]),
            "captures": graphs,
            "memory": memory,
        },
        "dropout": {"losses": [1.0, 2.0]},
        "profile": {
            "graph_launches": graphs,
            "busy_ms": 2.0,
            "kernel_ms": 2.0,
            "kernels": 10,
            "activity": {"span_ms": 10.0, "busy": [1.0, 0.5]},
        },
        "time": {"steps_ms": [job.get("step_ms", 10.0)] * 4, "wall_ms": 40.0},
        "close": {
            "deleted": {"live_graphs_after": job.get("left", 0)},
            "memory": {"after_cleanup": {}},
            "seconds": {"graphs": 0.0, "model": 0.0, "process_group": 0.0},
        },
    }


def main():
    commands = os.fdopen(int(sys.argv[1]), "r")
    replies = os.fdopen(int(sys.argv[2]), "w")
    job = json.loads(commands.readline())
    signal.signal(signal.SIGUSR1, lambda *_: print("standing in capture()", file=sys.stderr, flush=True))

    def tell(message):
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    def fail(kind, message):
        tell(
            {
                "reply": name,
                "ok": False,
                "failure": {"phase": name, "type": kind, "message": message, "traceback": "", "memory": None},
            }
        )
        sys.exit(1)

    for line in commands:
        command = json.loads(line)
        name = command["do"]
        tell({"progress": f"in {name}"})
        behave = job.get("behave", {}).get(name)
        if behave == "crash":
            print("last words: cudaErrorStreamCaptureImplicit", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        elif behave == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif behave == "exit":
            sys.exit(7)
        elif behave == "hang":
            while True:
                time.sleep(1)
        elif behave == "garbage":
            replies.write("not json\n[1, 2]\n")
            replies.flush()
        elif behave == "oom":
            fail("OutOfMemoryError", OOM)
        elif behave == "error":
            fail(
                "AcceleratorError",
                "CUDA error: operation not permitted on an event last recorded in a capturing stream",
            )
        elif behave == "hang after close":
            tell({"reply": name, "ok": True, **answers(job)[name]})
            time.sleep(3600)
        elif behave:
            time.sleep(behave)
        tell({"reply": name, "ok": True, **answers(job)[name]})
        if name == "close":
            return


if __name__ == "__main__":
    main()
