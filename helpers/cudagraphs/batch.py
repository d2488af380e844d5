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
from cudagraphs.rules.config import verdict
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
    encode = json.JSONEncoder(separators=(",", ":")).encode
    decode = json.JSONDecoder().decode
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = decode(line.strip().lstrip("\ufeff"))
            fields = request["fields"]
            if not isinstance(fields, dict):
                raise TypeError('"fields" is not an object')
            result = verdict(fields, request.get("version") or mcore, request.get("te", default_te))
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
        yield encode({"id": request.get("id"), **result})
