# SPDX-License-Identifier: Apache-2.0
"""install() and the launcher, in processes of their own, with a small stand-in for torch.

The stand-in's destroy_process_group() hangs while a graph is alive, as NCCL's does; every line of the log is one event.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

import delete_graphs
from cudagraphs.cleanup import exits, groups

HELPER = Path(delete_graphs.__file__)
PATIENCE_S = 60  # how long a test waits; never part of a verdict

TORCH = {
    "torch/__init__.py": """
        import atexit
        from torch import cuda, distributed
        from torch.log import log
        __version__ = "2.11.0"
        atexit.register(log, "atexit of torch")
    """,
    "torch/log.py": """
        import os
        def log(text):
            with open(os.environ["EVENTS"], "a") as file:
                file.write(text + "\\n")
    """,
    "torch/cuda/__init__.py": """
        from torch.cuda.graphs import CUDAGraph
        def is_initialized(): return False
    """,
    "torch/cuda/graphs.py": """
        import weakref
        from torch.log import log
        live = weakref.WeakSet()
        class CUDAGraph:
            def __init__(self, name="graph", error=None):
                self.name, self.error = name, error
                live.add(self)
            def pool(self):
                if self not in live: raise RuntimeError("no capture")
            def reset(self):
                if self.error: raise self.error
                log("reset " + self.name)
                live.discard(self)
    """,
    "torch/distributed/__init__.py": """
        from .distributed_c10d import *
        from .distributed_c10d import _abort_process_group
    """,
    "torch/distributed/distributed_c10d.py": """
        import time
        from torch.cuda.graphs import live
        from torch.log import log
        __all__ = ["destroy_process_group", "is_initialized", "get_world_size", "init_process_group", "GroupMember"]
        class GroupMember:
            WORLD = "world"
        state = {"initialized": False, "stuck": False, "aborted": False}
        def is_initialized(): return state["initialized"]
        def get_world_size(): return 2
        def init_process_group(stuck=False): state.update(initialized=True, stuck=stuck)
        def destroy_process_group(group=None):
            log("destroy " + str(group))
            while group in (None, GroupMember.WORLD) and (live or state["stuck"]):
                time.sleep(0.01)
        def _abort_process_group(group=None):
            log("abort with " + str(len(live)) + " graphs")
            state.update(initialized=False, stuck=False, aborted=True)
    """,
}
STUCK = """
    import ctypes
    def stuck(library=ctypes.CDLL(None)):
        mutex = ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)
"""


class Site:
    """A folder with the stand-in for torch and a training script."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.events_file = folder, folder / "events"
        for name, text in TORCH.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))

    def start(self, script: str, *arguments: str, launcher=True, options=("--limit", "20"), module=False, **more):
        (self.folder / "train.py").write_text(textwrap.dedent(script))
        self.events_file.write_text("")
        program = ["-m", "train"] if module else ["train.py"]
        ours = [str(HELPER), *options, "--"] if launcher else []
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "EVENTS": str(self.events_file)}
        return subprocess.Popen(
            [sys.executable, *ours, *program, *arguments],
            cwd=self.folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **more,
        )

    def run(self, script: str, *arguments: str, **more):
        process = self.start(script, *arguments, **more)
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
        return process.returncode, out, err

    def events(self) -> list[str]:
        return self.events_file.read_text().splitlines()


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


GRAPH = "import torch\ngraph = torch.cuda.CUDAGraph()\n"


def with_graph(script: str) -> str:
    return GRAPH + textwrap.dedent(script)


def test_the_stand_in_hangs_without_the_helper(site):
    process = site.start(with_graph("torch.distributed.destroy_process_group()"), launcher=False)
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=1)
    process.kill()
    process.communicate()


@pytest.mark.parametrize("name", ["destroy_process_group", "_abort_process_group"])
def test_teardown_is_preceded_by_deletion(site, name):
    code, _, err = site.run(with_graph(f"torch.distributed.{name}()"))
    assert (code, err) == (0, "")
    assert site.events()[0] == "reset graph" and site.events()[1].split()[0] in ("destroy", "abort")


def test_a_subgroup_leaves_graphs_alone(site):
    code, _, _ = site.run(with_graph("torch.distributed.destroy_process_group('one of many')"))
    assert code == 0 and site.events()[:2] == ["destroy one of many", "reset graph"]


