# SPDX-License-Identifier: Apache-2.0
"""Templates: what there is, what their variables may hold, the settings that go into them, and what comes out.

Values never become code. Jinja2 runs in its sandbox, a name that is not defined is an error, and a string can only be
written through a filter that quotes it for the language at hand or checks it against a narrow pattern: anything else is
refused."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from cudagraphs.formats import flags
from cudagraphs.formats.yaml_file import LOADER, yaml_text
from cudagraphs.recommend import Recommendation, recommend
from cudagraphs.recommend_automodel import recommend_automodel
from cudagraphs.rules import check
from cudagraphs.rules.base import AUTOMODEL, BRIDGE, CORE, LM, MEGATRON, Finding
from cudagraphs.rules.defaults import field_names
from cudagraphs.rules.normalize import scope_names
from cudagraphs.settings import Known, Settings, Unknown
from cudagraphs.versions import Versions

FOLDER = Path(__file__).resolve().parents[2] / "templates"
PATTERNS = {
    "name": r"[A-Za-z0-9][A-Za-z0-9_.-]*",
    # a name of its own in Python or in a shell, where some names steer the shell itself
    "variable": r"(?!(?:PATH|IFS|HOME|ENV|BASH\w*|SHELLOPTS|LD_\w+|PYTHONPATH|PS[0-4])$)[A-Za-z_][A-Za-z0-9_]*",
    "dotted": r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*",
    "clock": r"(\d{1,3}-)?\d{1,3}(:\d{2}){1,2}",
}
# What the kinds of model are, as facts.
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"num_moe_experts": None},
    "moe": {
        "num_moe_experts": 8,
        "moe_token_dispatcher_type": "alltoall",
        "moe_expert_capacity_factor": None,
        "moe_pad_expert_input_to_capacity": False,
    },
    "moe-padded": {
        "num_moe_experts": 8,
        "moe_token_dispatcher_type": "alltoall",
        "moe_expert_capacity_factor": 1.0,
        "moe_pad_expert_input_to_capacity": True,
    },
    "hybrid": {"num_moe_experts": None, "hybrid_layer_pattern": "M*M*-"},
}
# What a kind with experts says besides, where absence does not: every layer has experts, and nothing but a capacity
# per expert fixes the number of their tokens. Megatron-Core's own defaults.
EXPERTS: dict[str, Any] = {"moe_layer_freq": 1, "moe_expert_rank_capacity_factor": None, "moe_paged_stash": False}
EXPANDABLE = "expandable_segments:True"


class RenderError(ValueError):
    """A request that cannot be rendered; the text is one line with the mend."""


class Refused(RenderError):
    """Settings that the versions reject; the text says why."""


@dataclass(frozen=True)
class Variable:
    """One variable of a template: its type, what it may hold, and its default.

    by_model: other defaults for other kinds of model; None where the value must be given.
    """

    name: str
    type: str
    default: Any
    help: str
    of: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    by_model: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of_entry(name: str, entry: Mapping[str, Any]) -> Variable:
        return Variable(
            name,
            entry["type"],
            entry["default"],
            entry.get("help", ""),
            tuple(str(choice) for choice in entry.get("of", ())),
            entry.get("min"),
            entry.get("max"),
            entry.get("by_model", {}),
        )

    def domain(self) -> str:
        if self.type == "choice":
            return " | ".join(self.of)
        if self.type == "choices":
            return f"any of {', '.join(self.of)}, comma separated"
        if self.type in ("int", "float"):
            return f"{self.type} from {self.minimum} to {self.maximum}"
        return {
            "bool": "true | false",
            "name": "letters, digits and _ . -",
            "variable": "one plain name that is not the shell's own",
            "dotted": "a dotted Python path",
            "clock": "[days-]hours:minutes:seconds",
            "text": "any printable characters",
        }[self.type]

    def parse(self, value: Any) -> Any:
        """The value that a text (or one from the index) stands for. Raises RenderError for one outside the domain."""
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if any(not char.isprintable() for char in text):
            raise RenderError(
                f"{self.name}={text!r}: holds a line break or a control character; give printable characters"
            )
        text = text.strip()
        if self.type == "bool" and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if self.type == "choice" and text in self.of:
            return text
        if self.type == "choices":
            names = [name.strip() for name in text.split(",") if name.strip()]
            if all(name in self.of for name in names) and len(set(names)) == len(names):
                return names
        if self.type in ("int", "float"):
            pattern = r"[+-]?\d{1,15}" if self.type == "int" else r"[+-]?\d{0,15}(\.\d{1,15})?([eE][+-]?\d{1,2})?"
            if re.fullmatch(pattern, text) and re.search(r"\d", text):
                number = int(text) if self.type == "int" else float(text)
                if (self.minimum is None or number >= self.minimum) and (
                    self.maximum is None or number <= self.maximum
                ):
                    return number
        if self.type in PATTERNS and re.fullmatch(PATTERNS[self.type], text):
            return text
        if self.type == "text" and len(text) <= 4096:
            return text
        raise RenderError(f"{self.name}={text!r}: give {self.domain()}")


@dataclass(frozen=True)
class Template:
    """One entry of the index."""

    name: str
    what: str
    file: str
    suffix: str
    framework: str
    variables: Mapping[str, Variable]
    graphs: bool
    reads: str
    minors: tuple[int, int] | None
    impls: tuple[str, ...]
    models: tuple[str, ...]
    facts: Mapping[str, Any]

    def values(self, given: Mapping[str, str]) -> dict[str, Any]:
        """Every variable's value.

        Raises RenderError for an unknown variable, a value outside its domain, or one that has no default for the kind
        of model.
        """
        for name in given:
            if name not in self.variables:
                near = difflib.get_close_matches(name, self.variables, 1)
                hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(self.variables)}"
                raise RenderError(f"template {self.name} has no variable {name}{hint}")
        values = {name: variable.parse(given.get(name, variable.default)) for name, variable in self.variables.items()}
        model = values.get("model")
        of_model = {
            name: variable.by_model[model]
            for name, variable in self.variables.items()
            if name not in given and model in variable.by_model
        }
        missing = [name for name, default in of_model.items() if default is None]
        if missing:
            raise RenderError(
                f"template {self.name} has no default of {' and '.join(missing)} for model={model}; give "
                + " ".join(f"--set {name}=..." for name in missing)
            )
        return {**values, **{name: self.variables[name].parse(default) for name, default in of_model.items()}}


@lru_cache(maxsize=4)
def index(folder: Path = FOLDER) -> Mapping[str, Template]:
    """The templates by name."""
    document = yaml.load((folder / "index.yaml").read_text(encoding="utf-8"), Loader=LOADER)
    shared = {name: Variable.of_entry(name, entry) for name, entry in document["graph_variables"].items()}
    templates = {}
    for name, entry in document["templates"].items():
        own = {key: Variable.of_entry(key, value) for key, value in entry["variables"].items()}
        templates[name] = Template(
            name,
            entry["what"],
            entry["file"],
            entry["suffix"],
            entry["framework"],
            {**own, **(shared if entry.get("graphs") else {})},
            bool(entry.get("graphs")),
            entry.get("reads", ""),
            tuple(entry["mcore"]) if "mcore" in entry else None,
            tuple(entry.get("impls", ())),
            tuple(entry.get("models", MODELS)),
            entry.get("facts", {}),
        )
    return templates


def named(name: str, folder: Path = FOLDER) -> Template:
    """Raises RenderError for a name that no template has."""
    templates = index(folder)
    if name not in templates:
        near = difflib.get_close_matches(name, templates, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RenderError(f"no template {name!r}{hint} (there are {', '.join(templates)})")
    return templates[name]


# -- settings --------------------------------------------------------------------------------------


def base_settings(template: Template, values: Mapping[str, Any], versions: Versions) -> Settings:
    """The run that a template without a recipe is for: the kind of model and what the variables say."""
    facts: dict[str, Any] = dict(MODELS[values["model"]]) if template.graphs else {}
    if template.graphs and values["recompute"] != "none":
        facts["recompute_granularity"] = values["recompute"]
    if template.graphs and values["expandable_segments"]:
        facts["env.PYTORCH_CUDA_ALLOC_CONF"] = EXPANDABLE
    complete = template.framework in (LM, CORE, AUTOMODEL)
    known: dict[str, Any] = {name: Known(value, None, "given") for name, value in facts.items()}
    if template.framework == AUTOMODEL:
        known.update(
            {
                name: Known(value, None, "given")
                for name, value in {
                    "backend.attn": "te",
                    "backend.linear": "te",
                    "backend.rms_norm": "torch_fp32",
                    "backend.fake_balanced_gate": False,
                    "backend.cuda_graph.modules": [],
                    "backend.dispatcher": values["dispatcher"],
                    "distributed.pp_size": 1,
                    "distributed.activation_checkpointing": values["activation_checkpointing"],
                }.items()
            }
        )
    if template.framework == BRIDGE:
        if known.get("num_moe_experts") and known["num_moe_experts"].value:
            known.update({name: Known(value, None, "given") for name, value in EXPERTS.items()})
        # base recipes often set the scopes' old name; the new settings have to stand on top of whatever is there
        known["cuda_graph_scope"] = Unknown("the base recipe may set it")
        if "model_recipe" in values:
            known["harness.model_recipe_name"] = Known(values["model_recipe"], None, "given")
    reason = "" if complete else "the base recipe is not read"
    return Settings(template.framework, versions, known, template.name, "", complete, reason)


def advise(template: Template, values: Mapping[str, Any], settings: Settings) -> Recommendation:
    """The graphs for these settings.

    Raises Refused where they cannot be had, RenderError for what the version does not have.
    """
    versions = settings.versions
    if template.minors and not template.minors[0] <= versions.minor <= template.minors[1]:
        low, high = template.minors
        raise RenderError(
            f"template {template.name} is for megatron-core 0.{low} to 0.{high}, not 0.{versions.minor}; give --mcore"
        )
    if values["model"] not in template.models:
        raise RenderError(f"template {template.name} is for model={' | '.join(template.models)}, not {values['model']}")
    impl = None if values["impl"] == "recommended" else values["impl"]
    if impl is None and template.impls:
        impl = template.impls[0]
    if template.impls and impl not in template.impls:
        raise RenderError(f"template {template.name} is for {', '.join(template.impls)}, not impl={impl}")
    preset = None if values["preset"] == "default" else values["preset"]
    scopes = values["scopes"] or None
    try:
        if settings.framework == AUTOMODEL:
            unknown = [name for name in scopes or () if name not in ("attn", "te_dpa", "moe_router", "moe_preprocess")]
            if unknown:
                raise RenderError(f"scopes={','.join(unknown)}: AutoModel has attn, te_dpa, moe_router, moe_preprocess")
            advice = recommend_automodel(settings, preset, impl, scopes)
        else:
            unknown = [name for name in scopes or () if name not in scope_names(versions.minor)]
            if unknown:
                raise RenderError(
                    f"scopes={','.join(unknown)}: megatron-core 0.{versions.minor} has "
                    f"{', '.join(scope_names(versions.minor))}"
                )
            advice = recommend(settings, preset, impl, scopes, values["warmup_steps"])
    except RenderError:
        raise
    except ValueError as error:
        raise RenderError(str(error)) from None
    if advice.refused:
        raise Refused(advice.refused)
    if advice.impl == "none" and impl is None:
        raise Refused(advice.reasons[-1])
    if template.impls and advice.impl not in template.impls:
        raise Refused(
            f"template {template.name} is for {', '.join(template.impls)}, and the recommendation is "
            f"{advice.impl}: {advice.reasons[-1]}"
        )
    return advice


def context(
    template: Template, values: Mapping[str, Any], settings: Settings, advice: Recommendation | None
) -> dict[str, Any]:
    """What a template sees: its variables, and the settings in each of the ways in which they are written."""
    minor = settings.versions.minor
    seen: dict[str, Any] = {**values, "minor": minor, "summary": f"{template.what}"}
    if advice is None:
        return seen
    overrides = dict(advice.overrides)
    exports = {name[4:]: value for name, value in overrides.items() if name.startswith("env.")}
    exports.update(advice.exports)
    if values["expandable_segments"]:
        exports.setdefault("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE)
    overrides = {name: value for name, value in overrides.items() if not name.startswith("env.")}
    scopes = " ".join(advice.modules) or ("whole iteration" if advice.impl == "full_iteration" else "whole layers")
    captured = "no CUDA graphs" if advice.impl == "none" else f"CUDA graphs: {advice.impl}, {scopes}"
    if settings.framework == AUTOMODEL:
        seen["summary"] = f"{captured}, for NeMo AutoModel"
        seen["modules"] = overrides["backend.cuda_graph.modules"]
        backend = {"attn": "te", "dispatcher": values["dispatcher"]}
        backend.update(
            {
                name[8:]: value
                for name, value in overrides.items()
                if name.startswith("backend.") and "cuda_graph" not in name
            }
        )
        seen["backend"] = list(backend.items())
        return seen
    seen["summary"] = f"{captured}, for megatron-core 0.{minor}"
    if str(values.get("script", "")).endswith("setup_experiment.py") and exports:
        # this entry point runs on a login node and hands the environment on to the job
        rows = [["--custom_env_vars", ",".join(f"{name}={value}" for name, value in sorted(exports.items()))]]
        exports = {}
    else:
        rows = []
    seen["exports"] = sorted(exports.items())
    seen["settings"] = [
        (flags.override_path(name, settings.versions), value) for name, value in _in_version(overrides, minor)
    ]
    seen["hydra"] = [f"{path}={flags.hydra_text(value)}" for path, value in seen["settings"]]
    config = {**_model_config(values), **overrides} if settings.framework == CORE else overrides
    seen["config"] = [
        (name, value) for name, value in _in_version(config, minor) if name in field_names(minor) and value is not None
    ]
    seen["arguments"] = [*rows, *_arguments(template, overrides, settings)]
    seen["more"] = shlex_split(values.get("arguments", ""))
    seen["use"] = f'"${{{values["array"]}[@]}}"' if "array" in values else ""
    return seen


def _model_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of TransformerConfig that make the kind of model and the recompute of a loop."""
    config = dict(MODELS[values["model"]])
    if config["num_moe_experts"]:
        config["moe_router_topk"] = 2
    if values["recompute"] != "none":
        config["recompute_granularity"] = values["recompute"]
    if values["recompute"] == "full":
        config.update({"recompute_method": "uniform", "recompute_num_layers": 1})
    return config


