"""Visible GPUs and their assignment to ranks."""

from __future__ import annotations

import sys
import types

import pytest

from launcher.system import gpus

A, B, C = "GPU-aaaa", "GPU-aabb", "GPU-cc"


class FakeNvmlError(Exception):
    pass


def driver(*devices, with_mig=()):
    """A fake pynvml of a machine with these GPUs, those in with_mig as two instances each."""
    names = dict(enumerate(devices))

    def instance(handle, index):
        if index > 1:
            raise FakeNvmlError
        return f"MIG-{names[handle]}-{index}"

    return types.SimpleNamespace(
        NVML_DEVICE_MIG_ENABLE=1,
        NVMLError=FakeNvmlError,
        NVMLError_NotSupported=FakeNvmlError,
        NVMLError_NotFound=FakeNvmlError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(devices),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: names.get(handle, handle),
        nvmlDeviceGetMigMode=lambda handle: (int(names[handle] in with_mig), 0),
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=instance,
    )


@pytest.fixture
def three_gpus(monkeypatch, tmp_path):
    """Pretend that there are three GPUs, the last of them with MIG."""
    (tmp_path / "driver").touch()
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "driver")
    monkeypatch.setitem(sys.modules, "pynvml", driver(A, B, C, with_mig=(C,)))


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [A, B, f"MIG-{C}-0", f"MIG-{C}-1"]),
        ("", []),
        ("1,0", [B, A]),
        ("0,-1,1", [A]),
        ("0,7,1", [A]),
        ("GPU-aab, 0", [B, A]),
        ("GPU-aa", []),
        (f"MIG-{C}-1", [f"MIG-{C}-1"]),
        ("nonsense", []),
        ("²", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(three_gpus, setting, expected):
    environ = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    assert [device.uuid for device in gpus.visible(environ)] == expected


def test_ranks_share_a_gpu_only_with_share(three_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert gpus.for_ranks(3, share=False) == {0: {"device": A}, 1: {"device": B}}
    shared = gpus.for_ranks(3, share=True)
    assert shared == {0: {"device": A}, 1: {"device": B}, 2: {"device": A}}


@pytest.mark.parametrize(("setting", "expected"), [("1", True), ("0,1,2", True), (None, False)])
def test_a_process_is_restricted_if_it_sees_fewer_gpus_than_there_are(
    three_gpus, monkeypatch, setting, expected
):
    """The instances of the third are GPUs of their own, so three numbers are fewer."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert gpus.is_restricted() == expected


def test_a_machine_without_a_gpu_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "none")
    assert gpus.visible() == [] and gpus.for_ranks(2, share=True) == {}
    assert not gpus.is_restricted()


def test_a_driver_that_does_not_answer_is_an_error_and_none_where_no_gpu_is_wanted(
    three_gpus, monkeypatch
):
    """Every launch ended with a traceback, also with CUDA_VISIBLE_DEVICES set to nothing."""

    def mismatched():
        raise FakeNvmlError("Driver/library version mismatch")

    monkeypatch.setattr(sys.modules["pynvml"], "nvmlInit", mismatched)
    assert gpus.visible({"CUDA_VISIBLE_DEVICES": ""}) == [] and gpus.used_nbytes() == {}
    with pytest.raises(OSError, match=r"version mismatch.*nvidia-smi"):
        gpus.visible({})
