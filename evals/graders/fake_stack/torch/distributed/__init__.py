# SPDX-License-Identifier: Apache-2.0
"""The functions of distributed_c10d, as torch.distributed re-exports them; what else is called does nothing."""

from torch.distributed.distributed_c10d import (  # noqa: F401
    GroupMember,
    destroy_process_group,
    get_rank,
    get_world_size,
    init_process_group,
    is_available,
    is_initialized,
)


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args, **options: None