def shlex_split(text: str) -> list[str]:
    """The words of a text as a shell splits them. Raises RenderError for an open quote."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise RenderError(f"arguments={text!r}: {error}") from None


def _in_version(overrides: Mapping[str, Any], minor: int) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in overrides.items() if "." in name or name in field_names(minor)]


def _arguments(template: Template, overrides: Mapping[str, Any], settings: Settings) -> list[list[str]]:
    """Options as rows of words."""
    if settings.framework == CORE:
        return []
    dialect = flags.MegatronLM(settings.versions) if settings.framework == LM else flags.Harness(settings.versions)
    changes, skipped = dialect.changes(overrides, settings.facts)
    if skipped and settings.framework == BRIDGE and template.reads == "script":
        raise Refused("; ".join(f"{name}: {reason}" for name, reason in skipped.items()))
    rows = []
    for change in changes:
        if change.override:
            rows.append([f"{change.name}={change.values[0]}"])
        elif not change.remove:
            rows.append([f"--{change.name}", *change.values])
    return rows


# -- rendering -------------------------------------------------------------------------------------


class Code(str):
    """Text that a filter has made safe for the language of the template."""


def _python(value: Any) -> Code:
    from cudagraphs.formats.python_recipe import literal

    return Code(literal(value))


def _shell(value: Any) -> Code:
    text = str(value)
    return Code(text if re.fullmatch(r"[\w./:,=@%+-]+", text, re.ASCII) else shlex.quote(text))


def _words(values: Any) -> Code:
    return Code(" ".join(_shell(value) for value in values))


def _yaml(value: Any) -> Code:
    return Code(yaml_text(value))


def _line(value: Any) -> Code:
    """Text for a comment or a docstring: one line, without what would end either."""
    text = str(value)
    if any(not char.isprintable() for char in text) or '"""' in text or "\\" in text:
        raise RenderError(f"{text!r} does not fit into one line of a comment")
    return Code(text)


