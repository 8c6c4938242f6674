"""Checkpoints as people have them load as transformers loads them, or better."""

from __future__ import annotations

import json
import logging
import re

import pytest
import safetensors.torch
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import drumline
import launcher
from drumline.checkpoint.empty_model import load_shard
from drumline.checkpoint.safetensors_index import read_index
from drumline.cli import main
from drumline.planner.model_profile import model_class
from drumline.strategies.opening import checkpoint_dtype

KEY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(checkpoints, tmp_path):
    checkpoints.llama()[0].save_pretrained(tmp_path, max_shard_size="40KB")
    return tmp_path


def logits(model):
    with torch.no_grad():
        return model(torch.arange(3, 12)[None]).logits


def files_of(folder):
    listing = json.loads((folder / "model.safetensors.index.json").read_text())
    return listing, [folder / name for name in sorted({*listing["weight_map"].values()})]


def add(file, **tensors):
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})


def stale_copy(folder):
    listing, files = files_of(folder)
    assert listing["weight_map"][KEY] != files[-1].name
    add(files[-1], **{KEY: torch.ones(32, 32)})


def unlisted(folder):
    add(files_of(folder)[1][0], extra=torch.ones(2))


def surplus(folder, name="model.layers.9.extra", size=2):
    listing, files = files_of(folder)
    add(files[0], **{name: torch.ones(size)})
    listing["weight_map"][name] = files[0].name
    (folder / "model.safetensors.index.json").write_text(json.dumps(listing))


def under_two_names(folder):
    """Of which transformers takes the first: model.norm.weight."""
    surplus(folder, "norm.weight", 32)


def configured(folder, **fields):
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def without_architectures(folder):
    configured(folder, architectures=None)


def with_an_old_name(folder):
    configured(folder, architectures=["LLaMAForCausalLM"])


def with_labels(folder):
    """Names that are a config's elsewhere."""
    labels = {"dropout": 7, "tree_depth": 100000}
    configured(folder, label2id=labels, id2label={number: n for n, number in labels.items()})


def in_a_subfolder(folder):
    listing, files = files_of(folder)
    (folder / "parts" / "all").mkdir(parents=True)
    for file in files[1:]:
        file.rename(folder / "parts" / "all" / file.name)
    for name, file in listing["weight_map"].items():
        if file != files[0].name:
            listing["weight_map"][name] = f"parts/all/{file}"
    (folder / "model.safetensors.index.json").write_text(json.dumps(listing))


DAMAGES = [stale_copy, unlisted, surplus, under_two_names, without_architectures, with_an_old_name]
DAMAGES += [with_labels, in_a_subfolder]


@pytest.mark.parametrize("change", DAMAGES)
def test_a_checkpoint_loads_as_from_pretrained_loads_it(folder, on_master, change):
    """All of them were refused. Of a stale copy transformers takes the last one that it finds."""
    wanted = logits(LlamaForCausalLM.from_pretrained(folder))
    change(folder)
    plain = logits(AutoModelForCausalLM.from_pretrained(folder))
    assert torch.equal(plain, wanted) == (change is not stale_copy)
    assert torch.equal(on_master(folder, 2, logits), wanted)


def test_weights_of_a_config_without_a_dtype_keep_theirs(folder, on_master):
    """They took twice their memory, as float32."""
    LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    configured(folder, dtype=None)
    plain = LlamaForCausalLM.from_pretrained(folder)
    assert plain.dtype == torch.bfloat16
    assert torch.equal(on_master(folder, 2, logits), logits(plain))
    assert checkpoint_dtype(None, transformers.LlamaConfig()) == torch.float32


def test_the_dtype_of_weights_of_several_is_that_of_the_first_name(folder, on_master):
    """In the file the widest come first, so one tensor in float32 made all of them that."""
    LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].float()
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    configured(folder, dtype=None)
    plain = LlamaForCausalLM.from_pretrained(folder)
    assert plain.dtype == torch.bfloat16
    assert torch.equal(on_master(folder, 2, logits), logits(plain))


