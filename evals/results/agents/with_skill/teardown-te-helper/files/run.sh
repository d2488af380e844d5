#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "$0")"
# Deletes the graphs on every way out (also those of a capture that failed half way), aborts communicators after a fault, and
# ends a teardown that hangs. 25 seconds are less than Slurm's KillWait (30), so that a cancelled job still ends by itself.
exec python .agents/skills/nemo-cuda-graphs/helpers/delete_graphs.py --limit 25 -- train.py "$@"