def _path(value: Any) -> Code:
    if not re.fullmatch(PATTERNS["dotted"], str(value)):
        raise RenderError(f"{value!r} is not a dotted path")
    return Code(value)


def _module(value: Any) -> Code:
    module, _, _ = _path(value).rpartition(".")
    if not module:
        raise RenderError(f"{value!r} names no module; give module.function")
    return Code(module)


def _member(value: Any) -> Code:
    """The last name of a dotted path; of Python's own words none may be one."""
    import keyword

    name = _path(value).rpartition(".")[2]
    if keyword.iskeyword(name):
        raise RenderError(f"{name!r} is a keyword of Python; give another name")
    return Code(name)


def _plain_only(function: Callable[[Any], Code]) -> Callable[[Any], Code]:
    """A filter that takes plain data only: no undefined name, and no object that a template got hold of."""

    def checked(value: Any) -> Code:
        _check_plain(value)
        return function(value)

    return checked


def _check_plain(value: Any) -> None:
    from jinja2 import Undefined

    if isinstance(value, Undefined):
        str(value)  # a strict undefined name raises here, with its name
        raise RenderError("a template reads a name that is not defined")
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_plain(item)
    elif not isinstance(value, (str, int, float, bool, type(None))):
        raise RenderError(
            f"a template writes {type(value).__name__}, which is no plain value; this is a fault of the template"
        )


