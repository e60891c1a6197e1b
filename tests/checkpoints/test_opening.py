"""Tests of opening each kind of checkpoint: intact, sharded, damaged, or no checkpoint at all."""

import io
import json
import os
import pickle
import random
import shutil
import struct
import sys
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import float8lab
from float8lab import __main__ as command
from float8lab.checkpoints.opening import open_checkpoint
from float8lab.checkpoints.safetensors import SPECS_KEY
from float8lab.inspect import checkpoint

safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra 'inspect'")


def dcp_save(state, path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=path, no_dist=True)


def fp8_state(rows=256):
    x = float8lab.quantize(torch.randn(rows, 256), block=(128, 128))
    return {"a.weight": x.qdata, "a.weight_scale_inv": x.scale, "a.bias": torch.randn(rows)}


def assert_same_rows(report, expected):
    """Assert that two reports say the same of their tensors, whatever file these are in."""
    rows, expected_rows = (
        {row.name: row for row in each_report.rows} for each_report in (report, expected)
    )
    assert rows.keys() == expected_rows.keys()
    for name, row in rows.items():
        assert row.measured == expected_rows[name].measured
        assert row.format == expected_rows[name].format


@pytest.fixture
def expected(tmp_path):
    """Return a state and the report on one safetensors file of it."""
    state = fp8_state()
    safetensors.save_file(state, tmp_path / "expected.safetensors")
    return state, checkpoint(tmp_path / "expected.safetensors")


def test_sharded_safetensors_have_the_rows_of_one_file(tmp_path, expected):
    state, report = expected
    folder = tmp_path / "sharded"
    folder.mkdir()
    weight_map = {}
    for i, (name, value) in enumerate(state.items()):
        safetensors.save_file({name: value}, folder / f"model-{i}.safetensors")
        weight_map[name] = f"model-{i}.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    report_found = checkpoint(folder)
    assert_same_rows(report_found, report)
    assert report_found.container == "safetensors, 3 files"
    assert_same_rows(checkpoint(folder / "model.safetensors.index.json"), report)
    (folder / "model.safetensors.index.json").unlink()
    assert_same_rows(checkpoint(folder), report)
    assert checkpoint(folder / "model-2.safetensors").rows[0].name == "a.bias"


def test_a_tensor_missing_from_the_index_is_noted(tmp_path):
    safetensors.save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "m.safetensors")
    index = {"weight_map": {"a": "m.safetensors"}}
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index))
    report = checkpoint(tmp_path)
    assert report.notes == ("m.safetensors.index.json does not name b, which is in m.safetensors",)
    assert "note: m.safetensors" in str(report)


@pytest.mark.parametrize("zip_format", [True, False], ids=["zip", "legacy"])
def test_torch_save_has_the_rows_of_safetensors(tmp_path, expected, zip_format):
    state, report = expected
    # torch cannot load FP8 tensors from the old format.
    if not zip_format:
        state = {"a.bias": state["a.bias"]}
    saved = tmp_path / "a.pt"
    torch.save({**state, "epoch": 3}, saved, _use_new_zipfile_serialization=zip_format)
    report_found = checkpoint(saved)
    if zip_format:
        assert_same_rows(report_found, report)
    bias, expected_bias = (
        {row.name: row for row in each_report.rows}["a.bias"]
        for each_report in (report_found, report)
    )
    assert bias.measured == expected_bias.measured
    assert report_found.container == ("torch.save" if zip_format else "torch.save, old format")
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(saved, folder / "pytorch_model.bin")
    assert str(checkpoint(folder)).splitlines()[1:] == str(report_found).splitlines()[1:]


def test_nested_states_of_torch_save_have_dotted_names(tmp_path):
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a")
    names = [row.name for row in checkpoint(tmp_path / "a").rows]
    assert names[:2] == ["model.weight", "model.bias"]
    assert "optimizer.state.0.exp_avg" in names
    torch.save(torch.ones(3), tmp_path / "b.pt")
    assert [row.name for row in checkpoint(tmp_path / "b.pt").rows] == ["tensor"]


def test_dcp_has_the_rows_of_safetensors(tmp_path, expected):
    state, report = expected
    dcp_save({**state, "epoch": 3}, tmp_path / "dcp")
    report_found = checkpoint(tmp_path / "dcp")
    assert_same_rows(report_found, report)
    assert report_found.container == "torch.distributed.checkpoint, 1 file"
    assert_same_rows(checkpoint(tmp_path / "dcp" / ".metadata"), report)


