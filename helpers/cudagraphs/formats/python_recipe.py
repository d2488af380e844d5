# SPDX-License-Identifier: Apache-2.0
"""Python recipes: which functions of a file build a configuration, what each settles, and how to write settings into
one."""

from __future__ import annotations

import ast
import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudagraphs.formats import bridge
from cudagraphs.formats.interpreter import Interpreter
from cudagraphs.formats.modules import Modules
from cudagraphs.formats.source import SourceError, Splice, TextFile, load, parse_python
from cudagraphs.formats.state import Entry, called_name
from cudagraphs.formats.values import Object, Site, UnknownValue
from cudagraphs.rules.defaults import FIELDS, field_names
from cudagraphs.settings import Choice, Fact, Known, Settings
from cudagraphs.versions import Versions

SCRIPT = "<script>"
# Functions that take a finished configuration to training; a script's settings are those at the first such call.
CONSUMERS = frozenset({"pretrain", "finetune", "train", "run_training", "launch", "forward_step_loop"})
# Megatron-Core's models; a function that builds one has its configuration at that call.
MODEL_CLASSES = frozenset({"GPTModel", "MambaModel", "HybridModel", "T5Model", "BertModel", "LLaVAModel"})
CONFIG_CLASSES = ("ConfigContainer", "TransformerConfig", "MLATransformerConfig", "Provider")


class RecipeError(SourceError):
    """The file holds no recipe that can be worked on; the text is one line with the mend."""


@dataclass
class Run:
    """One recipe function, interpreted."""

    name: str
    node: ast.FunctionDef | ast.Module
    interpreter: Interpreter
    entry: Entry
    settings: Settings
    kind: str

    @property
    def config(self) -> Any:
        return self.entry.value


