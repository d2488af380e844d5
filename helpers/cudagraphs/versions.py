# SPDX-License-Identifier: Apache-2.0
"""Versions: which releases the rules and the names are keyed on, and how they were found out.

Every rule keys on the megatron-core *minor* version: over the released wheels 0.13.0 to 0.19.2 the patch level never changed a
verdict of `TransformerConfig`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

Number = tuple[int, ...]

# The distribution that carries each component. TE's metadata has been published under several names.
DISTRIBUTIONS = {
    "mcore": ("megatron-core",),
    "bridge": ("megatron-bridge",),
    "te": ("transformer-engine", "transformer_engine", "transformer-engine-cu13", "transformer-engine-cu12"),
    "automodel": ("nemo-automodel",),
    "torch": ("torch",),
}
# What a report on a run of each framework names; all components for the others.
BUILDS_ON = {
    "megatron-bridge": ("mcore", "bridge", "te"),
    "megatron-lm": ("mcore", "te"),
    "megatron-core": ("mcore", "te"),
    "nemo-automodel": ("automodel", "te"),
}
NEWEST = {"mcore": "0.19.2", "bridge": "0.6.2", "te": "2.20.2", "automodel": "0.7.0", "torch": "2.11.0"}
OLDEST_MCORE = (0, 13)
# Which megatron-core each Bridge release pins; the wheels themselves do not bound it.
# Source: 3rdparty pins of NVIDIA-NeMo/Megatron-Bridge at tags v0.3.1, v0.4.2, v0.5.1, v0.6.0.
BRIDGE_PINS = {(0, 3): "0.16.1", (0, 4): "0.17.1", (0, 5): "0.18.2", (0, 6): "0.19.2"}


class VersionError(ValueError):
    """A version text that is not a version, or lies outside what the pack knows."""


def parse(text: str) -> Number:
    """`"0.19.2rc1+abc"` -> `(0, 19, 2)`. Raises VersionError if the text does not start with two numbers."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text.strip())
    if not match:
        raise VersionError(f"{text!r} is not a version; give it as MAJOR.MINOR or MAJOR.MINOR.PATCH, for example 0.19.2")
    return tuple(int(group) for group in match.groups() if group is not None)


