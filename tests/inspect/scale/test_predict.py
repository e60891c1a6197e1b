"""Predicted steps: what must hold between meshes, and what others published."""

from dataclasses import replace

import pytest

from float8lab.inspect.scale.mesh import Links, Mesh, meshes, parse
from float8lab.inspect.scale.predict import COMPUTE, KINDS, Job, predict
from float8lab.inspect.scale.published import PUBLISHED
from float8lab.inspect.scale.search import RECIPES, best, by_tokens, fastest, gemms_of_rank
from float8lab.inspect.scale.sizes import KNOWN

SMALL, LARGE, EXPERTS = (KNOWN[name] for name in ("llama-3-8b", "llama-3-70b", "qwen3-30b-a3b"))
JOB = Job(batch=64)
DELAYED = RECIPES["delayed"]


def seconds(mesh, size=LARGE, recipe=None, **how):
    return predict(size, recipe, replace(JOB, **how), mesh).gpu


@pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=["bfloat16", *RECIPES])
def test_one_gpu_communicates_nothing(recipe):
    found = predict(SMALL, recipe, JOB, Mesh())
    assert set(found.gpu) == set(KINDS)
    assert all(found.gpu[kind] == 0 for kind in KINDS if kind not in COMPUTE)
    assert found.gpu["sharding"] == 0 < found.gpu["gemm"]
    assert (found.gpu["quantize"] > 0) == (recipe is not None)
    assert not found.fits  # 16 bytes a parameter, of 8 billion


@pytest.mark.parametrize("axis", ["dp", "tp", "cp", "pp", "ep"])
def test_each_axis_divides_the_work_and_pays_for_it(axis):
    size = EXPERTS if axis == "ep" else LARGE
    one, many = Mesh(dp=4), Mesh(dp=4, **{axis: 4} if axis != "dp" else {})
    if axis == "dp":
        one, many = Mesh(), Mesh(dp=4)
    alone, shared = seconds(one, size), seconds(many, size)
    paid = {"dp": "sharding", "tp": "tp", "cp": "attention", "pp": "bubble", "ep": "ep"}[axis]
    if axis != "ep":
        ratio = shared["gemm"] / alone["gemm"]
        assert ratio == pytest.approx(1 / 4, rel=0.05)
    assert shared[paid] > alone[paid] / (4 if axis == "cp" else 1)


def test_fp8_halves_what_is_gathered():
    high, fp8 = (seconds(Mesh(dp=1, tp=8), recipe=recipe)["tp"] for recipe in (None, DELAYED))
    assert fp8 / high == pytest.approx(0.7, rel=0.02)  # 6 of 10 by half
    hidden = seconds(Mesh(dp=1, tp=8), tp_overlap=1.0)["tp"]
    assert hidden == 0


def test_recomputing_takes_time_and_saves_memory():
    kept, again = (
        predict(LARGE, DELAYED, replace(JOB, recompute=recompute), Mesh(dp=64))
        for recompute in (False, True)
    )
    assert 1.2 < again.seconds / kept.seconds < 1.35
    assert again.memory["activations"] < kept.memory["activations"] / 5
    assert again.memory["optimizer"] == kept.memory["optimizer"]


def test_memory_of_states_is_what_is_left_of_the_parameters():
    found = predict(LARGE, None, JOB, Mesh(dp=8, tp=8)).memory
    assert found["parameters"] == pytest.approx(4 * LARGE.parameters / 64)
    assert found["optimizer"] == 2 * found["parameters"]


def test_a_network_card_for_each_gpu():
    links = Links()
    near, far = (links.seconds(1e9, 8, stride) for stride in (1, 8))
    assert far / near == pytest.approx(links.nvlink / links.network, rel=0.01)
    whole = links.seconds(1e9, 16, 1)
    assert near < whole < far
    assert links.seconds(1e9, 16, 1, ring=True) > whole
    assert links.seconds(1e9, 1, 1) == 0


def test_meshes_are_of_all_gpus():
    found = list(meshes(EXPERTS, 16, 8192, Links()))
    assert all(mesh.gpus == 16 and not mesh.why_not(EXPERTS, 8192) for mesh in found)
    assert len(set(found)) == len(found) > 50
    assert {mesh.ep for mesh in found} == {1, 2, 4, 8, 16}


def test_the_fastest_mesh_fits_and_is_no_slower_than_any():
    found = fastest(LARGE, DELAYED, JOB, 64)
    fitting = [step for step in found if step.fits]
    assert found[0].fits
    assert found[0].seconds == min(step.seconds for step in fitting)
    assert all(step.fits for step in found[: len(fitting)])


def test_a_step_that_fits_nowhere_is_the_one_of_least_memory():
    found = fastest(KNOWN["llama-3-405b"], DELAYED, Job(batch=8), 8)
    assert not found[0].fits
    assert found[0].bytes == min(step.bytes for step in found)


def test_no_step_where_the_batch_cannot_be_shared():
    assert best(SMALL, None, Job(batch=3), Mesh(dp=2)) is None
    with pytest.raises(ValueError, match=r"batch must be a multiple of .* \(4\); got 6"):
        predict(SMALL, None, Job(batch=6, micro=2), Mesh(dp=2))
    with pytest.raises(ValueError, match=r"mesh tp must divide the key-value heads \(8\); got 3"):
        predict(SMALL, None, Job(), Mesh(tp=3))


def test_fp8_gains_less_from_fewer_tokens():
    gains = by_tokens(SMALL, replace(JOB, micro=4), Mesh(), {"current": RECIPES["current"]})
    assert list(gains) == [4 * 8192 // 2**power for power in range(10)]
    assert gains[32768]["current"] > 1.2 > 1 > gains[256]["current"]


def test_products_of_a_rank():
    found = gemms_of_rank(LARGE, JOB, Mesh(tp=8), {"delayed": DELAYED})
    assert [(p.N, p.K) for p in found] == [
        (1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584),
    ]  # fmt: skip
    assert all(p.gains["delayed"] > 1.4 for p in found)


@pytest.mark.parametrize("one", PUBLISHED, ids=lambda one: one.label)
def test_published_gains_are_within_10_percent(one):
    assert 0.9 * one.least <= one.predicted() <= 1.1 * one.most


@pytest.mark.parametrize(
    ("text", "gpus", "message"),
    [
        ("tp=3", 8, "mesh must be of 8 GPUs; got 'tp=3', which is of 3"),
        ("dp=2,tp=2", 8, "mesh must be of 8 GPUs; got 'dp=2,tp=2', which is of 4"),
        ("fsdp=2", 2, "mesh must be one of 'dp', 'tp', 'cp', 'pp' or 'ep'; got 'fsdp'"),
        ("tp=x", 2, "mesh must have a whole number for tp; got 'x'"),
        ("tp=0", 2, "mesh tp must be an integer of at least 1; got 0"),
    ],
)
def test_wrong_meshes(text, gpus, message):
    with pytest.raises(ValueError, match=message):
        parse(text, gpus)
