# SPDX-License-Identifier: Apache-2.0
"""Follow a launch script without running it: what every command is called with, and in which environment.

Variables, arrays, functions, `source`d files and here-documents are followed. Where a condition depends on something
outside of the script (an environment variable, an argument, the file system), both sides are kept, and what differs
carries the side that it belongs to. A variable that the script gives a default (`${TP:-1}`) holds the default.
"""

from __future__ import annotations

import bisect
import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from cudagraphs.formats import shell
from cudagraphs.formats.shell import (
    AndOr,
    Assignment,
    Case,
    Command,
    Function,
    If,
    Literal,
    Loop,
    Node,
    Not,
    Opaque,
    Part,
    Variable,
)
from cudagraphs.formats.source import SourceError
from cudagraphs.formats.words import Side, Word
from cudagraphs.settings import Branch, Source

MAX_DEPTH = 12  # nested functions and sourced files
MAX_COMMANDS = 50_000  # functions that call each other can go on for ever
MAX_SIDES = 4  # branches that one word may depend on
# Commands whose here-document is itself a script.
SHELLS = frozenset({"sbatch", "bash", "sh", "srun", "ssh", "cat", "tee", "qsub", "salloc"})
# How scripts ask for the folder that they lie in: $(dirname "$0"), $(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
OWN_FOLDER = re.compile(r"\bdirname\b.*(\$0|BASH_SOURCE)", re.S)
# Words in front of a command that leave it as it is.
PREFIXES = frozenset({"eval", "exec", "command", "builtin", "time", "nohup"})
DECLARATIONS = frozenset({"export", "declare", "local", "readonly", "typeset"})
# Commands that start nothing, and set no variable that is followed here.
QUIET = frozenset({"echo", "printf", "mkdir", "cd", ":", "rm", "cp", "ls", "[", "[[", "test", "true", "false", "(("})
# Commands that set the variables that they name.
SETTERS = frozenset({"read", "mapfile", "readarray", "getopts", "let", "printf", "(("})
# How a command may set a variable inside arithmetic: x=1, x+=1, x++, ++x
ARITHMETIC = re.compile(r"([A-Za-z_]\w*)\s*(?:[-+*/%&|^]|<<|>>)?=(?!=)|([A-Za-z_]\w*)\s*(?:\+\+|--)|(?:\+\+|--)\s*(\w+)")
# Virtual environments come with a file of this name, which sets nothing but PATH, PS1 and their own variables.
HARMLESS = "activate"
# What ends a path, from the narrowest to the widest; "" is a path that goes on.
ENDS = ("", "continue", "break", "return", "exit")
ARGUMENTS = "@"  # under this name the positional parameters stand among the variables


@dataclass(frozen=True)
class Document:
    """The text of a script, or of a file that it sources."""

    path: str
    text: str
    lines: tuple[int, ...]
    main: bool

    @staticmethod
    def of(path: str, text: str, main: bool) -> "Document":
        return Document(path, text, (0, *(match.end() for match in re.finditer("\n", text))), main)

    def source(self, offset: int) -> Source:
        number = bisect.bisect_right(self.lines, offset)
        start = self.lines[number - 1]
        end = self.text.find("\n", start)
        line = self.text[start : len(self.text) if end < 0 else end]
        return Source(self.path, number, offset - start + 1, line.strip())


@dataclass(frozen=True)
class Piece:
    """A stretch of a value. `text` is None where only running the script can tell; `start` is its place in the
    document.

    `soft` text is a default that the environment may replace.
    """

    text: str | None
    document: Document = field(compare=False)
    start: int
    guards: tuple[Side, ...] = ()
    soft: bool = False
    literal: bool = True
    reason: str = ""
    # whether unknown text stands outside of quotes, so that it may be several words
    splits: bool = False


@dataclass(frozen=True)
class Item:
    """One element of an array. `reference` spans the word that made it, where that word made nothing else."""

    pieces: tuple[Piece, ...]
    reference: tuple[int, int] | None = None
    guards: tuple[Side, ...] = ()


@dataclass(frozen=True)
class Scalar:
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Array:
    items: tuple[Item, ...] = ()


Value = Scalar | Array


@dataclass
class Invocation:
    """One command of the script with what it is called with.

    `environment` holds exported variables and assignments in front.
    """

    words: list[Word]
    environment: dict[str, list[Word]]
    start: int
    end: int
    document: Document
    opaque: list[str] = field(default_factory=list)


@dataclass
class State:
    variables: dict[str, Value] = field(default_factory=dict)
    exported: frozenset[str] = frozenset()
    # the command that ended this path: "exit", "return", "break" or "continue"
    dead: str = ""

    def copy(self) -> "State":
        return State(dict(self.variables), self.exported, self.dead)


@dataclass
class Round:
    """The body of a loop, run once."""

    body: list[Node]


@dataclass
class Frame:
    """What a function, a sourced file or a loop keeps apart while it runs.

    `left` holds the states in which one side of a branch left it early; `locals` what a function's own variables hid.
    """

    kind: str
    left: list[tuple[Branch, bool, State]] = field(default_factory=list)
    locals: dict[str, tuple[Value | None, bool, str | None]] = field(default_factory=dict)


