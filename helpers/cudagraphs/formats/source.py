# SPDX-License-Identifier: Apache-2.0
"""A text file as bytes that edits splice into: encoding, byte-order mark, line ends and every untouched byte stay as
they are."""

from __future__ import annotations

import ast
import io
import os
import re
import stat
import sys
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# A recipe of this size is no recipe; parsing ten megabytes of Python takes minutes and gigabytes.
MAX_BYTES = 4 * 2**20


class SourceError(ValueError):
    """A file that cannot be read, parsed or written; the text is one line that says which file, where and what to
    do."""


@dataclass(frozen=True)
class Splice:
    """Replace the bytes `start:end` of the UTF-8 text by `text`; an insertion has `start == end`."""

    start: int
    end: int
    text: str


class TextFile:
    """The text of a file in UTF-8, with what is needed to write it back in its own encoding."""

    def __init__(self, path: Path, raw: bytes, encoding: str, bom: bytes, text: str):
        self.path, self.raw, self.encoding, self.bom = path, raw, encoding, bom
        self.utf8 = text.encode("utf-8")
        self.newline = "\r\n" if b"\r\n" in raw else "\n"
        # byte offset of each line's start; "\r", "\n" and "\r\n" end a line as they do for Python's parser
        self.line_starts = [0] + [match.end() for match in re.finditer(rb"\r\n|\r|\n", self.utf8)]

    @property
    def text(self) -> str:
        return self.utf8.decode("utf-8")

    def offset(self, line: int, column: int) -> int:
        """The byte offset of a 1-based line and a 0-based UTF-8 column, as `ast` gives them."""
        return self.line_starts[line - 1] + column

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def line(self, number: int) -> str:
        """The text of a 1-based line without its line end."""
        end = self.line_starts[number] if number < len(self.line_starts) else len(self.utf8)
        return self.utf8[self.line_starts[number - 1] : end].decode("utf-8").rstrip("\r\n")

    def indent(self, number: int) -> str:
        line = self.line(number)
        return line[: len(line) - len(line.lstrip(" \t\f"))]

    def spliced(self, splices: list[Splice]) -> bytes:
        """The file's new bytes. Splices must not overlap; insertions at one place keep their order.

        Raises SourceError if the file's encoding cannot hold the new text.
        """
        out, position = [], 0
        for splice in sorted(splices, key=lambda s: (s.start, s.end)):
            if splice.start < position:
                raise AssertionError(f"overlapping edits at byte {splice.start} of {self.path}")
            out += [self.utf8[position : splice.start], splice.text.encode("utf-8")]
            position = splice.end
        out.append(self.utf8[position:])
        try:
            return self.bom + b"".join(out).decode("utf-8").encode(self.encoding)
        except UnicodeEncodeError as error:
            raise SourceError(
                f"{self.path}: the file's encoding {self.encoding} cannot hold the new text ({error.reason})"
            ) from None


def read_bytes(path: Path) -> bytes:
    """The file's bytes. Raises SourceError for a missing file, a directory, one that cannot be read, or one over
    MAX_BYTES."""
    try:
        size = path.stat().st_size
        if path.is_dir():
            raise SourceError(f"{path}: is a directory; name one recipe file")
        if not stat.S_ISREG(path.stat().st_mode):
            raise SourceError(f"{path}: is not a regular file")
        if size > MAX_BYTES:
            raise SourceError(
                f"{path}: {size:,} bytes is too large for a recipe (the limit is {MAX_BYTES:,}); split the file"
            )
        return path.read_bytes()
    except FileNotFoundError:
        raise SourceError(f"{path}: no such file") from None
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror or error})") from None