def _finalize(value: Any) -> Any:
    if isinstance(value, Code):
        return value
    raise RenderError(f"a template writes {value!r} without quoting it; this is a fault of the template")


@lru_cache(maxsize=4)
def _environment(folder: Path) -> Any:
    from jinja2 import FileSystemLoader, StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        finalize=_finalize,
        keep_trailing_newline=True,
        autoescape=False,
    )
    filters = {
        "py": _python,
        "sh": _shell,
        "shwords": _words,
        "yaml": _yaml,
        "line": _line,
        "path": _path,
        "module": _module,
        "member": _member,
    }
    environment.filters = {name: _plain_only(function) for name, function in filters.items()}
    return environment


def render(template: Template, seen: Mapping[str, Any], folder: Path = FOLDER) -> str:
    """The text. Raises RenderError where a template reads a name that is not defined, or a value does not fit its
    place.
    """
    from jinja2 import TemplateError

    try:
        return _environment(folder).get_template(template.file).render(**seen)
    except TemplateError as error:
        raise RenderError(f"template {template.name}: {error}") from None


def judge(template: Template, text: str, settings: Settings, seen: Mapping[str, Any]) -> list[Finding]:
    """What the rules say to the rendered text, read back as a user's file would be.

    The kind of model is taken as given: a snippet does not say it.
    """
    if template.facts:
        facts = {
            name: seen[value[1:]] if isinstance(value, str) and value.startswith("$") else value
            for name, value in template.facts.items()
        }
        return check(settings.with_values(facts))
    without_settings = template.reads in ("script", "arguments") and not seen["arguments"] and not seen["settings"]
    if not template.reads or without_settings:
        return []
    import tempfile

    from cudagraphs.formats import open_recipe

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"rendered{template.suffix}"
        path.write_text(text, encoding="utf-8")
        recipe = open_recipe(path, settings.versions, AUTOMODEL if template.reads == "automodel" else None)
        findings = []
        for name in recipe.candidates():
            run = recipe.run(name).settings
            given = {
                fact: known.value
                for fact, known in settings.facts.items()
                if isinstance(known, Known) and known.how == "given"
            }
            given.update({f"env.{variable}": value for variable, value in seen["exports"]} if "exports" in seen else {})
            given = {
                fact: value
                for fact, value in given.items()
                if fact not in run.facts or fact in MODELS.get(seen.get("model", ""), {})
            }
            if settings.framework in MEGATRON:
                findings += check(run.with_values(given))
            else:
                findings += check(run)
        return findings


def check_syntax(template: Template, text: str) -> None:
    """Parse the text in its language. Raises RenderError where it does not parse: a fault of the template."""
    import ast
    import subprocess

    try:
        if template.suffix == ".py":
            ast.parse(text)
        elif template.suffix == ".yaml":
            yaml.safe_load(text)
        elif template.suffix == ".sh":
            done = subprocess.run(["bash", "-n"], input=text.encode(), capture_output=True, timeout=20)
            if done.returncode:
                raise RenderError(done.stderr.decode(errors="replace").strip().splitlines()[0])
    except FileNotFoundError:
        pass  # no bash here
    except (SyntaxError, yaml.YAMLError) as error:
        raise RenderError(
            f"template {template.name}: the rendered text does not parse ({str(error).splitlines()[0]})"
        ) from None
