"""Each rank reads its own tensors, and a checkpoint that is wrong is an error on every rank."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    dynamic_module_utils,
)

import drumline
import launcher
from coordinator import Coordinator
from drumline import CheckpointError, timings
from drumline.checkpoint import safetensors_index
from drumline.checkpoint.empty_model import load_shard
from drumline.checkpoint.safetensors_index import TensorReader, read_index
from drumline.core.consistency import check_same_on_all_ranks, run_on_all_ranks
from drumline.core.shards import Region
from drumline.errors import short_traceback
from drumline.planner.load_options import LoadOptions
from drumline.planner.model_profile import build_on_meta, profile_model
from drumline.stages.stage_weights import fill
from drumline.strategies import existing_model, pipeline_parallel
from drumline.strategies.opening import describe_checkpoint
from drumline.strategies.plan_inputs import sized_model
from drumline.tensor_parallel import sharded_model
from launcher import LaunchError, linux
from launcher.runtime.rank_process import describe


def real(model) -> set[str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name for name, tensor in named if not tensor.is_meta}


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (existing_model, "_keep_own"),
        (pipeline_parallel, "_read"),
        (sharded_model, "load_planned"),
    ],
)
def test_ranks_may_differ_by_hours_in_reading(checkpoints, monkeypatch, owner, name):
    """The fastest waited as long as in any other call, and then ended a healthy load."""
    plain, path = checkpoints.llama()
    read, exchange = getattr(owner, name), Coordinator._exchange
    readers, deadlines = set(), []

    def note(*arguments):
        stats = read(*arguments)
        readers.add(threading.get_ident())
        return stats

    def wait(self, kind, data, timeout_s):
        if threading.get_ident() in readers:
            readers.remove(threading.get_ident())
            deadlines.append(timeout_s)
        return exchange(self, kind, data, timeout_s)

    monkeypatch.setattr(owner, name, note)
    monkeypatch.setattr(Coordinator, "_exchange", wait)
    monkeypatch.setattr(pipeline_parallel, "_build_empty", lambda *_: None)

    def rank():
        memory = {"max_memory": [1 << 30] * 2}
        if owner is existing_model:
            return drumline.dispatch(copy.deepcopy(plain), **memory).close()
        if owner is sharded_model:
            return drumline.load(path, tp=2).close()
        return drumline.load(path, **memory).close()

    launcher.launch(rank, nprocs=2, launcher="threads", timeout_s=60)
    assert deadlines == [timings.TIMINGS.load_s] * 2


def test_a_rank_has_only_its_own_tensors_and_they_are_those_of_the_checkpoint(checkpoints):
    plain, path = checkpoints.llama()
    places = {"": "meta", "model.layers.2": "cpu", "model.layers.3": "cpu"}
    shard = load_shard(LlamaForCausalLM, path, read_index(path), places, torch.float32)
    own = {name for name, _ in plain.named_parameters() if ".2." in name or ".3." in name}
    assert real(shard) == own
    assert all(torch.equal(shard.get_parameter(n), plain.get_parameter(n)) for n in own)


def test_experts_that_transformers_fuses_are_fused_on_their_owner_too(checkpoints):
    plain, path = checkpoints.make("mixtral3", "MixtralForCausalLM", **MIXTRAL)
    places = {"": "meta", "model.layers.1": "cpu"}
    shard = load_shard(type(plain), path, read_index(path), places, torch.float32)
    names = [name for name, _ in plain.named_parameters() if name.startswith("model.layers.1.")]
    assert any("gate_up_proj" in name for name in names)
    assert all(torch.equal(shard.get_parameter(n), plain.get_parameter(n)) for n in names)


def test_buffers_that_no_file_holds_are_computed(checkpoints, on_master):
    sizes = {"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    wide = {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 32}
    ends = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    config = {**sizes, **heads, **wide, **ends, "init_std": 0.4}
    plain, path = checkpoints.make("marian", "MarianMTModel", **config)

    def work(model):
        ids = torch.arange(3, 12)[None]
        return model.generate(ids, max_new_tokens=6, do_sample=False).tolist()

    device_map = {"": 0, "model.encoder.layers": 1, "model.decoder.layers.1": 1}
    assert on_master(path, 2, work, device_map=device_map) == work(plain)


def test_the_layout_counts_every_byte_once(checkpoints):
    for plain, _ in (checkpoints.llama(), checkpoints.gpt2()):
        model = build_on_meta(type(plain), plain.config, torch.float32)
        tensors = [*plain.parameters(), *plain.buffers()]
        expected = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        assert profile_model(model).nbytes == expected


def test_weights_that_stay_in_float32_are_planned_at_that_size(checkpoints, on_master):
    """T5 loads a matrix of each layer so, and half of its bytes were not counted."""
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    _, path = checkpoints.make("t5 kept wide", "T5ForConditionalGeneration", **sizes, vocab_size=64)

    def work(model):
        loaded = {tensor.dtype for tensor in model.parameters()}
        nbytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        return loaded, nbytes, sum(model.device_map.nbytes.values())

    loaded, nbytes, planned = on_master(path, 1, work, dtype=torch.float16)
    assert loaded == {torch.float16, torch.float32} and planned == nbytes


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_tied_head_that_is_stored_too_is_planned_as_it_is_loaded(
    checkpoints, on_master, tmp_path, prefix
):
    """transformers ties no two weights that are both in the files and differ; one that equals the
    other was loaded beside it. The names in the files may be others than in the model."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "tie_word_embeddings": True}
    _, path = checkpoints.make("tied llama", "LlamaForCausalLM", **sizes)
    shutil.copy(path / "config.json", tmp_path)

    def work(model):
        nbytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        own = model.lm_head.weight.clone()
        return nbytes, sum(model.device_map.nbytes.values()), own

    def stored_tensors():
        tensors = load_file(path / "model.safetensors")
        return {name.replace("model.", prefix): tensor for name, tensor in tensors.items()}

    embedding = f"{prefix}embed_tokens.weight"
    tied_nbytes, *_ = on_master(path, 1, work)
    for difference in (0, 1):
        tensors = stored_tensors()
        head = tensors["lm_head.weight"] = tensors[embedding] + difference
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        nbytes, planned, stored_head = on_master(tmp_path, 1, work)
        described = describe_checkpoint(tmp_path, LoadOptions())
        parts = sized_model(described, LoadOptions())[2]
        assert planned == nbytes == parts.nbytes == tied_nbytes + difference * head.nbytes
        assert torch.equal(stored_head, head)
    stored = stored_tensors()
    stored |= {"a": head.clone(), "lm_head.weight": stored[embedding].clone()}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})  # one more of their shape
    assert "lm_head.weight" not in describe_checkpoint(tmp_path, LoadOptions()).files.index
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    whole = (tmp_path / "model.safetensors").read_bytes()
    with open(tmp_path / "model.safetensors", "wb") as file:  # as a plan has the Hub's
        file.write(whole[: 8 + int.from_bytes(whole[:8], "little")])
        file.truncate(len(whole))
    described = describe_checkpoint(tmp_path, LoadOptions())
    assert sized_model(described, LoadOptions())[2].nbytes == tied_nbytes + head.nbytes


