"""Tests of written checkpoints: readable by safetensors, sharded with an index, never partial."""

import json
import os
import tracemalloc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import float8lab
from float8lab.checkpoints import safetensors as writing
from float8lab.checkpoints.replacing import leftovers
from float8lab.checkpoints.safetensors import Group, NewTensor, write_checkpoint
from float8lab.inspect import CheckpointError
from float8lab.integrations import export, load_fp8
from tests.integrations.checkpoint.test_exporting import read_safetensors

safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra 'inspect'")


def group(name, tensor, notes=None):
    new_tensor = NewTensor(name, tensor.dtype, tuple(tensor.shape))
    return Group((new_tensor,), lambda: [tensor], notes or {})


def write(path, tensors, max_shard_size=1 << 30):
    groups = [group(name, tensor) for name, tensor in tensors.items()]
    return write_checkpoint(path, groups, {"a": 1}, max_shard_size=max_shard_size)


TENSORS = {
    "fp8": torch.randn(5, 3).to(torch.float8_e4m3fn), "odd": torch.arange(7, dtype=torch.uint8),
    "e5m2": torch.randn(3).to(torch.float8_e5m2), "wide": torch.randn(2, 2, dtype=torch.float64),
    "bf16": torch.randn(3, 3).bfloat16(), "strided": torch.randn(4, 6).t(),
    "scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "flags": torch.tensor([True, False]),
    "whole": torch.arange(5),
}  # fmt: skip


@pytest.mark.parametrize("max_shard_size", [1, 40, 1 << 30])
def test_safetensors_reads_the_written_files(tmp_path, max_shard_size):
    files = write(tmp_path / "out", TENSORS, max_shard_size)
    state = read_safetensors(tmp_path / "out")
    assert state.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert state[name].dtype == value.dtype
        assert state[name].shape == value.shape
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (state[name], value)]
        assert torch.equal(*raw)
    assert (len(files) == 1) == (max_shard_size == 1 << 30)
    index = tmp_path / "out" / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1)
    if len(files) > 1:
        content = json.loads(index.read_text())
        for name, file in content["weight_map"].items():
            assert name in safetensors.load_file(tmp_path / "out" / file)
        sizes = [v.numel() * v.element_size() for v in TENSORS.values()]
        assert content["metadata"]["total_size"] == sum(sizes)


def test_shards_are_those_of_huggingface_hub(tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 40, (50,), generator=generator).tolist()
    tensors = {f"t{index}": torch.zeros(size) for index, size in enumerate(sizes)}
    for max_shard_size in (160, 500, 4000):
        split = hub.split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_size)
        files = write(tmp_path / f"{max_shard_size}", tensors, max_shard_size)
        assert files == list(split.filename_to_tensors)
        for file, names in split.filename_to_tensors.items():
            assert safetensors.load_file(tmp_path / f"{max_shard_size}" / file).keys() == set(names)


def test_two_tensors_are_in_memory_at_most(tmp_path):
    created, number_alive, most_alive = [], [0], [0]

    def tensor_maker(index):
        def make_tensor():
            tensor = torch.zeros(1 << 16)
            number_alive[0] += 1
            most_alive[0] = max(most_alive[0], number_alive[0])
            created.append(index)
            weakref.finalize(tensor, lambda: number_alive.__setitem__(0, number_alive[0] - 1))
            return [tensor]

        return make_tensor

    shape = (1 << 16,)
    groups = [Group((NewTensor(f"t{i}", torch.float32, shape),), tensor_maker(i)) for i in range(8)]
    tracemalloc.start()
    write_checkpoint(tmp_path / "out", groups, {}, max_shard_size=3 << 18)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert created == list(range(8))
    assert most_alive[0] <= 2  # the next tensor is created before the last is released
    assert peak < 1 << 18  # nothing is copied into Python's memory
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3


def constant_model(value, features=32):
    layer = nn.Sequential(nn.Linear(features, 16), nn.Linear(16, features, bias=False))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(value)
    return layer


