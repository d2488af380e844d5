#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Record what released megatron-core says to the whole lattice, and check that it still says so.

Usage:
    python tests/oracle/record.py                  run every pinned version and write tests/oracle/data/mcore-*.json.xz
    python tests/oracle/record.py 0.18 0.19        these versions only
    python tests/oracle/record.py --check          run, compare with the recorded answers, write nothing
    python tests/oracle/record.py --show           print counts by verdict and error id of the recorded answers

Output: one line a version on stdout; errors whose text has no id (errors.py) are listed.

A file holds: the megatron-core version, torch version, date, how many requests, the hash of the requests (so that
answers are never read against another lattice), the counts, the table of distinct outcomes, and one index into that
table for every request, in the order of `requests(minor)`. `load(minor)` puts the two together again.

Exit codes: 0 done, no difference; 1 --check found differences, or an error text has no id; 2 usage; 3 a wheel or
torch is missing, or the recorded file is missing or belongs to another lattice.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import itertools
import json
import lzma
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import wheels  # noqa: E402
from oracle import errors, lattice, protocol, transformer_config  # noqa: E402

DATA = Path(__file__).parent / "data"
SCHEMA_VERSION = 1
SEED = 20260822
RANDOM_COUNT = 5000


class NotRecorded(RuntimeError):
    """There are no recorded answers for the present lattice. The text says which command makes them."""


def requests(minor: str) -> Iterator[dict]:
    """What is asked of one version: the lattice, then RANDOM_COUNT random configurations."""
    return itertools.chain(lattice.lattice(minor), lattice.random_configurations(minor, SEED, RANDOM_COUNT))


def outcome(answer: dict) -> dict:
    """What is kept of an answer: the verdict, and the normalised result or the id and text of the error."""
    kept = {"verdict": answer["verdict"]}
    if answer["verdict"] == "accepted":
        kept["normalized"] = answer["normalized"]
    elif answer["verdict"] == "rejected":
        kept.update(error_id=errors.identify(answer["error"]), error=answer["error"])
    return kept


def load(minor: str) -> Iterator[tuple[dict, dict]]:
    """Pairs of a request and its recorded outcome ({"verdict", "normalized" | "error_id" and "error"}).

    Raises:
        NotRecorded: no file, or it was recorded for another lattice.
    """
    record = _read(minor)
    asked = list(requests(minor))
    if record["requests_sha256"] != _digest(asked):
        raise NotRecorded(f"{_file(minor).name} belongs to another lattice: run python tests/oracle/record.py {minor}")
    for request, index in zip(asked, record["answers"]):
        yield request, record["outcomes"][index]


def run(minor: str) -> dict:
    """Ask the released version, and build the record."""
    asked = list(requests(minor))
    outcomes: dict[str, int] = {}
    answers = []
    counts: Counter[str] = Counter()
    for answer in transformer_config.ask(minor, asked):
        kept = outcome(answer)
        counts[kept["verdict"]] += 1
        if "error_id" in kept:
            counts[kept["error_id"]] += 1
        answers.append(outcomes.setdefault(json.dumps(kept), len(outcomes)))
    return {
        "schema_version": SCHEMA_VERSION,
        "megatron_core": transformer_config.full_version(minor),
        "torch": metadata.version("torch"),
        "date": datetime.date.today().isoformat(),
        "lattice": sum(1 for _ in lattice.lattice(minor)),
        "random": {"seed": SEED, "count": RANDOM_COUNT},
        "requests_sha256": _digest(asked),
        "counts": dict(sorted(counts.items())),
        "outcomes": [json.loads(text) for text in outcomes],
        "answers": answers,
    }


def differences(minor: str, fresh: dict) -> list[str]:
    """One line for every request whose outcome is not the recorded one."""
    found = []
    for (request, recorded), index in zip(load(minor), fresh["answers"]):
        now = fresh["outcomes"][index]
        if now != recorded:
            found.append(f"{request['id']}: recorded {json.dumps(recorded)}, now {json.dumps(now)}")
    return found


def _file(minor: str) -> Path:
    return DATA / f"mcore-{minor}.json.xz"


def _read(minor: str) -> dict:
    try:
        return json.loads(lzma.decompress(_file(minor).read_bytes()))
    except FileNotFoundError:
        raise NotRecorded(f"{_file(minor).name} is missing: run python tests/oracle/record.py {minor}") from None


def _write(minor: str, record: dict) -> None:
    DATA.mkdir(exist_ok=True)
    target = _file(minor)
    packed = lzma.compress(json.dumps(record, separators=(",", ":")).encode(), preset=9 | lzma.PRESET_EXTREME)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    scratch.write_bytes(packed)
    os.replace(scratch, target)


def _digest(asked: list[dict]) -> str:
    digest = hashlib.sha256()
    for request in asked:
        digest.update(json.dumps(request, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _summary(minor: str, record: dict) -> str:
    names = ("accepted", "rejected", "baseline_rejected")
    verdicts = ", ".join(f"{record['counts'].get(name, 0)} {name}" for name in names)
    return f"{minor} (megatron-core {record['megatron_core']}): {len(record['answers'])} configurations, {verdicts}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minors", nargs="*", metavar="MINOR", help=f"default: {' '.join(lattice.MINORS)}")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="compare a fresh run with the recorded answers")
    mode.add_argument("--show", action="store_true", help="print what is recorded, run nothing")
    args = parser.parse_args(argv)
    unknown = set(args.minors) - set(lattice.MINORS)
    if unknown:
        parser.error(f"no such minor: {', '.join(sorted(unknown))}; there are {', '.join(lattice.MINORS)}")
    failed = False
    try:
        for minor in args.minors or lattice.MINORS:
            record = _read(minor) if args.show else run(minor)
            print(_summary(minor, record), flush=True)
            unmapped = [kept["error"] for kept in record["outcomes"] if kept.get("error_id") == errors.UNMAPPED]
            for error in unmapped:
                failed = True
                print(f"  no id for {error['type']} in {error['in']}: {error['text']}")
            if args.show:
                ids = Counter({name: n for name, n in record["counts"].items() if name.isupper()})
                for name, count in ids.most_common():
                    print(f"  {count:6d} {name}")
            elif args.check:
                found = differences(minor, record)
                failed |= bool(found)
                print(f"  {len(found)} differences from the recorded answers")
                for line in found[:20]:
                    print(f"  {line}")
            else:
                _write(minor, record)
                print(f"  written: {_file(minor).name}, {_file(minor).stat().st_size} bytes")
    except (NotRecorded, protocol.OracleFailed, wheels.WheelUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
