# SPDX-License-Identifier: Apache-2.0
"""partial_parallel.py with variants that go wrong on purpose, for test_partial_parallel.py. Forked ranks have them."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "evals" / "multi_gpu"))

import partial_parallel
import torch
from parallel_modes import VARIANTS, Twin, Variant, batches, ddp, loss_of, model, pipeline


def at_rank_one(fault):
    """DDP in which rank 1 meets `fault` in the third step."""

    def build(place):
        twin = ddp(place, gradient_as_bucket_view=False)
        step = twin.step

        def faulty(index):
            if index == 2 and place.rank == 1:
                fault()
            return step(index)

        twin.step = faulty
        return twin

    return build


def raises():
    raise ValueError("planted")


built = []


def wrong(place):
    """DDP whose second twin on this rank, the captured one, gets gradients that are off by one part in a million."""
    twin = ddp(place, gradient_as_bucket_view=False)
    built.append(twin)
    if len(built) < 2:
        return twin
    step = twin.step

    def off(index):
        losses = step(index)
        if index > 0:
            with torch.no_grad():
                for parameter in twin.bare.parameters():
                    parameter.grad.mul_(1 + 1e-6)
        return losses

    twin.step = off
    return twin


def alone(place):
    """Every rank for itself: equal to eager, and no mean over the ranks."""
    bare = model(place)

    def step(index):
        losses = []
        for batch in batches(index, place.rank, place):
            losses.append(loss_of(bare(batch)))
            losses[-1].backward()
        return [loss.detach() for loss in losses]

    return Twin(bare, step)


VARIANTS.clear()
VARIANTS.update({
    "raises": Variant("ddp", at_rank_one(raises), {}),
    "dies": Variant("ddp", at_rank_one(lambda: os._exit(7)), {}),
    "hangs": Variant("ddp", at_rank_one(lambda: time.sleep(1000)), {}),
    "wrong": Variant("ddp", wrong, {}),
    "alone": Variant("ddp", alone, {}),
    "one-slot": Variant("pipeline", pipeline, {"schedule": "GPipe"}, {"max_slots": 1}),
})
partial_parallel.GRACE_SECONDS = 1.0

if __name__ == "__main__":
    sys.exit(partial_parallel.main())
