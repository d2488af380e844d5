#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What one call of a captured module costs on the host, beside other ways to capture it; and the memory of 24 entries.

Usage:
    python3 evals/performance/bench_partial_graphs.py --out partial-bench.json [--rounds 30] [--revision REV]
    python3 evals/performance/bench_partial_graphs.py --tests-out partial-tests.json   # run the GPU tests
    python3 evals/performance/bench_partial_graphs.py --memory-of ours     # one peer, used by the first form

Measures an attention block, a parameterless router and a stack of 24 transformer blocks. All peers live in one process
and are timed in turn, round by round, in an order shuffled each round; a sample is `--calls` calls issued without
waiting, then a synchronisation that is not counted. Memory is measured in one process a peer.

What each technique gains is the difference, within a round, to a peer that lacks it: guards whose checks are evaluated
one by one, copies outside the graphs, neighbours that copy, entries that are not merged, gradients that autograd
accumulates. A node of autograd that only hands out tensors shows what any capture of forward and backward pays to
autograd.

Output: one JSON object with `schema_version`, raw samples included; a table on stderr.
Exit codes: 0 measured, 2 usage, 4 no usable GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from xml.etree import ElementTree

try:  # before torch loads its own cuDNN libraries, or Transformer Engine may find the wrong ones
    import transformer_engine.pytorch  # noqa: F401
except (ImportError, OSError):
    pass
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "helpers"))
from cudagraphs.partial import guards
from cudagraphs.partial.backends import CudaBackend
from partial_graphs import PartialCudaGraphManager

SCRIPT = "evals/performance/bench_partial_graphs.py"
GPU_TESTS = ("tests/test_partial_graphs_gpu.py", "tests/test_partial_graphs_automodel.py")
SEED = 20261130
SEQUENCE, HIDDEN, HEADS, EXPERTS, BLOCKS = 512, 1024, 16, 64, 24


class Attention(nn.Module):
    """RMSNorm, fused QKV, attention, projection. Input and output (1, 512, 1024) bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(1, SEQUENCE, 3, HEADS, HIDDEN // HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(1, SEQUENCE, HIDDEN))


class Router(nn.Module):
    """Softmax top-2 routing over (512, 64) fp32 logits: weights (512, 2) and indices (512, 2)."""

    def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, indices = torch.topk(logits.softmax(-1), 2)
        return weights / weights.sum(-1, keepdim=True), indices


class Block(nn.Module):
    """A pre-norm transformer block of attention and a SiLU feed-forward, 10 bf16 matrices and vectors in all."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.RMSNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False), nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def fresh(kind: str) -> nn.ModuleList:
    """The modules of one case, the same weights every time."""
    torch.manual_seed(SEED)
    make, count = {"attention": (Attention, 1), "router": (Router, 1), "stack": (Block, BLOCKS)}[kind]
    return nn.ModuleList(make() for _ in range(count)).to("cuda", torch.float32 if kind == "router" else torch.bfloat16)


def sample_input(kind: str) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(SEED)
    shape, dtype = ((SEQUENCE, EXPERTS), torch.float32) if kind == "router" else ((1, SEQUENCE, HIDDEN), torch.bfloat16)
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def first(result: object) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


class Peer:
    """Something to time: `modules` called one after the other; `close` undoes the capture."""

    def __init__(self, modules: Sequence[Callable], parameters: Sequence[nn.Parameter], close: Callable[[], object]):
        self.modules, self.parameters, self.close = modules, list(parameters), close

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.modules:
            x = first(module(x))
        return x

    def step(self, x: torch.Tensor, gradient: torch.Tensor) -> None:
        self.forward(x.view_as(x)).backward(gradient)  # the view makes the input an inner node, as it is in a model

    def clear(self, x: torch.Tensor) -> None:
        x.grad = None
        for parameter in self.parameters:
            parameter.grad = None


def eager(kind: str) -> Peer:
    modules = fresh(kind)
    return Peer(list(modules), modules.parameters(), lambda: None)


def torch_graphs(kind: str) -> Peer:
    modules = fresh(kind)
    x = sample_input(kind).requires_grad_()
    graphed = torch.cuda.make_graphed_callables(tuple(modules), tuple((x.clone().detach().requires_grad_(),)
                                                                      for _ in modules), allow_unused_input=True)
    return Peer(list(graphed), modules.parameters(), lambda: None)