@pytest.mark.parametrize("kind", ["model", "plain", "dcp"])
def test_fp8_weights_of_a_module_have_one_row_each(tmp_path, kind):
    recipe = float8lab.recipes.Float8BlockScaling()
    with float8lab.fp8_model_init(recipe=recipe):
        layer = float8lab.Linear(256, 384, device="cpu")
    if kind == "plain":
        torch.save(layer.state_dict(), tmp_path / "a.pt")
    elif kind == "model":
        torch.save(float8lab.distributed.ModelState(layer).state_dict(), tmp_path / "a.pt")
    else:
        dcp_save({"m": float8lab.distributed.ModelState(layer)}, tmp_path / "a.pt")
    rows = {row.name.removeprefix("m."): row for row in checkpoint(tmp_path / "a.pt").rows}
    weight = layer.weight.stats()
    assert set(rows) >= {"weight", "bias"}
    assert rows["weight"].measured.stats.codes == weight.codes
    assert rows["weight"].measured.stats.scale_max == weight.scale_max
    assert rows["weight"].convention == "float8lab"
    assert not any(name.endswith((".amax", ".scale", ".qdata")) for name in rows)


def test_a_float8_tensor_in_dcp_has_one_row(tmp_path):
    x = float8lab.quantize(torch.randn(256, 256), block=(128, 128))
    dcp_save({"w": x}, tmp_path / "dcp")
    (row,) = checkpoint(tmp_path / "dcp").rows
    assert (row.name, row.format) == ("w", "e4m3 128x128 fp32")
    assert row.measured.stats.codes == x.stats().codes


def write_shards(folder, name, value, shards):
    """Write a checkpoint in which each shard of a tensor has its own file, as ranks write it."""
    folder.mkdir()
    chunks, storage_infos = [], {}
    for i, (offsets, part) in enumerate(shards):
        buffer = io.BytesIO()
        torch.save(part, buffer)
        (folder / f"__{i}_0.distcp").write_bytes(b"before" + buffer.getvalue() + b"after")
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), part.shape))
        index = MetadataIndex(name, torch.Size(offsets), i)
        storage_infos[index] = _StorageInfo(f"__{i}_0.distcp", 6, len(buffer.getvalue()))
    stored = TensorStorageMetadata(TensorProperties(value.dtype), value.shape, chunks)
    metadata = Metadata({name: stored}, storage_data=storage_infos)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_dcp_shards_of_several_ranks_are_joined(tmp_path, dtype):
    value = torch.randn(70, 40).to(dtype)
    shards = [
        ((0, 0), value[:33].clone()),
        ((33, 0), value[33:, :15].t().contiguous().t()),  # has the strides of a transpose
        ((33, 15), value[33:, 15:].clone()),
    ]
    write_shards(tmp_path / "dcp", "a", value, shards)
    (entry,) = open_checkpoint(tmp_path / "dcp").entries
    bits = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[value.element_size()]
    for box in [
        (slice(0, 70), slice(0, 40)),
        (slice(30, 36), slice(10, 20)),
        (slice(40, 41), slice(39, 40)),
    ]:
        assert torch.equal(entry.read(box).contiguous().view(bits), value[box].clone().view(bits))


# Files that are no checkpoint. Each command prints one line and returns status 2.


def assert_refused(path, capsys, match=""):
    """Assert that both commands print one matching line on standard error and return status 2."""
    for arguments in (["inspect", str(path)], ["diff", str(path), str(path)]):
        assert command.main(arguments) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.count("\n") == 1, output.err
        assert output.err.startswith(f"python -m float8lab {arguments[0]}: error: ")
        assert output.err[:-1].isprintable()
        assert match in output.err


CONTENTS = {
    "empty": (b"", "it is empty"),
    "one byte": (b"\x00", "it is none"),
    "random": (random.Random(0).randbytes(5000), "it is none"),
    "text": (b"hello, this is no checkpoint at all\n" * 20, "it is none"),
    "GGUF": (b"GGUF\x03\0\0\0" + bytes(100), "it is a GGUF file"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(100), "it is an HDF5 file"),
    "numpy": (b"\x93NUMPY\x01\0" + bytes(100), "it is a numpy array"),
    "gzip": (b"\x1f\x8b" + bytes(100), "compressed by gzip"),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
    "zip": (b"PK\x05\x06" + bytes(18), "damaged"),
    "header length": (struct.pack("<Q", 2**40) + b"{}" * 50, "it is none"),
    "header cut": (struct.pack("<Q", 1000) + b'{"a":', "not: Error while deserializing"),
    "header no JSON": (struct.pack("<Q", 8) + b"{xxxxxx}", "not: Error while deserializing"),
    "old pickle": (pickle.dumps({"a": 1}, protocol=2), "damaged"),
}


