# SPDX-License-Identifier: Apache-2.0
"""One variant in one process: reads commands, runs them, answers in JSON lines. Imports torch only once a job runs.

Commands are lines `{"do": NAME, ...}`; every command gets one line `{"reply": NAME, "ok": true, ...}`, or
`{"reply": NAME, "ok": false, "failure": {...}}`, after which the process ends: a failed capture leaves CUDA unusable.
Lines `{"progress": text}` come in between and say where the process stands. Order of commands: build, warmup, capture,
parity, dropout if asked for, time as often as wanted, profile, close.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import time
import traceback
from contextlib import contextmanager

# Steps after the capture, and where the evaluation sits among them. Five evaluations: a full-iteration wrapper captures
# its validation graph at the fourth and replays it at the fifth.
EVALUATIONS = 5
ACTIVITY_BINS = 200


class Worker:
    """Holds the trainer of one job and runs commands on it."""

    def __init__(self, job: dict, tell):
        self.job, self._send = job, tell
        self.last = ""
        self.trainer = self.batches = self.digester = self.counter = self.initial = None
        self.index = 0
        self.record = {"steps": [], "evaluations": [], "parameters": {}}
        self.memory: dict[str, dict] = {}

    def progress(self, text: str) -> None:
        self.last = text
        self._send({"progress": text})

    def build(self, _command: dict) -> dict:
        import torch

        from cudagraphs.capture import digest, memory, stacks
        from cudagraphs.capture.stacks.batches import Batches

        job = self.job
        cuda = job["device"] == "cuda"
        if cuda:
            torch.cuda.set_device(job["local_rank"])
        self.device = torch.device("cuda", job["local_rank"]) if cuda else torch.device("cpu")
        if cuda and job.get("memory_limit"):
            memory.limit(self.device, job["memory_limit"])
        _join(job)
        self.counter = _Counter(cuda, self.device)
        self.trainer = stacks.trainer(job)
        if job["impl"] != "none":
            _drill(job["drill"], self.trainer, self.device)
        self.batches = Batches(job["shape"], job["seed"], job["data_rank"], self.device)
        self.digester = digest.Digester(self.device)
        self.record["parameters"]["start"] = self.digester.groups(self.trainer.parameters())
        if job["dropout"]:
            self.initial = [p.detach().clone() for p in self.trainer.model.parameters()]
        return {"parameters": sum(p.numel() for _, p in self.trainer.parameters())}

    def warmup(self, command: dict) -> dict:
        """The eager steps before the capture; a variant that captures in its first step has none."""
        count = self.trainer.warmup_steps
        for _ in range(count):
            self._recorded_step()
        return {"steps": count, "record": self._take()}

    def capture(self, _command: dict) -> dict:
        from cudagraphs.capture import memory

        self._synchronize()
        gc.collect()
        before = memory.snapshot(self.device)
        self.counter.install()
        start = time.perf_counter()
        try:
            self.trainer.capture()
            if self.trainer.captures_in_step:
                self._recorded_step()
            self._synchronize()
        finally:
            wall = time.perf_counter() - start
            self.counter.remove()
        counted = self.counter
        # Where a training step captures, the step itself does not count; where a call captures, its own warmup does.
        seconds = counted.span() if self.trainer.captures_in_step else wall
        after = memory.snapshot(self.device)
        self.memory |= {"before_capture": counted.before or before, "after_capture": counted.after or after}
        self._reset_peak()
        return {"captures": counted.captures, "seconds": seconds if counted.captures else 0.0, "record": self._take()}

    def parity(self, command: dict) -> dict:
        """Training up to step `until`, an evaluation before step `evaluate_at`; steps recorded, replays counted.

        The steps are absolute, because variants come out of their capture at different steps.
        """
        from cudagraphs.capture import memory

        replays = []
        self.counter.install()
        try:
            while self.index < command["until"]:
                if self.index == command["evaluate_at"]:
                    self._evaluate()
                    self.record["parameters"]["evaluation"] = self.digester.groups(self.trainer.parameters())
                self.counter.replays = 0
                self._recorded_step(digests=command.get("digests", True))
                replays.append(self.counter.replays)
        finally:
            self.counter.remove()
        self.record["parameters"]["end"] = self.digester.groups(self.trainer.parameters())
        self.memory["peak"] = memory.peak(self.device)
        return {"replays": replays, "captures": self.counter.captures, "record": self._take(), "memory": self.memory}

    def dropout(self, command: dict) -> dict:
        """The loss of one batch, `draws` times over, with the initial weights: only dropout's draws may change it.

        Eager and the variant drew other masks in training, so their trained weights differ; the initial ones do not.
        """
        import torch

        with torch.no_grad():
            for parameter, value in zip(self.trainer.model.parameters(), self.initial):
                parameter.copy_(value)
        self.initial = None
        batches = self.batches.at("train", 0)
        losses = []
        for _ in range(command["draws"]):
            losses.append(sum(float(loss) for loss in self.trainer.step(batches, update=False)))
        return {"losses": losses}

    def profile(self, command: dict) -> dict:
        """Kernels and graph launches of `steps` steps; see `_profiled`."""
        for _ in range(2):
            self._plain_step()
        self._synchronize()
        return _profiled(self, command["steps"]) if self.device.type == "cuda" else {"kernels": 0, "graph_launches": 0}

    def time(self, command: dict) -> dict:
        """Times of `steps` steps in milliseconds, after `lead` unmeasured ones, without a synchronization in between.

        On a GPU each step is the distance of two events on the current stream, so the host may run ahead as it does in
        training; `wall` is the host's clock over the whole turn, to check the events against.
        """
        if self.digester is not None:
            self._forget_digests()
        for _ in range(command.get("lead", 1)):
            self._plain_step()
        self._synchronize()
        start = time.perf_counter()
        marks = [self._mark()]
        for _ in range(command["steps"]):
            self._plain_step()
            marks.append(self._mark())
        self._synchronize()
        wall = (time.perf_counter() - start) * 1e3
        if self.device.type == "cuda":
            steps = [a.elapsed_time(b) for a, b in zip(marks, marks[1:])]
        else:
            steps = [(b - a) * 1e3 for a, b in zip(marks, marks[1:])]
        return {"steps_ms": steps, "wall_ms": wall}

    def close(self, _command: dict) -> dict:
        """Graphs first, model second, process group last; each part timed in seconds."""
        from cudagraphs.capture import memory

        from delete_graphs import delete_cuda_graphs

        self.memory["peak"] = memory.peak(self.device)
        start = time.perf_counter()
        self._synchronize()
        report = delete_cuda_graphs(release_memory=False)
        graphs = time.perf_counter()
        self.trainer.close()
        self.trainer = self.batches = self.digester = None
        gc.collect()
        if self.device.type == "cuda":
            import torch

            torch.cuda.empty_cache()
        self.memory["after_cleanup"] = memory.snapshot(self.device)
        models = time.perf_counter()
        _leave()
        end = time.perf_counter()
        return {
            "deleted": report.as_dict(),
            "memory": self.memory,
            "seconds": {"graphs": graphs - start, "model": models - graphs, "process_group": end - models},
        }

    # What the commands are made of

    def _recorded_step(self, digests: bool = True) -> None:
        self.progress(f"step {self.index}")
        entry = {"index": self.index}

        def on_gradients() -> None:
            if digests:
                entry["gradients"] = self.digester.groups(self.trainer.gradients())

        losses = self.trainer.step(self.batches.at("train", self.index), on_gradients)
        entry["losses"] = [float(loss) for loss in losses]
        self.record["steps"].append(entry)
        self.index += 1

    def _evaluate(self) -> None:
        for index in range(EVALUATIONS):
            self.progress(f"evaluation {index}")
            losses = self.trainer.evaluate(self.batches.at("evaluation", index))
            self.record["evaluations"].append({"index": index, "losses": [float(loss) for loss in losses]})

    def _plain_step(self) -> None:
        self.trainer.step(self.batches.at("train", self.index))
        self.index += 1

    def _forget_digests(self) -> None:
        """From here on the peak of memory is that of training: digests hold signs and weights of every size."""
        self.digester = None
        gc.collect()
        if self.device.type == "cuda":
            import torch

            torch.cuda.empty_cache()
        self._reset_peak()

    def _take(self) -> dict:
        """The record since the last take, so that no step travels twice."""
        taken, self.record = self.record, {"steps": [], "evaluations": [], "parameters": {}}
        return taken

    def _mark(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize()

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()


class _Counter:
    """Counts captures and replays of torch.cuda.CUDAGraph, whoever makes them, while installed.

    Every stack captures through this class: torch.cuda.graph, TE's make_graphed_callables, Megatron's runners.
    """

    def __init__(self, cuda: bool, device):
        self._cuda, self._device = cuda, device
        self.captures = self.replays = 0
        self.before = self.after = self._first = self._last = None
        self._saved: dict = {}

    def install(self) -> None:
        if not self._cuda:
            return
        import torch

        from cudagraphs.capture import memory

        graph, counter = torch.cuda.CUDAGraph, self
        self._saved = {name: getattr(graph, name) for name in ("capture_begin", "capture_end", "replay")}
        begin, end, replay = self._saved.values()

        def capture_begin(self, *args, **kwargs):
            if counter.before is None:
                counter.before, counter._first = memory.snapshot(counter._device), time.perf_counter()
            return begin(self, *args, **kwargs)

        def capture_end(self):
            result = end(self)
            counter.captures += 1
            counter._last = time.perf_counter()
            return result

        def counted_replay(self):
            counter.replays += 1
            return replay(self)

        graph.capture_begin, graph.capture_end, graph.replay = capture_begin, capture_end, counted_replay

    def remove(self) -> None:
        if not self._saved:
            return
        import torch

        from cudagraphs.capture import memory

        for name, function in self._saved.items():
            setattr(torch.cuda.CUDAGraph, name, function)
        self._saved = {}
        if self.captures and self.after is None:
            self.after = memory.snapshot(self._device)

    def span(self) -> float:
        """Seconds from the first capture's begin to the last one's end."""
        return (self._last - self._first) if self._last is not None else 0.0


def _profiled(worker: Worker, steps: int) -> dict:
    """What the GPU did in `steps` steps, from the profiler's device events, per step and in milliseconds.

    `kernel_ms` sums the kernels, `busy_ms` joins those that overlap on several streams. `activity` is the last step in
    `ACTIVITY_BINS` equal parts: `span_ms`, and of each part the share in which a kernel ran. The profiler stretches the
    host's part of a step, so the idle time between kernels is too long there; only kernel times are used for verdicts.
    """
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    from cudagraphs.capture.timing import binned, merged

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(steps):
            worker._plain_step()
        torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()
    work = []
    launches = kernels_launched = 0
    for event in events:
        name = event.name()
        if event.device_type() == DeviceType.CUDA:
            # Annotations (collectives, compiled regions) repeat the span of the kernels they hold.
            if not event.is_user_annotation():
                work.append((event.start_ns() / 1e6, (event.start_ns() + event.duration_ns()) / 1e6))
        elif name.startswith("cudaGraphLaunch"):
            launches += 1
        elif name.startswith(("cudaLaunchKernel", "cuLaunchKernel")):
            kernels_launched += 1
    busy = merged(work)
    begin = busy[0][0] if busy else 0.0
    span = (busy[-1][1] - begin) if busy else 0.0
    last = begin + span * (steps - 1) / steps
    shares = binned(busy, last, begin + span, ACTIVITY_BINS) if busy else []
    return {
        "steps": steps,
        "kernels": len(work) / steps,
        "kernel_launches": kernels_launched / steps,
        "graph_launches": launches / steps,
        "kernel_ms": sum(e - s for s, e in work) / steps,
        "busy_ms": sum(e - s for s, e in busy) / steps,
        "activity": {"span_ms": round(span / steps, 3), "busy": [round(share, 3) for share in shares]},
    }


def _drill(kind: str | None, trainer, device) -> None:
    """Breaks the variant on purpose, to see what the report makes of it. Eager runs are never disturbed."""
    if kind in (None, "static-grads", "default-stream"):  # the trainers know these
        return
    import torch

    if kind == "oom":
        # Leaves no room for a new segment: the capture cannot use what the warmup reserved, it needs pools of its own.
        capture = trainer.capture
        step = trainer.step

        def limited(function):
            def call(*args, **kwargs):
                from cudagraphs.capture import memory

                memory.limit(device, torch.cuda.memory_allocated(device) + (1 << 20))
                return function(*args, **kwargs)

            return call

        if trainer.captures_in_step:
            left = [trainer.warmup_steps]

            def counted(*args, **kwargs):
                left[0] -= 1
                return (limited(step) if left[0] < 0 else step)(*args, **kwargs)

            trainer.step = counted
        else:
            trainer.capture = limited(capture)
        return
    block = trainer.block()
    forward = block.forward

    def disturbed(*args, **kwargs):
        # A dry run has no capture to wait for.
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            if kind == "sync":
                torch.cuda.synchronize()
            elif kind == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            elif kind == "hang":
                time.sleep(3600)
        return forward(*args, **kwargs)

    block.forward = disturbed


def _join(job: dict) -> None:
    """The variant's process group. One process on one GPU needs no network; several meet in the launcher's store."""
    import torch.distributed as dist

    if job["world"] == 1 and job["stack"] == "torch":
        return
    backend = "nccl" if job["device"] == "cuda" else "gloo"
    if job["world"] == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    meeting = job["rendezvous"]
    store = dist.TCPStore(meeting["host"], meeting["port"], is_master=False, wait_for_workers=False)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"{meeting['prefix']}/{job['name']}", store),
        rank=job["rank"],
        world_size=job["world"],
    )


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _failure(phase: str, error: BaseException, worker: Worker) -> dict:
    """What the parent needs to explain an exception. Memory figures only: a poisoned context answers nothing else."""
    figures = None
    if "torch" in sys.modules and worker.job["device"] == "cuda":
        try:
            from cudagraphs.capture import memory

            figures = {**memory.snapshot(worker.device), "peak": memory.peak(worker.device)}
        except Exception:  # the context is gone; the message still tells the cause
            figures = None
    stack = portable("".join(traceback.format_exception(error)))
    return {
        "phase": phase,
        "type": type(error).__name__,
        "message": portable(str(error)),
        "traceback": stack[-8000:],
        "memory": figures,
        "last": worker.last,
    }


def portable(text: str) -> str:
    """The text with file names as they are below an import root: where packages are installed is nobody's business."""
    for root in sorted({path.rstrip("/") + "/" for path in sys.path if path.startswith("/")}, key=len, reverse=True):
        text = text.replace(root, "")
    return text


