# SPDX-License-Identifier: Apache-2.0
"""From what a dying process said to a cause and a mend: CUDA capture error codes, out of memory, upstream asserts,
signals."""

from __future__ import annotations

import re
import signal
from dataclasses import asdict, dataclass

# Names and meanings: CUDA runtime API, cudaError enumeration (driver_types.h, CUDA 13.0). The second text is the line
# that PyTorch prints for the code when it does not print the name.
CAPTURE_ERRORS = {
    900: (
        "cudaErrorStreamCaptureUnsupported",
        "operation not permitted when stream is capturing",
        "a host synchronization or another call that cannot be captured ran inside the captured region "
        "(.item(), a device-to-host copy, synchronize, a device allocation outside the caching allocator)",
        "move that call out of the captured region, or leave its module out of the graph scope",
    ),
    901: (
        "cudaErrorStreamCaptureInvalidated",
        "operation failed due to a previous error during capture",
        "an earlier error inside the capture invalidated it",
        "look for the first error above this one; it names the real cause",
    ),
    902: (
        "cudaErrorStreamCaptureMerge",
        "operation would result in a merge of two separate capture sequences",
        "two captures depend on each other through an event or a shared stream",
        "capture one graph at a time, each on a stream that no other capture waits for",
    ),
    903: (
        "cudaErrorStreamCaptureUnmatched",
        "the capture was not initiated in this stream",
        "the capture was ended on another stream than it began on",
        "do not change the current stream inside the captured region",
    ),
    904: (
        "cudaErrorStreamCaptureUnjoined",
        "capturing stream has unjoined work",
        "a side stream forked from the capturing stream and was not joined before the capture ended",
        "let the capturing stream wait for every side stream (communication, offload) before the region ends",
    ),
    905: (
        "cudaErrorStreamCaptureIsolation",
        "dependency created on uncaptured work in another stream",
        "the captured region waits for work that was launched outside it, often an overlapped parameter gather or "
        "gradient reduction",
        "turn overlap_param_gather_with_optimizer_step off, or synchronize before the capture begins",
    ),
    906: (
        "cudaErrorStreamCaptureImplicit",
        "operation would make the legacy stream depend on a capturing blocking stream",
        "something in the region uses the legacy default stream; with DDP built on the default stream its gradient "
        "accumulators do",
        "build DDP inside torch.cuda.stream(side_stream); for full iteration use get_shared_capture_stream()",
    ),
    907: (
        "cudaErrorCapturedEvent",
        "operation not permitted on an event last recorded in a capturing stream",
        "an event recorded inside the capture is queried or synchronized outside it; MoE token dispatchers do this for "
        "their device-to-host copies",
        "capture only what comes before the dispatch (attn, moe_router, moe_preprocess) with the transformer_engine "
        "implementation, or make the experts drop-and-pad",
    ),
    908: (
        "cudaErrorStreamCaptureWrongThread",
        "attempt to terminate a thread-local capture sequence from another thread",
        "another thread ended or disturbed the capture",
        "stop data loader, checkpoint and monitoring threads that call CUDA while the capture runs",
    ),
    909: (
        "cudaErrorTimeout",
        "wait operation timed out",
        "a captured wait ran out of time, usually a collective whose other ranks did not arrive",
        "check that every rank captures the same graphs in the same order",
    ),
}
_NAMED = {name: code for code, (name, *_) in CAPTURE_ERRORS.items()}

# Fragments of failures that are no CUDA capture code, first match wins: (fragment, cause, mend).
_KNOWN = (
    (
        "an illegal memory access was encountered",
        "a replay read or wrote outside of its memory: what was freed or moved after the capture, or a kernel that must "
        "not be in a graph, as cuDNN's attention before 9.15.1 where the sequence length is no multiple of 128",
        "a sequence length that is a multiple of 128, or cuDNN 9.15.1; with expandable segments NCCL_GRAPH_REGISTER=0; "
        "keep every static input alive as long as its graph",
    ),
    ("initialization error", "CUDA was touched before the process forked", "run with --start spawn"),
    (
        "RNG tracker does not support cudagraphs",
        "the random number tracker is not graph-safe",
        "use_te_rng_tracker=True",
    ),
    (
        "capturable is False",
        "the optimizer step is captured with an optimizer that is not capturable",
        "capturable=True before the capture, learning rate as a device tensor",
    ),
    (
        "CUDA graph accepts only Tensor inputs",
        "an argument of the captured module is not a tensor (packed_seq_params, inference_context)",
        "leave attn out of the modules, or pad instead of packing",
    ),
    (
        "NCCL error",
        "NCCL could not start or continue, often because the GPU's memory is already full",
        "look at the memory of the GPU (nvidia-smi); run again with NCCL_DEBUG=INFO for NCCL's own words",
    ),
    (
        "device-side assert triggered",
        "a kernel found an impossible index or value",
        "run again with CUDA_LAUNCH_BLOCKING=1 and without graphs; if eager passes, the replay used stale data",
    ),
    ("DataLoader worker", "a data loader worker died", "look at the worker's own error; it is not the capture"),
)
_PRIVATE_POOL = re.compile(r"([\d.]+) ([KMGT]iB) allocated in private pools")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class Failure:
    """Why a variant ended early. `kind` is one of refused, capture, out-of-memory, assert, error, crash, hang, peer."""

    kind: str
    phase: str
    message: str
    cause: str
    mend: str
    code: int | None = None
    name: str | None = None
    rules: tuple[str, ...] = ()
    detail: str = ""
    memory: dict | None = None

    def as_dict(self) -> dict:
        return asdict(self)


