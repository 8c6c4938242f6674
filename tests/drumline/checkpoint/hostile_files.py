"""Files of a checkpoint that lie, one after the other: each is loaded as it is, or refused.

python -m tests.drumline.checkpoint.hostile_files FOLDER 0:500 SEED [KIND...]

Each case in a child of its own: none loads other weights than an independent reader finds in it,
takes longer than two seconds of processor time, or fills the memory; each error is a
CheckpointError that names the file. What is wrong is printed at once, with the seed and the number
of the case, and its files are kept in the folder. A case is the same whichever others are run.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import sys
import time
import traceback
import warnings
from functools import partial
from pathlib import Path

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import drumline
from coordinator import Coordinator
from drumline.checkpoint.config_files import read_tokenizer
from drumline.errors import CheckpointError
from launcher import LaunchInfo
from tests.drumline.checkpoint.fuzzers import (
    ConfigFuzzer,
    FileFuzzer,
    GgufFuzzer,
    IndexFuzzer,
    JsonFuzzer,
    LoraFuzzer,
    SafetensorsFuzzer,
)
from tests.drumline.checkpoint.gguf_bytes import llama_parts
from tests.programs.time_limit import seconds

LIMIT_S = 2
LIMIT_NBYTES = 256 << 20
ADDRESSES_NBYTES = 2 << 30  # beyond those of the process: each thread reserves some
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}

GENERATION = sorted(name for name in vars(GenerationConfig()) if not name.startswith("_"))
FAMILIES = {
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64},
}
"""Models whose configs have fields that a Llama's has not, by model_type."""