class Run:
    """The commands of one script, followed from top to bottom; `missing` names sourced files that were not found."""

    def __init__(self, path: Path, text: str):
        self.path = path
        self.document = Document.of(str(path), text, True)
        self.invocations: list[Invocation] = []
        self.missing: list[str] = []
        self.functions: dict[str, tuple[Function, Document]] = {}
        self.guards: tuple[Side, ...] = ()
        self.depth = 0
        self.commands = 0
        self.frames: list[Frame] = []
        self.references: dict[str, str] = {}  # `declare -n`: name -> the variable that it stands for, "" if not known
        self.changing: tuple[frozenset[str], ...] = ()  # what the loops around set: other in each round
        if "\0" in text:
            line = text.count("\n", 0, text.index("\0")) + 1
            raise SourceError(f"{path}:{line}: holds a NUL byte, so it is no shell script; give the script itself")
        self.state = self._collect(shell.parse(text), self.document, State())

    def option_variables(self) -> list[Word]:
        """The words of every variable that holds options, in the order in which the variables were first set."""
        words: list[Word] = []
        for name, value in self.state.variables.items():
            if name == ARGUMENTS:
                continue
            items = [split for item in _items(value) for split in _split_item(item)]
            own = [word for item in items for word in words_of(item, item.reference)]
            if own and own[0].text is not None and own[0].text.startswith("--"):
                words += own
        return words

    def final_environment(self) -> dict[str, list[Word]]:
        """Exported variables where the script ends."""
        return _environment(self.state)

    # -- statements --------------------------------------------------------------------------------

    def _collect(self, nodes: Sequence[Node | Round], document: Document, state: State) -> State:
        for node in nodes:
            if state.dead:
                break
            state = self._node(node, document, state)
        return state

    def _node(self, node: Node | Round, document: Document, state: State) -> State:
        if isinstance(node, Command):
            return self._command(node, document, state)
        if isinstance(node, If):
            return self._if(node, document, state)
        if isinstance(node, AndOr):
            left = state if self._is_test(node.left) else self._node(node.left, document, state)
            if left.dead:
                return left
            truth, default = self._truth(node.left, document, left)
            return self._fork(
                truth,
                default,
                node.text,
                document.source(node.start),
                document,
                left,
                [node.right] if node.on else [],
                [] if node.on else [node.right],
            )
        if isinstance(node, Not):
            return self._node(node.body, document, state)
        if isinstance(node, Round):
            return self._inside("loop", node.body, document, state)
        if isinstance(node, Loop):
            return self._loop(node, document, state)
        if isinstance(node, Case):
            return self._case(node, document, state, 0)
        if isinstance(node, Function):
            self.functions[node.name] = (node, document)
            return state
        if node.subshell:
            self._apart(node.body, document, state)
            return state
        return self._collect(node.body, document, state)

    def _apart(self, nodes: list[Node], document: Document, state: State) -> None:
        """Follow what a process of its own runs: its variables, functions and exit stay there."""
        functions, references, frames = dict(self.functions), dict(self.references), self.frames
        self.frames = [Frame("subshell")]
        self._collect(nodes, document, state.copy())
        self.functions, self.references, self.frames = functions, references, frames

    def _loop(self, node: Loop, document: Document, state: State) -> State:
        """Follow a body once, with the variable unknown, where it may run at all."""
        truth, default = self._entered(node, document, state)
        if node.condition:
            state = self._collect([n for n in node.condition if not self._is_test(n)], document, state)
        if node.variable:
            reason = "it is the variable of a loop"
            state.variables[node.variable] = Scalar((Piece(None, document, 0, literal=False, reason=reason),))
        outer = self.changing
        self.changing = (*outer, frozenset(_assigned(node.body)))
        text = f"{node.kind} {node.variable + ' ' if node.variable else ''}{node.text}"
        body = [Round(node.body)]
        state = self._fork(truth, default, text, document.source(node.start), document, state, body, [])
        self.changing = outer
        return state

    def _entered(self, node: Loop, document: Document, state: State) -> tuple[bool | None, bool | None]:
        """Whether a loop's body runs at least once, as `_truth` says it."""
        if node.kind in ("while", "until"):
            truth, default = self._truth(node.condition[-1], document, state) if node.condition else (None, None)
            return (truth, default) if node.kind == "while" else (_not(truth), _not(default))
        if node.items is None:
            return None, None
        items = [item for word in node.items for item in self._fields(word.parts, document, state)]
        certain = [item for item in items if not item.guards and _certain(item)]
        if any(not any(piece.soft for piece in item.pieces) for item in certain):
            return True, True
        if items:
            return None, True if certain else None
        # no item; the arguments of the script itself may be some
        outside = any(
            isinstance(part, Variable) and part.name not in state.variables for word in node.items for part in word.parts
        )
        return (None if outside else False), False

    def _if(self, node: If, document: Document, state: State, index: int = 0) -> State:
        if index == len(node.branches):
            return self._collect(node.otherwise, document, state)
        condition, text, start, body = node.branches[index]
        state = self._collect([part for part in condition if not self._is_test(part)], document, state)
        if state.dead:
            return state
        truth, default = self._truth(condition[-1], document, state) if condition else (None, None)
        rest = If(node.branches[index + 1 :], node.otherwise)
        has_rest = bool(rest.branches or rest.otherwise)
        return self._fork(
            truth, default, text, document.source(start), document, state, body, [rest] if has_rest else []
        )

    def _case(self, node: Case, document: Document, state: State, index: int) -> State:
        if index == len(node.arms):
            return state
        patterns, own, start, _ = node.arms[index]
        subject, soft = self._plain(self._pieces(node.subject.parts, document, state))
        matches: bool | None = None
        if subject is not None and not self._changes((node.subject,)):
            matches = False
            for pattern in map(_case_pattern, patterns):
                matches = _either(matches, None if pattern is None else fnmatch.fnmatchcase(subject, pattern))
        if "*" in patterns:
            matches, soft = True, False
        last, body = index, list(own)
        while node.arms[last][3] == ";&" and last + 1 < len(node.arms):
            last += 1
            body += node.arms[last][1]
        shown = [pattern.strip("\"'") for pattern in patterns]
        text = f"{document.text[node.subject.start : node.subject.end]} is {' or '.join(shown)}"
        rest = [Case(node.subject, node.arms[index + 1 :], node.start)]
        tests_on = node.arms[last][3] == ";;&"
        if tests_on and last == index:
            # the patterns that follow are tried whether this one matched or not
            state = self._fork(
                None if soft else matches, matches, text, document.source(start), document, state, body, []
            )
            return state if state.dead else self._case(self._tested(node, body), document, state, index + 1)
        if tests_on:
            body.append(Case(self._tested(node, body).subject, node.arms[last + 1 :], node.start))
        return self._fork(None if soft else matches, matches, text, document.source(start), document, state, body, rest)

    def _tested(self, node: Case, body: list[Node]) -> Case:
        """The case whose patterns are tried after `body`: on the text that the subject had before it."""
        used = {part.name for part in node.subject.parts if isinstance(part, Variable)}
        if any(name.isdigit() for name in used):
            used.add(ARGUMENTS)
        if not used & {*_assigned(body)}:
            return node
        raw = Opaque("what `case` was given", True, node.subject.start)
        return Case(replace(node.subject, parts=(raw,)), node.arms, node.start)

    def _fork(
        self,
        truth: bool | None,
        default: bool | None,
        text: str,
        source: Source,
        document: Document,
        state: State,
        body: Sequence[Node | Round],
        otherwise: Sequence[Node | Round],
    ) -> State:
        """Follow one side where the condition is decided, else both, and join what they leave behind."""
        if truth is not None:
            return self._collect(body if truth else otherwise, document, state)
        branch = Branch(" ".join(text.split())[:120], source, default)
        outer, ends = self.guards, []
        for side, nodes in ((True, body), (False, otherwise)):
            self.guards = (*outer, (branch, side))
            ends.append(self._collect(nodes, document, state.copy()))
        self.guards = outer
        return self._meet(branch, text, document, *ends)

    def _meet(self, branch: Branch, text: str, document: Document, yes: State, no: State) -> State:
        if yes.dead != no.dead:
            # one side ends the script, the function or the round of a loop: what follows happens on the other
            side = ENDS.index(yes.dead) > ENDS.index(no.dead)
            survivor, gone = (no, yes) if side else (yes, no)
            frame = self._left_by(gone.dead)
            if frame is not None:
                frame.left.append((branch, side, gone))
            return survivor
        joined = State(dict(no.variables), yes.exported | no.exported, yes.dead)
        ends = (yes, no)
        for name in dict.fromkeys([*yes.variables, *no.variables]):
            sides = [end.variables.get(name) for end in ends]
            if None in sides and re.search(rf"\b{re.escape(name)}\b", text):
                # `if [ -z "$TP" ]; then TP=1; fi`: on the other side it comes from outside
                reason = f"${name} is set outside of the script"
                outside = Scalar((Piece(None, document, 0, literal=False, reason=reason),))
                sides = [outside if side is None else side for side in sides]
            joined.variables[name] = _join(branch, *sides)
        return joined

    def _left_by(self, how: str) -> Frame | None:
        """What `return`, `break` or `continue` ends; None for `exit`, and where there is nothing to end."""
        if how == "exit":
            return None
        kinds = ("function", "file", "subshell") if how == "return" else ("loop", "subshell")
        return next((frame for frame in reversed(self.frames) if frame.kind in kinds), None)

    def _inside(self, kind: str, nodes: list[Node], document: Document, state: State) -> State:
        """Follow a function, a sourced file or a round of a loop, and join the sides that left it early."""
        frame = Frame(kind)
        self.frames.append(frame)
        state = self._collect(nodes, document, state)
        self.frames.pop()
        if state.dead in (("break", "continue") if kind == "loop" else ("return",)):
            state.dead = ""
        for branch, side, left in reversed(frame.left):
            left.dead = ""
            if state.dead:
                state = left
                continue
            yes, no = (left, state) if side else (state, left)
            state = self._meet(branch, branch.text, document, yes, no)
        for name, (value, exported, reference) in frame.locals.items():
            if value is None:
                state.variables.pop(name, None)
            else:
                state.variables[name] = value
            state.exported = state.exported | {name} if exported else state.exported - {name}
            self.references.pop(name, None)
            if reference is not None:
                self.references[name] = reference
        return state

    def _command(self, node: Command, document: Document, state: State) -> State:
        self.commands += 1
        if self.commands > MAX_COMMANDS:
            raise SourceError(f"{self.path}: runs more than {MAX_COMMANDS:,} commands, too many to follow")
        expanded = [(self._fields(part.parts, document, state), part) for part in node.words]
        words = [word for items, part in expanded for word in self._made(items, part, document)]
        prefixes = 0
        while len(words) > prefixes + 1 and words[prefixes].text in PREFIXES:
            prefixes += 1
        evaluated = any(word.text == "eval" for word in words[:prefixes])
        words = words[prefixes:]
        arguments = [
            replace(item, reference=(part.start, part.end)) if len(items) == 1 and document.main else item
            for items, part in expanded
            for item in items
        ][prefixes + 1 :]
        name = words[0].text if words else None
        if not node.words or name in DECLARATIONS:
            self._declare(name or "", words, node, document, state)
            return state
        inner = state.copy()
        for assignment in node.assignments:
            self._assign(assignment, document, inner)
            inner.exported = inner.exported | {assignment.name}
        if evaluated:
            self._evaluate(words, state)
        if name == "unset":
            self._unset(words[1:], document, state)
            return state
        if name in ("exit", "return", "break", "continue"):
            state.dead = name if name == "exit" or self._left_by(name) is not None else ""
            return state
        if name in ("source", ".") and len(words) > 1:
            return self._source(words[1], document, state)
        if name in ("set", "shift"):
            self._positional(name, arguments, document, state)
            return state
        if name in SETTERS:
            self._set_by(words, document.text[node.start : node.end], state)
        if name in self.functions and self.depth < MAX_DEPTH:
            function, where = self.functions[name]
            outer = state.variables.get(ARGUMENTS)
            state.variables[ARGUMENTS] = Array(tuple(arguments))
            self.depth += 1
            state = self._inside("function", function.body, where, state)
            self.depth -= 1
            state.variables.pop(ARGUMENTS, None)
            if outer is not None:
                state.variables[ARGUMENTS] = outer
            return state
        if name not in QUIET:
            strings = [item for items, _ in expanded for item in items if _is_command_line(item)]
            for item in strings:
                self._invoke_string(item, node, document, inner)
            if not strings:
                self._invoke(words, node, document, inner)
        if node.heredocs and name in SHELLS:
            for heredoc in node.heredocs:
                self._apart(shell.parse(document.text, heredoc.start, heredoc.end), document, state)
        return state

    def _declare(self, how: str, words: list[Word], node: Command, document: Document, state: State) -> None:
        """Assignments, and the declarations that hold them: what a function declares is its own."""
        flags = "".join(word.text[1:] for word in words[1:] if word.text and word.text.startswith("-"))
        bare = [word.text for word in words[1:] if word.text and shell.NAME.fullmatch(word.text)]
        names = [assignment.name for assignment in node.assignments] + bare
        frame = next((frame for frame in reversed(self.frames) if frame.kind in ("function", "subshell")), None)
        own = how in ("local", "declare", "typeset") and "g" not in flags
        if own and frame is not None and frame.kind == "function":
            for name in names:
                hidden = (state.variables.get(name), name in state.exported, self.references.get(name))
                if name not in frame.locals:
                    frame.locals[name] = hidden
                    self.references.pop(name, None)
                    if name in bare:
                        state.variables.pop(name, None)
        for word in words[1:]:
            match = shell.ASSIGNMENT.match(word.text or "")
            if word.text is None or match:
                self._forget(None if match is None else [match.group(1)], f"`{how}` may set it", state)
                names += [match.group(1)] if match else []
        refers = how in ("local", "declare", "typeset") and "n" in flags
        for assignment in node.assignments:
            if refers:
                parts = assignment.value.parts if assignment.value is not None else ()
                target, soft = self._plain(self._pieces(parts, document, state))
                known = target is not None and not soft and shell.NAME.fullmatch(target) and target != assignment.name
                self.references[assignment.name] = target if known and target else ""
                state.variables.pop(assignment.name, None)
            else:
                self._assign(assignment, document, state)
        if how == "export" or "x" in flags:
            state.exported = state.exported | frozenset(names)

    def _evaluate(self, words: list[Word], state: State) -> None:
        """`eval`: what its text assigns is no longer known, and nothing is where the text could be anything."""
        reason = "`eval` may set it"
        texts = [word.text for word in words]
        first = texts[0] if texts else None
        if first is None or words[0].guards:
            self._forget(None, reason, state)
            return
        code = " ".join(text if text is not None else "x" for text in texts)
        names = _assigned(shell.parse(code))
        self._forget(names, reason, state)

    def _unset(self, words: list[Word], document: Document, state: State) -> None:
        functions = any(word.text == "-f" for word in words)
        for word in words:
            text = word.text
            if text is None or word.guards:
                self._forget(None, "`unset` may take it away", state)
            elif functions:
                self.functions.pop(text, None)
            elif "[" in text:
                self._forget([text.partition("[")[0]], "`unset` takes an element of it away", state)
            elif not text.startswith("-"):
                name = self._named(text)
                state.variables.pop(name, None)
                state.exported = state.exported - {name}

    def _positional(self, how: str, arguments: list[Item], document: Document, state: State) -> None:
        """`set -- ...` and `shift`."""
        texts = [_text_of(item) for item in arguments]
        old = state.variables.get(ARGUMENTS)
        if how == "set":
            if "--" in texts:
                items = arguments[texts.index("--") + 1 :]
            elif texts and texts[0] is None:
                items = [_open_item(document, "`set` is called with what only running the script can tell")]
            elif texts and not (texts[0] or "").startswith(("-", "+")):
                items = arguments
            else:
                return
            state.variables[ARGUMENTS] = Array(tuple(items))
            return
        if not isinstance(old, Array):
            return  # the script is read as called without arguments
        count = 1 if not texts else int(texts[0]) if (texts[0] or "").isdigit() else None
        if count is None or not all(_certain(item) for item in old.items[:count]):
            state.variables[ARGUMENTS] = Array((_open_item(document, "`shift` leaves what is not known here"),))
        elif count <= len(old.items):
            state.variables[ARGUMENTS] = Array(old.items[count:])

    def _set_by(self, words: list[Word], written: str, state: State) -> None:
        """Commands that set variables to what only running the script can tell."""
        name, texts = words[0].text, [word.text for word in words[1:]]
        reason = f"`{name}` sets it"
        if name == "printf":
            if texts[:1] == ["-v"]:
                self._forget(texts[1:2] if len(texts) > 1 and texts[1] else None, reason, state)
            return
        if name in ("((", "let"):
            self._forget([next(filter(None, match)) for match in ARITHMETIC.findall(written)], "arithmetic sets it", state)
            return
        if None in texts:
            self._forget(None, reason, state)
        self._forget([text for text in texts if text and shell.NAME.fullmatch(text)], reason, state)

    def _forget(self, names: list[str] | None, reason: str, state: State) -> None:
        """Variables are no longer known; all that the script has set where `names` is None."""
        for name in state.variables if names is None else map(self._named, names):
            old = state.variables.get(name)
            place = next((piece for item in _items(old) for piece in item.pieces), None)
            piece = Piece(None, self.document, 0, literal=False, reason=reason, splits=True)
            if place is not None:
                piece = replace(piece, document=place.document, start=place.start)
            state.variables[name] = Array((Item((piece,)),)) if isinstance(old, Array) else Scalar((piece,))

    def _named(self, name: str) -> str:
        """The variable that a name stands for: another one behind `declare -n`."""
        for _ in range(MAX_DEPTH):
            if not self.references.get(name):
                return name
            name = self.references[name]
        return name

    def _assign(self, assignment: Assignment, document: Document, state: State) -> None:
        if assignment.elements is not None:
            items = []
            for element in assignment.elements:
                fields = self._fields(element.parts, document, state)
                reference = (element.start, element.end) if len(fields) == 1 and document.main else None
                items += [replace(item, reference=reference or item.reference) for item in fields]
            value: Value = Array(tuple(items))
        elif assignment.value is not None:
            value = Scalar(tuple(self._pieces(assignment.value.parts, document, state)))
        else:
            value = Scalar()
        name = self._named(assignment.name)
        if self.references.get(name) == "":
            self._forget(None, f"{name} stands for a variable that only running the script can tell", state)
            return
        if assignment.append:
            old = state.variables.get(name)
            if isinstance(old, Array) or isinstance(value, Array):
                value = Array((*_items(old), *_items(value)))
            elif old is not None:
                value = Scalar((*old.pieces, *value.pieces))
        state.variables[name] = value

    def _source(self, word: Word, document: Document, state: State) -> State:
        base = Path(document.path).parent
        candidates = [base / word.text, base / Path(word.text).name] if word.text else []
        found = next((path for path in candidates if path.is_file()), None)
        if found is None or self.depth >= MAX_DEPTH:
            name = word.text or "a file whose name is only known when the script runs"
            self.missing.append(name)
            if Path(name).name != HARMLESS:
                self._forget(None, f"{name} is sourced, was not found, and may set it", state)
            return state
        self.depth += 1
        text = found.read_text(encoding="utf-8", errors="replace")
        state = self._inside("file", shell.parse(text), Document.of(str(found), text, False), state)
        self.depth -= 1
        return state

    def _invoke(self, words: list[Word], node: Command, document: Document, state: State) -> None:
        self.invocations.append(
            Invocation(
                [_guarded(word, self.guards) for word in words], _environment(state), node.start, node.end, document
            )
        )

    def _invoke_string(self, item: Item, node: Command, document: Document, state: State) -> None:
        """A command that another one (bash -c, srun, eval) is given as a string.

        Split at white space, ended by `;` or `&&`.
        """
        words: list[Word] = []
        for part in _split_item(item):
            for word in words_of(part, None):
                text = word.text
                ends = text is not None and (text in ("&&", "||", "|") or text.endswith(";"))
                if not ends:
                    words.append(word)
                    continue
                if text is not None and text.endswith(";") and len(text) > 1:
                    words.append(replace(word, text=text[:-1], span=word.span and (word.span[0], word.span[1] - 1)))
                if words:
                    self._invoke(words, node, document, state)
                words = []
        if words:
            self._invoke(words, node, document, state)

    # -- words -------------------------------------------------------------------------------------

    def _made(self, items: list[Item], word: shell.Word, document: Document) -> list[Word]:
        reference = (word.start, word.end) if len(items) == 1 and document.main else None
        if any(isinstance(part, Variable) and part.name == ARGUMENTS for part in word.parts):
            reference = None  # an argument is changed where the function is called
        return [made for item in items for made in words_of(item, reference or item.reference)]

    def _fields(self, parts: tuple[Part, ...], document: Document, state: State) -> list[Item]:
        """What a word expands to.

        Splits at white space in unquoted expansions, one item for each element of `"${A[@]}"`.
        """
        only = parts[0] if len(parts) == 1 else None
        if isinstance(only, Opaque) and only.text.startswith("${@:") and ARGUMENTS not in state.variables:
            return []
        if isinstance(only, Variable) and only.each and not (only.star and only.quoted):
            value = state.variables.get(ARGUMENTS if only.name == "*" else self._named(only.name))
            if isinstance(value, Array):
                return (
                    list(value.items)
                    if only.quoted
                    else [split for item in value.items for split in _split_item(item)]
                )
            if only.name in ("@", "*"):
                return []  # the script is read as called without arguments
        done: list[list[Piece]] = []
        current: list[Piece] = []
        open_word = False
        for part in parts:
            items = self._elements(part, document, state)
            if items is not None:
                # what stands before joins the first element, what follows the last
                for index, item in enumerate(items):
                    if index:
                        done.append(current)
                        current = []
                    current = [*current, *item.pieces]
                open_word = open_word or bool(items)
                continue
            pieces = self._pieces((part,), document, state)
            splits = isinstance(part, (Variable, Opaque)) and not part.quoted
            if not splits:
                current += pieces
                open_word = True
                continue
            chunks = _split(pieces)
            for index, (chunk, starts_new) in enumerate(chunks):
                if (starts_new or index) and current:
                    done.append(current)
                    current = []
                current = [*current, *chunk]
            if pieces and pieces[-1].text is not None and pieces[-1].text[-1:].isspace() and current:
                done.append(current)
                current = []
        if current or open_word:
            done.append(current)
        return [Item(tuple(pieces)) for pieces in done]

    def _elements(self, part: Part, document: Document, state: State) -> list[Item] | None:
        """What a quoted `${A[@]}` inside of a word expands to; None for another part, and where it is no plain array.

        Elements that stand on one side of a branch only join a word that cannot be told: one piece of unknown text.
        """
        if not (isinstance(part, Variable) and part.each and part.quoted and not part.star and not part.operator):
            return None
        value = state.variables.get(self._named(part.name))
        if not isinstance(value, Array):
            return None
        if any(item.guards for item in value.items):
            reason = f"the number of elements of ${{{part.name}[@]}} depends on a condition"
            return [Item((Piece(None, document, part.start, literal=False, reason=reason, splits=True),))]
        return list(value.items)

    def _pieces(self, parts: tuple[Part, ...], document: Document, state: State) -> list[Piece]:
        pieces: list[Piece] = []
        for part in parts:
            if isinstance(part, Literal):
                pieces.append(Piece(part.text, document, part.start))
            elif isinstance(part, Opaque) and OWN_FOLDER.search(part.text) and ".." not in part.text:
                folder = str(Path(document.path).parent)
                pieces.append(Piece(folder, document, part.start, soft=True, literal=False))
            elif isinstance(part, Opaque):
                shown = " ".join(part.text.split())[:60]
                reason = f"`{shown}` is only known when the script runs"
                splits = not part.quoted or part.text.startswith("${@") or "[@]" in part.text
                pieces.append(Piece(None, document, part.start, (), False, False, reason, splits=splits))
            else:
                found = self._variable(part, document, state)
                pieces += [
                    replace(piece, splits=piece.text is None and (not part.quoted or (part.each and not part.star)))
                    for piece in found
                ]
        return pieces

    def _variable(self, part: Variable, document: Document, state: State) -> list[Piece]:
        if part.name.isdigit() and part.name != "0" or part.name == "#":
            value = self._argument(part.name, document, part.start, state)
        elif self.references.get(self._named(part.name)) == "":
            reason = f"{part.name} stands for a variable that only running the script can tell"
            value = Scalar((Piece(None, document, part.start, literal=False, reason=reason),))
        else:
            value = state.variables.get(ARGUMENTS if part.name == "*" else self._named(part.name))
        pieces: list[Piece] | None = None
        if isinstance(value, Scalar):
            pieces = list(value.pieces)
        elif isinstance(value, Array) and part.star and part.quoted and "IFS" in state.variables and value.items[1:]:
            reason = f"${{{part.name}[*]}} is joined with IFS, which the script sets"
            pieces = [Piece(None, document, part.start, literal=False, reason=reason)]
        elif isinstance(value, Array):
            pieces = []
            for index, item in enumerate(value.items if part.each else value.items[:1]):
                between = Piece(" ", document, part.start, item.guards, literal=False)
                pieces += [between] if index else []
                pieces += [replace(piece, guards=(*item.guards, *piece.guards)) for piece in item.pieces]
        if part.operator in ("-", "="):
            if pieces is None or not pieces:
                pieces = [replace(piece, soft=True) for piece in self._pieces(part.operand, document, state)]
                if part.operator == "=" and part.name not in state.variables:
                    state.variables[part.name] = Scalar(tuple(pieces))
            return pieces
        if part.operator == "+":
            return self._pieces(part.operand, document, state) if pieces else []
        if pieces is None:
            if part.name in ("@", "*"):
                return []
            return [
                Piece(None, document, part.start, literal=False, reason=f"${part.name} is set outside of the script")
            ]
        return pieces

    def _argument(self, name: str, document: Document, start: int, state: State) -> Value | None:
        """`$1` and its like, and `$#`; None where the script's own arguments are meant."""
        value = state.variables.get(ARGUMENTS)
        if not isinstance(value, Array):
            # the script is read as called without arguments
            return Scalar((Piece("0", document, start, soft=True, literal=False),)) if name == "#" else None
        count = len(value.items) if name == "#" else int(name)
        if not all(_certain(item) for item in value.items[:count]):
            reason = f"${name} is an argument that only running the script can tell"
            return Scalar((Piece(None, document, start, literal=False, reason=reason),))
        if name == "#":
            return Scalar((Piece(str(count), document, start, literal=False),))
        return Scalar(value.items[count - 1].pieces if count <= len(value.items) else ())

    # -- conditions --------------------------------------------------------------------------------

    def _is_test(self, node: Node) -> bool:
        """Whether a condition only compares, so that nothing of it has to be followed."""
        if isinstance(node, Not):
            return self._is_test(node.body)
        if isinstance(node, AndOr):
            return self._is_test(node.left) and self._is_test(node.right)
        if not isinstance(node, Command) or not node.words or not node.words[0].parts:
            return False
        first = node.words[0].parts[0]
        return isinstance(first, Literal) and first.text in ("[", "[[", "test", "true", "false")

    def _truth(self, node: Node, document: Document, state: State) -> tuple[bool | None, bool | None]:
        """(the truth where the script alone decides it, the truth where nothing outside of it is set)."""
        if isinstance(node, Not):
            truth, default = self._truth(node.body, document, state)
            return _not(truth), _not(default)
        if isinstance(node, AndOr):
            left, right = self._truth(node.left, document, state), self._truth(node.right, document, state)
            combine = _both if node.on else _either
            return combine(left[0], right[0]), combine(left[1], right[1])
        if not isinstance(node, Command) or not self._is_test(node) or self._changes(tuple(node.words)):
            return None, None
        name, _ = self._plain(self._pieces(node.words[0].parts, document, state))
        if name in ("true", "false"):
            return name == "true", name == "true"
        if name == "[[":
            return self._matched(node.words[1:], document, state)
        soft, texts = False, []
        for word in node.words[1:]:
            text, outside = self._plain(self._pieces(word.parts, document, state), unset="")
            soft = soft or outside
            loose = bool(word.parts) and all(
                isinstance(part, (Variable, Opaque)) and not part.quoted for part in word.parts
            )
            if loose and text is not None and not text.strip():
                continue  # an empty expansion without quotes is no word
            # one of several words, or a pattern that the names of files replace
            texts.append(None if text is not None and loose and re.search(r"\s", text.strip()) else text)
        if name == "[" and texts[-1:] == ["]"]:
            texts.pop()
        answer = _test(texts, None)
        return (None if soft else answer), answer

    def _matched(self, words: list[shell.Word], document: Document, state: State) -> tuple[bool | None, bool | None]:
        """The truth of `[[ ... ]]`, where an unquoted right side is a pattern."""
        soft, texts = False, []
        for word in words:
            text, outside = self._plain(self._pieces(word.parts, document, state), unset="")
            soft = soft or outside
            texts.append(text)
        if texts[-1:] == ["]]"]:
            texts.pop()
        pattern: str | None = None
        if len(texts) >= 3 and texts[-2] in ("=", "==", "!="):
            pattern = ""
            for part in words[len(texts) - 1].parts:
                text, _ = self._plain(self._pieces((part,), document, state), unset="")
                quoted = part.quoted
                if text is None or (not quoted and re.search(r"[\[\\(]", text)):
                    return None, None
                pattern += re.sub(r"([*?[])", r"[\1]", text) if quoted else text
        answer = _test(texts, pattern)
        return (None if soft else answer), answer

    def _changes(self, words: tuple[shell.Word, ...]) -> bool:
        """Whether words use what a loop around them sets, so that it is another text in each round."""
        used = {part.name for word in words for part in word.parts if isinstance(part, Variable)}
        if used & {"#", "@", "*"} or any(name.isdigit() for name in used):
            used.add(ARGUMENTS)
        return any(used & names for names in self.changing)

    def _plain(self, pieces: list[Piece], unset: str | None = None) -> tuple[str | None, bool]:
        """The text of pieces, None where a side or the environment decides it.

        And whether the environment may change it.
        """
        soft, texts = False, []
        for piece in pieces:
            if piece.text is None and unset is not None and piece.reason.endswith("is set outside of the script"):
                texts.append(unset)
                soft = True
            elif piece.text is None or piece.guards:
                return None, True
            else:
                texts.append(piece.text)
                soft = soft or piece.soft
        return "".join(texts), soft


