# SPDX-License-Identifier: Apache-2.0
"""Launch scripts, read without running them: a parser for the part of bash that such scripts are written in.

`parse` gives the commands of a script, every word with its place in the text. `cudagraphs.formats.shell_run` follows
them. What the parser does not know (process substitution, coprocesses) it reads as plain words; it never fails on odd
text, and a word that cannot be worked out is marked so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Union

OPERATORS = ("&&", "||", ";;&", ";;", ";&", ";", "|&", "|", "&", "(", ")", "\n")
ENDS = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]]*\])?(\+?)=")


@dataclass(frozen=True)
class Literal:
    """Text that stands in the script as it is; `start` is the offset of its first character."""

    text: str
    start: int
    quoted: bool = False


@dataclass(frozen=True)
class Variable:
    """`$NAME` or `${NAME...}`.

    `operator` and `operand` are those of `${NAME:-operand}`; `each` is true for `[@]` and `[*]`, `star` for `[*]` only.
    """

    name: str
    quoted: bool
    start: int
    end: int
    each: bool = False
    operator: str = ""
    operand: tuple["Part", ...] = ()
    star: bool = False


@dataclass(frozen=True)
class Opaque:
    """What only running the script can tell: a command substitution, arithmetic, a transformed expansion."""

    text: str
    quoted: bool
    start: int


Part = Union[Literal, Variable, Opaque]


@dataclass(frozen=True)
class Word:
    parts: tuple[Part, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Assignment:
    """`NAME=value`, `NAME+=value` or, with `elements`, `NAME=(...)`; `start` and `end` span the whole assignment."""

    name: str
    append: bool
    value: Word | None
    elements: tuple[Word, ...] | None
    start: int
    end: int


@dataclass
class Command:
    """A simple command: assignments in front of it, its words, and the bodies of its here-documents."""

    assignments: list[Assignment] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    heredocs: list["Heredoc"] = field(default_factory=list)
    start: int = 0
    end: int = 0


@dataclass
class Heredoc:
    start: int
    end: int
    expands: bool


@dataclass
class If:
    """`branches` are pairs of a condition (its commands, its text, its offset) and a body.

    `otherwise` is the else part.
    """

    branches: list[tuple[list["Node"], str, int, list["Node"]]]
    otherwise: list["Node"]


@dataclass
class AndOr:
    """`left && right` (`on` True) or `left || right` (`on` False)."""

    left: "Node"
    right: "Node"
    on: bool
    text: str
    start: int


@dataclass
class Not:
    """`! command`."""

    body: "Node"
    start: int


@dataclass
class Loop:
    """`for` and `select` over `items` (None where they are not a list of words), `while` and `until` with a `condition`.

    `text` is what stands between the keyword and `do`.
    """

    kind: str
    variable: str
    items: tuple[Word, ...] | None
    condition: list["Node"]
    body: list["Node"]
    text: str
    start: int


@dataclass
class Case:
    """`arms` hold the patterns as they are written, the body, the offset, and what ends the arm.

    `;;` ends the command, `;&` goes on with the body of the next arm, `;;&` with the pattern of the next arm.
    """

    subject: Word
    arms: list[tuple[list[str], list["Node"], int, str]]
    start: int


@dataclass
class Function:
    name: str
    body: list["Node"]


@dataclass
class Group:
    """`{ ... }`, or with `subshell` what runs in a process of its own: `( ... )`, each part of a pipeline, and what `&`
    leaves to run beside the script."""

    body: list["Node"]
    subshell: bool = False


Node = Union[Command, If, AndOr, Not, Loop, Case, Function, Group]


def parse(text: str, start: int = 0, end: int | None = None) -> list[Node]:
    """The commands of `text[start:end]`; offsets count characters of the whole text."""
    return _Parser(text, start, len(text) if end is None else end).program()


def loose_words(parts: list[Part]) -> list[list[Part]]:
    """Parts of a string split at white space, as an unquoted expansion is."""
    words: list[list[Part]] = []
    current: list[Part] = []
    for part in parts:
        if not isinstance(part, Literal):
            current.append(part)
            continue
        position = 0
        for match in re.finditer(r"\s+", part.text):
            if match.start() > position:
                current.append(Literal(part.text[position : match.start()], part.start + position))
            if current:
                words.append(current)
            current, position = [], match.end()
        if position < len(part.text):
            current.append(Literal(part.text[position:], part.start + position))
    return [*words, current] if current else words


class _Parser:
    def __init__(self, text: str, start: int, end: int):
        self.text, self.at, self.end = text, start, end
        self.pending: list[tuple[Command, str, bool, bool]] = []

    # -- characters --------------------------------------------------------------------------------

    def peek(self, length: int = 1) -> str:
        return self.text[self.at : min(self.at + length, self.end)]

    def blanks(self) -> None:
        """Skip white space within a line, line continuations, and a comment up to its line end."""
        while self.at < self.end:
            if self.peek() in " \t\r":
                self.at += 1
            elif self.peek(2) == "\\\n":
                self.at += 2
            elif self.peek(3) == "\\\r\n":
                self.at += 3
            elif self.peek() == "#" and (self.at == 0 or self.text[self.at - 1] in " \t\r\n;&|()"):
                while self.at < self.end and self.peek() != "\n":
                    self.at += 1
            else:
                return

    def newline(self) -> None:
        """Step over a line end, and over the bodies of here-documents that start after it."""
        self.at += 1
        for command, mark, strips, expands in self.pending:
            begin = self.at
            while self.at < self.end:
                stop = self.text.find("\n", self.at, self.end)
                stop = self.end if stop < 0 else stop
                line = self.text[self.at : stop].rstrip("\r")
                if (line.lstrip("\t") if strips else line) == mark:
                    command.heredocs.append(Heredoc(begin, self.at, expands))
                    self.at = min(stop + 1, self.end)
                    break
                self.at = min(stop + 1, self.end)
        self.pending = []

    def operator(self) -> str:
        found = next((op for op in OPERATORS if self.text.startswith(op, self.at) and self.at < self.end), "")
        # `&> file` and `&>> file` redirect
        return "" if found == "&" and self.peek(2) == "&>" else found

    # -- commands ----------------------------------------------------------------------------------

    def program(self) -> list[Node]:
        nodes: list[Node] = []
        while self.at < self.end:
            before = self.at
            nodes += self.sequence(frozenset())
            if self.at == before:
                self.at += 1  # a stray closing word: step over it
        return nodes

    def sequence(self, stops: frozenset[str]) -> list[Node]:
        """Commands up to one of the reserved words or operators in `stops`, which is left in place."""
        nodes: list[Node] = []
        while True:
            self.separators(stops)
            if self.at >= self.end:
                return nodes
            word = self.reserved()
            if word in stops or self.operator() in stops or (word in ENDS and not stops):
                if word in ENDS and not stops:
                    self.at += len(word)
                    continue
                return nodes
            if word in ENDS:
                return nodes
            before = self.at
            node = self.and_or()
            self.blanks()
            if node is not None:
                nodes.append(Group([node], subshell=True) if self.operator() == "&" else node)
            if self.at == before:
                self.at += 1

    def separators(self, stops: frozenset[str]) -> None:
        while self.at < self.end:
            self.blanks()
            operator = self.operator()
            if operator == "\n":
                self.newline()
            elif operator in (";", "&", "|", "|&", "&&", "||") and operator not in stops:
                self.at += len(operator)
            elif operator == ")" and ")" not in stops:
                self.at += 1
            else:
                return

    def reserved(self) -> str:
        match = re.compile(
            r"(if|then|elif|else|fi|for|select|while|until|do|done|case|esac|function|[{}!])(?=[\s;&|()]|$)"
        ).match(self.text, self.at, self.end)
        return match.group(1) if match else ""

    def and_or(self) -> Node | None:
        left = self.pipeline()
        while left is not None:
            self.blanks()
            operator = self.operator()
            if operator not in ("&&", "||"):
                return left
            start = getattr(left, "start", self.at)
            text = self.text[start : self.at].strip()
            self.at += 2
            self.blanks()
            while self.operator() == "\n":
                self.newline()
                self.blanks()
            right = self.pipeline()
            if right is None:
                return left
            left = AndOr(left, right, operator == "&&", text, start)
        return left

    def pipeline(self) -> Node | None:
        self.blanks()
        if self.reserved() == "!":
            start = self.at
            self.at += 1
            body = self.pipeline()
            return Not(body, start) if body is not None else None
        first = self.command()
        parts = [first] if first is not None else []
        self.blanks()
        while self.operator() in ("|", "|&"):
            self.at += len(self.operator())
            self.blanks()
            while self.operator() == "\n":
                self.newline()
                self.blanks()
            following = self.command()
            if following is not None:
                parts.append(following)
            self.blanks()
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else Group([Group([part], subshell=True) for part in parts])

    def command(self) -> Node | None:
        word = self.reserved()
        if word == "if":
            return self.if_command()
        if word in ("for", "select", "while", "until"):
            return self.loop(word)
        if word == "case":
            return self.case_command()
        if word == "function":
            self.at += len("function")
            self.blanks()
            match = re.compile(r"[^\s(){}]+").match(self.text, self.at, self.end)
            name = match.group() if match else ""
            self.at = match.end() if match else self.at
            self.blanks()
            if self.peek() == "(":
                self.at += 1
                self.blanks()
                self.at += self.peek() == ")"
            return self.function_body(name)
        if word == "{":
            self.at += 1
            body = self.sequence(frozenset({"}"}))
            self.accept("}")
            return Group(body)
        if self.peek(2) == "((":
            start, stop = self.at, self.text.find("))", self.at, self.end)
            self.at = self.end if stop < 0 else stop + 2
            expression = Opaque(self.text[start : self.at], True, start)
            words = [Word((Literal("((", start),), start, start + 2), Word((expression,), start, self.at)]
            return Command(words=words, start=start, end=self.at)
        if self.peek() == "(":
            self.at += 1
            body = self.sequence(frozenset({")"}))
            self.at += self.peek() == ")"
            self.redirections()
            return Group(body, subshell=True)
        match = re.compile(r"([A-Za-z_][\w:.-]*)[ \t]*\([ \t]*\)").match(self.text, self.at, self.end)
        if match:
            self.at = match.end()
            return self.function_body(match.group(1))
        return self.simple()

    def accept(self, word: str) -> None:
        self.separators(frozenset())
        if self.reserved() == word:
            self.at += len(word)
        self.redirections()

    def redirections(self) -> None:
        """Redirections behind a compound command."""
        command = Command()
        self.blanks()
        while self.redirection(command):
            self.blanks()

    def function_body(self, name: str) -> Node:
        self.blanks()
        while self.operator() == "\n":
            self.newline()
            self.blanks()
        body = self.command()
        if isinstance(body, Group) and not body.subshell:
            return Function(name, body.body)
        return Function(name, [body] if body is not None else [])

    def if_command(self) -> If:
        branches: list[tuple[list[Node], str, int, list[Node]]] = []
        self.at += 2
        while True:
            self.blanks()
            begin = self.at
            condition = self.sequence(frozenset({"then"}))
            text = self.text[begin : self.at].strip().rstrip(";").strip()
            self.at += len("then") if self.reserved() == "then" else 0
            body = self.sequence(frozenset({"elif", "else", "fi"}))
            branches.append((condition, text, begin, body))
            if self.reserved() != "elif":
                break
            self.at += 4
        otherwise: list[Node] = []
        if self.reserved() == "else":
            self.at += 4
            otherwise = self.sequence(frozenset({"fi"}))
        self.accept("fi")
        return If(branches, otherwise)

    def loop(self, word: str) -> Loop:
        start = self.at
        self.at += len(word)
        self.blanks()
        begin, variable = self.at, ""
        items: list[Word] | None = None
        condition: list[Node] = []
        if word in ("while", "until"):
            condition = self.sequence(frozenset({"do"}))
        else:
            match = NAME.match(self.text, self.at, self.end)
            if match:
                variable, self.at = match.group(), match.end()
                items = self.loop_items()
        text = self.text[begin : self.at].strip().rstrip(";").strip()
        # what stands before `do` besides: the three expressions of an arithmetic loop
        while self.at < self.end:
            self.separators(frozenset())
            if self.reserved() == "do" or self.at >= self.end:
                break
            before = self.at
            self.simple(in_loop_head=True)
            if self.at == before:
                self.at += 1
        self.at += 2 if self.reserved() == "do" else 0
        body = self.sequence(frozenset({"done"}))
        self.accept("done")
        return Loop(word, variable, None if items is None else tuple(items), condition, body, text, start)

    def loop_items(self) -> list[Word]:
        """The words behind `in`; without `in` a loop goes over the arguments."""
        self.blanks()
        while self.operator() == "\n":
            self.newline()
            self.blanks()
        if not re.compile(r"in(?=[\s;]|$)").match(self.text, self.at, self.end):
            return [Word((Variable("@", True, self.at, self.at, each=True),), self.at, self.at)]
        self.at += 2
        items: list[Word] = []
        while self.at < self.end:
            self.blanks()
            if self.at >= self.end or self.operator():
                break
            word = self.word()
            if word is None:
                self.at += 1
            else:
                items.append(word)
        return items

    def case_command(self) -> Case:
        start = self.at
        self.at += 4
        self.blanks()
        subject = self.word() or Word((), self.at, self.at)
        self.separators(frozenset())
        if self.text.startswith("in", self.at):
            self.at += 2
        arms: list[tuple[list[str], list[Node], int, str]] = []
        while self.at < self.end:
            self.separators(frozenset())
            if self.reserved() == "esac" or self.at >= self.end:
                break
            begin = self.at
            stop = self.text.find(")", self.at, self.end)
            if stop < 0:
                self.at = self.end
                break
            patterns = [pattern.strip() for pattern in self.text[self.at : stop].lstrip("( ").split("|")]
            self.at = stop + 1
            body = self.sequence(frozenset({";;", ";&", ";;&", "esac"}))
            end = self.operator() if self.operator() in (";;", ";&", ";;&") else ";;"
            arms.append((patterns, body, begin, end))
            if self.operator() == end:
                self.at += len(end)
        self.accept("esac")
        return Case(subject, arms, start)

    def simple(self, in_loop_head: bool = False) -> Command | None:
        command = Command(start=self.at)
        while self.at < self.end:
            self.blanks()
            if self.at >= self.end or self.operator() or (in_loop_head and self.reserved() == "do"):
                break
            before = self.at
            if self.redirection(command):
                if command.words and self.text.startswith("[[", command.words[0].start):
                    # `[[ a < b ]]` compares
                    comparison = Opaque(self.text[before : self.at], True, before)
                    command.words.append(Word((comparison,), before, self.at))
                continue
            assignment = self.assignment() if self.may_assign(command) else None
            if assignment is not None:
                command.assignments.append(assignment)
                continue
            word = self.word()
            if word is None:
                self.at += 1
                continue
            command.words.append(word)
            command.end = word.end
        if command.assignments:
            command.end = max(command.end, command.assignments[-1].end)
        return command if command.words or command.assignments or command.heredocs else None

    def may_assign(self, command: Command) -> bool:
        """Assignments stand in front of a command, or are the arguments of a declaration."""
        if not command.words:
            return True
        first = command.words[0].parts
        return (
            len(first) == 1
            and isinstance(first[0], Literal)
            and first[0].text in ("export", "declare", "local", "readonly", "typeset")
        )

    def redirection(self, command: Command) -> bool:
        match = re.compile(r"(\d*|\{\w+\}|&)(<<<|<<-|<<|>>|>\||>&|<&|<>|>|<)").match(self.text, self.at, self.end)
        if not match:
            return False
        if match.group(2) in ("<", ">") and self.text.startswith("(", match.end()):
            # process substitution: an argument that only running the script can tell
            self.at = self._closing(match.end())
            return True
        self.at = match.end()
        self.blanks()
        word = self.word()
        if match.group(2) in ("<<", "<<-") and word is not None:
            raw = self.text[word.start : word.end]
            mark = raw.replace("'", "").replace('"', "").replace("\\", "")
            self.pending.append((command, mark, match.group(2) == "<<-", raw == mark))
        return True

    def assignment(self) -> Assignment | None:
        match = ASSIGNMENT.match(self.text, self.at, self.end)
        if not match:
            return None
        start, self.at = self.at, match.end()
        name, append = match.group(1), match.group(3) == "+"
        if self.peek() == "(" and not match.group(2):
            self.at += 1
            elements: list[Word] = []
            while self.at < self.end and self.peek() != ")":
                self.blanks()
                if self.peek() == "\n":
                    self.newline()
                    continue
                if self.at >= self.end or self.peek() == ")":
                    break
                word = self.word()
                if word is None:
                    self.at += 1
                else:
                    elements.append(word)
            self.at += self.peek() == ")"
            return Assignment(name, append, None, tuple(elements), start, self.at)
        value = self.word()
        if match.group(2):
            value = Word((Opaque("an element of an array", False, start),), start, self.at)
        return Assignment(name, append, value or Word((), self.at, self.at), None, start, self.at)

    # -- words -------------------------------------------------------------------------------------

    def word(self) -> Word | None:
        start, parts = self.at, []
        while self.at < self.end:
            char = self.peek()
            if char in " \t\r\n;&|()<>":
                if char in "<>" and not parts:
                    break
                if char in "<>" or char in " \t\r\n;&|()":
                    break
            if char == "\\":
                if self.peek(2) == "\\\n" or self.peek(3) == "\\\r\n":
                    break_length = 2 if self.peek(2) == "\\\n" else 3
                    self.at += break_length
                    continue
                parts.append(Literal(self.text[self.at + 1 : self.at + 2], self.at + 1, True))
                self.at += 2
            elif char == "'":
                stop = self.text.find("'", self.at + 1, self.end)
                stop = self.end if stop < 0 else stop
                parts.append(Literal(self.text[self.at + 1 : stop], self.at + 1, True))
                self.at = min(stop + 1, self.end)
            elif char == '"':
                self.at += 1
                parts += self.double_quoted() or [Literal("", self.at, True)]
            elif char == "$":
                parts.append(self.dollar(False))
            elif char == "`":
                parts.append(self.backticks(False))
            else:
                match = re.compile(r"[^\s;&|()<>\\'\"$`]+").match(self.text, self.at, self.end)
                if match is None:
                    self.at += 1
                    continue
                parts.append(Literal(match.group(), self.at))
                self.at = match.end()
        return Word(tuple(parts), start, self.at) if self.at > start else None

    def double_quoted(self) -> list[Part]:
        """Parts up to the closing quote, which is stepped over."""
        parts: list[Part] = []
        begin = self.at
        while self.at < self.end and self.peek() != '"':
            char = self.peek()
            if char in "$`":
                if self.at > begin:
                    parts.append(Literal(self.text[begin : self.at], begin, True))
                parts.append(self.dollar(True) if char == "$" else self.backticks(True))
                begin = self.at
            elif char == "\\":
                if self.at > begin:
                    parts.append(Literal(self.text[begin : self.at], begin, True))
                following = self.text[self.at + 1 : self.at + 2]
                if following == "\n":
                    self.at += 2
                elif self.peek(3) == "\\\r\n":
                    self.at += 3
                else:
                    shown = following if following in '$`"\\' else "\\" + following
                    parts.append(Literal(shown, self.at + (len(shown) == 1), True))
                    self.at += 2
                begin = self.at
            else:
                self.at += 1
        if self.at > begin:
            parts.append(Literal(self.text[begin : min(self.at, self.end)], begin, True))
        self.at = min(self.at + 1, self.end)
        return parts

    def backticks(self, quoted: bool) -> Opaque:
        stop = self.text.find("`", self.at + 1, self.end)
        stop = self.end if stop < 0 else stop
        start, self.at = self.at, min(stop + 1, self.end)
        return Opaque(self.text[start : self.at], quoted, start)

    def dollar(self, quoted: bool) -> Part:
        start = self.at
        following = self.text[self.at + 1 : self.at + 2] if self.at + 1 < self.end else ""
        if following == "(":
            self.at = self._closing(self.at + 1)
            return Opaque(self.text[start : self.at], quoted, start)
        if following == "{":
            return self.braces(quoted)
        match = NAME.match(self.text, self.at + 1, self.end) or re.compile(r"[0-9@*#?$!_-]").match(
            self.text, self.at + 1, self.end
        )
        if match:
            self.at = match.end()
            name = match.group()
            return Variable(name, quoted, start, self.at, each=name in "@*", star=name == "*")
        if following in ("'", '"') and not quoted:
            self.at += 1
            return Literal("", self.at)
        self.at += 1
        return Literal("$", start, quoted)

    def braces(self, quoted: bool) -> Part:
        start = self.at
        match = re.compile(r"\$\{([A-Za-z_]\w*|[0-9@*#?]+)(\[[@*]\])?").match(self.text, self.at, self.end)
        if not match:
            self.at = self._closing(self.at + 1)
            return Opaque(self.text[start : self.at], quoted, start)
        name, each = match.group(1), bool(match.group(2)) or match.group(1) in ("@", "*")
        star = match.group(2) == "[*]" or name == "*"
        self.at = match.end()
        if self.peek() == "}":
            self.at += 1
            return Variable(name, quoted, start, self.at, each, star=star)
        operator = re.compile(r":?[-=+?]").match(self.text, self.at, self.end)
        if operator is None:
            self.at = self._closing(start + 1)
            return Opaque(self.text[start : self.at], quoted, start)
        self.at = operator.end()
        operand = self.operand(quoted)
        return Variable(name, quoted, start, self.at, each, operator.group()[-1], tuple(operand), star)

    def operand(self, quoted: bool) -> list[Part]:
        """Parts of a default value up to the closing brace, which is stepped over."""
        parts: list[Part] = []
        while self.at < self.end and self.peek() != "}":
            char = self.peek()
            if char == "$":
                parts.append(self.dollar(quoted))
            elif char == '"':
                self.at += 1
                parts += self.double_quoted()
            elif char == "'" and not quoted:
                stop = self.text.find("'", self.at + 1, self.end)
                stop = self.end if stop < 0 else stop
                parts.append(Literal(self.text[self.at + 1 : stop], self.at + 1, True))
                self.at = min(stop + 1, self.end)
            elif char == "\\" and self.at + 1 < self.end:
                parts.append(Literal(self.text[self.at + 1], self.at + 1, True))
                self.at += 2
            else:
                match = re.compile(r"[^}$\"'\\]+").match(self.text, self.at, self.end)
                stop = match.end() if match else self.at + 1
                parts.append(Literal(self.text[self.at : stop], self.at, quoted))
                self.at = stop
        self.at = min(self.at + 1, self.end)
        return parts

    def _closing(self, at: int) -> int:
        """The offset behind the bracket that closes the one at `at`, quotes and nesting respected."""
        pairs = {"(": ")", "{": "}"}
        stack = [pairs[self.text[at]]]
        at += 1
        while at < self.end and stack:
            char = self.text[at]
            if char == "\\":
                at += 1
            elif char == "'" and stack[-1] == ")":
                stop = self.text.find("'", at + 1, self.end)
                at = self.end if stop < 0 else stop
            elif char in pairs:
                stack.append(pairs[char])
            elif char == stack[-1]:
                stack.pop()
            at += 1
        return min(at, self.end)
