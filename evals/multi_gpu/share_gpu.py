#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Several NCCL ranks on one GPU, where there are not enough GPUs: for parity and for ends, never for times.

Usage:
    python3 evals/multi_gpu/share_gpu.py --ranks 2 -- evals/smoke_evidence.py --out results

NCCL refuses two ranks on one GPU of one host. Ranks that name different hosts (NCCL_HOSTID, read by getHostHash in NCCL's
misc/utils.cc, 2.28) pass that check, and then talk through sockets. Their kernels take turns on the GPU, so a collective
takes milliseconds; what is captured, what it computes and how it ends stays what it is.

Output: that of the script, which torchrun starts once a rank.
Exit codes: those of torchrun; 2 usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence


def environment(rank: int) -> dict[str, str]:
    """What a rank needs in its environment before NCCL starts: a host of its own, sockets of this machine, GPU 0."""
    return {"NCCL_HOSTID": f"rank-{rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "LOCAL_RANK": "0"}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if "RANK" in os.environ:  # started by the torchrun below, which may swallow the "--"
        os.environ.update(environment(int(os.environ["RANK"])))
        script = words[words.index("--") + 1 :] if words[0] == "--" else words
        os.execv(sys.executable, [sys.executable, *script])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    own, script = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    arguments = parser.parse_args(own)
    if not script:
        parser.error("give the script and its arguments after --")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(arguments.ranks)]
    os.execv(sys.executable, [*torchrun, os.path.abspath(__file__), "--", *script])


if __name__ == "__main__":
    sys.exit(main())