def _both(left: bool | None, right: bool | None) -> bool | None:
    if left is False or right is False:
        return False
    return True if left and right else None


def _either(left: bool | None, right: bool | None) -> bool | None:
    if left or right:
        return True
    return False if left is False and right is False else None


def _not(answer: bool | None) -> bool | None:
    return None if answer is None else not answer


def _test(words: list[str | None], pattern: str | None) -> bool | None:
    """The answer of `[ words ]`, None where it takes more than comparing texts.

    `pattern` is the right side of a comparison inside `[[ ]]`, as `fnmatch` takes it.
    """
    if any(word is None for word in words):
        return None
    texts = [word or "" for word in words]
    compares = ("=", "==", "!=")
    negate = texts[:1] == ["!"] and (len(texts) != 3 or texts[1] not in compares)
    if negate:
        texts = texts[1:]
    answer: bool | None = None
    if len(texts) == 1:
        answer = texts[0] != ""
    elif len(texts) == 2 and texts[0] in ("-n", "-z"):
        answer = (texts[1] != "") == (texts[0] == "-n")
    elif len(texts) == 2 and texts[0] in compares and not negate:
        answer = False  # a comparison that lost its left side is an error, which counts as false
    elif len(texts) == 3 and texts[1] in compares:
        same = texts[0] == texts[2] if pattern is None else fnmatch.fnmatchcase(texts[0], pattern)
        answer = same == (texts[1] != "!=")
    elif len(texts) == 3 and texts[1] in ("-eq", "-ne", "-gt", "-ge", "-lt", "-le"):
        try:
            left, right = int(texts[0]), int(texts[2])
        except ValueError:
            return None
        answer = {
            "-eq": left == right,
            "-ne": left != right,
            "-gt": left > right,
            "-ge": left >= right,
            "-lt": left < right,
            "-le": left <= right,
        }[texts[1]]
    return answer if answer is None or not negate else not answer


