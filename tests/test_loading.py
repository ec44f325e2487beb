# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Models that no rank ever has whole: read from files piece by piece, or initialised piece by piece."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel
from transformers.core_model_loading import Chunk, WeightConverter

from equivalence import compare, observe, reference, single_stage, whole_weights
from file_reads import recorded_reads
from galvatron_hf import LayerStrategy, parallelize
from galvatron_hf.parallel.comm.dtensor import local_tensor
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.comm.objects import on_every_rank
from galvatron_hf.parallel.weights import safetensors as weight_files
from galvatron_hf.parallel.weights.pretrained import pretrained_on_meta
from galvatron_hf.parallel.weights.safetensors import WeightFiles
from plans import mixed_plans, pipeline_plans, shared_out, uniform_plans, untied_plans
from ranks import run_ranks
from tiny_models import BATCHES, FAMILIES


ALL_PLANS = uniform_plans(4) | mixed_plans() | untied_plans() | pipeline_plans()
# Layers that differ; the two copies of a tied weight on ranks of their own, ranks out of order, virtual stages.
PLANS = {name: ALL_PLANS[name] for name in ("mixed_b", "1f1b_uneven", "interleaved")}
MORE_PLANS = {
    name: ALL_PLANS[name] for name in ("shuffled", "mixed_c", "tensor_ulysses", "1f1b_mixed", "zero_bubble_v")
}
PAIR = single_stage((LayerStrategy(tensor=2), LayerStrategy()) * 2, 2)


def meta_model(plain: PreTrainedModel) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(plain.config), dtype=plain.dtype)


def weights_of(plain: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in plain.named_parameters()}


def different(model: PreTrainedModel, plain: PreTrainedModel) -> list[str]:
    """Returns the names of the weights that are not the plain model's bit for bit; collective."""
    seen, wanted = whole_weights(model, plain), weights_of(plain)
    assert seen.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(seen[name], wanted[name])]


def check_family(family: str, folder: Path, plans: dict) -> None:
    """Loads and initialises a model under plans on 4 ranks, and runs one step of a loaded model."""
    FAMILIES[family].build().save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder).train()
    oracle = reference(loaded, BATCHES["plain"]())
    torch.manual_seed(7)
    fresh = AutoModelForCausalLM.from_config(copy.deepcopy(loaded.config))
    next_number = torch.rand(())

    def work() -> dict[str, list[str]]:
        wrong, world = {}, WorldMesh("cpu")
        for name, plan in plans.items():
            parallel = parallelize(meta_model(loaded), plan, world, weights=folder)
            wrong[f"{name} loaded"] = different(parallel.model, loaded)
            if name == next(iter(plans)):
                seen = observe(parallel, oracle)
                compare(seen, oracle)
            torch.manual_seed(7 + dist.get_rank())
            parallel = parallelize(meta_model(fresh), plan, world)
            wrong[f"{name} random numbers"] = [] if torch.equal(torch.rand(()), next_number) else ["next"]
            wrong[f"{name} initialised"] = different(parallel.model, fresh)
        return wrong

    for wrong in run_ranks(work, 4):
        assert not any(wrong.values()), {name: found for name, found in wrong.items() if found}


@pytest.mark.parametrize(
    "family, plan",
    [
        ("phi3", "mixed_b"),
        pytest.param("gpt2", "1f1b_uneven", marks=pytest.mark.slow),
        pytest.param("gemma2", "interleaved", marks=pytest.mark.slow),
        pytest.param("gemma2", "1f1b_uneven", marks=pytest.mark.slow),
        pytest.param("llama_tied", "mixed_b", marks=pytest.mark.slow),
        pytest.param("llama_tied", "interleaved", marks=pytest.mark.slow),
    ],
)
def test_weights_are_those_of_from_pretrained_and_from_config(tmp_path, family, plan):
    check_family(family, tmp_path, {plan: PLANS[plan]})


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_weights_of_more_families_under_more_plans(tmp_path, family):
    check_family(family, tmp_path, shared_out(PLANS | MORE_PLANS, list(FAMILIES).index(family), 3))


