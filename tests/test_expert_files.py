# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Files of models with experts, which hold each expert by itself: what transformers writes is loaded piece by piece,
and what is saved under a plan is what transformers writes.
"""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    dot_natural_key,
)

from equivalence import reference
from file_reads import recorded_reads
from galvatron_hf import parallelize
from galvatron_hf.checkpoint.hugging_face import meta_model, write_pretrained
from galvatron_hf.parallel.comm.dtensor import local_region, local_tensor
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.weights.converters import join
from galvatron_hf.parallel.weights.distributed_state import WholeWeights
from galvatron_hf.parallel.weights.joined_tensors import StoredTensor
from galvatron_hf.parallel.weights.materialize import load_pretrained_weights
from galvatron_hf.parallel.weights.pretrained import pretrained_on_meta
from plans import shared_out
from ranks import run_ranks
from test_experts import FAMILIES as TRAINED_FAMILIES
from test_experts import plans_of
from test_loading import different, message_of
from tiny_models import BATCHES, EXPERT_FAMILIES, FAMILIES


SMALL = "30KB"  # of a file: the experts of a layer are in several
# w1, w2 and w3; fused with shared experts; a bias of choices; transposed weights with biases; only renamed.
FAST = {
    "mixtral": ["all_kinds"],
    "qwen3_moe": ["interleaved", "shardings"],
    "deepseek_v3": ["1f1b"],
    "gpt_oss": ["permuted"],
    "granitemoe": ["micro_batches"],
}
FASTEST = ("mixtral", "deepseek_v3")


def family_plans(plain: PreTrainedModel) -> dict:
    return plans_of(reference(plain, BATCHES["plain"]()))


def unequal_buffers(model: PreTrainedModel, plain: PreTrainedModel) -> list[str]:
    """Returns the names of this rank's saved buffers that are not the plain model's."""
    own, wanted = dict(model.named_buffers()), plain.state_dict()
    assert all(buffer.dtype == wanted[name].dtype for name, buffer in own.items() if name in wanted)
    return [name for name, buffer in own.items() if name in wanted and not torch.equal(buffer, wanted[name])]


def save(parallel: ParallelModel, plain: PreTrainedModel, folder: Path) -> None:
    """Saves the weights as `GalvatronTrainer.save_model` does; collective."""
    weights, first = WholeWeights(parallel), dist.get_rank() == 0
    if first:
        plain.config.save_pretrained(folder)
    empty = meta_model(type(plain), plain.config, torch.float32)
    write_pretrained(empty, folder, weights.gather, max_shard_size=SMALL, writes=first)
    dist.barrier()


def assert_same_files(folder: Path, plain: Path) -> None:
    """Checks that two folders have the same files of weights: names, keys, shapes, formats and values."""
    names = sorted(path.name for path in plain.glob("model*"))
    assert sorted(path.name for path in folder.glob("model*")) == names and len(names) > 3
    for name in names:
        if name.endswith(".json"):
            assert (folder / name).read_text() == (plain / name).read_text()
            continue
        seen, wanted = load_file(folder / name), load_file(plain / name)
        assert list(seen) == list(wanted)
        assert all(seen[key].dtype == wanted[key].dtype and torch.equal(seen[key], wanted[key]) for key in wanted)


def check_family(folder: Path, family: str, names: list[str] | None = None) -> None:
    """Loads transformers' files under plans, and saves again; loads the second plan's weights into the first's."""
    plain = EXPERT_FAMILIES[family].build()
    plans = {name: plan for name, plan in family_plans(plain).items() if names is None or name in names}
    plain.save_pretrained(folder / "plain", max_shard_size=SMALL)
    other = EXPERT_FAMILIES[family].build(seed=5)
    other.save_pretrained(folder / "other", max_shard_size=SMALL)
    opened = AutoModelForCausalLM.from_pretrained(folder / "plain")

    def work() -> dict[str, list[str]]:
        wrong, world = {}, WorldMesh("cpu")
        for name, plan in plans.items():
            model, files = pretrained_on_meta(folder / "plain")
            parallel = parallelize(model, plan, world, weights=files)
            wrong[name] = different(parallel.model, opened) + unequal_buffers(parallel.model, opened)
            save(parallel, plain, folder / name)
        load_pretrained_weights(parallel, folder / "other")
        wrong["other"] = different(parallel.model, other) + unequal_buffers(parallel.model, other)
        return wrong

    for wrong in run_ranks(work, 4):
        assert not any(wrong.values()), {name: found for name, found in wrong.items() if found}
    for name in plans:
        assert_same_files(folder / name, folder / "plain")
    again = AutoModelForCausalLM.from_pretrained(folder / name).state_dict()
    assert all(torch.equal(again[key], tensor) for key, tensor in plain.state_dict().items())


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in FASTEST else [pytest.mark.slow]) for name in FAST],
)
def test_files_of_transformers_are_loaded_and_written_again(tmp_path, family):
    check_family(tmp_path, family, FAST[family])


