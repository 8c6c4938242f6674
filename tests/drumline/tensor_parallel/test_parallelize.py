"""A model sharded over ranks computes what it computes whole."""

import copy
import json
import math
import re
import shutil
import types

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import drumline
from communicator import Communicator
from coordinator import Coordinator
from drumline import PlanError
from drumline.checkpoint.source import config_from_json
from drumline.tensor_parallel.dry_run_forward import FakeCommunicator, dry_run, truncated_copy
from drumline.tensor_parallel.parallelize import shard_specs
from drumline.tensor_parallel.sharded_model import own_device
from drumline.tensor_parallel.tp_layers import insert_collectives
from drumline.tensor_parallel.tp_plan import read_plan
from tests.cases import soak
from tests.gpu.decode import Decoder, small_model, whole_tokens

SIZES = {
    "vocab_size": 65,
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "head_dim": 8,
}
FAMILIES = {
    "llama": ("LlamaForCausalLM", {}),
    "llama with biases": (
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "pad_token_id": 64},
    ),
    "tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gemma3": ("Gemma3ForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "intermediate_size": 48}),
    "deepseek v2": (
        "DeepseekV2ForCausalLM",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "qwen3 moe": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}
IDS = torch.randint(3, 65, (2, 9), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="session")
def family(checkpoints):
    def make(name):
        kind, config = FAMILIES[name]
        config = {**SIZES, **config}
        if kind in ("Phi3ForCausalLM", "DeepseekV2ForCausalLM"):
            config.pop("head_dim")
        return checkpoints.make(f"tp {name}", kind, **config)

    return make


def on_ranks(ranks, path, nprocs, work, nodes=None, **options):
    def rank(info):
        torch.set_num_threads(1)
        with (
            Coordinator(info, timeout_s=40) as coor,
            drumline.load(path, coor=coor, **options) as model,
        ):
            return work(model)

    return ranks(rank, nprocs, nodes)


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def tokens(model):
    return model.generate(IDS, max_new_tokens=8, do_sample=False).tolist()


@pytest.mark.parametrize(("name", "tp"), [*((name, 2) for name in FAMILIES), ("mixtral", 4)])
def test_logits_and_tokens_equal_those_of_one_process(ranks, family, name, tp):
    plain, path = family(name)
    for found, said in on_ranks(ranks, path, tp, lambda m: (logits(m), tokens(m)), tp=tp):
        torch.testing.assert_close(found, logits(plain), rtol=1e-4, atol=1e-4)
        assert said == tokens(plain)


PADDED = {"input_ids": IDS.clone(), "attention_mask": torch.ones_like(IDS)}
PADDED["input_ids"][1, :3] = PADDED["attention_mask"][1, :3] = 0
TWICE = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])


def generated(model, draws=True):
    """Every way to choose words, several rows of which one is padded on the left."""

    def say(**options):
        torch.manual_seed(3)
        return model.generate(**{**PADDED, **options}, max_new_tokens=7).tolist()

    one = {"input_ids": TWICE, "attention_mask": torch.ones_like(TWICE)}
    guesses = {**one, "prompt_lookup_num_tokens": 3}
    yield "padded", say(do_sample=False)
    yield "beams", say(do_sample=False, num_beams=3)
    yield "static", say(do_sample=False, cache_implementation="static")
    yield "guessed", say(do_sample=False, **guesses)
    if not draws:
        return
    yield "sampled", say(do_sample=True, top_k=9)
    yield "sampled again", say(do_sample=True, temperature=2.0, num_return_sequences=3)
    yield "sampled beams", say(do_sample=True, num_beams=2)
    yield "sampled guesses", say(do_sample=True, **guesses)


