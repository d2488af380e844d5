# SPDX-License-Identifier: Apache-2.0
"""Deleting CUDA graphs before a process leaves. The public surface is helpers/delete_graphs.py.

    finders.py    what exists in this process, kind by kind, found without importing anything
    deletion.py   deletes it in order and says what happened
    report.py     what is said
    holders.py    which object keeps a graph alive
    groups.py     destroy_process_group and abort: deletion first, then the call
    watchdog.py   the deadline of a teardown
    exits.py      install(): signals, excepthook, atexit
    launcher.py   runs an unchanged training script under all of it

Nothing here imports torch, megatron or transformer_engine: what is not in sys.modules has created no graph.
"""