@contextmanager
def _quiet_stdout():
    """What libraries print goes to the log: standard output may be the protocol's pipe."""
    sys.stdout.flush()
    os.dup2(2, 1)
    yield


def serve(job: dict, commands, replies) -> int:
    """Runs until `close`, a failure, or the end of the commands. Returns 0 after a close, 1 otherwise."""
    faulthandler.enable(all_threads=False)
    # The parent asks with SIGUSR1 where a process stands before it kills it.
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    def tell(message: dict) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    worker = Worker(job, tell)
    with _quiet_stdout():
        for line in commands:
            command = json.loads(line)
            name = command["do"]
            try:
                answer = getattr(worker, name)(command)
            except Exception as error:
                tell({"reply": name, "ok": False, "failure": _failure(name, error, worker)})
                # No cleanup: after a failed capture every CUDA call fails or hangs.
                replies.flush()
                os._exit(1)
            tell({"reply": name, "ok": True, **answer})
            if name == "close":
                return 0
    return 1


def main() -> int:
    """Entry of a fresh process: the job is the first line, file descriptors come as arguments."""
    commands = os.fdopen(int(sys.argv[1]), "r")
    replies = os.fdopen(int(sys.argv[2]), "w")
    return serve(json.loads(commands.readline()), commands, replies)


if __name__ == "__main__":
    sys.exit(main())