class PythonRecipe:
    """A recipe file. Reading never executes it."""

    format = "python"

    def __init__(
        self,
        path: Path,
        versions: Versions,
        roots: list[Path] = (),
        file: TextFile | None = None,
        modules: Modules | None = None,
    ):
        self.path, self.versions, self.roots = path, versions, list(roots)
        self.file = file or load(path)
        self.tree = parse_python(self.file)
        if not self.tree.body:
            raise RecipeError(f"{path}: is empty; name a Python recipe that builds a configuration")
        self.modules = modules or Modules(path, self.roots)
        self.module = self.modules.main(self.file, self.tree)
        self.classes = bridge.BridgeClasses(versions)
        self.intrinsics = bridge.intrinsics(versions)
        self._runs: dict[str, Run] = {}

    # -- which functions -----------------------------------------------------------------------------------------------

    def functions(self) -> dict[str, ast.FunctionDef]:
        return {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}

    def candidates(self) -> list[str]:
        """Names of the functions that look like recipes, in file order; `<script>` for a file that builds one at top
        level."""
        public = {name: node for name, node in self.functions().items() if not name.startswith("_")}
        names = [name for name, node in public.items() if looks_like_recipe(node) or self._gives_configuration(name, node)]
        # a recipe is called without arguments; what needs some is a helper, unless the file has nothing else
        names = [name for name in names if not _required_arguments(public[name])] or names
        if not names:
            names = [
                name for name, node in public.items() if any(_calls(CONSUMERS, statement) for statement in node.body)
            ]
        own = [node for node in self.tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        if not names and any(_touches_configuration(node) or _calls(CONSUMERS, node) for node in own):
            names.append(SCRIPT)
        return names

    def _gives_configuration(self, name: str, node: ast.FunctionDef) -> bool:
        """Whether an undeclared function, called without arguments, returns a configuration: only following it tells."""
        returns = [n.value for n in _own_statements(node) if isinstance(n, ast.Return)]
        if node.returns is not None or _required_arguments(node) or not any(isinstance(v, (ast.Name, ast.Call)) for v in returns):
            return False
        try:
            self.run(name)
        except RecipeError:
            return False
        return True

    def select(self, patterns: list[str], everything: bool = False) -> list[str]:
        """The functions that `--function` (names or globs) or `--all` picks; the only candidate where neither is given.

        Raises RecipeError where nothing matches, or where several candidates are there and nothing picks among them.
        """
        candidates = self.candidates()
        if patterns:
            # a glob picks among recipes; a name picks any function
            exact = [name for name in (*self.functions(), SCRIPT) if name in patterns]
            known = [*candidates, *(name for name in exact if name not in candidates)]
            chosen = [name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
            for pattern in patterns:
                if not fnmatch.filter(known, pattern):
                    listed = ", ".join(candidates) or "none"
                    raise RecipeError(
                        f"{self.path}: no function matches --function {pattern!r}; recipe functions here: {listed}"
                    )
            return chosen
        if not candidates:
            raise RecipeError(
                f"{self.path}: no recipe function found; a recipe function returns a ConfigContainer, a model provider "
                "or a TransformerConfig (name it with --function if it has another shape)"
            )
        if len(candidates) > 1 and not everything:
            listed = "\n".join(f"  {name}" for name in candidates)
            raise RecipeError(
                f"{self.path}: {len(candidates)} recipe functions; pick with --function NAME "
                f"(repeatable, globs allowed) or --all:\n{listed}"
            )
        return candidates

    # -- reading -------------------------------------------------------------------------------------------------------

    def run(self, name: str) -> Run:
        """Interpret one function. Raises RecipeError where it gives no configuration that can be followed."""
        if name not in self._runs:
            self._runs[name] = self._interpret(name)
        return self._runs[name]

    def _interpret(self, name: str) -> Run:
        node: ast.FunctionDef | ast.Module = self.tree if name == SCRIPT else self.functions()[name]
        interpreter, entry = self._entry(node, CONSUMERS if name == SCRIPT else frozenset())
        if name == SCRIPT and not bridge.config_kind(entry.value):
            found = [v for v in entry.frame.locals.values() if bridge.config_kind(v)]
            entry.value = found[-1] if found else entry.value
        elif not bridge.config_kind(entry.value):
            # not what it returns, but what it hands on to training or to a model
            again = self._entry(node, CONSUMERS | MODEL_CLASSES)
            interpreter, entry = again if again[1].consumed_by is not None else (interpreter, entry)
        kind = bridge.config_kind(entry.value)
        if not kind:
            why = f" ({entry.value.reason})" if isinstance(entry.value, UnknownValue) else ""
            line = getattr(node, "lineno", 1)
            raise RecipeError(
                f"{self.path}:{line}: {name} returns no configuration that can be followed{why}; "
                "return the ConfigContainer, provider or TransformerConfig itself"
            )
        facts = bridge.facts_of(interpreter, entry.value, self.classes)
        model = interpreter.attribute(entry.value, "model") if kind == "container" else entry.value
        reasons = [o.open_reason for value in (model, entry.value) for o in bridge._objects(value) if o.open_reason]
        if isinstance(model, UnknownValue):
            reasons.append(model.reason)
        framework = "megatron-bridge" if kind == "container" or self._imports_bridge() else "megatron-core"
        settings = Settings(
            framework,
            self.versions,
            facts,
            name,
            str(self.path),
            complete=not reasons,
            incomplete_reason=reasons[0] if reasons else "",
        )
        return Run(name, node, interpreter, entry, settings, kind)

    def _entry(self, node: ast.FunctionDef | ast.Module, consumers: frozenset[str]) -> tuple[Interpreter, Entry]:
        interpreter = Interpreter(self.modules, self.intrinsics, self.classes, consumers)
        if isinstance(node, ast.Module):
            return interpreter, interpreter.run_script(self.module)
        return interpreter, interpreter.run_function(self.module, node)

    def _imports_bridge(self) -> bool:
        return any(
            isinstance(n, ast.ImportFrom) and (n.module or "").startswith("megatron.bridge")
            for n in ast.walk(self.tree)
        )

    def built_on(self, name: str) -> list[str]:
        """Other functions of this file that call `name`, so that a change to it changes them too."""
        users = []
        for other, node in self.functions().items():
            start, end = self.file.span(node)
            if other == name or name.encode() not in self.file.utf8[start:end]:
                continue
            if any(isinstance(n, ast.Call) and getattr(n.func, "id", "") == name for n in ast.walk(node)):
                users.append(other)
        return users

    # -- writing -------------------------------------------------------------------------------------------------------

    def with_version_names(self, name: str) -> tuple[PythonRecipe, dict[str, str]]:
        """The recipe with graph settings that another version's name was given to under this version's name.

        Renames (old name -> new name) are done where the setting stands in the function itself: cuda_graph_modules
        becomes cuda_graph_scope before 0.18, cuda_graph_impl the legacy flag that means the same before 0.15. What a base
        recipe sets stays, and CG016 says so.
        """
        run = self.run(name)
        has = field_names(self.versions.minor)
        models = [config for config in bridge._objects(run.config)]
        if run.kind == "container":
            models = [m for config in models for m in bridge._objects(run.interpreter.attribute(config, "model"))]
        splices: dict[tuple[int, int], Splice] = {}
        renames: dict[str, str] = {}
        for model in models:
            for old, slot in model.slots.items():
                if old not in RENAMES or old in has or slot.site is None:
                    continue
                if not _Writer(self, run, set())._editable(slot.site):
                    continue
                new, value = RENAMES[old](slot.value)
                if new not in has:
                    continue
                spans = _name_span(self.file, slot.site, old)
                if spans is None:
                    continue
                renames[old] = new
                beside = model.slots.get(new)
                if beside is not None and beside.site is not None and _Writer(self, run, set())._editable(beside.site):
                    # both names are assigned: the one that stays takes the value, the other's line goes
                    at, line = self.file.span(beside.site.value), _own_line(self.file, slot.site)
                    splices[at] = Splice(*at, literal(bridge._plain(slot.value) if value is None else value))
                    if line is not None:
                        splices[line] = Splice(*line, "")
                        continue
                splices[spans] = Splice(*spans, new)
                if value is not None:
                    at = self.file.span(slot.site.value)
                    splices[at] = Splice(*at, literal(value))
        return (self._spliced(list(splices.values())), renames) if splices else (self, {})

    def _spliced(self, splices: list[Splice]) -> PythonRecipe:
        raw = self.file.spliced(splices)
        text = raw[len(self.file.bom) :].decode(self.file.encoding)
        file = TextFile(self.path, raw, self.file.encoding, self.file.bom, text)
        return PythonRecipe(self.path, self.versions, self.roots, file, self.modules.copy())

    def edited(self, name: str, overrides: Mapping[str, Any]) -> tuple[PythonRecipe, dict[str, str]]:
        """The recipe with `overrides` (fact name -> value) in effect, and what could not be written here with the
        reason.

        An assignment that already stands in the function is changed in place; what is missing, or does not win from
        there, is set right before the function returns. The result is interpreted again, so what is returned really
        holds the values.
        Raises RecipeError if that does not work out.
        """
        at_end: set[str] = set()
        touched = set()
        for _ in range(4):
            recipe, skipped = self._with_edits(name, overrides, at_end, touched)
            facts = recipe.run(name).settings.facts
            missed = {
                key for key, value in overrides.items() if key not in skipped and not holds(facts.get(key), value)
            }
            besides = changed_besides(self.run(name).settings.facts, facts, overrides)
            if not missed and not besides:
                return recipe, skipped
            if not missed and at_end >= touched:
                raise RecipeError(
                    f"{self.path}: {name}: the edit would change {', '.join(besides)} as well, which reads what is edited; "
                    "set it by hand"
                )
            # something later in the function, or a helper that it calls, changes these again, or other settings follow
            # what stands there: set them last
            at_end |= (missed & touched) or touched
            touched |= missed
        raise RecipeError(
            f"{self.path}: {name}: cannot make {', '.join(sorted(missed) or besides)} take effect; "
            "set it by hand after the last change to it"
        )

    def _with_edits(
        self, name: str, overrides: Mapping[str, Any], at_end: set[str], touched: set[str]
    ) -> tuple[PythonRecipe, dict[str, str]]:
        """One attempt: this recipe with the missing overrides written, those in `at_end` as the function's last
        statements.

        `touched` names facts that an earlier attempt found missing although they held before; it is extended by what is
        written.
        """
        run = self.run(name)
        wanted = {k: v for k, v in overrides.items() if k in touched or not holds(run.settings.facts.get(k), v)}
        touched |= set(wanted)
        if not wanted:
            return self, {}
        writer = _Writer(self, run, at_end)
        splices = writer.splices(wanted)
        if not splices:
            return self, writer.skipped
        return self._spliced(splices), writer.skipped


# What follows the graph settings by upstream's own rules, and what only reading derives.
FOLLOWING = ("cuda_graph", "enable_cuda_graph", "external_cuda_graph", "inference_cuda_graph", "use_te_rng", "model.use_te_rng", "history.")


def changed_besides(before: Mapping[str, Fact], after: Mapping[str, Fact], overrides: Mapping[str, Any]) -> list[str]:
    """Facts that were known and are other now, although nobody asked for it."""
    changed = []
    for name, old in before.items():
        if name in overrides or name.startswith(FOLLOWING) or name == "rng.te_rng_tracker" or not isinstance(old, Known):
            continue
        if not isinstance(old.value, (bool, int, float, str, list, dict, type(None))):
            continue  # functions and the like: two readings never give the same one
        new = after.get(name)
        if not isinstance(new, Known) or new.value != old.value or type(new.value) is not type(old.value):
            changed.append(name)
    return changed


def looks_like_recipe(node: ast.FunctionDef) -> bool:
    """Whether a function returns something and is declared, named or written like one that builds a configuration."""
    returns = [n for n in _own_statements(node) if isinstance(n, ast.Return) and n.value is not None]
    if not returns:
        return False
    if node.returns is not None:
        annotation = ast.unparse(node.returns)
        return any(name in annotation for name in CONFIG_CLASSES)
    if node.name.endswith(("_config", "_recipe", "_provider")) or node.name in ("config", "recipe"):
        return True
    return any(_touches_configuration(statement) for statement in node.body)


def _required_arguments(node: ast.FunctionDef) -> bool:
    given = node.args
    positional = len(given.posonlyargs) + len(given.args)
    return positional > len(given.defaults) or None in given.kw_defaults


def _calls(names: frozenset[str], node: ast.stmt) -> bool:
    return any(isinstance(inner, ast.Call) and called_name(inner) in names for inner in ast.walk(node))


def _touches_configuration(node: ast.stmt) -> bool:
    """Whether a statement builds a configuration, or sets something on the model of one."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            if called_name(inner) in (
                "ConfigContainer",
                "TransformerConfig",
                "MLATransformerConfig",
                "to_megatron_provider",
            ):
                return True
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            if isinstance(inner.value, ast.Attribute) and inner.value.attr == "model":
                return True
    return False


def _own_statements(node: ast.FunctionDef | ast.Module) -> Iterator[ast.stmt]:
    """Statements of a function in file order, without those of functions and classes nested in it."""
    stack: list[ast.stmt] = list(reversed(node.body))
    while stack:
        statement = stack.pop()
        yield statement
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        inner: list[ast.stmt] = []
        for block in ("body", "handlers", "cases", "orelse", "finalbody"):
            for child in getattr(statement, block, ()):
                inner += [child] if isinstance(child, ast.stmt) else child.body
        stack.extend(reversed(inner))


def holds(fact: Fact | None, value: Any) -> bool:
    """Whether a fact is known to hold the value, whichever way its branches go."""
    if isinstance(fact, Choice):
        return holds(fact.if_true, value) and holds(fact.if_false, value)
    if not isinstance(fact, Known):
        return False
    have = list(fact.value) if isinstance(fact.value, (list, tuple)) else fact.value
    want = list(value) if isinstance(value, (list, tuple)) else value
    if isinstance(have, bool) != isinstance(want, bool):
        return False
    return have == want


def literal(value: Any) -> str:
    """Python source of a setting's value."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(literal(item) for item in value) + "]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
        return f'"{escaped}"'
    return repr(value)


def _legacy_flag(impl: Any) -> tuple[str, Any]:
    """The flag of 0.13 and 0.14 that means this implementation, and its value."""
    return ("external_cuda_graph", True) if impl == "transformer_engine" else ("enable_cuda_graph", impl == "local")


# Setting that a version does not have -> (name that it has instead, another value or None for the same).
RENAMES: dict[str, Callable[[Any], tuple[str, Any]]] = {
    "cuda_graph_modules": lambda value: ("cuda_graph_scope", None),
    "cuda_graph_impl": _legacy_flag,
}


def _name_span(file: TextFile, site: Site, name: str) -> tuple[int, int] | None:
    """The byte span of the setting's name in its assignment or keyword; None where the name is not plain text there."""
    end = file.span(site.value)[0]
    start = file.span(site.call)[0] if site.call is not None else file.span(site.node)[0]
    at = file.utf8.rfind(name.encode(), start, end)
    return None if at < 0 else (at, at + len(name))


def _own_line(file: TextFile, site: Site) -> tuple[int, int] | None:
    """The byte span of the assignment's lines, line end included; None where it shares them with other code."""
    node = site.node
    if site.call is not None or not isinstance(node, ast.Assign) or node.end_lineno >= len(file.line_starts):
        return None
    start, end = file.line_starts[node.lineno - 1], file.line_starts[node.end_lineno]
    before, after = file.utf8[start : file.span(node)[0]], file.utf8[file.span(node)[1] : end]
    alone = not before.strip() and (not after.strip() or after.strip().startswith(b"#"))
    return (start, end) if alone else None


class _Writer:
    """The splices that put settings into one function of one recipe. `at_end` names facts that an edit in place did not
    mend."""

    def __init__(self, recipe: PythonRecipe, run: Run, at_end: set[str]):
        self.recipe, self.run, self.at_end = recipe, run, at_end
        self.file = recipe.file
        self.skipped: dict[str, str] = {}

    def splices(self, wanted: Mapping[str, Any]) -> list[Splice]:
        splices: list[Splice] = []
        last: list[tuple[str, str]] = []
        beside: list[tuple[str, str]] = []
        new_keys: list[tuple[ast.Dict, str, Any]] = []
        anchor = self._anchor()
        for fact, value in wanted.items():
            added = last if anchor is None or fact in self.at_end else beside
            if fact.startswith("env."):
                self._environment(fact[4:], value, splices, new_keys, last)
            else:
                self._attribute(fact, value, splices, added)
        if new_keys:
            splices.append(self._into_mapping(new_keys))
        if beside and anchor is not None:
            root, statement = anchor
            newline, indent = self.file.newline, self.file.indent(statement.lineno)
            end = self._end_of_line(statement)
            splices.append(Splice(end, end, "".join(newline + indent + line for line in self._lines(beside, root))))
        if last:
            splices += self._before_returns(last)
        return splices

    def _anchor(self) -> tuple[str, ast.stmt] | None:
        """The last graph setting that stands in the function's own body, on a line of its own: others go right below
        it."""
        node = self.run.node
        returned = {
            s.value.id for s in _own_statements(node) if isinstance(s, ast.Return) and isinstance(s.value, ast.Name)
        }
        if isinstance(node, ast.Module) or len(returned) != 1:
            return None
        (root,) = returned
        prefix = f"{root}.model.cuda_graph_" if self.run.kind == "container" else f"{root}.cuda_graph_"
        found = [
            statement
            for statement in node.body
            if isinstance(statement, ast.Assign)
            and len(statement.targets) == 1
            and isinstance(statement.targets[0], ast.Attribute)
            and ast.unparse(statement.targets[0]).startswith(prefix)
            and self._alone_on_its_lines(statement)
        ]
        return (root, found[-1]) if found else None

    def _alone_on_its_lines(self, statement: ast.stmt) -> bool:
        """Whether nothing else stands on the statement's first line before it, nor on its last line but a comment."""
        before = self.file.line(statement.lineno).encode("utf-8")[: statement.col_offset]
        after = self.file.line(statement.end_lineno).encode("utf-8")[statement.end_col_offset :].strip()
        return not before.strip() and (not after or after.startswith(b"#"))

    def _end_of_line(self, statement: ast.stmt) -> int:
        """The byte offset behind the statement and a comment that follows it on its line."""
        line = self.file.line(statement.end_lineno)
        return self.file.line_starts[statement.end_lineno - 1] + len(line.encode("utf-8"))

    def _attribute(self, fact: str, value: Any, splices: list[Splice], appended: list[tuple[str, str]]) -> None:
        owner, path = self._owner(fact)
        if owner is None:
            self.skipped[fact] = path
            return
        name = path.rpartition(".")[2]
        slot = owner.slots.get(name) if isinstance(owner, Object) else None
        site = slot.site if slot is not None else None
        if site is not None and fact not in self.at_end and self._editable(site):
            start, end = self.file.span(site.value)
            splices.append(Splice(start, end, literal(value)))
        else:
            appended.append((path, literal(value)))

    def _owner(self, fact: str) -> tuple[Object | None, str]:
        """The object that holds a fact and the path to it from the configuration; (None, reason) where there is none
        here."""
        run, container = self.run, self.run.kind == "container"
        config = run.config if isinstance(run.config, Object) else None
        section, _, name = fact.rpartition(".")
        if fact in FIELDS or section in ("", "model"):
            name = fact.rpartition(".")[2]
            if not container:
                return config or Object(""), name
            section = "model"
        elif not container:
            return (
                None,
                f"this recipe builds only the model's configuration; set {fact} where the training loop is configured",
            )
        if (
            name in (*bridge.OVERLAP_TO_MODEL, *bridge.OVERLAP_TO_DDP, "overlap_param_gather_with_optimizer_step")
            and config is not None
        ):
            overlap = run.interpreter.attribute(config, "comm_overlap")
            if (
                isinstance(overlap, Object)
                and overlap.slots.get(name) is not None
                and overlap.slots[name].value is not None
            ):
                return overlap, f"comm_overlap.{name}"
        if name in bridge.PRECISION_TO_DDP and section == "ddp":
            return None, "it follows the mixed precision configuration"
        owner: Any = config or Object("")
        for part in section.split("."):
            owner = run.interpreter.attribute(owner, part) if config is not None else Object("")
            if owner is None:
                return None, f"{section} is None in this recipe"
        return (owner if isinstance(owner, Object) else Object("")), f"{section}.{name}"

    def _editable(self, site: Site) -> bool:
        """Whether the value can be changed where it stands: in this very function, on every path, one target, a plain
        span."""
        if site.frame != 0 or site.conditional or site.value is None or site.module is not self.recipe.module:
            return False
        return site.call is None or site.module is self.recipe.module

    def _environment(self, name: str, value: Any, splices: list[Splice], new_keys: list, appended: list) -> None:
        config = self.run.config
        variables = (
            self.run.interpreter.attribute(config, "env_vars")
            if self.run.kind == "container" and isinstance(config, Object)
            else None
        )
        if not isinstance(variables, Object) or (not variables.slots and variables.call is None):
            self.skipped[f"env.{name}"] = "the recipe has no env_vars block"
            return
        plain = int(value) if isinstance(value, str) and value.lstrip("-").isdigit() else value
        slot = variables.slots.get(name)
        if (
            slot is not None
            and slot.site is not None
            and self._editable(slot.site)
            and f"env.{name}" not in self.at_end
        ):
            start, end = self.file.span(slot.site.value)
            splices.append(Splice(start, end, literal(plain)))
        elif (
            isinstance(variables.call, ast.Dict)
            and variables.frame == 0
            and variables.module is self.recipe.module
            and f"env.{name}" not in self.at_end
        ):
            new_keys.append((variables.call, name, plain))
        else:
            # a new mapping: the old one may be shared with other recipes
            appended.append(("env_vars", f"{{**{{root}}.env_vars, {literal(name)}: {literal(plain)}}}"))

    def _behind_brackets(self, at: int, end: int) -> int:
        """The byte offset behind the closing brackets that belong to a value ending at `at`: `("text")` ends with one."""
        inside, position = self.file.utf8, at
        while position < end:
            if inside[position : position + 1] in b" \t\r\n\f\\":
                position += 1
            elif inside[position : position + 1] == b"#":
                line_end = inside.find(b"\n", position, end)
                position = end if line_end < 0 else line_end
            elif inside[position : position + 1] == b")":
                position += 1
                at = position
            else:
                break
        return at

    def _into_mapping(self, new_keys: list) -> Splice:
        """New entries at the end of a dictionary display, one a line where the display has one entry a line."""
        node = new_keys[0][0]
        start, end = self.file.span(node)
        body = self.file.utf8[start:end].decode("utf-8")
        entries = [f"{literal(name)}: {literal(value)}" for _, name, value in new_keys]
        if not node.values:
            return Splice(start, end, "{" + ", ".join(entries) + "}")
        last_end = self._behind_brackets(self.file.span(node.values[-1])[1], end - 1)
        tail = self.file.utf8[last_end:end].decode("utf-8")
        has_comma = any(
            line.split("#")[0].strip().startswith(",") for line in tail[:-1].splitlines() if line.split("#")[0].strip()
        )
        if "\n" not in body and "\r" not in body:
            glue = " " if has_comma and tail[:-1].strip() == "," else ", "
            at = end - 1
            return Splice(at, at, (glue if not has_comma else " ") + ", ".join(entries))
        newline = self.file.newline
        key_node = next((key for key in reversed(node.keys) if key is not None), None)
        line = key_node.lineno if key_node is not None else node.values[-1].lineno
        indent = self.file.indent(line)
        brace_line = self.file.line_starts[node.end_lineno - 1]
        if self.file.utf8[brace_line : end - 1].strip() == b"":
            lines = "".join(f"{indent}{entry},{newline}" for entry in entries)
            if has_comma:
                return Splice(brace_line, brace_line, lines)
            return Splice(last_end, brace_line, "," + self.file.utf8[last_end:brace_line].decode("utf-8") + lines)
        return Splice(last_end, last_end, "".join(f",{newline}{indent}{entry}" for entry in entries))

    def _before_returns(self, appended: list[tuple[str, str]]) -> list[Splice]:
        newline = self.file.newline
        node = self.run.node
        if isinstance(node, ast.Module) or self.run.entry.consumed_by is not None:
            return [self._before_consumer(appended)]
        start, end = self.file.span(node)
        comment = [] if b"# CUDA graphs\n" in self.file.utf8[start:end].replace(b"\r", b"") else ["# CUDA graphs"]
        splices = []
        for statement in _own_statements(node):
            if not isinstance(statement, ast.Return) or statement.value is None or _is_none(statement.value):
                continue
            indent = self.file.indent(statement.lineno)
            if self.file.offset(statement.lineno, statement.col_offset) != self.file.line_starts[
                statement.lineno - 1
            ] + len(indent.encode()):
                raise RecipeError(
                    f"{self.recipe.path}:{statement.lineno}: the return shares its line with other code; "
                    "put it on a line of its own"
                )
            start, end = self.file.span(statement)
            if isinstance(statement.value, ast.Name):
                lines = [*comment, *self._lines(appended, statement.value.id)]
                splices.append(Splice(start, start, "".join(line + newline + indent for line in lines)))
            else:
                # `return (` keeps its brackets: only the keyword is replaced
                root = self._free_name(node)
                after = self.file.utf8[start + len("return") :][:1]
                splices.append(Splice(start, start + len("return"), f"{root} =" + ("" if after in b" \t" else " ")))
                lines = [*comment, *self._lines(appended, root), f"return {root}"]
                splices.append(Splice(end, end, "".join(newline + indent + line for line in lines)))
        if not splices:
            raise RecipeError(
                f"{self.recipe.path}:{node.lineno}: {node.name} returns nothing that settings can be put on"
            )
        return splices

    def _lines(self, appended: list[tuple[str, str]], root: str) -> list[str]:
        return [f"{root}.{path} = {text.replace('{root}', root)}" for path, text in appended]

    def _free_name(self, node: ast.AST) -> str:
        used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        return next(
            name for name in ("cfg", "config", "recipe_cfg", "graph_cfg", "cfg_with_graphs") if name not in used
        )

    def _before_consumer(self, appended: list[tuple[str, str]]) -> Splice:
        newline = self.file.newline
        consumer = self.run.entry.consumed_by
        variables = self.run.entry.frame.locals
        root = next((name for name, value in variables.items() if value is self.run.config), None)
        if root is None:
            line = f":{consumer.lineno}" if consumer is not None else ""
            raise RecipeError(
                f"{self.recipe.path}{line}: the configuration that training gets has no variable of its own; assign it to one, "
                "or name the function that builds it with --function"
            )
        if consumer is not None:
            indent = self.file.indent(consumer.lineno)
            start = self.file.span(consumer)[0]
            own_line = start == self.file.line_starts[consumer.lineno - 1] + len(indent.encode("utf-8"))
            if not own_line or not isinstance(consumer, (ast.Expr, ast.Assign, ast.AnnAssign, ast.Return)):
                raise RecipeError(
                    f"{self.recipe.path}:{consumer.lineno}: the call that starts training shares its line with other code; "
                    "put it on a line of its own"
                )
            calls = [
                n for n in ast.walk(self.run.node) if isinstance(n, ast.Call) and called_name(n) in CONSUMERS
                and any(isinstance(a, ast.Name) and a.id == root for a in [*n.args, *(k.value for k in n.keywords)])
            ]  # fmt: skip
            if len(calls) > 1:
                lines = ", ".join(str(n.lineno) for n in calls)
                raise RecipeError(
                    f"{self.recipe.path}: training starts at several places (lines {lines}); start it at one, or name the "
                    "function that builds the configuration with --function"
                )
            return Splice(start, start, (newline + indent).join(self._lines(appended, root)) + newline + indent)
        end = len(self.file.utf8)
        lead = "" if self.file.utf8.endswith((b"\n", b"\r")) else newline
        return Splice(end, end, lead + newline.join(self._lines(appended, root)) + newline)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
