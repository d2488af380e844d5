#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run the recipe functions of a Megatron Bridge release for real, and print the graph settings that come out.

Every function whose name ends in `_config`, in every file under recipes/, perf_recipes/ and diffusion/recipes/, is
imported from the unpacked wheel and called with its default arguments under torch CPU. megatron-core is the real one.
These are stood in for, because they cannot be had without a GPU or a download:
  - packages such as transformers, transformer_engine and triton (see standins.py);
  - `AutoBridge.from_hf_pretrained(ID)` and `from_hf_config(...)`: instead of reading a checkpoint's configuration,
    `to_megatron_provider()` gives an object of the provider class that Bridge registers for that model family, whose
    attributes hold the class's defaults until the recipe sets them;
  - `FluxBridge().provider_bridge(...)`, which reads a diffusers checkpoint, in the same way.

Usage:
    python tests/oracle/bridge_recipes.py                       all functions of the pinned wheel
    python tests/oracle/bridge_recipes.py --only recipes/llama/h100/llama3.py       one file (repeatable)
    python tests/oracle/bridge_recipes.py --source DIR          an edited copy of the tree; DIR holds megatron/bridge
    python tests/oracle/bridge_recipes.py --function 'llama3*'  functions by glob (repeatable)
    python tests/oracle/bridge_recipes.py --validate            also run Bridge's own validation on what comes out
    python tests/oracle/bridge_recipes.py --summary             counts and error kinds only

Output: one JSON object a line and function, in order of file and line:
    {"file": path under megatron/bridge, "line": of the def, "function": name, "status": "ok" | "error",
     "error": null or "Type: text",
     "returned": class name of what came back,
     "from_checkpoint": true where the model came from the AutoBridge stand-in,
     "set_by_recipe": with from_checkpoint, the model attributes that the recipe assigned; all others are class defaults
                      here and would come from the checkpoint in a real run,
     "settings": {"model.cuda_graph_impl": ..., "rng.te_rng_tracker": ..., "env_vars.NAME": ..., ...}}
Settings are flat; a section that the recipe leaves None has the section's own key with null. Enum members are
{"enum": "CudaGraphModule.attn"}, torch dtypes {"dtype": "bfloat16"}, other objects {"object": class name}.
With --validate, "validation" is {"verdict", "error", "normalized"} as in bridge_config.py: what Bridge's own
`runtime_config_update` says to the configuration, with what the recipe leaves open made up (recipe_validation.py; among
it num_moe_experts of MoE checkpoints); "baseline_rejected" means that it is refused with its graphs off too.
A file that cannot be imported gives one error line for each of its functions ("function": null where it cannot even
be parsed). The last line of stderr says how many functions ran.

Exit codes: 0 ran (errors are in the lines); 2 usage, or DIR is no Bridge tree; 3 a needed wheel or torch is missing.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import fnmatch
import importlib
import json
import logging
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import wheels
from oracle import recipe_validation, standins

BRIDGE = "0.6.2"
MCORE = "0.19.2"
FOLDERS = ("recipes", "perf_recipes", "diffusion/recipes")

STANDIN_ROOTS = (
    "accelerate apex datasets diffusers einops flash_attn google huggingface_hub hydra librosa megatron.energon mlflow "
    "modelopt nemo_run nvidia_resiliency_ext omegaconf PIL pyarrow regex rich safetensors six soundfile tensorboard "
    "toml torchvision tqdm transformer_engine transformer_engine_torch transformers triton wandb webdataset yaml"
).split()
# Versions that megatron-core 0.19 and Bridge 0.6 accept.
STANDIN_ATTRIBUTES = {
    "nvidia_resiliency_ext": {"__version__": "0.6.0"},
    "tensorboard": {"__version__": "2.19.0"},
    "transformer_engine": {"__version__": "2.14.0"},
    "transformer_engine.pytorch.optimizers": {"FusedAdam": recipe_validation.FusedAdam},
    "transformers": {"__version__": "5.3.0"},
    "triton": {"__version__": "3.6.0"},
}

