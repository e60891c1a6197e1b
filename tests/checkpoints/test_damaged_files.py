"""Damaged and hostile files: each is refused with one line, or what can be read is reported.

``--cases N`` sets how many are made of each kind.
"""

import copy
import json
import math
import pickle
import random

import pytest
import torch

import float8lab
from float8lab.inspect import CheckpointError, checkpoint, diff
from float8lab.inspect.checkpoint.page import page
from tests.checkpoints.test_opening import dcp_save, fp8_state, refused

safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra 'inspect'")

NAMES = ("", ".", "..", "a/b", "a\0", "\x1b[31mred", "two\nlines", "\ud800", "\u202e", "x" * 5000)
NUMBERS = (-1, 0, 3, 2**31, 2**63, 2**64, 10**400, -0.0, 0.5, 1e308, math.nan, math.inf)
OTHERS = (None, True, [], {}, [[]], [1] * 70, [2**62, 0], [0, 2**40], {"a": []}, "F8_E4M3", "F64")


@pytest.fixture
def cases(request):
    """How many are made of each kind."""
    return range(request.config.getoption("--cases", default=None) or 20)


def survives(path):
    """That a path is read or refused, in printable text; whether it was refused."""
    try:
        report = checkpoint(path)
        difference = diff(path, path)
    except (CheckpointError, OSError) as error:
        message = str(error)
        return message.isprintable() or pytest.fail(message)
    for found in (report, difference):
        assert all(line.isprintable() for line in str(found).splitlines())
        json.dumps(found.to_json(), allow_nan=False)
    page(report).encode()
    return False


def containers(folder):
    """One of each, and the file of it to damage."""
    state = fp8_state(129)
    safetensors.save_file(state, folder / "a.safetensors")
    stored = float8lab.quantize(torch.randn(129, 40), block=(128, 128))
    torch.save({**state, "stored": stored}, folder / "a.pt")
    torch.save({"a": torch.ones(9)}, folder / "old.pt", _use_new_zipfile_serialization=False)
    dcp_save({**state, "stored": stored}, folder / "dcp")
    return {
        "safetensors": (folder / "a.safetensors", folder / "a.safetensors"),
        "torch.save": (folder / "a.pt", folder / "a.pt"),
        "legacy": (folder / "old.pt", folder / "old.pt"),
        "dcp metadata": (folder / "dcp", folder / "dcp" / ".metadata"),
        "dcp data": (folder / "dcp", folder / "dcp" / "__0_0.distcp"),
    }


KINDS = ("safetensors", "torch.save", "legacy", "dcp metadata", "dcp data")


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_anywhere(tmp_path, capsys, cases, kind):
    path, file = containers(tmp_path)[kind]
    data = file.read_bytes()
    draw = random.Random(0)
    for length in {*range(0, 20), *(draw.randrange(len(data)) for _ in cases), len(data) - 1}:
        file.write_bytes(data[:length])
        refused(path, capsys, match=file.name)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_anywhere(tmp_path, cases, kind):
    path, file = containers(tmp_path)[kind]
    data = file.read_bytes()
    draw, refusals = random.Random(0), 0
    for _ in cases:
        damaged = bytearray(data)
        start = draw.choice([0, max(0, len(data) - 2000)])  # headers, and directories of archives
        for _ in range(draw.choice([1, 10])):
            damaged[start + draw.randrange(min(len(data), 2000))] = draw.randrange(256)
        if draw.random() < 0.2:  # a part is lost, or comes twice
            cut = draw.randrange(len(data))
            damaged[cut : cut + draw.randrange(1, 50)] = damaged[:50] * draw.randrange(2)
        file.write_bytes(damaged)
        refusals += survives(path)
    assert refusals


def edited(draw, value):
    """A copy of JSON in which one thing is another, at any depth."""
    if draw.random() < 0.25 or not isinstance(value, (dict, list)) or not value:
        return draw.choice([draw.choice(NUMBERS), draw.choice(NAMES), draw.choice(OTHERS)])
    result = copy.copy(value)
    key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if isinstance(value, dict) and draw.random() < 0.2:
        result[draw.choice(NAMES)] = result.pop(key)
    else:
        result[key] = edited(draw, value[key])
    return result


