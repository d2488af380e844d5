#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build the skill's install archive, install it into a project, sign and verify it.

The install archive has one top folder, nemo-cuda-graphs, and leaves evals/ and tests/ out, so that an agent under test cannot
read the answers. Its bytes depend on the tree alone. It also holds SHA256SUMS and a generated skill-card.md.

Usage:
    python helpers/package_skill.py --output dist                    install archive, source archive, checksums
    python helpers/package_skill.py --install PROJECT                into PROJECT/.agents/skills (Codex, Cursor, Gemini CLI, OpenCode)
    python helpers/package_skill.py --install PROJECT --client claude    into PROJECT/.claude/skills
    python helpers/package_skill.py --install PROJECT --force        also over a copy that was changed there
    python helpers/package_skill.py --unpack ARCHIVE --into DIR      refuses path tricks, checks every checksum
    python helpers/package_skill.py --output dist --sign KEY.pem     also a signature file beside the install archive
    python helpers/package_skill.py --verify ARCHIVE [--signature FILE --public-key KEY.pem]

Signing and verifying with keys need the package model-signing (`pip install model-signing pyopenssl`).

Output: the paths written, one a line; with --json one object with schema_version.

Exit codes:
    0  done; verified
    1  verification failed, or an archive was refused
    2  usage, or input that cannot be read
    3  a fault of this helper
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

sys.pycache_prefix = sys.pycache_prefix or os.path.expanduser("~/.cache/nemo-cuda-graphs/pycache")

from cudagraphs import __version__, cli, report  # noqa: E402
from cudagraphs.formats.source import SourceError  # noqa: E402

PROGRAM = "package_skill"
NAME = "nemo-cuda-graphs"
ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ("SKILL.md", "card.yaml", "BENCHMARK.md", "LICENSE", "helpers", "templates", "references")
# README.md tells of set-up, tests and evals, which an installed skill does not have
SOURCE_ONLY = ("README.md", "evals", "tests", "pyproject.toml", ".ci", ".gitignore", ".claude-plugin")
SUMS = "SHA256SUMS"
CLIENTS = {"agents": ".agents/skills", "claude": ".claude/skills"}
# No archive of this pack comes near this; a bomb would.
MAX_UNPACKED = 200 * 2**20
# File systems take names of 255 bytes and paths of 4096; what the path is unpacked into needs room too.
MAX_NAME, MAX_PATH = 255, 1024


class Refused(Exception):
    """An archive or a signature that must not be trusted; the text is one line."""


def build_parser() -> argparse.ArgumentParser:
    parser = cli.Parser(prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=Path, metavar="DIR", help="build both archives into this folder")
    what.add_argument("--install", type=Path, metavar="PROJECT", help="put the skill into a project")
    what.add_argument("--unpack", type=Path, metavar="ARCHIVE", help="unpack an install archive safely")
    what.add_argument("--verify", type=Path, metavar="ARCHIVE", help="check an archive's checksums, and its signature if given")
    parser.add_argument("--client", choices=sorted(CLIENTS), default="agents", help="which skills folder --install writes to")
    parser.add_argument("--force", action="store_true", help="replace an installed copy even if it was changed")
    parser.add_argument("--into", type=Path, metavar="DIR", help="where --unpack puts the top folder")
    parser.add_argument("--sign", type=Path, metavar="KEY", help="with --output: sign with this private key (PEM)")
    parser.add_argument("--signature", type=Path, metavar="FILE", help="with --verify")
    parser.add_argument("--public-key", type=Path, metavar="KEY", help="with --verify")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = cli.arguments_of(build_parser(), argv)
    return arguments if isinstance(arguments, int) else cli.run(PROGRAM, lambda: dispatch(arguments))


def dispatch(arguments: argparse.Namespace) -> int:
    try:
        written = act(arguments)
    except Refused as refusal:
        print(f"{PROGRAM}: {refusal}", file=sys.stderr)
        return cli.FINDINGS
    if arguments.json:
        cli.print_json({"schema_version": report.SCHEMA_VERSION, "helper": PROGRAM, "written": [str(path) for path in written]})
    else:
        print("\n".join(map(str, written)))
    return cli.CLEAN


def act(arguments: argparse.Namespace) -> list[Path]:
    if arguments.verify is not None:
        if (arguments.signature is None) != (arguments.public_key is None):
            raise cli.UsageError("--signature and --public-key go together")
        verify(arguments.verify, arguments.signature, arguments.public_key)
        return [arguments.verify]
    if arguments.unpack is not None:
        if arguments.into is None:
            raise cli.UsageError("--unpack needs --into DIR")
        return [unpack(read(arguments.unpack), arguments.into, arguments.force)]
    if arguments.install is not None:
        if not arguments.install.is_dir():
            raise cli.UsageError(f"--install {arguments.install}: no such folder; name the project's root")
        return [unpack(archive(install_files()), arguments.install / CLIENTS[arguments.client], arguments.force)]
    return build(arguments.output, arguments.sign)


