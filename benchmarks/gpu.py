# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Tests and measures everything that needs GPUs, in under ten minutes on one H100 or H200.

    python benchmarks/gpu.py                                on all GPUs of this machine
    python benchmarks/gpu.py --sections kernels 8B          some sections
    OMP_NUM_THREADS=1 python benchmarks/gpu.py --tiny --device cpu --ranks 2      the same code on two CPU ranks

Each section runs in processes of its own, one for each GPU, so that one that fails or hangs leaves the others alone:
- `equality`: plans against plain Trainer on one process, in fp32 and bf16, packed, recomputed, compiled, resumed
- `kernels`: matrix products, copies, attention against float64 and against SDPA, the head with its loss
- `narrow`: steps of a model so small that the host decides, and how often the host waits for the device
- `1B`, `ragged`, `8B`: steps of models of Llama's widths against plain Trainer in the same process, their kernels by
  kind, and their utilisation of the peak FLOP/s; `1B` is also predicted from a profile that is measured there

Prints tables and writes all numbers to OUTPUT/gpu.json. Times on the CPU mean nothing. Exits with 1 if numbers differ
or a section fails.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch


SECTIONS = ("equality", "kernels", "narrow", "8B", "1B", "ragged")
SECONDS = 240  # most of a section's processes
PROFILE_DEGREES = 8  # tensor degrees of the model's profile: those of eight GPUs


