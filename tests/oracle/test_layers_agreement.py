# SPDX-License-Identifier: Apache-2.0
"""Our verdicts are upstream's in the layers around TransformerConfig too, over the recorded answers of the released
code.

Megatron-LM's command line (0.17 to 0.19, with the TransformerConfig that it builds), Megatron Bridge (0.3 to 0.6, with
the megatron-core that each pins), and NeMo AutoModel's backend block (0.7).
"""

from collections import Counter

import pytest

from cudagraphs import rules, versions
from cudagraphs.formats.arguments import from_argv
from cudagraphs.rules.config import untag
from cudagraphs.settings import Known, Settings
from oracle import record
from oracle.bridge_config import PINS
from oracle.megatron_lm_args import BASE_ARGV
from oracle.megatron_lm_args import MINORS as LM_MINORS
from oracle.transformer_config import DEFAULT_TE


def errors(*layers: str) -> list:
    """The rules of these layers that say that upstream rejects a run."""
    return [rule for rule in rules.REGISTRY if rule.layer in layers and rule.severity == "error"]


def disagreements(settings: Settings, upstream: dict, judged_by: list) -> list[str]:
    """What is not as upstream has it: an open question, the verdict, or the state after migration."""
    findings = rules.check(settings, judged_by)
    found = [f"{finding.code} asks for {finding.needs}" for finding in findings if finding.needs]
    ours = "rejected" if any(not finding.needs for finding in findings) else "accepted"
    if ours != upstream["verdict"]:
        codes = [finding.code for finding in findings]
        return [*found, f"upstream {upstream['verdict']} ({upstream.get('error_id')}), we {ours} {codes}"]
    if ours == "accepted" and upstream["normalized"] is not None and "impl" in upstream["normalized"]:
        state, normalized = rules.graph_state(settings), dict(upstream["normalized"])
        modules = normalized["modules"]
        if normalized["impl"] == "local" and {"moe_router", "moe_preprocess"} & set(modules):
            # the command line leaves this to TransformerConfig
            modules = list(dict.fromkeys([*modules, "moe_router", "moe_preprocess"]))
        if (state.impl, list(state.modules), state.inference_scope) != (
            normalized["impl"], modules, normalized["inference_scope"],
        ):  # fmt: skip
            found.append(f"upstream {normalized}, we {state}")
    return found


def compare(target: str, settings_of, judged_by: list, least: int) -> None:
    counts, wrong = Counter(), []
    for request, upstream in record.load(target):
        settings = settings_of(request) if upstream["verdict"] != "baseline_rejected" else None
        if settings is None:
            counts["left out"] += 1
            continue
        counts[upstream["verdict"]] += 1
        found = disagreements(settings, upstream, judged_by)
        if found:
            wrong.append((request, found))
    print(f"\n{target}: {dict(counts)}, {len(wrong)} mismatches")
    assert not wrong, f"{len(wrong)}; the first: {wrong[0]}"
    assert counts["accepted"] >= least and counts["rejected"] >= least


@pytest.mark.parametrize("minor", LM_MINORS)
def test_megatron_lms_command_line(minor):
    def settings_of(request: dict) -> Settings:
        te = request.get("te", DEFAULT_TE)
        resolved = versions.resolve("megatron-lm", mcore=minor, te=te or "none", torch="2.11", automodel="none")
        recipe = from_argv([*BASE_ARGV, *request["argv"]], resolved, "megatron-lm")
        settings = recipe.run(recipe.candidates()[0]).settings
        return settings.with_values({f"env.{name}": value for name, value in (request.get("env") or {}).items()})

    compare(f"megatron-lm-{minor}", settings_of, errors("config", "arguments"), 500)


@pytest.mark.parametrize("minor", PINS)
def test_megatron_bridge(minor):
    bridge, mcore = PINS[minor]
    # from 0.5 on the training path finalizes the model twice, which some settings do not survive
    finalized = 2 if minor >= "0.5" else 1

    def settings_of(request: dict) -> Settings | None:
        if "base" not in request and "te" not in request and request.get("update", 1) != finalized:
            return None
        facts = {name.removeprefix("model."): untag(value) for name, value in request["set"].items()}
        if request.get("base") == "sft":
            packing = {"dataset.enable_offline_packing": True, "dataset.pad_to_max_length": True}
            facts = {**packing, "dataset.packed_sequences": True, **facts}
        for name in ("delay_wgrad_compute", "overlap_moe_expert_parallel_comm"):
            if f"comm_overlap.{name}" in facts:
                facts.setdefault(name, facts[f"comm_overlap.{name}"])
        te = request.get("te", DEFAULT_TE)
        resolved = versions.resolve(
            "megatron-bridge", mcore=mcore, bridge=bridge, te=te, torch="2.11", automodel="none"
        )
        return Settings("megatron-bridge", resolved, {name: Known(value) for name, value in facts.items()})

    compare(f"bridge-{minor}", settings_of, errors("config", "bridge"), 100)


def test_nemo_automodels_backend_block():
    resolved = versions.resolve("nemo-automodel", automodel="0.7.0", te="2.14", torch="2.11")

    def flat(prefix: str, value: object) -> dict:
        if isinstance(value, dict) and set(value) == {"object"}:
            value = value["object"]
        if isinstance(value, dict) and value:
            return {name: leaf for key, part in value.items() for name, leaf in flat(f"{prefix}.{key}", part).items()}
        return {prefix: value}

    def settings_of(request: dict) -> Settings:
        facts = flat("backend", request["backend"])
        facts.setdefault("backend.dispatcher", "torch")  # where neither DeepEP nor UCCL-EP is installed
        return Settings("nemo-automodel", resolved, {name: Known(value) for name, value in facts.items()})

    compare("automodel-0.7", settings_of, errors("automodel"), 500)
