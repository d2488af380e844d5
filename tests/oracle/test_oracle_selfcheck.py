# SPDX-License-Identifier: Apache-2.0
"""The oracle machinery can still tell right from wrong: known answers of released code, and the parts it is made of.

The tests that run released code need torch and the pinned wheels (tests/wheels.py says how to skip or seed them).
"""

import enum
import json
import subprocess
import sys
from pathlib import Path

import pytest
import wheels
from oracle import errors, lattice, megatron_lm_args, protocol, record, transformer_config

ON = {"cuda_graph_impl": "transformer_engine"}
DELAYED = {**ON, "cuda_graph_modules": ["attn"], **lattice.OVERLAP, "delay_wgrad_compute": True}
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

# what it is: (minor, request, verdict, error id or normalised modules); each is in the release's own source
KNOWN = {
    "legacy flag of 0.14": ("0.14", {"fields": {"enable_cuda_graph": True}}, "accepted", "full"),
    "impl before it existed": ("0.14", {"fields": ON}, "rejected", "UNKNOWN_FIELD"),
    "moe scope on a dense model": ("0.17", {"fields": {**ON, "cuda_graph_scope": "moe"}}, "rejected", "MOE_ON_DENSE"),
    "no graphs at all": ("0.19", {"fields": {}}, "accepted", []),
    "old field name still migrates": ("0.19", {"fields": {**ON, "cuda_graph_scope": ["attn"]}}, "accepted", ["attn"]),
    "full recompute": ("0.19", {"fields": {**ON, **FULL_RECOMPUTE}}, "rejected", "FULL_RECOMPUTE"),
    "refused without graphs too": ("0.19", {"fields": {**ON, "num_moe_experts": 0}}, "baseline_rejected", None),
    "finalized once": ("0.19", {"fields": {"external_cuda_graph": True}}, "accepted", []),
    "finalized twice": ("0.19", {"fields": {"external_cuda_graph": True}, "then": {}}, "rejected", "LEGACY_AND_IMPL"),
    "old Transformer Engine": ("0.19", {"fields": DELAYED, "te": "2.9.0"}, "rejected", "DWG_TE_2_10"),
    "new Transformer Engine": ("0.19", {"fields": DELAYED, "te": "2.10.0"}, "accepted", ["attn"]),
    "no Transformer Engine": ("0.19", {"fields": DELAYED, "te": None}, "rejected", "DWG_TE_2_10"),
}


@pytest.mark.wheels
@pytest.mark.parametrize("minor", sorted({minor for minor, *_ in KNOWN.values()}))
def test_known_answers(minor):
    pytest.importorskip("torch")
    wheels.fetch_or_skip("megatron-core", transformer_config.full_version(minor))
    known = {name: rest for name, (version, *rest) in KNOWN.items() if version == minor}
    sample = [pair for position, pair in enumerate(record.load(minor)) if position % 997 == 0]
    requests = [request for request, *_ in known.values()] + [request for request, _ in sample]
    answers = list(transformer_config.ask(minor, requests))
    for (name, (_, verdict, detail)), answer in zip(known.items(), answers):
        assert answer["verdict"] == verdict, (name, answer)
        if verdict == "accepted":
            assert answer["normalized"]["modules"] == detail, name
        elif verdict == "rejected":
            assert errors.identify(answer["error"]) == detail, name
    # and a sample of the recorded answers still holds
    again = [answer["verdict"] for answer in answers[len(known) :]]
    assert again == [recorded["verdict"] for _, recorded in sample]
    print(f"\nmegatron-core {minor}: {len(known)} known answers, {len(sample)} recorded ones asked again")


@pytest.mark.parametrize("target", record.TARGETS)
def test_recorded_answers_fit_the_present_requests(target):
    ids = {name for name, *_ in record.TARGETS[target].errors}
    verdicts = set()
    for request, recorded in record.load(target):
        verdicts.add(recorded["verdict"])
        assert recorded.get("error_id", next(iter(ids))) in ids, (request, recorded)
    assert {"accepted", "rejected"} <= verdicts


@pytest.mark.parametrize("minor", lattice.MINORS)
def test_lattice_size_uniqueness_and_determinism(minor):
    asked = [json.dumps(request, sort_keys=True) for request in lattice.lattice(minor)]
    assert len(asked) >= 20_000 and len(set(asked)) == len(asked)
    drawn = list(lattice.random_configurations(minor, 1, 50))
    assert drawn == list(lattice.random_configurations(minor, 1, 50))
    assert drawn != list(lattice.random_configurations(minor, 2, 50))


