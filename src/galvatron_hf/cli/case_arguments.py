# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Adds the arguments that name a model, a cluster, a workload and a plan, for all commands that predict."""

from __future__ import annotations

import argparse

from galvatron_hf.plan.plan_words import WORDS


MEMORY_FRACTION = 0.92  # of a device that a plan may use


def add_case_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds the arguments that name the model, the cluster and the workload, which may be `required`."""
    add_model_arguments(parser)
    add_cluster_arguments(parser)
    add_workload_arguments(parser, required=required)
    parser.add_argument("--price-per-hour", type=float, metavar="X", help="price of a device-hour, with --tokens")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name the model, and the memory that it may use."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", metavar="PATH", help="a folder with a config.json, such a file, or the id of a model on the Hub"
    )
    group.add_argument(
        "--adapter", metavar="DIR", help="a folder with PEFT's adapter_config.json: LoRA on the frozen --model"
    )
    group.add_argument(
        "--model-profile", metavar="FILE", help="the output of `galvatron profile-model`, instead of --model"
    )
    group.add_argument(
        "--compiled", action="store_true", help="price layers that torch.compile has fused; with --model only"
    )
    group.add_argument(
        "--memory-gib",
        type=float,
        metavar="X",
        help="memory that a plan may use on a device (default: --memory-fraction of the preset's or profile's)",
    )
    group.add_argument(
        "--memory-fraction",
        type=float,
        metavar="X",
        help=f"share of a device's memory that a plan may use (default: {MEMORY_FRACTION}, as in training)",
    )


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name the cluster."""
    group = parser.add_argument_group("cluster")
    group.add_argument("--cluster", metavar="NAME", help="a preset of devices, such as h100; none need be present")
    group.add_argument(
        "--hardware-profile", metavar="FILE", help="the output of `galvatron profile-hardware`, instead of --cluster"
    )
    group.add_argument(
        "--galvatron-profiles",
        metavar="DIR",
        help="a folder of Galvatron's profiles, with model/ and hardware/, measured under Megatron-SP",
    )
    group.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="devices in all, instead of --nodes: one machine if they fit in it, else as many as they fill",
    )
    group.add_argument("--nodes", type=int, metavar="N", help="machines (default: 1, or the profile's)")
    group.add_argument(
        "--devices-per-node", type=int, metavar="N", help="devices of a machine (default: 8, or the profile's)"
    )


def add_workload_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds the arguments of the workload, whose sizes may be `required`, and of the output."""
    group = parser.add_argument_group("workload")
    group.add_argument("--global-batch", type=int, required=required, metavar="N", help="rows of an optimizer step")
    group.add_argument(
        "--seq-length", type=int, required=required, metavar="N", help="tokens of a row, or positions of an image"
    )
    group.add_argument(
        "--dataset",
        metavar="NAME",
        help="rows as long as those of this dataset, cut to --seq-length: a folder, a file or an id on the Hub, as "
        "`galvatron data` takes it (default: all rows have --seq-length)",
    )
    group.add_argument(
        "--dataset-column",
        metavar="NAME",
        help="the column of --dataset with token ids, or with text if there is a --tokenizer",
    )
    group.add_argument("--tokenizer", metavar="NAME", help="a tokenizer for a --dataset of text")
    group.add_argument(
        "--target-length",
        type=int,
        metavar="N",
        help="tokens of a row in the decoder of a --model with an encoder too (default: those of --seq-length)",
    )
    group.add_argument(
        "--packed",
        action=argparse.BooleanOptionalAction,
        help="rows are documents of packed rows, as in training, or rows without padding (default: packed where the "
        "family of --model allows it)",
    )
    group.add_argument(
        "--dtype", choices=("bf16", "fp32"), help="number format of compute (default: bf16, or the model profile's)"
    )
    group.add_argument(
        "--reduce-dtype",
        choices=("bf16", "fp32"),
        help="number format of gradient sums (default: fp32, or bf16 with --galvatron-profiles)",
    )
    group.add_argument(
        "--expert-imbalance",
        nargs="+",
        metavar="DEGREE=X",
        help="most rows at a rank over their mean, by expert degree, as a training run has measured: 4=1.3 8=1.6",
    )
    group.add_argument("--tokens", type=float, metavar="N", help="also say what a run of N tokens takes, such as 1e12")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def add_plan_argument(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds the argument that names a plan."""
    parser.add_argument(
        "--plan",
        required=required,
        metavar="PLAN",
        help=f"the file of a plan of this project or of Galvatron, or a plan in words: {WORDS}; such as tp4+pp2+zero2",
    )


def add_rounds_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that limits interleaved pipelines."""
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help="maximum of virtual stages on each pipeline rank (default: 4, or 1 with --galvatron-profiles, because "
        "Galvatron's plans are not interleaved)",
    )
