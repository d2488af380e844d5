# SPDX-License-Identifier: Apache-2.0
"""YAML formats: MODEL_ARGS files, AutoModel recipes, Bridge dumps and overrides, facts files."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest
import validate_constraints
import yaml
from cudagraphs import rules, versions
from cudagraphs.formats import open_recipe
from cudagraphs.formats.facts import open_facts
from cudagraphs.formats.source import SourceError, TextFile
from cudagraphs.formats.yaml_file import YamlFile, yaml_text
from cudagraphs.rules.base import Member
from cudagraphs.settings import Known, Unknown
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LM = versions.resolve("megatron-lm", mcore="0.19.2", te="2.14", torch="2.11", automodel="0.7")
BRIDGE = versions.resolve("megatron-bridge", bridge="0.6.2", mcore="0.19.2", te="2.14", torch="2.11", automodel="0.7")


def file_of(folder: Path, text: str, name: str = "model_config.yaml") -> Path:
    path = folder / name
    path.write_bytes(textwrap.dedent(text).lstrip("\n").encode())
    return path


def known(recipe, name: str) -> dict:
    return {fact: value.value for fact, value in recipe.run(name).settings.facts.items() if isinstance(value, Known)}


# -- aliases ---------------------------------------------------------------------------------------


def test_aliases_of_aliases_are_refused_at_once(tmp_path):
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 13)]
    path = file_of(tmp_path, "\n".join(["a0: &a0 [1]", *levels]) + "\n")
    with pytest.raises(SourceError, match=r"model_config\.yaml:\d+: aliases make more than 100,000 values"):
        YamlFile(path)


@pytest.mark.parametrize("text", ["a: &a\n  b: *a\n", "a: &a [1, *a]\n", "a: &a {b: &b {c: *a}}\n", "&a x: &b [*b]\n"])
def test_alias_inside_of_itself_is_refused(tmp_path, capsys, text):
    path = file_of(tmp_path, text)
    with pytest.raises(SourceError, match=r"model_config\.yaml:1: an alias stands inside of what it names"):
        YamlFile(path)
    assert validate_constraints.main([str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_plain_aliases_are_read(tmp_path):
    path = file_of(tmp_path, "a: &a {x: 1}\nb: *a\nc:\n  <<: *a\n  y: [*a, *a]\n")
    assert YamlFile(path).data["c"] == {"x": 1, "y": [{"x": 1}, {"x": 1}]}


# -- splicing --------------------------------------------------------------------------------------

SPLICES = [
    ("scalar", "a: 1 # one\nb: 2\n", ["a"], 3, "a: 3 # one\nb: 2\n"),
    ("quoted scalar", "a: 'x'\n", ["a"], "y", "a: y\n"),
    ("new key", "m:\n    a: 1\n\n# end\n", ["m", "b"], True, "m:\n    a: 1\n    b: true\n\n# end\n"),
    (
        "new key beside one with a comment",
        "m:\n  a: 1  # one\nn: 2\n",
        ["m", "b"],
        [],
        "m:\n  a: 1  # one\n  b: []\nn: 2\n",
    ),
    ("new nested keys", "m:\n  a: 1\n", ["m", "g", "modules"], ["attn"], "m:\n  a: 1\n  g:\n    modules: [attn]\n"),
    ("no line end at the end", "m:\n  a: 1", ["m", "b"], 2, "m:\n  a: 1\n  b: 2"),
    ("below nothing", "m:\nn: 1\n", ["m", "a"], 1, "m:\n  a: 1\nn: 1\n"),
    ("below null", "m: null\nn: 1\n", ["m", "a"], 1, "m: \n  a: 1\nn: 1\n"),
    ("flow mapping", "m: {a: 1}\n", ["m", "b"], 2, "m: {a: 1, b: 2}\n"),
    ("empty flow mapping", "m: {}\n", ["m", "b"], 2, "m: {b: 2}\n"),
    ("flow sequence", "m: [a, b] # x\n", ["m"], ["c"], "m: [c] # x\n"),
    ("block sequence", "m:\n  - a # x\n  - b\nn: 1\n", ["m"], ["c", "d"], "m:\n  - c\n  - d\nn: 1\n"),
    ("block sequence at the key's column", "m:\n- a\nn: 1\n", ["m"], ["c", "d"], "m:\n- c\n- d\nn: 1\n"),
    ("block sequence becomes empty", "m:\n  - a\n  - b\nn: 1\n", ["m"], [], "m: []\nn: 1\n"),
    ("block scalar", "m: |\n  x\n  y\nn: 1\n", ["m"], "z", "m: z\nn: 1\n"),
    ("empty value", "m:\nn: 1\n", ["m"], 5, "m: 5\nn: 1\n"),
    ("last of two equal keys", "m: 1\nm: 2\n", ["m"], 3, "m: 1\nm: 3\n"),
    (
        "merged key gets one of its own",
        "b: &b {x: 1}\nm:\n  <<: *b\n  y: 2\n",
        ["m", "x"],
        5,
        "b: &b {x: 1}\nm:\n  <<: *b\n  y: 2\n  x: 5\n",
    ),
    ("alias is replaced where it is used", "a: &a 1\nb: *a\n", ["b"], 2, "a: &a 1\nb: 2\n"),
    ("beyond ASCII", "ü: 1\nm: {é: ✓}\n", ["m", "b"], "ß", 'ü: 1\nm: {é: ✓, b: "ß"}\n'),
    ("empty file", "", ["a", "b"], 1, "a:\n  b: 1\n"),
    ("only a comment", "# x\n", ["a"], 1, "# x\na: 1\n"),
]


def document(text: str) -> YamlFile:
    path = Path("file.yaml")
    return YamlFile(path, TextFile(path, text.encode(), "utf-8", b"", text))


@pytest.mark.parametrize("source, path, value, expected", [row[1:] for row in SPLICES], ids=[row[0] for row in SPLICES])
def test_splice(source, path, value, expected):
    assert document(source).with_value(path, value).text == expected


REMOVALS = [
    ("line", "m:\n  a: 1\n  b: 2 # x\n  c: 3\n", ["m", "b"], "m:\n  a: 1\n  c: 3\n"),
    ("block", "m:\n  a: 1\n  b:\n    - 2\n", ["m", "b"], "m:\n  a: 1\n"),
    ("flow, last", "m: {a: 1, b: 2}\n", ["m", "b"], "m: {a: 1}\n"),
    ("flow, first", "m: {a: 1, b: 2}\n", ["m", "a"], "m: {b: 2}\n"),
    ("not there", "m: {a: 1}\n", ["m", "z"], "m: {a: 1}\n"),
]


@pytest.mark.parametrize("source, path, expected", [row[1:] for row in REMOVALS], ids=[row[0] for row in REMOVALS])
def test_removal(source, path, expected):
    assert document(source).without(path).text == expected


def test_json_stays_json():
    path = Path("file.json")
    text = '{"a": {"b": 1}}\n'
    file = YamlFile(path, TextFile(path, text.encode(), "utf-8", b"", text))
    assert file.with_value(["a", "c"], ["x", None]).text == '{"a": {"b": 1, "c": ["x", null]}}\n'
    assert file.with_value(["d", "e"], True).text == '{"a": {"b": 1}, "d": {"e": true}}\n'
    assert file.with_value(["a", "b"], "y").text == '{"a": {"b": "y"}}\n'


def test_windows_line_ends_are_kept():
    assert document("m:\r\n  a: 1\r\nn: 2\r\n").with_value(["m", "b"], 1).text == "m:\r\n  a: 1\r\n  b: 1\r\nn: 2\r\n"


REFUSED = [
    ("block that an alias shares", "a: &a {x: 1}\nb: *a\n", ["b", "y"], "alias of a block"),
    ("no mapping", "a: [1]\n", ["a", "b"], "no mapping"),
    ("no mapping at all", "[1]\n", ["a"], "no mapping"),
    ("an anchor that others refer to", "a: &a 1\nb: *a\n", ["a"], "by hand"),
]


@pytest.mark.parametrize("source, path, reason", [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused_splice(source, path, reason):
    with pytest.raises(SourceError, match=reason):
        document(source).with_value(path, 2)


@pytest.mark.parametrize(
    "text",
    ["a: [1\n", "a: b: c\n", "\t- x\n", "a: !!python/object/apply:os.system ['true']\n", "{", "a: *b\n", "- x\na: 1\n"],
)
def test_invalid_yaml_is_one_line_with_a_place(text):
    with pytest.raises(SourceError, match="not valid YAML") as error:
        document(text)
    assert "\n" not in str(error.value)


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text("ab: #'\"-\\{é\n", max_size=5))
TREES = st.recursive(
    SCALARS,
    lambda children: st.one_of(
        st.lists(children, max_size=3), st.dictionaries(st.sampled_from("abcdef"), children, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.dictionaries(st.sampled_from("abcdef"), TREES, min_size=1, max_size=4),
    path=st.lists(st.sampled_from("abcdeg"), min_size=1, max_size=3),
    value=st.one_of(SCALARS, st.lists(SCALARS, max_size=3)),
    flow=st.sampled_from([True, False, None]),
    ends=st.booleans(),
)
def test_an_edit_changes_the_data_at_its_path_only(data, path, value, flow, ends):
    """Whatever the style, the loaded data is the old data with one value set.

    Or the edit is refused and nothing happens.
    """
    text = yaml.safe_dump(data, default_flow_style=flow, allow_unicode=True, sort_keys=False)
    if ends:
        text = text.rstrip("\n") + "\n# tail\n"
    try:
        edited = document(text).with_value(path, value)
    except SourceError:
        return
    expected = json.loads(json.dumps(data))
    target = expected
    for part in path[:-1]:
        if not isinstance(target.get(part), dict):
            target[part] = {}
        target = target[part]
    target[path[-1]] = value
    assert yaml.safe_load(edited.text) == expected
    kept = [line for line in text.splitlines() if line.startswith("#")]
    assert all(line in edited.text for line in kept)


@given(value=st.one_of(SCALARS, st.lists(SCALARS)))
def test_written_values_load_as_themselves(value):
    assert yaml.safe_load(yaml_text(value)) == value


# -- MODEL_ARGS ------------------------------------------------------------------------------------

MODEL_ARGS = """
    ENV_VARS:
      CUDA_DEVICE_MAX_CONNECTIONS: 1
    # a run
    MODEL_ARGS:
      --num-layers: 13
      --sequence-parallel: true
      --moe-layer-freq: ([0]*4+[1]*9)
      --recompute-granularity: selective
      --recompute-modules: "[moe_act mlp]"
      --cuda-graph-impl: transformer_engine
      --cuda-graph-modules: "[attn mlp]"  # which
      --data-path: ${DATA_PATH}/text
    TEST_TYPE: regular