@pytest.mark.parametrize("mesh", [soak({"tp": 3}), {"dp_replicate": 2, "tp": 2}])
def test_generate_says_what_it_says_on_one_process(ranks, checkpoints, mesh):
    """Ranks that are threads have one generator of random numbers, and took turns at it."""
    sizes = {**SIZES, "num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}
    plain, path = checkpoints.make("tp six heads", "LlamaForCausalLM", **sizes)
    draws = "dp_replicate" not in mesh  # each replica on its own, and here they share a generator
    expected = list(generated(plain, draws))
    nprocs = math.prod(mesh.values())
    for found in on_ranks(ranks, path, nprocs, lambda m: list(generated(m, draws)), mesh=mesh):
        assert found == expected


class AfterTokens(transformers.StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def test_ranks_stop_when_the_first_one_says_so(ranks, family):
    """A clock, or a user who has gone, is not the same everywhere: the others waited in a sum."""
    _, path = family("llama")
    heard = []

    def work(model):
        rank = model._monitor.coor.rank
        ends = transformers.StoppingCriteriaList([AfterTokens(14 - 3 * rank)])
        streamer = Heard(heard) if rank == 0 else None
        options = {"max_new_tokens": 20, "eos_token_id": None, "do_sample": False}
        said = model.generate(IDS[:1], stopping_criteria=ends, streamer=streamer, **options)
        timed = model.generate(IDS, max_time=60.0 * (1 - rank), **options)
        return said.shape[1], timed.shape[1]

    assert on_ranks(ranks, path, 2, work, tp=2) == [(14, 29)] * 2
    assert len(heard) == 7, "the prompt, each word as it was said, and the end"


class Fails(transformers.StoppingCriteria):
    def __init__(self, rank):
        self.rank = rank

    def __call__(self, input_ids, scores, **kwargs):
        if self.rank == 0:
            raise ValueError("the user's own")
        return False


def test_a_criterion_that_fails_on_the_first_rank_ends_the_others(ranks, family):
    _, path = family("llama")

    def work(model):
        ends = transformers.StoppingCriteriaList([Fails(model._monitor.coor.rank)])
        with pytest.raises((ValueError, drumline.DrumlineError)) as caught:
            model.generate(IDS[:1], stopping_criteria=ends, do_sample=False)
        return str(caught.value)

    first, other = on_ranks(ranks, path, 2, work, tp=2)
    assert first == "the user's own"
    assert "rank 1: a stopping criterion failed on the first rank" in other


class Heard(transformers.generation.BaseStreamer):
    def __init__(self, heard):
        self.heard = heard

    def put(self, value):
        self.heard.append(value)

    def end(self):
        self.heard.append(None)


@pytest.mark.parametrize("reader", ["each", "node", "rank0"])
def test_replicas_of_a_sharded_model_come_from_any_reader(ranks, family, reader):
    plain, path = family("mixtral")
    mesh = {"dp_replicate": 2, "tp": 2}
    found = on_ranks(
        ranks, path, 4, lambda m: (logits(m), m.loaded), [2, 2], mesh=mesh, reader=reader
    )
    for mine, _ in found:
        torch.testing.assert_close(mine, logits(plain), rtol=1e-4, atol=1e-4)
    reading = [done.nbytes_read > 0 for _, done in found]
    assert (
        reading
        == {"each": [True] * 4, "node": [True, False] * 2, "rank0": [True] + [False] * 3}[reader]
    )


@pytest.mark.parametrize("holds_head", [False, True])
def test_a_rank_without_files_loads_from_rank0(ranks, family, tmp_path, holds_head):
    plain, path = family("tied")
    if holds_head:  # which is one tensor with the embedding, where the values are the same
        path = shutil.copytree(path, tmp_path / "copy")
        tensors = load_file(path / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, path / "model.safetensors", {"format": "pt"})

    def rank(info):
        with Coordinator(info, timeout_s=40) as coor:
            own = path if info.rank == 0 else tmp_path / "nowhere"
            with drumline.load(own, coor=coor, tp=2, reader="rank0") as model:
                assert model.lm_head.weight is model.model.embed_tokens.weight
                return logits(model)

    for found in ranks(rank, 2):
        torch.testing.assert_close(found, logits(plain), rtol=1e-4, atol=1e-4)


def test_load_takes_a_mesh_and_a_meta_device_map(ranks, family):
    plain, path = family("tied")

    def rank(info):
        with (
            Coordinator(info, timeout_s=40) as coor,
            drumline.load(path, "meta", coor, mesh={"tp": 2}, build_on="cpu") as model,
        ):
            return logits(model)

    for found in ranks(rank, 2):
        torch.testing.assert_close(found, logits(plain), rtol=1e-4, atol=1e-4)


def test_tokens_of_a_sharded_model_are_counted_while_somebody_looks(ranks, family):
    _, path = family("llama")

    def rank(info):
        with (
            Coordinator(info, timeout_s=40) as coor,
            drumline.load(path, coor=coor, mesh={"tp": 2}) as model,
        ):
            if coor.rank == 0:
                coor.live_calls.watch(info)
            coor.barrier()
            logits(model)
            coor.barrier()
            tokens = coor.live_calls.counts().get("model", [0, 0, 0])[2]
            coor.barrier()
            if coor.rank == 0:
                coor.live_calls.unwatch()
            coor.barrier()
            return tokens

    # Ranks that are threads share the count, and may both begin at one number.
    assert ranks(rank, 2)[0] in (IDS.numel(), 2 * IDS.numel())


def test_what_a_model_wants_wider_stays_wide(ranks, checkpoints):
    """DeepSeek-V3 keeps the bias of its router in float32, whatever the rest is loaded in."""
    sizes = {
        **{key: value for key, value in SIZES.items() if key != "head_dim"},
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    }
    _, path = checkpoints.make("tp deepseek", "DeepseekV3ForCausalLM", **sizes)
    kind = transformers.DeepseekV3ForCausalLM
    plain = kind.from_pretrained(path, dtype=torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in plain.state_dict().items()}
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}

    def work(model):
        return {name: tensor.dtype for name, tensor in model.state_dict().items()}, logits(model)

    for found, mine in on_ranks(ranks, path, 2, work, tp=2, dtype="bfloat16"):
        assert found == dtypes
        torch.testing.assert_close(mine, logits(plain), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("mesh", [{"dp_replicate": 2}, {"tp": 2}], ids=str)
def test_weights_that_stay_in_float32_do_so_in_each_shard(ranks, checkpoints, mesh):
    """T5 overflows in float16 without them, and they were rounded."""
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    kind = transformers.T5ForConditionalGeneration
    _, path = checkpoints.make("t5 kept wide", kind.__name__, **sizes, vocab_size=64)
    plain = kind.from_pretrained(path, dtype=torch.float16)
    dtypes = {name: tensor.dtype for name, tensor in plain.named_parameters()}
    assert set(dtypes.values()) == {torch.float16, torch.float32}
    styles = {"*.block.*.layer.*.DenseReluDense.wi": "colwise"}
    styles |= {"*.block.*.layer.*.DenseReluDense.wo": "rowwise"}

    def work(model):
        with torch.no_grad():
            outputs = model(input_ids=IDS[:1, :6], decoder_input_ids=IDS[:1, :3])
        return {name: tensor.dtype for name, tensor in model.named_parameters()}, outputs.logits

    options = {"tp_plan": styles} if "tp" in mesh else {}
    for wide, logits in on_ranks(ranks, path, 2, work, mesh=mesh, dtype="float16", **options):
        assert wide == dtypes
        torch.testing.assert_close(logits, work(plain)[1], rtol=1e-2, atol=1e-2)


def test_a_config_with_an_infinite_number_reaches_every_rank():
    config = transformers.FalconH1Config()
    found = config_from_json(json.loads(config.to_json_string(use_diff=False)))
    assert found.time_step_limit[1] == math.inf


def test_a_rank_holds_about_its_part_of_the_parameters(ranks, family):
    plain, path = family("llama")
    whole = sum(p.nbytes for p in plain.parameters())
    for done in on_ranks(ranks, path, 4, lambda m: m.loaded, tp=4):
        assert done.share < 0.3 * whole


@pytest.fixture
def counts(monkeypatch):
    """The names of all collectives, of all ranks, in the order of their calls."""
    calls = []
    monkeypatch.setattr(
        "drumline.strategies.mesh_parallel.Communicator",
        lambda c, _, **options: Communicator(c, "gloo"),
    )
    for name in ("allreduce", "allgather", "reduce_scatter"):
        real = getattr(Communicator, name)

        def counted(self, *args, _name=name, _real=real, **kwargs):
            calls.append(_name)
            return _real(self, *args, **kwargs)

        monkeypatch.setattr(Communicator, name, counted)
    return calls


def test_one_layer_costs_two_allreduces_and_the_whole_a_gather_more(ranks, family, counts):
    """One behind attention, one behind the MLP, one for the embedding; the head is gathered."""
    _, path = family("llama")
    on_ranks(ranks, path, 2, lambda m: (counts.clear(), m._monitor.coor.barrier(), logits(m)), tp=2)
    layers = SIZES["num_hidden_layers"]
    assert counts.count("allreduce") == 2 * (2 * layers + 1)
    assert counts.count("allgather") == 2


def put_together(pieces, splits):
    """The whole of what two ranks have a part of each."""
    joined = pieces[0]
    for split in splits:
        halves = [piece.chunk(split.factor, split.dim) for piece in pieces]
        order = [half[part] for part in range(split.factor) for half in halves]
        joined = torch.cat(order, split.dim)
    return joined


@pytest.mark.parametrize("name", ["llama with biases", "qwen3", "mixtral", "phi3", "deepseek v2"])
def test_gradients_equal_those_of_one_process(ranks, family, name):
    plain, path = family(name)
    plain.zero_grad()
    ids = IDS.clone()
    ids[:, :2] = plain.config.pad_token_id  # whose row has a gradient as a target alone
    plain(ids, labels=ids).loss.backward()

    def work(model):
        model(ids, labels=ids).loss.backward()
        return {n: p.grad for n, p in model.named_parameters()}

    parts = on_ranks(ranks, path, 2, work, tp=2)
    splits = shard_specs(plain, read_plan(plain, "auto"), 2)
    for key, parameter in plain.named_parameters():
        joined = put_together([grads[key] for grads in parts], splits[key])
        torch.testing.assert_close(joined, parameter.grad, rtol=1e-3, atol=1e-5, msg=key)


def test_norms_of_the_sequence_and_columns_of_an_embedding_compute_what_one_process_does(
    ranks, family
):
    """Norms gather what each rank computed for its tokens; one new token is computed by all."""
    plain, path = family("llama")
    plain.zero_grad()
    plain(IDS, labels=IDS).loss.backward()
    norm = "sequence_parallel"
    styles = {
        "model.embed_tokens": "embedding_colwise",
        "model.layers.*.input_layernorm": norm,
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "model.norm": norm,
    }

    def work(model):
        model(IDS, labels=IDS).loss.backward()
        found = [model.model.norm.weight.grad, model.model.layers[0].input_layernorm.weight.grad]
        return logits(model), tokens(model), found, model.model.embed_tokens.weight.shape

    for mine, said, found, shape in on_ranks(ranks, path, 2, work, tp=2, tp_plan=styles):
        torch.testing.assert_close(mine, logits(plain), rtol=1e-4, atol=1e-4)
        assert said == tokens(plain) and shape == (65, 16)
        expected = [plain.model.norm.weight.grad, plain.model.layers[0].input_layernorm.weight.grad]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


PARTITIONED = {
    "llama with biases": FAMILIES["llama with biases"],
    "gemma3": FAMILIES["gemma3"],
    "mixtral": FAMILIES["mixtral"],
    "phi3": FAMILIES["phi3"],
    "deepseek v2": FAMILIES["deepseek v2"],
}


FIRST = next(iter(PARTITIONED))


@pytest.mark.parametrize(
    ("name", "tp"),
    [*((name, 2) for name in [*PARTITIONED][1:]), (FIRST, 4), soak(FIRST, 2)],
)
def test_tokens_partitioned_between_norms_give_the_logits_of_one_process(ranks, family, name, tp):
    """Nine tokens do not divide by two or four, and new ones come one by one."""
    plain, path = family(name)

    def work(model):
        return logits(model), tokens(model)

    for found, said in on_ranks(ranks, path, tp, work, tp=tp, tp_plan="sequence"):
        torch.testing.assert_close(found, logits(plain), rtol=1e-4, atol=1e-4)
        assert said == tokens(plain)


@pytest.mark.parametrize("name", ["llama with biases", "gemma3", "mixtral"])
def test_gradients_of_partitioned_tokens_equal_those_of_one_process(ranks, family, name):
    plain, path = family(name)
    plain.zero_grad()
    plain(IDS, labels=IDS).loss.backward()

    def work(model):
        model(IDS, labels=IDS).loss.backward()
        return {n: p.grad for n, p in model.named_parameters()}

    splits = shard_specs(plain, read_plan(plain, "sequence"), 2)
    parts = on_ranks(ranks, path, 2, work, tp=2, tp_plan="sequence")
    for key, parameter in plain.named_parameters():
        joined = put_together([grads[key] for grads in parts], splits[key])
        torch.testing.assert_close(joined, parameter.grad, rtol=1e-3, atol=1e-5, msg=key)


def test_partitioned_tokens_have_the_dtype_of_autocast(ranks, family):
    _, path = family("llama with biases")

    def work(model):
        seen = []
        row = model.model.layers[0].self_attn.o_proj
        row.register_forward_hook(lambda _, args, y: seen.append((y.dtype, y.shape[1])))
        with torch.autocast("cpu", torch.bfloat16):
            logits(model)
        return seen

    found = on_ranks(ranks, path, 2, work, tp=2, tp_plan="sequence")
    assert found == [[(torch.bfloat16, 5)]] * 2


def test_partitioned_tokens_are_gathered_before_columns_and_scattered_behind_rows(
    ranks, family, counts
):
    """Two of each in a layer in place of two allreduces; one gather behind the last norm."""
    _, path = family("llama")

    def work(model):
        counts.clear()
        model._monitor.coor.barrier()
        seen = []
        layer = model.model.layers[1]
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
        logits(model)
        model(IDS[:, :1])
        return seen

    for seen in on_ranks(ranks, path, 2, work, tp=2, tp_plan="sequence"):
        assert seen == [5, 1]
    layers = SIZES["num_hidden_layers"]
    prefill = {"reduce_scatter": 2 * layers, "allgather": 2 * layers + 2, "allreduce": 1}
    decode = {"allreduce": 2 * layers + 1, "allgather": 1}
    for name in ("allreduce", "allgather", "reduce_scatter"):
        assert counts.count(name) == 2 * (prefill.get(name, 0) + decode.get(name, 0)), name


@pytest.mark.skipif(
    not hasattr(transformers.cache_utils, "KVSharingDict"),
    reason="transformers before 5.23 computes a layer again without its hooks",
)
def test_what_shows_every_layer_or_computes_it_again_sees_all_tokens(ranks, family):
    plain, path = family("llama")
    shown = plain(IDS, output_hidden_states=True).hidden_states
    plain.zero_grad()
    plain(IDS, labels=IDS).loss.backward()
    grads = plain.model.layers[0].input_layernorm.weight.grad.clone()

    def work(model):
        found = model(IDS, output_hidden_states=True).hidden_states
        model.train().gradient_checkpointing_enable()
        model(IDS, labels=IDS).loss.backward()
        return found, model.model.layers[0].input_layernorm.weight.grad

    for found, grad in on_ranks(ranks, path, 2, work, tp=2, tp_plan="sequence"):
        for one, other in zip(found, shown, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(grad, grads, rtol=1e-3, atol=1e-5)


def test_experts_that_are_given_no_routing_are_sharded_by_the_plan_they_carry(ranks, checkpoints):
    """Llama 4 gives its experts the tokens alone, scaled by what the router made of them."""
    sizes = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 50}
    plain, path = checkpoints.make("tp llama4", "Llama4ForCausalLM", **sizes)
    for plan in ("auto", "sequence"):
        for found in on_ranks(ranks, path, 2, logits, tp=2, tp_plan=plan):
            torch.testing.assert_close(found, logits(plain), rtol=1e-4, atol=1e-4)


EXPERTS = {
    "mixtral": FAMILIES["mixtral"],
    "qwen3 moe": FAMILIES["qwen3 moe"],
    "deepseek v2": FAMILIES["deepseek v2"],
    "gpt oss": (
        "GptOssForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48},
    ),
}
FAMILIES |= EXPERTS


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "grouped_mm") for name in EXPERTS),
        *((name, "eager") for name in ("mixtral", "gpt oss")),
        *(soak(name, "eager") for name in ("qwen3 moe", "deepseek v2")),
    ],
)
def test_experts_on_ranks_of_their_own_say_what_one_process_says(ranks, family, name, way):
    plain, path = family(name)

    def work(model):
        shape = next(
            p.shape for n, p in model.named_parameters() if n.endswith("experts.down_proj")
        )
        return logits(model), tokens(model), shape[0]

    options = {"tp": 2, "tp_plan": "ep", "experts_implementation": way}
    for found, said, experts in on_ranks(ranks, path, 2, work, **options):
        torch.testing.assert_close(found, logits(plain), rtol=1e-4, atol=1e-4)
        assert said == tokens(plain) and experts == 2


