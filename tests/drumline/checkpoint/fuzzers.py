"""Damage to the files of a checkpoint, by a generator of random numbers."""

import copy
import json
import os
import struct

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
                lambda: self.pick.choice(parts.fields).__setitem__(2, struct.pack("<Q", number)),
                lambda: parts.fields.append([*self.pick.choice(parts.fields)]),
                lambda: parts.tensors.append([*self.pick.choice(parts.tensors)]),
                lambda: place.__setitem__(0, self.pick.choice(parts.tensors)[0]),
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
        text = json.dumps(content)
        if self.pick.random() < 0.1:
            text = self.with_a_name_twice(text, content)
        file.write_text(text)

    def with_a_name_twice(self, text, content):
        """Readers differ in which of two values they take."""
        name, value = self.pick.choice([*content, "x"]), self.pick.choice(self.VALUES)
        return f"{text.rstrip()[:-1]}, {json.dumps(name)}: {json.dumps(value)}}}"

    def with_other_bytes(self, data):
        data = bytearray(data)
        for _ in range(self.pick.randrange(1, 9)):
            place = self.pick.randrange(len(data))
            data[place : place + self.pick.randrange(9)] = self.pick.choice(
                [b"[", b"{", b",", b"\xff", b"", b"9", b"[" * 100_000]
            )
        return bytes(data)

    def change(self, content):
        place = self.some_place(content)
        name = self.pick.choice([*place, *self.fields])
        self.pick.choice([self.replace, self.replace, self.retype, self.drop])(place, name)

    def some_place(self, content):
        """The object, or one of those in it."""
        place = content
        while nested := [value for value in place.values() if isinstance(value, dict) and value]:
            if self.pick.random() < 0.5:
                break
            place = self.pick.choice(nested)
        return place

    def replace(self, place, name):
        place[name] = copy.deepcopy(self.pick.choice(self.VALUES))  # which is changed later

    def retype(self, place, name):
        """The same value as JSON of another type, as a writer in another language has it."""
        value = place.get(name)
        place[name] = self.pick.choice([str(value), [value], {"value": value}, f" {value}"])

    def drop(self, place, name):
        place.pop(name, None)


