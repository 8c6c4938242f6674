"""Files of a checkpoint that lie, one after the other: each is loaded as it is, or refused.

python -m tests.drumline.checkpoint.hostile_files FOLDER 500 [SEED] [KIND...]

Each in a child of its own: none loads other weights than an independent reader finds in it, takes
longer than two seconds of processor time, or fills the memory; each error is a CheckpointError that
names the file. What is wrong is printed with the seed and the number of the case, and its files are
kept in the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import struct
import sys
import time
import warnings
from pathlib import Path

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import drumline
from coordinator import Coordinator
from drumline.checkpoint.config_files import read_tokenizer
from drumline.errors import CheckpointError
from launcher import LaunchInfo
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
NUMBERS = (0, 1, 7, 31, 33, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63, (1 << 64) - 1)


class GgufFuzzer:
    """Damages a file: bytes of its header, sizes in it, or parts of it."""

    def __init__(self, pick, whole):
        self.pick, self.whole = pick, whole
        self.header, self.data = whole.header(), whole.to_bytes()

    def damaged(self):
        return self.pick.choice([self.bytes, self.bytes, self.number, self.cut, self.parts])()

    def bytes(self):
        data = bytearray(self.data)
        for _ in range(self.pick.choice([1, 1, 3, 20])):
            data[self.pick.randrange(len(self.header))] = self.pick.randrange(256)
        return bytes(data)

    def number(self):
        at, size = self.pick.randrange(len(self.header)), self.pick.choice([4, 8])
        number = self.pick.choice(NUMBERS) % (1 << 8 * size)
        return self.data[:at] + number.to_bytes(size, "little") + self.data[at + size :]

    def cut(self):
        at, length = self.pick.randrange(len(self.header)), self.pick.randrange(1, 40)
        return (
            self.data[:at] + self.pick.choice([b"", self.data[:length]]) + self.data[at + length :]
        )

    def parts(self):
        parts = self.whole.copy()
        place = self.pick.choice(parts.tensors)
        number = self.pick.choice(NUMBERS)
        self.pick.choice(
            [
                lambda: place.__setitem__(3, self.pick.choice([number, place[3] + 32, 0])),
                lambda: place.__setitem__(2, self.pick.randrange(42)),
                lambda: place[1].__setitem__(0, number),
                lambda: place[1].append(number),
                lambda: place[1].reverse(),
                lambda: self.pick.shuffle(parts.tensors),
                lambda: self.pick.shuffle(parts.fields),
                lambda: self.pick.choice(parts.fields).__setitem__(1, self.pick.randrange(14)),
                lambda: setattr(parts, "num_tensors", number),
                lambda: setattr(parts, "num_fields", number),
            ]
        )()
        try:
            return parts.to_bytes()
        except (struct.error, ValueError, TypeError, KeyError, AttributeError):
            return self.cut()  # a value that its new type cannot hold


class JsonFuzzer:
    """Damages a JSON file: other values, fields and types, or bytes."""

    VALUES = (
        *(None, True, 0, 1, -1, 7, 1.5, float("nan"), float("inf"), 1 << 31, -(1 << 63), 10**30),
        *("", "x", "llama", "auto", "../x", "\ud800", "a" * 10_000, [], {}, [1], [None]),
        *({"a": 1}, {"type": []}, [[1], {}], list(range(10_000))),
    )
    FIELDS = (
        *("auto_map", "dtype", "quantization_config", "rope_parameters", "rope_scaling"),
        *("text_config", "vision_config", "layer_types", "sliding_window", "is_encoder_decoder"),
        *("head_dim", "attn_implementation", "eos_token_id", "cache_implementation", "max_length"),
        *("id2label", "num_labels", "pruned_heads", "weight_map", "temperature", "added_tokens"),
        *("num_beams", "bos_token_id", "chat_template", "model_max_length", "tokenizer_class"),
    )

    def __init__(self, pick, fields=()):
        self.pick, self.fields = pick, fields or self.FIELDS

    def damage(self, file):
        if self.pick.random() < 0.25:
            file.write_bytes(self.with_other_bytes(file.read_bytes()))
            return
        content = json.loads(file.read_text())
        for _ in range(self.pick.choice([1, 1, 2])):
            self.change(content)
        file.write_text(json.dumps(content))

    def with_other_bytes(self, data):
        data = bytearray(data)
        for _ in range(self.pick.randrange(1, 9)):
            place = self.pick.randrange(len(data))
            data[place : place + self.pick.randrange(9)] = self.pick.choice(
                [b"[", b"{", b",", b"\xff", b"", b"9", b"[" * 100_000]
            )
        return bytes(data)

    def change(self, content):
        place = content
        while nested := [value for value in place.values() if isinstance(value, dict) and value]:
            if self.pick.random() < 0.5:
                break
            place = self.pick.choice(nested)
        name = self.pick.choice([*place, *self.fields])
        self.pick.choice([self.replace, self.replace, self.retype, self.drop])(place, name)

    def replace(self, place, name):
        place[name] = self.pick.choice(self.VALUES)

    def retype(self, place, name):
        """The same value as JSON of another type, as a writer in another language has it."""
        value = place.get(name)
        place[name] = self.pick.choice([str(value), [value], {"value": value}, f" {value}"])

    def drop(self, place, name):
        place.pop(name, None)


class SafetensorsFuzzer(JsonFuzzer):
    """Damages the header of a .safetensors file, its length, or the end of the file."""

    DTYPES = ("F32", "F16", "BF16", "I32", "U32", "F64", "F8_E4M3", "F4", "C64", "BOOL", "X")

    def damage(self, file):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        head, text, tensors = data[:8], data[8 : 8 + length], data[8 + length :]
        way = self.pick.randrange(8)
        if way == 0:
            head = self.pick.choice(NUMBERS).to_bytes(8, "little")
        elif way == 1:
            tensors = self.pick.choice([tensors[:-1], tensors + b"\0", b"", tensors * 2])
        elif way == 2:
            text = self.with_other_bytes(text)
            head = len(text).to_bytes(8, "little")
        else:
            header = json.loads(text)
            for _ in range(self.pick.choice([1, 1, 2])):
                self.change(header)
            text = json.dumps(header).encode()
            head = len(text).to_bytes(8, "little")
        file.write_bytes(head + text + tensors)

    def change(self, content):
        names = [name for name in content if isinstance(content[name], dict)]
        one, other = self.pick.choice(names), self.pick.choice(names)
        entry = content[one]
        number = self.pick.choice([*NUMBERS, -1, -32, 1.5, None, True])
        self.pick.choice(
            [
                lambda: entry.update(dtype=self.pick.choice(self.DTYPES)),
                lambda: entry.update(data_offsets=[number, number]),
                lambda: entry.update(data_offsets=content[other].get("data_offsets")),
                lambda: entry.update(shape=content[other].get("shape")),
                lambda: entry.update(shape=[number, *entry.get("shape", [])]),
                lambda: entry.update(shape=[-size for size in entry.get("shape", [])]),
                lambda: entry.update({self.pick.choice([*entry]): self.pick.choice(self.VALUES)}),
                lambda: content.update({"surplus": dict(entry)}),
                lambda: content.pop(one),
                lambda: content.update({one: content[other], other: content[one]}),
                lambda: content.update({one: self.pick.choice(self.VALUES)}),
            ]
        )()


class LoraFuzzer:
    """Damages the settings of an adapter, or the header of its factors."""

    FIELDS = (
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "use_rslora"),
        *("peft_type", "use_dora", "modules_to_save", "fan_in_fan_out", "bias", "lora_bias"),
        *("task_type", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("init_lora_weights", "inference_mode", "lora_dropout", "revision"),
    )
    PATTERNS = ("(([a-z_.0-9]+)+)+!", ".*q_proj", "q_proj", "(", "a" * 2000, "(a|a)*b", "^.*$", "")

    def __init__(self, pick):
        self.pick = pick
        self.settings, self.factors = JsonFuzzer(pick, self.FIELDS), SafetensorsFuzzer(pick)

    def damage(self, folder):
        way, file = self.pick.randrange(5), folder / "adapter_config.json"
        if way == 0:
            self.factors.damage(folder / "adapter_model.safetensors")
        elif way == 1:
            content = json.loads(file.read_text())
            name = self.pick.choice(["rank_pattern", "alpha_pattern"])
            value = self.pick.choice([4, 8, -1, 0, "4", 10**400, 1 << 60, float("nan")])
            content[name] = {self.pick.choice(self.PATTERNS): value}
            file.write_text(json.dumps(content))
        elif way == 2:
            content = json.loads(file.read_text())
            name = self.pick.choice(["target_modules", "exclude_modules", "modules_to_save"])
            names = ["self_attn", "lm_head", "norm", "layers", "0", self.pick.choice(self.PATTERNS)]
            content[name] = self.pick.choice(
                [self.pick.choice(self.PATTERNS), *([n] for n in names)]
            )
            if name == "target_modules" and isinstance(content[name], list):
                content[name] += ["q_proj", "down_proj"]
            file.write_text(json.dumps(content))
        else:
            self.settings.damage(file)


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
        self.folder, self.seed, self.pick = Path(folder), seed, random.Random(seed)
        self.whole, self.at = self.folder / "whole", self.folder / "case"
        model = save_whole(self.whole)
        self.weights = dict(model.named_parameters())
        self.gguf = GgufFuzzer(self.pick, llama_parts(model))
        self.num_loaded = 0
        self.kinds = {
            "gguf": self.of_gguf,
            "safetensors": self.of_safetensors,
            "lora": self.of_lora,
            **{name: lambda name=name: self.of_quantized(name) for name in QUANTIZED},
            **{
                name: lambda name=name: self.of_description(name)
                for name in sorted(file.name for file in (self.whole / "model").glob("*.json"))
            },
        }

    def run(self, count, kinds=()):
        """What is wrong, as lines."""
        kinds = [*(kinds or self.kinds)]
        problems = []
        for number in range(count):
            shutil.rmtree(self.at, ignore_errors=True)
            shutil.copytree(self.whole, self.at)
            kind = kinds[number % len(kinds)]
            case = self.kinds[kind]()
            problem, is_loaded = in_child(lambda case=case: self.problem(*case))
            self.num_loaded += is_loaded
            if problem:
                problems.append(f"seed {self.seed}, case {number}, {kind}: {problem}")
                shutil.copytree(self.at, self.folder / f"seed {self.seed} case {number}")
        return problems

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
        file.write_bytes(self.gguf.damaged())
        return file, ("model.gguf",), self.has_own_weights, {}

    def of_safetensors(self):
        SafetensorsFuzzer(self.pick).damage(self.at / "model" / "model.safetensors")
        names = ("model.safetensors", "tensors are missing")
        return self.at / "model", names, self.has_what_safetensors_reads, {}

    def of_description(self, name):
        fields = GENERATION if name == "generation_config.json" else ()
        JsonFuzzer(self.pick, fields).damage(self.at / "model" / name)
        options = self.pick.choice([{}, {"tp": 1}])
        if name in ("config.json", "generation_config.json"):
            options["generates"] = True
        return self.at / "model", (name,), self.has_own_weights, options

    def of_quantized(self, name):
        file = self.at / name / "config.json"
        content = json.loads(file.read_text())
        fields = ("bits", "group_size", "weight_block_size", "config_groups", "checkpoint_format")
        JsonFuzzer(self.pick, fields).change(content["quantization_config"])
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


if __name__ == "__main__":
    folder, count, seed, *kinds = [*sys.argv[1:3], *(sys.argv[3:] or [random.randrange(1 << 32)])]
    campaign = Campaign(folder, int(seed))
    found = campaign.run(int(count), kinds)
    print(f"{count} cases, {campaign.num_loaded} loaded, {len(found)} problems", *found, sep="\n")
    sys.exit(bool(found))
