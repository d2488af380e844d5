# SPDX-License-Identifier: Apache-2.0
"""Graph owners of megatron-core 0.19, over the fake PyTorch beside it."""
