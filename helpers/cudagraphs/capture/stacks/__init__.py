# SPDX-License-Identifier: Apache-2.0
"""The trainers that a variant runs on, one module a stack; `TRAINERS` says which module serves which stack.

A trainer is built as `Trainer(job)` from the plain job that `plan.job` makes, inside a process of its own, and has:

- `step(batches, on_gradients=None, update=True) -> list[Tensor]`: one optimizer step over the microbatches. Returns the
  loss of each microbatch (0-d float32, own storage). `on_gradients()` is called after the backward passes, before the
  update.
- `evaluate(batches) -> list[Tensor]`: the same losses without gradients, in evaluation mode; back in training mode
  afterwards.
- `capture()`: captures what the variant asks for; does nothing where `captures_in_step` says that a training step
  captures.
- `captures_in_step`: whether the first step after `warmup_steps` captures by itself.
- `warmup_steps`: eager training steps before the capture.
- `gradients()` and `parameters()`: iterators of (name, Tensor), gradients in the dtype they accumulate in, parameters
  in the dtype the optimizer updates.
- `close()`: lets go of everything, after the graphs were deleted and before the process group goes.
"""

from __future__ import annotations

from importlib import import_module

TRAINERS = {
    "megatron-core": "cudagraphs.capture.stacks.megatron",
    "transformer-engine": "cudagraphs.capture.stacks.te",
    "torch": "cudagraphs.capture.stacks.plain",
}
# What every trainer process needs besides its stack; torch._dynamo is what the first optimizer of torch imports.
_COMMON = (
    "torch",
    "torch._dynamo",
    "torch.profiler",
    "cudagraphs.capture.child",
    "cudagraphs.capture.digest",
    "cudagraphs.capture.memory",
    "cudagraphs.capture.stacks.batches",
    "delete_graphs",
)


def imports(stack: str) -> tuple[str, ...]:
    """The modules of a stack, for the fork server to import once for all variants. None of them touches CUDA at
    import."""
    return (*_COMMON, TRAINERS[stack])


def trainer(job: dict):
    """The trainer of the job's stack, built. Imports torch and the stack."""
    return import_module(TRAINERS[job["stack"]]).Trainer(job)
