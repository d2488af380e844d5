# SPDX-License-Identifier: Apache-2.0
"""The parts of `partial_graphs.py`: guards, recording, capture, replay, backends, discovery. Imports torch."""