def to_fp8(name, tensor):
    """Blocks of 16 x 16 with a scale each."""
    rows, columns = tensor.shape
    scales = torch.full((rows // 16, columns // 16), 0.25)
    return {name: (tensor * 4).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def to_gptq(name, tensor):
    """Integers of 4 bits along the inputs of a layer."""
    stem, (rows, columns) = name.removesuffix("weight"), tensor.shape
    words = torch.arange(columns // 8 * rows, dtype=torch.int32).view(columns // 8, rows)
    zeros = torch.zeros(columns // 32, rows // 8, dtype=torch.int32)
    scales = torch.full((columns // 32, rows), 0.125)
    return {f"{stem}qweight": words, f"{stem}qzeros": zeros, f"{stem}scales": scales}


QUANTIZED = {
    "fp8": (to_fp8, {"quant_method": "fp8", "weight_block_size": [16, 16]}),
    "gptq": (to_gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}),
}


def save_quantized(model, folder, rewrite, settings):
    shutil.copytree(folder.with_name("model"), folder)
    tensors = {}
    for name, tensor in model.state_dict().items():
        tensors |= rewrite(name, tensor) if "mlp" in name else {name: tensor}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def save_whole(folder):
    """The undamaged files: a model with words, the same as GGUF, and an adapter for it."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.5)).eval()
    model.save_pretrained(folder / "model")
    weight_map = dict.fromkeys(model.state_dict(), "model.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model" / "model.safetensors.index.json").write_text(index)
    words = {str(number): number for number in range(SIZES["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="2").save_pretrained(
        folder / "model"
    )
    for name, (rewrite, settings) in QUANTIZED.items():
        save_quantized(model, folder / name, rewrite, settings)
    model.save_pretrained(folder / "shards", max_shard_size="20KB")
    for name, values in FAMILIES.items():
        config = AutoConfig.for_model(name, **{**SIZES, "tie_word_embeddings": True, **values})
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    for name in ("shards", *FAMILIES):
        for file in (folder / "model").glob("tokenizer*"):
            shutil.copy(file, folder / name)
    (folder / "adapter").mkdir()
    factors = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "down_proj")):
            rows, columns = module.weight.shape
            factors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(4, columns)
            factors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, 4)
    save_file(factors, folder / "adapter" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 6}
    settings |= {"target_modules": ["q_proj", "down_proj"]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    return model


def loaded(path, generates=False, **options):
    """The parameters of a model on one rank, and what reads its words beside it.

    generates: a token, too, by the settings of the files.
    """
    with Coordinator(LaunchInfo("hostile files")) as coor:
        with drumline.load(path, coor=coor, **options) as model:
            weights = {name: weight.clone() for name, weight in model.named_parameters()}
            if generates:
                generate(model)
        if Path(path).is_dir():
            read_tokenizer(path)
        return weights


def generate(model):
    """A token. transformers' ValueError is of a value that the settings may have, as by hand."""
    with contextlib.suppress(ValueError):
        model.generate(torch.tensor([[1, 5]]), max_new_tokens=1)


def merged_by_peft(model_folder, adapter_folder):
    """The weights that peft makes of an adapter; None if it refuses."""
    from peft import PeftModel

    base = LlamaForCausalLM.from_pretrained(model_folder)
    try:
        merged = PeftModel.from_pretrained(base, adapter_folder).merge_and_unload()
    except Exception:  # of any kind, for any field
        return None
    return dict(merged.named_parameters())


class Campaign:
    """Cases by kind; each damages files in self.at and returns what is to be loaded, and how."""

    def __init__(self, folder, seed):
        self.folder, self.seed = Path(folder), seed
        self.whole, self.at = self.folder / "whole", self.folder / "case"
        model = save_whole(self.whole)
        self.weights, self.gguf = dict(model.named_parameters()), llama_parts(model)
        self.num_loaded = 0
        self.kinds = {
            "gguf": self.of_gguf,
            "safetensors": self.of_safetensors,
            "shards": self.of_shards,
            "files": self.of_files,
            "lora": self.of_lora,
            **{name: partial(self.of_quantized, name) for name in QUANTIZED},
            **{name: partial(self.of_family, name) for name in FAMILIES},
            **{
                name: partial(self.of_description, name)
                for name in sorted(file.name for file in (self.whole / "model").glob("*.json"))
            },
        }

    def run(self, numbers, kinds=()):
        """Yield what is wrong, as lines. numbers: of the cases, as a range."""
        kinds = [*(kinds or self.kinds)]
        for number in numbers:
            shutil.rmtree(self.at, ignore_errors=True)
            shutil.copytree(self.whole, self.at)
            self.pick = random.Random(f"{self.seed} {number}")
            kind = kinds[number % len(kinds)]
            case = self.kinds[kind]()
            problem, is_loaded = in_child(partial(self.problem, *case))
            self.num_loaded += is_loaded
            if problem:
                place = f"seed {self.seed}, case {number}, {kind}"
                shutil.copytree(self.at, self.folder / place, symlinks=True, ignore=special_files)
                yield f"{place}: {problem}"

    def problem(self, path, names, is_right, options):
        """The fault in how a damaged file is loaded, "" if there is none; and whether it is loaded.

        names: one of them is to be in the error.
        """
        before, start = peak_nbytes(), time.process_time()
        weights, problem = None, ""
        try:
            with warnings.catch_warnings(), seconds(60):
                warnings.simplefilter("ignore")
                weights = loaded(path, **options)
        except CheckpointError as error:
            if not any(name in str(error) for name in names):
                problem = f"does not name {names}: {error}"
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"
        spent = time.process_time() - start
        if spent > LIMIT_S:
            problem += f" took {spent:.1f} s"
        if peak_nbytes() - before > LIMIT_NBYTES:
            problem += f" took {(peak_nbytes() - before) >> 20} MiB"
        if weights is not None and not problem:
            problem = is_right(weights)
        return problem, weights is not None

    def of_gguf(self):
        file = self.at / "model.gguf"
        file.write_bytes(GgufFuzzer(self.pick, self.gguf).damaged())
        return file, ("model.gguf",), self.has_own_weights, {}

    def of_safetensors(self):
        SafetensorsFuzzer(self.pick).damage(self.at / "model" / "model.safetensors")
        names = ("model.safetensors", "tensors are missing")
        return self.at / "model", names, self.has_what_safetensors_reads, {}

    def of_description(self, name):
        fields = GENERATION if name == "generation_config.json" else ()
        fuzzer = JsonFuzzer(self.pick, fields)
        fuzzer = self.pick.choice([fuzzer, ConfigFuzzer(self.pick)])
        fuzzer.damage(self.at / "model" / name)
        options = self.pick.choice([{}, {"tp": 1}])
        if name in ("config.json", "generation_config.json"):
            options["generates"] = True
        is_right = self.has_own_weights
        if name == "config.json":
            is_right = partial(self.has_what_transformers_reads, "model")
        return self.at / "model", (name,), is_right, options

    def of_shards(self):
        name = "model.safetensors.index.json"
        IndexFuzzer(self.pick).damage(self.at / "shards" / name)
        return (
            self.at / "shards",
            (name, ".safetensors", "tensors are missing"),
            self.has_own_weights,
            {},
        )

    def of_files(self):
        folder = self.at / self.pick.choice(["model", "shards", "gpt2"])
        name = FileFuzzer(self.pick).damage(folder)
        names = (name, "no config.json", "tokenizer")
        is_right = partial(self.has_what_transformers_reads, folder.name)
        return folder, names, is_right, {"generates": True}

    def of_family(self, name):
        ConfigFuzzer(self.pick).damage(self.at / name / "config.json")
        is_right = partial(self.has_what_transformers_reads, name)
        return self.at / name, ("config.json",), is_right, {"generates": True}

    def of_quantized(self, name):
        file = self.at / name / "config.json"
        content = json.loads(file.read_text())
        fields = ("bits", "group_size", "weight_block_size", "config_groups", "checkpoint_format")
        fuzzer = self.pick.choice([JsonFuzzer(self.pick, fields), ConfigFuzzer(self.pick)])
        fuzzer.change(content["quantization_config"])
        file.write_text(json.dumps(content))
        names = ("config.json", "model.safetensors")
        return self.at / name, names, self.has_numbers, {"dequantize": True}

    def of_lora(self):
        LoraFuzzer(self.pick).damage(self.at / "adapter")
        options = {"adapter": self.at / "adapter"}
        return self.at / "model", ("adapter",), self.has_what_peft_makes, options

    def has_own_weights(self, weights):
        """Every damage that is not seen is of something beside the weights."""
        return differences(weights, self.weights)

    def has_what_transformers_reads(self, name, weights):
        """A config that says that there are fewer layers than in the files is followed."""
        try:
            plain = AutoModelForCausalLM.from_pretrained(self.at / name, dtype="auto")
        except Exception:  # of any kind, for any field
            plain = AutoModelForCausalLM.from_pretrained(self.whole / name)
        return differences(weights, dict(plain.named_parameters()))

    def has_numbers(self, weights):
        """Blocks of other sizes may fit as well, and are what the file says then."""
        wrong = [name for name, weight in weights.items() if not weight.isfinite().all()]
        return f"loaded what is not a number: {wrong[:4]}" if wrong else ""

    def has_what_safetensors_reads(self, weights):
        try:
            plain = load_file(self.at / "model" / "model.safetensors")
        except SafetensorError as error:
            return f"loaded what safetensors refuses: {error}"
        return differences(weights, {name: value.float() for name, value in plain.items()})

    def has_what_peft_makes(self, weights):
        merged = merged_by_peft(self.at / "model", self.at / "adapter")
        if merged is None:
            return "loaded what peft refuses"
        return differences(weights, merged, atol=1e-5)


def differences(weights, plain, atol=0.0):
    """What weights have that differs from plain ones; "" if nothing does."""
    if weights.keys() != plain.keys():
        return f"loaded other tensors: {sorted(weights.keys() ^ plain.keys())[:4]}"
    wrong = [
        name
        for name, weight in weights.items()
        if weight.shape != plain[name].shape
        or not numpy.allclose(weight.detach(), plain[name].detach(), rtol=atol, atol=atol)
    ]
    return f"loaded other weights: {wrong[:4]}" if wrong else ""


def in_child(work):
    """The result of work in a child whose memory is limited, or how the child ended without one."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)  # threads of the parent are not here
            limit = address_nbytes() + ADDRESSES_NBYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            os.write(write_end, json.dumps(work()).encode())
        except BaseException:
            traceback.print_exc()  # a fault of this program, such as a library that it misses
        finally:
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as result:
        text = result.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(text) if text else [f"the child ended with status {status}", False]


def address_nbytes():
    """The size of this process's address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def peak_nbytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def special_files(folder, names):
    """Those that cannot be copied."""
    paths = [Path(folder, name) for name in names]
    return [path.name for path in paths if path.is_fifo() or path.lstat().st_size > 1 << 30]


if __name__ == "__main__":
    folder, numbers, seed, *kinds = sys.argv[1:]
    campaign, num_problems = Campaign(folder, int(seed)), 0
    numbers = range(*map(int, numbers.split(":")))
    for problem in campaign.run(numbers, kinds):
        print(problem, flush=True)
        num_problems += 1
    print(f"{len(numbers)} cases, {campaign.num_loaded} loaded, {num_problems} problems")
    sys.exit(num_problems > 0)
