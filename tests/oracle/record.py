#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Record what released upstream code says to the comparison configurations, and check that it still says so.

A target is one release of one layer:
    0.13 ... 0.19                                TransformerConfig of that megatron-core minor, over the lattice
    megatron-lm-0.17 ... megatron-lm-0.19        Megatron-LM's argument checks
    bridge-0.3 ... bridge-0.6                    Megatron Bridge's runtime_config_update
    automodel-0.7                                NeMo AutoModel's backend block

Usage:
    python tests/oracle/record.py                  run every target and write tests/oracle/data/*.json.xz
    python tests/oracle/record.py 0.18 bridge-0.6  these targets only
    python tests/oracle/record.py --check          run, compare with the recorded answers, write nothing
    python tests/oracle/record.py --show           print counts by verdict and error id of the recorded answers

Output: one line a target on stdout; errors whose text has no id (errors.py) are listed.

A file holds: the release, torch version, date, how many requests, the hash of the requests (so that answers are never
read against other requests), the counts, the table of distinct outcomes, and one index into that table for every
request, in the order of `requests(target)`. `load(target)` puts the two together again.

Exit codes: 0 done, no difference; 1 --check found differences, or an error text has no id; 2 usage; 3 a wheel or
torch is missing, or the recorded file is missing or belongs to other requests.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import wheels
from oracle import (
    automodel_config,
    bridge_config,
    errors,
    lattice,
    megatron_lm_args,
    protocol,
    transformer_config,
)

DATA = Path(__file__).parent / "data"
SCHEMA_VERSION = 1
SEED = 20260822
RANDOM_COUNT = 5000


class NotRecorded(RuntimeError):
    """There are no recorded answers for the present requests. The text says which command makes them."""


@dataclass(frozen=True)
class Target:
    """One release of one layer: what is asked, who answers, and how its errors are named."""

    file: str
    release: dict[str, str]
    requests: Callable[[], Iterable[dict]]
    ask: Callable[[Iterable[dict]], Iterable[dict]]
    errors: Sequence[tuple]


def _targets() -> dict[str, Target]:
    made = {}
    for minor in lattice.MINORS:
        made[minor] = Target(
            file=f"mcore-{minor}.json.xz",
            release={"megatron-core": transformer_config.full_version(minor)},
            requests=lambda minor=minor: itertools.chain(
                lattice.lattice(minor), lattice.random_configurations(minor, SEED, RANDOM_COUNT)
            ),
            ask=lambda asked, minor=minor: transformer_config.ask(minor, asked),
            errors=errors.CONFIG_ERRORS,
        )
    for minor in megatron_lm_args.MINORS:
        made[f"megatron-lm-{minor}"] = Target(
            file=f"megatron-lm-{minor}.json.xz",
            release={"megatron-core": transformer_config.full_version(minor)},
            requests=lambda minor=minor: megatron_lm_args.cases(minor),
            ask=lambda asked, minor=minor: megatron_lm_args.ask(minor, asked),
            errors=errors.MEGATRON_LM_ERRORS,
        )
    for minor, (bridge, mcore) in bridge_config.PINS.items():
        made[f"bridge-{minor}"] = Target(
            file=f"bridge-{minor}.json.xz",
            release={"megatron-bridge": bridge, "megatron-core": mcore},
            requests=lambda minor=minor: bridge_config.cases(minor),
            ask=lambda asked, minor=minor: bridge_config.ask(minor, asked),
            errors=errors.BRIDGE_ERRORS,
        )
    made["automodel-0.7"] = Target(
        file="automodel-0.7.json.xz",
        release={"nemo-automodel": automodel_config.AUTOMODEL},
        requests=automodel_config.cases,
        ask=automodel_config.ask,
        errors=errors.AUTOMODEL_ERRORS,
    )
    return made


TARGETS = _targets()


def requests(target: str) -> Iterator[dict]:
    """What is asked of one target. For a megatron-core minor: the lattice, then RANDOM_COUNT random configurations."""
    return iter(TARGETS[target].requests())


def load(target: str) -> Iterator[tuple[dict, dict]]:
    """Pairs of a request and its recorded outcome.

    An outcome is {"verdict", "normalized"} where accepted, {"verdict", "error_id", "error"} (and "stage" where the
    layer has stages) where rejected, and {"verdict"} for "baseline_rejected".

    Raises:
        NotRecorded: no file, or it was recorded for other requests.
    """
    record = _read(target)
    asked = list(requests(target))
    if record["requests_sha256"] != _digest(asked):
        file = TARGETS[target].file
        raise NotRecorded(f"{file} belongs to other requests: run python tests/oracle/record.py {target}")
    for request, index in zip(asked, record["answers"]):
        yield request, record["outcomes"][index]


def run(target: str) -> dict:
    """Ask the released version, and build the record."""
    source = TARGETS[target]
    asked = list(requests(target))
    outcomes: dict[str, int] = {}
    answers = []
    counts: Counter[str] = Counter()
    for answer in source.ask(asked):
        kept = _outcome(answer, source.errors)
        counts[kept["verdict"]] += 1
        if "error_id" in kept:
            counts[kept["error_id"]] += 1
        answers.append(outcomes.setdefault(json.dumps(kept), len(outcomes)))
    return {
        "schema_version": SCHEMA_VERSION,
        "release": source.release,
        "torch": metadata.version("torch"),
        "date": datetime.date.today().isoformat(),
        "random": {"seed": SEED, "count": sum(str(request["id"]).startswith("random:") for request in asked)},
        "requests_sha256": _digest(asked),
        "counts": dict(sorted(counts.items())),
        "outcomes": [json.loads(text) for text in outcomes],
        "answers": answers,
    }


def differences(target: str, fresh: dict) -> list[str]:
    """One line for every request whose outcome is not the recorded one."""
    found = []
    for (request, recorded), index in zip(load(target), fresh["answers"]):
        now = fresh["outcomes"][index]
        if now != recorded:
            found.append(f"{request['id']}: recorded {json.dumps(recorded)}, now {json.dumps(now)}")
    return found


def _outcome(answer: dict, table: Sequence[tuple]) -> dict:
    kept = {"verdict": answer["verdict"]}
    if answer["verdict"] == "accepted":
        kept["normalized"] = answer["normalized"]
    elif answer["verdict"] == "rejected":
        kept.update(error_id=errors.identify(answer["error"], table), error=answer["error"])
        if "stage" in answer:
            kept["stage"] = answer["stage"]
    return kept


def _read(target: str) -> dict:
    file = DATA / TARGETS[target].file
    try:
        return json.loads(lzma.decompress(file.read_bytes()))
    except FileNotFoundError:
        raise NotRecorded(f"{file.name} is missing: run python tests/oracle/record.py {target}") from None


def _write(target: str, record: dict) -> Path:
    DATA.mkdir(exist_ok=True)
    file = DATA / TARGETS[target].file
    packed = lzma.compress(json.dumps(record, separators=(",", ":")).encode(), preset=9 | lzma.PRESET_EXTREME)
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_bytes(packed)
    os.replace(scratch, file)
    return file


def _digest(asked: list[dict]) -> str:
    digest = hashlib.sha256()
    for request in asked:
        digest.update(json.dumps(request, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _summary(target: str, record: dict) -> str:
    release = ", ".join(f"{name} {version}" for name, version in record["release"].items())
    names = ("accepted", "rejected", "baseline_rejected")
    verdicts = ", ".join(f"{record['counts'].get(name, 0)} {name}" for name in names)
    return f"{target} ({release}): {len(record['answers'])} configurations, {verdicts}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="default: all")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="compare a fresh run with the recorded answers")
    mode.add_argument("--show", action="store_true", help="print what is recorded, run nothing")
    args = parser.parse_args(argv)
    unknown = set(args.targets) - set(TARGETS)
    if unknown:
        parser.error(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    failed = False
    try:
        for target in args.targets or TARGETS:
            record = _read(target) if args.show else run(target)
            print(_summary(target, record), flush=True)
            for kept in record["outcomes"]:
                if kept.get("error_id") == errors.UNMAPPED:
                    failed = True
                    error = kept["error"]
                    print(f"  no id for {error['type']} in {error['in']}: {error['text']}")
            if args.show:
                ids = Counter({name: n for name, n in record["counts"].items() if name.isupper()})
                for name, count in ids.most_common():
                    print(f"  {count:6d} {name}")
            elif args.check:
                found = differences(target, record)
                failed |= bool(found)
                print(f"  {len(found)} differences from the recorded answers")
                for line in found[:20]:
                    print(f"  {line}")
            else:
                file = _write(target, record)
                print(f"  written: {file.name}, {file.stat().st_size} bytes")
    except (NotRecorded, protocol.OracleFailed, wheels.WheelUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
