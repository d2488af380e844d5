# SPDX-License-Identifier: Apache-2.0
"""Recipes written as command-line options: launch scripts, lists of arguments, files of overrides.

`LaunchScript` reads a shell script with `shell_run`, takes the commands that start training, and edits options where
they stand. A list of arguments is read as a script of one command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cudagraphs.formats import flags
from cudagraphs.formats.flags import Change
from cudagraphs.formats.selecting import in_effect, pick
from cudagraphs.formats.shell_run import Invocation
from cudagraphs.formats.shell_run import Run as ScriptRun
from cudagraphs.formats.source import SourceError, Splice, TextFile, load
from cudagraphs.formats.words import Option, Word, by_world, group
from cudagraphs.rules import defaults
from cudagraphs.settings import Fact, Known, Settings
from cudagraphs.versions import Versions

# Options are changed where variables are set, then where they are used; each removal is a round of its own.
ROUNDS = 3
MAX_REMOVALS = 64
SAFE = re.compile(r"[\w./:,=@%+-]+")
# Megatron-LM's training programs (its root folder, 0.13 to 0.19) and whether the model that they build has Mamba layers.
ENTRY_PROGRAMS = {"pretrain_gpt.py": False, "pretrain_t5.py": False, "pretrain_bert.py": False, "pretrain_mamba.py": True}
DIALECTS = {"megatron-lm": flags.MegatronLM, "megatron-core": flags.MegatronLM}


@dataclass
class ArgumentRun:
    """One training command. `words` are those behind the program, `options` what they make."""

    name: str
    settings: Settings
    dialect: Any
    invocation: Invocation
    words: list[Word]
    options: list[Option]


class LaunchScript:
    """A shell script that starts training. Reading never runs it."""

    def __init__(
        self,
        path: Path,
        versions: Versions,
        framework: str | None = None,
        file: TextFile | None = None,
        listed: bool = False,
    ):
        """`listed` takes every word of the text as an argument of one command."""
        self.path, self.versions, self.framework, self.listed = path, versions, framework, listed
        self.file = file or load(path)
        try:
            self.script = ScriptRun(path, self.file.text)
        except RecursionError:
            raise SourceError(f"{path}: nested too deeply to read") from None
        self.commands = self._commands()

    @property
    def format(self) -> str:
        first = next(iter(self.commands.values()), None)
        return f"{first[2].format}, {'arguments' if self.listed else 'launch script'}" if first else "launch script"

    # -- which commands ----------------------------------------------------------------------------

    def _commands(self) -> dict[str, tuple[Invocation, list[Word], Any]]:
        """Training commands by name: the program they run, with a number behind the second and later of one program."""
        found: list[tuple[str, Invocation, list[Word], Any]] = []
        invocations = self.script.invocations
        if self.listed and invocations:
            first = invocations[0]
            words = [word for invocation in invocations for word in invocation.words]
            invocations = [Invocation(words, first.environment, first.start, first.end, first.document)]
        for invocation in invocations:
            program, words = _program(invocation.words)
            if not program and not self.listed:
                continue
            dialect = self._dialect(words)
            if dialect is not None:
                found.append((program or "<arguments>", invocation, words, dialect(self.versions)))
        if not found and not self.listed:
            found = self._variables()
        commands: dict[str, tuple[Invocation, list[Word], Any]] = {}
        for name, invocation, words, dialect in found:
            count = 1 + sum(other.partition("#")[0] == name for other in commands)
            commands[name if count == 1 else f"{name}#{count}"] = (invocation, words, dialect)
        return commands

    def _variables(self) -> list[tuple[str, Invocation, list[Word], Any]]:
        """Scripts that only set variables of options, for others to source."""
        words = self.script.option_variables()
        dialect = self._dialect(words)
        if dialect is None:
            return []
        document = self.script.document
        return [
            (
                "<variables>",
                Invocation(words, self.script.final_environment(), 0, 0, document),
                words,
                dialect(self.versions),
            )
        ]

    def _dialect(self, words: list[Word]) -> Any:
        found = flags.choose(group(words, overrides=True))
        if self.framework is None:
            return found
        if self.framework in DIALECTS:
            return DIALECTS[self.framework] if found is not None or self.listed else None
        return found if found is not flags.MegatronLM else None

    def candidates(self) -> list[str]:
        return list(self.commands)

    def select(self, patterns: list[str], everything: bool = False) -> list[str]:
        what = (
            "training arguments"
            if self.listed
            else "training command (a program with Megatron-LM arguments or Bridge overrides)"
        )
        return pick(self.path, self.candidates(), patterns, everything, what)

    def built_on(self, name: str) -> list[str]:
        """Other commands that share options with this one, in a variable or an array."""
        places = _places(self.run(name).options)
        return [other for other in self.commands if other != name and places & _places(self.run(other).options)]

    # -- reading -----------------------------------------------------------------------------------

    def run(self, name: str) -> ArgumentRun:
        invocation, words, dialect = self.commands[name]
        options = group(words, overrides=dialect.overrides)
        facts, reason = dialect.facts(options)
        for variable, values in invocation.environment.items():
            facts.setdefault(
                f"env.{variable}", by_world(values, lambda texts: "".join(texts), values[0].source if values else None)
            )
        has_mamba = ENTRY_PROGRAMS.get(name.partition("#")[0])
        if has_mamba is not None:
            facts.setdefault("model.has_mamba", Known(has_mamba, None, "inferred"))
        reason = reason or self._open_reason(words)
        versions = replace(self.versions, bridge=None) if dialect.framework != "megatron-bridge" else self.versions
        settings = Settings(
            dialect.framework, versions, facts, name, str(self.path), complete=not reason, incomplete_reason=reason
        )
        return ArgumentRun(name, settings, dialect, invocation, words, options)

    def _open_reason(self, words: list[Word]) -> str:
        """Why options may be missing from what was read, "" if they cannot be."""
        if self.script.missing:
            return f"{self.script.missing[0]} is sourced and was not found"
        before: Word | None = None
        for word in words:
            # an unknown word right behind an option is that option's value
            if word.several and (before is None or before.text is None or not before.text.startswith("--")):
                return f"{word.reason}, and may hold more arguments"
            before = word
        return ""

    # -- writing -----------------------------------------------------------------------------------

    def edited(self, name: str, overrides: Mapping[str, Any]) -> tuple["LaunchScript", dict[str, str]]:
        """The script with `overrides` in effect: options are changed where they stand, new ones join the model's
        options.

        Raises SourceError where the values cannot take effect.
        """
        recipe, skipped = self, {}
        before = self.run(name).settings
        attempt = removals = 0
        while attempt < ROUNDS and removals < MAX_REMOVALS:
            run = recipe.run(name)
            wanted = {k: v for k, v in overrides.items() if k not in skipped and not in_effect(run.settings, k, v)}
            if not wanted:
                break
            variables = {} if self.listed else {k[4:]: v for k, v in wanted.items() if k.startswith("env.")}
            settings = {k: v for k, v in wanted.items() if self.listed or not k.startswith("env.")}
            changes, reasons = run.dialect.changes(settings, run.settings.facts)
            skipped.update(reasons)
            writer = _Writer(recipe, run, at_reference=attempt > 0)
            splices = [*writer.options(changes), *writer.environment(variables)]
            skipped.update(writer.skipped)
            for fact in wanted if writer.open_removals else ():
                if fact.removeprefix("model.").replace("_", "-") in writer.open_removals:
                    skipped[fact] = (
                        f"--{fact.replace('_', '-')} is not in sight here; what is not in sight may still hold it"
                    )
            if not splices:
                break
            recipe = recipe._with(splices)
            removals, attempt = (removals + 1, attempt) if writer.removing else (removals, attempt + 1)
        after = recipe.run(name).settings
        stuck = [k for k, v in overrides.items() if k not in skipped and not in_effect(after, k, v)]
        if stuck:
            raise SourceError(f"{self.path}: {name}: cannot make {', '.join(stuck)} take effect here; set it by hand")
        others = [
            k
            for k in before.facts
            if k not in overrides and before.facts[k] != after.facts.get(k) and not _derived(k, overrides)
        ]
        others = [k for k in others if _value_of(before.facts[k]) != _value_of(after.facts.get(k))]
        # an exported variable may itself hold the options
        others = [k for k in others if not (k.startswith("env.") and "--" in str(_value_of(before.facts[k])))]
        if others:
            raise SourceError(
                f"{self.path}: {name}: the edit would also change {', '.join(others)}; set the options by hand"
            )
        return recipe, skipped

    def _with(self, splices: list[Splice]) -> "LaunchScript":
        text = self.file.text
        if not text.isascii():
            splices = [Splice(len(text[: s.start].encode()), len(text[: s.end].encode()), s.text) for s in splices]
        raw = self.file.spliced(splices)
        decoded = raw[len(self.file.bom) :].decode(self.file.encoding)
        file = TextFile(self.path, raw, self.file.encoding, self.file.bom, decoded)
        return LaunchScript(self.path, self.versions, self.framework, file, self.listed)


def from_argv(argv: Sequence[str], versions: Versions, framework: str | None = None) -> LaunchScript:
    """A recipe of arguments alone, as they stand behind `--` on a command line.

    Raises SourceError for a list that tells nothing.
    """
    path = Path("<arguments>")
    text = shlex.join(argv) + "\n"
    recipe = LaunchScript(path, versions, framework, TextFile(path, text.encode(), "utf-8", b"", text), listed=True)
    if not recipe.commands:
        raise SourceError(
            f"{path}: neither Megatron-LM arguments (--num-layers 2 ...) nor performance script arguments "
            f"(--cuda_graph_impl ...) "
            "nor overrides (model.cuda_graph_impl=...); give the framework with --framework"
        )
    return recipe


def arguments_text(recipe: LaunchScript) -> str:
    """The arguments of a listed recipe as one line for a shell."""
    return recipe.file.text.strip()


def _program(words: list[Word]) -> tuple[str, list[Word]]:
    """The training program of a command and the words behind it; ("", words) where there is none."""
    for index, word in enumerate(words):
        if (
            word.text is not None
            and re.search(r"[\w./-]\.py$", word.text)
            and (index == 0 or not _takes_value(words[index - 1]))
        ):
            return Path(word.text).name, words[index + 1 :]
    for index, word in enumerate(words[:-1]):
        following = words[index + 1].text
        if word.text == "-m" and following and not following.startswith(("torch.", "accelerate", "debugpy")):
            return following, words[index + 2 :]
    return "", words


def _takes_value(word: Word) -> bool:
    return bool(word.text and word.text.startswith("--") and "=" not in word.text)


def _places(options: list[Option]) -> set[tuple[int, int]]:
    return {option.word.span for option in options if option.word.span is not None}


def _value_of(fact: Fact | None) -> Any:
    """What a fact says, without where it stands."""
    from cudagraphs.settings import Choice, Known

    if isinstance(fact, Choice):
        return (fact.branch.text, _value_of(fact.if_true), _value_of(fact.if_false))
    return ("known", fact.value) if isinstance(fact, Known) else None


def _derived(fact: str, overrides: Mapping[str, Any]) -> bool:
    """Whether a fact follows from one of the overrides, so that it may change with it."""
    graph = any("cuda_graph" in name for name in overrides)
    tracker = any("rng_tracker" in name for name in overrides)
    twins = {"rerun_state_machine.check_for_nan_in_loss", "ddp.check_for_nan_in_grad"}
    pairs = ({"fp8_param", "ddp.fp8_param_gather"}, {"rng.inference_rng_tracker", "inference_rng_tracker"}, twins)
    if "rng_tracker" in fact and (graph or tracker):
        return True
    if graph and ("cuda_graph" in fact or fact == "rerun_state_machine.check_for_nan_in_loss"):
        return True
    return any(fact in pair and pair & set(overrides) for pair in pairs) or any(
        fact.endswith(f".{name}") for name in overrides
    )


class _Writer:
    """The splices, in characters, that make changes of one command.

    `at_reference` edits the uses of variables, not the variables.
    """

    def __init__(self, recipe: LaunchScript, run: ArgumentRun, at_reference: bool):
        self.recipe, self.run, self.at_reference = recipe, run, at_reference
        self.text = recipe.file.text
        self.newline = recipe.file.newline
        self.skipped: dict[str, str] = {}
        # options to take away that are not in sight, in a command whose options are not all in sight
        self.open_removals: list[str] = []
        # whether the splices take something away, so that there may be more to do in the same way
        self.removing = False

    # -- options -----------------------------------------------------------------------------------

    def options(self, changes: list[Change]) -> list[Splice]:
        """The next thing that goes, else what changes and comes: its place is in the text that is left."""
        splices: dict[tuple[int, int], Splice] = {}
        added: list[Change] = []
        for change in changes:
            found = self._option(change, added)
            if change.remove and found:
                self.removing = True
                return found
            splices.update({(splice.start, splice.end): splice for splice in found})
        return [*splices.values(), *self._added(added)]

    def _option(self, change: Change, added: list[Change]) -> list[Splice]:
        name = change.name.replace("-", "_")
        same = [
            option
            for option in self.run.options
            if option.name.replace("-", "_") == name and (option.override is not None) == change.override
        ]
        if change.remove:
            if not same and not self.run.settings.complete:
                self.open_removals.append(change.name)
            return self._removal(same[0]) if same else []
        splices = [splice for option in same for splice in self._revalued(option, change)]
        if not any(not option.guards for option in same):
            added.append(change)
        return splices

    def _revalued(self, option: Option, change: Change) -> list[Splice]:
        if option.override is not None:
            return [self._replace(option.word, f"{option.override.replace('~', '')}{option.name}={change.values[0]}")]
        if option.inline is not None:
            values = (
                "=" + change.values[0] if len(change.values) == 1 else "".join(f" {value}" for value in change.values)
            )
            return [self._replace(option.word, f"--{option.name}{values}", bare=len(change.values) > 1)]
        if not change.values:
            return [self._replace(word, "") for word in option.values]
        if len(option.values) == len(change.values):
            return [
                self._replace(word, value)
                for word, value in zip(option.values, change.values)
                if word.text != value or word.guards
            ]
        if not option.values:
            place = self._place(option.word)
            return [
                Splice(place[1], place[1], "".join(f" {self._quoted(value, option.word)}" for value in change.values))
            ]
        start, end = self._place(option.values[0])[0], self._place(option.values[-1])[1]
        text = " ".join(self._quoted(value, option.values[0]) for value in change.values)
        return [Splice(min(start, end), max(start, end), text)]

    def _replace(self, word: Word, text: str, bare: bool = False) -> Splice:
        """Replace what a word says, where its text stands or where the variable that brings it is used."""
        if word.span is not None and not word.guards and not (self.at_reference and word.reference):
            inside = self._inside_quotes(word.span)
            return Splice(*word.span, text if inside or bare else self._quoted(text, word))
        if word.reference is not None:
            return Splice(*word.reference, text if bare else self._quoted(text, word))
        if word.span is not None:
            return Splice(*word.span, text)
        raise SourceError(
            f"{word.source or self.recipe.path}: {word.text or word.reason}: this option is not written in "
            f"{self.recipe.path.name} "
            "itself; change it where it is set"
        )

    def _place(self, word: Word) -> tuple[int, int]:
        """Where the whole word stands, its quotes included."""
        place = (
            word.reference if word.reference is not None and (word.span is None or self._covers(word)) else word.span
        )
        if place is None:
            raise SourceError(
                f"{word.source or self.recipe.path}: this option is not written in {self.recipe.path.name} itself; "
                f"change it where it is set"
            )
        return place

    def _covers(self, word: Word) -> bool:
        reference, span = word.reference, word.span
        return reference is not None and span is not None and reference[0] <= span[0] and span[1] <= reference[1]

    def _inside_quotes(self, span: tuple[int, int]) -> bool:
        return self.text[span[0] - 1 : span[0]] in "\"'" if span[0] else False

    def _quoted(self, value: str, word: Word) -> str:
        """The value as a shell word; inside a string of options, quotes would become part of the value."""
        if SAFE.fullmatch(value) or (word.span is not None and word.reference is None):
            return value
        return shlex.quote(value)

    # -- removal -----------------------------------------------------------------------------------

    def _removal(self, option: Option) -> list[Splice]:
        words = [option.word, *option.values]
        places = [self._place(word) for word in words]
        start, end = places[0][0], places[-1][1]
        between = [self.text[left[1] : right[0]] for left, right in zip(places, places[1:])]
        if any(
            left[1] > right[0] or gap.replace("\\", "").strip() for left, right, gap in zip(places, places[1:], between)
        ):
            return [self._cut(*place) for place in places]
        return [self._cut(start, end)]

    def _cut(self, start: int, end: int) -> Splice:
        """Take a stretch out, with the line that it leaves empty and a line continuation that leads nowhere."""
        text = self.text
        if text[start - 1 : start] in ("'", '"') and text[start - 1 : start] == text[end : end + 1]:
            start, end = start - 1, end + 1
        line = text.rfind("\n", 0, start) + 1
        stop = text.find("\n", end)
        stop = len(text) if stop < 0 else stop
        head, tail = text[line:start], text[end:stop]
        if head.strip() or tail.strip() not in ("", "\\"):
            while start > line and text[start - 1] in " \t":
                start -= 1
            return Splice(start, end, "")
        before = re.search(r"[ \t]*\\\r?\n$", text[:line])
        if not tail.strip() and before:
            return Splice(before.start(), stop - (text[stop - 1 : stop] == "\r"), "")
        return Splice(line, min(stop + 1, len(text)), "")

    # -- new options -------------------------------------------------------------------------------

    def _added(self, changes: list[Change]) -> list[Splice]:
        by_kind: dict[bool, list[Change]] = {}
        for change in changes:
            by_kind.setdefault(change.override, []).append(change)
        splices = []
        for override, group_ in by_kind.items():
            splices += self._insertion(self._anchor(override), group_)
        return splices

    def _anchor(self, override: bool) -> Option | Word:
        """What new options are written behind: graph options, else options of the model, else any, else the program."""
        usable = [
            option
            for option in self.run.options
            if not any(word.guards for word in (option.word, *option.values))
            and all(self._placed(word) for word in (option.word, *option.values))
            and self._together(option)
        ]
        overrides = [option for option in usable if option.override is not None]
        plain = [option for option in usable if option.override is None]
        if override and overrides:
            return overrides[-1]
        for names in (lambda n: "cuda_graph" in n, lambda n: n in defaults.FIELDS, lambda n: True):
            found = [option for option in plain if names(option.name.replace("-", "_"))]
            if found:
                return found[-1]
        if overrides:
            return overrides[-1]
        before = self.run.invocation.words[: len(self.run.invocation.words) - len(self.run.words)]
        for word in reversed(before):
            if word.reference is not None:
                # whichever program a variable stands for, what follows it is its arguments
                return replace(word, span=None)
            if self._placed(word) and not word.guards:
                return word
        raise SourceError(
            f"{self.recipe.path}: {self.run.name}: no option is written in this file itself; set the options where "
            f"they are"
        )

    def _together(self, option: Option) -> bool:
        """Whether an option and its values stand side by side, with nothing but space between them."""
        places = [self._place(word) for word in (option.word, *option.values)]
        pairs = zip(places, places[1:])
        return all(
            left[1] <= right[0] and not self.text[left[1] : right[0]].replace("\\", "").strip() for left, right in pairs
        )

    def _placed(self, word: Word) -> bool:
        return word.span is not None or word.reference is not None

    def _insertion(self, anchor: Option | Word, changes: list[Change]) -> list[Splice]:
        first, last = (anchor.word, anchor.last) if isinstance(anchor, Option) else (anchor, anchor)
        start, position = self._place(first)[0], self._place(last)[1]
        in_string = last.reference is None
        entries = []
        for change in changes:
            values = [value if in_string or SAFE.fullmatch(value) else shlex.quote(value) for value in change.values]
            if change.override:
                pair = f"{change.name}={change.values[0]}"
                entries.append(pair if in_string or SAFE.fullmatch(pair) else shlex.quote(pair))
            else:
                entries.append(" ".join([f"--{change.name}", *values]))
        text = self.text
        line = text.rfind("\n", 0, start) + 1
        stop = text.find("\n", position)
        stop = len(text) if stop < 0 else stop
        indent, tail = text[line:start], text[position:stop].rstrip("\r")
        one_line = self.recipe.listed and "\n" not in text.strip()
        if one_line or indent.strip() or not re.fullmatch(r"\s*(\\|#.*)?", tail):
            return [Splice(position, position, "".join(f" {entry}" for entry in entries))]
        if tail.strip() == "\\":
            lines = "".join(f"{indent}{entry}{tail}{self.newline}" for entry in entries)
            return (
                [Splice(stop + 1, stop + 1, lines)]
                if stop < len(text)
                else [Splice(position, position, " " + " ".join(entries))]
            )
        invocation = self.run.invocation
        if invocation.document.main and invocation.start <= start and position <= invocation.end and not in_string:
            return [Splice(position, position, "".join(f" \\{self.newline}{indent}{entry}" for entry in entries))]
        end = position + len(tail)
        return [Splice(end, end, "".join(f"{self.newline}{indent}{entry}" for entry in entries))]

    # -- environment -------------------------------------------------------------------------------

    def environment(self, variables: Mapping[str, Any]) -> list[Splice]:
        splices, new = [], []
        for name, value in variables.items():
            words = self.run.invocation.environment.get(name, [])
            if value is None:
                splices += self._unset(name, words)
            elif len(words) == 1 and words[0].span is not None and not words[0].guards and not self.at_reference:
                splices.append(
                    Splice(*words[0].span, str(value) if self._inside_quotes(words[0].span) else _shell_value(value))
                )
            else:
                new.append(f"export {name}={_shell_value(value)}")
        if new:
            splices.append(self._exports(new))
        return splices

    def _exports(self, lines: list[str]) -> Splice:
        """New exports behind the last one that always happens, else in front of the command."""
        command = self.text.rfind("\n", 0, self.run.invocation.start) + 1
        places = [
            words[0].source.line
            for words in self.run.invocation.environment.values()
            if len(words) == 1
            and words[0].source is not None
            and words[0].source.path == str(self.recipe.path)
            and not words[0].guards
            and words[0].source.text.startswith("export ")
            and not words[0].source.text.endswith("\\")
        ]
        starts = self.recipe.script.document.lines
        places = [line for line in places if line < len(starts) and starts[line] <= command]
        if places and not self.at_reference:
            at = starts[max(places)]
            indent = re.match(r"[ \t]*", self.text[starts[max(places) - 1] :]).group()  # type: ignore[union-attr]
        else:
            at = command
            while re.search(r"(\\|&&|\|\||\|)[ \t]*\r?\n$", self.text[:at]):
                at = self.text.rfind("\n", 0, at - 1) + 1
            indent = re.match(r"[ \t]*", self.text[at:]).group()  # type: ignore[union-attr]
        if not self.run.invocation.document.main or (self.run.name == "<variables>" and not places):
            at, indent = len(self.text), ""
        return Splice(at, at, "".join(f"{indent}{line}{self.newline}" for line in lines))

    def _unset(self, name: str, words: list[Word]) -> list[Splice]:
        for word in words:
            source = word.source
            if source is None or word.span is None or not re.fullmatch(rf"(export )?{name}=\S*", source.text):
                self.skipped[f"env.{name}"] = "it is not on a line of its own; take it out by hand"
                return []
        starts = self.recipe.script.document.lines
        return [
            Splice(
                starts[w.source.line - 1], starts[w.source.line] if w.source.line < len(starts) else len(self.text), ""
            )
            for w in words
            if w.source is not None
        ]


def _shell_value(value: Any) -> str:
    text = str(value)
    return text if SAFE.fullmatch(text) else shlex.quote(text)