# Checkpoint id -> provider class that Bridge registers for the model family (`register_bridge(provider=...)` in
# megatron/bridge/models/*/..._bridge.py); the first pattern that is found in the lower-case id counts.
PROVIDERS = (
    (r"deepseek-|moonlight|kimi-k2-|glm-5", "MLAModelProvider"),
    (r"kimi-k2\.5", "KimiK25VLModelProvider"),
    (r"gemma-2-", "Gemma2ModelProvider"),
    (r"gemma-3-1b", "Gemma3ModelProvider"),
    (r"gemma-3-", "Gemma3VLModelProvider"),
    (r"gemma-4-", "Gemma4VLModelProvider"),
    (r"glm-4\.5v", "GLM45VModelProvider"),
    (r"exaone-4\.5", "Exaone45ModelProvider"),
    (r"k-exaone", "ExaoneMoeModelProvider"),
    (r"minimax-m3", "MiniMaxM3VLModelProvider"),
    (r"ministral-3", "Ministral3ModelProvider"),
    (r"nemotron-3-nano-omni", "NemotronOmniModelProvider"),
    (r"nemotron-nano-12b-v2-vl", "NemotronVLModelProvider"),
    (r"nemotron-(3|h|nano)", "HybridModelProvider"),
    (r"qwen2\.5-vl", "Qwen25VLModelProvider"),
    (r"qwen2-audio", "Qwen2AudioModelProvider"),
    (r"qwen3-omni", "Qwen3OmniModelProvider"),
    (r"qwen3-vl-.*-a\d+b", "Qwen3VLMoEModelProvider"),
    (r"qwen3-vl", "Qwen3VLModelProvider"),
    (r"qwen3\.[56]-.*-a\d+b", "Qwen35VLMoEModelProvider"),
    (r"qwen3\.[56]", "Qwen35VLModelProvider"),
    (r"step-3\.5", "Step35ModelProvider"),
    (r"step-3\.7", "Step37ModelProvider"),
)
DEFAULT_PROVIDER = "GPTModelProvider"
# Sizes that every checkpoint states, and that recipes compute with. The values are arbitrary.
CHECKPOINT_SIZES = {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 151936}
# Which attributes of which section of ConfigContainer are printed: full-match patterns over attribute names.
SECTIONS = {
    "model": (
        r".*cuda_graph.*|use_te_rng_tracker|num_moe_experts|moe_(layer_freq|token_dispatcher_type|layer_recompute|"
        r"flex_dispatcher_backend|expert_capacity_factor|pad_expert_input_to_capacity|router_padding_for_\w+|"
        r"input_jitter_eps|shared_expert_\w+|a2a_overlap|router_enable_expert_bias)|recompute_\w+|"
        r"distribute_saved_activations|cpu_offloading\w*|fine_grained_activation_offloading|offload_modules|"
        r"attention_dropout|hidden_dropout|\w+_parallel_size|\w+_parallel_layout|sequence_parallel|overlap_\w+|"
        r"delay_wgrad_compute|delay_offload\w*|transformer_impl|cross_entropy_\w+|gradient_accumulation_fusion|"
        r"add_bias_linear|add_qkv_bias|experimental_attention_variant|fp8\w*|fp4\w*|bf16|fp16|hybrid_\w+|"
        r"mtp_num_layers|multi_latent_attention|seq_length|num_layers|gtp_weight_remat_size|batch_p2p_comm|"
        r"tp_comm_overlap\w*|is_hybrid_model|freeze_\w+|calculate_per_token_loss"
    ),
    "rng": r".*",
    "rerun_state_machine": r"check_for_\w+",
    "ddp": (
        r"check_for_\w+|overlap_\w+|use_\w+|\w*sharding_strategy|average_in_collective|\w*fp8\w*|reuse_\w+|\w*fsdp\w*"
    ),
    "optimizer": r"optimizer|.*cuda_graph.*|use_\w+|overlap_\w+|\w*offload\w*|reuse_\w+|fp8_recipe|capturable",
    "comm_overlap": r"tp_comm_overlap\w*|overlap_\w+|batch_p2p_comm|delay_\w+|defer_\w+|align_\w+|bucket_size",
    "mixed_precision": r".*",
    "dataset": r".*pack.*|dataloader_type|seq_length|pad_\w+|dataset_kwargs",
    "train": r"micro_batch_size|global_batch_size|rampup_batch_size|empty_unused_memory_level|train_iters",
    "dist": r"use_\w+|\w*cuda\w*|external_gpu_device_mapping|enable_megatron_core_experimental",
    "env_vars": r".*",
}


def config_functions(path: Path) -> list[tuple[str, int]]:
    """Name and line of every function definition in the file whose name ends in `_config`.

    Raises:
        SyntaxError: the file does not parse.
    """
    tree = ast.parse(path.read_bytes(), filename=str(path))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(tree) if isinstance(node, kinds) and node.name.endswith("_config")]
    return sorted(((node.name, node.lineno) for node in found), key=lambda item: item[1])