def te_graphs(kind: str) -> Peer:
    from transformer_engine.pytorch.graph import make_graphed_callables
    modules = fresh(kind)
    x = sample_input(kind)
    graphed = make_graphed_callables(tuple(modules), tuple((x.clone().requires_grad_(),) for _ in modules),
                                     enabled=False, allow_unused_input=True)
    return Peer(list(graphed), modules.parameters(), lambda: [one.reset() for one in graphed])


def automodel(kind: str) -> Peer:
    from nemo_automodel.components.cuda_graphs import partial
    modules = fresh(kind)
    entries = [partial._PartialGraphEntry(name=str(index), target=module, explicit_parameters=kind != "router",
                                          retain_graph_in_backward=kind != "router")
               for index, module in enumerate(modules)]
    return _recorded(kind, modules, partial.PartialCudaGraphManager(entries), record=True)


def ours(kind: str, prepare: Callable[[PartialCudaGraphManager], None] | None = None, **options: object) -> Peer:
    modules = fresh(kind)
    manager = PartialCudaGraphManager.from_modules(modules, "*", strict=True, **options)
    return _recorded(kind, modules, manager, prepare=prepare)


def without_sharing(manager: PartialCudaGraphManager) -> None:
    """Give every entry static inputs of its own, so that neighbours copy."""
    for entry in manager.entries:
        for signature in entry.signatures:
            signature.sources = [None] * len(signature.sources)


def copies_outside(kind: str) -> Peer:
    """A peer whose arguments and gradients are copied by operations of their own, not by nodes of the graphs."""
    backend = CudaBackend()
    backend.copy_nodes = False
    return ours(kind, backend=backend)


def one_by_one(make: Callable[[], Peer]) -> Peer:
    """A peer whose guards evaluate every check by itself instead of running one compiled function."""
    build = guards.GuardBuilder.build

    def build_slow(builder: guards.GuardBuilder) -> guards.Guard:
        guard = build(builder)
        names = {**guard.match.__globals__, **{f"c{index}": value for index, value in enumerate(builder.constants)}}
        steps = [(kind, name, compile(expression, "<check>", "eval")) for kind, name, _, expression in builder.steps]
        tensors = list(builder.tensors)

        def match(args: tuple, kwargs: dict) -> tuple[torch.Tensor, ...] | None:
            bound = {"args": args, "kwargs": kwargs}
            for kind, name, code in steps:
                value = eval(code, names, bound)  # noqa: S307 - the guard's own text
                if kind == "bind":
                    bound[name] = value
                elif not value:
                    return None
            return tuple([bound[name] for name in tensors])

        return guards.Guard(match, guard.explain, guard.source)

    guards.GuardBuilder.build = build_slow
    try:
        return make()
    finally:
        guards.GuardBuilder.build = build


def _recorded(kind: str, modules: nn.ModuleList, manager: object, record: bool = False,
              prepare: Callable | None = None) -> Peer:
    if record:
        manager.start_recording()
    peer = Peer(list(modules), modules.parameters(), manager.close)
    x = sample_input(kind).requires_grad_()
    result = peer.forward(x.view_as(x))
    result.backward(torch.ones_like(result))
    del result
    peer.clear(x)
    if prepare is not None:
        prepare(manager)
    manager.capture()
    peer.manager = manager
    return peer


def bare_nodes(kind: str) -> Peer:
    """A node of autograd for each module that computes nothing: it hands out tensors made beforehand."""
    modules = fresh(kind)
    x = sample_input(kind)

    def replace(module: nn.Module) -> None:
        parameters = tuple(module.parameters())
        out, gradients = first(module(x)).detach(), [torch.zeros_like(x), *map(torch.zeros_like, parameters)]

        class Bare(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, *tensors: torch.Tensor) -> torch.Tensor:
                return out.detach()

            @staticmethod
            def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
                return tuple([gradient.detach() for gradient in gradients])

        module.forward = lambda value: Bare.apply(value, *parameters)

    for module in modules:
        replace(module)
    return Peer(list(modules), modules.parameters(), lambda: None)


