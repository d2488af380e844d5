# SPDX-License-Identifier: Apache-2.0
"""Launch scripts: what bash decides is read as it decides it, and what it cannot be known to decide is not known."""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
from cudagraphs import versions
from cudagraphs.formats.arguments import LaunchScript
from cudagraphs.formats.shell_run import Run
from cudagraphs.formats.source import SourceError

BASH = shutil.which("bash")
V19 = versions.resolve("megatron-lm", mcore="0.19.2", te="2.14", torch="2.11", automodel="0.7")

DECIDED = {
    "negated test": 'X=1; if ! [ "$X" = 1 ]; then A=1; else A=2; fi; torchrun $A',
    "negated and-or": 'X=1; A=0; ! [ $X = 2 ] && A=1; torchrun $A',
    "double negation": 'X=1; A=0; if ! [ ! "$X" = 1 ]; then A=1; fi; torchrun $A',
    "arguments of a function": 'go() { torchrun "$@" "$1" $# "$*"; }; go --lr "1 2"; go',
    "arguments are the caller's again": 'f() { :; }; g() { f x y; torchrun "$@"; }; g a b',
    "set and shift": 'set -- a "b c" d; shift; torchrun "$@" "$1" $#',
    "local": "A=1; f() { local A=2; torchrun $A; }; f; torchrun $A",
    "declare in a function": "A=1; B=0; f() { declare A=2 B=3; A=4; }; f; torchrun $A x$B",
    "declare -g": "A=1; f() { declare -g A=2; }; f; torchrun $A",
    "subshell": "A=1; ( A=2; torchrun $A; exit 0 ); torchrun $A",
    "function that is a subshell": "A=1; f() ( A=2; exit 0 ); f; torchrun $A",
    "pipeline": "A=1; { A=2; } | cat; echo | A=3; torchrun $A",
    "loop in a pipeline": "A=1; echo | while read -r x; do A=2; done; torchrun $A",
    "loop over nothing": 'A=1; for x in; do A=2; done; B=(); for x in "${B[@]}"; do A=3; done; torchrun $A',
    "while false": "A=1; while false; do A=2; done; until true; do A=3; done; torchrun $A",
    "loop over words": "A=1; for x in a b; do A=2; done; torchrun $A",
    "break": "A=1; while true; do A=2; break; A=3; done; torchrun $A",
    "return": "f() { A=1; return; A=2; }; f; torchrun $A",
    "exit in a function": "f() { torchrun 1; exit 0; }; f; torchrun 2",
    "no pattern in [": 'A=1; if [ bcd = "b*" ]; then A=2; fi; if [ "b*" = "b*" ]; then A="${A}x"; fi; torchrun $A',
    "quoted pattern in [[": 'P="b*"; A=1; if [[ bcd == "$P" ]]; then A=2; fi; torchrun $A',
    "pattern in [[": 'P="b*"; A=1; if [[ bcd == $P ]]; then A=2; fi; torchrun $A',
    "quoted pattern of case": 'A=1; case bcd in "b*") A=2;; b*) A=3;; esac; torchrun $A',
    "case falls into the next arm": 'A=; case a in a) A+=1;& b) A+=2;; c) A+=3;; esac; torchrun "$A"',
    "case falls through several arms": 'A=; case b in a) A+=1;& b) A+=2;& c) A+=3;& d) A+=4; esac; torchrun "$A"',
    "case tries the next patterns": 'A=; case ab in a*) A+=1;;& x) A+=2;;& *b) A+=3;; *) A+=4;; esac; torchrun "$A"',
    "case tries on and takes the star": 'A=; case ab in a*) A+=1;;& x) A+=2;; *) A+=4;;& ab) A+=5; esac; torchrun "$A"',
    "case falls, then tries": 'A=; case ab in a*) A+=1;& x) A+=2;;& ab) A+=3;; *) A+=4;; esac; torchrun "$A"',
    "case that exits before it tries": 'case a in a) torchrun 1; exit;;& *) torchrun 2;; esac; torchrun 3',
    "assignment in the background": "A=1; A=2 & wait; torchrun $A",
    "group in the background": "A=1; B=0; { A=2; export B=3; torchrun x$A; } & wait; torchrun $A x$B",
    "function in the background": "A=1; f() { A=2; }; f & wait; f && A=3 & wait; torchrun $A",
    "exit in the background": "torchrun 1; exit 0 & wait; torchrun 2",
    "condition in the background": "A=1; if true; then A=2; fi & wait; torchrun $A",
    "both streams redirected": "A=1; f() { A=2; }; f &> /dev/null; torchrun $A &>> /dev/null; torchrun $A &>/dev/null",
    "text before an array": 'A=(a "b c" d); torchrun "x${A[@]}"',
    "text behind an array": 'A=(a "b c" d); torchrun "${A[@]}x" --lr="${A[@]}"y',
    "text around an empty array": 'A=(); torchrun "x${A[@]}y" "z"',
    "array between arrays": 'A=(a b); B=(c d); torchrun "${A[@]}-${B[@]}" "${A[*]}-${B[@]}"',
    "arguments behind text": 'f() { torchrun "--x=$@"; }; f a b "c d"; f',
    "array in an array": 'A=(a "b c"); B=("x${A[@]}" y); torchrun "${B[@]}"',
    "star is one word": 'A=(a b c); torchrun "${A[*]}" "${A[@]}"',
    "reference": "A=(x); declare -n R=A; R+=(y); torchrun \"${A[@]}\"",
    "heredoc in a process of its own": "A=1\nbash <<'END'\nA=2\nEND\ntorchrun $A",
}

