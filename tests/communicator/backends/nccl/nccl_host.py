"""A second reader of communicator.h, for tests: calls our NCCL plugin through the bare C table."""

import ctypes
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
PLUGIN = HERE.parents[3] / "communicator" / "backends" / "nccl" / "_nccl.abi3.so"

ENTRIES = """
    probe init destroy allreduce last_error get_unique_id broadcast reduce allgather reduce_scatter
    alltoall send recv barrier group_start group_end abort async_error mem_alloc mem_free
    premul_sum_create op_destroy split finalize
""".split()  # noqa: SIM905

STREAM = 0x5EED


class Table(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("abi_major", ctypes.c_uint32),
        ("abi_minor", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
        ("version", ctypes.c_char_p),
        ("device_type", ctypes.c_int32),
        ("unique_id_bytes", ctypes.c_uint32),
        ("caps", ctypes.c_uint64),
        *((entry, ctypes.c_void_p) for entry in ENTRIES),
    ]


class InitArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("rank", ctypes.c_int32),
        ("nranks", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("timeout_ms", ctypes.c_int32),
        ("name", ctypes.c_char_p),
        ("unique_id", ctypes.c_void_p),
        ("unique_id_bytes", ctypes.c_size_t),
        ("bootstrap", ctypes.c_void_p),
        ("options", ctypes.POINTER(ctypes.c_char_p)),
    ]


def compile_stand_in(folder: Path, *defines: str, name: str = "libnccl_stand_in.so") -> Path:
    """The stand-in for libnccl, built as -D says."""
    path = folder / name
    source = HERE / "nccl_stand_in.c"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(
        ["gcc", *flags, *(f"-D{define}" for define in defines), str(source), "-o", str(path)],
        check=True,
    )
    return path


class Host:
    """One communicator of our plugin, whose NCCL is the library at path. Rank 0, alone inside.

    mode: RTLD_GLOBAL lets the stand-in's CUDA functions be found too, by the whole process.
    """

    def __init__(
        self,
        path: Path | str,
        *options: str,
        nranks: int = 4,
        timeout_ms: int = 1000,
        device: int = 0,
        mode: int = ctypes.RTLD_LOCAL,
    ):
        self.stand_in = ctypes.CDLL(str(path), mode=mode)
        plugin = ctypes.CDLL(str(PLUGIN))
        plugin.comm_plugin_entry_v1.restype = ctypes.POINTER(Table)
        self.table = plugin.comm_plugin_entry_v1().contents
        self.comm = ctypes.c_void_p()
        texts = [f"library={path}".encode(), *(option.encode() for option in options), None]
        unique_id = bytes(255 - i for i in range(128))
        args = InitArgs(
            ctypes.sizeof(InitArgs), 0, nranks, device, timeout_ms, b"", None, 128, None, None
        )
        args.unique_id = ctypes.cast(ctypes.c_char_p(unique_id), ctypes.c_void_p)
        args.options = (ctypes.c_char_p * len(texts))(*texts)
        self.code = self.function("init")(ctypes.byref(self.comm), ctypes.byref(args))

    def function(self, entry: str):
        address = getattr(self.table, entry)
        restype = ctypes.c_char_p if entry == "last_error" else ctypes.c_int32
        return ctypes.CFUNCTYPE(restype)(address)

    def call(self, entry: str, *values) -> int:
        """The result of an entry. Numbers go as 64 bits, which every argument fits in."""
        wide = [ctypes.c_uint64(value) if isinstance(value, int) else value for value in values]
        return self.function(entry)(self.comm, *wide)

    def log(self) -> list[str]:
        """What the stand-in was asked since the last time."""
        self.stand_in.stand_in_log.restype = ctypes.c_char_p
        lines = self.stand_in.stand_in_log().decode().splitlines()
        self.stand_in.stand_in_forget()
        return lines

    @property
    def error(self) -> str:
        return self.function("last_error")(self.comm).decode()

    @property
    def config(self) -> bytes:
        self.stand_in.stand_in_config.restype = ctypes.POINTER(ctypes.c_ubyte)
        return bytes(self.stand_in.stand_in_config()[:256])