"""


def test_model_args_facts(tmp_path):
    recipe = open_recipe(file_of(tmp_path, MODEL_ARGS), LM)
    found = known(recipe, "MODEL_ARGS")
    assert recipe.format == "megatron-lm, MODEL_ARGS" and recipe.candidates() == ["MODEL_ARGS"]
    assert (
        found["num_layers"] == 13
        and found["sequence_parallel"] is True
        and found["moe_layer_freq"] == [0] * 4 + [1] * 9
    )
    assert found["recompute_modules"] == ["moe_act", "mlp"] and found["cuda_graph_modules"] == ["attn", "mlp"]
    assert found["env.CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert isinstance(recipe.run("MODEL_ARGS").settings.facts["args.data_path"], Unknown)


def test_model_args_edit_touches_its_lines_only(tmp_path):
    recipe = open_recipe(file_of(tmp_path, MODEL_ARGS), LM)
    wanted = {
        "cuda_graph_modules": ["attn"],
        "rng.te_rng_tracker": True,
        "recompute_granularity": None,
        "moe_layer_freq": [0, 1],
        "env.NCCL_GRAPH_REGISTER": "0",
        "env.CUDA_DEVICE_MAX_CONNECTIONS": "8",
    }
    after, skipped = recipe.edited("MODEL_ARGS", wanted)
    assert not skipped and after.edited("MODEL_ARGS", wanted)[0].file.raw == after.file.raw
    old, new = recipe.file.text.splitlines(), after.file.text.splitlines()
    assert [line for line in old if line not in new] == [
        "  CUDA_DEVICE_MAX_CONNECTIONS: 1",
        "  --moe-layer-freq: ([0]*4+[1]*9)",
        "  --recompute-granularity: selective",
        '  --cuda-graph-modules: "[attn mlp]"  # which',
    ]
    assert [line for line in new if line not in old] == [
        "  CUDA_DEVICE_MAX_CONNECTIONS: 8",
        "  NCCL_GRAPH_REGISTER: 0",
        "  --moe-layer-freq: ([0,1])",
        "  --cuda-graph-modules: attn  # which",
    ]


def test_second_block_of_arguments_is_a_run_of_its_own(tmp_path):
    text = MODEL_ARGS + "    MODEL_ARGS_2:\n      --num-layers: 2\n"
    recipe = open_recipe(file_of(tmp_path, text), LM)
    assert recipe.candidates() == ["MODEL_ARGS", "MODEL_ARGS_2"]
    after, _ = recipe.edited("MODEL_ARGS_2", {"cuda_graph_impl": "local"})
    assert known(after, "MODEL_ARGS")["cuda_graph_impl"] == "transformer_engine"
    assert known(after, "MODEL_ARGS_2")["cuda_graph_impl"] == "local"


# -- AutoModel -------------------------------------------------------------------------------------

AUTOMODEL = """
    step_scheduler:
      max_steps: 5
    model:
      _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
      pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B
      backend:
        _target_: nemo_automodel.components.models.common.BackendConfig
        attn: te   # fast
        linear: te
        dispatcher: hybridep
    distributed: {pp_size: 1}