def load(path: Path) -> TextFile:
    """Decode a file as Python's tokenizer would (UTF-8, or a byte-order mark, or a coding line)."""
    raw = read_bytes(path)
    bom = b"\xef\xbb\xbf" if raw.startswith(b"\xef\xbb\xbf") else b""
    body = raw[len(bom) :]
    try:
        encoding = "utf-8" if bom else tokenize.detect_encoding(io.BytesIO(body).readline)[0]
        text = body.decode("utf-8" if encoding == "utf-8-sig" else encoding)
        whole = text.encode("utf-8" if encoding == "utf-8-sig" else encoding) == body
    except SyntaxError as error:
        raise SourceError(
            f"{path}: unreadable text ({error.msg}); save it as UTF-8 or name its encoding in line 1"
        ) from None
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{path}: not {error.encoding} at byte {error.start}; save it as UTF-8 or name its encoding in line 1"
        ) from None
    except (LookupError, UnicodeError, ValueError) as error:
        raise SourceError(f"{path}: its encoding is none for text ({error}); save it as UTF-8") from None
    if not whole:
        raise SourceError(f"{path}: its encoding {encoding} does not give the same bytes back; save it as UTF-8")
    return TextFile(path, raw, encoding, bom, text)


def parse_python(file: TextFile) -> ast.Module:
    """The syntax tree. Raises SourceError naming line and column when the running Python cannot parse the text."""
    if "\0" in file.text:
        raise SourceError(f"{file.path}: holds null bytes, so it is not Python source")
    try:
        return ast.parse(file.text, filename=str(file.path))
    except SyntaxError as error:
        running = ".".join(map(str, sys.version_info[:2]))
        raise SourceError(
            f"{file.path}:{error.lineno or 1}:{error.offset or 1}: not valid Python {running} ({error.msg}); "
            "mend the line, or run with the Python version the recipe is written for"
        ) from None
    except (RecursionError, MemoryError):
        raise SourceError(f"{file.path}: nested too deeply to parse") from None


def check_writable(path: Path) -> None:
    """Raises SourceError if the file, or the folder that must take the temporary file beside it, may not be written."""
    try:
        target = path.resolve()
    except (OSError, RuntimeError):  # Python 3.10 to 3.12 raise the second
        raise SourceError(f"{path}: is a loop of symbolic links; give --output") from None
    if target.exists():
        mode = target.stat().st_mode
        if not stat.S_ISREG(mode):  # a rename would put a file in the place of a device, for root even of /dev/null
            raise SourceError(f"{path}: is no regular file; give the name of one")
        # root passes every access check, but a file without any write bit was locked on purpose
        if not mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH) or not os.access(target, os.W_OK):
            raise SourceError(f"{path}: is read-only; make it writable or give --output")
    if not target.parent.is_dir():
        raise SourceError(f"{path}: the folder {target.parent} does not exist")
    if not os.access(target.parent, os.W_OK):
        raise SourceError(f"{path}: the folder {target.parent} is not writable; give --output")


def _copy_owner_and_mode(target: Path, copy: str) -> None:
    have = target.stat()
    if (have.st_uid, have.st_gid) != (os.geteuid(), os.getegid()):
        try:
            os.chown(copy, have.st_uid, have.st_gid)
        except OSError:
            pass  # only root may give files away; the mode below still lets the same people at it
    os.chmod(copy, stat.S_IMODE(have.st_mode))


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Keep other runs of the helpers from replacing the file between the comparison and the rename."""
    if not target.exists():
        yield
        return
    import fcntl

    with target.open("rb") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: the rename alone still leaves one whole file
        yield


def write_atomically(path: Path, data: bytes, expected: bytes | None = None) -> None:
    """Replace the file by `data` in one step, keeping its mode; a symbolic link stays a link and its target is
    replaced.

    `expected` is what the file held when it was read: if it holds something else by now, nothing is written.
    Raises SourceError when the file changed meanwhile or cannot be written; the old file is then still whole.
    """
    import tempfile  # it brings shutil and every compression module along, and most runs write nothing

    check_writable(path)
    target = path.resolve()
    temporary = ""
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        if target.exists():
            _copy_owner_and_mode(target, temporary)
        else:
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
        with _locked(target):
            if expected is not None and (not target.exists() or target.read_bytes() != expected):
                raise SourceError(f"{path}: changed while it was being worked on; nothing written, run again")
            os.replace(temporary, target)
        temporary = ""
    except OSError as error:
        raise SourceError(f"{path}: cannot be written ({error.strerror or error})") from None
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