def text(draw, value):
    """JSON, at times with a name twice, a very long number, too many brackets, or no UTF-8."""
    result = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    if draw.random() < 0.2 and result[:1] == b"{":
        what = draw.choice([b'"a": 1', b'"__metadata__": {}', b'"a": ' + b"9" * 5000, b'"\xff": 1'])
        result = b"{" + what + b", " + result[1:]
    if draw.random() < 0.1:
        result = result.replace(b"1", b"[" * draw.choice([100, 100_000]), 1)
    return result


def test_headers_of_safetensors(tmp_path, cases):
    path, draw = tmp_path / "a.safetensors", random.Random(0)
    state = {**fp8_state(4), "w.qdata": torch.zeros(2, dtype=torch.uint8), "w.scale": torch.ones(1)}
    specs = {"w": ["float8_e4m3fn", [-1], "fp32"]}
    safetensors.save_file(state, path, {"float8lab": json.dumps(specs)})
    whole = path.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    for _ in cases:
        if draw.random() < 0.3:  # what float8lab itself writes there, a string of JSON
            damaged = copy.deepcopy(header)
            damaged["__metadata__"]["float8lab"] = json.dumps(edited(draw, specs))
        else:
            damaged = edited(draw, header)
        content = text(draw, damaged)
        path.write_bytes(len(content).to_bytes(8, "little") + content + whole[8 + size :])
        survives(path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_beside_safetensors(tmp_path, cases, name):
    draw, state = random.Random(0), fp8_state(4)
    safetensors.save_file(state, tmp_path / "a.safetensors")
    weights = {"block_structure": [128, 128], "strategy": "group", "group_size": 128}
    content = {
        "config.json": {
            "quantization_config": {
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
                "config_groups": {"group_0": {"weights": weights}},
            }
        },
        "model.safetensors.index.json": {"weight_map": dict.fromkeys(state, "a.safetensors")},
    }[name]
    for _ in cases:
        (tmp_path / name).write_bytes(text(draw, edited(draw, content)))
        survives(tmp_path)


def test_metadata_of_dcp(tmp_path, cases):
    path, _ = containers(tmp_path)["dcp metadata"]
    whole, draw = (path / ".metadata").read_bytes(), random.Random(0)
    for _ in cases:
        metadata = pickle.loads(whole)
        name = draw.choice(list(metadata.state_dict_metadata))
        stored = metadata.state_dict_metadata[name]
        index = next(index for index in metadata.storage_data if index.fqn == name)
        places = metadata.storage_data
        odd = draw.choice([*NUMBERS, *NAMES, *OTHERS, (1, 2, 3), (-1, 4), torch.float64])
        what = draw.randrange(8)
        if what < 3:
            chunk = stored.chunks[0]
            target, field = [(stored, "size"), (chunk, "sizes"), (chunk, "offsets")][what]
            numbers = list(getattr(target, field)) or [1]
            numbers[draw.randrange(len(numbers))] = draw.choice(NUMBERS)
            setattr(target, field, draw.choice([odd, tuple(numbers)]))
        elif what == 3:
            stored.properties.dtype = odd
        elif what == 4:
            stored.chunks = odd if draw.random() < 0.5 else stored.chunks * draw.randrange(3)
        elif what == 5:
            metadata.state_dict_metadata[draw.choice(NAMES)] = stored
            places[draw.choice([index, odd if odd.__hash__ else 0])] = places[index]
        else:
            info = copy.copy(places[index])
            field = draw.choice(["relative_path", "offset", "length", "transform_descriptors"])
            object.__setattr__(info, field, odd)
            places[index] = info
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        survives(path)


def test_what_is_nested_by_torch_save(tmp_path, capsys):
    path = tmp_path / "a.pt"
    looped = [torch.ones(2)]
    looped.append(looped)
    deep = torch.ones(2)
    for _ in range(150):
        deep = [deep]
    for content in (looped, deep, {"a": looped}):
        torch.save(content, path)
        refused(path, capsys, "must hold containers in containers at most 100 deep")
    torch.save({name: torch.ones(2) for name in NAMES if name != "\ud800"}, path)
    assert not survives(path)
