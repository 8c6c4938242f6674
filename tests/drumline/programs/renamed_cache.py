"""Renames once more what transformers' models call their cache, and runs two over two ranks.

The word is replaced in the source of the installed release while it is imported: in parameters,
arguments, outputs and what generate() hands on. So are attributes of caches, of their layers and
of a model's, and an argument with which attention puts keys into a cache.
"""

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import pathlib
import re
import sys
import warnings

MODULES = (
    "transformers.generation.candidate_generator",
    "transformers.generation.continuous_batching",
    "transformers.generation.utils",
    "transformers.integrations.sdpa_attention",
    "transformers.masking_utils",
    "transformers.modeling_layers",
    "transformers.modeling_outputs",
    "transformers.models.lfm2.modeling_lfm2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "transformers.utils.auto_docstring",
    "transformers.utils.generic",
)
NEW = "zebra"
CACHES = "transformers.cache_utils"
ATTRIBUTES = re.compile(
    r"(?<=self\.)(offloading|max_cache_len|sliding_window|record_past|self_attention_cache"
    r"|cross_attention_cache)\b|(?<=\")(record_past|is_sliding)(?=\")|\bis_sliding(?= = )"
    r"|(?<=\.)has_previous_state\b|\bis_croppable\b"
)


class RenamingLoader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        path = self.get_filename(fullname)
        source = self.get_data(path).decode()
        if fullname == CACHES:
            source = ATTRIBUTES.sub(rf"{NEW}_\g<0>", source)
        else:
            source = re.sub(rf"(?<!batching\.)(?<!from \.)\b{OLD}\b", NEW, source)
            source = re.sub(r"\bis_croppable\b", rf"{NEW}_\g<0>", source)
        if fullname.startswith(("transformers.models.", "transformers.integrations.")):
            source = re.sub(r"(?<=\.)layer_idx\b|\bkwargs(?==kwargs\b)", rf"{NEW}_\g<0>", source)
        return self.source_to_code(source.encode(), path)


class RenamingFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith((*MODULES, CACHES)):
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        loader = RenamingLoader(fullname, found.origin)
        return importlib.util.spec_from_file_location(fullname, found.origin, loader=loader)


def installed_word() -> str:
    """The argument's name in the installed release: past_key_values, or cache since 5.24.

    It is asked of the source, for what is imported would not be renamed.
    """
    folder = importlib.util.find_spec("transformers").submodule_search_locations[0]
    tree = ast.parse(pathlib.Path(folder, "models/llama/modeling_llama.py").read_text())
    model = next(node for node in tree.body if getattr(node, "name", "") == "LlamaForCausalLM")
    forward = next(node for node in model.body if getattr(node, "name", "") == "forward")
    names = {argument.arg for argument in forward.args.args}
    (word,) = names & {"cache", "past_key_values"}
    return word


OLD = installed_word()
sys.meta_path.insert(0, RenamingFinder())

import torch  # noqa: E402
from transformers import (  # noqa: E402
    DynamicCache,
    EncoderDecoderCache,
    Lfm2ForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    StaticCache,
)

import drumline  # noqa: E402
import launcher  # noqa: E402
from drumline.contact.batching.paged_batches import PagedTables  # noqa: E402
from drumline.contact.caches import pair_of  # noqa: E402
from drumline.pipeline import fast_paths, microbatch  # noqa: E402
from drumline.pipeline.microbatch_runner import MicrobatchRunner  # noqa: E402
from drumline.pipeline.remote_layer import cache_layers  # noqa: E402

warnings.simplefilter("ignore", FutureWarning)
IDS = torch.randint(3, 64, (9, 7), generator=torch.Generator().manual_seed(5))
OPTIONS = {"max_new_tokens": 4, "pad_token_id": 0}


def make(path: str, kind: type, **sizes: int):
    torch.manual_seed(1)
    config = kind.config_class(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
        **sizes,
    )
    model = kind(config).eval()
    model.save_pretrained(path)
    return model


@torch.no_grad()
def work(model):
    found = []
    older = {"past_key_values"} - {OLD}  # since 5.24 a caller may use that as well
    for name, kind in (
        (NEW, DynamicCache),
        (NEW, StaticCache),
        *((n, DynamicCache) for n in older),
    ):
        cache = kind(model.config, 9) if kind is StaticCache else kind(config=model.config)
        output = model(input_ids=IDS, **{name: cache})
        assert output[NEW] is cache and cache.get_seq_length(3) == 7
        found.append(output.logits.argmax(-1).tolist())
    for rows, options in ((9, {"num_beams": 2}), (9, {}), (1, {})):
        model.prefill_chunk = 3 if rows == 1 else None
        options = {"do_sample": False, **OPTIONS, **options}
        found.append(model.generate(IDS[:rows], **options).tolist())
    return found


def guess(model):
    """Tokens from the prompt: layers of windows and of states record what they would forget."""
    options = {"do_sample": False, "prompt_lookup_num_tokens": 3, **OPTIONS}
    return model.generate(IDS.view(1, -1), **options).tolist()


def batched(model):
    """Tokens of requests of one step over pages, and the most that a step had."""
    steps, begin = [], PagedTables.begin_step

    def count(self, arguments):
        steps.append(len(arguments["cu_seq_lens_q"]) - 1)
        return begin(self, arguments)

    PagedTables.begin_step = count
    results = model.generate_batch(IDS.tolist(), max_new_tokens=4).values()
    PagedTables.begin_step = begin
    return [result.generated_tokens for result in results], max(steps)


def over_ranks(path: str, use):
    def rank():
        torch.set_num_threads(1)
        with drumline.load(path, max_memory=[1 << 30] * 2) as model:
            return use(model)

    return launcher.launch(rank, nprocs=2, launcher="threads", timeout_s=100)[0]


def main(path: str) -> None:
    plain, checked = make(f"{path}/all", LlamaForCausalLM), fast_paths.check()
    windows = make(f"{path}/windows", MistralForCausalLM, sliding_window=6)
    kinds = ["conv", "full_attention", "conv", "conv"]
    states = make(f"{path}/states", Lfm2ForCausalLM, layer_types=kinds)
    microbatch.SMALLEST_PASS, microbatch.SMALLEST_STREAM = 7, 2
    splits, map_parts = [], MicrobatchRunner.map

    def count(self, work, items, *until):
        items = list(items)
        splits.append(len(items))
        return map_parts(self, work, items, *until)

    MicrobatchRunner.map = count
    found = over_ranks(f"{path}/all", work)
    cut = list(splits)
    caches = DynamicCache(), DynamicCache()
    answer = {
        "renamed": NEW in inspect.signature(LlamaForCausalLM.forward).parameters
        and not any(hasattr(caches[0], name) for name in ("offloading", "is_croppable")),
        "same": found == work(plain),
        "batched": over_ranks(f"{path}/all", batched)
        == (plain.generate(IDS, do_sample=False, **OPTIONS)[:, 7:].tolist(), len(IDS)),
        "guessed": over_ranks(f"{path}/windows", guess) == guess(windows),
        "guessed over states": over_ranks(f"{path}/states", guess) == guess(states),
        "numbers": [cache_layers(layer) for layer in plain.model.layers] == [(n,) for n in range(4)]
        and not hasattr(plain.model.layers[0].self_attn, "layer_idx"),
        "pair": pair_of(EncoderDecoderCache(*caches)) == caches,
        "splits": cut,
        "fast_paths": checked,
    }
    print(json.dumps(answer))


main(sys.argv[1])