@pytest.mark.parametrize(
    ("way", "ids"), [("eager", IDS), ("grouped_mm", IDS), ("eager", IDS[:1, :1])]
)
def test_gradients_of_experts_on_ranks_of_their_own_equal_those_of_one_process(
    ranks, family, way, ids
):
    """A single token, which one expert computes, leaves the rank of the others without any."""
    plain, path = family("mixtral")

    def work(model):
        for module in model.modules():
            if ids.numel() == 1 and hasattr(module, "top_k"):
                module.top_k = 1
        model.zero_grad()
        model(ids).logits.square().mean().backward()
        unused = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.grad is None}
        return unused | {n: p.grad for n, p in model.named_parameters() if n not in unused}

    whole = work(copy.deepcopy(plain))
    splits = shard_specs(plain, read_plan(plain, "ep"), 2)
    options = {"tp": 2, "tp_plan": "ep", "experts_implementation": way}
    parts = on_ranks(ranks, path, 2, work, **options)
    for key, gradient in whole.items():
        joined = put_together([grads[key] for grads in parts], splits[key])
        torch.testing.assert_close(joined, gradient, rtol=1e-3, atol=1e-5, msg=key)


def test_experts_that_do_not_divide_are_found_while_planning():
    kind, config = FAMILIES["mixtral"]
    with torch.device("meta"):
        model = getattr(transformers, kind)(transformers.MixtralConfig(**{**SIZES, **config}))
    styles = {k: v for k, v in read_plan(model, "ep").items() if "experts" in k}
    with pytest.raises(PlanError, match=r"holds 4 experts, which 3 ranks.*tp=1 or 2 or 4"):
        shard_specs(model, styles, 3)