def stored_value(path):
    layer = constant_model(0.0)
    load_fp8(path, layer, dequantize=True)
    values = {float(p.detach().view(-1)[0]) for p in layer.parameters()}
    assert len(values) == 1
    return values.pop()


class Crash(Exception):
    pass


def intercept_file_calls(monkeypatch, call_number, action):
    """Run ``action`` before the file operation of this number; return the counter of calls."""
    calls = [0]

    def counting(function):
        def counted_call(*arguments, **keywords):
            calls[0] += 1
            if calls[0] == call_number:
                action()
            return function(*arguments, **keywords)

        return counted_call

    monkeypatch.setattr(writing, "_write", counting(writing._write))
    monkeypatch.setattr(writing.os, "fsync", counting(os.fsync))
    monkeypatch.setattr(writing.os, "rename", counting(os.rename))
    monkeypatch.setattr(writing.os, "replace", counting(os.replace))
    monkeypatch.setattr(writing.shutil, "copy2", counting(writing.shutil.copy2))
    monkeypatch.setattr(writing.shutil, "rmtree", counting(writing.shutil.rmtree))
    return calls


def raise_crash():
    raise Crash


@pytest.mark.parametrize("replaces", [False, True])
def test_an_error_at_any_point_leaves_no_partial_checkpoint(tmp_path, replaces):
    path = tmp_path / "out"
    crashes = 0
    for call_number in range(1, 100):
        if path.exists():
            writing.shutil.rmtree(path)
        if replaces:
            export(constant_model(1.0), path, "float8lab")
            (path / "tokenizer.json").write_text("{}")
        with pytest.MonkeyPatch.context() as patch:
            calls = intercept_file_calls(patch, call_number, raise_crash)
            try:
                export(constant_model(2.0), path, "float8lab", max_shard_size=600, overwrite=True)
            except Crash:
                crashes += 1
            finished = calls[0] < call_number
        if finished:
            break
        if path.exists():
            assert stored_value(path) in ((1.0, 2.0) if replaces else (2.0,))
        else:
            assert not replaces
        for leftover in leftovers(path):
            assert leftover.suffix == ".old"  # complete, but not yet removed
            assert stored_value(leftover) == 1.0
            writing.shutil.rmtree(leftover)
    assert finished
    assert crashes == call_number - 1
    assert crashes > 15
    assert stored_value(path) == 2.0
    assert (path / "tokenizer.json").exists() == replaces
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("replaces", [False, True])
def test_a_crash_at_any_point_leaves_no_partial_checkpoint(tmp_path, replaces):
    """The process ends at once, so nothing is cleaned up."""
    between_renames = 0
    for call_number in range(1, 100):
        path = tmp_path / str(call_number) / "out"
        if replaces:
            export(constant_model(1.0), path, "float8lab")
        child = os.fork()
        if child == 0:
            patch = pytest.MonkeyPatch()
            intercept_file_calls(patch, call_number, lambda: os._exit(7))
            export(constant_model(2.0), path, "float8lab", max_shard_size=600, overwrite=True)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 7)
        if status == 0:
            break
        if path.exists():
            assert stored_value(path) in ((1.0, 2.0) if replaces else (2.0,))
        else:
            with pytest.raises(FileNotFoundError, match="write was interrupted"):
                load_fp8(path, constant_model(0.0))
        for leftover in leftovers(path):
            if leftover.suffix == ".old":
                assert stored_value(leftover) == 1.0
                between_renames += not path.exists()
            else:
                with pytest.raises(CheckpointError, match=r"interrupted|whole"):
                    load_fp8(leftover, constant_model(0.0))
    assert status == 0
    assert between_renames == (1 if replaces else 0)  # a crash between the two renames
    assert stored_value(path) == 2.0


def test_shards_without_an_index_load_only_if_complete(tmp_path):
    export(constant_model(2.0), tmp_path / "out", max_shard_size=600)
    (tmp_path / "out" / "model.safetensors.index.json").unlink()
    first = min((tmp_path / "out").glob("*.safetensors"))
    assert stored_value(tmp_path / "out") == 2.0  # all shards are there
    first.unlink()
    with pytest.raises(CheckpointError, match="must have all of"):
        load_fp8(tmp_path / "out", constant_model(0.0))