@pytest.mark.slow
@pytest.mark.parametrize("part, family", list(enumerate(["llama", "gpt2_untied", "phi3"])))
def test_weights_under_every_plan(tmp_path, part, family):
    check_family(family, tmp_path, dict(list(ALL_PLANS.items())[part::3]))


# ---- What is read


def test_each_rank_reads_its_own_pieces_alone(tmp_path):
    plain, plan = FAMILIES["llama_tied"].build(), pipeline_plans()["1f1b_mixed"]  # stages of layers 0 and 1 to 3
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2

    def work() -> tuple[set[str], int, int]:
        with recorded_reads() as reads:
            model = parallelize(meta_model(plain), plan, weights=tmp_path).model
        own = {id(p): local_tensor(p.detach()).numel() for p in model.parameters()}
        return {key for key, _ in reads}, sum(size for _, size in reads), sum(own.values())

    for rank, (keys, read, own) in enumerate(run_ranks(work, 4)):
        first = rank < 2
        assert {int(key.split(".")[2]) for key in keys if ".layers." in key} == ({0} if first else {1, 2, 3})
        assert "model.embed_tokens.weight" in keys  # the head's copy is on the last stage
        assert ("model.norm.weight" in keys) is not first
        assert read == own


def test_values_are_rounded_to_the_asked_format_on_their_way(tmp_path):
    plain = FAMILIES["llama"].build()
    plain.save_pretrained(tmp_path)
    files = WeightFiles.find(tmp_path)
    rounded = copy.deepcopy(plain).bfloat16().float()

    def work() -> list[str]:
        source = WeightFiles(name=files.name, files=files.files, dtype=torch.bfloat16)
        return different(parallelize(meta_model(plain), PAIR, weights=source).model, rounded)

    assert run_ranks(work, 2) == [[], []]


def _without(folder: Path, *names: str, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name not in names} | more


def _saved(folder: Path, tensors: dict[str, torch.Tensor], plain: PreTrainedModel) -> Path:
    plain.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_files_that_are_not_this_family_s_own(tmp_path):
    """Compares renamed, base-model, twice stored and head-less files with from_pretrained on the same files."""
    tied, untied, gpt2 = (FAMILIES[name].build() for name in ("llama_tied", "llama", "gpt2"))
    for name, model in dict(tied=tied, untied=untied, gpt2=gpt2).items():
        model.save_pretrained(tmp_path / name)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    stored = {name: load_file(tmp_path / name / "model.safetensors") for name in ("tied", "untied", "gpt2")}
    folders = dict(
        head_only=_saved(
            tmp_path / "a", _without(tmp_path / "tied", embedding, **{head: stored["tied"][embedding]}), tied
        ),
        twice=_saved(tmp_path / "b", stored["tied"] | {head: stored["tied"][embedding].clone()}, tied),
        base=_saved(tmp_path / "c", {k.removeprefix("transformer."): v for k, v in stored["gpt2"].items()}, gpt2),
        no_head=_saved(tmp_path / "d", _without(tmp_path / "untied", head), untied),
        extra=_saved(
            tmp_path / "e", stored["untied"] | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}, untied
        ),
    )
    wanted = {}
    for name, folder in folders.items():
        torch.manual_seed(3)
        wanted[name] = AutoModelForCausalLM.from_pretrained(folder)

    def work() -> dict[str, list[str]]:
        wrong = {}
        for name, folder in folders.items():
            torch.manual_seed(3 + dist.get_rank())
            wrong[name] = different(parallelize(meta_model(wanted[name]), PAIR, weights=folder).model, wanted[name])
        return wrong

    for wrong in run_ranks(work, 2):
        assert wrong == dict.fromkeys(folders, [])