"""


def test_automodel_facts_and_edit(tmp_path):
    path = file_of(tmp_path, AUTOMODEL, "recipe.yaml")
    recipe = open_recipe(path, LM)
    assert recipe.format == "nemo-automodel"
    found = known(recipe, "model")
    assert (
        found["backend.attn"] == "te"
        and found["backend.cuda_graph.modules"] == []
        and found["distributed.pp_size"] == 1
    )
    wanted = {
        "backend.cuda_graph.modules": ["attn", "moe_router"],
        "backend.linear": "torch",
        "backend.rms_norm": "torch",
    }
    after, _ = recipe.edited("model", wanted)
    assert after.edited("model", wanted)[0].file.raw == after.file.raw
    assert after.file.text == recipe.file.text.replace("linear: te", "linear: torch").replace(
        "    dispatcher: hybridep\n",
        "    dispatcher: hybridep\n    cuda_graph:\n      modules: [attn, moe_router]\n    rms_norm: torch\n",
    )
    state = rules.graph_state(after.run("model").settings)
    assert state.impl == "transformer_engine" and state.modules == ("attn", "moe_router")


def test_automodel_interpolation_is_unknown(tmp_path):
    recipe = open_recipe(file_of(tmp_path, "model:\n  backend:\n    attn: ${oc.env:ATTN}\n", "r.yaml"), LM)
    assert isinstance(recipe.run("model").settings.facts["backend.attn"], Unknown)


# -- Bridge ----------------------------------------------------------------------------------------

DUMP = """
    _target_: megatron.bridge.training.config.ConfigContainer
    ddp:
      _target_: megatron.bridge.training.config.DistributedDataParallelConfig
      check_for_nan_in_grad: true
    env_vars:
      NCCL_GRAPH_REGISTER: 0
    model:
      _target_: megatron.bridge.models.llama.llama_provider.Llama3ModelProvider
      activation_func:
        _call_: false
        _target_: torch.nn.functional.silu
      cuda_graph_impl: transformer_engine
      cuda_graph_modules:
      - _args_:
        - 1
        _call_: true
        _name_: attn
        _target_: megatron.core.transformer.enums.CudaGraphModule
      cuda_graph_scope: null
      inference_cuda_graph_scope:
        _args_:
        - none
        _call_: true
        _name_: none
        _target_: megatron.core.transformer.enums.InferenceCudaGraphScope
      num_moe_experts: null
      use_te_rng_tracker: true
    rng:
      _target_: megatron.bridge.training.config.RNGConfig
      te_rng_tracker: true