def test_the_decoding_that_gpus_capture_says_what_generate_says(ranks):
    device = torch.device("cpu")
    models = [small_model(device) for _ in range(2)]

    def rank(info):
        with Coordinator(info, timeout_s=40) as coor, Communicator(coor) as comm:
            return Decoder(models[info.rank], comm).tokens()

    assert ranks(rank, 2) == [whole_tokens(device)] * 2


def test_a_quantised_checkpoint_is_refused_with_what_to_do(ranks_or_errors, family, tmp_path):
    shutil.copytree(family("llama")[1], tmp_path / "fp8")
    file = tmp_path / "fp8" / "config.json"
    quantised = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantised}))

    def rank(info):
        with Coordinator(info, timeout_s=40) as coor:
            drumline.load(tmp_path / "fp8", coor=coor, tp=2)

    for error in ranks_or_errors(rank, 2):
        assert isinstance(error, PlanError) and "quantised (fp8)" in str(error)
        assert "device_map=" in str(error) and "dequantize=True" in str(error)


class Mlp(nn.Module):
    def __init__(self, inner=7):
        super().__init__()
        self.up, self.down = nn.Linear(5, inner), nn.Linear(inner, 5)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def test_any_module_can_be_sharded_by_a_plan_of_ones_own(ranks):
    torch.manual_seed(0)
    plain, x = Mlp(), torch.randn(3, 5)

    def rank(info):
        model = Mlp()
        styles = read_plan(model, {"up": "colwise", "down": "rowwise"})
        splits = shard_specs(model, styles, 3)
        with Coordinator(info, timeout_s=40) as coor, Communicator(coor) as comm:
            for name, whole in plain.named_parameters():
                part = whole.detach()
                for split in splits[name]:
                    part = part.chunk(3, split.dim)[coor.rank].clone()
                owner, _, last = name.partition(".")
                setattr(getattr(model, owner), last, nn.Parameter(part))
            insert_collectives(model, styles, comm)
            with torch.no_grad():
                with torch.autocast("cpu", torch.bfloat16):
                    assert model(x).dtype == torch.bfloat16, "as on one rank, whatever the bias is"
                return model(x)

    for found in ranks(rank, 3):
        torch.testing.assert_close(found, plain(x))


