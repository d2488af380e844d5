#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ask released upstream code what it makes of a workspace: a Bridge recipe, a Megatron-LM command line, an AutoModel
backend.

A worker process imports one release (unpacked wheels under torch CPU, stand-ins for what needs a GPU: tests/oracle) and
answers requests, each in a forked child, so that what a recipe does to the process is gone with it. Workers start when
they are first asked and end with `Upstream.close()`.

Usage: a library; `python evals/upstream.py serve KIND VERSION...` is what it runs for itself.
    kinds: bridge BRIDGE MCORE | core MCORE | lm MCORE | automodel AUTOMODEL

Requests and answers are one JSON object a line.
    bridge, core   {"workspace", "file", "function", "world_size", "te"}
                   -> {"verdict": "accepted" | "rejected" | "broken", "error", "impl", "modules", "settings"}
                   "settings" are flat ("model.cuda_graph_impl"), as the recipe leaves them; impl and modules are what
                   upstream's own validation makes of them (runtime_config_update, as training calls it;
                   TransformerConfig for core). "broken": the file does not run, or returns no configuration.
    lm             {"argv", "env", "te"} -> the answer of tests/oracle/megatron_lm_args.py
    automodel      {"backend": {...}} -> {"verdict", "error", "modules"}

Exit codes: 0 end of input; 2 usage; 3 a wheel or torch is missing.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS)]

import wheels  # noqa: E402
from oracle import bridge_recipes, megatron_lm_args, protocol, standins, transformer_config  # noqa: E402

ANSWER_LIMIT_S = 60
PINNED_MCORE = {"0.3.1": "0.16.1", "0.4.2": "0.17.1", "0.5.1": "0.18.2", "0.6.2": "0.19.2"}


class UpstreamUnavailable(RuntimeError):
    """A release cannot be had, or its worker broke; the text says what to do."""


class Upstream:
    """The client. Safe for use from several threads."""

    def __init__(self):
        self._workers: dict[tuple[str, ...], tuple[subprocess.Popen, threading.Lock]] = {}
        self._lock = threading.Lock()

    def recipe(self, versions: dict, workspace: Path, file: str, function: str, world_size: int = 8) -> dict:
        """What the release makes of the configuration that a function of a workspace file returns.

        versions: {"bridge", "mcore", "te"}; without bridge the function returns a TransformerConfig.
        """
        key = (
            ("bridge", versions["bridge"], versions["mcore"]) if versions.get("bridge") else ("core", versions["mcore"])
        )
        request = {"workspace": str(workspace), "file": file, "function": function, "world_size": world_size}
        return self._ask(key, {**request, "te": versions.get("te", transformer_config.DEFAULT_TE)})

    def command_line(self, versions: dict, argv: list[str], env: dict[str, str]) -> dict:
        """What Megatron-LM's parser, validate_args and TransformerConfig make of an argument list."""
        te = versions.get("te", transformer_config.DEFAULT_TE)
        return self._ask(("lm", versions["mcore"]), {"argv": argv, "env": env, "te": te})

    def automodel(self, versions: dict, backend: dict) -> dict:
        """What AutoModel's BackendConfig makes of the `backend` mapping of a YAML file."""
        return self._ask(("automodel", versions["automodel"]), {"backend": backend})

    def close(self) -> None:
        for process, _ in self._workers.values():
            process.stdin.close()
            process.wait(timeout=30)
        self._workers.clear()

    def __enter__(self) -> Upstream:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _ask(self, key: tuple[str, ...], request: dict) -> dict:
        with self._lock:
            if key not in self._workers:
                command = [sys.executable, __file__, "serve", *key]
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                self._workers[key] = (process, threading.Lock())
            process, lock = self._workers[key]
        with lock:
            try:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = ""
        if not line:
            raise UpstreamUnavailable(
                f"the worker for {' '.join(key)} ended (its reason is on stderr); "
                "`python tests/wheels.py` fetches the wheels"
            )
        return json.loads(line)


# -- the worker --------------------------------------------------------------------------------------------------------


def serve(kind: str, versions: list[str]) -> None:
    answer = WORKERS[kind](*versions)
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)  # what recipes print must not mix with the answers
    for line in sys.stdin:
        answers.write(json.dumps(_in_child(answer, json.loads(line))) + "\n")
        answers.flush()