def test_a_layer_is_not_split_where_the_model_names_only_its_attention(checkpoints):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    kind = "RobertaPreLayerNormForMaskedLM"
    plain, _ = checkpoints.make("prelayernorm", kind, num_attention_heads=4, vocab_size=64, **sizes)
    profile = profile_model(plain)
    names = [part.name for part in profile.layers]
    assert names == [f"roberta_prelayernorm.encoder.layer.{n}" for n in range(2)]
    _assert_tied_around(profile, "roberta_prelayernorm.embeddings", "lm_head")


def _assert_tied_around(profile, *names):
    """BERT's class of embeddings is one that stays whole; planned as a layer, on another rank than
    the head that is tied to it, it left that without weights, and any numbers came out."""
    assert {name for tie in profile.ties for name in tie} == {*names}
    assert {*names} <= {part.name for part in profile.others}


def test_tied_weights_are_on_one_rank_wherever_they_are(checkpoints, on_master):
    config = {"tie_word_embeddings": True, **SMALL}
    plain, path = checkpoints.make("tied", "LlamaForCausalLM", **config)
    ids = torch.arange(3, 12)[None]
    device_map = {"": 0, "model.embed_tokens": 1, "lm_head": 1}

    def work(model):
        return model.generate(ids, max_new_tokens=8, do_sample=False).tolist()

    assert on_master(path, 2, work, device_map=device_map) == work(plain)


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.4,
}