class Marked(nn.Embedding):
    """Looks at whole vectors and at the words themselves, as Inkling's and T5Gemma 2's do."""

    def __init__(self):
        super().__init__(11, 6)
        self.mark = nn.Parameter(torch.arange(6.0))
        self.norm = nn.LayerNorm(6)

    def forward(self, ids):
        found = self.norm(super().forward(ids))
        return torch.where((ids == 5)[..., None], self.mark, found)


class Indexed(nn.Embedding):
    def forward(self, ids):
        return self.weight[ids]


@pytest.mark.parametrize("style", ["embedding_rowwise", "embedding_colwise"])
def test_what_an_embedding_makes_of_its_vectors_it_makes_of_whole_ones(ranks, style):
    """Every rank looked for the marked word among those that it had counted from its own first."""
    torch.manual_seed(0)
    plain, ids = nn.Sequential(Marked()), torch.arange(11).view(1, 11)

    def rank(info):
        model = copy.deepcopy(plain)
        with Coordinator(info, timeout_s=40) as coor, Communicator(coor) as comm:
            assert not drumline.parallelize(model, {"0": style}, comm)["0.mark"]
            model(ids).sum().backward()
            with torch.no_grad():
                return model(ids), model[0].mark.grad

    plain(ids).sum().backward()
    for found, gradient in ranks(rank, 3):
        torch.testing.assert_close(found, plain(ids))
        torch.testing.assert_close(gradient, plain[0].mark.grad)


