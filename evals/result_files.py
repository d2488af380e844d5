# SPDX-License-Identifier: Apache-2.0
"""Reading result files: what is odd about one becomes one line that names the file and the command that makes it."""

from __future__ import annotations

import contextlib
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1


class ResultError(ValueError):
    """A file that cannot be read as the result that it should hold; the text is one line with the file and the mend."""


def load(path: Path, made_by: str) -> dict[str, Any]:
    """The JSON object in `path` (.json, or .json.xz). `made_by` is the command that writes such a file.

    Raises ResultError: no such file, no text, not JSON, no object, another schema_version than SCHEMA_VERSION, a
    command that is no text.
    """
    opened: Callable[..., Any] = lzma.open if path.suffix == ".xz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as handle:
            text = handle.read()
    except OSError as error:
        raise _error(path, error.strerror or str(error), made_by) from None
    except (UnicodeDecodeError, lzma.LZMAError, EOFError) as error:
        raise _error(path, f"no text that can be read ({error})", made_by) from None
    if not text.strip():
        raise _error(path, "the file is empty", made_by)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _error(path, f"not JSON ({error})", made_by) from None
    if not isinstance(document, dict):
        raise _error(path, f"a JSON object is expected, this is a {type(document).__name__}", made_by)
    if document.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise _error(path, f"schema_version {document['schema_version']!r}, this reads {SCHEMA_VERSION}", made_by)
    if not isinstance(document.get("command", ""), str):
        raise _error(path, "the command is no text", made_by)
    return document


@contextlib.contextmanager
def reading(path: Path, made_by: str) -> Iterator[None]:
    """Around code that takes values out of the document of `path`: missing and odd ones raise ResultError."""
    try:
        yield
    except ResultError:
        raise
    except KeyError as error:
        raise _error(path, f"the key {error.args[0]!r} is missing", made_by) from error
    except (TypeError, AttributeError, LookupError, ArithmeticError, ValueError, StopIteration) as error:
        first = (str(error).splitlines() or [""])[0]
        raise _error(path, f"a value is not what it should be ({type(error).__name__}: {first})", made_by) from error


def _error(path: Path, what: str, made_by: str) -> ResultError:
    return ResultError(f"{path}: {what}; write it again with `{made_by}`")