def capture_code(text: str) -> int | None:
    """The first CUDA capture error code (900 to 909) that the text names, by enumerator or by message; None without
    one.

    901 only says that something before it failed, so any other code in the text comes first.
    """
    found = [code for name, code in _NAMED.items() if name in text]
    found += [code for code, (_, message, *_) in CAPTURE_ERRORS.items() if message in text]
    found.sort(key=lambda code: (code == 901, min(_position(text, code))))
    return found[0] if found else None


def _position(text: str, code: int) -> list[int]:
    at = [text.find(part) for part in CAPTURE_ERRORS[code][:2]]
    return [place for place in at if place >= 0] or [len(text)]


def private_pool_bytes(text: str) -> int | None:
    """Bytes in the graphs' private pools, read from PyTorch's out-of-memory message; None where it does not say."""
    match = _PRIVATE_POOL.search(text)
    return int(float(match[1]) * _UNITS[match[2]]) if match else None


def explain(report: dict, rules=lambda message: ()) -> Failure:
    """The failure that a child reported as `{"phase", "type", "message", "traceback", "memory"}`.

    `rules(message)` maps an upstream assert to codes of our rules.
    """
    phase, kind, message = report["phase"], report.get("type", ""), report.get("message", "")
    detail = report.get("traceback", "")
    text = f"{message}\n{detail}"
    memory = report.get("memory")
    if kind == "AssertionError" and message.strip() in ("", kind):
        message = _assert_line(detail) or message
    short = message.strip().splitlines()[0] if message.strip() else kind
    if report.get("last"):
        short = f"{short} (at {report['last']})"
    if "OutOfMemoryError" in kind or "CUDA out of memory" in message or "cudaErrorMemoryAllocation" in message:
        private = private_pool_bytes(message)
        if private is not None:
            memory = {**(memory or {}), "private_pool": private}
        during = "the capture" if phase == "capture" else f"phase {phase}"
        return Failure(
            "out-of-memory",
            phase,
            short,
            f"the GPU ran out of memory during {during}; graphs keep their buffers in private pools that eager steps "
            "cannot reuse",
            "capture fewer modules, fewer microbatches in flight, or free memory first (recompute, smaller microbatch)",
            detail=detail,
            memory=memory,
        )
    code = capture_code(text)
    if code is not None:
        name, _, cause, mend = CAPTURE_ERRORS[code]
        return Failure("capture", phase, short, cause, mend, code, name, detail=detail, memory=memory)
    for fragment, cause, mend in _KNOWN:
        if fragment in text:
            return Failure(
                "error", phase, short, cause, mend, detail=detail, memory=memory, rules=tuple(rules(message))
            )
    codes = tuple(rules(message))
    if kind == "AssertionError" or codes:
        refused = phase == "build"
        return Failure(
            "refused" if refused else "assert",
            phase,
            short,
            "upstream's own check refused the configuration" if refused else "an assert failed at run time",
            "see the rules named, with `python helpers/validate_constraints.py`" if codes else "read the assert's text",
            detail=detail,
            memory=memory,
            rules=codes,
        )
    return Failure(
        "error", phase, short, f"{kind} in phase {phase}", "read the traceback", detail=detail, memory=memory
    )


def _assert_line(traceback: str) -> str | None:
    """The source line of an assert without a text of its own, which is how upstream's rules know it."""
    lines = [line.strip() for line in traceback.splitlines() if line.strip().startswith("assert ")]
    return lines[-1] if lines else None


def died(phase: str, status: int | None, tail: str) -> Failure:
    """The failure of a child that ended without a report. `status` is its wait status in the form of
    Popen.returncode."""
    if status is not None and status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        cause = f"the process was killed by {name}"
        mend = "a native library crashed: read the stack below"
        if name == "SIGKILL":
            cause, mend = (
                f"{cause}, as the kernel does when host memory runs out",
                "use less host memory, or more hosts",
            )
    else:
        cause, mend = f"the process ended with exit status {status}", "read its last lines below"
    code = capture_code(tail)
    if code is not None:
        cause = f"{cause}, after {CAPTURE_ERRORS[code][0]}: {CAPTURE_ERRORS[code][2]}"
        mend = CAPTURE_ERRORS[code][3]
    return Failure("crash", phase, cause, cause, mend, code=code, name=_name(code), detail=tail)


def hung(phase: str, limit_s: float, last: str, tail: str) -> Failure:
    """The failure of a child that passed its time limit and was killed."""
    cause = f"no end of phase {phase} within {limit_s:g} s"
    if phase == "close":
        mend = "delete every graph before destroy_process_group (helpers/delete_graphs.py)"
    else:
        mend = "read where it stood, below; raise --phase-limit if the work is only slow"
    return Failure("hang", phase, f"{cause}; last sign of life: {last or 'none'}", cause, mend, detail=tail)


def peer(phase: str, rank: int, message: str) -> Failure:
    """The failure of a rank that was stopped because another rank failed first."""
    cause = f"rank {rank} failed: {message}"
    return Failure("peer", phase, cause, cause, f"mend rank {rank}")


def _name(code: int | None) -> str | None:
    return CAPTURE_ERRORS[code][0] if code is not None else None