@pytest.fixture
def sharded(tmp_path):
    """A checkpoint in several files with an index, to be damaged."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    return tmp_path


def complaints(ranks_or_errors, path, blind=()) -> list[str]:
    """What each of three ranks raises."""

    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            folder = "nowhere" if info.rank in blind else path
            drumline.load(folder, coor=coor, max_memory=[1 << 30] * 3).close()

    errors = ranks_or_errors(rank, 3)
    assert all(isinstance(error, drumline.CheckpointError) for error in errors), errors
    return [str(error) for error in errors]


def loaded_by(ranks, paths, nprocs, work=lambda model: None, **options):
    """What work(model) gives on the master, each rank having its own path."""

    def rank(info):
        torch.set_num_threads(1)
        with Coordinator(info, timeout_s=20) as coor:
            path, memory = paths[info.rank], [1 << 30] * nprocs
            try:
                with drumline.load(path, coor=coor, max_memory=memory, **options) as model:
                    return work(model)
            except drumline.WorkerExit as served:
                return served.code

    return ranks(rank, nprocs)[0]


def greedy(model):
    ids = torch.arange(3, 12)[None]
    return model.generate(ids, max_new_tokens=8, do_sample=False).tolist()


MIXTRAL = {
    "num_hidden_layers": 3,
    "num_local_experts": 4,
    "hidden_size": 32,
    "vocab_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("seeing", [[0], [0, 2]])
def test_ranks_without_files_are_sent_their_part(checkpoints, ranks, tmp_path, seeing, dtype):
    """Experts, which transformers fuses, are fused where they go."""
    plain, path = checkpoints.make("mixtral3", "MixtralForCausalLM", **MIXTRAL)
    paths = [path if rank in seeing else tmp_path / "nowhere" for rank in range(3)]
    expected = greedy(plain if dtype is None else type(plain).from_pretrained(path, dtype=dtype))
    assert loaded_by(ranks, paths, 3, greedy, dtype=dtype) == expected


def test_rank_0_reads_every_tensor_once_and_the_others_nothing(checkpoints, ranks, monkeypatch):
    plain, path = checkpoints.llama()
    stats = {}

    def noted(model, *arguments):
        coor = arguments[4]
        stats[coor.rank] = fill(model, *arguments)
        return stats[coor.rank]

    monkeypatch.setattr(pipeline_parallel, "fill", noted)
    shown = loaded_by(ranks, [path, "nowhere", "nowhere"], 3, lambda model: model.loaded)
    assert shown == stats[0]
    total = sum(tensor.nbytes for tensor in plain.parameters())
    assert [stats[rank].nbytes_read for rank in range(3)] == [total, 0, 0]
    assert sum(stats[rank].share for rank in range(3)) == total
    assert stats[0].nbytes_sent == total - stats[0].share


def test_a_rank_that_may_not_look_into_its_folder_is_sent_its_part(
    checkpoints, on_master, tmp_path, monkeypatch
):
    """The model of another user, in a folder of mode 750: a PermissionError on every rank."""
    plain, path = checkpoints.llama()
    closed, stat = tmp_path / "closed", Path.stat

    def look(file, **options):
        if file.is_relative_to(closed):
            raise PermissionError(13, "Permission denied", str(file))
        return stat(file, **options)

    monkeypatch.setattr(Path, "stat", look)
    ids = torch.tensor([[5, 6, 7]])
    tokens = on_master(path, 2, lambda model: model.generate(ids).tolist(), elsewhere=closed)
    assert tokens == plain.generate(ids).tolist()


def test_files_that_only_another_rank_has_are_of_no_use(checkpoints, ranks_or_errors):
    _, path = checkpoints.llama()

    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            drumline.load("nowhere" if info.rank == 0 else path, coor=coor)

    errors = ranks_or_errors(rank, 2)
    assert all(isinstance(error, drumline.CheckpointError) for error in errors), errors
    assert all("nowhere" in str(error) for error in errors)


def test_ranks_with_other_files_than_rank_0_are_named(sharded, tmp_path, ranks_or_errors):
    other = tmp_path / "other"
    shutil.copytree(sharded, other)
    file = sorted(other.glob("*.safetensors"))[0]
    tensors = load_file(file)
    save_file(dict(reversed(tensors.items())), file, metadata={"format": "pt", "other": "yes"})

    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            drumline.load(other if info.rank == 2 else sharded, coor=coor)

    assert all("ranks [2]" in str(error) for error in ranks_or_errors(rank, 3))


def test_a_progress_bar_on_rank_0_counts_the_bytes_of_all_ranks(checkpoints, ranks, capsys):
    plain, path = checkpoints.llama()
    loaded_by(ranks, [path] * 3, 3, progress=True)
    last = capsys.readouterr().err.split("\r")[-1]
    total = sum(tensor.nbytes for tensor in plain.parameters()) / 1000
    assert "loading" in last and f"{total:.1f}/{total:.1f} kB" in last


def test_there_is_no_progress_bar_where_stderr_is_no_terminal(checkpoints, ranks, capsys):
    loaded_by(ranks, [checkpoints.llama()[1]] * 2, 2)
    assert "loading" not in capsys.readouterr().err


def test_a_load_takes_no_more_exchanges_than_its_steps_need(checkpoints, ranks, monkeypatch):
    """Each of them costs a way there and back between hosts: 26 took 4 s where a link has 80 ms."""
    exchanges = []
    plain = Coordinator._exchange

    def counted(coor, *args):
        exchanges.append(coor.rank)
        return plain(coor, *args)

    monkeypatch.setattr(Coordinator, "_exchange", counted)
    loaded_by(ranks, [checkpoints.llama()[1]] * 2, 2)
    assert exchanges.count(1) <= 20


def test_a_sharded_checkpoint_loads(sharded, on_master):
    assert on_master(sharded, 3, lambda model: model.device_map.ranks) == [0, 1, 2]


def beside_a_variant(folder, other):
    shutil.copy(other / "model.safetensors", folder / "model.z.safetensors")


def before_an_older_listing(folder, other):
    LlamaForCausalLM.from_pretrained(other).save_pretrained(folder, max_shard_size="40KB")
    assert (folder / "model.safetensors.index.json").exists()


def named_in_the_config(folder, other):
    shutil.copy(folder / "model.safetensors", folder / "a.safetensors")
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    named = {**config, "transformers_weights": "a.safetensors"}
    (folder / "config.json").write_text(json.dumps(named))


@pytest.mark.parametrize("change", [beside_a_variant, before_an_older_listing, named_in_the_config])
def test_of_two_checkpoints_in_a_folder_that_of_transformers_is_read(
    checkpoints, on_master, tmp_path, change
):
    """The last file in the order of names had been: another checkpoint's tokens, silently."""
    plain, path = checkpoints.llama()
    torch.manual_seed(1)
    LlamaForCausalLM(plain.config).save_pretrained(tmp_path / "other")
    folder = tmp_path / "two"
    shutil.copytree(path, folder)
    kept = (folder / "model.safetensors").read_bytes()
    change(folder, tmp_path / "other")
    if change is before_an_older_listing:
        (folder / "model.safetensors").write_bytes(kept)
    tokens = greedy(plain)
    assert greedy(LlamaForCausalLM.from_pretrained(folder)) == tokens
    assert on_master(folder, 2, greedy) == tokens


