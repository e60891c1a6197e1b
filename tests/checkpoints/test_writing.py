"""Files: readable by safetensors, sharded with an index, and whole or not there at all."""

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
from tests.integrations.checkpoint.test_exporting import read

safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra 'inspect'")


def group(name, tensor, notes=None):
    part = NewTensor(name, tensor.dtype, tuple(tensor.shape))
    return Group((part,), lambda: [tensor], notes or {})


def write(path, tensors, most=1 << 30):
    groups = [group(name, tensor) for name, tensor in tensors.items()]
    return write_checkpoint(path, groups, {"a": 1}, max_shard_size=most)


TENSORS = {
    "fp8": torch.randn(5, 3).to(torch.float8_e4m3fn), "odd": torch.arange(7, dtype=torch.uint8),
    "e5m2": torch.randn(3).to(torch.float8_e5m2), "wide": torch.randn(2, 2, dtype=torch.float64),
    "bf16": torch.randn(3, 3).bfloat16(), "strided": torch.randn(4, 6).t(),
    "scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "flags": torch.tensor([True, False]),
    "whole": torch.arange(5),
}  # fmt: skip


@pytest.mark.parametrize("most", [1, 40, 1 << 30])
def test_safetensors_reads_what_is_written(tmp_path, most):
    files = write(tmp_path / "out", TENSORS, most)
    state = read(tmp_path / "out")
    assert state.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert state[name].dtype == value.dtype
        assert state[name].shape == value.shape
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (state[name], value)]
        assert torch.equal(*raw)
    assert (len(files) == 1) == (most == 1 << 30)
    index = tmp_path / "out" / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1)
    if len(files) > 1:
        content = json.loads(index.read_text())
        for name, file in content["weight_map"].items():
            assert name in safetensors.load_file(tmp_path / "out" / file)
        sizes = [v.numel() * v.element_size() for v in TENSORS.values()]
        assert content["metadata"]["total_size"] == sum(sizes)


def test_files_are_cut_as_huggingface_hub_cuts_them(tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 40, (50,), generator=generator).tolist()
    tensors = {f"t{index}": torch.zeros(size) for index, size in enumerate(sizes)}
    for most in (160, 500, 4000):
        split = hub.split_torch_state_dict_into_shards(tensors, max_shard_size=most)
        files = write(tmp_path / f"{most}", tensors, most)
        assert files == list(split.filename_to_tensors)
        for file, names in split.filename_to_tensors.items():
            assert safetensors.load_file(tmp_path / f"{most}" / file).keys() == set(names)


def test_one_weight_is_in_memory_at_a_time(tmp_path):
    made, alive, most = [], [0], [0]

    def maker(index):
        def make():
            tensor = torch.zeros(1 << 16)
            alive[0] += 1
            most[0] = max(most[0], alive[0])
            made.append(index)
            weakref.finalize(tensor, lambda: alive.__setitem__(0, alive[0] - 1))
            return [tensor]

        return make

    part = (1 << 16,)
    groups = [Group((NewTensor(f"t{i}", torch.float32, part),), maker(i)) for i in range(8)]
    tracemalloc.start()
    write_checkpoint(tmp_path / "out", groups, {}, max_shard_size=3 << 18)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert made == list(range(8))
    assert most[0] <= 2  # the next is made before the last is let go
    assert peak < 1 << 18  # nothing was copied into Python's memory
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3


def stored(value, features=32):
    layer = nn.Sequential(nn.Linear(features, 16), nn.Linear(16, features, bias=False))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(value)
    return layer


def value_of(path):
    layer = stored(0.0)
    load_fp8(path, layer, dequantize=True)
    values = {float(p.detach().view(-1)[0]) for p in layer.parameters()}
    assert len(values) == 1
    return values.pop()


class Crash(Exception):
    pass


def effects(monkeypatch, at, what):
    """Let the ``at``-th thing that is done to files do ``what`` instead."""
    count = [0]

    def counted(function):
        def call(*arguments, **keywords):
            count[0] += 1
            if count[0] == at:
                what()
            return function(*arguments, **keywords)

        return call

    monkeypatch.setattr(writing, "_write", counted(writing._write))
    monkeypatch.setattr(writing.os, "fsync", counted(os.fsync))
    monkeypatch.setattr(writing.os, "rename", counted(os.rename))
    monkeypatch.setattr(writing.os, "replace", counted(os.replace))
    monkeypatch.setattr(writing.shutil, "copy2", counted(writing.shutil.copy2))
    monkeypatch.setattr(writing.shutil, "rmtree", counted(writing.shutil.rmtree))
    return count


def raises():
    raise Crash