def test_key_mapping_is_that_of_from_pretrained(tmp_path):
    plain = FAMILIES["llama"].build()
    plain.save_pretrained(tmp_path)
    tensors = {f"net.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    _saved(tmp_path, tensors, plain)

    def work() -> list[str]:
        model, files = pretrained_on_meta(tmp_path, key_mapping={r"^net\.": ""})
        return different(parallelize(model, PAIR, weights=files).model, plain)

    assert run_ranks(work, 2) == [[], []]


# ---- Names


def test_name_brings_configuration_options_and_generation(tmp_path):
    plain = FAMILIES["gpt2"].build()
    plain.generation_config.max_new_tokens = 11
    plain.bfloat16().save_pretrained(tmp_path)
    model, _ = pretrained_on_meta(tmp_path)
    assert model.dtype == torch.bfloat16 and not model.training
    assert model.generation_config.max_new_tokens == 11
    assert model.name_or_path == str(tmp_path)
    model, _ = pretrained_on_meta(tmp_path, dtype="float32", attn_implementation="eager", resid_pdrop=0.3)
    assert model.dtype == torch.float32 and model.config._attn_implementation == "eager"
    assert model.config.resid_pdrop == 0.3 and next(model.parameters()).is_meta


def test_id_on_the_hub_is_found_in_its_cache(tmp_path):
    plain, commit = FAMILIES["llama"].build(), "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--team--tiny"
    plain.save_pretrained(repository / "snapshots" / commit, max_shard_size="20KB")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)

    def work() -> list[str]:
        model, files = pretrained_on_meta("team/tiny", cache_dir=tmp_path, local_files_only=True)
        return different(parallelize(model, PAIR, weights=files).model, plain)

    assert run_ranks(work, 2) == [[], []]


def test_rank_0_goes_first_and_fails_for_all(tmp_path):
    def look() -> bool:
        if dist.get_rank() == 0:
            time.sleep(0.3)
            (tmp_path / "downloaded").touch()
        return (tmp_path / "downloaded").exists()

    def fail() -> None:
        if dist.get_rank() == 1:
            raise OSError("no such folder on this node")

    def work() -> tuple[bool, str]:
        found = on_every_rank(look, rank_0_first=True)
        return found, message_of(lambda: on_every_rank(fail))

    assert run_ranks(work, 2) == [(True, "rank 1: no such folder on this node")] * 2


# ---- Refusals


def message_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except ValueError as error:
        return str(error)
    return "it went through"


def test_weights_that_cannot_be_read_are_refused_by_name(tmp_path, monkeypatch):
    plain, tied = FAMILIES["llama"].build(), FAMILIES["llama_tied"].build()
    plain.save_pretrained(tmp_path / "whole")
    tied.save_pretrained(tmp_path / "tied")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    up, head = "model.layers.2.mlp.up_proj.weight", "lm_head.weight"
    missing = _saved(tmp_path / "missing", _without(tmp_path / "whole", up, head), plain)
    shape = _saved(tmp_path / "shape", whole | {up: whole[up][:-1].clone()}, plain)
    both = _saved(tmp_path / "both", _without(tmp_path / "tied", **{head: torch.zeros(97, 32)}), tied)
    cut = _saved(tmp_path / "cut", whole, plain) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-10])
    converted = WeightConverter("up_proj.weight", "gate_proj.weight", [Chunk(dim=0)])
    mapping = weight_files.get_model_conversion_mapping

    def work() -> dict[str, str]:
        def refusal(folder: Path, model: PreTrainedModel = plain) -> str:
            return message_of(lambda: parallelize(meta_model(model), PAIR, weights=folder))

        found = dict(missing=refusal(missing), shape=refusal(shape), both=refusal(both, tied), cut=refusal(cut.parent))
        weight_files.get_model_conversion_mapping = lambda *args: [*mapping(*args), converted]
        found["converted"] = refusal(tmp_path / "whole")
        weight_files.get_model_conversion_mapping = mapping
        loaded = copy.deepcopy(plain)
        found["loaded"] = message_of(lambda: parallelize(loaded, PAIR, weights=missing))
        half = meta_model(plain)
        half.lm_head = nn.Linear(32, 97, bias=False)
        found["half"] = message_of(lambda: parallelize(half, PAIR))
        return found

    first, second = run_ranks(work, 2)
    assert first == second
    assert first["missing"] == (f"{missing} lacks {up}, which LlamaForCausalLM needs; give a complete folder.")
    assert first["shape"].startswith(f"{up} in {shape} has shape (39, 32), and LlamaForCausalLM has (40, 32);")
    assert "different values for" in first["both"] and "tie_word_embeddings" in first["both"]
    assert "incomplete" in first["cut"].lower() or "header" in first["cut"].lower(), first["cut"]
    assert first["converted"].startswith(f"model.layers.0.mlp.up_proj.weight in {tmp_path / 'whole'} is converted")
    assert first["loaded"].startswith("LlamaForCausalLM has weights already")
    assert "and others, such as lm_head.weight, not" in first["half"]