def dotted_cudnn(number: int | str | None) -> str | None:
    """`91900` -> `"9.19.0"`, `8907` -> `"8.9.7"`; a text that is dotted already, and None, as they are.

    Source: cuDNN's header cudnn_version.h, CUDNN_VERSION: major x 10000 + minor x 100 + patch since cuDNN 9, and
    major x 1000 before; torch.backends.cudnn.version() gives that number.
    """
    if number is None or not str(number).isdigit():
        return number if number is None else str(number)
    value = int(number)
    major, rest = divmod(value, 10000 if value >= 90000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


@dataclass(frozen=True)
class Versions:
    """Versions as number tuples, None where the component is absent. `how` says for each where the number came from."""

    mcore: Number | None = None
    bridge: Number | None = None
    te: Number | None = None
    automodel: Number | None = None
    torch: Number | None = None
    # compute capability as (major, minor), None where unknown; it is not a package but rules key on it in the same way
    arch: Number | None = None
    how: tuple[tuple[str, str], ...] = ()

    @property
    def minor(self) -> int:
        """The megatron-core minor number (19 for 0.19.2); the newest known where megatron-core is absent."""
        return (self.mcore or parse(NEWEST["mcore"]))[1]

    def at_least(self, component: str, *number: int) -> bool:
        """Whether the component is present and at least `number`."""
        have = getattr(self, component)
        return have is not None and have >= number

    def describe(self, framework: str | None = None) -> str:
        """The versions and where each came from; with a framework only those that it builds on, and what was given."""
        relevant = BUILDS_ON.get(framework or "", tuple(DISTRIBUTIONS))
        parts = []
        for component, how in self.how:
            have = getattr(self, component)
            if have is not None and (component in relevant or how == "given"):
                parts.append(f"{component} {'.'.join(map(str, have))} ({how})")
        return ", ".join(parts)


@lru_cache(maxsize=1)
def _metadata_folders() -> tuple[str, ...]:
    """Names, in lower case, of the metadata folders and files that the import path holds."""
    found = []
    for folder in sys.path:
        try:
            found += [name.lower() for name in os.listdir(folder or ".") if name.endswith((".dist-info", ".egg-info"))]
        except OSError:
            continue  # an entry of the import path that is a zip file or does not exist
    return tuple(found)


def check_covered(mcore: Number) -> None:
    """Raises VersionError for a megatron-core that the rules do not cover."""
    newest_minor = parse(NEWEST["mcore"])[1]
    if not (OLDEST_MCORE <= mcore[:2] <= (0, newest_minor + 1)):
        raise VersionError(
            f"megatron-core {'.'.join(map(str, mcore))} is outside what the rules cover (0.13 to 0.{newest_minor}); "
            "give --mcore with a covered version to judge by its rules"
        )


def check_bridge_covered(bridge: Number) -> None:
    """Raises VersionError for a Megatron Bridge that the rules do not cover; one minor past the newest is let through."""
    oldest, newest = min(BRIDGE_PINS), max(BRIDGE_PINS)
    if not (oldest <= bridge[:2] <= (newest[0], newest[1] + 1)):
        raise VersionError(
            f"Megatron Bridge {'.'.join(map(str, bridge))} is outside what the rules cover "
            f"({'.'.join(map(str, oldest))} to {'.'.join(map(str, newest))}); "
            "give --bridge with a covered version, or --mcore alone, to judge by its rules"
        )


def installed(component: str) -> str | None:
    """The version of the installed distribution, read from its metadata without importing it; None if it is not installed."""
    for name in DISTRIBUTIONS[component]:
        form = re.compile(re.sub("[-_]", "[-_.]", name) + r"(?:-(\d[^-]*))?(?:-py\S+)?\.(dist|egg)-info")
        for entry in _metadata_folders():
            match = form.fullmatch(entry)
            if match and match.group(1):
                return match.group(1)
            if match:
                # an old kind of installation, whose version may stand only inside; the module costs more than all the rules
                from importlib import metadata

                try:
                    return metadata.version(name)
                except metadata.PackageNotFoundError:
                    continue
    return None


def resolve(framework: str = "megatron-bridge", **given: str | None) -> Versions:
    """Versions from flags (`mcore="0.17"`), else from installed packages, else the newest known; `how` tells which.

    Raises VersionError for a text that is not a version, and for a megatron-core older than 0.13 or a Bridge older than 0.3, or
    newer than the newest known minor by more than one (nothing is known about those). A Bridge that is merely installed is looked
    at for framework "megatron-bridge" only.
    """
    numbers: dict[str, Number | None] = {}
    how: list[tuple[str, str]] = []
    for component in DISTRIBUTIONS:
        text, origin = given.get(component), "given"
        if text is None:
            text, origin = _paired(component, given)
        if text is None:
            text, origin = installed(component), "installed"
        if text is None:
            text, origin = NEWEST[component], "newest known"
        if text.lower() == "none":
            numbers[component] = None
            how.append((component, "given as absent"))
            continue
        numbers[component] = parse(text)
        how.append((component, origin))
    if numbers["mcore"] is not None:
        check_covered(numbers["mcore"])
    if numbers["bridge"] is not None and (framework == "megatron-bridge" or given.get("bridge") is not None):
        check_bridge_covered(numbers["bridge"])
    arch = given.get("arch")
    if arch is not None:
        numbers["arch"] = parse_arch(arch)
        how.append(("arch", "given"))
    versions = Versions(**numbers, how=tuple(how))
    if framework != "megatron-bridge":
        versions = replace(versions, bridge=None)
    return versions


def _paired(component: str, given: Mapping[str, str | None]) -> tuple[str | None, str]:
    """The megatron-core that goes with a given Bridge, or the Bridge that goes with a given megatron-core."""
    other = given.get({"mcore": "bridge", "bridge": "mcore"}.get(component, ""))
    if other is None or other.lower() == "none":
        return None, ""
    number = parse(other)[:2]
    if component == "mcore":
        return BRIDGE_PINS.get(number), f"pinned by Bridge {other}"
    newest = max(BRIDGE_PINS)
    if number > parse(BRIDGE_PINS[newest])[:2]:
        bridge = (newest[0], newest[1] + 1)  # each Bridge minor has pinned the next megatron-core minor
    else:
        released = [bridge for bridge, pin in BRIDGE_PINS.items() if parse(pin)[:2] <= number]
        bridge = max(released, default=min(BRIDGE_PINS))
    return ".".join(map(str, bridge)), f"goes with megatron-core {other}"


ARCH_NAMES = {"a100": (8, 0), "h100": (9, 0), "h200": (9, 0), "b200": (10, 0), "gb200": (10, 0), "b300": (10, 3), "gb300": (10, 3)}


def parse_arch(text: str) -> Number:
    """`"h100"`, `"sm_90"`, `"9.0"` or `"90"` -> `(9, 0)`. Raises VersionError for anything else."""
    lowered = text.strip().lower()
    if lowered in ARCH_NAMES:
        return ARCH_NAMES[lowered]
    match = re.fullmatch(r"(?:sm_?)?(\d{1,2})[.]?(\d)[af]?", lowered)
    if not match:
        known = ", ".join(ARCH_NAMES)
        raise VersionError(f"{text!r} is not a GPU architecture; give a name ({known}) or a compute capability such as 9.0")
    return int(match.group(1)), int(match.group(2))