def test_install_as_a_line_of_code(site):
    script = (
        f"import sys; sys.path.insert(0, {str(HELPER.parent)!r}); import delete_graphs; delete_graphs.install(20)\n"
    )
    code, _, _ = site.run(script + with_graph("torch.distributed.destroy_process_group()"), launcher=False)
    assert code == 0 and site.events()[:2] == ["reset graph", "destroy None"]


def test_deletion_comes_before_the_atexit_callbacks_of_torch(site):
    code, _, _ = site.run(
        with_graph("import atexit; from torch.log import log; atexit.register(log, 'atexit of program')")
    )
    assert code == 0 and site.events() == ["reset graph", "atexit of program", "atexit of torch"]


WAYS = {
    "return": ("", 0),
    "sys.exit": ("import sys; sys.exit(7)", 7),
    "exception": ("def f(): raise ValueError('boom')\nf()", 1),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", -signal.SIGINT),
    "SIGINT": ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    "SIGTERM": ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "SIGUSR1": ("import os, signal; os.kill(os.getpid(), signal.SIGUSR1)", -signal.SIGUSR1),
    "SIGUSR2": ("import os, signal; os.kill(os.getpid(), signal.SIGUSR2)", -signal.SIGUSR2),
}


@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_out_deletes_and_keeps_code_and_output(site, way, module):
    body, expected = WAYS[way]
    script = with_graph(f"import sys\nprint('out', __name__, sys.argv[1:], flush=True)\n{body}")
    plain = site.run(script, "a", "--b", launcher=False, module=module)
    ours = site.run(script, "a", "--b", module=module)
    assert plain[0] == ours[0] == expected
    assert plain[1] == ours[1]
    assert plain[2] == ours[2], "the traceback shows nothing of ours"
    assert site.events()[0] == "reset graph"


def test_main_module_argv_and_path_are_the_scripts(site):
    script = """
        import sys, __main__
        print(sorted(globals()), sys.argv, sys.path[0], __file__, __spec__, __builtins__, vars(__main__) is globals())
        class Thing: pass
        import pickle
        print(type(pickle.loads(pickle.dumps(Thing()))) is Thing)
    """
    assert site.run(script, "x", launcher=False) == site.run(script, "x")