def raw_replay(kind: str) -> Peer:
    """One forward and one backward graph for everything, replayed without guards, copies or autograd: the floor."""
    modules = fresh(kind)
    x = sample_input(kind).requires_grad_()
    parameters = [parameter.detach().requires_grad_() for parameter in modules.parameters()]

    def call() -> torch.Tensor:
        value, position = x, 0
        for module in modules:
            names = [name for name, _ in module.named_parameters()]
            own = dict(zip(names, parameters[position:position + len(names)]))
            position += len(names)
            value = first(torch.func.functional_call(module, own, (value,)))
        return value

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            out = call()
            torch.autograd.grad(out, [x, *parameters], torch.ones_like(out))
    torch.cuda.current_stream().wait_stream(side)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward):
        out = call()
    with torch.cuda.graph(backward, pool=forward.pool()):
        gradients = torch.autograd.grad(out, [x, *parameters], torch.ones_like(out))
    peer = Peer([], [], lambda: None)
    peer.forward = lambda _: forward.replay()
    peer.step = lambda *_: (forward.replay(), backward.replay())
    peer.keep = (out, gradients)
    return peer


PEERS: dict[str, Callable[[str], Peer]] = {
    "eager": eager,
    "torch make_graphed_callables": torch_graphs,
    "TE make_graphed_callables": te_graphs,
    "AutoModel manager": automodel,
    "ours": ours,
    "ours, accumulate in graph": lambda kind: ours(kind, accumulate_in_graph=True),
    "ours, copies outside the graphs": copies_outside,
    "ours, checks one by one": lambda kind: one_by_one(lambda: ours(kind)),
    "bare autograd nodes": bare_nodes,
    "raw replay": raw_replay,
}
FURTHER_PEERS: dict[str, Callable[[str], Peer]] = {  # for their memory alone
    "ours, one pool, accumulate in graph": lambda kind: ours(kind, share_pool=True, accumulate_in_graph=True),
}
UNCHECKED = ("bare autograd nodes", "raw replay")  # their results mean nothing
STACK_PEERS: dict[str, Callable[[str], Peer]] = {
    "ours, neighbours copy": lambda kind: ours(kind, without_sharing),
    "ours, one pool": lambda kind: ours(kind, share_pool=True),
    "ours, merged": lambda kind: ours(kind, merge=True),
    "ours, merged, accumulate in graph": lambda kind: ours(kind, merge=True, accumulate_in_graph=True),
}
# Technique: (the peer that has it, the same without it).
TECHNIQUES = {
    "guards compiled per entry": ("ours", "ours, checks one by one"),
    "copies inside the graphs": ("ours", "ours, copies outside the graphs"),
    "producers write into static inputs": ("ours", "ours, neighbours copy"),
    "gradients accumulated in the graph": ("ours, accumulate in graph", "ours"),
    "neighbours merged": ("ours, merged", "ours"),
    "gradients accumulated in the graph, merged": ("ours, merged, accumulate in graph", "ours, merged"),
    "neighbours merged, accumulated in the graph": ("ours, merged, accumulate in graph", "ours, accumulate in graph"),
}
AIMS = {"torch make_graphed_callables": 1.0, "AutoModel manager": 0.45}  # at most this share of that peer's cost
MEMORY_PEERS = ("eager", "torch make_graphed_callables", "TE make_graphed_callables", "AutoModel manager", "ours",
                "ours, one pool", "ours, accumulate in graph", "ours, one pool, accumulate in graph",
                "ours, merged, accumulate in graph")


def gradients_of(peer: Peer, kind: str, microbatches: int = 2) -> list[torch.Tensor]:
    """Gradients after `microbatches` backward passes that accumulate, from inputs that differ."""
    x = sample_input(kind).requires_grad_()
    peer.clear(x)
    torch.cuda.synchronize()
    for index in range(microbatches):
        value = peer.forward((x * (1 + index)).view_as(x))
        value.backward(torch.ones_like(value) * 0.01)
        del value  # an output that is still referred to keeps its slot taken
    found = [x.grad.clone(), *(parameter.grad.clone() for parameter in peer.parameters)]
    peer.clear(x)
    return found


def describe(error: BaseException) -> str:
    cause = f" <- {describe(error.__cause__)}" if error.__cause__ is not None else ""
    return f"{type(error).__name__}: {str(error)[:300]}{cause}"


