# SPDX-License-Identifier: Apache-2.0
"""A small Megatron-Core training loop with layer graphs."""

import argparse
import faulthandler
import sys
import traceback

import torch
import torch.distributed as dist
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

from model import build_model

# A shutdown that takes longer than this is stuck: the process then dumps its stacks and exits with 1.
SHUTDOWN_LIMIT_S = 120


class LayerGraphs:
    """The layer graphs of a TECudaGraphHelper, from capture to deletion."""

    def __init__(self, helper):
        self.helper = helper
        self.capture_begun = False

    def capture(self):
        self.capture_begun = True
        self.helper.create_cudagraphs()

    def delete(self):
        """Delete the graphs, if there are any. Returns whether certainly none is left."""
        if self.helper.graphs_created():  # delete_cuda_graphs() asserts this
            self.helper.delete_cuda_graphs()
            return True
        # A capture that raised half-way leaves graphs that the helper does not know of.
        return not self.capture_begun


def train(model, graphs, steps, warmup):
    for step in range(steps):
        if step == warmup:
            graphs.capture()
        loss = model[0](torch.randint(0, 1000, (1, 4096)))
        loss.backward()
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a device error in the last steps must raise here, not be lost in the shutdown


def shut_down(graphs):
    """Delete the graphs, then destroy the process group.

    In this order: destroying an NCCL communicator waits for every graph that captured work on it. So where
    graphs may be left, the process group is not destroyed, and goes with the process.
    """
    faulthandler.dump_traceback_later(SHUTDOWN_LIMIT_S, exit=True, file=sys.__stderr__)
    if graphs is None or graphs.delete():
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
    else:
        print("train.py: the graph capture did not finish; not destroying the process group", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("nccl")
    graphs = None
    try:
        model = build_model(layers=2)
        helper = TECudaGraphHelper(model=model, config=None, seq_length=4096, micro_batch_size=1, optimizers=[])
        graphs = LayerGraphs(helper)
        train(model, graphs, args.steps, args.warmup)
    except BaseException as error:
        if isinstance(error, Exception):
            # Now, as well as at the exit: if the shutdown is stuck, the exit prints nothing.
            traceback.print_exc()
            sys.stderr.flush()
        try:
            shut_down(graphs)
        except Exception:
            traceback.print_exc()  # and keep the exit code of the first error
        raise
    shut_down(graphs)


if __name__ == "__main__":
    main()