def _in_child(answer, request: dict) -> dict:
    """The answer, computed in a forked child that is killed at the limit."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            import signal

            signal.alarm(ANSWER_LIMIT_S)
            sys.dont_write_bytecode = True
            try:
                result = answer(request)
            except BaseException as error:  # the recipe's own faults too: SystemExit, RecursionError
                result = {"verdict": "broken", "error": protocol.error_of(error)}
            with os.fdopen(writer, "w") as stream:
                json.dump(result, stream, default=str)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    if not text:
        return {
            "verdict": "broken",
            "error": {"type": "Timeout", "text": f"no answer within {ANSWER_LIMIT_S} s", "in": ""},
        }
    return json.loads(text)


def _run_function(request: dict):
    folder = Path(request["workspace"], request["file"]).parent
    sys.path.insert(0, str(folder))
    os.chdir(folder)
    spec = importlib.util.spec_from_file_location("recipe_under_test", Path(request["workspace"], request["file"]))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, request["function"])()


def flat(config) -> dict[str, object]:
    """Every setting of a ConfigContainer or TransformerConfig, flat, in JSON values."""
    settings = {}
    if not hasattr(config, "model"):
        return {f"model.{name}": bridge_recipes.jsonable(value) for name, value in vars(config).items()}
    for section in vars(config):
        value = getattr(config, section)
        if isinstance(value, dict) or dataclasses.is_dataclass(value):
            items = value if isinstance(value, dict) else vars(value)
            settings.update({f"{section}.{name}": bridge_recipes.jsonable(item) for name, item in items.items()})
        else:
            settings[section] = bridge_recipes.jsonable(value)
    return settings


def _graphs(model) -> dict:
    # a name that the version does not have can be set on the object all the same, and means nothing
    names = {field.name for field in dataclasses.fields(model)}
    modules = model.cuda_graph_modules if "cuda_graph_modules" in names else model.cuda_graph_scope
    modules = [modules] if isinstance(modules, str) else modules or []
    if "cuda_graph_impl" in names:
        impl = model.cuda_graph_impl
    else:  # 0.13 and 0.14
        impl = "local" if model.enable_cuda_graph else "transformer_engine" if model.external_cuda_graph else "none"
    return {"impl": impl, "modules": [getattr(item, "name", item) for item in modules]}


def bridge_worker(bridge: str, mcore: str):
    standins.complete_environment()
    sys.path[:0] = [str(wheels.fetch("megatron-bridge", bridge)), str(wheels.fetch("megatron-core", mcore))]
    standins.install([*bridge_recipes.STANDIN_ROOTS, "six", "regex", "requests"], bridge_recipes.STANDIN_ATTRIBUTES)
    _silence()
    from megatron.bridge.models.gpt_provider import GPTModelProvider  # noqa: F401  imported once, for every child
    from megatron.bridge.training import config as training
    from megatron.core import utils

    _te_kernels()

    def answer(request: dict) -> dict:
        os.environ.update(WORLD_SIZE=str(request["world_size"]), RANK="0", LOCAL_RANK="0")
        utils._te_version = utils.PkgVersion(request["te"]) if request["te"] else None
        config = _run_function(request)
        result = {"verdict": "accepted", "error": None, "settings": flat(config)}
        try:
            training.runtime_config_update(config)
        except Exception as error:
            return {**result, "verdict": "rejected", "error": protocol.error_of(error)}
        return {**result, **_graphs(config.model)}

    return answer


def core_worker(mcore: str):
    oracle = transformer_config.Oracle(mcore)
    _te_kernels()

    def answer(request: dict) -> dict:
        oracle.set_te(request["te"])
        try:
            config = _run_function(request)
        except (AssertionError, ValueError, KeyError, TypeError) as error:
            return {"verdict": "rejected", "error": protocol.error_of(error), "settings": {}}
        return {"verdict": "accepted", "error": None, "settings": flat(config), **_graphs(config)}

    return answer


def lm_worker(mcore: str):
    oracle = megatron_lm_args.Oracle(transformer_config.full_version(mcore))
    _te_kernels()
    return oracle.answer


def automodel_worker(version: str):
    standins.complete_environment()
    sys.path[:0] = [str(wheels.fetch("nemo-automodel", version))]
    standins.install([*bridge_recipes.STANDIN_ROOTS, "peft", "torchao", "torchdata"], bridge_recipes.STANDIN_ATTRIBUTES)
    _silence()
    backend_config = importlib.import_module("nemo_automodel.components.models.common.utils").BackendConfig

    def answer(request: dict) -> dict:
        try:
            backend = backend_config(**request["backend"])
        except (TypeError, ValueError) as error:
            return {"verdict": "rejected", "error": protocol.error_of(error), "modules": []}
        return {"verdict": "accepted", "error": None, "modules": list(backend.cuda_graph.modules)}

    return answer


def _te_kernels() -> None:
    """Upstream checks that some fused kernels of Transformer Engine are there; in the containers of the cases they are."""
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    for name in [name for name, value in vars(moe_utils).items() if name.startswith("fused_") and value is None]:
        setattr(moe_utils, name, standins.make_class(name))


def _silence() -> None:
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)


WORKERS = {"bridge": bridge_worker, "core": core_worker, "lm": lm_worker, "automodel": automodel_worker}


def main(argv: list[str]) -> int:
    if len(argv) < 2 or argv[0] != "serve" or argv[1] not in WORKERS:
        print("usage: upstream.py serve bridge|core|lm|automodel VERSION...", file=sys.stderr)
        return 2
    try:
        serve(argv[1], argv[2:])
    except (wheels.WheelUnavailable, ModuleNotFoundError, KeyError) as error:
        print(f"error: {' '.join(argv[1:])}: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