def time_case(kind: str, rounds: int, calls: int) -> tuple[dict, dict, dict]:
    """(what each peer costs, what each technique gains, cost of ours over that of others)."""
    makers = {**PEERS, **(STACK_PEERS if kind == "stack" else {})}
    peers: dict[str, Peer] = {}
    report: dict[str, dict] = {}
    for name, make in makers.items():
        try:
            peers[name] = make(kind)
        except Exception as error:  # a peer that is not installed or fails here is reported, not fatal
            report[name] = {"error": describe(error)}
    # Attention kernels may add in an order of their own: where eager differs from itself, equality says nothing.
    expected = gradients_of(peers["eager"], kind)
    for name, peer in peers.items():
        if name in UNCHECKED:
            report[name] = {}
            continue
        try:
            actual = gradients_of(peer, kind)
        except Exception as error:
            report[name] = {"error": describe(error)}
            continue
        report[name] = {"two_accumulated_microbatches_equal_eager": len(actual) == len(expected) and all(
            torch.equal(one, other) for one, other in zip(actual, expected))}
    peers = {name: peer for name, peer in peers.items() if "error" not in report[name]}
    x = sample_input(kind).requires_grad_()
    shape = peers["eager"].forward(x)
    gradient = torch.ones_like(shape) * 0.01
    del shape
    samples: dict[str, dict[str, list[float]]] = {name: {"forward": [], "step": []} for name in peers}
    order, shuffle = list(peers), random.Random(SEED)
    for round_index in range(rounds + 3):  # three rounds of warmup
        shuffle.shuffle(order)
        for name in order:
            for what in ("forward", "step"):
                microseconds = _sample(peers[name], what, x, gradient, calls)
                if round_index >= 3:
                    samples[name][what].append(microseconds)
    for name, found in samples.items():
        report[name]["host_microseconds"] = {
            what: {"median": round(statistics.median(values), 2), "p25": round(_quantile(values, 0.25), 2),
                   "p75": round(_quantile(values, 0.75), 2), "samples": [round(value, 2) for value in values]}
            for what, values in found.items()}
        manager = getattr(peers[name], "manager", None)
        if manager is not None:
            report[name]["stats"] = manager.stats()
    if "ours" in peers:
        report["ours"]["guard_microseconds"] = _guard_cost(peers["ours"].manager, x)
    for peer in peers.values():
        peer.close()
    return report, gains(samples), ratios(samples)


def gains(samples: dict[str, dict[str, list[float]]]) -> dict:
    """Of each technique: the median, over rounds, of the cost without it less the cost with it."""
    return {technique: {what: round(statistics.median(
                without - having for having, without in zip(samples[one][what], samples[other][what])), 2)
            for what in ("forward", "step")}
            for technique, (one, other) in TECHNIQUES.items() if one in samples and other in samples}


def ratios(samples: dict[str, dict[str, list[float]]]) -> dict:
    """Cost of ours as a share of another peer's, the median over rounds, beside the aim."""
    return {name: {"aim": aim, **{what: round(statistics.median(
                own / their for own, their in zip(samples["ours"][what], samples[name][what])), 3)
            for what in ("forward", "step")}}
            for name, aim in AIMS.items() if name in samples and "ours" in samples}


def _sample(peer: Peer, what: str, x: torch.Tensor, gradient: torch.Tensor, calls: int) -> float:
    peer.clear(x)
    torch.cuda.synchronize()
    spent = 0.0
    for _ in range(calls):
        start = time.perf_counter()
        if what == "forward":
            result = peer.forward(x)
        else:
            result = peer.step(x, gradient)
        spent += time.perf_counter() - start
        del result
        peer.clear(x)
    torch.cuda.synchronize()
    return spent / calls * 1e6


def _guard_cost(manager: PartialCudaGraphManager, x: torch.Tensor) -> dict[str, float]:
    """The compiled guard, and the same checks one by one, for the first entry."""
    guard, count = manager.entries[0].variants[0].guard, 2000
    x = x.view_as(x)
    costs = {}
    for name, function in (("compiled", guard.match), ("one by one", guard.explain)):
        start = time.perf_counter()
        for _ in range(count):
            function((x,), {})
        costs[name] = round((time.perf_counter() - start) / count * 1e6, 3)
    return costs


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def memory_of(name: str) -> dict:
    """Bytes that this process holds after three steps of the 24-block stack with one peer."""
    peer = {**PEERS, **STACK_PEERS, **FURTHER_PEERS}[name]("stack")
    x = sample_input("stack").requires_grad_()
    gradient = torch.ones_like(x) * 0.01
    for _ in range(3):
        peer.step(x, gradient)
        peer.clear(x)
    torch.cuda.synchronize()
    return {"reserved_bytes": torch.cuda.memory_reserved(), "allocated_bytes": torch.cuda.memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated()}


