# SPDX-License-Identifier: Apache-2.0
"""Text files: every untouched byte stays, and a file is either the old one or the new one, whole."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cudagraphs.formats.source import (
    MAX_BYTES,
    SourceError,
    Splice,
    TextFile,
    load,
    parse_python,
    read_bytes,
    write_atomically,
)
from hypothesis import given
from hypothesis import strategies as st

HELPERS = Path(__file__).resolve().parents[2] / "helpers"

KEPT = [
    pytest.param(b"a = 1\nb = 2\n", id="plain"),
    pytest.param(b"a = 1\r\nb = 2\r\n", id="CRLF"),
    pytest.param(b"a = 1\rb = 2\r", id="old Mac line ends"),
    pytest.param(b"a = 1\r\nb = 2\n", id="mixed line ends"),
    pytest.param(b"\xef\xbb\xbfa = 1\nb = 2\n", id="byte-order mark"),
    pytest.param(b"# -*- coding: latin-1 -*-\na = 1\nb = '\xe9'\n", id="Latin-1 with a coding line"),
    pytest.param(b"if 1:\n\ta = 1\n\tb = 2", id="tabs, no newline at the end"),
    pytest.param("a = 1\nb = 'schön'\n".encode(), id="UTF-8"),
    pytest.param(b"a = 1\n\x0c\nb = 2\n", id="form feed"),
]


@pytest.mark.parametrize("raw", KEPT)
def test_no_edit_gives_the_same_bytes(tmp_path, raw):
    path = tmp_path / "file.py"
    path.write_bytes(raw)
    assert load(path).spliced([]) == raw


@pytest.mark.parametrize("raw", KEPT)
def test_an_edit_changes_its_span_only(tmp_path, raw):
    path = tmp_path / "file.py"
    path.write_bytes(raw)
    file = load(path)
    tree = parse_python(file)
    import ast

    value = next(node.value for node in ast.walk(tree) if isinstance(node, ast.Assign) and node.targets[0].id == "a")
    start, end = file.span(value)
    assert file.spliced([Splice(start, end, "17")]) == raw.replace(b"a = 1", b"a = 17")


@given(
    text=st.text(alphabet="ab =é\r\n\t'日", max_size=60),
    cuts=st.lists(st.integers(0, 200), max_size=6),
    new=st.text(max_size=5),
)
def test_splices_keep_everything_between_them(text, cuts, new):
    file = TextFile(Path("x.py"), text.encode(), "utf-8", b"", text)
    cuts = sorted({min(cut, len(file.utf8)) for cut in cuts})
    cuts = cuts[: len(cuts) // 2 * 2]
    if any(file.utf8[cut : cut + 1] and (file.utf8[cut] & 0xC0) == 0x80 for cut in cuts):
        return  # a cut inside a character: spans of nodes never are
    try:
        new.encode()
    except UnicodeEncodeError:
        return
    splices = [Splice(start, end, new) for start, end in zip(cuts[::2], cuts[1::2])]
    expected, position = b"", 0
    for splice in splices:
        expected += file.utf8[position : splice.start] + new.encode()
        position = splice.end
    assert file.spliced(splices[::-1]) == expected + file.utf8[position:]


def test_overlapping_splices_are_a_fault():
    file = TextFile(Path("x.py"), b"abc", "utf-8", b"", "abc")
    with pytest.raises(AssertionError, match="overlapping"):
        file.spliced([Splice(0, 2, "x"), Splice(1, 3, "y")])


def test_text_that_the_encoding_cannot_hold_is_refused():
    file = TextFile(Path("x.py"), b"a", "latin-1", b"", "a")
    with pytest.raises(SourceError, match="latin-1 cannot hold"):
        file.spliced([Splice(0, 1, "日")])


UNREADABLE = [
    pytest.param(None, "no such file", id="missing"),
    pytest.param("folder", "is a directory", id="a directory"),
    pytest.param(b"#" * (MAX_BYTES + 1), "too large", id="larger than a recipe can be"),
    pytest.param(b"\xff\xfea\x00", "unreadable text .*save it as UTF-8", id="UTF-16"),
    pytest.param(b"# coding: klingon\n", "unreadable text", id="an unknown coding line"),
    pytest.param(b"x = '\xe9'\n", "name its encoding in line 1", id="Latin-1 without a coding line"),
    pytest.param(b"\n\n\nx = '\xe9'\n", "not utf-8 at byte 8", id="Latin-1 further down"),
]


@pytest.mark.parametrize("content, message", UNREADABLE)
def test_unreadable_files_say_why_in_one_line(tmp_path, content, message):
    path = tmp_path / "file.py"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(SourceError, match=message) as error:
        load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


NOT_PYTHON = [
    pytest.param("def f(:\n", r"file.py:1:7: not valid Python", id="a syntax error, with line and column"),
    pytest.param("x = 1\ny = t'{x'\n", r"file.py:2:", id="syntax that no running Python has yet"),
    pytest.param("x = 1\0\n", "holds null bytes", id="null bytes"),
    pytest.param("x = " + "(" * 5000 + ")" * 5000, r"not valid Python|nested too deeply", id="deep nesting"),
    pytest.param("if True:\n\tx = 1\n        y = 2\n", r"file.py:3:", id="tabs mixed with spaces"),
]


@pytest.mark.parametrize("text, message", NOT_PYTHON)
def test_what_is_not_python_is_named_with_its_place(tmp_path, text, message):
    file = TextFile(tmp_path / "file.py", text.encode(), "utf-8", b"", text)
    with pytest.raises(SourceError, match=message) as error:
        parse_python(file)
    assert "\n" not in str(error.value)


# -- writing -----------------------------------------------------------------------------------------------------------


def test_replaces_the_file_and_keeps_its_mode(tmp_path):
    path = tmp_path / "file.py"
    path.write_bytes(b"old")
    path.chmod(0o754)
    write_atomically(path, b"new", b"old")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o754
    assert os.listdir(tmp_path) == ["file.py"]


def test_a_new_file_gets_the_usual_mode(tmp_path):
    previous = os.umask(0o027)
    try:
        write_atomically(tmp_path / "new.py", b"new")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "new.py").stat().st_mode) == 0o640


def test_a_symbolic_link_stays_one_and_its_target_is_replaced(tmp_path):
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / "file.py"
    target.write_bytes(b"old")
    link = tmp_path / "link.py"
    link.symlink_to(target)
    write_atomically(link, b"new", b"old")
    assert link.is_symlink() and target.read_bytes() == b"new"
    assert os.listdir(tmp_path / "real") == ["file.py"]


REFUSED = [
    pytest.param(
        lambda p: p.write_bytes(b"theirs"),
        "changed while it was being worked on",
        b"theirs",
        id="somebody else wrote it",
    ),
    pytest.param(lambda p: p.chmod(0o444), "is read-only", b"old", id="read-only"),
    pytest.param(lambda p: p.unlink(), "changed while it was being worked on", None, id="somebody else removed it"),
]


@pytest.mark.parametrize("meanwhile, message, left", REFUSED)
def test_refused_writes_leave_the_file(tmp_path, meanwhile, message, left):
    path = tmp_path / "file.py"
    path.write_bytes(b"old")
    meanwhile(path)
    with pytest.raises(SourceError, match=message):
        write_atomically(path, b"new", b"old")
    assert (path.read_bytes() if left is not None else None) == left
    assert os.listdir(tmp_path) == (["file.py"] if left is not None else [])


@pytest.mark.parametrize(
    "where",
    [pytest.param("no/such/folder/file.py", id="a folder that does not exist"), pytest.param(".", id="a folder")],
)
def test_targets_that_cannot_be_written_say_so(tmp_path, where):
    with pytest.raises(SourceError):
        write_atomically(tmp_path / where, b"new")
    assert os.listdir(tmp_path) == []


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file.py"
    path.write_bytes(b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SourceError, match="No space left on device"):
        write_atomically(path, b"new", b"old")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file.py"]


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_kill_in_the_middle_leaves_the_old_file(tmp_path, moment):
    path = tmp_path / "file.py"
    path.write_bytes(b"old")
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom cudagraphs.formats.source import write_atomically\n"
        f"os.{moment} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\nwrite_atomically(Path(sys.argv[1]), b'new' * 100000, b'old')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], env={**os.environ, "PYTHONPATH": str(HELPERS)})
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"


def test_of_two_writers_at_once_exactly_one_wins(tmp_path):
    path = tmp_path / "file.py"
    code = (
        "import sys\nfrom pathlib import Path\nfrom cudagraphs.formats.source import SourceError, write_atomically\n"
        "path, mine = Path(sys.argv[1]), sys.argv[2].encode()\nsys.stdin.readline()\n"
        "try:\n    write_atomically(path, mine, b'old')\nexcept SourceError:\n    sys.exit(1)\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    for _ in range(5):
        path.write_bytes(b"old")
        writers = [
            subprocess.Popen([*command, name], stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(HELPERS)})
            for name in ("one", "two", "three")
        ]
        for writer in writers:
            writer.stdin.write(b"go\n")
            writer.stdin.flush()
        codes = [writer.wait() for writer in writers]
        for writer in writers:
            writer.stdin.close()
        assert sorted(codes) == [0, 1, 1]
        assert path.read_bytes() == (b"one", b"two", b"three")[codes.index(0)]


def test_reading_says_what_is_in_the_way(tmp_path):
    (tmp_path / "file.py").write_bytes(b"")
    with pytest.raises(SourceError, match="cannot be read"):
        read_bytes(tmp_path / "file.py" / "below")
