# SPDX-License-Identifier: Apache-2.0
"""What the helper scripts share: settings, versions, rules, file formats, recommendation and reports.

Nothing here imports torch, except `capture/` and `partial/`, which run where a GPU does.
"""

__version__ = "0.1.0"