def test_a_truncated_file_is_an_error(tmp_path):
    export(constant_model(2.0), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    content = file.read_bytes()
    layer = constant_model(1.0)
    for size in (0, 5, 40, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            load_fp8(tmp_path / "out", layer)
    assert all(bool((p == 1.0).all()) for p in layer.parameters())


def test_a_read_only_folder_is_not_overwritten(tmp_path, monkeypatch):
    export(constant_model(1.0), tmp_path / "out")
    # The answer for a user who is not root.
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(FileExistsError, match="out is read-only"):
        export(constant_model(2.0), tmp_path / "out", overwrite=True)
    assert stored_value(tmp_path / "out") == 1.0
    assert os.listdir(tmp_path) == ["out"]


def test_existing_files_are_not_overwritten_unless_asked(tmp_path):
    model, path = constant_model(1.0), tmp_path / "out"
    path.mkdir()
    export(model, path)  # an empty folder is free
    with pytest.raises(FileExistsError, match=r"holds config\.json and 1 more"):
        export(model, path)
    export(constant_model(2.0), path, "compressed-tensors", overwrite=True)
    assert stored_value(path) == 2.0
    other_folder = tmp_path / "mine"
    other_folder.mkdir()
    (other_folder / "thesis.tex").write_text("...")
    with pytest.raises(FileExistsError, match=r"holds no \.safetensors file"):
        export(model, other_folder, overwrite=True)
    (path / "folder").mkdir()
    with pytest.raises(FileExistsError, match="holds folder"):
        export(model, path, overwrite=True)
    with pytest.raises(FileExistsError, match="is a file"):
        export(model, other_folder / "thesis.tex", overwrite=True)
    assert stored_value(path) == 2.0


@pytest.mark.parametrize("replaces", [False, True])
def test_the_target_of_a_link_is_written(tmp_path, replaces):
    target, link = tmp_path / "models" / "v1", tmp_path / "latest"
    link.symlink_to(target)
    if replaces:
        export(constant_model(1.0), target)
    export(constant_model(2.0), link, overwrite=replaces)
    assert link.readlink() == target
    assert stored_value(target) == stored_value(link) == 2.0
    assert sorted(os.listdir(tmp_path)) == ["latest", "models"]
    assert os.listdir(tmp_path / "models") == ["v1"]


def test_old_shards_are_removed_if_there_are_fewer_new_ones(tmp_path):
    export(constant_model(1.0), tmp_path / "out", max_shard_size=600)
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    export(constant_model(2.0), tmp_path / "out", overwrite=True)
    names = sorted(entry.name for entry in (tmp_path / "out").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]


def test_the_metadata_has_the_fp8_format_of_weights(tmp_path):
    with float8lab.fp8_model_init(recipe=float8lab.recipes.Float8RowwiseScaling()):
        layer = float8lab.Linear(16, 1, bias=False, device="cpu")
    export(layer, tmp_path / "out", "float8lab")
    file = tmp_path / "out" / "model.safetensors"
    # One row: the shapes alone would mean a scale per tensor.
    row = float8lab.inspect.checkpoint(Path(tmp_path / "out")).rows[0]
    assert row.format == "e4m3 row fp32"
    with safetensors.safe_open(file, "pt") as opened_file:
        metadata = opened_file.metadata()
    assert json.loads(metadata["float8lab"]) == {"weight": ["float8_e4m3fn", [1, -1], "fp32"]}
    tensors = safetensors.load_file(file)
    for damaged in ("{", "[]", '{"weight": ["Tensor", [1], "fp32"]}', '{"weight": 3}'):
        safetensors.save_file(tensors, file, {"float8lab": damaged})
        with pytest.raises(CheckpointError, match="metadata is damaged"):
            load_fp8(tmp_path / "out", layer)