@pytest.mark.parametrize("content", CONTENTS)
def test_files_that_are_no_checkpoint_are_refused(tmp_path, capsys, content):
    data, match = CONTENTS[content]
    for suffix in ("", ".safetensors", ".pt", ".bin"):
        (tmp_path / f"file{suffix}").write_bytes(data)
        assert_refused(tmp_path / f"file{suffix}", capsys, "" if suffix else match)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
@pytest.mark.parametrize(
    "name", ["a.safetensors", "a.pt", "a", ".metadata", "model.safetensors.index.json"]
)
def test_pipes_are_refused_without_waiting(tmp_path, capsys, name):
    os.mkfifo(tmp_path / name)
    assert_refused(tmp_path / name, capsys, f"{name} must be a file; it is a pipe")
    if name != "a":
        assert_refused(tmp_path, capsys, f"{name} must be a file; it is a pipe")


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="needs /dev/zero")
def test_devices_are_refused(capsys):
    assert_refused("/dev/zero", capsys, "/dev/zero must be a file")


def test_safetensors_without_tensors_is_refused(tmp_path, capsys):
    safetensors.save_file({}, tmp_path / "a.safetensors")
    assert_refused(tmp_path / "a.safetensors", capsys, "must hold tensors; it holds none")
    assert_refused(tmp_path, capsys, "must hold tensors; it holds none")


def test_blocks_with_another_number_of_dimensions_are_refused(tmp_path, capsys):
    specs = json.dumps({"a": ["float8_e4m3fn", [1, 128], "fp32"]})
    tensor = torch.ones(4, 2, 8).to(torch.float8_e4m3fn)
    safetensors.save_file({"a": tensor}, tmp_path / "a.safetensors", {SPECS_KEY: specs})
    assert_refused(
        tmp_path / "a.safetensors", capsys, "one block size for each dimension of a, (4, 2, 8)"
    )


@pytest.mark.parametrize("size", [2**40, 10**400])
def test_a_block_larger_than_memory_is_the_whole_dimension(tmp_path, size):
    specs = json.dumps({"a": ["float8_e4m3fn", [size, -1], "fp32"]})
    tensors = {"a.qdata": torch.ones(4, 8).to(torch.float8_e4m3fn), "a.scale": torch.ones(1, 1)}
    safetensors.save_file(tensors, tmp_path / "a.safetensors", {SPECS_KEY: specs})
    (row,) = checkpoint(tmp_path / "a.safetensors").rows
    assert row.measured.stats.amax == 1.0
    assert float8lab.inspect.diff(tmp_path, tmp_path).identical


def test_a_tensor_with_too_many_dimensions_is_refused(tmp_path, capsys):
    safetensors.save_file({"a": torch.ones([1] * 900)}, tmp_path / "a.safetensors")
    assert_refused(tmp_path / "a.safetensors", capsys, "at most 64 dimensions; a has 900")


def test_an_archive_with_a_damaged_directory_is_refused(tmp_path, capsys):
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(2)}, path)
    content = path.read_bytes()
    # The locator of the 64-bit directory: it now spans two disks.
    locator = content.rindex(b"PK\x06\x07")
    path.write_bytes(content[: locator + 16] + b"\x02" + content[locator + 17 :])
    assert_refused(path, capsys, "damaged")


