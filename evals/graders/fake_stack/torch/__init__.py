# SPDX-License-Identifier: Apache-2.0
"""As much of PyTorch as a teardown case needs, without a GPU: graphs that are alive or not, and process groups that
wait for them.

What matters is kept: a captured graph that was neither reset nor freed makes destroy_process_group() wait for ever, as
NCCL does for a communicator that a graph still uses. Every event goes as a JSON line to the file that TEARDOWN_EVENTS
names.
"""

import atexit
import json
import os

__version__ = "2.11.0"
EVENTS = os.environ["TEARDOWN_EVENTS"]


def event(name, **facts):
    with open(EVENTS, "a") as stream:
        stream.write(json.dumps({"event": name, **facts}) + "\n")


class Tensor:
    """A number that remembers its shape."""

    def __init__(self, value=0.0):
        self.value = value

    def copy_(self, other):
        self.value = getattr(other, "value", other)
        return self

    def item(self):
        return self.value

    def backward(self):
        pass


def zeros(*shape, **options):
    return Tensor(0.0)


def randint(*shape, **options):
    return Tensor(1.0)


rand = randn = ones = randint


def manual_seed(seed):
    pass


def save(state, path):
    event("save")
    with open(path, "w") as stream:
        stream.write("checkpoint\n")


def device(name):
    return name


from torch import cuda, distributed  # noqa: E402, F401

atexit.register(lambda: event("exit", live=cuda.graphs.live()))
