# SPDX-License-Identifier: Apache-2.0
"""GPU smoke captures: does a CUDA graph variant capture, is it the same training, is it faster, does it exit cleanly.

Data flows one way: `plan` (what to run) -> `parent` (schedules processes) -> `child` (one variant in one process, on
one of `stacks`) -> `parity`, `timing`, `memory`, `errors` (plain data in, verdicts out) -> `report` and `plot`.

Only `child`, `digest`, `memory` and `stacks` import torch, and only inside the processes that `forkserver` starts; the
parent stays free of CUDA state, so that a crash, a hang or an out-of-memory of a variant cannot reach it.
"""
