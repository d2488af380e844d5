# SPDX-License-Identifier: Apache-2.0
"""Errors of the partial graph manager. All of them are RuntimeErrors, as those of NeMo AutoModel's manager are."""


class PartialGraphError(RuntimeError):
    """The manager or an entry was used in a way it does not support."""


class Unsupported(PartialGraphError):
    """A call that no graph can stand for: its arguments, results or side effects cannot be replayed faithfully."""


class CaptureError(PartialGraphError):
    """Capture failed; every entry is eager again. The message names the entry, `__cause__` is the first error."""


class FallbackError(PartialGraphError):
    """Strict mode: a call that would have run eagerly. The message names the entry and the reason."""


class StaleGraphError(PartialGraphError):
    """A backward pass arrived for a replay whose static buffers are already spent, reused or changed."""