def test_a_tensor_in_two_files_of_which_none_is_named_is_an_error(checkpoints, tmp_path):
    file = checkpoints.llama()[1] / "model.safetensors"
    for name in ("a", "b"):
        shutil.copy(file, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"in a\.safetensors and in b\.safetensors"):
        read_index(tmp_path)


def test_a_missing_tensor_is_an_error_on_every_rank(sharded, ranks_or_errors):
    name = "model.layers.1.mlp.up_proj.weight"
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    file = sharded / index["weight_map"][name]
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    assert all(name in text for text in complaints(ranks_or_errors, sharded))


@pytest.mark.parametrize("wrong", [torch.zeros(3, 3), torch.zeros(64, 32, dtype=torch.int32)])
def test_a_tensor_of_another_shape_or_kind_is_an_error_on_every_rank(
    sharded, ranks_or_errors, wrong
):
    file = sorted(sharded.glob("*.safetensors"))[0]
    name = "model.embed_tokens.weight"
    save_file({**load_file(file), name: wrong}, file, metadata={"format": "pt"})
    texts = complaints(ranks_or_errors, sharded)
    assert all(name in text and file.name in text for text in texts)


def test_errors_in_the_files_of_rank_0_raise_on_ranks_without_files(sharded, ranks_or_errors):
    file = sorted(sharded.glob("*.safetensors"))[0]
    name = "model.embed_tokens.weight"
    save_file({**load_file(file), name: torch.zeros(3)}, file, metadata={"format": "pt"})
    texts = complaints(ranks_or_errors, sharded, blind=(1, 2))
    assert all(f"{name} in {file.name}" in text for text in texts)


