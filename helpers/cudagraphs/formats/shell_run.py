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
PREFIXES = frozenset({"eval", "exec", "command", "time", "nohup"})


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
    dead: bool = False

    def copy(self) -> "State":
        return State(dict(self.variables), self.exported, self.dead)


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
        self.state = self._collect(shell.parse(text), self.document, State())

    def option_variables(self) -> list[Word]:
        """The words of every variable that holds options, in the order in which the variables were first set."""
        words: list[Word] = []
        for value in self.state.variables.values():
            items = [split for item in _items(value) for split in _split_item(item)]
            own = [word for item in items for word in words_of(item, item.reference)]
            if own and own[0].text is not None and own[0].text.startswith("--"):
                words += own
        return words

    def final_environment(self) -> dict[str, list[Word]]:
        """Exported variables where the script ends."""
        return _environment(self.state)

    # -- statements --------------------------------------------------------------------------------

    def _collect(self, nodes: list[Node], document: Document, state: State) -> State:
        for node in nodes:
            if state.dead:
                break
            state = self._node(node, document, state)
        return state

    def _node(self, node: Node, document: Document, state: State) -> State:
        if isinstance(node, Command):
            return self._command(node, document, state)
        if isinstance(node, If):
            return self._if(node, document, state)
        if isinstance(node, AndOr):
            left = (
                self._node(node.left, document, state)
                if not isinstance(node.left, Command) or not self._is_test(node.left)
                else state
            )
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
        if isinstance(node, Loop):
            if node.variable:
                state.variables[node.variable] = Scalar(
                    (Piece(None, document, 0, literal=False, reason="it is the variable of a loop"),)
                )
            return self._collect(node.body, document, state)
        if isinstance(node, Case):
            return self._case(node, document, state, 0)
        if isinstance(node, Function):
            self.functions[node.name] = (node, document)
            return state
        return self._collect(node.body, document, state)

    def _if(self, node: If, document: Document, state: State, index: int = 0) -> State:
        if index == len(node.branches):
            return self._collect(node.otherwise, document, state)
        condition, text, start, body = node.branches[index]
        truth, default = self._truth(condition[0], document, state) if len(condition) == 1 else (None, None)
        rest = If(node.branches[index + 1 :], node.otherwise)
        has_rest = bool(rest.branches or rest.otherwise)
        return self._fork(
            truth, default, text, document.source(start), document, state, body, [rest] if has_rest else []
        )

    def _case(self, node: Case, document: Document, state: State, index: int) -> State:
        if index == len(node.arms):
            return state
        patterns, body, start = node.arms[index]
        subject, soft = self._plain(self._pieces(node.subject.parts, document, state))
        matches = None if subject is None else any(fnmatch.fnmatchcase(subject, pattern) for pattern in patterns)
        if "*" in patterns:
            return self._collect(body, document, state)
        text = f"{document.text[node.subject.start : node.subject.end]} is {' or '.join(patterns)}"
        rest = [Case(node.subject, node.arms[index + 1 :], node.start)]
        return self._fork(None if soft else matches, matches, text, document.source(start), document, state, body, rest)

    def _fork(
        self,
        truth: bool | None,
        default: bool | None,
        text: str,
        source: Source,
        document: Document,
        state: State,
        body: list[Node],
        otherwise: list[Node],
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
        yes, no = ends
        if yes.dead or no.dead:
            # one side ends the script: what follows happens on the other
            survivor = no if yes.dead else yes
            survivor.dead = yes.dead and no.dead
            return survivor
        joined = State(dict(no.variables), yes.exported | no.exported)
        for name in dict.fromkeys([*yes.variables, *no.variables]):
            sides = [end.variables.get(name) for end in ends]
            if None in sides and re.search(rf"\b{name}\b", text):
                # `if [ -z "$TP" ]; then TP=1; fi`: on the other side it comes from outside
                reason = f"${name} is set outside of the script"
                outside = Scalar((Piece(None, document, 0, literal=False, reason=reason),))
                sides = [outside if side is None else side for side in sides]
            joined.variables[name] = _join(branch, *sides)
        return joined

    def _command(self, node: Command, document: Document, state: State) -> State:
        self.commands += 1
        if self.commands > MAX_COMMANDS:
            raise SourceError(f"{self.path}: runs more than {MAX_COMMANDS:,} commands, too many to follow")
        expanded = [(self._fields(part.parts, document, state), part) for part in node.words]
        words = [word for items, part in expanded for word in self._made(items, part, document)]
        while len(words) > 1 and words[0].text in PREFIXES:
            words = words[1:]
        name = words[0].text if words else None
        declares = name in ("export", "declare", "local", "readonly", "typeset")
        if not node.words or declares:
            for assignment in node.assignments:
                self._assign(assignment, document, state)
            if name == "export" or (declares and any(word.text == "-x" for word in words)):
                names = [a.name for a in node.assignments] + [
                    w.text for w in words[1:] if w.text and shell.NAME.fullmatch(w.text)
                ]
                state.exported = state.exported | frozenset(names)
            return state
        inner = state.copy()
        for assignment in node.assignments:
            self._assign(assignment, document, inner)
            inner.exported = inner.exported | {assignment.name}
        if name == "unset":
            for word in words[1:]:
                state.variables.pop(word.text or "", None)
                state.exported = state.exported - {word.text or ""}
            return state
        if name in ("exit", "return"):
            state.dead = name == "exit" or self.depth > 0
            return state
        if name in ("source", ".") and len(words) > 1:
            return self._source(words[1], document, state)
        if name in self.functions and self.depth < MAX_DEPTH:
            function, where = self.functions[name]
            self.depth += 1
            state = self._collect(function.body, where, state)
            self.depth -= 1
            state.dead = False
            return state
        if name not in ("echo", "printf", "mkdir", "cd", "set", "shift", ":", "rm", "cp", "ls", "[", "[[", "test"):
            strings = [item for items, _ in expanded for item in items if _is_command_line(item)]
            for item in strings:
                self._invoke_string(item, node, document, inner)
            if not strings:
                self._invoke(words, node, document, inner)
        if node.heredocs and name in SHELLS:
            for heredoc in node.heredocs:
                state = self._collect(shell.parse(document.text, heredoc.start, heredoc.end), document, state)
            state.dead = False
        return state

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
        if assignment.append:
            old = state.variables.get(assignment.name)
            if isinstance(old, Array) or isinstance(value, Array):
                value = Array((*_items(old), *_items(value)))
            elif old is not None:
                value = Scalar((*old.pieces, *value.pieces))
        state.variables[assignment.name] = value

    def _source(self, word: Word, document: Document, state: State) -> State:
        base = Path(document.path).parent
        candidates = [base / word.text, base / Path(word.text).name] if word.text else []
        found = next((path for path in candidates if path.is_file()), None)
        if found is None or self.depth >= MAX_DEPTH:
            self.missing.append(word.text or "a file whose name is only known when the script runs")
            return state
        self.depth += 1
        text = found.read_text(encoding="utf-8", errors="replace")
        state = self._collect(shell.parse(text), Document.of(str(found), text, False), state)
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
        return [made for item in items for made in words_of(item, reference or item.reference)]

    def _fields(self, parts: tuple[Part, ...], document: Document, state: State) -> list[Item]:
        """What a word expands to.

        Splits at white space in unquoted expansions, one item for each element of `"${A[@]}"`.
        """
        if len(parts) == 1 and isinstance(parts[0], Variable) and parts[0].each:
            value = state.variables.get(parts[0].name)
            if isinstance(value, Array):
                return (
                    list(value.items)
                    if parts[0].quoted
                    else [split for item in value.items for split in _split_item(item)]
                )
            if parts[0].name in ("@", "*"):
                return []  # the script is read as called without arguments
        done: list[list[Piece]] = []
        current: list[Piece] = []
        open_word = False
        for part in parts:
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
                pieces.append(Piece(None, document, part.start, (), False, False, reason, splits=not part.quoted))
            else:
                found = self._variable(part, document, state)
                pieces += [replace(piece, splits=piece.text is None and not part.quoted) for piece in found]
        return pieces

    def _variable(self, part: Variable, document: Document, state: State) -> list[Piece]:
        value = state.variables.get(part.name)
        pieces: list[Piece] | None = None
        if isinstance(value, Scalar):
            pieces = list(value.pieces)
        elif isinstance(value, Array):
            pieces = []
            for index, item in enumerate(value.items if part.each else value.items[:1]):
                pieces += [Piece(" ", document, part.start, literal=False)] if index else []
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

    # -- conditions --------------------------------------------------------------------------------

    def _is_test(self, node: Node) -> bool:
        if not isinstance(node, Command) or not node.words or not node.words[0].parts:
            return False
        first = node.words[0].parts[0]
        return isinstance(first, Literal) and first.text in ("[", "[[", "test", "true", "false")

    def _truth(self, node: Node, document: Document, state: State) -> tuple[bool | None, bool | None]:
        """(the truth where the script alone decides it, the truth where nothing outside of it is set)."""
        if isinstance(node, AndOr):
            left, right = self._truth(node.left, document, state), self._truth(node.right, document, state)
            combine = _both if node.on else _either
            return combine(left[0], right[0]), combine(left[1], right[1])
        if not isinstance(node, Command) or not self._is_test(node):
            return None, None
        operands = [self._plain(self._pieces(word.parts, document, state), unset="") for word in node.words]
        texts = [text for text, _ in operands]
        soft = any(soft for _, soft in operands)
        if texts[0] in ("true", "false"):
            answer: bool | None = texts[0] == "true"
        else:
            answer = _test([text for text in texts[1:] if text not in ("]", "]]")])
        return (None if soft else answer), answer

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


def _test(words: list[str | None]) -> bool | None:
    """The answer of `[ words ]`, None where it takes more than comparing texts."""
    if any(word is None for word in words):
        return None
    texts = [word or "" for word in words]
    negate = texts[:1] == ["!"]
    if negate:
        texts = texts[1:]
    answer: bool | None = None
    if len(texts) == 1:
        answer = texts[0] != ""
    elif len(texts) == 2 and texts[0] in ("-n", "-z"):
        answer = (texts[1] != "") == (texts[0] == "-n")
    elif len(texts) == 3 and texts[1] in ("=", "=="):
        answer = fnmatch.fnmatchcase(texts[0], texts[2])
    elif len(texts) == 3 and texts[1] == "!=":
        answer = not fnmatch.fnmatchcase(texts[0], texts[2])
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


# -- values ----------------------------------------------------------------------------------------


def _is_command_line(item: Item) -> bool:
    """Whether a word is itself a command that runs a Python program."""
    text = "".join(piece.text or "" for piece in item.pieces)
    return ".py" in text and re.search(r"\.py\s+\S", text) is not None and re.match(r"\s*--?\w", text) is None


def _environment(state: State) -> dict[str, list[Word]]:
    # bash passes no arrays on, exported or not
    names = sorted(name for name in state.exported if isinstance(state.variables.get(name), Scalar))
    return {name: _scalar_words(state.variables[name]) for name in names}


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