# -- building ---------------------------------------------------------------------------------------------------------------------


def tree(names: Sequence[str]) -> dict[str, bytes]:
    """Relative path -> content of the tracked files under `names`; without git every file but caches."""
    listed = subprocess.run(["git", "ls-files", "-z", "--", *names], cwd=ROOT, capture_output=True, check=False) if _has_git() else None
    if listed is not None and listed.returncode == 0 and listed.stdout:
        paths = [path for path in listed.stdout.decode().split("\0") if path and (ROOT / path).is_file()]
    else:
        paths = [
            str(path.relative_to(ROOT))
            for name in names
            for path in ([ROOT / name] if (ROOT / name).is_file() else sorted((ROOT / name).rglob("*")))
            if path.is_file() and "__pycache__" not in path.parts
        ]
    return {path: (ROOT / path).read_bytes() for path in sorted(paths)}


def _has_git() -> bool:
    return shutil.which("git") is not None and (ROOT / ".git").exists()


def install_files() -> dict[str, bytes]:
    """What the install archive holds, checksums included. An installed skill packs itself: its files are all shipped ones."""
    files = tree(SHIPPED)
    files["skill-card.md"] = skill_card().encode()
    return with_sums(files)


def with_sums(files: dict[str, bytes]) -> dict[str, bytes]:
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {path}\n" for path, data in sorted(files.items()))
    return {**files, SUMS: sums.encode()}


def archive(files: dict[str, bytes]) -> bytes:
    """A tar.gz with the top folder NAME: sorted, owned by nobody, dated 0, so that equal trees give equal bytes."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, data in sorted(files.items()):
            entry = tarfile.TarInfo(f"{NAME}/{path}")
            entry.size, entry.mode, entry.mtime = len(data), 0o755 if data.startswith(b"#!") else 0o644, 0
            tar.addfile(entry, io.BytesIO(data))
    squeezed = io.BytesIO()
    with gzip.GzipFile(filename="", fileobj=squeezed, mode="wb", mtime=0, compresslevel=9) as stream:
        stream.write(packed.getvalue())
    return squeezed.getvalue()


def build(output: Path, key: Path | None) -> list[Path]:
    if not (ROOT / "pyproject.toml").is_file():
        raise cli.UsageError("--output builds from the source tree; this is an installed copy without it")
    output.mkdir(parents=True, exist_ok=True)
    install = output / f"{NAME}-{__version__}.tar.gz"
    source = output / f"{NAME}-{__version__}-source.tar.gz"
    install.write_bytes(archive(install_files()))
    source.write_bytes(archive(tree((*SHIPPED, *SOURCE_ONLY))))
    sums = output / SUMS
    sums.write_text("".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in (install, source)))
    written = [install, source, sums]
    if key is not None:
        signature = Path(f"{install}.sig")
        with tempfile.TemporaryDirectory() as scratch:
            folder = unpack(install.read_bytes(), Path(scratch))
            _model_signing("sign", "key", str(folder), "--private_key", str(key), "--signature", str(signature.resolve()))
        written.append(signature)
    return written


def skill_card() -> str:
    """skill-card.md: what catalogues ask for, taken from SKILL.md's frontmatter and card.yaml."""
    import yaml

    front = yaml.safe_load((ROOT / "SKILL.md").read_text(encoding="utf-8").split("---")[1])
    card = yaml.safe_load((ROOT / "card.yaml").read_text(encoding="utf-8"))
    lines = [f"# {front['name']} {front['metadata']['version']}", "", front["description"], ""]
    lines += ["## Owner", "", front["metadata"]["author"], "", "## Licence", "", front["license"], ""]
    lines += ["## Use case", "", card["summary"].strip(), "", "## Requirements", "", front["compatibility"], ""]
    lines += ["## Output types", "", *(f"- {item}" for item in card["output_types"]), ""]
    lines += ["## Risks and mitigations", ""]
    lines += [f"- {risk['risk']} Mitigation: {risk['mitigation']}" for risk in card["risks"]]
    lines += ["", "## Evaluation results", ""]
    results = card.get("measured_results") or []
    lines += [f"- {row['date']}: {row['what']}: {row['result']} ({row['file']})" for row in results] or ["- none recorded"]
    lines += ["", "## Limitations", "", *(f"- {item}" for item in card["limitations"]), ""]
    return "\n".join(lines)


# -- unpacking and verifying ------------------------------------------------------------------------------------------------------


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from None


