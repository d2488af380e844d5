# SPDX-License-Identifier: Apache-2.0
"""Batch mode: verdicts on many TransformerConfig field overrides, one JSON object a line in and out.

In:   {"id": anything, "version": "0.17", "te": "2.8" | null, "fields": {...}}; id, version and te may be left out
Out:  {"id": ..., "verdict": "accepted" | "rejected", "codes": [...], "normalized": {"impl", "modules",
"inference_scope"}}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from cudagraphs.formats.source import SourceError
from cudagraphs.rules.config import Judgement, judge, normalized
from cudagraphs.versions import VersionError


class BatchError(SourceError):
    """A line that cannot be judged; the text names its number, what is wrong with it, and what a line looks like."""


def run(lines: Iterable[str], mcore: str, te: str | None = None) -> Iterator[str]:
    """Result lines in the order of the input; empty lines are skipped.

    Args:
        lines: JSON objects, one a line.
        mcore: the megatron-core version of lines that name none.
        te: the Transformer Engine version of lines that name none; None, "" or "none" where it is absent.

    Raises:
        BatchError: a line that is not such an object, or names a version that is not one.
    """
    default_te = None if te in (None, "", "none") else te
    decode, write = json.JSONDecoder().decode, _Writer()
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line:
            continue
        try:
            request = decode(line.lstrip("\ufeff"))
            fields = request["fields"]
            if not isinstance(fields, dict):
                raise TypeError('"fields" is not an object')
            judgement = judge(fields, request.get("version") or mcore, request.get("te", default_te))
        except json.JSONDecodeError as error:
            raise BatchError(f"line {number}: not JSON ({error.msg} at column {error.colno})") from None
        except VersionError as error:
            raise BatchError(f"line {number}: {error}") from None
        except (KeyError, TypeError, AttributeError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise BatchError(
                f"line {number}: {reason}; a line is an object such as "
                '{"id": 1, "fields": {"cuda_graph_impl": "local"}} with values of the types that TransformerConfig '
                "takes"
            ) from None
        yield write(request.get("id"), judgement)


class _Writer:
    """Result lines. Few states and lists of codes come again and again, so their text is kept."""

    def __init__(self) -> None:
        self.encode = json.JSONEncoder(separators=(",", ":")).encode
        self.states: dict[object, str] = {}
        self.verdicts: dict[tuple[str, ...], str] = {}

    def __call__(self, identity: object, judgement: Judgement) -> str:
        codes = tuple(judgement.codes)
        verdict = self.verdicts.get(codes)
        if verdict is None:
            word = "rejected" if codes else "accepted"
            verdict = self.verdicts[codes] = f'"verdict":"{word}","codes":{self.encode(codes)}'
        # encoding a plain number through the encoder would cost more than the verdict
        name = str(identity) if type(identity) is int else self.encode(identity)
        return f'{{"id":{name},{verdict},"normalized":{self._state(judgement)}}}'

    def _state(self, judgement: Judgement) -> str:
        if judgement.minor < 16:
            return self.encode(normalized(judgement))
        text = self.states.get(judgement.state)
        if text is None:
            text = self.states[judgement.state] = self.encode(normalized(judgement))
        return text