@pytest.mark.parametrize("style", ["embedding_rowwise", "embedding_colwise"])
@pytest.mark.parametrize("word", [-1, 5])
def test_an_id_outside_of_an_embedding_is_refused_by_every_rank(ranks, style, word):
    """The vector of a word that no rank has was zeros."""

    def rank(info):
        model = nn.Sequential(nn.Embedding(5, 8))
        with Coordinator(info, timeout_s=40) as coor, Communicator(coor) as comm:
            drumline.parallelize(model, {"0": style}, comm)
            with pytest.raises(IndexError):
                model(torch.tensor([[0, 4, word]]))
            return model(torch.tensor([[0, 4]])).shape

    assert ranks(rank, 4) == [(1, 2, 8)] * 4


def test_kinds_of_modules_that_compute_in_a_way_of_their_own_are_refused():
    model = nn.Sequential(Indexed(11, 6), type("Doubled", (nn.Linear,), {"forward": len})(6, 6))
    insert_collectives(model, {"0": "embedding_rowwise"}, FakeCommunicator(0, 2))
    with pytest.raises(PlanError, match="Indexed looks ids up in its own way"):
        model[0](torch.arange(3))
    with pytest.raises(PlanError, match="1 is a Doubled, which multiplies in its own way"):
        shard_specs(model, {"1": "rowwise_split_input"}, 2)


@pytest.mark.parametrize(
    "styles",
    [{"up": "colwise"}, {"down": "rowwise"}, {"up": "colwise", "down": "rowwise_split_input"}],
)
def test_columns_without_rows_behind_them_is_refused(styles):
    """It failed in the first forward, on every rank, with shapes and no names."""
    says = r"up .* gives 7 features and down .* takes 7, and only one"
    with pytest.raises(PlanError, match=says):
        shard_specs(Mlp(), read_plan(Mlp(), styles), 2)


MLP = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}


@pytest.mark.parametrize(
    ("styles", "says"),
    [
        ({**MLP, "gate_proj": "replicate"}, r"layers\.0\.mlp cannot compute.*50.*up_proj colwise"),
        ({**MLP, "up_proj": "colwise_gather_output"}, r"layers\.0\.mlp cannot compute"),
        ({**MLP, "down_proj": "rowwise_split_input"}, "only one of them is sharded"),
    ],
)
def test_a_plan_whose_shapes_disagree_is_found_before_loading(
    ranks_or_errors, family, monkeypatch, styles, says
):
    _, path = family("llama")
    monkeypatch.setattr(
        "drumline.checkpoint.plan_executor.TensorReader", None
    )  # no weight can be read
    plan = {f"model.layers.*.mlp.{name}": style for name, style in styles.items()}

    def rank(info):
        with Coordinator(info, timeout_s=40) as coor:
            drumline.load(path, coor=coor, tp=2, tp_plan=plan)

    for error in ranks_or_errors(rank, 2):
        assert isinstance(error, PlanError), error
        assert re.search(says, str(error)), error