def test_a_truncated_file_is_an_error_on_every_rank(sharded, ranks_or_errors):
    file = sorted(sharded.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-100])
    assert all(file.name in text for text in complaints(ranks_or_errors, sharded))


def rewritten(file, change):
    """A .safetensors file with another header."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = json.dumps(change(header)).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def overlapping(header):
    """The second tensor lies where the first does: wrong weights, of the right shapes."""
    second = [name for name in header if name != "__metadata__"][1]
    begin, end = header[second]["data_offsets"]
    header[second]["data_offsets"] = [0, end - begin]
    return header


@pytest.mark.parametrize("change", [overlapping, list, lambda header: dict.fromkeys(header, 3)])
def test_a_header_that_makes_no_sense_is_an_error_on_every_rank(sharded, ranks_or_errors, change):
    file = sorted(sharded.glob("*.safetensors"))[-1]
    rewritten(file, change)
    assert all(file.name in text for text in complaints(ranks_or_errors, sharded))


LLAMA = '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], '


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ("{", "config.json holds no JSON object"),
        ('{"model_type": "nobody"}', "config.json describes no model"),
        (f'{LLAMA} "hidden_size": "x"}}', "has hidden_size='x', which is not an integer from 1"),
        (f'{LLAMA} "hidden_act": 5}}', "Field 'hidden_act' expected str"),
        (f'{LLAMA} "num_attention_heads": 0}}', "describes no model"),
        ('{"model_type": "clipseg_text_model", "architectures": ["x"]}', "['x'] and the type"),
        (f'{LLAMA} "vocab_size": -5}}', "has vocab_size=-5, which is not an integer from 0"),
        (f'{LLAMA} "hidden_act": "x"}}', "no LlamaForCausalLM can be built"),
    ],
)
def test_a_config_of_no_model_is_an_error_on_every_rank(
    sharded, ranks_or_errors, config, complaint
):
    (sharded / "config.json").write_text(config)
    for text in complaints(ranks_or_errors, sharded):
        assert complaint in text


def test_a_missing_file_is_an_error_on_every_rank(sharded, ranks_or_errors):
    file = sorted(sharded.glob("*.safetensors"))[-1]
    file.unlink()
    assert all(file.name in text for text in complaints(ranks_or_errors, sharded))


def test_pickles_are_refused_with_a_line_that_converts_them(sharded, ranks_or_errors, on_master):
    """The line keeps the head of the model, which AutoModel would lose, and any path."""
    plain = LlamaForCausalLM.from_pretrained(sharded)
    folder = sharded / "it's a model"
    plain.config.save_pretrained(folder)
    torch.save(plain.state_dict(), folder / "pytorch_model.bin")
    torch.save({"learning_rate": 0.1}, folder / "training_args.bin")
    texts = complaints(ranks_or_errors, folder)
    assert all("holds pytorch_model.bin, pickles" in text for text in texts)
    line = shlex.split(texts[0].partition("trust the file: ")[2])
    assert line[:2] == ["python", "-c"]
    exec(line[2])
    assert on_master(folder, 2, greedy) == greedy(plain)


def test_a_path_without_a_model_is_refused(tmp_path, ranks_or_errors):
    texts = complaints(ranks_or_errors, tmp_path / "nowhere")
    assert all("nowhere" in text and "config.json" in text for text in texts)


def test_ranks_with_different_models_find_out_before_serving(sharded, tmp_path, ranks_or_errors):
    other = tmp_path / "other"
    shutil.copytree(sharded, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))

    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            path = other if info.rank == 1 else sharded
            drumline.load(path, coor=coor, max_memory=[1 << 30] * 2).close()

    texts = [str(error) for error in ranks_or_errors(rank, 2)]
    assert all("config" in text and "rank 1" in text for text in texts)


def test_a_single_process_gets_an_ordinary_model(checkpoints, on_master):
    plain, path = checkpoints.llama()
    ids = torch.arange(3, 12)[None]

    def work(model):
        return model.generate(ids, max_new_tokens=8, do_sample=False).tolist()

    assert on_master(path, 1, work) == work(plain)


@pytest.mark.parametrize("what", ["torch", "transformers", "dtype", "attn_implementation"])
def test_what_differs_between_ranks_is_named(ranks_or_errors, what):
    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            check_same_on_all_ranks(coor, {"config": "{}", what: "b" if info.rank == 2 else "a"})

    texts = [str(error) for error in ranks_or_errors(rank, 4)]
    assert all(f"{what} is a on rank 0 and b on rank 2" in text for text in texts)


def test_another_attention_on_one_rank_is_found_at_load(checkpoints, ranks_or_errors):
    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            how = "eager" if info.rank == 1 else "sdpa"
            drumline.load(checkpoints.llama()[1], coor=coor, attn_implementation=how)

    texts = [str(error) for error in ranks_or_errors(rank, 2)]
    assert all("attn_implementation is sdpa on rank 0 and eager on rank 1" in t for t in texts)


def test_more_and_longer_sequences_leave_less_memory_for_weights(checkpoints, ranks_or_errors):
    """The model fits twice, but not with the keys and values of 4096 tokens beside it."""
    plain, path = checkpoints.llama()
    nbytes = sum(tensor.nbytes for tensor in plain.parameters())

    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            memory = [2 * nbytes] * 2
            drumline.load(path, coor=coor, max_memory=memory, batch=4, length=1024)

    assert all("to work in" in str(e) or "missing" in str(e) for e in ranks_or_errors(rank, 2))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("rope_parameters", {"rope_type": "default", "rope_theta": 7.0}, "rope_theta is 10000.0"),
        ("intermediate_size", 96, "intermediate_size is 48 on rank 0 and 96 on rank 1"),
    ],
)
def test_a_config_that_differs_is_named_by_its_first_field_and_both_values(
    sharded, tmp_path, ranks_or_errors, key, value, expected
):
    """A piece of JSON was printed, cut off before what differed; of the plan, if sizes differ."""
    other = shutil.copytree(sharded, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config[key] = value
    (other / "config.json").write_text(json.dumps(config))

    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            drumline.load(other if info.rank else sharded, coor=coor)

    for error in ranks_or_errors(rank, 2):
        assert re.search(rf": config\..*{expected}", str(error))


def test_what_differs_need_not_be_json(ranks_or_errors):
    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            check_same_on_all_ranks(coor, {"max_memory": f"{{0: {info.rank + 7}}}"})

    assert all("is {0: 7} on rank 0 and {0: 8}" in str(e) for e in ranks_or_errors(rank, 2))


def test_the_end_that_one_rank_has_more_is_shown(ranks_or_errors):
    """The beginnings were shown, which are equal."""

    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            check_same_on_all_ranks(coor, {"max_memory": 200 * "x" + "y"[: info.rank]})

    values = rf"is {40 * 'x'} on rank 0 and {40 * 'x'}y on rank 1"
    assert all(values in str(error) for error in ranks_or_errors(rank, 2))


def test_a_field_that_one_rank_lacks_differs_from_one_that_is_null(ranks_or_errors):
    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            config = '{"a": {}}' if info.rank else '{"a": {"b": null}}'
            check_same_on_all_ranks(coor, {"config": config})

    difference = "config.a.b is null on rank 0 and absent on rank 1"
    assert all(difference in str(error) for error in ranks_or_errors(rank, 2))


def test_a_fact_that_rank_0_alone_lacks_is_a_difference(ranks_or_errors):
    """Rank 0 went on, and read the whole model that the others were to stream."""

    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            check_same_on_all_ranks(coor, {"config": "{}"} if info.rank else {})

    difference = "config is absent on rank 0 and {} on rank 1"
    assert [difference in str(error) for error in ranks_or_errors(rank, 3)] == [True] * 3


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"batch": -3}, "batch=-3"),
        ({"length": "long"}, "length='long'"),
        ({"load_in_4bit": True}, "no option load_in_4bit"),
        ({"load_in_4bit": True, "mesh": {"dp_replicate": 2}}, "no option load_in_4bit"),
        ({"subfolder": "other"}, "does not apply subfolder='other'"),
        ({"variant": "fp16", "tp": 2}, "does not apply variant='fp16'"),
        ({"ignore_mismatched_sizes": True}, "does not apply ignore_mismatched_sizes=True"),
        ({"output_loading_info": True}, "output_loading_info=True asks for a report"),
        ({"device_map": 0}, "device_map=0"),
        ({"device_map": torch.device("cpu")}, "device_map=device(type='cpu')"),
        ({"device_map": ""}, "device_map=''"),
        ({"device_map": {}}, "device_map has no place"),
        ({"max_memory": {"gpu:0": "1GB", 1: "1GB"}}, "rank 0: max_memory names 'gpu:0'"),
        ({"max_memory": {0: "1GB", (1, "cuda:77"): "1GB"}}, "rank 1: max_memory names 'cuda:77'"),
    ],
)
def test_an_option_that_cannot_be_is_named(checkpoints, ranks_or_errors, options, complaint):
    """A TypeError of the model's constructor, an AttributeError, or no word at all."""

    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            drumline.load(checkpoints.llama()[1], coor=coor, **options)

    for error in ranks_or_errors(rank, 2):
        assert isinstance(error, drumline.PlanError) and complaint in str(error), error


