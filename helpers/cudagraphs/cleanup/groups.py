# SPDX-License-Identifier: Apache-2.0
"""Process groups: deletion comes before destroy_process_group and before abort.

A captured collective makes its graph hold the NCCL communicator; torch.distributed.destroy_process_group() then waits
for ever (NVIDIA-NeMo/Megatron-Bridge issues 1185 and 3595; NCCL's commDestroySync, src/init.cc, polls until no graph
refers to the communicator, in an abort too). Both entry points of torch.distributed.distributed_c10d are wrapped: now
if it is imported, else right after its import.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

C10D = "torch.distributed.distributed_c10d"
DESTROY = "destroy_process_group"
_TEARDOWN_CALLS = (DESTROY, "_abort_process_group")  # the second since torch 2.6
_ORIGINAL = "__delete_graphs_original__"

Before = Callable[[str], AbstractContextManager[bool]]  # True: the groups are gone already


def wrap(before: Before, imported: Callable[[], None]) -> None:
    """Enter before(name) around every teardown of all process groups, in torch as imported now or later.

    imported: called once torch.distributed.distributed_c10d has been imported, if it is not yet.

    Destroying one group of several is left alone: graphs may go on replaying on the others.
    """
    if C10D in sys.modules:
        _wrap_module(sys.modules[C10D], before)
    else:
        sys.meta_path.insert(0, _AfterImport(before, imported))


def unwrap() -> None:
    """Undo wrap()."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _AfterImport)]
    for module in _namespaces():
        for name in _TEARDOWN_CALLS:
            original = getattr(vars(module).get(name), _ORIGINAL, None)
            if original is not None:
                setattr(module, name, original)


def _namespaces() -> list[ModuleType]:
    """torch.distributed re-exports the functions of distributed_c10d, so both names are wrapped."""
    return [sys.modules[name] for name in (C10D, "torch.distributed") if name in sys.modules]


def _wrap_module(module: ModuleType, before: Before) -> None:
    for name in _TEARDOWN_CALLS:
        original = getattr(module, name, None)
        if original is None or hasattr(original, _ORIGINAL):
            continue
        wrapped = _wrapped(original, module, before)
        for namespace in {id(m): m for m in (module, *_namespaces())}.values():
            if vars(namespace).get(name) is original:
                setattr(namespace, name, wrapped)


def _wrapped(original: Callable[..., Any], module: ModuleType, before: Before) -> Callable[..., Any]:
    @functools.wraps(original)
    def teardown(group: Any = None, *args: Any, **kwargs: Any) -> Any:
        if group is not None and group != module.GroupMember.WORLD:
            return original(group, *args, **kwargs)
        with before(original.__name__) as gone:
            return None if gone else original(group, *args, **kwargs)

    setattr(teardown, _ORIGINAL, original)
    return teardown


class _AfterImport:
    """A meta path finder that lets the others find distributed_c10d and wraps it once it has run."""

    def __init__(self, before: Before, imported: Callable[[], None]) -> None:
        self._before, self._imported = before, imported

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != C10D:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module

                def exec_module(module: ModuleType, execute: Callable[[ModuleType], None] = execute) -> None:
                    execute(module)
                    _wrap_module(module, self._before)
                    self._imported()

                spec.loader.exec_module = exec_module  # type: ignore[method-assign]
                return spec
        return None


def world_size() -> int:
    """Ranks in the default group, 1 where there is none."""
    distributed = sys.modules.get("torch.distributed")
    try:
        return distributed.get_world_size() if distributed is not None and distributed.is_initialized() else 1
    except Exception:  # half imported, or a group that is going down
        return 1


def _abort_together(module: ModuleType) -> None:
    """Abort each group in a thread of its own, and wait for all of them.

    ncclCommAbort raises the communicator's abort flag, which frees its kernels, and then waits for the communicator's
    stream and for the graphs that hold it (commReclaim and commDestroySync, NCCL 2.28). Both may be stuck behind a
    kernel of another communicator, so one abort after the other can wait for ever (pytorch/pytorch issue 119797).
    _abort_process_group groups its calls against that, but ProcessGroupNCCL::abort makes them in threads that the group
    does not reach. An abort that is done already returns at once, so torch's own call after this only tidies up.
    """
    threads = []
    for group in list(getattr(getattr(module, "_world", None), "pg_names", ())):
        thread = threading.Thread(target=_abort_quietly, args=(group,), name="cuda-graph-abort", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is going down: torch's own call has to do
            break
        threads.append(thread)
    for thread in threads:
        thread.join()


def _abort_quietly(group: Any) -> None:
    """What goes wrong here goes wrong again in torch's own call, which reports it."""
    use_device_of_process()
    try:
        group.abort()
    except Exception:
        return


def use_device_of_process() -> None:
    """Make this thread use the GPU that the process has its memory on, if it is one.

    A new thread is on device 0, where another rank works: a CUDA call from here would make a second context there.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    try:
        if cuda is not None and cuda.is_initialized():
            used = [device for device in range(cuda.device_count()) if cuda.memory_reserved(device)]
            if len(used) == 1:
                cuda.set_device(used[0])
    except Exception:  # a device that has failed answers no question; the rescue goes on
        return


def abort() -> str | None:
    """Abort every communicator, so that no rank waits for this one. Returns why not, or None when done or not needed.

    Uses torch's _abort_process_group (2.6), which asks each backend; one that cannot abort says so. Before that, all
    groups are aborted at the same time: see _abort_together.
    """
    module = sys.modules.get(C10D)
    if module is None or not module.is_initialized():
        return None
    call = getattr(module, "_abort_process_group", None)
    if call is None:
        return (
            f"torch {getattr(sys.modules.get('torch'), '__version__', '?')} has no _abort_process_group (added in 2.6)"
        )
    _abort_together(module)
    try:
        getattr(call, _ORIGINAL, call)()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