UNDECIDED = {
    "loop over unknown items": ('A=1; for x in $(ls); do A=2; done; torchrun "$A"', {"1", "2"}),
    "loop over the arguments": ('A=1; while [ $# -gt 0 ]; do A=2; shift; done; torchrun "$A"', {"1", "2"}),
    "early return": ('f() { A=1; if [ -f x ]; then return; fi; A=2; }; f; torchrun "$A"', {"1", "2"}),
    "break on a condition": ('A=1; while true; do if [ -f x ]; then break; fi; A=2; done; torchrun "$A"', {"1", "2"}),
    "test of what the loop sets": ('X=1; A=1; for i in 1 2; do if [ $X = 2 ]; then A=2; fi; X=2; done; torchrun "$A"',
                                   {"1", "2"}),
    "case that falls on a condition": (
        'A=0; case $X in a) A=1;& b) A=2;; c) A=3;; esac; torchrun "$A"', {"0", "2", "3"}),
    "case that tries on a condition": (
        'A=0; case $X in a*) A=1;;& *b) A=2;; *) A=3;; esac; torchrun "$A"', {"2", "3"}),
    "case whose subject its arm changes": (
        'X=a; A=0; case $X in a) X=b;;& b) A=1;; esac; torchrun "$A"', {"0", "1"}),
    "text before an array of unknown length": (
        'A=(a); if [ -f x ]; then A+=(b); fi; torchrun "x${A[@]}"', {None}),
    "text before an unknown array": ('A=($(tool)); torchrun "x${A[@]}"', {None}),
    "arithmetic": ('A=1; (( N > 1 )) && [ a = a ] && A=2; torchrun "$A"', {"1", "2"}),
    "comparison in [[": ('A=1; if [[ a > b ]]; then A=2; fi; torchrun "$A"', {"1", "2"}),
    "eval": ('A=1; B=1; eval "A=2"; torchrun "$A" "$B"', {None, "1"}),
    "eval of anything": ('A=1; eval "$(tool)"; torchrun "$A"', {None}),
    "source": ('A=1; source nowhere.sh; torchrun "$A"', {None}),
    "unset of an element": ('A=(a b); unset "A[-1]"; torchrun "${A[@]}"', {None}),
    "reference to anything": ('A=1; declare -n R=$X; R=2; torchrun "$A"', {None}),
    "read": ('A=1; read -r A; torchrun "$A"', {None}),
    "arithmetic assignment": ('A=1; ((A += 1)); torchrun "$A"', {None}),
    "arguments of unknown number": ('f() { torchrun "$2"; }; f $X a', {None}),
}  # fmt: skip


def calls(text: str) -> list[list]:
    return [run.words[1:] for run in Run(Path("s.sh"), text).invocations if run.words[0].text == "torchrun"]


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize("text", DECIDED.values(), ids=DECIDED)
def test_what_bash_decides(tmp_path, text):
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(f"#!{BASH}\nprintf '%s\\n' \"$#\" \"$@\" >> \"$LOG\"\n")
    torchrun.chmod(0o755)
    (tmp_path / "s.sh").write_text(text + "\n")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(tmp_path / "log")}
    subprocess.run([BASH, "s.sh"], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, check=True)
    lines = [str(item) for words in calls(text) for item in (len(words), *(word.text for word in words))]
    assert not any(word.guards for words in calls(text) for word in words)
    assert lines == (tmp_path / "log").read_text().splitlines()


@pytest.mark.parametrize("text, expected", UNDECIDED.values(), ids=UNDECIDED)
def test_what_cannot_be_decided(text, expected):
    (words,) = calls(text)
    assert {word.text for word in words} == expected
    assert len(expected - {None}) < 2 or all(word.guards for word in words)


def test_nul_byte_is_refused_with_its_line(tmp_path):
    path = tmp_path / "s.sh"
    path.write_bytes(b"torchrun t.py --num-layers 2\n\0\n")
    with pytest.raises(SourceError, match=r"s\.sh:2: holds a NUL byte"):
        LaunchScript(path, V19)


def test_argument_of_a_function_is_changed_where_it_is_called(tmp_path):
    path = tmp_path / "s.sh"
    path.write_text('go() {\n  torchrun p.py "$@"\n}\ngo --num-layers 2 --cuda-graph-impl local\n')
    script = LaunchScript(path, V19)
    after, skipped = script.edited("p.py", {"cuda_graph_impl": "transformer_engine"})
    assert skipped == {}
    assert after.file.text == textwrap.dedent("""\
        go() {
          torchrun p.py "$@"
        }
        go --num-layers 2 --cuda-graph-impl transformer_engine
        """)