def import_bridge(source: Path, mcore: str) -> None:
    """Make `megatron.bridge` (below `source`) and `megatron.core` importable, with stand-ins for all the rest."""
    standins.complete_environment()
    sys.path[:0] = [str(source), str(wheels.fetch("megatron-core", mcore))]
    standins.install(STANDIN_ROOTS, STANDIN_ATTRIBUTES)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    importlib.import_module("megatron.bridge.recipes.common")


def replace_checkpoints(experts: int | None = None) -> None:
    """Let providers come from their class defaults instead of a checkpoint's configuration.

    Args:
        experts: num_moe_experts of providers of MoE checkpoints; None leaves the class default, which is none.
    """
    from megatron.bridge.diffusion.conversion.flux.flux_bridge import FluxBridge
    from megatron.bridge.models.conversion.auto_bridge import AutoBridge

    AutoBridge.from_hf_pretrained = classmethod(lambda cls, path, **kwargs: CheckpointStandin(str(path), experts))
    AutoBridge.from_hf_config = classmethod(lambda cls, config, **kwargs: CheckpointStandin("", experts))
    FluxBridge.provider_bridge = lambda self, hf: _tracked(provider_class("FluxProvider"), CHECKPOINT_SIZES)


class CheckpointStandin:
    """What `AutoBridge.from_hf_pretrained` returns: a bridge whose provider knows its class's defaults only."""

    def __init__(self, checkpoint: str, experts: int | None):
        self.checkpoint = checkpoint.lower()
        self.experts = experts

    def to_megatron_provider(self, load_weights: bool = True, hf_path: str | None = None):
        families = (provider for pattern, provider in PROVIDERS if re.search(pattern, self.checkpoint))
        sizes = dict(CHECKPOINT_SIZES)
        if self.experts is not None and re.search(recipe_validation.MOE_CHECKPOINTS, self.checkpoint):
            sizes["num_moe_experts"] = self.experts
        return _tracked(provider_class(next(families, DEFAULT_PROVIDER)), sizes)


def provider_class(name: str) -> type:
    """The model provider class of that name, wherever Bridge defines it.

    Raises:
        LookupError: there is none.
    """
    from megatron.bridge.models.model_provider import ModelProviderMixin

    waiting = [ModelProviderMixin]
    while waiting:
        cls = waiting.pop()
        if cls.__name__ == name:
            return cls
        waiting += cls.__subclasses__()
    raise LookupError(f"Bridge has no provider class {name}")


def _tracked(base: type, sizes: dict[str, int]):
    """An object of the class, with the sizes that it knows, that notes which attributes are assigned later."""

    class FromCheckpoint(base):
        def __setattr__(self, name, value):
            if "assigned_by_recipe" in self.__dict__:
                self.__dict__["assigned_by_recipe"].add(name)
            super().__setattr__(name, value)

    FromCheckpoint.__name__ = base.__name__
    names = {field.name for field in dataclasses.fields(base)}
    provider = FromCheckpoint(**{name: size for name, size in sizes.items() if name in names})
    provider.__dict__["assigned_by_recipe"] = set()
    return provider


def jsonable(value):
    if value is None or isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum):
        return value
    if isinstance(value, enum.Enum):
        return {"enum": f"{type(value).__name__}.{value.name}"}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((jsonable(item) for item in value), key=str)
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if type(value).__name__ == "dtype":
        return {"dtype": str(value).removeprefix("torch.")}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name, None)) for field in dataclasses.fields(value)}
    return {"object": getattr(value, "__name__", None) or type(value).__name__}


def graph_settings(config) -> dict[str, object]:
    """The settings of one ConfigContainer that matter to CUDA graphs, flat."""
    settings = {}
    for section, pattern in SECTIONS.items():
        value = getattr(config, section, None)
        if value is None or isinstance(value, str):
            settings[section] = value
            continue
        attributes = value if isinstance(value, dict) else vars(value)
        for name in sorted(attributes):
            if name != "assigned_by_recipe" and re.fullmatch(pattern, name):
                settings[f"{section}.{name}"] = jsonable(attributes[name])
        if section in ("model", "dataset"):
            settings[f"{section}.__class__"] = type(value).__name__
    settings["mixed_precision.name"] = _precision_name(getattr(config, "mixed_precision", None))
    return settings