def main() -> None:
    options = _options()
    if options.part:
        _run_part(options)
        return
    options.output.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    found: dict[str, Any] = {"machine": _machine(options)}
    print(json.dumps(found["machine"], indent=1), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for section in options.sections:
            start = time.perf_counter()
            found[section] = _section(section, folder, options)
            print(f"\n## {section} ({time.perf_counter() - start:.0f} s)\n\n{table(found[section])}", flush=True)
            (options.output / "gpu.json").write_text(json.dumps(found, indent=1))
    rows = [row for section in options.sections for row in found[section]]
    failed = [row for row in rows if "error" in row and isinstance(row["error"], str) or row.get("equal") is False]
    print(f"\n{len(failed)} of {len(rows)} rows failed; {time.perf_counter() - began:.0f} s in all")
    sys.exit(bool(failed))


def _section(section: str, folder: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs the parts of a section and returns their rows. Those of one GPU that are not timed run at the same time."""
    if section != "equality":
        return _ended(_start(section, folder, options, options.ranks), SECONDS)
    found = _ended(_start("reference", folder, options, 1), SECONDS)
    if any("error" in row for row in found):
        return found
    parts = ["equality-fp32", "equality-bf16"]
    if options.ranks > 1:
        return found + [row for part in parts for row in _ended(_start(part, folder, options, options.ranks), SECONDS)]
    running = [_start(part, folder, options, 1) for part in parts]
    return found + [row for one in running for row in _ended(one, SECONDS)]


def _start(part: str, folder: str, options: argparse.Namespace, ranks: int) -> tuple[subprocess.Popen, Path, Path]:
    """Starts the processes of a part."""
    result, log = Path(folder) / f"{part}.json", options.output / f"{part}.log"
    script = [__file__, "--part", part, "--folder", folder, "--device", options.device, "--ranks", str(ranks)]
    script += ["--tiny"] * options.tiny + ["--eager"] * options.eager
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    with log.open("w") as written:
        process = subprocess.Popen([sys.executable, *launcher, *script], stdout=written, stderr=subprocess.STDOUT)
    return process, result, log


def _ended(started: tuple[subprocess.Popen, Path, Path], seconds: float) -> list[dict[str, Any]]:
    """Waits for a part; returns its rows, and one with an error if it failed."""
    process, result, log = started
    rows, error = [], None
    try:
        if process.wait(seconds):
            error = f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        error = f"no end after {seconds} s"
    if result.exists():
        rows = [json.loads(line) for line in result.read_text().splitlines()]
    if error is not None:
        lines = log.read_text(errors="replace").splitlines()
        reasons = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        reason = (reasons or lines or [""])[0].strip()[:300]
        rows.append({"case": result.stem, "error": f"{error}, {reason} (see {log})"})
    return rows


def _run_part(options: argparse.Namespace) -> None:
    """Runs one part on this rank; rank 0 writes its rows."""
    import gpu_equality
    import gpu_kernels
    import gpu_steps

    part, tiny, ranks = options.part, options.tiny, options.ranks
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    folder, compiled = Path(options.folder), not options.eager
    if part == "reference":
        found = gpu_equality.reference(folder, options.device)
    elif part.startswith("equality"):
        found = gpu_equality.compare(folder, options.device, part.removeprefix("equality-"), compiled)
    elif part == "kernels":
        found = gpu_kernels.measure(device, tiny, compiled) if local == 0 else []
    else:
        batch = _batch(part, tiny, device, gpu_steps.Batch)
        found = gpu_steps.compare(part, batch, device, ranks, compiled)
        _write(found, folder, part)
        if part == "1B":
            found += gpu_steps.predict(batch, device, ranks, min(PROFILE_DEGREES, 2) if tiny else PROFILE_DEGREES)
    _write(found, folder, part)


def _write(rows: list[dict[str, Any]], folder: Path, part: str) -> None:
    """Writes the rows of rank 0, one in each line."""
    if int(os.environ.get("RANK", 0)) == 0:
        (folder / f"{part}.json").write_text("\n".join(map(json.dumps, rows)))


def _batch(part: str, tiny: bool, device: torch.device, kind: type) -> Any:
    """Returns the model and the rows of a section of steps, with as many layers as the GPU has memory for."""
    if tiny:
        return kind(size="tiny", layers=2, rows=4, length=64, shortest=8 if part == "ragged" else None)
    gib = torch.cuda.get_device_properties(device).total_memory / 2**30 if device.type == "cuda" else 0
    if part == "8B":
        return kind(size="8B", layers=8 if gib > 120 else 4 if gib > 70 else 1, rows=2, length=8192)
    if part == "narrow":
        return kind(size="narrow", layers=16, rows=1, length=128)
    if part == "ragged":
        return kind(size="1B", layers=16, rows=8, length=2048, shortest=32)
    return kind(size="1B", layers=16, rows=8, length=2048)


def _machine(options: argparse.Namespace) -> dict[str, Any]:
    import transformers

    import accelerate

    made = {"torch": torch.__version__, "transformers": transformers.__version__, "accelerate": accelerate.__version__}
    if options.device == "cuda":
        made |= {
            "GPU": torch.cuda.get_device_name(),
            "memory GiB": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1),
            "CUDA": torch.version.cuda,
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "cuDNN": torch.backends.cudnn.version(),
        }
    return made | {"ranks": options.ranks, "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d")}


def table(rows: list[dict[str, Any]]) -> str:
    """Returns a Markdown table of the rows' numbers and words; lists and parts of a step follow below it."""
    columns = list(
        dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, (dict, list)))
    )
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows]
    for row in rows:
        name = next(iter(row.values()))
        for key, value in row.items():
            if isinstance(value, dict) and value:
                parts = ", ".join(
                    f"{part} {number:.1f}" for part, number in sorted(value.items(), key=lambda p: -p[1])
                )
                lines.append(f"\n{name}, {key}: {parts}")
            elif isinstance(value, list) and value and key != "longest kernels":
                lines.append(f"\n{name}, {key}: {', '.join(value)}")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-2 else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return "" if value is None else str(value).replace("|", "/")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, help="processes; default one for each GPU")
    parser.add_argument("--output", type=Path, default=Path("output/gpu"), help="folder for gpu.json and logs")
    parser.add_argument("--tiny", action="store_true", help="toy models, to try the script")
    parser.add_argument("--eager", action="store_true", help="leave out what is compiled")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("There is no GPU; use --tiny --device cpu to try the script.")
    options.ranks = options.ranks or (torch.cuda.device_count() if options.device == "cuda" else 1)
    return options


if __name__ == "__main__":
    main()