@pytest.mark.slow
@pytest.mark.parametrize("family", TRAINED_FAMILIES)
def test_files_of_every_family(tmp_path, family):
    """Loads and saves each family under a quarter of the plans, and under each plan several families."""
    plans = family_plans(EXPERT_FAMILIES[family].build())
    check_family(tmp_path, family, list(shared_out(plans, TRAINED_FAMILIES.index(family), 4)))


# ---- What is read


def test_each_rank_reads_its_own_experts_alone(tmp_path):
    plain = EXPERT_FAMILIES["qwen3_moe"].build()
    plans = {name: plan for name, plan in family_plans(plain).items() if name in ("expert_4", "expert_2")}
    plain.save_pretrained(tmp_path, max_shard_size=SMALL)

    def work() -> dict[str, tuple]:
        seen = {}
        for name, plan in plans.items():
            model, files = pretrained_on_meta(tmp_path)
            with recorded_reads() as reads:
                model = parallelize(model, plan, weights=files).model
            own = {name: parameter for name, parameter in model.named_parameters()}
            down = local_region(own["model.layers.2.mlp.experts.down_proj"].detach())[0]
            held = sum(local_tensor(parameter.detach()).numel() for parameter in own.values())
            seen[name] = reads, list(range(down.start, down.stop)), held
        return seen

    ranks = run_ranks(work, 4)
    for name in plans:
        experts = []
        for seen in ranks:
            reads, held_experts, held = seen[name]
            of_layer = [key for key, _ in reads if key.startswith("model.layers.2.mlp.experts.")]
            wanted = [
                f"model.layers.2.mlp.experts.{expert}.{part}_proj.weight"
                for expert in held_experts
                for part in ("gate", "up", "down")
            ]
            assert sorted(of_layer) == sorted(wanted)  # each once
            assert sum(size for _, size in reads) == held
            experts += held_experts
        assert sorted(experts) == list(range(8))  # each on one rank


CONVERTERS = {
    "experts": ([MergeModulelist(dim=0), Concatenate(dim=1)], ["a.*.w", "b.*.w"]),
    "a list": ([MergeModulelist(dim=1)], ["a.*.w"]),
    "projections": ([Concatenate(dim=0)], ["a.0.w", "b.0.w"]),
    "transposed": ([Transpose(0, 1)], ["b.1.w"]),
    "by shape": ([Transpose(dim0=0, dim1=1, check_dims=True)], ["b.1.w"]),
    "transposed experts": ([MergeModulelist(dim=0), Concatenate(dim=1), Transpose(1, 2)], ["a.*.w", "b.*.w"]),
}


@pytest.mark.parametrize("name", list(CONVERTERS))
def test_every_region_of_a_joined_weight_is_that_of_transformers(tmp_path, name):
    """Compares with the converter's own `convert` on whole tensors."""
    operations, patterns = CONVERTERS[name]
    generator = torch.Generator().manual_seed(3)
    tensors = {f"{part}.{i}.w": torch.randn(5, 3, generator=generator) for part in "ab" for i in range(11)}
    save_file(tensors, tmp_path / "one.safetensors")
    keys = {pattern: [k for k in tensors if pattern.replace("*", k.split(".")[1]) == k] for pattern in patterns}
    keys = {pattern: sorted(own, key=dot_natural_key) for pattern, own in keys.items()}
    converter = WeightConverter(list(patterns), "joined", operations)
    for pattern, own in keys.items():
        for key in own:
            converter.add_tensor("joined", key, pattern, tensors[key])
    plain = torch.nn.Module()
    plain.register_parameter("joined", torch.nn.Parameter(torch.empty(3, 5)))
    wanted = converter.convert("joined", model=plain)["joined"]
    wanted = wanted[0] if isinstance(wanted, list) else wanted
    stored = {
        pattern: [
            StoredTensor(file=str(tmp_path / "one.safetensors"), key=key, shape=(5, 3), dtype=torch.float32)
            for key in own
        ]
        for pattern, own in keys.items()
    }
    joined = join(converter, stored, (3, 5))
    assert joined.shape == wanted.shape
    for _ in range(40):
        bounds = [sorted(torch.randint(0, size + 1, (2,), generator=generator).tolist()) for size in wanted.shape]
        region = tuple(slice(*pair) for pair in bounds)
        seen = torch.full_like(wanted[region], float("nan"))
        with recorded_reads() as reads:
            joined.read_into(seen, region)
        assert torch.equal(seen, wanted[region])
        assert sum(size for _, size in reads) == seen.numel()  # nothing else was read


def test_a_bias_of_choices_keeps_its_format_in_a_model_of_another(tmp_path):
    EXPERT_FAMILIES["deepseek_v3"].build().save_pretrained(tmp_path)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    plan = family_plans(EXPERT_FAMILIES["deepseek_v3"].build())["expert_2"]

    def work() -> list[str]:
        model, files = pretrained_on_meta(tmp_path, dtype=torch.bfloat16)
        parallel = parallelize(model, plan, weights=files)
        wrong = different(parallel.model, wanted) + unequal_buffers(parallel.model, wanted)
        model, files = pretrained_on_meta(tmp_path, dtype=torch.bfloat16)
        # As Trainer does: weights in fp32 with the values of the model in bf16.
        parallel = parallelize(model.float(), plan, weights=replace(files, dtype=torch.bfloat16))
        return wrong + different(parallel.model, in_fp32) + unequal_buffers(parallel.model, in_fp32)

    in_fp32 = copy.deepcopy(wanted).float()
    assert run_ranks(work, 4) == [[]] * 4
    assert {buffer.dtype for name, buffer in wanted.named_buffers() if "correction" in name} == {torch.float32}