class ConfigFuzzer(JsonFuzzer):
    """Damages fields by what they are: sizes that are none, lists of another length, no numbers."""

    ROPE = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "x")
    ROPE_FIELDS = (
        *("factor", "rope_theta", "partial_rotary_factor", "low_freq_factor", "beta_fast"),
        *("original_max_position_embeddings", "short_factor", "long_factor", "attention_factor"),
    )

    def change(self, content):
        if self.pick.random() < 0.15:
            self.change_rope(content)
            return
        place = self.some_place(content)
        name = self.pick.choice([*place, "use_cache"])
        place[name] = self.pick.choice(self.lies(place.get(name)))

    def change_rope(self, content):
        name = self.pick.choice(["rope_parameters", "rope_scaling"])
        rope = {"rope_type": self.pick.choice(self.ROPE), "rope_theta": 1e4, "factor": 2.0}
        field = self.pick.choice(self.ROPE_FIELDS)
        rope[field] = self.pick.choice([*self.lies(1.5), *self.lies([1.0] * 4)])
        content[name] = rope

    def lies(self, value):
        """Values of which a writer could have put any in place of this one."""
        anything = [None, [], {}, "", True, str(value), [value], {"0": value}]
        if isinstance(value, bool):
            return [*anything, not value, int(value), "yes", float("nan")]
        if isinstance(value, (int, float)):
            as_float = [float(value)] if abs(value) < 1 << 1000 else []  # it may be a lie of before
            return [
                *(*anything, *as_float),
                *(-value, value + 1, value * 2, value // 2, 0, 1, -1, 0.5),
                *(float("nan"), float("inf"), -float("inf"), 1 << 31, 1 << 63, 10**30, 10**400),
            ]
        if isinstance(value, str):
            return [*anything, value + "x", value.upper(), f"../{value}", "\0", 0, value * 10_000]
        if isinstance(value, list):
            one = value[:1]
            return [*anything, value[:-1], value + one, value * 1000, value[::-1], [7] * len(value)]
        if isinstance(value, dict):
            return [*anything, dict([*value.items()][1:]), {**value, "x": 1}, [*value]]
        return [*anything, 0, 7, -1, 1.5]


class IndexFuzzer(JsonFuzzer):
    """Damages the index of a checkpoint of several files: which file has which tensor."""

    def change(self, content):
        weight_map = content["weight_map"]
        if not weight_map or not isinstance(weight_map, dict):
            return  # it was damaged before
        one, other = self.pick.choice([*weight_map]), self.pick.choice([*weight_map])
        file = str(weight_map[one])
        files = ["", ".", "..", "/", "/dev/zero", f"../shards/{file}", f"./{file}", f"{file}\0"]
        files += [
            f"{file}/",
            f"x/../{file}",
            file.upper(),
            "config.json",
            "x" * 300,
            7,
            None,
            [file],
        ]
        self.pick.choice(
            [
                lambda: weight_map.update({one: self.pick.choice(files)}),
                lambda: weight_map.update({one: weight_map[other]}),
                lambda: weight_map.update(dict.fromkeys(weight_map, file)),
                lambda: weight_map.update({f"{one}x": file}),
                lambda: weight_map.update({f"x.{one}": weight_map.pop(one)}),
                lambda: weight_map.pop(one),
                lambda: content.update(metadata=self.pick.choice(self.VALUES)),
                lambda: content.update(metadata={"total_size": self.pick.choice(self.VALUES)}),
                lambda: content.update(weight_map=self.pick.choice(self.VALUES)),
            ]
        )()


class FileFuzzer:
    """Puts something else in the place of a file, or beside the files."""

    SURPLUS = (
        *("adapter_config.json", "adapter_model.safetensors", "pytorch_model.bin", "merges.txt"),
        *("pytorch_model.bin.index.json", "special_tokens_map.json", "added_tokens.json"),
        *("chat_template.jinja", "chat_template.json", "preprocessor_config.json", "vocab.json"),
        *("processor_config.json", "tokenizer.model", "spiece.model", "quantize_config.json"),
        *("model.safetensors.index.json", "model-00009-of-00009.safetensors", "vocab.txt"),
        *("consolidated.safetensors", "additional_chat_templates/x.jinja", "modeling_x.py"),
    )
    TARGETS = ("/dev/zero", "/dev/tty", "/proc/self/mem", "/", "nowhere", "../case")

    def __init__(self, pick):
        self.pick = pick

    def damage(self, folder):
        """The name of the file that is something else now."""
        surplus = folder / self.pick.choice(self.SURPLUS)
        file = self.pick.choice([surplus, self.pick.choice(sorted(folder.iterdir()))])
        file.parent.mkdir(exist_ok=True)
        content = self.pick.choice([b"", b"{}", b"[]", b"\xff" * 9, b"{" * 100_000, b'{"a": 1}'])
        ways = [
            lambda: file.symlink_to(self.pick.choice(self.TARGETS)),
            lambda: file.symlink_to(file),
            lambda: file.mkdir(),
            lambda: os.mkfifo(file),
            lambda: file.write_bytes(content),
            lambda: file.write_bytes(content),
            lambda: (file.write_bytes(b"{"), os.truncate(file, 1 << 40)),
        ]
        file.unlink(missing_ok=True)
        self.pick.choice(ways)()
        return file.name


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
            if self.pick.random() < 0.2:
                text = self.with_a_name_twice(text.decode(), header).encode()
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
        *("base_model_name_or_path", "megatron_config", "trainable_token_indices", "loftq_config"),
        *("layer_replication", "target_parameters", "corda_config", "ensure_weight_tying"),
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