def test_heads_that_do_not_divide_are_found_before_loading(ranks_or_errors, family):
    _, path = family("llama")

    def rank(info):
        with Coordinator(info, timeout_s=40) as coor:
            drumline.load(path, coor=coor, tp=3)

    for error in ranks_or_errors(rank, 3):
        assert isinstance(error, PlanError)
        assert "4 heads in k_proj" in str(error) and "tp=1 or 2 or 4" in str(error)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("deepseek v2", "4 heads in q_b_proj, 4 heads in kv_b_proj.*tp=1 or 2 or 4"),
        ("qwen3 moe", r"down_proj would leave a rank 6 of 16 features.*multiples of 16 bytes"),
    ],
)
def test_what_a_mixture_cannot_share_is_found_while_planning(name, says):
    """Latent attention failed in the first call; experts on one rank only, and the rest waited."""
    kind, sizes = FAMILIES[name]
    kind = getattr(transformers, kind)
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6} if name == "qwen3 moe" else {}
    with torch.device("meta"):
        model = kind(kind.config_class(**{**SIZES, **sizes, **heads}))
    with pytest.raises(PlanError, match=says):
        shard_specs(model, read_plan(model, "auto"), 3)


class Looks(Mlp):
    """Needs a value, behind what is sharded."""

    def forward(self, input_ids):
        x = super().forward(input_ids.new_ones(2, 5, dtype=torch.float32))
        return {"logits": x if x.sum() > 0 else -x}


def test_shapes_that_disagree_are_found_before_the_first_value_is_wanted():
    with torch.device("meta"):
        whole, part, fitting = Looks(), Looks(), Looks()
        part.up = nn.Linear(5, 4)
    dry_run(whole, fitting, {}, 0, 2)
    with pytest.raises(PlanError, match="sharded in Looks: up colwise"):
        dry_run(Looks().to("meta"), part, {"up": "colwise"}, 0, 2)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"up": "sideways"}, "sideways"),
        ({"side": "colwise"}, "does not have"),
        ("manual", "not a plan"),
        ("auto", "carries no"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(plan, says):
    with pytest.raises(PlanError, match=says):
        read_plan(Mlp(), plan)


ATTENTION = {
    **{f"model.layers.*.self_attn.{n}_proj": "colwise" for n in "qkv"},
    "model.layers.*.self_attn.o_proj": "rowwise",
}


@pytest.mark.parametrize(
    ("styles", "says"),
    [
        ({"lm_head": "colwise"}, "'colwise_gather_output'"),
        ({"model.norm": "colwise"}, "is a MixtralRMSNorm.*for Linear"),
        ({"model.layers.*.mlp.experts": "moe_tp_experts"}, "nothing in it is sharded"),
        (
            {**ATTENTION, "model.layers.*.self_attn": "all_reduce"},
            r"0\.self_attn is 'all_reduce'.*self_attn\.o_proj gives all of them the same",
        ),
        ({"model.layers.*.mlp.experts": "ep_dispatch_experts"}, "other experts than they have"),
        ({"model.layers.*.mlp.experts.down_proj": "grouped_gemm"}, "other experts than they have"),
        (
            {"model.layers.*.self_attn.q_proj": "colwise"},
            "self_attn.q_proj is sharded into heads and .*k_proj is not .whole.",
        ),
        (
            {name: style for name, style in ATTENTION.items() if style == "colwise"},
            r"q_proj \(colwise\) gives 32 features and .*o_proj \(whole\) takes 32",
        ),
    ],
)
def test_a_plan_that_would_compute_something_else_is_refused(styles, says):
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES))
    with pytest.raises(PlanError, match=says):
        shard_specs(model, read_plan(model, styles), 2)


def test_a_bias_of_experts_that_would_be_added_once_for_each_rank_is_refused():
    with torch.device("meta"):
        config = transformers.MixtralConfig(**{**SIZES, "intermediate_size": 64})
        model = transformers.MixtralForCausalLM(config)
    styles = read_plan(model, "auto")
    assert shard_specs(model, styles, 2)
    for layer in model.model.layers:
        layer.mlp.experts.down_proj_bias = nn.Parameter(torch.zeros(4, 32))
    with pytest.raises(PlanError, match=r"experts\.down_proj_bias gives all of them the same"):
        shard_specs(model, styles, 2)
    assert shard_specs(model, styles, 1)


