# SPDX-License-Identifier: Apache-2.0
"""Values of a type that upstream would not take: numeric text counts as its number, anything else as unknown."""

import json

import pytest
import validate_constraints

from cudagraphs import families, recommend, rules, versions
from cudagraphs.rules import defaults, evaluate
from cudagraphs.settings import Known, Settings, Unknown

MINORS = range(13, 20)
BRIDGES = {16: "0.3.1", 17: "0.4.2", 18: "0.5.1", 19: "0.6.2"}
VALUES = ("$PP", "2", "", "null", None, 2.5, [1], {"a": 1})
SIZES = ("pipeline_model_parallel_size", "expert_model_parallel_size", "gtp_weight_remat_size")


def settings_of(framework, minor, facts, **given):
    usual = {"bridge": BRIDGES.get(minor, "0.3.1"), "te": "2.20", "torch": "2.11", "automodel": "0.7"}
    resolved = versions.resolve(framework, **{**usual, **given, "mcore": f"0.{minor}"})
    return Settings(framework, resolved, facts)


def names_read(monkeypatch, settings, rule):
    """The facts that the rule reads on its way to a verdict, derived ones by what they are derived from."""
    seen = set()
    read = evaluate.Reader.__getitem__

    def spy(reader, name):
        if name not in evaluate._DERIVED:
            seen.add(name)
        return read(reader, name)

    with monkeypatch.context() as patch:
        patch.setattr(evaluate.Reader, "__getitem__", spy)
        rules.check(settings, [rule])
    return seen


@pytest.mark.parametrize("rule", list(rules.REGISTRY), ids=lambda rule: rule.code)
def test_no_rule_stumbles_over_a_value_of_another_type(rule, monkeypatch):
    judged = 0
    for framework in rule.frameworks:
        for minor in MINORS:
            for example in (*rule.bad, *rule.good):
                facts = {name: Known(value) for name, value in example.facts.items()}
                settings = settings_of(framework, minor, facts, **example.versions)
                if not rule.holds_for(framework, settings.versions):
                    continue
                for name in names_read(monkeypatch, settings, rule) | set(facts):
                    for value in VALUES:
                        rules.check(settings.with_values({name: value}), [rule])
                        judged += 1
    assert judged


@pytest.mark.parametrize("minor", MINORS)
@pytest.mark.parametrize("name", sorted({*defaults.DOMAINS, *defaults.PATTERNS, "cuda_graph_impl"}))
def test_every_rule_and_the_recommendation_judge_any_value(name, minor):
    for framework in ("megatron-bridge", "megatron-lm", "nemo-automodel", "pytorch"):
        for value in VALUES:
            facts = {"pipeline_model_parallel_size": Known(2), "backend.cuda_graph.modules": Known(["attn"])}
            settings = settings_of(framework, minor, {**facts, name: Known(value)})
            rules.check(settings)
            rules.graph_state(settings)
            if framework in ("megatron-bridge", "megatron-lm"):
                families.assume(settings, families.infer(settings))
                recommend.recommend(settings)


def judged(facts, minor=19, framework="megatron-core"):
    return rules.check(settings_of(framework, minor, facts))


@pytest.mark.parametrize("minor", MINORS)
@pytest.mark.parametrize("name", SIZES)
def test_numeric_text_is_judged_as_its_number(name, minor):
    graphs = {"enable_cuda_graph": Known(True)} if minor < 15 else {"cuda_graph_impl": Known("local")}
    for text, number in (("2", 2), ("1", 1), (" 4 ", 4)):
        assert judged({**graphs, name: Known(text)}, minor) == judged({**graphs, name: Known(number)}, minor)


@pytest.mark.parametrize("minor", MINORS)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", ["$PP", "", None, [2]])
def test_what_is_no_number_is_judged_as_unknown(name, value, minor):
    graphs = {"enable_cuda_graph": Known(True)} if minor < 15 else {"cuda_graph_impl": Known("local")}
    assert judged({**graphs, name: Known(value)}, minor) == judged({**graphs, name: Unknown("left open")}, minor)


def test_a_size_that_may_be_none_stays_none():
    assert defaults.as_read("num_moe_experts", None) is None
    assert defaults.as_read("num_moe_experts", "8") == 8
    assert defaults.as_read("optimizer.grad_norm_skip_threshold", "1e3") == 1000.0
    assert defaults.as_read("moe_layer_freq", "([0]*1+[1]*3)") == "([0]*1+[1]*3)"
    assert defaults.as_read("torch.current_device", "cuda:1") == "cuda:1"
    assert defaults.as_read("backend.cuda_graph.modules", None) is None, "AutoModel rejects it, and a rule says so"
    with pytest.raises(ValueError):
        defaults.as_read("pipeline_model_parallel_size", None)


RECIPE = """
def recipe():
    cfg = ConfigContainer()
    cfg.model.cuda_graph_impl = "local"
    cfg.model.pipeline_model_parallel_size = {value}
    cfg.model.num_moe_experts = {value}
    return cfg
"""
FILES = {
    "recipe.py": RECIPE,
    "train.sh": "python pretrain_gpt.py --cuda-graph-impl local --pipeline-model-parallel-size {value} "
    "--num-experts {value} --num-layers 4 --hidden-size 64 --num-attention-heads 4\n",
    "model_config.yaml": "MODEL_ARGS:\n  --cuda-graph-impl: local\n  --pipeline-model-parallel-size: {value}\n"
    "  --num-experts: {value}\n",
    "run_config.yaml": "model:\n  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider\n"
    "  cuda_graph_impl: local\n  pipeline_model_parallel_size: {value}\n  num_moe_experts: {value}\n"
    "ddp: {{}}\ntrain: {{}}\noptimizer: {{}}\n",
    "automodel.yaml": "recipe: TrainFinetuneRecipeForNextTokenPrediction\nmodel:\n"
    "  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained\n"
    "  backend:\n    cuda_graph:\n      modules: [attn]\ndistributed:\n  pp_size: {value}\n",
    "facts.yaml": "framework: megatron-core\npipeline_model_parallel_size: {value}\ncuda_graph_impl: local\n"
    "num_moe_experts: {value}\n",
}


def findings_of(folder, capsys, name, value):
    path = folder / name
    path.write_text(FILES[name].format(value=value))
    given = ["--facts", str(path)] if name == "facts.yaml" else [str(path)]
    code = validate_constraints.main([*given, "--mcore", "0.19.2", "--json"])
    shown = capsys.readouterr()
    assert code in (0, 1), shown.err
    (run,) = json.loads(shown.out)["functions"]
    return [(finding["code"], finding["severity"], finding["message"]) for finding in run["findings"]]


@pytest.mark.parametrize("value", ['"$PP"', "null", "[]"])
@pytest.mark.parametrize("name", FILES)
def test_every_format_is_judged_whatever_a_size_is_written_as(tmp_path, capsys, name, value):
    findings = findings_of(tmp_path, capsys, name, "None" if value == "null" and name == "recipe.py" else value)
    # a pipeline is not claimed where its size is unknown (AutoModel takes none as one stage)
    assert not [code for code, severity, _ in findings if code in ("CG730", "CG610") and severity != "info"]


@pytest.mark.parametrize("name", FILES)
def test_every_format_judges_numeric_text_as_its_number(tmp_path, capsys, name):
    findings = findings_of(tmp_path, capsys, name, '"2"')
    assert findings == findings_of(tmp_path, capsys, name, "2")
    assert findings
