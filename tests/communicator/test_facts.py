"""What `python -m launcher doctor` asks of the backends."""

from communicator import facts
from communicator.tcp import Tcp
from launcher import doctor_floors, launch


def told(name):
    return launch(facts.checked, 2, launcher="threads", args=(name,))[0]


def test_a_backend_that_conforms_is_told_with_the_number_of_cases():
    verdict, text = told("shm")
    assert verdict == facts.CONFORMS and "passed" in text and "0 FAILED" in text


def test_a_backend_that_cannot_be_used_here_is_told_with_its_reason_alone():
    verdict, text = told("hybrid")
    assert verdict == facts.UNUSABLE and text.startswith("2 ranks on 1 nodes")


def test_a_backend_that_lies_fails(monkeypatch):
    def flipped(self, out, tensor):
        plain(self, out, tensor)
        out.copy_(out.flip(0))

    plain = Tcp._allgather
    monkeypatch.setattr(Tcp, "_allgather", flipped)
    assert told("tcp")[0] == facts.FAILS


def test_the_doctor_knows_the_words():
    assert (facts.CONFORMS, facts.FAILS) == (doctor_floors.CONFORMS, doctor_floors.FAILS)