def _case_pattern(raw: str) -> str | None:
    """A pattern of `case` as `fnmatch` takes it, None where only running the script can tell it."""
    pattern = ""
    for match in re.finditer(r"'([^']*)'|\"([^\"]*)\"|\\(.)|(.)", raw, re.S):
        single, double, escaped, plain = match.groups()
        if plain is not None:
            if plain in "$`[('\"\\":
                return None
            pattern += plain
            continue
        text = single if single is not None else double if double is not None else escaped
        if double is not None and re.search(r"[$`\\]", text):
            return None
        pattern += re.sub(r"([*?[])", r"[\1]", text)
    return pattern


def _assigned(nodes: list[Node]) -> list[str]:
    """The names that commands assign, wherever they stand in them."""
    names: list[str] = []
    for node in nodes:
        if isinstance(node, Command):
            names += [assignment.name for assignment in node.assignments]
            first = node.words[0].parts if node.words else ()
            name = first[0].text if len(first) == 1 and isinstance(first[0], Literal) else ""
            parts = [part for word in node.words[1:] for part in word.parts]
            texts = [part.text for part in parts if not isinstance(part, Variable)]
            if name in ("((", "let"):
                names += [next(filter(None, match)) for match in ARITHMETIC.findall(" ".join(texts))]
            elif name in SETTERS or name in DECLARATIONS or name == "unset":
                names += [match.group() for text in texts if (match := shell.NAME.match(text))]
            elif name in ("set", "shift"):
                names.append(ARGUMENTS)
        elif isinstance(node, If):
            for condition, _, _, body in node.branches:
                names += _assigned([*condition, *body])
            names += _assigned(node.otherwise)
        elif isinstance(node, AndOr):
            names += _assigned([node.left, node.right])
        elif isinstance(node, Not):
            names += _assigned([node.body])
        elif isinstance(node, Loop):
            names += [node.variable] if node.variable else []
            names += _assigned([*node.condition, *node.body])
        elif isinstance(node, Case):
            for _, body, _, _ in node.arms:
                names += _assigned(body)
        else:
            names += _assigned(node.body)
    return names


