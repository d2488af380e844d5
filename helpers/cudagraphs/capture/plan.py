# SPDX-License-Identifier: Apache-2.0
"""What to run: shapes, sizes, memory estimates, scaling of a recipe, and the plain job that a child process gets."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from cudagraphs.capture.variants import Variant

GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """A decoder. Sizes in elements, `sequence` in tokens, `ffn` per expert where there are experts."""

    layers: int = 8
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 16
    ffn: int = 4096
    sequence: int = 512
    microbatch: int = 1
    microbatches: int = 2
    vocabulary: int = 32768
    experts: int = 0
    top_k: int = 2
    capacity_factor: float | None = None


# launch: kernels shorter than their launch, the host is the limit. compute: kernels fill the GPU, nothing to gain.
SIZES = {
    "launch": Shape(),
    "compute": Shape(layers=2, hidden=4096, heads=32, kv_heads=32, ffn=16384, sequence=4096, vocabulary=8192),
}
# Experts are narrower than a dense layer, as in the models people train.
_MOE = {"launch": {"experts": 8, "ffn": 1024}, "compute": {"experts": 8, "ffn": 4096, "sequence": 8192}}


def shape(size: str, model: str) -> Shape:
    """The preset of a size (`launch` or `compute`) for a model."""
    preset = SIZES[size]
    if "moe" in model:
        preset = replace(preset, **_MOE[size], capacity_factor=1.0 if model == "moe-drop-pad" else None)
    return preset


def parameters(s: Shape) -> int:
    """Number of parameters of the decoder with separate input and output embeddings, without norms and biases."""
    head = s.hidden // s.heads
    attention = s.hidden * head * (2 * s.heads + 2 * s.kv_heads)
    mlp = 2 * s.hidden * s.ffn * max(s.experts, 1)
    return s.layers * (attention + mlp) + 2 * s.vocabulary * s.hidden


def memory_bytes(s: Shape) -> int:
    """A rough upper estimate of one process: parameters, gradients, Adam, activations of a microbatch, context.

    18 bytes a parameter: bf16 weight 2, fp32 gradient 4, fp32 weight 4, two fp32 moments 8. Activations after
    Korthikanti et al. 2022, 34 bytes x tokens x hidden a layer without the attention matrix, times the experts'
    fan-out, plus the logits in bf16 and fp32 with their gradients. A graph's private pool can hold the activations once
    more.
    """
    tokens = s.sequence * s.microbatch
    fan_out = s.top_k if s.experts else 1
    activations = s.layers * tokens * s.hidden * 34 * fan_out + tokens * s.vocabulary * 12
    return 18 * parameters(s) + 2 * activations + GIB


def at_once(s: Shape, variants: int, free_bytes: int, world: int = 1) -> int:
    """How many processes may hold the GPU together. One where collectives of several process groups would meet."""
    if world > 1:
        return 1
    return max(1, min(variants, int(0.8 * free_bytes // memory_bytes(s))))


def scale(s: Shape, limit_bytes: int, max_layers: int = 8, divisors: dict | None = None) -> tuple[Shape, list[str]]:
    """The shape made to fit `limit_bytes`, and what changed, one sentence each.

    Layers go first and experts second, because neither changes how long a kernel runs, so the answer about launch-bound
    or compute-bound stays the same. Sequence and hidden size come last, and the report says that they moved the answer.
    `divisors` holds the parallel sizes that the result must still divide by (`pipeline`, `expert`, `tensor`).
    """
    divisors = {"pipeline": 1, "expert": 1, "tensor": 1, **(divisors or {})}
    changes = []

    def change(name: str, value: int, note: str = "") -> None:
        nonlocal s
        changes.append(f"{name} {getattr(s, name)} -> {value}{note}")
        s = replace(s, **{name: value})

    def rounded(value: int, divisor: int) -> int:
        return max(divisor, value // divisor * divisor)

    if s.layers > max_layers:
        change("layers", rounded(max_layers, divisors["pipeline"]))
    while memory_bytes(s) > limit_bytes and s.layers > max(2, divisors["pipeline"]):
        change("layers", rounded(s.layers // 2, divisors["pipeline"]))
    while memory_bytes(s) > limit_bytes and s.experts > max(s.top_k, divisors["expert"], 2):
        change("experts", rounded(max(s.experts // 2, s.top_k), divisors["expert"]))
    moved = " (kernels get shorter: the real run gains less from graphs than this one)"
    while memory_bytes(s) > limit_bytes and s.sequence > 512:
        change("sequence", s.sequence // 2, moved)
    while memory_bytes(s) > limit_bytes and s.hidden > 512 and s.heads % 2 == 0 and s.heads // 2 >= divisors["tensor"]:
        kv = max(s.kv_heads // 2, 1)
        changes.append(f"hidden {s.hidden} -> {s.hidden // 2}, heads and ffn with it{moved}")
        s = replace(s, hidden=s.hidden // 2, heads=s.heads // 2, kv_heads=kv, ffn=s.ffn // 2)
    return s, _joined(changes)


def _joined(changes: list[str]) -> list[str]:
    """Repeated halvings of one value as one change from the first value to the last."""
    out: list[str] = []
    for text in changes:
        name, before, _, after, *note = text.split(" ", 4)
        if out and out[-1].startswith(f"{name} ") and f"-> {before}" in out[-1]:
            start = out.pop().split(" ")[1]
            text = " ".join([name, start, "->", after, *note])
        out.append(text)
    return out


def shape_from_recipe(values: dict) -> tuple[Shape, list[str]]:
    """A Shape from the fields of a recipe (TransformerConfig names), and the sentences about what was missing.

    Fields that the recipe leaves unknown take the launch-bound shape's value, except those that follow from others:
    `ffn_hidden_size` defaults to 4 x hidden, `num_query_groups` to the number of heads, as in TransformerConfig.
    """
    base, notes = Shape(), []

    def take(name: str, default):
        value = values.get(name)
        if value is None:
            notes.append(f"{name} is not known from the recipe: {default} taken")
            return default
        return value

    hidden = take("hidden_size", base.hidden)
    heads = take("num_attention_heads", max(1, hidden // 64))
    experts = values.get("num_moe_experts") or 0
    ffn = values.get("moe_ffn_hidden_size") if experts else None
    dropping = values.get("moe_expert_capacity_factor") if experts else None
    return Shape(
        layers=take("num_layers", base.layers),
        hidden=hidden,
        heads=heads,
        kv_heads=values.get("num_query_groups") or heads,
        ffn=ffn or values.get("ffn_hidden_size") or 4 * hidden,
        sequence=take("seq_length", base.sequence),
        microbatch=values.get("micro_batch_size") or 1,
        vocabulary=min(values.get("vocab_size") or base.vocabulary, base.vocabulary),
        experts=experts if experts > 1 else 0,
        top_k=values.get("moe_router_topk") or base.top_k,
        capacity_factor=dropping,
    ), notes


def hybrid_pattern(model: str, layers: int, mamba: bool) -> str | None:
    """The layer pattern of a hybrid model, None for others: M Mamba, * attention, - MLP, E mixture of experts.

    Source: megatron/core/models/hybrid/hybrid_layer_allocation.py, Symbols (0.19.2). Without the mamba-ssm package the
    Mamba layers are left out; attention and MLP stay separate layers, as in every hybrid.
    """
    if model == "hybrid-moe":
        unit = "*E"
    elif model == "hybrid":
        unit = "M*-" if mamba else "*-"
    else:
        return None
    return (unit * layers)[: max(layers, len(unit))]


def model_of(values: dict) -> str:
    """dense, moe-dropless, moe-drop-pad or hybrid, from a recipe's fields."""
    pattern = values.get("hybrid_layer_pattern")
    if pattern or values.get("is_hybrid_model"):
        return "hybrid-moe" if "E" in (pattern or "") else "hybrid"
    if (values.get("num_moe_experts") or 0) > 1:
        return "moe-drop-pad" if values.get("moe_pad_expert_input_to_capacity") else "moe-dropless"
    return "dense"