@pytest.mark.parametrize("minor", lattice.MINORS)
def test_lattice_uses_only_fields_that_the_version_has(minor):
    used = set().union(*(request["fields"] for request in record.requests(minor)))
    assert not [name for name in used if not lattice.has(minor, [name])]
    # an unknown field would be refused with and without graphs, so the records would show it
    assert all(recorded.get("error_id") != "UNKNOWN_FIELD" for _, recorded in record.load(minor))


def test_typed_values():
    Colour = enum.Enum("Colour", "red green")
    enums = {"Colour": Colour}
    value = {"a": [{"enum": "Colour.red"}, {"tuple": [1, {"enum": "Colour.green"}]}]}
    assert protocol.decode(value, enums) == {"a": [Colour.red, (1, Colour.green)]}
    with pytest.raises(AttributeError, match="no enum Flavour"):
        protocol.decode({"enum": "Flavour.red"}, enums)
    with pytest.raises(AttributeError):
        protocol.decode({"enum": "Colour.blue"}, enums)


def test_a_worker_that_ends_early_is_an_error(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text("import sys\nprint('{}')\nsys.exit('no more')\n")
    with pytest.raises(protocol.OracleFailed, match="1 of 2 answers; it last said: no more"):
        list(protocol.ask(script, [], [{}, {}]))


def test_graph_options_are_taken_off_a_command_line():
    argv = ["--cuda-graph-impl", "local", "--bf16", "--cuda-graph-modules", "attn", "mlp", "--lr", "1"]
    assert megatron_lm_args.without_graphs(argv) == ["--bf16", "--lr", "1"]


def test_unmapped_errors_are_named_as_such():
    assert errors.identify({"type": "AssertionError", "text": "something new", "in": "f"}) == errors.UNMAPPED


class TestWheels:
    @pytest.fixture(autouse=True)
    def empty_cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("NEMO_CUDA_GRAPHS_CACHE", str(tmp_path))
        monkeypatch.setenv("NEMO_CUDA_GRAPHS_OFFLINE", "1")
        monkeypatch.delenv("CI", raising=False)

    def test_offline_and_not_cached(self):
        with pytest.raises(wheels.WheelUnavailable, match="NEMO_CUDA_GRAPHS_OFFLINE=1 forbids downloading"):
            wheels.fetch("megatron-core", "0.19.2")

    def test_tests_skip_then_but_not_in_ci(self, monkeypatch):
        with pytest.raises(pytest.skip.Exception):
            wheels.fetch_or_skip("megatron-core", "0.19.2")
        monkeypatch.setenv("CI", "true")
        with pytest.raises(pytest.fail.Exception):
            wheels.fetch_or_skip("megatron-core", "0.19.2")

    def test_a_wheel_with_another_checksum_is_not_taken(self, tmp_path):
        pin = wheels.pins()["megatron-core"]["0.19.2"]
        (tmp_path / "wheels").mkdir()
        (tmp_path / "wheels" / pin["file"]).write_bytes(b"not the wheel")
        with pytest.raises(wheels.WheelUnavailable):
            wheels.fetch("megatron-core", "0.19.2")

    def test_unknown_version(self):
        with pytest.raises(KeyError, match="not pinned"):
            wheels.fetch("megatron-core", "9.9.9")


@pytest.mark.wheels
class TestRecipes:
    def run(self, *arguments):
        """bridge_recipes in a process of its own: it changes what can be imported."""
        pytest.importorskip("torch")
        wheels.fetch_or_skip("megatron-bridge", "0.6.2")
        wheels.fetch_or_skip("megatron-core", "0.19.2")
        command = [sys.executable, str(Path(__file__).with_name("bridge_recipes.py")), *arguments]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def test_settings_of_a_known_recipe(self):
        recipe = "llama32_1b_pretrain_1gpu_h100_bf16_config"
        (answer,) = self.run("--only", "recipes/llama/h100/llama3.py", "--function", recipe)
        assert answer["status"] == "ok" and answer["from_checkpoint"]
        settings = answer["settings"]
        assert settings["model.cuda_graph_impl"] == "none"
        assert settings["model.cuda_graph_scope"] == "full"  # set by the recipe
        assert settings["model.cuda_graph_modules"] == "full"  # the class's default
        assert "cuda_graph_scope" in answer["set_by_recipe"]
        assert "cuda_graph_modules" not in answer["set_by_recipe"]
        assert settings["model.seq_length"] == 8192