# -- values ----------------------------------------------------------------------------------------


def _is_command_line(item: Item) -> bool:
    """Whether a word is itself a command that runs a Python program."""
    text = "".join(piece.text or "" for piece in item.pieces)
    return ".py" in text and re.search(r"\.py\s+\S", text) is not None and re.match(r"\s*--?\w", text) is None


def _environment(state: State) -> dict[str, list[Word]]:
    # bash passes no arrays on, exported or not
    names = sorted(name for name in state.exported if isinstance(state.variables.get(name), Scalar))
    return {name: _scalar_words(state.variables[name]) for name in names}


def _text_of(item: Item) -> str | None:
    if item.guards or any(piece.text is None or piece.guards for piece in item.pieces):
        return None
    return "".join(piece.text or "" for piece in item.pieces)


def _certain(item: Item) -> bool:
    """Whether an item is one word on every side."""
    return not item.guards and not any(piece.splits or piece.guards for piece in item.pieces)


def _open_item(document: Document, reason: str) -> Item:
    return Item((Piece(None, document, 0, literal=False, reason=reason, splits=True),))


def _items(value: Value | None) -> tuple[Item, ...]:
    if value is None:
        return ()
    return value.items if isinstance(value, Array) else (Item(value.pieces),)


def _join(branch: Branch, yes: Value | None, no: Value | None) -> Value:
    """The value after both sides of a branch meet again: what they share stands once, the rest carries its side."""
    if yes == no:
        return yes if yes is not None else Scalar()
    if isinstance(yes, Array) or isinstance(no, Array):
        left, right = _items(yes), _items(no)
        head, tail = _shared(left, right)
        middle = [replace(item, guards=((branch, True), *item.guards)) for item in left[head : len(left) - tail]]
        middle += [replace(item, guards=((branch, False), *item.guards)) for item in right[head : len(right) - tail]]
        return Array((*left[:head], *middle, *left[len(left) - tail :]))
    first, second = (yes.pieces if yes else ()), (no.pieces if no else ())
    head, tail = _shared(first, second)
    pieces = [replace(piece, guards=((branch, True), *piece.guards)) for piece in first[head : len(first) - tail]]
    pieces += [replace(piece, guards=((branch, False), *piece.guards)) for piece in second[head : len(second) - tail]]
    return Scalar((*first[:head], *pieces, *first[len(first) - tail :]))