@pytest.mark.parametrize("has_files", [True, False])
@pytest.mark.parametrize(
    "options", [{"tp": 2}, {"max_memory": [1 << 30] * 2}, {"device_map": "fastest"}], ids=str
)
def test_all_of_it_at_once_loads_in_every_way(folder, options, has_files):
    wanted = logits(LlamaForCausalLM.from_pretrained(folder))
    for change in DAMAGES:
        change(folder)
    if not has_files and "tp" in options:
        options = {**options, "reader": "rank0"}

    def rank():
        torch.set_num_threads(1)
        path = folder if has_files or launcher.current().rank == 0 else "nowhere"
        with drumline.load(path, **options) as model:
            return logits(model)

    (found, *_) = launcher.launch(rank, nprocs=2, launcher="threads", timeout_s=60)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def test_what_transformers_reads_itself_is_what_the_index_names(folder):
    """Weights that transformers computes were of the stale copy, whatever the index said."""
    wanted = logits(LlamaForCausalLM.from_pretrained(folder))
    for change in DAMAGES:
        change(folder)
    model = load_shard(LlamaForCausalLM, folder, read_index(folder), {"": "cpu"}, torch.float32)
    assert torch.equal(logits(model), wanted)


def test_what_is_ignored_is_one_line_and_what_is_surplus_the_report_of_transformers(
    folder, on_master, caplog
):
    for change in DAMAGES:
        change(folder)
    transformers.utils.logging.set_verbosity_warning()
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.WARNING):
            on_master(folder, 2, logits)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
        transformers.utils.logging.set_verbosity_error()
    lines = {record.getMessage() for record in caplog.records}  # CI's logger propagates: twice
    (ignored,) = [line for line in lines if "2 tensors are ignored" in line]
    assert f"{KEY} in" in ignored and "extra in" in ignored
    (report,) = [line for line in lines if "LOAD REPORT" in line]
    assert "model.layers.9.extra" in report and "UNEXPECTED" in report
    assert re.search(r"^norm\.weight .*UNEXPECTED", report, re.MULTILINE)


def test_a_tensor_that_is_missing_is_told_with_one_of_a_longer_name(checkpoints, tmp_path):
    """As those of a model in DistributedDataParallel, of which none of the names was told."""
    checkpoints.llama()[0].save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({f"module.{name}": t for name, t in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(drumline.CheckpointError, match=r"missing .* but there is module\.lm_head"):
        drumline.load(tmp_path)


def test_plan_takes_it_too(folder, capsys):
    for change in DAMAGES:
        change(folder)
    assert main(["plan", "--model", str(folder), "--memory", "1GiB", "1GiB"]) == 0
    assert "of weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "auto"),
    [
        ("LlamaConfig", "AutoModelForCausalLM"),
        ("T5Config", "AutoModelForSeq2SeqLM"),
        ("LlavaConfig", "AutoModelForMultimodalLM"),
        ("Gemma3Config", "AutoModelForCausalLM"),
        ("ViTConfig", "AutoModel"),
    ],
)
def test_the_class_of_a_config_that_names_none_is_that_of_the_auto_models(kind, auto):
    config = getattr(transformers, kind)()
    config.architectures = None
    expected = getattr(transformers, auto)._model_mapping[type(config)]
    assert model_class(config) is expected


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "BertModel"])
def test_an_architecture_of_another_type_is_an_error(name):
    """transformers makes the model of the type then, with random weights where none are stored."""
    config = transformers.GemmaConfig(architectures=[name])
    with pytest.raises(drumline.CheckpointError, match=f"{name} and the type 'gemma', which do"):
        model_class(config)


def test_a_type_without_a_model_is_an_error():
    config = transformers.CLIPSegTextConfig(architectures=["Nothing"])
    with pytest.raises(drumline.CheckpointError, match=r"architectures \['Nothing'\] and the type"):
        model_class(config)
