"""Tests of predicted step times: relations between meshes, and results that others published."""

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


def seconds(mesh, size=LARGE, recipe=None, **job_options):
    return predict(size, recipe, replace(JOB, **job_options), mesh).gpu


@pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=["bfloat16", *RECIPES])
def test_a_step_on_one_gpu_has_no_communication(recipe):
    step = predict(SMALL, recipe, JOB, Mesh())
    assert set(step.gpu) == set(KINDS)
    assert all(step.gpu[kind] == 0 for kind in KINDS if kind not in COMPUTE)
    assert step.gpu["sharding"] == 0 < step.gpu["gemm"]
    assert (step.gpu["quantize"] > 0) == (recipe is not None)
    assert not step.fits  # 16 bytes per parameter, for 8 billion parameters


@pytest.mark.parametrize("axis", ["dp", "tp", "cp", "pp", "ep"])
def test_each_mesh_axis_divides_the_gemms_and_adds_its_cost(axis):
    size = EXPERTS if axis == "ep" else LARGE
    small_mesh, large_mesh = Mesh(dp=4), Mesh(dp=4, **{axis: 4} if axis != "dp" else {})
    if axis == "dp":
        small_mesh, large_mesh = Mesh(), Mesh(dp=4)
    small_times, large_times = seconds(small_mesh, size), seconds(large_mesh, size)
    cost_kind = {"dp": "sharding", "tp": "tp", "cp": "attention", "pp": "bubble", "ep": "ep"}[axis]
    if axis != "ep":
        ratio = large_times["gemm"] / small_times["gemm"]
        assert ratio == pytest.approx(1 / 4, rel=0.05)
    assert large_times[cost_kind] > small_times[cost_kind] / (4 if axis == "cp" else 1)


def test_fp8_all_gathers_take_half_the_time():
    bfloat16, fp8 = (seconds(Mesh(dp=1, tp=8), recipe=recipe)["tp"] for recipe in (None, DELAYED))
    assert fp8 / bfloat16 == pytest.approx(0.7, rel=0.02)  # 6 of 10 collectives take half the time
    hidden = seconds(Mesh(dp=1, tp=8), tp_overlap=1.0)["tp"]
    assert hidden == 0


def test_recompute_takes_time_and_saves_memory():
    saved, recomputed = (
        predict(LARGE, DELAYED, replace(JOB, recompute=recompute), Mesh(dp=64))
        for recompute in (False, True)
    )
    assert 1.2 < recomputed.seconds / saved.seconds < 1.35
    assert recomputed.memory["activations"] < saved.memory["activations"] / 5
    assert recomputed.memory["optimizer"] == saved.memory["optimizer"]


def test_memory_of_parameters_and_optimizer_is_sharded():
    memory = predict(LARGE, None, JOB, Mesh(dp=8, tp=8)).memory
    assert memory["parameters"] == pytest.approx(4 * LARGE.parameters / 64)
    assert memory["optimizer"] == 2 * memory["parameters"]


def test_link_times_of_one_host_and_of_two():
    links = Links()
    within_host, across_hosts = (links.seconds(1e9, 8, stride) for stride in (1, 8))
    assert across_hosts / within_host == pytest.approx(links.nvlink / links.network, rel=0.01)
    two_hosts = links.seconds(1e9, 16, 1)
    assert within_host < two_hosts < across_hosts
    assert links.seconds(1e9, 16, 1, ring=True) > two_hosts
    assert links.seconds(1e9, 1, 1) == 0


def test_meshes_use_all_gpus_and_are_unique():
    candidates = list(meshes(EXPERTS, 16, 8192, Links()))
    assert all(mesh.gpus == 16 and not mesh.why_not(EXPERTS, 8192) for mesh in candidates)
    assert len(set(candidates)) == len(candidates) > 50
    assert {mesh.ep for mesh in candidates} == {1, 2, 4, 8, 16}


def test_the_first_mesh_fits_and_is_the_fastest():
    steps = fastest(LARGE, DELAYED, JOB, 64)
    fitting = [step for step in steps if step.fits]
    assert steps[0].fits
    assert steps[0].seconds == min(step.seconds for step in fitting)
    assert all(step.fits for step in steps[: len(fitting)])


def test_if_no_step_fits_the_first_needs_the_least_memory():
    steps = fastest(KNOWN["llama-3-405b"], DELAYED, Job(batch=8), 8)
    assert not steps[0].fits
    assert steps[0].bytes == min(step.bytes for step in steps)


def test_a_batch_that_the_mesh_cannot_divide_has_no_step():
    assert best(SMALL, None, Job(batch=3), Mesh(dp=2)) is None
    with pytest.raises(ValueError, match=r"batch must be a multiple of .* \(4\); got 6"):
        predict(SMALL, None, Job(batch=6, micro=2), Mesh(dp=2))
    with pytest.raises(ValueError, match=r"mesh tp must divide the key-value heads \(8\); got 3"):
        predict(SMALL, None, Job(), Mesh(tp=3))


def test_fp8_gains_less_from_fewer_tokens():
    gains = by_tokens(SMALL, replace(JOB, micro=4), Mesh(), {"current": RECIPES["current"]})
    assert list(gains) == [4 * 8192 // 2**power for power in range(10)]
    assert gains[32768]["current"] > 1.2 > 1 > gains[256]["current"]


def test_gemms_of_a_rank_have_local_sizes():
    gemms = gemms_of_rank(LARGE, JOB, Mesh(tp=8), {"delayed": DELAYED})
    assert [(p.N, p.K) for p in gemms] == [
        (1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584),
    ]  # fmt: skip
    assert all(p.gains["delayed"] > 1.4 for p in gemms)


@pytest.mark.parametrize("publication", PUBLISHED, ids=lambda one: one.label)
def test_predicted_gains_are_within_10_percent_of_published_ones(publication):
    assert 0.9 * publication.least <= publication.predicted() <= 1.1 * publication.most


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
def test_wrong_meshes_raise(text, gpus, message):
    with pytest.raises(ValueError, match=message):
        parse(text, gpus)