def _precision_name(value) -> str | None:
    """The registered name of a mixed precision configuration; None where it equals none of the registered ones."""
    from megatron.bridge.training.mixed_precision import MIXED_PRECISION_RECIPES

    if isinstance(value, str):
        return value
    return next((name for name, factory in MIXED_PRECISION_RECIPES.items() if value == factory()), None)


def run_file(source: Path, path: Path, patterns: Sequence[str], validate: bool = False) -> Iterator[dict]:
    """The answers of one file's functions whose names match a pattern, in the format of the module's docstring."""
    name = path.relative_to(source / "megatron" / "bridge").as_posix()
    try:
        functions = config_functions(path)
    except (SyntaxError, ValueError) as error:
        yield _failed(name, None, None, error)
        return
    functions = [item for item in functions if any(fnmatch.fnmatch(item[0], pattern) for pattern in patterns)]
    if not functions:
        return
    dotted = path.relative_to(source).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    try:
        module = importlib.import_module(dotted)
    except Exception as error:
        yield from (_failed(name, line, function, error) for function, line in functions)
        return
    for function, line in functions:
        if validate:
            recipe_validation.pretend_gpu(function)
        try:
            config = getattr(module, function)()
            model = getattr(config, "model", None)
            assigned = getattr(model, "__dict__", {}).get("assigned_by_recipe")
            answer = {
                "file": name,
                "line": line,
                "function": function,
                "status": "ok",
                "error": None,
                "returned": type(config).__name__,
                "from_checkpoint": assigned is not None,
                "set_by_recipe": sorted(assigned) if assigned is not None else None,
                "settings": graph_settings(config),
            }
        except Exception as error:
            yield _failed(name, line, function, error)
            continue
        if validate and hasattr(model, "cuda_graph_impl"):
            answer["validation"] = recipe_validation.validate(getattr(module, function), function)
        yield answer


def _failed(file: str, line: int | None, function: str | None, error: Exception) -> dict:
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return {"file": file, "line": line, "function": function, "status": "error", "error": text}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="folder that holds megatron/bridge; default: the pinned wheel")
    parser.add_argument("--only", action="append", default=[], metavar="FILE", help="path under megatron/bridge")
    parser.add_argument("--function", action="append", default=[], metavar="GLOB")
    parser.add_argument("--validate", action="store_true", help="also run Bridge's own validation")
    parser.add_argument("--summary", action="store_true", help="print counts and kinds of errors, no settings")
    args = parser.parse_args(argv)
    try:
        source = (args.source or wheels.fetch("megatron-bridge", BRIDGE)).resolve()
        package = source / "megatron" / "bridge"
        if not (package / "__init__.py").is_file():
            print(f"error: {source} does not hold megatron/bridge", file=sys.stderr)
            return 2
        files = [package / name for name in args.only] or sorted(
            path for folder in FOLDERS for path in (package / folder).rglob("*.py")
        )
        missing = [str(path) for path in files if not path.is_file()]
        if missing:
            print(f"error: no such file: {', '.join(missing)}", file=sys.stderr)
            return 2
        # A bytecode file is trusted by size and whole second, which is too coarse for a tree that is being edited.
        sys.dont_write_bytecode = args.source is not None
        answers, sys.stdout = sys.stdout, sys.stderr  # what recipes print must not mix with the answers
        import_bridge(source, MCORE)
        replace_checkpoints(recipe_validation.CHECKPOINT_EXPERTS if args.validate else None)
    except (wheels.WheelUnavailable, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    ran, errors, verdicts = 0, Counter(), Counter()
    for path in files:
        for answer in run_file(source, path, args.function or ["*"], args.validate):
            if "validation" in answer:
                verdicts[answer["validation"]["verdict"]] += 1
            ran += answer["status"] == "ok"
            if answer["status"] == "error":
                errors[answer["error"]] += 1
            if not args.summary:
                print(json.dumps(answer), file=answers)
    total = ran + sum(errors.values())
    if args.summary:
        for error, count in errors.most_common():
            print(f"{count:5d} {error}", file=answers)
        for verdict, count in sorted(verdicts.items()):
            print(f"{count:5d} validation: {verdict}", file=answers)
        print(f"{len(files)} files, {total} functions, {ran} executed, {total - ran} not", file=answers)
    print(f"{ran} of {total} functions executed", file=sys.stderr)
    sys.stdout = answers
    return 0


if __name__ == "__main__":
    sys.exit(main())