def test_an_error_of_one_rank_is_the_same_on_all_and_blames_that_rank(ranks_or_errors):
    """It was told as a failed call of a function that no user knows, with two tracebacks."""
    blames = {}

    def rank(info):
        def work():
            if info.rank == 1:
                raise drumline.PlanError("too little memory; give more.")

        with Coordinator(info, timeout_s=20) as coor:
            try:
                run_on_all_ranks(coor, work)
            except drumline.PlanError as error:
                blames[info.rank] = describe(error, info)["blames"]
                raise

    errors = ranks_or_errors(rank, 3)
    assert {type(error) for error in errors} == {drumline.PlanError}
    assert str(errors[1]) == "too little memory; give more."
    assert re.fullmatch(r"rank 1 \(host .*\): too little memory; give more\.", str(errors[2]))
    assert blames == {0: [1], 1: [], 2: [1]}


def test_a_pickle_in_place_of_a_file_of_weights_is_named(tmp_path):
    """Its first bytes were taken for the length of a header."""
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.bin")
    with pytest.raises(drumline.CheckpointError, match=r"weights\.bin is a pickle"):
        read_index(tmp_path / "weights.bin")


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class Config(LlamaConfig):
    model_type = "own"

class Model(LlamaForCausalLM):
    config_class = Config

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = -output.logits
        return output
