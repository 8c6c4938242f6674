"""The benchmark of the server: what it asks, and what it says of a server that does not start."""

import argparse
import asyncio
import json
import sys

import numpy as np
import pytest

from benchmarks import llama_cpp, serve

CHUNKS = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    *[{"choices": [{"delta": {"content": f"{n} "}}]} for n in range(3)],
    {"choices": [], "usage": {"completion_tokens": 3}},
]


async def answer(reader, writer):
    """A stream of three tokens, whatever is asked."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
    assert json.loads(await reader.readexactly(length))["stream"]
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    for chunk in CHUNKS:
        writer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await writer.drain()
        await asyncio.sleep(0.001)
    writer.close()


def test_every_server_has_a_row_for_each_number_of_clients(capsys):
    options = argparse.Namespace(
        clients=[1, 2], new_tokens=3, prefix=9, long=12, head_start=0, repeats=1, save=False
    )

    async def measure():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            names = (*serve.OURS, serve.PEER, "another")
            await serve.measure([serve.Server(name, port, "m", {}) for name in names], options)

    asyncio.run(measure())
    output = capsys.readouterr().out
    assert [output.count(name) for name in (*serve.OURS, "another")] == [3, 3, 3]


def test_a_server_that_does_not_start_is_told_of_with_what_it_printed():
    """Its port refused connections, and nobody saw that a package was missing."""
    command = f"{sys.executable} -c 'raise SystemExit(\"no such package\")' {{folder}} {{port}}"
    told = pytest.raises(SystemExit, match=r"(?s)peer does not answer: .*no such package")
    with told, serve._running("peer", command, "a folder", "m", {}):
        pass


def test_a_file_of_llama_cpp_keeps_all_but_the_kind_of_its_weights(tmp_path):
    gguf = pytest.importorskip("gguf")
    weights = np.random.default_rng(0).standard_normal((4, 64), dtype=np.float32)
    few_bits = gguf.quantize(weights, gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "few_bits.gguf", "llama")
    writer.add_block_count(3)
    writer.add_file_type(7)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("output.weight", few_bits, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    llama_cpp.write(writer)
    llama_cpp.write_float_gguf(tmp_path / "few_bits.gguf", tmp_path / "float.gguf")
    written = gguf.GGUFReader(tmp_path / "float.gguf")
    kept = {name: known.contents() for name, known in written.fields.items()}
    assert kept["llama.block_count"] == 3 and kept["tokenizer.ggml.tokens"] == ["a", "b"]
    (tensor,) = written.tensors
    assert "general.file_type" not in kept and tensor.data.dtype == np.float32
    assert np.array_equal(tensor.data, gguf.dequantize(few_bits, gguf.GGMLQuantizationType.Q8_0))
