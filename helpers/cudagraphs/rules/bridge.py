# SPDX-License-Identifier: Apache-2.0
"""CG5xx: what Megatron Bridge checks and changes around TransformerConfig."""

from __future__ import annotations

from typing import Any

from cudagraphs.rules import mends
from cudagraphs.rules.base import BRIDGE, Example, Facts, Member, Rule
from cudagraphs.versions import Versions

CONFIG = "megatron/bridge/training/config.py ConfigContainer.validate"
GRAPHS = "megatron/bridge/utils/cuda_graph.py validate_cuda_graph_configuration"
OVERLAP = "megatron/bridge/training/comm_overlap.py CommOverlapConfig._get_model_comm_overlap_cfgs"
TRACKED = {"use_te_rng_tracker": True}
TE = {"cuda_graph_impl": "transformer_engine", **TRACKED}
FULL = {"cuda_graph_impl": "full_iteration", **TRACKED, "rerun_state_machine.check_for_nan_in_loss": False}
NEW = {"bridge": "0.6.2", "mcore": "0.19.2", "te": "2.14"}
PACKED = {"dataset.packed_sequences": True, "dataset.enable_offline_packing": True}


def named(value: Any) -> tuple[str, ...]:
    """The scopes in a raw field, as Bridge's helper reads them: "full" and nothing are no names."""
    if value is None or value == "" or value == "full":
        return ()
    items = value.split(",") if isinstance(value, str) and not isinstance(value, Member) else value
    return tuple(str(item) for item in items) if isinstance(items, (list, tuple)) else (str(items),)


def raw_scopes(f: Facts, v: Versions) -> tuple[str, ...]:
    """Every scope named in either field before any migration."""
    return (*(named(f["cuda_graph_modules"]) if v.minor >= 18 else ()), *named(f["cuda_graph_scope"]))


def raw_full_iteration(f: Facts, v: Versions) -> bool:
    impl = f["cuda_graph_impl"]
    return impl == "full_iteration" or (impl == "local" and "full_iteration" in raw_scopes(f, v))


def _local(f: Facts, v: Versions) -> bool:
    if f["cuda_graph_impl"] != "local" or raw_full_iteration(f, v):
        return False
    scopes = [name for name in raw_scopes(f, v) if name not in ("full", "full_iteration", "full_iteration_inference")]
    return bool(scopes) or f["inference_cuda_graph_scope"] not in ("layer", "block")


def _local_fix(f: Facts, v: Versions) -> dict[str, Any]:
    overrides: dict[str, Any] = {"cuda_graph_impl": "transformer_engine"}
    if v.minor >= 18 and mends.known(f, "inference_cuda_graph_scope") is not None:
        overrides["inference_cuda_graph_scope"] = None
    return overrides


def delayed_wgrad_captured(f: Facts) -> bool:
    """Whether a delayed weight gradient is captured: of attention, or of shared experts beside the router."""
    modules = f["graph.modules"]
    if "attn" in modules:
        return True
    return "moe_router" in modules and (
        f["moe_shared_expert_intermediate_size"] is not None and not f["moe_shared_expert_overlap"]
    )


def _delayed(f: Facts) -> bool:
    # only what CommOverlapConfig asks for is checked
    return f["comm_overlap.delay_wgrad_compute"] is True and f["graph.active"] and delayed_wgrad_captured(f)


def _checked(f: Facts, v: Versions) -> bool:
    """Whether Bridge's check sees the scope: 0.4 compares with members of the enum, and a string is none."""
    if v.bridge is None or v.bridge >= (0, 5):
        return True
    scope = f["cuda_graph_scope"]
    return any(isinstance(item, Member) for item in (scope if isinstance(scope, list) else [scope]))


def _unchecked_wgrad(f: Facts, v: Versions) -> bool:
    if not _delayed(f) or _checked(f, v):
        return False
    if not v.at_least("te", 2, 12) or not f["gradient_accumulation_fusion"]:
        return True
    return "attn" in f["graph.modules"] and bool(f["add_bias_linear"] or f["add_qkv_bias"])