def test_a_bias_in_a_list_of_experts_that_would_be_added_once_for_each_rank_is_refused():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            pairs = [{"w1": nn.Linear(8, 8, bias=False), "w2": nn.Linear(8, 8)} for _ in range(2)]
            self.experts = nn.ModuleList(nn.ModuleDict(pair) for pair in pairs)

    plan = {"experts": "moe_tp_experts"}
    plan |= {"experts.*.w1.weight": "colwise", "experts.*.w2.weight": "rowwise"}
    model = Experts()
    with pytest.raises(PlanError, match=r"experts\.0\.w2\.bias gives all of them the same"):
        shard_specs(model, read_plan(model, plan), 2)


def test_gate_and_up_of_experts_in_one_tensor_are_sharded_in_one_way():
    """Inkling's plan says "colwise" of it, and every rank gave other logits without a word."""
    name = "model.layers.1.mlp.experts.gate_up_proj"
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES))
    styles = read_plan(model, "auto")
    model._tp_plan = {n.replace(".1.", ".*."): s.removeprefix("packed_") for n, s in styles.items()}
    assert read_plan(model, "auto") == styles and styles[name] == "packed_colwise"
    with pytest.raises(PlanError, match=r"gate_up_proj gives two features.*'packed_colwise'"):
        shard_specs(model, read_plan(model, {**styles, name: "colwise"}), 2)


def test_gate_and_up_of_an_mlp_in_one_tensor_are_not_split_in_the_middle():
    """Phi-3 with a plan of one's own gave other logits without a word."""
    with torch.device("meta"):
        model = transformers.Phi3ForCausalLM(transformers.Phi3Config(num_hidden_layers=1))
    mlp = "model.layers.0.mlp"
    styles = {f"{mlp}.gate_up_proj": "colwise", f"{mlp}.down_proj": "rowwise"}
    with pytest.raises(PlanError, match=r"gate_up_proj gives two features.*'packed_colwise'"):
        shard_specs(model, styles, 2)
    assert shard_specs(model, {**styles, f"{mlp}.gate_up_proj": "packed_colwise"}, 2)


def test_layers_like_others_are_left_out_of_the_rehearsal_whatever_their_styles():
    """MiniCPM 3, whose layers are all of one kind, was looked for in a layer that was dropped."""
    one_kind = {"num_hidden_layers": 3, "first_k_dense_replace": 3}
    config = {**SIZES, **FAMILIES["deepseek v2"][1], **one_kind}
    with torch.device("meta"):
        model = transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**config))
    styles = read_plan(model, "auto")
    short = truncated_copy(model, styles)
    assert len(short.model.layers) == 1
    insert_collectives(short, styles, FakeCommunicator(0, 2))


def test_a_head_is_sharded_as_the_embedding_that_it_is_one_tensor_with(ranks, checkpoints):
    """The plan of LFM2 names its head alone, and its checkpoints have no other."""
    kinds = ["conv", "full_attention"]
    sizes = {"tie_word_embeddings": True, "layer_types": kinds, "block_auto_adjust_ff_dim": False}
    plain, path = checkpoints.make("tp lfm2", "Lfm2ForCausalLM", **{**SIZES, **sizes})
    for found in on_ranks(ranks, path, 2, logits, tp=2):
        torch.testing.assert_close(found, logits(plain), rtol=1e-4, atol=1e-4)


def test_a_tied_tensor_that_a_plan_shards_in_two_ways_is_refused():
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**SIZES, "tie_word_embeddings": True})
    )
    styles = {"lm_head": "colwise_gather_output", "model.embed_tokens": "replicate"}
    with pytest.raises(PlanError, match="two ways"):
        shard_specs(model, styles, 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mesh": {"dp_shard": 2}}, "DeviceMesh"),
        ({"mesh": {"tp": 2}, "tp": 1}, "contradicts"),
        ({"tp": 3}, "divide"),
        ({"tp": 2, "build_on": "disk"}, "build_on"),
        ({"tp": 2, "dtype": "flot16"}, "dtype='flot16' is not one that"),
        ({"tp": 2, "length": 64}, "length=64 says how to spread"),
        ({"device": "cpu"}, "for ranks that shard layers"),
    ],
)
def test_a_mesh_is_used_or_refused(ranks_or_errors, family, options, says):
    _, path = family("llama")

    def rank(info):
        with Coordinator(info, timeout_s=40) as coor:
            drumline.load(path, coor=coor, **options)

    for error in ranks_or_errors(rank, 2):
        assert isinstance(error, PlanError) and says in str(error)


@pytest.mark.parametrize(("count", "expected"), [(1, "cuda:0"), (4, "cuda:3")])
def test_a_rank_takes_the_gpu_of_its_local_rank_or_the_only_one_it_sees(
    monkeypatch, count, expected
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert own_device(types.SimpleNamespace(local_rank=3)) == expected
