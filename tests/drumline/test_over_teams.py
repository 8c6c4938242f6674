"""Stages of ranks that cut their layers: the master drives, and says what one process says."""

import copy
import math
import re
import threading
from types import SimpleNamespace

import pytest
import torch

import drumline
import launcher
from communicator import Communicator
from coordinator import Coordinator
from drumline import Mesh, PlanError, StageError
from drumline.stages.messages import Kind, Message
from drumline.stages.tp_stage import Team

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
        return checkpoints.make(f"team {name}", kind, **{**SIZES, **config})

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


def test_every_rank_holds_its_part_of_its_stage(family, monkeypatch):
    plain, path = family("llama")
    shares = {}
    real = drumline.cut_model.load_planned

    def counted(model, plan, files, coor, *rest):
        shares[coor.rank] = real(model, plan, files, coor, *rest)
        return shares[coor.rank]

    monkeypatch.setattr(drumline.cut_model, "load_planned", counted)
    on_master(path, 4, said, tp=2, device_map="auto")
    whole = sum(p.nbytes for p in plain.parameters())
    norms = sum(p.nbytes for p in plain.parameters() if p.dim() == 1)
    assert max(done.share for done in shares.values()) < 0.35 * whole
    assert whole <= sum(done.share for done in shares.values()) <= whole + norms


def test_stages_without_tensor_parallelism_are_teams_of_one(family):
    plain, path = family("tied")
    same(on_master(path, 2, said, mesh={"pp": 2}), plain)


def test_a_token_is_two_messages(family):
    """Embeddings and layers in one, and the head, whose input the model cuts itself."""

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


def test_what_fails_alike_on_a_team_is_an_error_and_the_next_call_works(family):
    plain, path = family("llama")

    def work(model):
        for width in (7, 5):
            with pytest.raises(StageError, match=r"layers\.0 raised RuntimeError"):
                model(IDS, attention_mask=torch.zeros(2, 1, 9, width))
        return said(model)

    places = {"": 0, "model.layers.2": 1, "model.layers.3": 1}
    same(on_master(path, 4, work, tp=2, device_map=places, max_memory=[1 << 30] * 4), plain)


def test_what_fails_on_one_rank_of_a_team_ends_the_model_and_says_who(family, monkeypatch):
    """The others of the team would wait in a sum that it never joins."""
    _, path = family("llama")
    real = drumline.team.TeamStage._run

    def run(self, route, message, doing):
        if self.rank == 3:
            raise MemoryError("no room on this rank alone")
        return real(self, route, message, doing)

    monkeypatch.setattr(drumline.team.TeamStage, "_run", run)
    monkeypatch.setattr(drumline.team, "AGREE_S", 0.5)
    with pytest.raises(launcher.LaunchError) as raised:
        on_master(path, 4, said, tp=2, device_map="auto")
    pattern = r"the ranks \[2, 3\].*no longer in.*What failed first: rank 3 .*raised MemoryError"
    assert re.search(pattern, str(raised.value), re.DOTALL), raised.value


@pytest.mark.parametrize("call", ["tell", "hear", "fail_together"])
def test_who_hears_that_the_team_is_lost_hears_what_failed_first(
    ranks_or_errors, monkeypatch, call
):
    """Who was slow was still in an earlier step of the call, and told only of its own loss."""
    monkeypatch.setattr(drumline.team, "AGREE_S", 0.2)
    has_left = threading.Event()
    holds = {0: "model.layers.0", 1: "model.layers.0"}
    vigil = SimpleNamespace(verdict="", holds=holds, explained=lambda work: work())
    calls = {"tell": Message(Kind.CALL), "hear": None, "fail_together": "the loss of rank 1"}

    def rank(info):
        try:
            with Coordinator(info) as coor, Communicator(coor, timeout_s=30) as comm:
                team = Team(info.rank, comm, vigil)
                if info.rank == 1:
                    team.fail_together("no room on this rank alone")
                has_left.wait(30)
                getattr(team, call)(*filter(None, [calls[call]]))
        finally:
            has_left.set()

    found = ranks_or_errors(rank, 2)
    for error in found:
        assert isinstance(error, drumline.PeerLost)
        assert "What failed first: no room on this rank alone" in str(error)
        assert "which compute model.layers.0 together" in str(error)


def test_sampling_beams_and_several_turns_go_through_the_teams(family):
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
        {"pp": 2, "tp": 1, "dp_replicate": 2},
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
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(ranks, family, options, match):
    _, path = family("llama")

    def rank(info):
        with Coordinator(info, timeout_s=40) as coor, pytest.raises(PlanError, match=match):
            drumline.load(path, coor=coor, **options)

    ranks(rank, 4)
