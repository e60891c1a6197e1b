"""The call sites with which Inductor's code replaces float8lab's ops."""

import copy
from types import ModuleType

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.utils.flop_counter import FlopCounterMode

import float8lab
from float8lab.formats import E4M3
from float8lab.ops import inductor
from float8lab.ops.inductor import call_site
from float8lab.recipes import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

CAST = "cast.pure"
x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
CAST_ARGUMENTS = ("", [x], x.dtype, E4M3, [-1, -1], "fp32", 0.0, 16, True, False)


def test_a_call_site_returns_the_results_of_its_op():
    expected = torch.ops.float8lab.cast.pure(*CAST_ARGUMENTS)
    results = call_site(CAST, [0, 1], repeats=False)(*CAST_ARGUMENTS)
    for i in (0, 1):
        assert torch.equal(results[i].view(torch.uint8), expected[i].view(torch.uint8))
    assert results[3] is None, "nothing reads the transpose, so nothing is allocated for it"
    results = call_site(CAST, [0, 3], repeats=False)(*CAST_ARGUMENTS)
    assert results[3].shape == expected[3].shape == (0,)


def test_flop_counters_and_profilers_see_the_op_of_a_call_site():
    q, scale = torch.ops.float8lab.cast.pure(*CAST_ARGUMENTS)[:2]
    multiply = call_site("scaled_mm", [], repeats=False)
    arguments = (q, scale, [-1, -1], q, scale, [-1, -1], None, torch.float32, False)
    with FlopCounterMode(display=False) as counter:
        multiply(*arguments)
    assert counter.get_total_flops() == 2 * 32 * 32 * 64
    with torch.profiler.profile() as profile:
        multiply(*arguments)
    assert "float8lab::scaled_mm" in {event.name for event in profile.events()}


def test_an_inductor_with_other_names_keeps_calling_ops():
    inductor._register(ModuleType("torch._inductor.lowering"))


@pytest.mark.slow
def test_the_cpp_wrapper_calls_ops():
    """It also calls the ops that only order other ops, which Python code leaves out."""
    torch._dynamo.reset()
    model = float8lab.convert_to_float8(nn.Linear(64, 64), DelayedScaling())
    expected = model(x).detach()
    with fresh_cache(), torch._inductor.config.patch(cpp_wrapper=True):
        y = torch.compile(model, fullgraph=True)(x.clone().requires_grad_())
        y.sum().backward()
    torch.testing.assert_close(y, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("recipe", [DelayedScaling, Float8CurrentScaling, Float8BlockScaling])
def test_compiled_layers_repeat_their_launches(recipe, dynamic):
    """Every run has the bytes of eager mode, recorded or repeated, with aligned inputs or not."""
    torch._dynamo.reset()
    eager = nn.Linear(256, 512, device="cuda", dtype=torch.bfloat16)
    float8lab.convert_to_float8(eager, recipe())
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    codes = []
    with fresh_cache():
        for run in range(14):
            data = torch.randn(128 * 256 + 1, device="cuda", dtype=torch.bfloat16) * (run + 1)
            offset = 1 if run in (9, 12) else 0
            inputs = [data[offset:][: 128 * 256].view(128, 256).requires_grad_() for _ in range(2)]
            outputs = []
            for layer, x in zip((eager, compiled), inputs, strict=True):
                with torch.autocast("cuda", torch.bfloat16, enabled=run == 10):
                    y, new_codes = run_and_get_code(layer, x)
                y.backward(torch.ones_like(y))
                codes += new_codes
                outputs.append((y, x.grad))
            for expected, got in zip(*outputs, strict=True):
                assert torch.equal(got, expected), run
            assert torch.equal(model.weight.grad, eager.weight.grad), run
    assert f"'scaled_mm', [], repeats={not dynamic}" in codes[0]
    assert "torch.ops.float8lab." not in "".join(
        line for code in codes for line in code.splitlines() if line.strip().startswith("buf")
    )


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [DelayedScaling, Float8CurrentScaling, Float8BlockScaling])
def test_repeated_call_sites_need_no_key(recipe, monkeypatch):
    from float8lab.ops.kernels import _replay

    torch._dynamo.reset()
    layer = nn.Linear(256, 512, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(float8lab.convert_to_float8(layer, recipe()), fullgraph=True)
    keys, key_of = [], _replay._key_of
    for run in range(5):
        if run == 4:
            monkeypatch.setattr(_replay, "_key_of", lambda args: keys.append(args) or key_of(args))
        x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        compiled(x).sum().backward()
    assert len(keys) == (recipe is DelayedScaling), "the update of scales is no call site's"