def test_folders_that_cannot_be_read_are_refused_by_name(tmp_path):
    plain = FAMILIES["llama"].build()
    plain.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    index = tmp_path / "sharded" / "model.safetensors.index.json"
    written = json.loads(index.read_text())
    pickled = tmp_path / "pickled"
    plain.config.save_pretrained(pickled)
    torch.save(plain.state_dict(), pickled / "pytorch_model.bin")

    def refusal(folder: Path, **options: Any) -> str:
        return message_of(lambda: pretrained_on_meta(folder, **options))

    def with_files(**files: str) -> str:
        index.write_text(json.dumps(written | {"weight_map": written["weight_map"] | files}))
        return refusal(index.parent)

    assert refusal(tmp_path / "nowhere").startswith(f"There is no folder {tmp_path / 'nowhere'};")
    assert "pickles such as pytorch_model.bin are never opened" in refusal(pickled)
    assert "is outside of its folder" in with_files(more=str(pickled / "pytorch_model.bin"))
    assert "is outside of its folder" in with_files(more="../pickled/pytorch_model.bin")
    assert "names gone.safetensors, which is not there" in with_files(more="gone.safetensors")
    index.write_text(json.dumps(written))
    assert refusal(index.parent) == "it went through"
    assert refusal(index.parent, device_map="auto").startswith("device_map says where weights go")
    assert refusal(index.parent, dtype="float16").startswith("dtype 'float16' cannot be trained under a plan")
    assert refusal(index.parent, no_such_option=1).startswith("no_such_option is neither an option of")
    config = json.loads((index.parent / "config.json").read_text())
    (index.parent / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    assert refusal(index.parent).endswith("give the folder of the unquantised model.")


class Scaled(LlamaForCausalLM):
    """Ends with a product of two weights in the place of one."""

    def __init__(self, config):
        super().__init__(config)
        attention = self.model.layers[0].self_attn
        attention.q_proj.weight.data.mul_(attention.k_proj.weight.mean())


class Given(LlamaForCausalLM):
    """Ends with values that no operation on a weight has made."""

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].self_attn.q_proj.weight = nn.Parameter(torch.eye(config.hidden_size))


@pytest.mark.parametrize("family", [Scaled, Given])
def test_initialisation_that_needs_more_than_one_weight_is_refused_by_name(family):
    config = FAMILIES["llama"].build().config

    def work() -> str:
        with torch.device("meta"):
            model = family._from_config(copy.deepcopy(config))
        return message_of(lambda: parallelize(model, PAIR))

    for message in run_ranks(work, 2):
        assert message.startswith(f"{family.__name__} has no initialisation of model.layers.0.self_attn.q_proj.weight")