# ---- Other forms, and refusals


def _changed(plain: Path, folder: Path, *removed: str, **added: torch.Tensor) -> Path:
    shutil.copytree(plain, folder)
    tensors = {key: tensor for key, tensor in load_file(folder / "model.safetensors").items() if key not in removed}
    save_file(tensors | added, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_other_forms_are_loaded_and_incomplete_ones_refused_by_name(tmp_path):
    plain = EXPERT_FAMILIES["mixtral"].build()
    plan = family_plans(plain)["expert_4"]
    plain.save_pretrained(tmp_path / "plain")
    plain.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert "model.layers.1.mlp.experts.down_proj" in load_file(tmp_path / "fused" / "model.safetensors")
    layer = "model.layers.1.block_sparse_moe.experts"
    w2, more = [f"{layer}.{expert}.w2.weight" for expert in range(9)], torch.zeros(32, 40)
    fused = {"model.layers.1.mlp.experts.down_proj": torch.zeros(8, 32, 40)}
    changes = {
        "middle": ([f"{layer}.3.w1.weight"], {}),
        "last": ([f"{layer}.7.w{part}.weight" for part in (1, 2, 3)], {}),
        "up": ([f"{layer}.{expert}.w3.weight" for expert in range(8)], {}),
        "all": (w2, {}),
        "nine": ([], {w2[8]: more}),
        "narrow": ([], {w2[2]: more[:, 1:].clone()}),
        "both": ([], fused),
        "unused": ([], {w2[2].replace("layers.1", "layers.9"): more}),
    }
    folders = {
        name: _changed(tmp_path / "plain", tmp_path / name, *gone, **new) for name, (gone, new) in changes.items()
    }

    def work() -> dict[str, str]:
        def load(folder: Path) -> str:
            model, files = pretrained_on_meta(folder)
            found: list[str] = []
            message = message_of(lambda: found.extend(different(parallelize(model, plan, weights=files).model, plain)))
            return ", ".join(found) or message

        return {name: load(folder) for name, folder in (folders | {"fused": tmp_path / "fused"}).items()}

    ranks = run_ranks(work, 4)
    seen = ranks[0]
    assert ranks == [seen] * 4
    assert seen["fused"] == seen["unused"] == "it went through"
    joined = "model.layers.1.mlp.experts"
    ending = f"from which {joined}.gate_up_proj is joined; give a complete folder."
    assert seen["middle"] == f"{folders['middle']} lacks {layer}.3.w1.weight, {ending}"
    assert seen["last"].startswith(f"{folders['last']} lacks {layer}.7.w1.weight, {layer}.7.w3.weight, {ending}")
    assert f"lacks {layer}.0.w3.weight, {layer}.1.w3.weight, {layer}.2.w3.weight and 5 more" in seen["up"]
    assert (
        seen["all"]
        == f"{folders['all']} lacks {joined}.down_proj, which MixtralForCausalLM needs; give a complete folder."
    )
    assert seen["nine"].startswith(
        f"{w2[0]} in {folders['nine']} has shape (9, 32, 40), and MixtralForCausalLM has (8,"
    )
    assert seen["narrow"].startswith(
        f"{joined}.down_proj cannot be joined from {folders['narrow']} ({w2[0]} is joined"
    )
    assert seen["both"].startswith(f"{folders['both']} has {joined}.down_proj as a whole and in parts such as {w2[0]}")


def test_weights_that_are_joined_in_files_are_written_as_transformers_does(tmp_path):
    """Has a family whose files hold three projections as one; the mapping ends with the process."""
    plain = FAMILIES["llama"].build()
    three = [f"self_attn.{name}_proj.weight" for name in "qkv"]

    def work() -> None:
        converter = WeightConverter("self_attn.qkv.weight", three, [Chunk(dim=0)])
        register_checkpoint_conversion_mapping("llama", [converter], overwrite=True)
        plain.save_pretrained(tmp_path / "plain", max_shard_size=SMALL)
        (tmp_path / "own").mkdir()
        empty, state = meta_model(type(plain), plain.config, torch.float32), plain.state_dict()

        def gather(names: list[str]) -> dict[str, torch.Tensor]:
            return {name: state[name] for name in names}

        write_pretrained(empty, tmp_path / "own", gather, max_shard_size=SMALL)

    run_ranks(work, 1)
    assert_same_files(tmp_path / "own", tmp_path / "plain")
    assert "model.layers.2.self_attn.qkv.weight" in (tmp_path / "own" / "model.safetensors.index.json").read_text()