"""


@pytest.mark.parametrize("as_json", [False, True])
def test_configuration_dump(tmp_path, as_json):
    path = file_of(tmp_path, DUMP, "run_config.yaml")
    if as_json:
        text = json.dumps(yaml.safe_load(path.read_text()), indent=2)
        path = file_of(tmp_path, text, "run_config.json")
    recipe = open_recipe(path, BRIDGE)
    assert recipe.format == "megatron-bridge, configuration dump"
    run = recipe.run("config").settings
    assert run.complete and run.facts["cuda_graph_modules"].value == [Member("attn", "CudaGraphModule")]
    assert run.facts["ddp.check_for_nan_in_grad"].value is True and run.facts["env.NCCL_GRAPH_REGISTER"].value == "0"
    state = rules.graph_state(run)
    assert (state.impl, state.modules, state.inference_scope) == ("transformer_engine", ("attn",), "none")
    assert not [finding.code for finding in rules.check(run) if finding.severity == "error" and not finding.needs]
    with pytest.raises(SourceError, match="a run wrote down"):
        recipe.edited("config", {"cuda_graph_impl": "none"})
    assert recipe.edited("config", {"cuda_graph_impl": "transformer_engine"})[0] is recipe


def test_yaml_overrides(tmp_path):
    recipe = open_recipe(file_of(tmp_path, "model:\n  num_layers: 2\ntrain:\n  train_iters: 5\n", "o.yaml"), BRIDGE)
    assert recipe.format == "megatron-bridge, YAML overrides" and not recipe.run("config").settings.complete
    after, _ = recipe.edited(
        "config", {"cuda_graph_impl": "none", "cuda_graph_scope": None, "rng.te_rng_tracker": True}
    )
    assert after.file.text == (
        "model:\n  num_layers: 2\n  cuda_graph_impl: none\n  cuda_graph_scope: null\ntrain:\n  train_iters: 5\n"
        "rng:\n  te_rng_tracker: true\n"
    )


# -- facts -----------------------------------------------------------------------------------------


def test_facts_file(tmp_path):
    path = file_of(
        tmp_path,
        json.dumps(
            {
                "framework": "pytorch",
                "name": "loop",
                "torch.capture": "full_iteration",
                "torch": {"optimizer": "AdamW", "optimizer_in_graph": True},
                "env": {"NCCL_GRAPH_REGISTER": 0},
            }
        ),
        "facts.json",
    )
    recipe = open_facts(path, LM)
    run = recipe.run(recipe.candidates()[0]).settings
    assert run.framework == "pytorch" and run.facts["env.NCCL_GRAPH_REGISTER"].value == "0"
    assert "CG901" in {finding.code for finding in rules.check(run)}
    after, _ = recipe.edited("loop", {"torch.optimizer_capturable": True, "torch.lr_is_tensor": True})
    assert not [finding for finding in rules.check(after.run("loop").settings) if finding.severity == "error"]


def test_facts_in_neutral_names_follow_the_version(tmp_path):
    path = file_of(
        tmp_path,
        "framework: megatron-core\nversions: {mcore: 0.17}\nimpl: local\nmodules: [attn]\nfacts:\n  "
        "num_moe_experts: 8\n",
    )
    run = open_facts(path, versions.resolve("megatron-core", te="2.14")).run("facts").settings
    assert (
        run.versions.minor == 17
        and run.facts["cuda_graph_scope"].value == ["attn"]
        and run.facts["cuda_graph_impl"].value == "local"
    )
    given = open_facts(path, versions.resolve("megatron-core", mcore="0.19")).run("facts").settings
    assert given.versions.minor == 19 and "cuda_graph_modules" in given.facts, "a flag wins over the file"


@pytest.mark.parametrize(
    "text, reason",
    [
        ("[1]\n", "holds no facts"),
        ("x: 1\n", "names no framework; add a line such as framework: pytorch"),
        ("framework: jax\n", "framework 'jax'"),
        ("framework: pytorch\nfacts: 3\n", "facts must be a mapping"),
        ("framework: pytorch\ncomplete: maybe\n", "complete must be"),
        ("framework: pytorch\nversions: {cuda: 13}\n", "unknown component"),
        ("framework: pytorch\nversions: {torch: new}\n", "is not a version"),
    ],
)
def test_facts_file_that_cannot_be_read(tmp_path, text, reason):
    with pytest.raises(SourceError, match=reason):
        open_facts(file_of(tmp_path, text), versions.resolve("pytorch"))


# -- which format ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a: 1\n", "[]\n", "", "model: gpt\n", "services:\n  web: {image: x}\n"])
def test_other_yaml_is_refused(tmp_path, text):
    with pytest.raises(SourceError, match="no known kind of YAML"):
        open_recipe(file_of(tmp_path, text, "x.yaml"), LM)


def test_framework_forces_the_reading(tmp_path):
    path = file_of(tmp_path, "model: {}\n", "x.yaml")
    assert open_recipe(path, LM, "nemo-automodel").format == "nemo-automodel"
    assert open_recipe(path, BRIDGE, "megatron-bridge").format == "megatron-bridge, YAML overrides"


MISSPELT = {
    "below facts": (
        "framework: pytorch\nfacts:\n  torch.captur: partial\n",
        "model_config.yaml:3: torch.captur: no rule asks for a fact of this name; did you mean torch.capture?",
    ),
    "nested": ("framework: pytorch\ntorch:\n  capture: partial\n  optimiser: AdamW\n", ":4: .* mean torch.optimizer?"),
    "without its section": (
        "framework: pytorch\nfacts: {optimizer_in_graph: true}\n",
        ":2: optimizer_in_graph: .* mean torch.optimizer_in_graph?",
    ),
    "at the top": ("framework: megatron-core\nnum_experts: 8\n", ":2: num_experts: .* mean num_moe_experts?"),
    "with a list below it": (
        "framework: megatron-core\nrecompute_module:\n  - mlp\n",
        ":2: recompute_module: .* mean recompute_modules?",
    ),
    "a key of the format": ("framework: pytorch\nversion: {torch: 2.9}\n", ":2: version.torch: .* mean versions?"),
    "a variable": ("framework: pytorch\nenv: {NCCL_GRAPH_REGSITER: 0}\n", "mean env.NCCL_GRAPH_REGISTER?"),
    "near nothing": ("framework: pytorch\nzzz: 1\n", ":2: zzz: .*; correct the name, or remove the line"),
    "a value of the kind of capture": (
        "framework: pytorch\ntorch: {capture: whole}\n",
        ":2: torch.capture 'whole' is not one of none, partial, full_iteration",
    ),
    "of AutoModel": (
        "framework: nemo-automodel\nbackend.cuda_graph.module: [attn]\n",
        ":2: backend.cuda_graph.module: .* mean backend.cuda_graph.modules?",
    ),
}


@pytest.mark.parametrize("text,message", MISSPELT.values(), ids=MISSPELT)
def test_misspelt_facts_are_refused(tmp_path, capsys, text, message):
    path = file_of(tmp_path, text)
    assert validate_constraints.main(["--facts", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message.replace("?", r"\?"), line), line


@pytest.mark.parametrize(
    "text",
    [
        "framework: pytorch\nenv: {PYTORCH_HIP_ALLOC_CONF: x, MY_VARIABLE: 1}\n",
        "framework: nemo-automodel\nstep_scheduler.grad_acc_steps: 4\n",
        "framework: megatron-core\nimpl: local\nmodel.num_moe_experts: 8\nmodel.has_mamba: false\n",
    ],
)
def test_what_only_looks_misspelt_is_read(tmp_path, text):
    open_facts(file_of(tmp_path, text), versions.resolve("pytorch"))


def test_every_fact_that_a_rule_reads_is_a_name_that_facts_files_take():
    sources = "".join(path.read_text() for path in Path(rules.__file__).parent.glob("*.py"))
    read = set(re.findall(r'\bf\["([\w.]+)"\]', sources)) - set(rules.evaluate._DERIVED)
    read |= set(re.findall(r'"(env\.[A-Z_]+)"', sources))
    assert len(read) > 100
    assert read <= rules.evaluate.defaults.fact_names()


@pytest.mark.parametrize("given", ["torch.ddp=true", "torch.warmup_iterations=3", "model.has_mamba=true"])
def test_any_fact_can_be_given_beside_a_facts_file(tmp_path, capsys, given):
    path = file_of(tmp_path, "framework: pytorch\ntorch.capture: full_iteration\ntorch.ddp: true\n")
    assert validate_constraints.main(["--facts", str(path), "--set", given]) in (0, 1), capsys.readouterr().err