def asserts_tracker(f: Facts) -> bool:
    """Whether the provider asserts the tracker: GPT's does, those of vision-language and hybrid models do not."""
    names = "".join(str(mends.known(f, name, "")) for name in ("model.provider", "model.hf_id")).lower()
    return not any(part in names for part in ("vl", "hybrid", "mamba", "nemotronh", "nemotron-h", "nemotron-3", "t5"))


def _packing_graph(f: Facts, v: Versions) -> bool:
    graphs = f["cuda_graph_impl"] == "transformer_engine" or raw_full_iteration(f, v)
    return graphs and bool(f["dataset.packed_sequences"]) and bool(f["dataset.enable_offline_packing"])


def _packed_attention(f: Facts, v: Versions) -> bool:
    if not _packing_graph(f, v):
        return False
    if raw_full_iteration(f, v):
        return True
    scopes = [name for name in raw_scopes(f, v) if not name.startswith("full")]
    return not scopes or "attn" in scopes


DELAYED = {
    **TE,
    "cuda_graph_modules": ["attn", "moe_router"],
    "num_moe_experts": 8,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "overlap_moe_expert_parallel_comm": True,
    "delay_wgrad_compute": True,
    "comm_overlap.delay_wgrad_compute": True,
    "gradient_accumulation_fusion": True,
    "add_bias_linear": False,
}