def config_fields(
    model: str,
    s: Shape,
    precision: str,
    dropout: float,
    parallel: dict,
    pattern: str | None = None,
    extra: dict | None = None,
) -> dict:
    """TransformerConfig overrides of a model, without the graph fields. `extra` (from a recipe) wins.

    `parallel` holds the sizes `tensor`, `pipeline`, `virtual` (model chunks a pipeline stage) and `expert`; `pattern` is a hybrid's layer pattern; `precision` is
    bf16 or fp8-RECIPE with RECIPE one of delayed, tensorwise, blockwise, mxfp8.
    Source of the names: megatron/core/transformer/transformer_config.py, 0.19.2.
    """
    out = {
        "num_layers": len(pattern) if pattern else s.layers,
        "hidden_size": s.hidden,
        "num_attention_heads": s.heads,
        "num_query_groups": s.kv_heads,
        "ffn_hidden_size": s.ffn,
        "attention_dropout": dropout,
        "hidden_dropout": dropout,
        "bf16": True,
        "add_bias_linear": False,
        "tensor_model_parallel_size": parallel["tensor"],
        "pipeline_model_parallel_size": parallel["pipeline"],
        "expert_model_parallel_size": parallel["expert"],
        "sequence_parallel": parallel["tensor"] > 1,
    }
    if parallel["virtual"] > 1:
        # what Megatron-LM's arguments.py makes of an interleaved schedule
        out |= {
            "virtual_pipeline_model_parallel_size": parallel["virtual"],
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    elif parallel["pipeline"] > 1:
        out["batch_p2p_sync"] = False  # a workaround for old PyTorch that waits for the device: CG723
    if s.experts:
        out |= {
            "num_moe_experts": s.experts,
            "moe_router_topk": s.top_k,
            "moe_ffn_hidden_size": s.ffn,
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": True,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.01,
        }
        if model == "moe-drop-pad":
            out |= {"moe_expert_capacity_factor": s.capacity_factor, "moe_pad_expert_input_to_capacity": True}
    if precision.startswith("fp8-"):
        out |= {"fp8": "hybrid", "fp8_recipe": precision.removeprefix("fp8-")}
    return out | (extra or {})


def job(setup: dict, variant: Variant, *, name: str | None = None, drill: str | None = None) -> dict:
    """The plain description that a child gets: the setup common to all variants, and this variant."""
    return {
        **setup,
        "name": name or variant.name,
        "impl": variant.impl,
        "modules": list(variant.modules),
        "drill": drill,
    }


def as_dict(s: Shape) -> dict:
    return asdict(s)