def _shared(left: tuple, right: tuple) -> tuple[int, int]:
    """How many elements two sequences share at their start and, of what remains, at their end."""
    head = 0
    while head < min(len(left), len(right)) and left[head] == right[head]:
        head += 1
    tail = 0
    while tail < min(len(left), len(right)) - head and left[-1 - tail] == right[-1 - tail]:
        tail += 1
    return head, tail


def _split(pieces: list[Piece]) -> list[tuple[list[Piece], bool]]:
    """Pieces split at white space; the flag says whether white space stands before the chunk."""
    chunks: list[tuple[list[Piece], bool]] = []
    current: list[Piece] = []
    spaced = False
    for piece in pieces:
        if piece.text is None:
            current.append(piece)
            continue
        position = 0
        for match in re.finditer(r"\s+", piece.text):
            if match.start() > position:
                current.append(replace(piece, text=piece.text[position : match.start()], start=piece.start + position))
            if current:
                chunks.append((current, spaced))
            current, spaced, position = [], True, match.end()
        if position < len(piece.text):
            current.append(replace(piece, text=piece.text[position:], start=piece.start + position))
    if current:
        chunks.append((current, spaced))
    return chunks


def _split_item(item: Item) -> list[Item]:
    chunks = _split(list(item.pieces))
    if len(chunks) == 1:
        return [Item(tuple(chunks[0][0]), item.reference, item.guards)]
    return [Item(tuple(chunk), None, item.guards) for chunk, _ in chunks]