def measure_memory() -> dict:
    running = {name: subprocess.Popen([sys.executable, __file__, "--memory-of", name], stdout=subprocess.PIPE,
                                      stderr=subprocess.PIPE, text=True) for name in MEMORY_PEERS}
    report = {}
    for name, process in running.items():
        out, err = process.communicate(timeout=180)
        last = (err.strip().splitlines() or ["no output"])[-1]
        report[name] = json.loads(out.splitlines()[-1]) if process.returncode == 0 else {"error": last[:300]}
    return report


def facts(revision: str) -> dict:
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True,
                            text=True).stdout.strip().splitlines()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for package in ("transformer-engine", "nemo-automodel"):
        try:
            from importlib.metadata import version
            versions[package] = version(package)
        except Exception:
            versions[package] = None
    return {"machine": {"gpu": torch.cuda.get_device_name(), "driver": driver[0] if driver else None,
                        "cpus": torch.get_num_threads()},
            "versions": versions, "revision": revision, "seed": SEED,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}


def run_tests() -> dict:
    """Outcome of every GPU test of the partial graph manager, from a pytest run of its own."""
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short",
                        f"--junitxml={report}", *GPU_TESTS], cwd=root, timeout=400,
                       env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, stdout=sys.stderr)
        outcomes = {}
        for case in ElementTree.parse(report).iter("testcase"):
            found = {child.tag for child in case} & {"failure", "error", "skipped"}
            outcomes[case.get("name")] = next(iter(found), "passed")
    return {"counts": {outcome: list(outcomes.values()).count(outcome) for outcome in sorted(set(outcomes.values()))},
            "outcomes": outcomes}


def print_table(result: dict) -> None:
    for kind, report in result["cases"].items():
        print(f"\n{kind}: host microseconds a call, forward / forward and backward", file=sys.stderr)
        for name, found in report.items():
            times = found.get("host_microseconds")
            line = found.get("error") or f"{times['forward']['median']:9.1f} {times['step']['median']:9.1f}"
            print(f"  {name:44} {line}", file=sys.stderr)
        for technique, gain in result["gained_microseconds"][kind].items():
            print(f"  gained: {technique:36} {gain['forward']:9.1f} {gain['step']:9.1f}", file=sys.stderr)
        for name, share in result["ours_over"][kind].items():
            print(f"  ours / {name:37} {share['forward']:9.3f} {share['step']:9.3f} (aim {share['aim']})",
                  file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="result file; stdout where left out")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=20, help="calls of one sample")
    parser.add_argument("--revision", default="unknown", help="git revision to note in the result")
    parser.add_argument("--tests-out", type=Path, help="run the GPU tests instead, and write their outcomes here")
    parser.add_argument("--memory-of", choices=[*PEERS, *STACK_PEERS, *FURTHER_PEERS], help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no usable GPU", file=sys.stderr)
        return 4
    if options.memory_of:
        print(json.dumps(memory_of(options.memory_of)))
        return 0
    if options.tests_out:
        found = {"schema_version": 1, "command": f"python {SCRIPT} --tests-out {options.tests_out.name}",
                 **facts(options.revision), **run_tests()}
        options.tests_out.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    cases, gained, shares = {}, {}, {}
    written = f" --out {options.out.name}" if options.out else ""
    command = f"python {SCRIPT}{written} --rounds {options.rounds} --calls {options.calls}"
    result = {"schema_version": 1, "command": command, **facts(options.revision),
              "configuration": {"sequence": SEQUENCE, "hidden": HIDDEN, "heads": HEADS, "experts": EXPERTS,
                                "blocks": BLOCKS, "rounds": options.rounds, "calls": options.calls},
              "cases": cases, "gained_microseconds": gained, "ours_over": shares}
    result["memory_of_24_entries"] = measure_memory()
    for kind in ("attention", "router", "stack"):
        cases[kind], gained[kind], shares[kind] = time_case(
            kind, options.rounds if kind != "stack" else max(5, options.rounds // 2),
            options.calls if kind != "stack" else max(2, options.calls // 4))
        if options.out:  # what is measured so far survives a time limit
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    if not options.out:
        print(json.dumps(result))
    print_table(result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