def members(data: bytes) -> dict[str, bytes]:
    """The files of an archive by path below its top folder.

    Raises Refused for anything but plain files under the one top folder: links, devices, absolute paths, `..`, other folders,
    a path twice, a path that is a file and a folder, names that no file system takes, an archive without SKILL.md, or more than
    MAX_UNPACKED bytes.
    """
    files: dict[str, bytes] = {}
    total = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as tar:
            for entry in tar:
                path = PurePosixPath(entry.name)
                if not entry.isfile():
                    raise Refused(f"the archive holds {entry.name!r}, which is not a plain file")
                if path.is_absolute() or ".." in path.parts or "\\" in entry.name or path.parts[:1] != (NAME,) or len(path.parts) < 2:
                    raise Refused(f"the archive holds {entry.name!r}, which is not below {NAME}/")
                too_long = any(len(part.encode("utf-8", "replace")) > MAX_NAME for part in path.parts)
                if too_long or len(entry.name) > MAX_PATH or "\0" in entry.name:
                    raise Refused(f"the archive holds a name that cannot be unpacked: {entry.name[:40]!r}...")
                inside = str(PurePosixPath(*path.parts[1:]))
                if inside in files:
                    raise Refused(f"the archive holds {entry.name!r} twice")
                total += entry.size
                if total > MAX_UNPACKED:
                    raise Refused(f"the archive unpacks to more than {MAX_UNPACKED:,} bytes")
                stream = tar.extractfile(entry)
                files[inside] = stream.read() if stream is not None else b""
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise Refused(f"not a whole tar.gz archive ({error})") from None
    for inside in files:
        for folder in PurePosixPath(inside).parents:
            if str(folder) in files:
                raise Refused(f"the archive holds {str(folder)!r} as a file and as a folder")
    if files and "SKILL.md" not in files:
        raise Refused("the archive has no SKILL.md, so it is no skill")
    return files


def check_sums(files: dict[str, bytes]) -> None:
    """Raises Refused unless SHA256SUMS names exactly the files that are there, each with its checksum."""
    if SUMS not in files:
        raise Refused(f"the archive has no {SUMS}")
    listed = dict(reversed(line.split("  ", 1)) for line in files[SUMS].decode("utf-8", "replace").splitlines() if "  " in line)
    actual = {path: hashlib.sha256(data).hexdigest() for path, data in files.items() if path != SUMS}
    for path in sorted({*listed, *actual}):
        if listed.get(path) != actual.get(path):
            raise Refused(f"{path}: differs from {SUMS}")


def unpack(data: bytes, into: Path, force: bool = False) -> Path:
    """Unpack an install archive to `into`/nemo-cuda-graphs in one step; an older copy there is replaced whole.

    Raises Refused where the copy there was changed since it was installed, unless `force`.
    """
    files = members(data)
    check_sums(files)
    into.mkdir(parents=True, exist_ok=True)
    target = into / NAME
    if target.is_symlink():
        raise Refused(f"{target} is a link; remove it first")
    if target.exists() and not (target / "SKILL.md").is_file():
        raise Refused(f"{target} exists and is not this skill; move it away first")
    if target.exists() and not force:
        have = {path.relative_to(target).as_posix(): path.read_bytes() for path in target.rglob("*") if path.is_file()}
        try:
            check_sums(have)
        except Refused as difference:
            raise Refused(f"{target} was changed since it was installed ({difference}); move it away, or give --force") from None
    with tempfile.TemporaryDirectory(dir=into, prefix=f".{NAME}.") as scratch:
        fresh = Path(scratch) / NAME
        for path, content in files.items():
            place = fresh / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
            place.chmod(0o755 if content.startswith(b"#!") else 0o644)
        if target.exists():
            target.rename(Path(scratch) / "old")
        fresh.rename(target)
    return target


def verify(path: Path, signature: Path | None, public_key: Path | None) -> None:
    """Raises Refused if a checksum or the signature does not fit the archive's tree."""
    files = members(read(path))
    check_sums(files)
    if signature is not None and public_key is not None:
        for needed in (signature, public_key):
            read(needed)
        with tempfile.TemporaryDirectory() as scratch:
            folder = unpack(path.read_bytes(), Path(scratch))
            _model_signing("verify", "key", str(folder), "--public_key", str(public_key), "--signature", str(signature.resolve()))


def _model_signing(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "model_signing", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines: list[Any] = (done.stderr or done.stdout).strip().splitlines() or ["it gave no reason"]
        if "No module named" in lines[-1]:
            raise cli.UsageError("signing needs the package model-signing: pip install model-signing pyopenssl")
        raise Refused(f"model-signing {arguments[0]}: {lines[-1]}")


if __name__ == "__main__":
    sys.exit(main())