def test_empty_and_missing_paths_are_refused(tmp_path, capsys):
    assert_refused("", capsys, "must be a path; got an empty one")
    assert_refused(tmp_path / "none", capsys, "No such file or directory")
    assert_refused(tmp_path / "none" / "model.safetensors", capsys, "No such file or directory")


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "dcp"])
def test_a_file_without_read_permission_is_refused(tmp_path, capsys, monkeypatch, name):
    """Simulates the missing permission: root may read files whose mode forbids it."""
    state = fp8_state()
    if name == "dcp":
        dcp_save(state, tmp_path / name)
    else:
        save = torch.save if name == "a.pt" else safetensors.save_file
        save(state, tmp_path / name)

    def deny(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    for method in ("open", "read_bytes"):
        monkeypatch.setattr(type(tmp_path), method, deny)
    assert_refused(tmp_path / name, capsys, "Permission denied")


def test_a_model_id_opens_the_hugging_face_cache(tmp_path, capsys, monkeypatch):
    """A model id is looked up in the cache, without any network request."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "models--org--Model-1.5"
    snapshot = folder / "snapshots" / "0123abc"
    for directory in (snapshot, folder / "refs", folder / "blobs"):
        directory.mkdir(parents=True)
    (folder / "refs" / "main").write_text(snapshot.name)
    safetensors.save_file({"w": torch.ones(2)}, folder / "blobs" / "5af3")
    (snapshot / "model.safetensors").symlink_to("../../blobs/5af3")  # links as in the cache
    assert [row.name for row in checkpoint("org/Model-1.5").rows] == ["w"]
    assert_refused("org/Model-2", capsys, "or the id of a model in the Hugging Face cache")
    assert_refused("org/model.pt", capsys, "No such file or directory")
    assert_refused("snapshots/../a", capsys, "No such file or directory")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert_refused(
        "org/Model-1.5", capsys, "needs huggingface_hub; it is not installed. pip install"
    )


def test_a_directory_without_one_checkpoint_is_refused(tmp_path, capsys):
    assert_refused(tmp_path, capsys, "it has none")
    (tmp_path / "config.json").write_text("{}")
    assert_refused(tmp_path, capsys, "it has none")
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    assert_refused(tmp_path, capsys, "must have .metadata beside its .distcp files")
    (tmp_path / "a.pt").write_bytes(b"")
    (tmp_path / "b.pt").write_bytes(b"")
    assert_refused(tmp_path, capsys, "Name one of them")


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ('{"weight_map": {"a": "other.safetensors"}}', "must exist"),
        ('{"weight_map": {"a": "m.safetensors", "b": "m.safetensors"}}', "must hold b"),
        ('{"weight_map": {"a": "../m.safetensors"}}', "must name a file beside it"),
        ('{"weight_map": {"a": 3}}', "must name a file beside it"),
        ('{"weight_map": {}}', "it has none"),
        ('{"weight_map": []}', "it has none"),
        ("[]", "it has none"),
        ("{", "must hold JSON"),
        ("[" * 100_000, "must hold JSON"),
        ("\xff", "must hold JSON"),
    ],
)
def test_invalid_indices_are_refused(tmp_path, capsys, index, match):
    safetensors.save_file({"a": torch.ones(2)}, tmp_path / "m.safetensors")
    (tmp_path / "m.safetensors.index.json").write_bytes(index.encode("latin1"))
    assert_refused(tmp_path, capsys, match)
    assert_refused(tmp_path / "m.safetensors.index.json", capsys, match)


def test_a_tensor_in_two_files_is_refused(tmp_path, capsys):
    for name in ("a", "b"):
        safetensors.save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    assert_refused(tmp_path, capsys, "must hold each tensor once; w is in a.safetensors")


def test_two_indices_are_refused(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    assert_refused(tmp_path, capsys, "must have one index")


def test_checkpoints_without_tensors_are_refused(tmp_path, capsys):
    torch.save({"epoch": 3}, tmp_path / "a.pt")
    assert_refused(tmp_path / "a.pt", capsys, "must hold tensors; it holds a dict without any")
    dcp_save({"epoch": 3}, tmp_path / "dcp")
    assert_refused(tmp_path / "dcp", capsys, "must hold tensors")


class FileOpener:
    """Opens a file for writing when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle", "dcp metadata", "dcp data"])
def test_pickled_code_is_not_run(tmp_path, capsys, kind):
    path, trace = tmp_path / "a.pt", tmp_path / "trace"
    state = {"w": torch.ones(2), "code": FileOpener(trace)}
    if kind in ("zip", "legacy"):
        torch.save(state, path, _use_new_zipfile_serialization=kind == "zip")
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(state, protocol=2))
    elif kind == "dcp metadata":
        dcp_save({"w": torch.ones(2)}, path)
        (path / ".metadata").write_bytes(pickle.dumps(FileOpener(trace)))
    else:
        write_shards(path, "w", torch.ones(2), [((0,), torch.ones(2))])
        buffer = io.BytesIO()
        torch.save(FileOpener(trace), buffer)
        size = (path / "__0_0.distcp").stat().st_size
        content = b"before" + buffer.getvalue()
        (path / "__0_0.distcp").write_bytes(content + bytes(max(0, size - len(content))))
    assert_refused(path, capsys, {"zip": "io.open", "dcp metadata": "io.open"}.get(kind, ""))
    assert not trace.exists()


def test_a_pickled_module_is_refused_with_advice(tmp_path, capsys):
    torch.save(nn.Linear(2, 2), tmp_path / "a.pt")
    assert_refused(tmp_path / "a.pt", capsys, "torch.save its state_dict() alone")