def test_the_separator_may_be_missing(site):
    """torchrun takes the first -- for itself."""
    script = "import sys; print(sys.argv)"
    (site.folder / "train.py").write_text(script)
    for words in (["--limit", "9", "train.py"], ["--limit=9", "--", "train.py"], ["-m", "train"]):
        done = subprocess.run(
            [sys.executable, str(HELPER), *words, "--limit", "x", "--"],
            cwd=site.folder,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.endswith("train.py', '--limit', 'x', '--']\n")


def test_a_fault_aborts_the_communicators_after_deletion(site):
    site.run(with_graph("torch.distributed.init_process_group()\nraise ValueError"))
    assert site.events()[:2] == ["reset graph", "abort with 0 graphs"]


def test_a_failing_sys_exit_aborts_too_and_a_good_one_does_not(site):
    script = with_graph("import sys\ntorch.distributed.init_process_group()\nsys.exit(int(sys.argv[1]))")
    site.run(script, "3")
    assert "abort with 0 graphs" in site.events()
    site.run(script, "0")
    assert "abort with 0 graphs" not in site.events()


FINALLY = """
    import sys
    torch.distributed.init_process_group(stuck=True)  # a peer waits in a collective, and destroy waits for the peer
    try:
        {what}
    finally:
        torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("what", "code"), [("raise ValueError", 1), ("sys.exit(3)", 3), ("raise KeyboardInterrupt", -signal.SIGINT)]
)
def test_destroy_in_a_finally_block_after_a_failure_is_an_abort(site, what, code):
    """The failure's own exit code, at once: a destroy would wait for peers that wait for this rank."""
    done, _, err = site.run(with_graph(FINALLY.format(what=what)))
    assert done == code and "at the limit" not in err
    assert site.events()[:2] == ["reset graph", "abort with 0 graphs"]
    assert not any(event.startswith("destroy") for event in site.events())


def test_groups_made_again_after_such_an_abort_are_destroyed(site):
    script = with_graph("""
        torch.distributed.init_process_group()
        try:
            raise ValueError
        except ValueError:
            torch.distributed.destroy_process_group()
        torch.distributed.init_process_group()
        torch.distributed.destroy_process_group()
    """)
    assert site.run(script)[0] == 0
    assert site.events()[1:3] == ["abort with 0 graphs", "destroy None"]


@pytest.mark.parametrize("what", ["sys.exit(0)", "sys.exit()", "next(iter(()))"])
def test_destroy_after_an_orderly_end_stays_a_destroy(site, what):
    script = FINALLY.replace("stuck=True", "").replace("finally:", "except (SystemExit, StopIteration):")
    assert site.run(with_graph(script.format(what=what)))[0] == 0
    assert site.events()[:2] == ["reset graph", "destroy None"]


def test_handler_that_was_there_decides(site):
    """A graceful handler set before install(): called, and the training goes on with its graphs."""
    script = f"""
        import os, signal, sys
        seen = []
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        sys.path.insert(0, {str(HELPER.parent)!r})
        import delete_graphs; delete_graphs.install(20)
        import torch
        graph = torch.cuda.CUDAGraph()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        graph.pool()
        print(seen, signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN)
    """
    code, out, _ = site.run(script, launcher=False)
    assert code == 0 and out == "[15] True\n"


def test_handler_set_later_decides(site):
    script = with_graph("""
        import os, signal
        seen = []
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
        os.kill(os.getpid(), signal.SIGTERM)
        graph.pool()
        print(seen)
    """)
    code, out, _ = site.run(script)
    assert (code, out) == (0, "[15]\n")


def test_handler_set_later_that_passes_on(site):
    """It finds a default action for SIGTERM, as it would without us, and Python's own handler for SIGINT."""
    script = with_graph("""
        import os, signal
        def handler(number, frame):
            print("seen", number, flush=True)
            if callable(before[number]):
                before[number](number, frame)
        before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
        os.kill(os.getpid(), signal.SIGTERM)
        graph.pool()
        os.kill(os.getpid(), signal.SIGINT)
        print("not reached")
    """)
    code, out, _ = site.run(script)
    assert (code, out) == (-signal.SIGINT, "seen 15\nseen 2\n")


def test_cleanup_code_of_the_program_runs_on_a_signal(site):
    script = with_graph("""
        import os, signal
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            graph.pool()
            print("saved", flush=True)
    """)
    code, out, _ = site.run(script)
    assert (code, out) == (-signal.SIGTERM, "saved\n") and site.events()[0] == "reset graph"


def test_cleanup_code_keeps_its_graphs_for_half_of_the_limit(site):
    """Longer than a main thread that does not react at all."""
    script = with_graph("""
        import os, signal, time
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            time.sleep(2.2)
            graph.pool()
            print("saved", flush=True)
    """)
    code, out, _ = site.run(script, options=("--limit", "6"))
    assert (code, out) == (-signal.SIGTERM, "saved\n")


def test_keyboard_interrupt_may_be_caught(site):
    """No deadline is left behind: with a limit this short the process would not live to print."""
    script = with_graph("""
        import os, signal, time
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            time.sleep(4)
            graph.pool()
            print("went on", flush=True)
    """)
    _, out, _ = site.run(script, options=("--limit", "2"))
    assert out == "went on\n"


def test_a_stuck_main_thread_is_left_behind(site):
    """In a C call that no signal interrupts, as in a collective: a thread resets graphs and aborts communicators."""
    script = (
        with_graph("""
        import os, signal, threading
        torch.distributed.init_process_group()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    """)
        + textwrap.dedent(STUCK)
        + "stuck()\n"
    )
    code, _, err = site.run(script, options=("--limit", "1.5"))
    assert code == 128 + signal.SIGTERM
    assert site.events() == ["reset graph", "abort with 0 graphs"]
    assert "leaving on SIGTERM" in err and "in stuck" in err


# A graph whose kernels wait for a peer: deleting it waits for them, and only an abort frees them.
WAITING = """
    import os, signal, threading, time
    from torch.distributed.distributed_c10d import state
    class Waiting(torch.cuda.CUDAGraph):
        def reset(self):
            while not state["aborted"]:
                time.sleep(0.01)
            super().reset()
    waiting = Waiting("waiting")
    torch.distributed.init_process_group()
"""


@pytest.mark.parametrize("how, code", [
    ("raise RuntimeError('injected')", 1),
    ("try: 1 / 0\nfinally: torch.distributed.destroy_process_group()", 1),
    ("threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()\nstuck()", 128 + signal.SIGTERM),
])  # fmt: skip
def test_a_deletion_that_waits_for_a_peer_is_freed_by_the_abort(site, how, code):
    script = "import torch\n" + textwrap.dedent(WAITING) + textwrap.dedent(STUCK) + how + "\n"
    ended, _, err = site.run(script, options=("--limit", "6"))
    assert ended == code, err
    assert site.events()[:2] == ["abort with 1 graphs", "reset waiting"]


GROUPS = """
    import threading, time
    from torch.distributed import distributed_c10d
    from torch.log import log
    class Group:
        def __init__(self, name, other=None):
            self.name, self.other, self.called = name, other, threading.Event()
        def abort(self):
            self.called.set()
            if self.other is not None:
                self.other.called.wait()  # NCCL: its stream is behind a kernel of the other communicator
            log("aborted " + self.name)
    torch.distributed.init_process_group()
"""


def test_communicators_that_wait_for_each_other_are_aborted_together(site):
    """One abort after the other would wait for ever, whatever the order."""
    script = (
        with_graph(GROUPS)
        + textwrap.dedent("""
        first, second = Group("first"), Group("second")
        first.other, second.other = second, first
        distributed_c10d._world = type("World", (), {"pg_names": {first: "0", second: "1"}})
        raise RuntimeError("injected")
    """)
    )
    code, _, _ = site.run(script)
    assert code == 1
    assert site.events()[0] == "reset graph" and site.events()[3] == "abort with 0 graphs"
    assert sorted(site.events()[1:3]) == ["aborted first", "aborted second"]


ABORT_HANGS = textwrap.dedent("""
    distributed_c10d._world = type("World", (), {"pg_names": {Group("stuck", Group("never")): "0"}})
""")


@pytest.mark.parametrize("how", ["raise RuntimeError('injected')", "try: 1 / 0\nfinally: torch.distributed.destroy_process_group()"])
def test_with_peers_an_abort_that_never_returns_is_left_behind(site, how):
    code, _, err = site.run(with_graph(GROUPS) + ABORT_HANGS + how + "\n", options=("--limit", "2"))
    assert code == 75 and "leaving with exit code 75" in err


def test_after_a_fault_with_peers_all_stages_share_half_of_the_limit(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(exits.time, "monotonic", lambda: clock[0])
    leaving = object.__new__(exits.Exits)
    leaving.limit, leaving.had_peers, leaving._fault_ends = 8.0, False, None
    assert leaving._time_to_leave(fault=False) == 32 and leaving._time_to_leave(fault=True) == 8
    leaving.had_peers = True
    assert leaving._time_to_leave(fault=False) == 32 and leaving._time_to_leave(fault=True) == 4
    clock[0] += 1.5
    assert leaving._time_to_leave(fault=True) == 2.5
    clock[0] += 2.4
    assert leaving._time_to_leave(fault=True) == 1  # a stage has that much at least
    clock[0] += 60
    assert leaving._time_to_leave(fault=True) == 4  # the program caught that fault, and this is another


@pytest.mark.parametrize(("ranks", "seconds"), [(1, 8.0), (2, 5.0)])
def test_a_stuck_main_thread_has_less_time_where_there_are_peers(monkeypatch, ranks, seconds):
    armed = []
    leaving = object.__new__(exits.Exits)
    leaving.limit, leaving.had_peers, leaving._signal_tokens = 8.0, False, {}
    leaving.watchdog = SimpleNamespace(arm=lambda *words, **more: armed.append((words, more)))
    monkeypatch.setattr(exits.groups, "world_size", lambda: ranks)
    leaving._arm_signal(signal.SIGTERM)
    ((after, _, status), more) = armed[0]
    assert after == seconds and status == 143 and after * more["rescue_share"] == 2


@pytest.mark.parametrize(
    ("ranks", "reacts_after", "end"), [(1, 0.1, 8.0), (1, 2.5, 8.0), (2, 0.1, 8.0), (2, 2.5, 6.0)]
)
def test_a_main_thread_that_a_rescue_had_to_free_has_less_time(monkeypatch, ranks, reacts_after, end):
    """Its peers have left the communicators by then, and it was signalled late: all of it within 10 s of the fault."""
    clock, moved = [100.0], []
    monkeypatch.setattr(exits.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(exits.groups, "world_size", lambda: ranks)
    leaving = object.__new__(exits.Exits)
    leaving.limit, leaving.had_peers, leaving.leaving, leaving.signum = 8.0, False, False, None
    leaving.previous, leaving._signal_tokens = {signal.SIGTERM: signal.SIG_DFL}, {}
    leaving._signalled_at, leaving.fault = float("inf"), False
    leaving.watchdog = SimpleNamespace(arm=lambda *_, **__: 5, move=lambda *words: moved.append(words))
    monkeypatch.setattr(leaving, "_ends_process", lambda signum: True)
    leaving._arm_signal(signal.SIGTERM)
    clock[0] += reacts_after
    with pytest.raises(exits.SignalExit):
        leaving._on_signal(signal.SIGTERM, None)
    assert moved == [(5, end, 4.0)]


def test_a_stuck_main_thread_whose_rescue_never_returns_is_left_behind(site):
    script = (
        with_graph(GROUPS)
        + ABORT_HANGS
        + "import os, signal\nthreading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        + textwrap.dedent(STUCK)
        + "stuck()\n"
    )
    code, _, err = site.run(script, options=("--limit", "2"))
    assert code == 128 + signal.SIGTERM and "leaving on SIGTERM" in err


def test_with_peers_a_main_thread_that_reacts_keeps_the_limit_for_its_own_cleanup(site):
    script = (
        with_graph(GROUPS)
        + textwrap.dedent("""
        import os, signal
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        try:
            time.sleep(30)
        finally:
            time.sleep(2.2)  # more than five eighths of the limit
            log("own cleanup")
    """)
    )
    code, _, _ = site.run(script, options=("--limit", "3"))
    assert code == -signal.SIGTERM and "own cleanup" in site.events()


@pytest.mark.parametrize(
    ("reserved", "initialized", "chosen"),
    [([0, 5], True, [1]), ([5, 5], True, []), ([0, 5], False, []), ([], True, [])],
)
def test_a_rescue_works_on_the_device_of_the_process(monkeypatch, reserved, initialized, chosen):
    """Not on device 0, where a new thread starts and another rank works."""
    devices = []
    cuda = SimpleNamespace(
        is_initialized=lambda: initialized,
        device_count=lambda: len(reserved),
        memory_reserved=lambda device: reserved[device],
        set_device=devices.append,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    groups.use_device_of_process()
    assert devices == chosen


def test_watchdog_names_the_culprit_and_leaves(site):
    """A teardown that hangs although everything was tried: stacks, the object that keeps the graph, exit code 75."""
    script = with_graph("""
        keeper = {"training": torch.cuda.CUDAGraph("stubborn", RuntimeError("refused"))}
        torch.distributed.destroy_process_group()
    """)
    code, _, err = site.run(script, options=("--limit", "1"))
    assert code == delete_graphs.EXIT_TEARDOWN_HUNG == 75
    assert "could not delete cuda_graph" in err and "refused" in err
    assert "torch.distributed.destroy_process_group()" in err and "in destroy_process_group" in err
    assert "held by entry 'training' of __main__.keeper" in err


def test_watchdog_without_a_graph_to_blame(site):
    code, _, err = site.run(
        "import torch\ntorch.distributed.init_process_group(stuck=True)\ntorch.distributed.destroy_process_group()",
        options=("--limit", "1"),
    )
    assert code == 75 and "no live CUDA graph was found" in err


def test_an_orderly_end_has_four_times_as_long(site):
    script = with_graph("""
        import threading, time
        torch.distributed.init_process_group(stuck=True)
        threading.Timer(4, torch.distributed.distributed_c10d.state.update, kwargs={"stuck": False}).start()
        torch.distributed.destroy_process_group()
        print("went on")
    """)
    code, out, _ = site.run(script, options=("--limit", "3"))
    assert out == "went on\n", code


def test_watchdog_is_quiet_when_the_teardown_ends(site):
    script = with_graph("""
        import time
        torch.distributed.destroy_process_group()
        time.sleep(5)
        print("still here")
    """)
    code, out, _ = site.run(script, options=("--limit", "1"))
    assert out == "still here\n"


def test_a_hang_that_holds_the_interpreter_lock(site):
    """No thread of Python runs: faulthandler shows the stacks and SIGALRM ends the process."""
    script = textwrap.dedent(STUCK) + textwrap.dedent("""
        import atexit
        atexit.register(stuck, ctypes.PyDLL(None))
        raise ValueError("boom")
    """)
    code, _, err = site.run(script, options=("--limit", "1"))
    assert code == -signal.SIGALRM
    assert "Timeout" in err and "in stuck" in err


def test_a_thread_that_does_not_end_cannot_keep_a_failed_process(site):
    script = (
        GRAPH
        + textwrap.dedent(STUCK)
        + "import threading\nthreading.Thread(target=stuck).start()\nraise ValueError('boom')\n"
    )
    code, _, err = site.run(script, options=("--limit", "1"))
    assert code == 75 and "ValueError: boom" in err and site.events()[0] == "reset graph"


def test_an_exception_in_another_thread_changes_nothing(site):
    script = with_graph(
        "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join()\ngraph.pool()"
    )
    code, _, err = site.run(script)
    assert code == 0 and "ZeroDivisionError" in err and site.events()[0] == "reset graph"


def test_install_from_another_thread(site):
    start = f"import sys; sys.path.insert(0, {str(HELPER.parent)!r}); import delete_graphs, threading\n"
    script = start + with_graph("""
        t = threading.Thread(target=delete_graphs.install); t.start(); t.join()
        torch.distributed.destroy_process_group()
    """)
    code, _, err = site.run(script, launcher=False)
    assert (code, err) == (0, "") and site.events()[:2] == ["reset graph", "destroy None"]


def test_a_forked_child_has_the_default_behaviour(site):
    script = with_graph("""
        import os, signal, sys, time
        child = os.fork()
        if child == 0:
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and sys.excepthook is sys.__excepthook__
            time.sleep(60)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        print(os.waitpid(child, 0)[1], flush=True)
        graph.pool()
    """)
    code, out, _ = site.run(script)
    assert (code, out) == (0, f"{signal.SIGTERM.value}\n") and site.events().count("reset graph") == 1


def test_a_multiprocessing_child_that_installs_deletes(site):
    script = f"""
        import multiprocessing, sys
        def work():
            sys.path.insert(0, {str(HELPER.parent)!r})
            import delete_graphs; delete_graphs.install(20)
            import torch
            globals()["graph"] = torch.cuda.CUDAGraph("of the child")
        if __name__ == "__main__":
            child = multiprocessing.get_context("fork").Process(target=work)
            child.start(); child.join()
            print(child.exitcode)
    """
    code, out, _ = site.run(script, launcher=False)
    assert (code, out) == (0, "0\n") and "reset of the child" in site.events()


def test_signals_from_outside_reach_the_program(site):
    process = site.start(with_graph("import time\nprint('ready', flush=True)\ntime.sleep(60)"))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGTERM and site.events()[0] == "reset graph"


def test_report_file(site):
    code, _, _ = site.run(with_graph("raise ValueError"), options=("--limit", "20", "--report", "report-{rank}.json"))
    body = json.loads((site.folder / "report-0.json").read_text())
    assert code == 1 and body["deleted"] == {"cuda_graph": 1} and body["fault"] is True and body["schema_version"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no program given"),
        (["--"], "no program given"),
        (["--", "-m"], "no program given"),
        (["--", "missing.py"], "missing.py: no such file"),
        (["--limit", "never", "--", "train.py"], "'never' is not a positive number of seconds"),
        (["--limit", "-1", "--", "train.py"], "'-1' is not a positive number of seconds"),
        (["missing.py", "--limit", "3"], "missing.py: no such file"),
        (["--limit=3", "--limits", "4", "--", "train.py"], "unrecognized arguments: --limits 4"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(tmp_path, arguments, words):
    done = subprocess.run([sys.executable, str(HELPER), *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and words in done.stderr and done.stdout == ""


def test_install_refuses_a_limit_that_is_none():
    with pytest.raises(ValueError, match="positive number of seconds"):
        delete_graphs.install(limit=0)


def test_uninstall_puts_everything_back():
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)], sys.excepthook
    delete_graphs.install(limit=30)
    delete_graphs.install(limit=30)
    assert signal.getsignal(signal.SIGTERM) != before[0][0]
    delete_graphs.uninstall()
    delete_graphs.uninstall()
    assert before == ([signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)], sys.excepthook)