def words_of(item: Item, reference: tuple[int, int] | None) -> list[Word]:
    """The word that an item is, or one for each way its branches can go."""
    pieces = [replace(piece, guards=tuple(dict.fromkeys((*item.guards, *piece.guards)))) for piece in item.pieces]
    if not pieces:
        return [Word("", None, item.guards, reference=reference)]
    shared = pieces[0].guards
    if all(piece.guards == shared for piece in pieces):
        return [_word(pieces, shared, reference)]
    branches = list(dict.fromkeys(branch for piece in pieces for branch, _ in piece.guards))
    if len(branches) > MAX_SIDES:
        return [
            Word(
                None,
                pieces[0].document.source(pieces[0].start),
                item.guards,
                "it depends on too many conditions",
                None,
                reference,
            )
        ]
    words = []
    for sides in product((True, False), repeat=len(branches)):
        world = dict(zip(branches, sides))
        if any(world[branch] != side for branch, side in item.guards):
            continue
        present = [piece for piece in pieces if all(world[branch] == side for branch, side in piece.guards)]
        if present:
            words.append(_word(present, tuple(world.items()), reference))
    return words


def _word(pieces: list[Piece], guards: tuple[Side, ...], reference: tuple[int, int] | None) -> Word:
    first = pieces[0]
    source = first.document.source(first.start)
    unknown = next((piece for piece in pieces if piece.text is None), None)
    if unknown is not None:
        return Word(None, source, guards, unknown.reason, None, reference, several=first is unknown and first.splits)
    span: tuple[int, int] | None = None
    if first.document.main and all(piece.literal and not piece.soft and piece.document.main for piece in pieces):
        ends = [piece.start + len(piece.text or "") for piece in pieces]
        if all(end == following.start for end, following in zip(ends, pieces[1:])):
            span = (first.start, ends[-1])
    return Word("".join(piece.text or "" for piece in pieces), source, guards, "", span, reference)


def _scalar_words(value: Value) -> list[Word]:
    """The value of a variable as one word, or one for each way its branches can go."""
    pieces = value.pieces if isinstance(value, Scalar) else (value.items[0].pieces if value.items else ())
    return words_of(Item(tuple(pieces)), None)


def _guarded(word: Word, guards: tuple[Side, ...]) -> Word:
    """The word, without sides on which the command itself is not reached."""
    kept = tuple(side for side in word.guards if side not in guards)
    return replace(word, guards=kept) if kept != word.guards else word
