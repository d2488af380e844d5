# SPDX-License-Identifier: Apache-2.0
"""What a rule is, and what comes out of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from cudagraphs.settings import Branch, Source
from cudagraphs.versions import Versions

BRIDGE = "megatron-bridge"
LM = "megatron-lm"
CORE = "megatron-core"
AUTOMODEL = "nemo-automodel"
TE = "transformer-engine"
PYTORCH = "pytorch"
DEEPSPEED = "deepspeed"
# every framework that builds megatron-core's TransformerConfig
MEGATRON = (BRIDGE, LM, CORE)

LAYERS = ("config", "arguments", "bridge", "automodel", "capture", "environment", "reported")
SEVERITIES = ("error", "runtime", "warning", "info")

# What conditions and fixes read: fact name -> value. See `evaluate.Reader` for the names that are derived.
Facts = Mapping[str, Any]
Condition = Callable[[Facts, Versions], bool]
Fix = Callable[[Facts, Versions], "dict[str, Any] | None"]


class Member(str):
    """A member of one of upstream's enums, as a string that equals the member's name; `enum` names the class.

    Upstream tells `CudaGraphScope.attn` from the string "attn" in places, so the difference is kept.
    """

    enum: str

    def __new__(cls, name: str, enum: str) -> Member:
        self = super().__new__(cls, name)
        self.enum = enum
        return self

    def __repr__(self) -> str:
        return f"{self.enum}.{self}"


class Open(Exception):
    """A condition read what is not decided yet."""


class NeedsFact(Open):
    """A condition read a fact that is unknown. `name` is the fact."""

    def __init__(self, name: str):
        super().__init__(name)
        self.name = name


class NeedsSide(Open):
    """A condition read a fact that hangs on a branch whose side is not decided yet."""

    def __init__(self, branch: Branch):
        super().__init__(branch.text)
        self.branch = branch


class Example(NamedTuple):
    """Facts (what is not named holds its default) and versions to judge them by, as `versions.resolve` takes them."""

    facts: Mapping[str, Any]
    versions: Mapping[str, str] = {}
    framework: str | None = None


# (lower end, inclusive; upper end, exclusive), None at an open end
Range = "tuple[tuple[int, ...] | None, tuple[int, ...] | None]"


class Rule:
    """One rule. `when` holds for the facts that break it.

    `mcore` is an inclusive range of megatron-core minor numbers, None at an open end. `bridge`, `te`, `automodel` and
    `torch` are ranges of versions, the lower end inclusive and the upper exclusive; a rule with such a range does not
    hold where the component is absent. A `safe` fix keeps what is computed and the memory that it needs; it may change
    what is captured. `upstream` holds pieces of the messages that users see.

    A plain class: generated `__init__` methods would take longer than everything else that importing the rules does.
    """

    __slots__ = (
        "code", "title", "layer", "severity", "when", "message", "mend", "why", "source", "bad", "good", "frameworks",
        "mcore", "bridge", "te", "automodel", "torch", "fix", "safe", "upstream",
    )  # fmt: skip

    def __init__(
        self,
        *,
        code: str,
        title: str,
        layer: str,
        severity: str,
        when: Condition,
        message: str,
        mend: str,
        why: str,
        source: str,
        bad: tuple[Example, ...],
        good: tuple[Example, ...],
        frameworks: tuple[str, ...] = MEGATRON,
        mcore: tuple[int | None, int | None] = (None, None),
        bridge: Range | None = None,
        te: Range | None = None,
        automodel: Range | None = None,
        torch: Range | None = None,
        fix: Fix | None = None,
        safe: bool = True,
        upstream: tuple[str, ...] = (),
    ):
        self.code, self.title, self.layer, self.severity = code, title, layer, severity
        self.when, self.message, self.mend, self.fix, self.safe = when, message, mend, fix, safe
        self.why, self.source, self.upstream, self.bad, self.good = why, source, upstream, bad, good
        self.frameworks, self.mcore, self.bridge, self.te = frameworks, mcore, bridge, te
        self.automodel, self.torch = automodel, torch

    def __repr__(self) -> str:
        return f"Rule({self.code})"

    def holds_for(self, framework: str, versions: Versions) -> bool:
        """Whether the rule applies to this framework in these versions."""
        if framework not in self.frameworks:
            return False
        if framework in MEGATRON:
            low, high = self.mcore
            if (low is not None and versions.minor < low) or (high is not None and versions.minor > high):
                return False
        for component in ("bridge", "te", "automodel", "torch"):
            wanted = getattr(self, component)
            if wanted is not None and not _within(getattr(versions, component), wanted):
                return False
        return True

    def versions_text(self) -> str:
        """The versions that the rule holds for, for people."""
        parts = []
        low, high = self.mcore
        if any(framework in MEGATRON for framework in self.frameworks):
            if low is None and high is None:
                parts.append("megatron-core 0.13 and newer")
            elif high is None:
                parts.append(f"megatron-core 0.{low} and newer")
            elif low == high:
                parts.append(f"megatron-core 0.{low}")
            else:
                parts.append(f"megatron-core 0.{low or 13} to 0.{high}")
        labels = {
            "bridge": "Megatron Bridge",
            "te": "Transformer Engine",
            "automodel": "NeMo AutoModel",
            "torch": "PyTorch",
        }
        for component, label in labels.items():
            wanted = getattr(self, component)
            if wanted is not None:
                low_text = f"{_dotted(wanted[0])} and newer" if wanted[0] else ""
                high_text = f"before {_dotted(wanted[1])}" if wanted[1] else ""
                parts.append(f"{label} {', '.join(filter(None, (low_text, high_text)))}")
        return "; ".join(parts)


def _within(have: tuple[int, ...] | None, wanted: Range) -> bool:
    low, high = wanted
    return have is not None and (low is None or have >= low) and (high is None or have < high)


def _dotted(number: Iterable[int]) -> str:
    return ".".join(map(str, number))


class Finding(NamedTuple):
    """One rule that a run breaks, or (with `needs`) a rule that cannot be judged without the named facts.

    `when` names the branch sides under which it holds, "" if it holds on all of them. `fix` maps fact names to the
    values that mend it, None where only a person can. `severity` of a finding that `needs` facts is "info".
    """

    code: str
    severity: str
    title: str
    message: str
    mend: str
    fix: Mapping[str, Any] | None
    safe: bool
    layer: str
    source: str
    locations: tuple[Source, ...] = ()
    when: str = ""
    needs: tuple[str, ...] = ()


class GraphState(NamedTuple):
    """What is captured after upstream's migrations: the implementation, the scopes, and the inference scope.

    `impl` is in the version's own terms ("local" with full_iteration in `modules` up to 0.17, "full_iteration" from
    0.18). `by_world` holds (branch sides, state) where a branch decides. `unknown` says why nothing is known; the other
    fields then hold None or nothing.
    """

    impl: str | None
    modules: tuple[str, ...] = ()
    inference_scope: str | None = None
    full_iteration: bool = False
    whole_layer: bool = False
    by_world: tuple[tuple[str, GraphState], ...] = ()
    unknown: str = ""

    @property
    def active(self) -> bool | None:
        """Whether anything is captured; None where unknown."""
        return None if self.impl is None else self.impl != "none"


class Registry:
    """Every rule by its code, in order of codes."""

    def __init__(self) -> None:
        self._rules: dict[str, Rule] = {}

    def add(self, *rules: Rule) -> None:
        for rule in rules:
            if rule.code in self._rules:
                raise ValueError(f"two rules have the code {rule.code}")
            self._rules[rule.code] = rule

    def __iter__(self) -> Iterator[Rule]:
        return iter(sorted(self._rules.values(), key=lambda rule: rule.code))

    def __len__(self) -> int:
        return len(self._rules)

    def __getitem__(self, code: str) -> Rule:
        return self._rules[code]

    def __contains__(self, code: str) -> bool:
        return code in self._rules
