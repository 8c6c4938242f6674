"""Stages of ranks that shard their layers: the master drives, and says what one process says."""

import copy
import json
import math
import re
import shutil
import threading

import pytest
import torch

import drumline
import launcher
from communicator import Communicator
from coordinator import Coordinator
from drumline import Mesh, PlanError, StageError
from drumline.core.group_monitor import GroupMonitor
from drumline.stages import tp_stage
from drumline.stages.messages import Message, MessageKind
from drumline.stages.stage import Stage
from drumline.stages.tp_stage import StageGroup
from drumline.tensor_parallel import sharded_model
from drumline.timings import ModelTimings
from launcher import LaunchError
from tests.cases import soak
from tests.drumline.test_families import skip_unless_it_runs

SIZES = {
    "vocab_size": 65,
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": ("LlamaForCausalLM", {}),
    "tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "intermediate_size": 48}),
}
IDS = torch.randint(3, 65, (2, 9), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="session")
def family(checkpoints):
    def make(name):
        kind, config = FAMILIES[name]
        return checkpoints.make(f"group {name}", kind, **{**SIZES, **config})

    return make


def on_master(path, nprocs, work, **options):
    def rank():
        torch.set_num_threads(1)
        with drumline.load(path, **options) as model:
            return work(model)

    return launcher.launch(rank, nprocs=nprocs, launcher="threads", timeout_s=60)[0]


def said(model):
    with torch.no_grad():
        logits = model(IDS).logits
    return logits, model.generate(IDS, max_new_tokens=8, do_sample=False).tolist()


