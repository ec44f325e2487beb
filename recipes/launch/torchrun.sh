#!/bin/bash
# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
#
# Trains with torchrun, on one machine or on several, with a recipe and its arguments:
#
#     PROCESSES_PER_NODE=4 OMP_NUM_THREADS=1 recipes/launch/torchrun.sh recipes/train_clm.py recipes/quickstart.yaml \
#         --output_dir output/quickstart
#
# On several machines run the same command on each of them, with RENDEZVOUS. Variables, with their defaults:
#     PROCESSES_PER_NODE   ranks of a machine (8)
#     NODES                number of machines (1)
#     RENDEZVOUS           address and port of the first machine, such as node0:29500; for several machines alone
#     RUN_ID               name of the run, the same on all machines (galvatron)
set -euo pipefail

if [ $# -eq 0 ]; then
    echo "No recipe is given: write $0 recipes/train_clm.py ARGUMENTS" >&2
    exit 2
fi
nodes=${NODES:-1}
if [ "$nodes" -gt 1 ]; then
    : "${RENDEZVOUS:?is the address of the first of $nodes machines: set it, such as node0:29500}"
    where=(--nnodes "$nodes" --rdzv_backend c10d --rdzv_endpoint "$RENDEZVOUS" --rdzv_id "${RUN_ID:-galvatron}")
else
    where=(--standalone)
fi
exec torchrun "${where[@]}" --nproc_per_node "${PROCESSES_PER_NODE:-8}" "$@"
