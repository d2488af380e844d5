# SPDX-License-Identifier: Apache-2.0
"""YAML files as data with places, and edits that keep every other byte.

Values are found with `yaml.compose`, whose marks count characters. An edit replaces, inserts or removes one entry;
afterwards the text is loaded again, and the data must differ from before at that entry only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from cudagraphs.formats.source import SourceError, Splice, TextFile, load
from cudagraphs.settings import Source

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# A recipe that is written out has some hundreds of values; aliases of aliases reach billions in a few lines.
MAX_NODES = 100_000


class YamlFile:
    """One YAML document. `data` is what it loads to, `root` the node tree."""

    def __init__(self, path: Path, file: TextFile | None = None):
        self.path = path
        self.file = file or load(path)
        self.text = self.file.text
        # JSON is read as YAML, but what is written into it has to stay JSON
        self.json = path.suffix == ".json"
        try:
            # libyaml's marks differ in places from those of the pure Python loader, whose data it gives ten times as
            # fast
            self.root = yaml.compose(self.text, Loader=yaml.SafeLoader)
            if "*" in self.text:
                self._count(self.root)
            self.data = yaml.load(self.text, Loader=LOADER)
            if self.data is None:
                self.root = None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
            raise SourceError(f"{place}: not valid YAML ({error.problem or error.context}); mend the line") from None
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise SourceError(
                f"{path}: not valid YAML ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
            ) from None

    def _count(self, root: yaml.Node | None) -> None:
        """Raises SourceError where aliases lead back into themselves, or stand for too much; each node is seen once."""
        sizes: dict[int, int] = {}
        within: set[int] = set()

        def size(node: yaml.Node | None) -> int:
            if not isinstance(node, yaml.CollectionNode):
                return 1
            if id(node) in within:
                raise SourceError(f"{self.source(node)}: an alias stands inside of what it names; write the value out")
            if id(node) not in sizes:
                within.add(id(node))
                children = [
                    child for entry in node.value for child in (entry if isinstance(entry, tuple) else (entry,))
                ]
                sizes[id(node)] = 1 + sum(size(child) for child in children)
                within.discard(id(node))
            if sizes[id(node)] > MAX_NODES:
                raise SourceError(
                    f"{self.source(node)}: aliases make more than {MAX_NODES:,} values of this; write out what is needed"
                )
            return sizes[id(node)]

        size(root)

    # -- reading -----------------------------------------------------------------------------------

    def entries(self, node: yaml.Node | None) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Key and value nodes of a mapping by key, merged mappings (`<<`) included.

        Of two equal keys the last counts.
        """
        found: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        if not isinstance(node, yaml.MappingNode):
            return found
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                parents = value.value if isinstance(value, yaml.SequenceNode) else [value]
                for parent in parents:
                    for name, entry in self.entries(parent).items():
                        found.setdefault(name, entry)
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                found[key.value] = (key, value)
        return found

    def own(self, node: yaml.Node | None) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """The entries that stand in the mapping itself."""
        if not isinstance(node, yaml.MappingNode):
            return {}
        return {
            k.value: (k, v)
            for k, v in node.value
            if isinstance(k, yaml.ScalarNode) and k.tag != "tag:yaml.org,2002:merge"
        }

    def node(self, path: Sequence[str]) -> yaml.Node | None:
        node: yaml.Node | None = self.root
        for part in path:
            entry = self.entries(node).get(part)
            if entry is None:
                return None
            node = entry[1]
        return node

    def source(self, node: yaml.Node) -> Source:
        mark = node.start_mark
        line = self.text[mark.index - mark.column :].partition("\n")[0]
        return Source(str(self.path), mark.line + 1, mark.column + 1, line.strip())

    def construct(self, node: yaml.Node) -> Any:
        """The value of a node, as `yaml.safe_load` makes it."""
        loader = yaml.SafeLoader("")
        try:
            return loader.construct_document(node)
        except (yaml.YAMLError, ValueError):
            return getattr(node, "value", None)

    def leaves(self, node: yaml.Node | None, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, yaml.Node]]:
        """Dotted paths of everything below a mapping that is no mapping itself; an empty mapping is a leaf too."""
        if depth > 40:
            raise SourceError(f"{self.path}: nested too deeply")
        for name, (_, value) in self.entries(node).items():
            path = f"{prefix}{name}"
            if isinstance(value, yaml.MappingNode) and value.value:
                yield from self.leaves(value, f"{path}.", depth + 1)
            else:
                yield path, value

    # -- writing -----------------------------------------------------------------------------------

    def with_value(self, path: Sequence[str], value: Any, text: str | None = None) -> "YamlFile":
        """The file with `value` at `path`; mappings on the way are made where they are missing. `text` is how it is
        written.

        Raises SourceError where the edit would change anything else, or something on the way is no mapping.
        """
        if self.json:
            text = json.dumps(value)
        written = yaml_text(value) if text is None else text
        parent: yaml.Node | None = self.root
        for depth, part in enumerate(path):
            own, inherited = self.own(parent), self.entries(parent)
            if part not in own:
                if part in inherited and depth < len(path) - 1:
                    raise SourceError(
                        f"{self.source(inherited[part][0])}: {'.'.join(path[: depth + 1])} comes from a merged "
                        f"mapping; "
                        "write it out where it is used, then run again"
                    )
                splice = self._insertion(parent, list(path[:depth]), list(path[depth:]), written)
                return self._checked([splice], path, value)
            key, node = own[part]
            if depth == len(path) - 1:
                if (
                    isinstance(node, yaml.SequenceNode)
                    and not node.flow_style
                    and isinstance(value, list)
                    and value
                    and text is None
                ):
                    return self._checked([self._items(node, value)], path, value)
                return self._checked(self._replacement(key, node, written), path, value)
            if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null"):
                return self._checked(self._below_null(key, node, list(path[depth + 1 :]), written), path, value)
            if not isinstance(node, yaml.MappingNode):
                raise SourceError(
                    f"{self.source(node)}: {'.'.join(path[: depth + 1])} is no mapping, so {path[depth + 1]} "
                    f"cannot be set in it"
                )
            if self._is_alias(key, node):
                raise SourceError(
                    f"{self.source(key)}: {'.'.join(path[: depth + 1])} is an alias of a block that others use too; "
                    "write it out here, then run again"
                )
            parent = node
        raise AssertionError("an empty path")

    def without(self, path: Sequence[str]) -> "YamlFile":
        """The file without the entry at `path`, unchanged where there is none.

        Raises SourceError as `with_value` does.
        """
        parent = self.node(path[:-1])
        entry = self.own(parent).get(path[-1])
        if entry is None:
            if path[-1] in self.entries(parent):
                raise SourceError(
                    f"{self.path}: {'.'.join(path)} comes from a merged mapping; take it out there by hand"
                )
            return self
        key, node = entry
        assert isinstance(parent, yaml.MappingNode)
        start, end = key.start_mark.index, self.end(key, node)
        if parent.flow_style:
            after = re.compile(r"\s*,\s*").match(self.text, end)
            before = re.search(r",\s*$", self.text[:start])
            if after:
                end = after.end()
            elif before:
                start = before.start()
            return self._checked([Splice(start, end, "")], path, ...)
        if len(parent.value) == 1:
            # a block mapping cannot be empty in block style
            first = self._line_start(start)
            return self._checked(
                [Splice(start, end, "{}")] if self.text[first:start].strip() else [Splice(start, end, "{}")], path, ...
            )
        line, stop = self._line_start(start), self._line_end(end)
        if self.text[line:start].strip():
            raise SourceError(
                f"{self.source(key)}: {path[-1]} shares its line with something else; take it out by hand"
            )
        return self._checked([Splice(line, min(stop + 1, len(self.text)), "")], path, ...)

    def end(self, key: yaml.Node, node: yaml.Node) -> int:
        """The offset behind the last character of a value; block collections end with their last element."""
        if self._is_alias(key, node):
            match = re.compile(r"\s*:\s*\*[^\s,\]}]+").match(self.text, key.end_mark.index)
            return match.end() if match else key.end_mark.index
        if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
            last_key, last = node.value[-1]
            return self.end(last_key, last)
        if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
            return self.end(node, node.value[-1]) if not self._is_alias(node, node.value[-1]) else node.end_mark.index
        end = node.end_mark.index
        return len(self.text[:end].rstrip()) if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">") else end

    def _is_alias(self, key: yaml.Node, node: yaml.Node) -> bool:
        return (
            re.compile(r"\s*:\s*\*").match(self.text, key.end_mark.index) is not None
            and node.start_mark.index < key.start_mark.index
        )

    def _line_start(self, offset: int) -> int:
        return self.text.rfind("\n", 0, offset) + 1

    def _line_end(self, offset: int) -> int:
        end = self.text.find("\n", offset)
        return len(self.text) if end < 0 else end

    def _replacement(self, key: yaml.Node, node: yaml.Node, written: str) -> list[Splice]:
        start, end = node.start_mark.index, self.end(key, node)
        if self._is_alias(key, node):
            star = self.text.index("*", key.end_mark.index)
            return [Splice(star, end, written)]
        if start < end and (
            self._line_start(start) == self._line_start(key.start_mark.index) or isinstance(node, yaml.ScalarNode)
        ):
            anchor = re.compile(r":(\s+&\S+)?\s*").match(self.text, key.end_mark.index)
            if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
                start = anchor.end() if anchor else start
            return [Splice(start, end, written)]
        colon = self.text.index(":", key.end_mark.index) + 1
        if start >= end:
            return [Splice(colon, colon, f" {written}")]
        # a block collection on the lines below: the value moves up behind the colon, the lines go
        return [
            Splice(colon, colon, f" {written}"),
            Splice(self._line_start(start), min(self._line_end(end) + 1, len(self.text)), ""),
        ]

    def _items(self, node: yaml.SequenceNode, values: list[Any]) -> Splice:
        """A block sequence with other elements, one a line as before."""
        start = node.start_mark.index
        indent = self.text[self._line_start(start) : start]
        end = self.end(node, node.value[-1])
        return Splice(start, end, (self.file.newline + indent).join(f"- {yaml_text(value)}" for value in values))

    def _insertion(self, parent: yaml.Node | None, at: list[str], missing: list[str], written: str) -> Splice:
        if parent is None:
            prefix = "" if not self.text or self.text.endswith("\n") else self.file.newline
            return Splice(
                len(self.text), len(self.text), prefix + self._block(missing, written, "") + self.file.newline
            )
        if not isinstance(parent, yaml.MappingNode):
            raise SourceError(
                f"{self.source(parent)}: {'.'.join(at) or 'the document'} is no mapping, so {missing[0]} cannot be "
                f"set in it"
            )
        if parent.flow_style or not parent.value:
            close = parent.end_mark.index - 1
            keys = [json.dumps(name) for name in missing] if self.json else missing
            pair = f"{keys[-1]}: {written}"
            for name in reversed(keys[:-1]):
                pair = f"{name}: {{{pair}}}"
            if not parent.value:
                return Splice(close, close, pair)
            last = self.end(*parent.value[-1])
            return Splice(last, last, f", {pair}")
        sibling = next((pair for pair in reversed(parent.value) if "cuda" in str(pair[0].value)), parent.value[-1])
        first = parent.value[0][0].start_mark
        indent = self.text[self._line_start(first.index) : first.index]
        indent = indent if not indent.strip() else " " * first.column
        at_end = self._line_end(self.end(*sibling))
        if self.text[at_end - 1 : at_end] == "\r":
            at_end -= 1
        return Splice(at_end, at_end, self.file.newline + self._block(missing, written, indent))

    def _below_null(self, key: yaml.Node, node: yaml.Node, missing: list[str], written: str) -> list[Splice]:
        """`key:` without a value, or with null, becomes a mapping."""
        column = key.start_mark.column
        line_end = self._line_end(key.end_mark.index)
        line_end -= self.text[line_end - 1 : line_end] == "\r"
        block = Splice(line_end, line_end, self.file.newline + self._block(missing, written, " " * (column + 2)))
        start, end = node.start_mark.index, node.end_mark.index
        return [Splice(start, end, ""), block] if end > start and end <= line_end else [block]

    def _block(self, names: list[str], written: str, indent: str) -> str:
        lines = [f"{indent}{'  ' * depth}{name}:" for depth, name in enumerate(names)]
        lines[-1] += f" {written}"
        return self.file.newline.join(lines)

    def _checked(self, splices: list[Splice], path: Sequence[str], value: Any) -> "YamlFile":
        if not self.text.isascii():
            splices = [
                Splice(len(self.text[: s.start].encode()), len(self.text[: s.end].encode()), s.text) for s in splices
            ]
        raw = self.file.spliced(splices)
        text = raw[len(self.file.bom) :].decode(self.file.encoding)
        where = ".".join(path)
        try:
            edited = YamlFile(self.path, TextFile(self.path, raw, self.file.encoding, self.file.bom, text))
        except SourceError as error:
            raise SourceError(f"{self.path}: {where} cannot be set here ({error}); set it by hand") from None
        expected = _changed(self.data, list(path), value)
        if edited.data != expected:
            raise SourceError(f"{self.path}: setting {where} would change other values too; set it by hand")
        return edited


def _changed(data: Any, path: list[str], value: Any) -> Any:
    """A copy of loaded data with another value at the path; `...` removes it."""
    copy = dict(data) if isinstance(data, dict) else {}
    if len(path) == 1:
        if value is ...:
            copy.pop(path[0], None)
        else:
            copy[path[0]] = value
    else:
        copy[path[0]] = _changed(copy.get(path[0]), path[1:], value)
    return copy


def yaml_text(value: Any) -> str:
    """A value as a YAML flow scalar or sequence on one line."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(yaml_text(item) for item in value) + "]"
    if isinstance(value, str):
        text = str(value)
        plain = re.fullmatch(r"[A-Za-z_/][\w./@%+-]*", text) and yaml.safe_load(text) == text
        if plain:
            return text
        return yaml.dump(text, default_style='"', width=10**9, allow_unicode=True).strip()
    return yaml.dump(value, default_flow_style=True, width=10**9).strip().removesuffix("...").strip()
