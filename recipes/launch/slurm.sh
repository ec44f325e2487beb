#!/bin/bash
# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
#
# Trains on the nodes of a Slurm job: srun starts `accelerate launch` once on each node, which starts a rank for each GPU.
# Submit it from the root of the repository, with a recipe and its arguments:
#
#     sbatch --nodes 4 recipes/launch/slurm.sh recipes/train_clm.py --model_name_or_path meta-llama/Llama-3.1-8B \
#         --dataset_name wikitext --dataset_config_name wikitext-103-raw-v1 --max_length 4096 --bf16 \
#         --output_dir /shared/output
#
# Activate the environment of the package first: sbatch passes it on. The output folder is on a disk that all nodes
# share. Variables, with their defaults:
#     PROCESSES_PER_NODE   ranks of a node (SLURM_GPUS_ON_NODE, or 8)
#     LAUNCH_CONFIG        accelerate's configuration (recipes/accelerate/1x8.yaml); the sizes in it do not count
#     MAIN_PROCESS_PORT    port of the first node (one that follows from the number of the job)
#SBATCH --job-name=galvatron
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=USR1@150
#SBATCH --output=%x-%j.log
set -euo pipefail

if [ $# -eq 0 ]; then
    echo "No recipe is given: write sbatch $0 recipes/train_clm.py ARGUMENTS" >&2
    exit 2
fi
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export LAUNCH_CONFIG=${LAUNCH_CONFIG:-recipes/accelerate/1x8.yaml}
export PROCESSES_PER_NODE=${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
export MAIN_PROCESS_IP=${hosts[0]}
export MAIN_PROCESS_PORT=${MAIN_PROCESS_PORT:-$((20000 + SLURM_JOB_ID % 10000))}

# Before the time limit Slurm signals the launchers. They pass the signal on, and wait for their ranks to save.
export PET_SIGNALS_TO_HANDLE=${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}
export PET_SHUTDOWN_TIMEOUT=${PET_SHUTDOWN_TIMEOUT:-120}

# One shell on each node: SLURM_NODEID is known there alone. If a node fails, the others end too.
srun --kill-on-bad-exit=1 bash -c '
    exec accelerate launch --config_file "$LAUNCH_CONFIG" \
        --num_machines "$SLURM_NNODES" --num_processes $((SLURM_NNODES * PROCESSES_PER_NODE)) \
        --machine_rank "$SLURM_NODEID" --main_process_ip "$MAIN_PROCESS_IP" --main_process_port "$MAIN_PROCESS_PORT" \
        "$@"' launch "$@"
