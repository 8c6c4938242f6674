"""What `python -m launcher doctor` asks of the backends."""

from communicator import backend_info
from communicator.backends.tcp import Tcp
from launcher import launch
from launcher.doctor import layer_checks


def status_of(name):
    return launch(backend_info.check_on_rank, 2, launcher="threads", args=(name,))[0]


def test_a_conforming_backend_is_reported_with_its_number_of_cases():
    verdict, text = status_of("shm")
    assert verdict == backend_info.CONFORMS and "passed" in text and "0 FAILED" in text


def test_an_unusable_backend_is_reported_with_its_reason_alone():
    verdict, text = status_of("hybrid")
    assert verdict == backend_info.UNUSABLE and text.startswith("2 ranks on 1 nodes")


def test_a_backend_that_lies_fails(monkeypatch):
    def flipped(self, out, tensor):
        plain(self, out, tensor)
        out.copy_(out.flip(0))

    plain = Tcp.allgather
    monkeypatch.setattr(Tcp, "allgather", flipped)
    assert status_of("tcp")[0] == backend_info.FAILS


def test_the_doctor_knows_the_words():
    assert (backend_info.CONFORMS, backend_info.FAILS) == (
        layer_checks.CONFORMS,
        layer_checks.FAILS,
    )
