"""Damaged and hostile files: each is refused with one line, or its readable part is reported.

``--cases N`` sets the number of files of each kind.
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
from tests.checkpoints.test_opening import assert_refused, dcp_save, fp8_state

safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra 'inspect'")

NAMES = ("", ".", "..", "a/b", "a\0", "\x1b[31mred", "two\nlines", "\ud800", "\u202e", "x" * 5000)
NUMBERS = (-1, 0, 3, 2**31, 2**63, 2**64, 10**400, -0.0, 0.5, 1e308, math.nan, math.inf)
OTHER_VALUES = (
    None,
    True,
    [],
    {},
    [[]],
    [1] * 70,
    [2**62, 0],
    [0, 2**40],
    {"a": []},
    "F8_E4M3",
    "F64",
)


@pytest.fixture
def cases(request):
    """The range of the number of files of each kind."""
    return range(request.config.getoption("--cases", default=None) or 20)


def read_or_refused(path):
    """Assert that a path is read or refused with printable text; return whether it was refused."""
    try:
        report = checkpoint(path)
        difference = diff(path, path)
    except (CheckpointError, OSError) as error:
        message = str(error)
        return message.isprintable() or pytest.fail(message)
    for view in (report, difference):
        assert all(line.isprintable() for line in str(view).splitlines())
        json.dumps(view.to_json(), allow_nan=False)
    page(report).encode()
    return False


def save_containers(folder):
    """Save one container of each kind; return its path and the path of the file to damage."""
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
def test_truncated_files_are_refused(tmp_path, capsys, cases, kind):
    path, file = save_containers(tmp_path)[kind]
    data = file.read_bytes()
    rng = random.Random(0)
    for length in {*range(0, 20), *(rng.randrange(len(data)) for _ in cases), len(data) - 1}:
        file.write_bytes(data[:length])
        assert_refused(path, capsys, match=file.name)


@pytest.mark.parametrize("kind", KINDS)
def test_files_with_changed_bytes_are_read_or_refused(tmp_path, cases, kind):
    path, file = save_containers(tmp_path)[kind]
    data = file.read_bytes()
    rng, refusals = random.Random(0), 0
    for _ in cases:
        damaged = bytearray(data)
        # Headers and directories of archives are at the ends.
        start = rng.choice([0, max(0, len(data) - 2000)])
        for _ in range(rng.choice([1, 10])):
            damaged[start + rng.randrange(min(len(data), 2000))] = rng.randrange(256)
        if rng.random() < 0.2:  # some bytes are lost, or occur twice
            cut_start = rng.randrange(len(data))
            damaged[cut_start : cut_start + rng.randrange(1, 50)] = damaged[:50] * rng.randrange(2)
        file.write_bytes(damaged)
        refusals += read_or_refused(path)
    assert refusals


def with_one_edit(rng, value):
    """Return a copy of JSON with one value or name replaced, at any depth."""
    if rng.random() < 0.25 or not isinstance(value, (dict, list)) or not value:
        return rng.choice([rng.choice(NUMBERS), rng.choice(NAMES), rng.choice(OTHER_VALUES)])
    result = copy.copy(value)
    key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if isinstance(value, dict) and rng.random() < 0.2:
        result[rng.choice(NAMES)] = result.pop(key)
    else:
        result[key] = with_one_edit(rng, value[key])
    return result


def encode_json(rng, value):
    """Encode JSON, at times with a duplicate name, a huge number, too many brackets or no UTF-8."""
    result = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.2 and result[:1] == b"{":
        member = rng.choice(
            [b'"a": 1', b'"__metadata__": {}', b'"a": ' + b"9" * 5000, b'"\xff": 1']
        )
        result = b"{" + member + b", " + result[1:]
    if rng.random() < 0.1:
        result = result.replace(b"1", b"[" * rng.choice([100, 100_000]), 1)
    return result


def test_edited_safetensors_headers_are_read_or_refused(tmp_path, cases):
    path, rng = tmp_path / "a.safetensors", random.Random(0)
    state = {**fp8_state(4), "w.qdata": torch.zeros(2, dtype=torch.uint8), "w.scale": torch.ones(1)}
    specs = {"w": ["float8_e4m3fn", [-1], "fp32"]}
    safetensors.save_file(state, path, {"float8lab": json.dumps(specs)})
    intact = path.read_bytes()
    size = int.from_bytes(intact[:8], "little")
    header = json.loads(intact[8 : 8 + size])
    for _ in cases:
        if rng.random() < 0.3:  # the JSON string that float8lab itself writes into the metadata
            damaged = copy.deepcopy(header)
            damaged["__metadata__"]["float8lab"] = json.dumps(with_one_edit(rng, specs))
        else:
            damaged = with_one_edit(rng, header)
        content = encode_json(rng, damaged)
        path.write_bytes(len(content).to_bytes(8, "little") + content + intact[8 + size :])
        read_or_refused(path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_edited_json_files_are_read_or_refused(tmp_path, cases, name):
    rng, state = random.Random(0), fp8_state(4)
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
        (tmp_path / name).write_bytes(encode_json(rng, with_one_edit(rng, content)))
        read_or_refused(tmp_path)


def test_edited_dcp_metadata_is_read_or_refused(tmp_path, cases):
    path, _ = save_containers(tmp_path)["dcp metadata"]
    intact, rng = (path / ".metadata").read_bytes(), random.Random(0)
    for _ in cases:
        metadata = pickle.loads(intact)
        name = rng.choice(list(metadata.state_dict_metadata))
        stored = metadata.state_dict_metadata[name]
        index = next(index for index in metadata.storage_data if index.fqn == name)
        storage_infos = metadata.storage_data
        odd_value = rng.choice([*NUMBERS, *NAMES, *OTHER_VALUES, (1, 2, 3), (-1, 4), torch.float64])
        kind = rng.randrange(8)
        if kind < 3:
            chunk = stored.chunks[0]
            target, field = [(stored, "size"), (chunk, "sizes"), (chunk, "offsets")][kind]
            numbers = list(getattr(target, field)) or [1]
            numbers[rng.randrange(len(numbers))] = rng.choice(NUMBERS)
            setattr(target, field, rng.choice([odd_value, tuple(numbers)]))
        elif kind == 3:
            stored.properties.dtype = odd_value
        elif kind == 4:
            stored.chunks = odd_value if rng.random() < 0.5 else stored.chunks * rng.randrange(3)
        elif kind == 5:
            metadata.state_dict_metadata[rng.choice(NAMES)] = stored
            storage_infos[rng.choice([index, odd_value if odd_value.__hash__ else 0])] = (
                storage_infos[index]
            )
        else:
            info = copy.copy(storage_infos[index])
            field = rng.choice(["relative_path", "offset", "length", "transform_descriptors"])
            object.__setattr__(info, field, odd_value)
            storage_infos[index] = info
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        read_or_refused(path)


def test_cyclic_and_deep_containers_are_refused(tmp_path, capsys):
    path = tmp_path / "a.pt"
    cyclic = [torch.ones(2)]
    cyclic.append(cyclic)
    deep_list = torch.ones(2)
    for _ in range(150):
        deep_list = [deep_list]
    for content in (cyclic, deep_list, {"a": cyclic}):
        torch.save(content, path)
        assert_refused(path, capsys, "must hold containers in containers at most 100 deep")
    torch.save({name: torch.ones(2) for name in NAMES if name != "\ud800"}, path)
    assert not read_or_refused(path)