"""


@pytest.fixture
def own_code(sharded, monkeypatch, tmp_path_factory):
    """A checkpoint whose config and model are its own Python code."""
    monkeypatch.setattr(
        dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules"))
    )
    monkeypatch.setattr("sys.path", [*sys.path])
    config = json.loads((sharded / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["Model"]}
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (sharded / "config.json").write_text(json.dumps(config))
    (sharded / "own.py").write_text(OWN_CODE)
    return sharded


@pytest.mark.parametrize("options", [{}, {"mesh": {"dp_replicate": 2}, "max_memory": None}])
def test_the_code_of_a_checkpoint_is_run_where_it_is_trusted(own_code, ranks, caplog, options):
    plain = AutoModelForCausalLM.from_pretrained(own_code, trust_remote_code=True)

    def rank(info):
        torch.set_num_threads(1)
        with Coordinator(info, timeout_s=20) as coor:
            memory = {"max_memory": [1 << 30] * 2, **options}
            try:
                with drumline.load(own_code, coor=coor, trust_remote_code=True, **memory) as model:
                    return greedy(model)
            except drumline.WorkerExit as served:
                return served.code

    assert ranks(rank, 2)[0] == greedy(plain)
    assert f"rank 1: trust_remote_code=True runs the code of {own_code}: own.py" in caplog.text


def test_code_that_differs_between_ranks_is_not_run(own_code, tmp_path, ranks_or_errors):
    other = shutil.copytree(own_code, tmp_path / "other")
    (other / "own.py").write_text("raise SystemExit")

    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            path = other if info.rank else own_code
            drumline.load(path, coor=coor, trust_remote_code=True)

    for error in ranks_or_errors(rank, 2):
        assert isinstance(error, drumline.DrumlineError) and "the code of the ch" in str(error)


def is_mapped(path) -> bool:
    return str(path) in linux.read_proc("self/maps")


def test_shards_are_read_and_no_pages_of_the_files(ranks, checkpoints):
    """For a while tp= mapped what it could, and whoever wrote to the files changed the model."""
    _, path = checkpoints.llama()

    def rank(info):
        with Coordinator(info, timeout_s=30) as coor, drumline.load(path, coor=coor, tp=2) as model:
            lines = [line.split() for line in linux.read_proc("self/maps").splitlines()]
            pages = [line[0].split("-") for line in lines if line[-1].startswith(str(path))]
            spans = [range(int(first, 16), int(last, 16)) for first, last in pages]
            return [n for n, p in model.named_parameters() if any(p.data_ptr() in s for s in spans)]

    assert ranks(rank, 2) == [[], []]


def test_weights_are_pages_of_the_files_which_nobody_writes_to(checkpoints, on_master, tmp_path):
    """Reading them took up to seven times as long as from_pretrained, which maps files."""
    plain, path = checkpoints.llama()
    shutil.copytree(path, tmp_path / "copy")
    file = tmp_path / "copy" / "model.safetensors"
    before = file.read_bytes()

    def work(model):
        mapped = is_mapped(file)
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        values = model.lm_head.weight.clone()
        return mapped, file.read_bytes() == before, values

    mapped, is_unchanged, values = on_master(file.parent, 3, work)
    assert mapped and is_unchanged
    assert torch.equal(values, plain.lm_head.weight + 1)


def test_files_are_mapped_for_as_long_as_a_view_of_them_lives(tmp_path):
    """A tensor that does not begin where its elements can is read."""
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(12).view(4, 3), "b": torch.ones(3)}, file)
    index = read_index(file)
    with TensorReader(file) as reader:
        rows = reader.map(index["a"], Region((1, 0), (2, 3)))
        assert reader.map(index["a"], Region((0, 1), (4, 2))) is None
        assert (
            reader.map(replace(index["b"], offset=index["b"].offset + 1), Region((0,), (2,)))
            is None
        )
    del reader
    assert rows.tolist() == [[3, 4, 5], [6, 7, 8]] and is_mapped(file)
    del rows
    assert not is_mapped(file)


def test_disable_mmap_reads(checkpoints, on_master, tmp_path):
    _, path = checkpoints.llama()
    shutil.copytree(path, tmp_path / "copy")
    assert not on_master(
        tmp_path / "copy", 3, lambda model: is_mapped(tmp_path / "copy"), disable_mmap=True
    )


def test_files_of_another_machine_are_not_mapped_by_transformers_either(
    checkpoints, on_master, tmp_path, monkeypatch
):
    """A page that could not be had ended the process."""
    monkeypatch.setattr(pipeline_parallel, "_build_empty", lambda *_: None)
    shutil.copytree(checkpoints.llama()[1], tmp_path / "copy")
    file = tmp_path / "copy" / "model.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_index, "LOCAL_FILE_SYSTEMS", ())
        assert not on_master(file.parent, 2, lambda model: is_mapped(file))
    assert on_master(file.parent, 2, lambda model: is_mapped(file))


@pytest.mark.parametrize("reads", [True, False], ids=["transformers", "drumline"])
def test_a_mapped_file_that_is_written_to_is_an_error_at_the_end(
    checkpoints, on_master, tmp_path, monkeypatch, reads
):
    if reads:
        monkeypatch.setattr(pipeline_parallel, "_build_empty", lambda *_: None)
    _, path = checkpoints.llama()
    shutil.copytree(path, tmp_path / "copy")
    file = tmp_path / "copy" / "model.safetensors"

    def replaced(model):
        shutil.copy(file, tmp_path / "new")
        (tmp_path / "new").rename(file)

    def written(model):
        with file.open("r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            stream.write(b"x")

    on_master(file.parent, 2, replaced)
    on_master(file.parent, 2, written, disable_mmap=True)
    with pytest.raises(LaunchError, match="was written to while its pages were the weights"):
        on_master(file.parent, 2, written)


def test_the_traceback_of_a_callers_mistake_is_the_callers_alone(tmp_path):
    """There were 41 lines around the one that says what to do."""
    with pytest.raises(CheckpointError, match="holds no config") as error:
        drumline.load(tmp_path)
    assert len(error.traceback) == 2 and error.value.__cause__ is None


def test_the_traceback_of_an_unexpected_error_is_whole():
    @short_traceback
    def fails():
        try:
            raise KeyError("a bug")
        except KeyError as error:
            raise CheckpointError("nothing can be built") from error

    with pytest.raises(CheckpointError) as error:
        fails()
    assert len(error.traceback) == 3 and isinstance(error.value.__cause__, KeyError)
