#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fetch and unpack the released wheels that the oracle tests run against.

The wheels are data for the tests: they are downloaded by pip without their dependencies, checked against the SHA-256
in tests/oracle/wheels.json, and unpacked, never installed. A wheel that was fetched once is not asked for again.

Usage:
    python tests/wheels.py                          fetch every pinned wheel
    python tests/wheels.py megatron-core            every pinned version of one project
    python tests/wheels.py megatron-core 0.19.2     one wheel
    python tests/wheels.py --list                   what is pinned, and what is in the cache

Output: one line a wheel on stdout: project, version, and the folder that it was unpacked to (put that on PYTHONPATH).

Environment:
    NEMO_CUDA_GRAPHS_CACHE      where the wheels are kept; default ~/.cache/nemo-cuda-graphs
    NEMO_CUDA_GRAPHS_OFFLINE=1  never download; tests that need a missing wheel are skipped
    CI=true                     a missing wheel is a failure, whatever NEMO_CUDA_GRAPHS_OFFLINE says

Exit codes: 0 all there; 2 a project or version that is not pinned; 3 a wheel could not be had.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

PINS_FILE = Path(__file__).parent / "oracle" / "wheels.json"

# pip takes only the tags that are named, so the older ones that a newer glibc also satisfies are listed too.
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "any",
)
DOWNLOAD_LIMIT_S = 300


class WheelUnavailable(RuntimeError):
    """A pinned wheel is neither in the cache nor to be had. The text is one line that says what to do."""


def pins() -> dict[str, dict[str, dict[str, str]]]:
    """Pinned wheels: project -> version -> {"python": tag to ask pip for, "file": name, "sha256": hex digest}."""
    return json.loads(PINS_FILE.read_text(encoding="utf-8"))


def versions(project: str) -> list[str]:
    """The pinned versions of one project, oldest first."""
    return sorted(pins()[project], key=lambda version: tuple(int(part) for part in version.split(".")))


def cache_dir() -> Path:
    """The folder that holds wheels/ and unpacked/."""
    return Path(os.environ.get("NEMO_CUDA_GRAPHS_CACHE") or Path.home() / ".cache" / "nemo-cuda-graphs")


def offline() -> bool:
    return os.environ.get("NEMO_CUDA_GRAPHS_OFFLINE") == "1"


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() in ("true", "1")


def fetch(project: str, version: str) -> Path:
    """The folder that holds the unpacked wheel; downloads and unpacks it the first time.

    Safe for several processes at once: downloads and unpacked trees are made beside their final name and renamed.

    Raises:
        KeyError: the version is not pinned.
        WheelUnavailable: not cached, and offline, or pip failed, or the download has another checksum.
    """
    try:
        pin = pins()[project][version]
    except KeyError:
        raise KeyError(f"{project} {version} is not pinned in {PINS_FILE.name}") from None
    unpacked = cache_dir() / "unpacked" / f"{project}-{version}-{pin['sha256'][:12]}"
    if not unpacked.is_dir():
        _unpack(_wheel(project, version, pin), unpacked)
    return unpacked


def fetch_or_skip(project: str, version: str) -> Path:
    """`fetch` for tests: skips the test where the wheel may be missing (offline, and not in CI), else fails it."""
    import pytest

    try:
        return fetch(project, version)
    except WheelUnavailable as error:
        if offline() and not in_ci():
            pytest.skip(str(error))
        pytest.fail(str(error), pytrace=False)


def _wheel(project: str, version: str, pin: dict[str, str]) -> Path:
    wheel = cache_dir() / "wheels" / pin["file"]
    if wheel.is_file() and _sha256(wheel) == pin["sha256"]:
        return wheel
    if offline():
        raise WheelUnavailable(
            f"{project} {version} is not in the cache ({cache_dir()}) and NEMO_CUDA_GRAPHS_OFFLINE=1 forbids "
            f"downloading: unset it, or put {pin['file']} into the cache's wheels folder"
        )
    wheel.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=".download-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
        command += ["--no-deps", "--only-binary=:all:", "--python-version", pin["python"], "--dest", scratch]
        for platform in PLATFORMS:
            command += ["--platform", platform]
        command.append(f"{project}=={version}")
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S)
            reason = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        except subprocess.TimeoutExpired:
            reason = f"no answer within {DOWNLOAD_LIMIT_S} s"
        got = Path(scratch) / pin["file"]
        if not reason and not got.is_file():
            reason = f"pip brought {sorted(os.listdir(scratch))}, not {pin['file']}"
        if not reason and _sha256(got) != pin["sha256"]:
            reason = f"the download's SHA-256 is {_sha256(got)}, not the pinned {pin['sha256']}"
        if reason:
            raise WheelUnavailable(
                f"{project} {version} cannot be had: {reason}; "
                "set NEMO_CUDA_GRAPHS_OFFLINE=1 to skip the tests that need it (with CI=true they fail all the same)"
            )
        os.replace(got, wheel)
    return wheel


def _unpack(wheel: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".unpack-"))
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster, and its tree is the same
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", nargs="?")
    parser.add_argument("version", nargs="?")
    parser.add_argument("--list", action="store_true", help="show the pinned wheels and whether each is cached")
    args = parser.parse_args(argv)
    table = pins()
    wanted = [
        (project, version)
        for project in table
        for version in versions(project)
        if args.project in (None, project) and args.version in (None, version)
    ]
    if not wanted:
        print(f"error: {args.project} {args.version or ''} is not pinned in {PINS_FILE}", file=sys.stderr)
        return 2
    missing = 0
    for project, version in wanted:
        pin = table[project][version]
        if args.list:
            cached = (cache_dir() / "wheels" / pin["file"]).is_file()
            print(f"{project} {version} {'cached' if cached else 'missing'} {pin['file']}")
            continue
        try:
            print(f"{project} {version} {fetch(project, version)}", flush=True)
        except WheelUnavailable as error:
            missing += 1
            print(f"error: {error}", file=sys.stderr)
    return 3 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