@pytest.mark.parametrize("replaces", [False, True])
def test_an_error_at_any_point_leaves_what_was(tmp_path, replaces):
    path = tmp_path / "out"
    survived = 0
    for at in range(1, 100):
        if path.exists():
            writing.shutil.rmtree(path)
        if replaces:
            export(stored(1.0), path, "float8lab")
            (path / "tokenizer.json").write_text("{}")
        with pytest.MonkeyPatch.context() as patch:
            count = effects(patch, at, raises)
            try:
                export(stored(2.0), path, "float8lab", max_shard_size=600, overwrite=True)
            except Crash:
                survived += 1
            finished = count[0] < at
        if finished:
            break
        if path.exists():
            assert value_of(path) in ((1.0, 2.0) if replaces else (2.0,))
        else:
            assert not replaces
        for left in leftovers(path):
            assert left.suffix == ".old"  # whole, and not yet removed
            assert value_of(left) == 1.0
            writing.shutil.rmtree(left)
    assert finished
    assert survived == at - 1
    assert survived > 15
    assert value_of(path) == 2.0
    assert (path / "tokenizer.json").exists() == replaces
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("replaces", [False, True])
def test_a_crash_at_any_point_leaves_what_was(tmp_path, replaces):
    """The process ends there and then: nothing is cleaned up."""
    between = 0
    for at in range(1, 100):
        path = tmp_path / str(at) / "out"
        if replaces:
            export(stored(1.0), path, "float8lab")
        child = os.fork()
        if child == 0:
            patch = pytest.MonkeyPatch()
            effects(patch, at, lambda: os._exit(7))
            export(stored(2.0), path, "float8lab", max_shard_size=600, overwrite=True)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 7)
        if status == 0:
            break
        if path.exists():
            assert value_of(path) in ((1.0, 2.0) if replaces else (2.0,))
        else:
            with pytest.raises(FileNotFoundError, match="write was interrupted"):
                load_fp8(path, stored(0.0))
        for left in leftovers(path):
            if left.suffix == ".old":
                assert value_of(left) == 1.0
                between += not path.exists()
            else:
                with pytest.raises(CheckpointError, match=r"interrupted|whole"):
                    load_fp8(left, stored(0.0))
    assert status == 0
    assert between == (1 if replaces else 0)  # of the two renames
    assert value_of(path) == 2.0


def test_parts_without_an_index_are_incomplete(tmp_path):
    export(stored(2.0), tmp_path / "out", max_shard_size=600)
    (tmp_path / "out" / "model.safetensors.index.json").unlink()
    first = min((tmp_path / "out").glob("*.safetensors"))
    assert value_of(tmp_path / "out") == 2.0  # all parts are there
    first.unlink()
    with pytest.raises(CheckpointError, match="must have all of"):
        load_fp8(tmp_path / "out", stored(0.0))


def test_a_truncated_file_is_an_error(tmp_path):
    export(stored(2.0), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    content = file.read_bytes()
    layer = stored(1.0)
    for size in (0, 5, 40, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            load_fp8(tmp_path / "out", layer)
    assert all(bool((p == 1.0).all()) for p in layer.parameters())


def test_a_read_only_folder_is_not_overwritten(tmp_path, monkeypatch):
    export(stored(1.0), tmp_path / "out")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # as no root has it
    with pytest.raises(FileExistsError, match="out is read-only"):
        export(stored(2.0), tmp_path / "out", overwrite=True)
    assert value_of(tmp_path / "out") == 1.0
    assert os.listdir(tmp_path) == ["out"]


def test_what_is_there_is_not_overwritten_unasked(tmp_path):
    model, path = stored(1.0), tmp_path / "out"
    path.mkdir()
    export(model, path)  # empty: free
    with pytest.raises(FileExistsError, match=r"holds config\.json and 1 more"):
        export(model, path)
    export(stored(2.0), path, "compressed-tensors", overwrite=True)
    assert value_of(path) == 2.0
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("...")
    with pytest.raises(FileExistsError, match=r"holds no \.safetensors file"):
        export(model, mine, overwrite=True)
    (path / "folder").mkdir()
    with pytest.raises(FileExistsError, match="holds folder"):
        export(model, path, overwrite=True)
    with pytest.raises(FileExistsError, match="is a file"):
        export(model, mine / "thesis.tex", overwrite=True)
    assert value_of(path) == 2.0


@pytest.mark.parametrize("replaces", [False, True])
def test_through_a_link_its_target_is_written(tmp_path, replaces):
    target, link = tmp_path / "models" / "v1", tmp_path / "latest"
    link.symlink_to(target)
    if replaces:
        export(stored(1.0), target)
    export(stored(2.0), link, overwrite=replaces)
    assert link.readlink() == target
    assert value_of(target) == value_of(link) == 2.0
    assert sorted(os.listdir(tmp_path)) == ["latest", "models"]
    assert os.listdir(tmp_path / "models") == ["v1"]


def test_fewer_files_than_before_leave_no_old_ones(tmp_path):
    export(stored(1.0), tmp_path / "out", max_shard_size=600)
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    export(stored(2.0), tmp_path / "out", overwrite=True)
    names = sorted(entry.name for entry in (tmp_path / "out").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]


def test_the_metadata_says_how_weights_are_stored(tmp_path):
    with float8lab.fp8_model_init(recipe=float8lab.recipes.Float8RowwiseScaling()):
        layer = float8lab.Linear(16, 1, bias=False, device="cpu")
    export(layer, tmp_path / "out", "float8lab")
    file = tmp_path / "out" / "model.safetensors"
    # One row: from the shapes alone it would be taken for a scale per tensor.
    found = float8lab.inspect.checkpoint(Path(tmp_path / "out")).rows[0]
    assert found.format == "e4m3 row fp32"
    with safetensors.safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    assert json.loads(metadata["float8lab"]) == {"weight": ["float8_e4m3fn", [1, -1], "fp32"]}
    tensors = safetensors.load_file(file)
    for damaged in ("{", "[]", '{"weight": ["Tensor", [1], "fp32"]}', '{"weight": 3}'):
        safetensors.save_file(tensors, file, {"float8lab": damaged})
        with pytest.raises(CheckpointError, match="metadata is damaged"):
            load_fp8(tmp_path / "out", layer)