RULES = (
    Rule(
        code="CG501",
        title="NaN check of the loss inside a full-iteration graph",
        layer="bridge",
        severity="error",
        frameworks=(BRIDGE,),
        when=lambda f, v: f["graph.full_iteration"] and bool(f["rerun_state_machine.check_for_nan_in_loss"]),
        message="full-iteration capture with rerun_state_machine.check_for_nan_in_loss="
        "{rerun_state_machine.check_for_nan_in_loss}",
        mend="set rerun_state_machine.check_for_nan_in_loss=False (its default is True)",
        fix=lambda f, v: {"rerun_state_machine.check_for_nan_in_loss": False},
        why="The check reads the loss on the host in the middle of the iteration, and a copy to the host cannot be "
        "captured.",
        source=f"{CONFIG} (0.3+)",
        upstream=("check_for_nan_in_loss must be disabled when using full_iteration CUDA graph.",),
        bad=(Example({"cuda_graph_impl": "full_iteration", **TRACKED}, NEW),),
        good=(Example(FULL, NEW),),
    ),
    Rule(
        code="CG502",
        title="Graphs without Transformer Engine's random number tracker",
        layer="bridge",
        severity="error",
        frameworks=(BRIDGE,),
        when=lambda f, v: (
            f["graph.active"] and asserts_tracker(f) and not f["use_te_rng_tracker"] and not f["rng.te_rng_tracker"]
        ),
        message="graphs are on, and neither model.use_te_rng_tracker nor rng.te_rng_tracker is set",
        mend="set model.use_te_rng_tracker=True and rng.te_rng_tracker=True; one suffices where "
        "ConfigContainer.validate runs, "
        "which copies it to the other",
        fix=lambda f, v: {"use_te_rng_tracker": True, "rng.te_rng_tracker": True},
        why="The plain tracker keeps its generator state on the host; a captured kernel would draw the same numbers "
        "in every "
        "replay. Bridge makes the plain tracker safe for graphs when it seeds it, and GPT's provider asserts all the "
        "same.",
        source=f"megatron/bridge/models/gpt_provider.py GPTModelProvider.provide; {CONFIG} (0.3+)",
        upstream=("Transformer engine's RNG tracker is required for cudagraphs",),
        bad=(Example({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]}, NEW),),
        good=(
            Example({**TE, "cuda_graph_modules": ["attn"]}, NEW),
            Example(
                {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"], "rng.te_rng_tracker": True},
                NEW,
            ),
        ),
    ),
    Rule(
        code="CG503",
        title="Local implementation for anything but the whole iteration",
        layer="bridge",
        severity="error",
        frameworks=(BRIDGE,),
        bridge=((0, 6), None),
        when=_local,
        message="Bridge takes the local implementation only for full-iteration capture; the scopes are {graph.modules}",
        mend='use cuda_graph_impl="transformer_engine" for scopes such as attn; local only with the scope '
        "full_iteration, or "
        "without scopes and with inference_cuda_graph_scope set to layer or block",
        fix=_local_fix,
        why="Bridge's training loop creates and deletes Transformer Engine's graphs and full-iteration graphs; it has "
        "no place "
        "where the local implementation's graphs of layers are managed.",
        source=f"{GRAPHS} (0.6+)",
        upstream=(
            'Megatron Bridge supports model.cuda_graph_impl="local" only for full-iteration CUDA graphs',
            "only for full-iteration CUDA graphs",
        ),
        bad=(
            Example({**TRACKED, "cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]}, NEW),
            Example({**TRACKED, "cuda_graph_impl": "local"}, NEW),
        ),
        good=(
            Example({**TRACKED, "cuda_graph_impl": "local", "cuda_graph_modules": ["full_iteration"]}, NEW),
            Example({**TRACKED, "cuda_graph_impl": "local", "inference_cuda_graph_scope": "block"}, NEW),
            Example(
                {**TRACKED, "cuda_graph_impl": "local", "cuda_graph_scope": ["attn"]},
                {"bridge": "0.4.2", "mcore": "0.17.1"},
            ),
        ),
    ),
    Rule(
        code="CG504",
        title="Captured delayed weight gradient with an old Transformer Engine",
        layer="bridge",
        severity="error",
        frameworks=(BRIDGE,),
        bridge=((0, 4), None),
        when=lambda f, v: not v.at_least("te", 2, 12) and _delayed(f) and _checked(f, v),
        message="comm_overlap.delay_wgrad_compute with the scopes {graph.modules} needs Transformer Engine 2.12",
        mend="use Transformer Engine 2.12 or newer, or drop the scope (attn; moe_router with shared experts), or turn "
        "comm_overlap.delay_wgrad_compute off",
        fix=lambda f, v: {"comm_overlap.delay_wgrad_compute": False, "delay_wgrad_compute": False},
        why="The delayed weight gradient of a captured module runs from a graph of its own, which Transformer Engine "
        "has from "
        "2.12 on.",
        source=f"{OVERLAP} (0.4+)",
        upstream=("CUDA graph with delay_wgrad_compute requires TE version >= 2.12.0.",),
        bad=(Example(DELAYED, {**NEW, "te": "2.11"}),),
        good=(
            Example(DELAYED, {**NEW, "te": "2.12"}),
            Example({**DELAYED, "cuda_graph_modules": ["moe_router"]}, {**NEW, "te": "2.11"}),
        ),
    ),
    Rule(
        code="CG505",
        title="Captured delayed weight gradient without gradient accumulation fusion",
        layer="bridge",
        severity="error",
        frameworks=(BRIDGE,),
        bridge=((0, 4), None),
        when=lambda f, v: (
            v.at_least("te", 2, 12) and _delayed(f) and _checked(f, v) and not f["gradient_accumulation_fusion"]
        ),
        message="comm_overlap.delay_wgrad_compute with the scopes {graph.modules}, and gradient_accumulation_fusion "
        "is off",
        mend="set model.gradient_accumulation_fusion=True, or turn comm_overlap.delay_wgrad_compute off",
        fix=lambda f, v: {"gradient_accumulation_fusion": True},
        why="Without the fusion each step accumulates into freshly allocated gradients, and a graph keeps writing to "
        "the "
        "addresses that it saw at capture.",
        source=f"{OVERLAP} (0.4+)",
        upstream=("CUDA graph with delay_wgrad_compute requires gradient_accumulation_fusion",),
        bad=(Example({**DELAYED, "gradient_accumulation_fusion": False}, NEW),),
        good=(Example(DELAYED, NEW),),
    ),
    Rule(
        code="CG506",
        title="Captured delayed weight gradient of an attention with bias",
        layer="bridge",
        severity="error",
        frameworks=(BRIDGE,),
        bridge=((0, 4), None),
        when=lambda f, v: (
            v.at_least("te", 2, 12)
            and "attn" in f["graph.modules"]
            and _delayed(f)
            and _checked(f, v)
            and (bool(f["add_bias_linear"]) or bool(f["add_qkv_bias"]))
        ),
        message="comm_overlap.delay_wgrad_compute with a captured attention that has a bias",
        mend="turn comm_overlap.delay_wgrad_compute off, or drop attn from the scopes",
        fix=lambda f, v: {"comm_overlap.delay_wgrad_compute": False, "delay_wgrad_compute": False},
        why="The gradient of the bias is part of the delayed step and is not supported there yet.",
        source=f"{OVERLAP} (0.4+)",
        upstream=("CUDA graph with delay_wgrad_compute does not support attention bias for now.",),
        bad=(Example({**DELAYED, "add_qkv_bias": True}, NEW),),
        good=(Example(DELAYED, NEW),),
    ),
    Rule(
        code="CG507",
        title="Offline packing with graphs and without padding to one length",
        layer="bridge",
        severity="error",
        frameworks=(BRIDGE,),
        bridge=((0, 6), None),
        when=lambda f, v: _packing_graph(f, v) and f["dataset.pad_to_max_length"] is not True,
        message="the dataset packs sequences offline, and dataset.pad_to_max_length is {dataset.pad_to_max_length}",
        mend="set dataset.pad_to_max_length=True (and offline_packing_specs.pad_cu_seqlens=True where attention is "
        "captured)",
        fix=lambda f, v: {"dataset.pad_to_max_length": True},
        why="A graph replays one shape, and packed samples differ in length until they are padded to one.",
        source=f"{CONFIG} (0.6+)",
        upstream=("Offline packing with CUDA graphs requires dataset pad_to_max_length=True.",),
        bad=(Example({**TE, **PACKED, "cuda_graph_modules": ["mlp"]}, NEW),),
        good=(Example({**TE, **PACKED, "cuda_graph_modules": ["mlp"], "dataset.pad_to_max_length": True}, NEW),),
    ),
    Rule(
        code="CG508",
        title="Captured packed attention without padded sequence boundaries",
        layer="bridge",
        severity="error",
        frameworks=(BRIDGE,),
        bridge=((0, 6), None),
        when=lambda f, v: _packed_attention(f, v) and not f["dataset.offline_packing_specs.pad_cu_seqlens"],
        message="attention over packed sequences is captured, and offline_packing_specs.pad_cu_seqlens is "
        "{dataset.offline_packing_specs.pad_cu_seqlens}",
        mend="set dataset.pad_to_max_length=True and dataset.offline_packing_specs.pad_cu_seqlens=True, or drop attn "
        "from the "
        "scopes",
        fix=lambda f, v: {"dataset.pad_to_max_length": True, "dataset.offline_packing_specs.pad_cu_seqlens": True},
        why="Packed attention reads the boundaries between sequences from a tensor whose length is the number of "
        "sequences in "
        "the pack; a graph needs it padded to one length.",
        source=f"{CONFIG} (0.6+)",
        upstream=("Packed attention CUDA graphs require offline_packing_specs.pad_cu_seqlens=True.",),
        bad=(
            Example({**TE, **PACKED, "cuda_graph_modules": ["attn"], "dataset.pad_to_max_length": True}, NEW),
            Example({**FULL, **PACKED, "dataset.pad_to_max_length": True}, NEW),
        ),
        good=(Example({**TE, **PACKED, "cuda_graph_modules": ["mlp"], "dataset.pad_to_max_length": True}, NEW),),
    ),
    Rule(
        code="CG509",
        title="Legacy graph flags in Bridge",
        layer="bridge",
        severity="error",
        frameworks=(BRIDGE,),
        bridge=((0, 5), None),
        when=lambda f, v: bool(f["enable_cuda_graph"] or f["external_cuda_graph"]) and f["cuda_graph_impl"] == "none",
        message="enable_cuda_graph={enable_cuda_graph}, external_cuda_graph={external_cuda_graph}: the training path "
        "finalizes "
        "the model twice, and the second time rejects the flag beside the implementation that it set the first time",
        mend='set cuda_graph_impl="transformer_engine" (for external_cuda_graph) or "full_iteration", and leave both '
        "flags "
        "False",
        fix=lambda f, v: (
            {
                **{name: False for name in ("enable_cuda_graph", "external_cuda_graph") if f[name]},
                "cuda_graph_impl": "transformer_engine",
            }
            if not f["enable_cuda_graph"]
            else None
        ),
        why="ConfigContainer.validate finalizes the model, and the model provider does so again. Before that, Bridge "
        "0.6 clears "
        'the scopes because the implementation is still "none": external_cuda_graph with the scope attn would capture '
        "whole "
        "layers, and enable_cuda_graph would slip past the check on local graphs.",
        source="megatron/bridge/models/model_provider.py ModelProviderMixin.provide_distributed_model (0.5+); "
        + GRAPHS,
        upstream=("Do not use enable_cuda_graph or external_cuda_graph with cuda_graph_impl.",),
        bad=(Example({**TRACKED, "external_cuda_graph": True, "cuda_graph_scope": ["attn"]}, NEW),),
        good=(
            Example({**TE, "cuda_graph_modules": ["attn"]}, NEW),
            Example({**TRACKED, "external_cuda_graph": True}, {"bridge": "0.4.2", "mcore": "0.17.1"}),
        ),
    ),
    Rule(
        code="CG510",
        title="Scopes that are dropped because the implementation is none",
        layer="bridge",
        severity="warning",
        frameworks=(BRIDGE,),
        bridge=((0, 4), None),
        when=lambda f, v: (
            f["cuda_graph_impl"] == "none"
            and not f["enable_cuda_graph"]
            and not f["external_cuda_graph"]
            and bool(raw_scopes(f, v))
        ),
        message="scopes are named (scope {cuda_graph_scope}, modules {cuda_graph_modules}), and cuda_graph_impl is "
        "none: nothing "
        "is captured",
        mend='set cuda_graph_impl="transformer_engine", or remove the scopes',
        fix=mends.off,
        why="Bridge clears the scopes where the implementation is none, from 0.6 on before and after the "
        "configuration is "
        "finalized, so that a scope full_iteration does not turn graphs on as it does in megatron-core 0.18.",
        source=f"{CONFIG} (0.4, 0.5); {GRAPHS} (0.6+)",
        bad=(Example({"cuda_graph_modules": ["attn"]}, NEW),),
        good=(Example({"cuda_graph_scope": "full"}, NEW), Example({**TE, "cuda_graph_modules": ["attn"]}, NEW)),
    ),
    Rule(
        code="CG511",
        title="The implementation changed after the configuration was finalized",
        layer="bridge",
        severity="error",
        frameworks=(BRIDGE,),
        mcore=(18, None),
        when=lambda f, v: (
            f["history.impl_after_finalize"] is not None
            and "local" in (f["history.impl_after_finalize"], f["cuda_graph_impl"])
            and f["history.impl_after_finalize"] != f["cuda_graph_impl"]
        ),
        message="cuda_graph_impl was {history.impl_after_finalize} when the configuration was finalized, and is "
        "{cuda_graph_impl} now",
        mend="choose the implementation before the first finalize, or set inference_cuda_graph_scope=None beside the "
        "change",
        fix=lambda f, v: {"inference_cuda_graph_scope": None, "history.impl_after_finalize": None},
        why="Finalizing fills inference_cuda_graph_scope in (layer for local, none for the others), and the value "
        "that fits one "
        "implementation is refused by the other.",
        source="megatron/core/transformer/transformer_config.py TransformerConfig.__post_init__ (0.18+)",
        upstream=("Invalid inference CUDA graph scope",),
        bad=(Example({**TE, "cuda_graph_modules": ["attn"], "history.impl_after_finalize": "local"}, NEW),),
        good=(Example({**TE, "cuda_graph_modules": ["attn"]}, NEW),),
    ),
    Rule(
        code="CG512",
        title="A later assignment turns graphs off",
        layer="bridge",
        severity="error",
        frameworks=(BRIDGE,),
        when=lambda f, v: (
            f["graph.impl"] == "none"
            and any(value not in (None, "none") for value in f["history.cuda_graph_impl"][:-1])
        ),
        message="cuda_graph_impl is assigned {history.cuda_graph_impl} in this order: the last one wins, and nothing "
        "is captured",
        mend="remove the assignment to none if graphs are wanted, and count replays in a smoke run",
        fix=lambda f, v: {
            "cuda_graph_impl": [value for value in f["history.cuda_graph_impl"][:-1] if value not in (None, "none")][-1]
        },
        safe=False,
        why="Hooks and helpers that run after a recipe can set the implementation back, and nothing says so: recipes "
        "have shipped with graphs off for that reason.",
        source="Megatron-Bridge PR 6129",
        bad=(Example({"cuda_graph_impl": "none", "history.cuda_graph_impl": ["transformer_engine", "none"]}, NEW),),
        good=(
            Example({**TE, "history.cuda_graph_impl": ["none", "transformer_engine"]}, NEW),
            Example({"cuda_graph_impl": "none"}, NEW),
        ),
    ),
    Rule(
        code="CG513",
        title="Energon packing with graphs",
        layer="bridge",
        severity="error",
        frameworks=(BRIDGE,),
        bridge=((0, 7), None),
        when=lambda f, v: (
            f["dataset.packing_buffer_size"] is not None
            and (f["graph.active"] or f["model.vision_cuda_graph_impl"] not in (None, "none"))
        ),
        message="the Energon dataset packs samples while loading (packing_buffer_size={dataset.packing_buffer_size}), "
        "and graphs "
        "are on",
        mend="unset dataset.packing_buffer_size, or turn graphs (and vision_cuda_graph_impl) off",
        fix=lambda f, v: {
            **(mends.off(f, v) if f["graph.active"] else {}),
            **(
                {"model.vision_cuda_graph_impl": "none"}
                if f["model.vision_cuda_graph_impl"] not in (None, "none")
                else {}
            ),
        },
        why="Packs made at load time hold as many sequences, and as many tokens, as happen to fit.",
        source="megatron/bridge/training/config.py ConfigContainer.validate (0.7 development)",
        upstream=("Energon native sequence packing does not support CUDA graphs.",),
        bad=(
            Example(
                {**TE, "cuda_graph_modules": ["attn"], "dataset.packing_buffer_size": 64}, {**NEW, "bridge": "0.7.0"}
            ),
        ),
        good=(Example({**TE, "cuda_graph_modules": ["attn"]}, {**NEW, "bridge": "0.7.0"}),),
    ),
    Rule(
        code="CG514",
        title="Packed MoE batches with a captured router",
        layer="bridge",
        severity="runtime",
        frameworks=(BRIDGE,),
        bridge=((0, 7), None),
        when=lambda f, v: (
            f["graph.impl"] == "transformer_engine"
            and bool(f["dataset.packed_sequences"])
            and (f["graph.whole_layer"] or bool({"moe", "moe_router", "moe_preprocess"} & set(f["graph.modules"])))
            and bool(f["num_moe_experts"])
        ),
        message="the router is captured (scopes {graph.modules}), and packed MoE batches hand it a padding mask",
        mend="capture attention only where the version takes packed attention, or turn graphs off",
        fix=mends.off,
        why="The mask that keeps padding out of the expert statistics is an argument that a captured router does not "
        "take; the "
        "first step raises.",
        source="megatron/bridge/training/gpt_step.py _validate_packed_moe_cuda_graph (0.7 development)",
        upstream=("Packed MoE padding masks do not support router-scoped Transformer Engine CUDA graphs",),
        bad=(
            Example(
                {**TE, "num_moe_experts": 8, "cuda_graph_modules": ["moe_router"], "dataset.packed_sequences": True},
                {**NEW, "bridge": "0.7.0"},
            ),
        ),
        good=(Example({**TE, "num_moe_experts": 8, "cuda_graph_modules": ["moe_router"]}, {**NEW, "bridge": "0.7.0"}),),
    ),
    Rule(
        code="CG515",
        title="Megatron FSDP version 2 with graphs",
        layer="bridge",
        severity="error",
        frameworks=(BRIDGE,),
        bridge=((0, 7), None),
        when=lambda f, v: (
            bool(f["ddp.use_megatron_fsdp"])
            and f["ddp.megatron_fsdp_version"] == 2
            and (f["graph.active"] or bool(f["optimizer.optimizer_cuda_graph"]))
        ),
        message="Megatron FSDP version 2 takes neither model graphs nor optimizer graphs",
        mend="turn graphs (and optimizer.optimizer_cuda_graph) off, or use another kind of data parallelism",
        fix=lambda f, v: {
            **(mends.off(f, v) if f["graph.active"] else {}),
            **({"optimizer.optimizer_cuda_graph": False} if f["optimizer.optimizer_cuda_graph"] else {}),
        },
        why="It gathers and frees parameters in hooks around every module, at other addresses in every step.",
        source="megatron/bridge/training/config.py ConfigContainer._validate_and_apply_megatron_fsdp_v2_configs "
        "(0.7 development)",
        upstream=("MFSDP V2 does not support CUDA graphs.", "MFSDP V2 does not support optimizer CUDA graphs."),
        bad=(
            Example(
                {**TE, "cuda_graph_modules": ["attn"], "ddp.use_megatron_fsdp": True, "ddp.megatron_fsdp_version": 2},
                {**NEW, "bridge": "0.7.0"},
            ),
            Example(
                {
                    "optimizer.optimizer_cuda_graph": True,
                    "ddp.use_megatron_fsdp": True,
                    "ddp.megatron_fsdp_version": 2,
                },
                {**NEW, "bridge": "0.7.0"},
            ),
        ),
        good=(Example({"ddp.use_megatron_fsdp": True, "ddp.megatron_fsdp_version": 2}, {**NEW, "bridge": "0.7.0"}),),
    ),
    Rule(
        code="CG516",
        title="Performance harness: implementation or scope that it does not take",
        layer="bridge",
        severity="error",
        frameworks=(BRIDGE,),
        when=lambda f, v: (
            f["harness.cuda_graph_impl"] is not None
            and (
                f["harness.cuda_graph_impl"] not in ("none", "local", "transformer_engine")
                or (
                    "full_iteration" in named(f["harness.cuda_graph_scope"])
                    and (
                        f["harness.cuda_graph_impl"] == "transformer_engine"
                        or len(named(f["harness.cuda_graph_scope"])) > 1
                    )
                )
            )
        ),
        message="--cuda_graph_impl {harness.cuda_graph_impl} --cuda_graph_scope {harness.cuda_graph_scope}",
        mend="--cuda_graph_impl takes none, local or transformer_engine; full_iteration is a scope that stands alone "
        "and goes "
        "with local; several scopes are separated by commas",
        why="The performance scripts keep the older pair of local and the scope full_iteration, set both tracker "
        "flags and turn "
        "NaN checks off by themselves.",
        source="scripts/performance of Megatron-Bridge, argument_parser.py and utils/overrides.py "
        "_set_cuda_graph_overrides",
        upstream=(
            "Invalid value for cuda_graph_impl",
            "full_iteration CUDA graph scope cannot use cuda_graph_impl=transformer_engine.",
        ),
        bad=(
            Example({"harness.cuda_graph_impl": "full_iteration"}, NEW),
            Example(
                {"harness.cuda_graph_impl": "transformer_engine", "harness.cuda_graph_scope": "full_iteration"}, NEW
            ),
        ),
        good=(
            Example({"harness.cuda_graph_impl": "local", "harness.cuda_graph_scope": "full_iteration"}, NEW),
            Example({"harness.cuda_graph_impl": "transformer_engine", "harness.cuda_graph_scope": "attn,mlp"}, NEW),
        ),
    ),
    Rule(
        code="CG517",
        title="Captured delayed weight gradient that Bridge 0.4 does not notice",
        layer="bridge",
        severity="runtime",
        frameworks=(BRIDGE,),
        bridge=((0, 4), (0, 5)),
        when=_unchecked_wgrad,
        message="comm_overlap.delay_wgrad_compute with the scopes {graph.modules}: what they need (Transformer Engine "
        "2.12, "
        "gradient accumulation fusion, no attention bias) is not there, and Bridge 0.4 checks scopes given as enum "
        "members only",
        mend="turn comm_overlap.delay_wgrad_compute off, or drop the scope (attn; moe_router with shared experts)",
        fix=lambda f, v: {"comm_overlap.delay_wgrad_compute": False, "delay_wgrad_compute": False},
        why="The check compares the scopes with members of the enum, so names given as strings pass unseen; the "
        "failure is the "
        "same.",
        source="megatron/bridge/training/comm_overlap.py CommOverlapConfig._get_model_comm_overlap_cfgs (0.4)",
        bad=(
            Example(
                {
                    **{name: value for name, value in DELAYED.items() if name != "cuda_graph_modules"},
                    "cuda_graph_scope": ["attn"],
                },
                {"bridge": "0.4.2", "mcore": "0.17.1", "te": "2.11"},
            ),
        ),
        good=(
            Example(
                {
                    **{name: value for name, value in DELAYED.items() if name != "cuda_graph_modules"},
                    "cuda_graph_scope": ["attn"],
                },
                {"bridge": "0.4.2", "mcore": "0.17.1", "te": "2.12"},
            ),
        ),
    ),
    Rule(
        code="CG518",
        title="Graphs that Bridge 0.3 does not delete",
        layer="bridge",
        severity="warning",
        frameworks=(BRIDGE,),
        bridge=((0, 3), (0, 4)),
        when=lambda f, v: f["graph.active"],
        message="Bridge 0.3 only drops its references to graphs at the end of training",
        mend="delete the graphs before the process groups are destroyed (delete_graphs.py does), or use a newer Bridge",
        why="Graphs hold NCCL kernels; destroying the process groups while they live can hang the job at its end.",
        source="megatron/bridge/training/train.py _delete_cuda_graphs (0.3.1)",
        bad=(Example({**TRACKED, "cuda_graph_impl": "transformer_engine"}, {"bridge": "0.3.1", "mcore": "0.16.1"}),),
        good=(Example({**TRACKED, "cuda_graph_impl": "transformer_engine"}, {"bridge": "0.4.2", "mcore": "0.17.1"}),),
    ),
    Rule(
        code="CG519",
        title="One full-iteration run in a process",
        layer="bridge",
        severity="info",
        frameworks=(BRIDGE,),
        bridge=((0, 4), (0, 7)),
        when=lambda f, v: f["graph.full_iteration"],
        message="after training, Bridge removes the entry that the next full-iteration run of the same process looks "
        "up",
        mend="start each run in a process of its own, or clean up with delete_graphs.py",
        why='The cleanup deletes the key "training" from FullCudaGraphWrapper.cuda_graph instead of the graph in it, '
        "so that "
        "a second run stops with a KeyError; nothing is deleted where training ends with an exception.",
        source="megatron/bridge/training/train.py _delete_cuda_graphs (0.4.2 to 0.6.2)",
        upstream=("KeyError: 'training'",),
        bad=(Example(FULL, NEW),),
        good=(Example({**TE, "cuda_graph_modules": ["attn"]}, NEW),),
    ),
)