def same(found, plain):
    torch.testing.assert_close(found[0], said(plain)[0], rtol=1e-4, atol=1e-4)
    assert found[1] == said(plain)[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_two_stages_of_two_ranks_say_what_one_process_says(family, name):
    plain, path = family(name)
    stages, found = on_master(
        path, 4, lambda m: (m.device_map.ranks, said(m)), tp=2, device_map="auto"
    )
    assert stages == [0, 1]
    same(found, plain)


SHARING = {
    "head_dim": 8,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 65,
    "intermediate_size": 48,
}
GEMMA3N = {"laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4}


@pytest.mark.parametrize(
    ("kind", "config"), [("Gemma4ForCausalLM", {}), ("Gemma3nForCausalLM", GEMMA3N)]
)
def test_parts_of_keys_that_later_layers_share_are_an_error(checkpoints, monkeypatch, kind, config):
    """Gemma 4 took the keys of the first rank's heads on all ranks, and gave other tokens; Gemma
    3n, which has a buffer of its own outside of modules, ended in an AttributeError."""
    skip_unless_it_runs("gemma3n" if config else "gemma4")
    plain, path = checkpoints.make(f"sharing {kind}", kind, **{**SIZES, **SHARING, **config})

    refusal = "hands on to later layers .* load the model with tp= alone"
    with pytest.raises(LaunchError, match=refusal):
        on_master(path, 4, said, tp=2, device_map="auto")
    monkeypatch.setattr(sharded_model, "dry_run", lambda *_: None)  # as for a model that needs more

    def refused(model):
        for _ in range(2):
            with pytest.raises(StageError, match=rf"layers\.0 {refusal}"):
                said(model)
        return True

    assert on_master(path, 4, refused, tp=2, device_map="auto")
    same(on_master(path, 2, said, mesh={"pp": 2, "tp": 1}), plain)


def test_every_rank_holds_its_part_of_its_stage(family, monkeypatch):
    plain, path = family("llama")
    shares = {}
    real = sharded_model.load_planned

    def counted(model, plan, files, coor, *rest):
        shares[coor.rank] = real(model, plan, files, coor, *rest)
        return shares[coor.rank]

    monkeypatch.setattr(sharded_model, "load_planned", counted)
    on_master(path, 4, said, tp=2, device_map="auto")
    whole = sum(p.nbytes for p in plain.parameters())
    norms = sum(p.nbytes for p in plain.parameters() if p.dim() == 1)
    assert max(done.share for done in shares.values()) < 0.35 * whole
    assert whole <= sum(done.share for done in shares.values()) <= whole + norms


def test_a_head_that_was_trained_apart_is_planned_as_large_as_it_is_loaded(family, tmp_path):
    """It was taken for tied, as its config says, and its stage had no room for it."""
    _, path = family("llama")
    shutil.copytree(path, tmp_path / "apart")
    config = json.loads((path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "apart" / "config.json").write_text(json.dumps(config))
    sizes = [
        on_master(where, 2, lambda model: model.device_map.nbytes, mesh={"pp": 2, "tp": 1})
        for where in (path, tmp_path / "apart")
    ]
    assert sizes[0] == sizes[1]


def test_a_stage_of_tp_groups_is_planned_with_the_masks_of_a_prompt(checkpoints):
    """They were left out, 7 MiB here beside a model of 50 KiB."""
    sizes = {**SIZES, "sliding_window": 16}
    _, path = checkpoints.make("group with a window", "MistralForCausalLM", **sizes)
    options = {
        "tp": 2,
        "device_map": "auto",
        "batch": 1,
        "length": 1000,
        "max_memory": ["5MiB"] * 4,
    }
    with pytest.raises(LaunchError, match="as workspace"):
        on_master(path, 4, said, **options)


def test_stages_without_tensor_parallelism_are_tp_groups_of_one(family):
    plain, path = family("tied")
    same(on_master(path, 2, said, mesh={"pp": 2}), plain)


def test_a_token_is_two_messages(family):
    """Embeddings and layers in one, and the head, whose input the model splits itself."""

    def sent(model, new):
        before = model.traffic[0]
        model.generate(IDS[:1], min_new_tokens=new, max_new_tokens=new, do_sample=False)
        return model.traffic[0] - before

    path = family("llama")[1]
    few, many = on_master(
        path, 2, lambda m: [sent(m, new) for new in (2, 3, 9)], tp=2, device_map="auto"
    )[1:]
    assert many - few == 2 * 6


def test_a_config_of_ones_own_is_that_of_every_rank(family):
    plain, path = family("llama")
    config = copy.deepcopy(plain.config)
    config.rms_norm_eps = 0.5
    changed = type(plain).from_pretrained(path, config=config)
    assert said(changed)[1] != said(plain)[1]
    same(on_master(path, 2, said, tp=2, device_map="auto", config=config), changed)


def test_one_stage_is_driven_by_its_first_rank(family):
    plain, path = family("tied")
    found = on_master(path, 2, said, tp=2, device_map="auto")
    same(found, plain)


def test_the_axes_of_the_mesh_may_come_in_any_order_and_files_from_one_rank(family, tmp_path):
    """Ranks 0 and 2 are the first stage here; the others have no file at all."""
    plain, path = family("llama")

    def rank():
        torch.set_num_threads(1)
        own = path if launcher.current().rank == 0 else tmp_path / "nowhere"
        with drumline.load(own, mesh={"tp": 2, "pp": 2}, reader="rank0") as model:
            return said(model), model.device_map.of(1)

    found, second = launcher.launch(rank, nprocs=4, launcher="threads", timeout_s=60)[0]
    same(found, plain)
    assert "model.layers.3" in second


def test_step_that_fails_on_all_of_a_tp_group_is_an_error_and_the_next_call_works(family):
    plain, path = family("llama")

    def work(model):
        for width in (7, 5):
            with pytest.raises(StageError, match=r"layers\.0 raised RuntimeError"):
                model(IDS, attention_mask=torch.zeros(2, 1, 9, width))
        return said(model)

    places = {"": 0, "model.layers.2": 1, "model.layers.3": 1}
    same(on_master(path, 4, work, tp=2, device_map=places, max_memory=[1 << 30] * 4), plain)


def test_a_step_that_fails_on_one_rank_of_a_tp_group_ends_the_model_and_names_it(
    family, monkeypatch
):
    """The others of the group would wait in a sum that it never joins."""
    _, path = family("llama")
    run_steps = Stage._run

    def run(self, route, message):
        if self.rank == 3:
            raise MemoryError("no memory on this rank alone")
        return run_steps(self, route, message)

    monkeypatch.setattr(Stage, "_run", run)
    monkeypatch.setattr(tp_stage, "TIMINGS", ModelTimings(step_agreement_s=0.5))
    with pytest.raises(launcher.LaunchError) as raised:
        on_master(path, 4, said, tp=2, device_map="auto")
    assert re.search(r"rank 3 \(host.*raised MemoryError", str(raised.value), re.DOTALL), (
        raised.value
    )


@pytest.mark.parametrize("call", ["broadcast", "receive", "check_all_failed"])
def test_every_rank_of_a_tp_group_names_the_rank_that_failed_alone(
    ranks_or_errors, monkeypatch, call
):
    """A slow rank was still in an earlier step of the call, and named only its own loss."""
    monkeypatch.setattr(tp_stage, "TIMINGS", ModelTimings(step_agreement_s=0.2))
    arguments = {
        "broadcast": [Message(MessageKind.CALL)],
        "check_all_failed": ["the loss of rank 1"],
    }
    has_left = threading.Event()

    def rank(info):
        layers = dict.fromkeys(range(2), "its part of model.layers.0")
        try:
            with Coordinator(info) as coor, Communicator(coor.split([0, 1]), timeout_s=30) as comm:
                group = StageGroup(info.rank, comm, GroupMonitor(coor, [comm], layers))
                if info.rank == 1:
                    group.check_all_failed("no memory on this rank alone")
                has_left.wait(30)
                getattr(group, call)(*arguments.get(call, []))
        finally:
            has_left.set()

    errors = ranks_or_errors(rank, 2)
    assert all(isinstance(error, drumline.PeerLost) for error in errors), errors
    assert "This rank failed first: no memory on this rank alone" in str(errors[1])
    assert "desynchronised from its TP group: no memory on this rank alone" in str(errors[0])
    assert errors[0].rank == 1 and "its part of model.layers.0" in str(errors[0])


def test_a_rank_waits_until_the_last_of_its_waits_has_ended(ranks):
    """The end of one in another thread hid the rest, and a host that was gone was not noticed."""

    def rank(info):
        with Coordinator(info) as coor:
            monitor = GroupMonitor(coor, [], {0: "all"})
            after_one = monitor.waiting(lambda: [monitor.waiting(int), monitor._is_waiting()])
            return after_one[1], monitor._is_waiting()

    assert ranks(rank, 1) == [(True, False)]


def test_a_call_that_ends_in_the_first_stage_ends_no_wait_of_another_thread(family, monkeypatch):
    def work(model):
        monitor = model._driver.ring.group.monitor
        embeddings = model.get_input_embeddings()
        return monitor.waiting(lambda: [embeddings(IDS)[0, 0, 0].item(), monitor._is_waiting()])[1]

    assert on_master(family("llama")[1], 4, work, mesh={"pp": 2, "tp": 2}) is True


def test_sampling_beams_and_several_turns_go_through_the_tp_groups(family):
    plain, path = family("llama")

    def work(model):
        torch.manual_seed(3)
        sampled = model.generate(IDS, max_new_tokens=6, do_sample=True, top_k=5)
        beams = model.generate(IDS, max_new_tokens=6, num_beams=3, do_sample=False)
        first = model(IDS[:, :5], use_cache=True)
        second = model(IDS[:, 5:], past_key_values=first.past_key_values)
        return sampled.tolist(), beams.tolist(), second.logits.detach()

    found = on_master(path, 4, work, mesh={"pp": 2, "tp": 2})
    expected = work(plain)
    assert found[:2] == expected[:2]
    torch.testing.assert_close(found[2], expected[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "mesh",
    [
        {"dp_replicate": 2, "pp": 2},
        soak({"pp": 2, "tp": 1, "dp_replicate": 2}),
        {"tp": 2, "dp_replicate": 2, "pp": 2},
    ],
)
def test_replicas_of_stages_are_called_on_their_own(family, tmp_path, mesh):
    """Each first rank of a replica has a model, and calls it as often as it likes."""
    plain, path = family("tied")
    nprocs = math.prod(mesh.values())
    served = threading.Event()

    def rank():
        torch.set_num_threads(1)
        me = launcher.current().rank
        own = path if me == 0 else tmp_path / "nowhere"
        try:
            with drumline.load(own, mesh=mesh, reader="rank0") as model:
                at = model.mesh.coordinate(me)
                assert at["pp"] == 0 and at["tp"] == 0
                if me:
                    served.wait(30)
                    return said(model)
                found = [said(model) for _ in range(2)]
                served.set()
            return found[1]
        except drumline.WorkerExit:
            return None

    found = launcher.launch(rank, nprocs=nprocs, launcher="threads", timeout_s=60)
    called = [one for one in found if one is not None]
    assert len(called) == 2
    for one in called:
        same(one, plain)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"mesh": {"pp": 2, "dp_shard": 2}}, "name that axis 'dp_replicate'"),
        ({"mesh": Mesh({"pp": 2, "tp": 2}, (1, 0, 2, 3))}, "put rank 0 first"),
        ({"tp": 3, "device_map": "auto"}, "does not divide"),
        ({"tp": 2, "device_map": "fastest"}, "decides itself"),
        ({"mesh": {"pp": 2, "tp": 2}, "tp": 4}, "contradicts"),
        ({"mesh": {"pp": 2, "tp": 2}, "max_memory": [1 << 10] * 4}, "are missing in all"),
        ({"tp": 2, "max_memory": [1 << 30] * 4}, "would change nothing"),
        ({"tp": 2, "device_map": {"": 0, "model.layers.1": (1, "disk")}}, r"layers\.1 on disk"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(ranks, family, options, match):
    _, path = family("llama")

    def rank(info):
        with Coordinator(info, timeout_s=40) as coor, pytest.raises(PlanError, match=match):
            drumline.load(path, coor=coor, **options)

    ranks(rank, 4)
