# SPDX-License-Identifier: Apache-2.0
"""Command lines and templates against the released code that reads them.

Megatron-LM's own parser, checks and TransformerConfig judge the same arguments that our reading of them is judged by;
what the templates render goes through the parser, TransformerConfig or AutoModel's BackendConfig that it is written
for."""

from __future__ import annotations

import ast
from collections import Counter

import pytest
import wheels
import yaml
from cudagraphs import rendering, rules, versions
from cudagraphs.formats.arguments import LaunchScript, from_argv
from cudagraphs.formats.source import TextFile
from oracle import automodel_config, megatron_lm_args, transformer_config

pytestmark = pytest.mark.wheels

TE = megatron_lm_args.DEFAULT_TE
PRESETS = ("default", "narrow", "widest")
# A quarter of the cases of each version, another quarter for each: all of them take minutes.
STRIDE = 4
# what upstream checks before anything is captured
LAYERS = ("config", "arguments")


def of(minor: str, framework: str = "megatron-lm", te: str | None = TE) -> versions.Versions:
    return versions.resolve(framework, mcore=minor, te=te or "none", torch="2.11", automodel="0.7.0")


@pytest.mark.parametrize("minor", megatron_lm_args.MINORS)
def test_reading_agrees_with_megatron_lm(minor):
    """The verdict on every command line, and what is captured where it is accepted."""
    wheels.fetch_or_skip("megatron-core", transformer_config.full_version(minor))
    requests = list(megatron_lm_args.cases(minor))[int(minor[-1]) % STRIDE :: STRIDE]
    counts, mismatches = Counter(), []
    for request, answer in zip(requests, megatron_lm_args.ask(minor, requests)):
        if answer["verdict"] == "baseline_rejected":
            counts["baseline"] += 1
            continue
        argv = [*megatron_lm_args.BASE_ARGV, *request["argv"]]
        settings = from_argv(argv, of(minor, te=request.get("te", TE))).run("<arguments>").settings
        settings = settings.with_values({f"env.{name}": value for name, value in request.get("env", {}).items()})
        broken = [f.code for f in rules.check(settings) if f.layer in LAYERS and f.severity == "error" and not f.needs]
        counts[answer["verdict"]] += 1
        if bool(broken) != (answer["verdict"] == "rejected"):
            mismatches.append(
                (request["id"], request["argv"], request.get("env"), answer["verdict"], answer["error"], broken)
            )
            continue
        if answer["verdict"] == "accepted":
            state = rules.graph_state(settings)
            theirs = answer["normalized"]
            modules = list(theirs["modules"])
            if theirs["impl"] == "local" and {"moe_router", "moe_preprocess"} & set(modules):
                # upstream's answer is from before TransformerConfig, which brings the other one of the two
                modules = list(dict.fromkeys([*modules, "moe_router", "moe_preprocess"]))
            if (state.impl, list(state.modules)) != (theirs["impl"], modules):
                mismatches.append((request["id"], request["argv"], theirs, state))
    assert not mismatches, f"{len(mismatches)} of {sum(counts.values())}, for example {mismatches[:3]}"
    assert counts["accepted"] > 50 and counts["rejected"] > 50, counts


def rendered(name: str, minor: str, **given: str) -> tuple[str, dict]:
    template = rendering.named(name)
    values = template.values(given)
    settings = rendering.base_settings(template, values, of(minor, template.framework))
    seen = rendering.context(template, values, settings, rendering.advise(template, values, settings))
    return rendering.render(template, seen), seen


@pytest.mark.parametrize("minor", megatron_lm_args.MINORS)
def test_megatron_lm_accepts_what_is_rendered(minor):
    wheels.fetch_or_skip("megatron-core", transformer_config.full_version(minor))
    kinds = {
        "dense": ([], {}),
        "moe": (["--num-experts", "8", "--moe-token-dispatcher-type", "alltoall", "--disable-bias-linear"], {}),
        "moe-padded": (
            [
                "--num-experts",
                "8",
                "--moe-token-dispatcher-type",
                "alltoall",
                "--disable-bias-linear",
                "--moe-expert-capacity-factor",
                "1.0",
                "--moe-pad-expert-input-to-capacity",
            ],
            {},
        ),
    }
    requests = []
    for preset in PRESETS:
        for model, (options, env) in kinds.items():
            text, _ = rendered("megatron-lm-arguments", minor, preset=preset, model=model)
            script = LaunchScript("args.sh", of(minor), file=TextFile("args.sh", text.encode(), "utf-8", b"", text))
            words = [word.text for word in script.run("<variables>").words]
            requests.append({"id": f"{preset} {model}", "argv": [*options, *words], "env": env})
    answers = list(megatron_lm_args.ask(minor, requests))
    assert [(a["id"], a["error"]) for a in answers if a["verdict"] != "accepted"] == []
    assert all(answer["normalized"]["impl"] != "none" and answer["normalized"]["te_rng_tracker"] for answer in answers)


@pytest.mark.parametrize("minor", ["0.16", "0.17", "0.18", "0.19"])
def test_transformer_config_accepts_what_the_loops_build(minor):
    """The keywords of the rendered build_config, and the same for Bridge's settings on the model."""
    wheels.fetch_or_skip("megatron-core", transformer_config.full_version(minor))
    requests = []
    for name in ("mcore-te-loop", "mcore-full-iteration-loop"):
        for preset in PRESETS:
            for model in rendering.named(name).models:
                text, _ = rendered(name, minor, preset=preset, model=model)
                call = next(
                    node
                    for node in ast.walk(ast.parse(text))
                    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "TransformerConfig"
                )
                fields = {
                    k.arg: ast.literal_eval(k.value) for k in call.keywords if not isinstance(k.value, ast.Attribute)
                }
                requests.append({"id": f"{name} {preset} {model}", "fields": fields, "te": TE})
    for preset in PRESETS:
        for model, facts in rendering.MODELS.items():
            # a padded mixture of experts has no default base: any name does, it is not read
            base = {"base": "recipes.moe.padded_config"} if model == "moe-padded" else {}
            _, seen = rendered("bridge-recipe", minor, preset=preset, model=model, **base)
            fields = {
                path.removeprefix("model."): value for path, value in seen["settings"] if path.startswith("model.")
            }
            fields.update({fact: value for fact, value in facts.items() if fact != "hybrid_layer_pattern"})
            if model == "hybrid":
                fields["is_hybrid_model"] = True
            requests.append({"id": f"bridge {preset} {model}", "fields": fields, "te": TE})
    answers = list(transformer_config.ask(transformer_config.full_version(minor), requests))
    assert [(a["id"], a["error"]) for a in answers if a["verdict"] != "accepted"] == []
    assert all(answer["normalized"]["impl"] != "none" for answer in answers)


def test_automodel_accepts_what_is_rendered():
    wheels.fetch_or_skip("nemo-automodel", "0.7.0")
    requests = []
    for preset in PRESETS:
        for model in ("dense", "moe"):
            for dispatcher in ("torch", "hybridep"):
                text, _ = rendered("automodel-yaml", "0.19", preset=preset, model=model, dispatcher=dispatcher)
                backend = {
                    key: value for key, value in yaml.safe_load(text)["model"]["backend"].items() if key != "_target_"
                }
                requests.append({"id": f"{preset} {model} {dispatcher}", "backend": backend})
    answers = list(automodel_config.ask(requests))
    assert [(a["id"], a["error"]) for a in answers if a["verdict"] != "accepted"] == []
    assert all(answer["normalized"]["modules"] for answer in answers)
