"""Auto: predicted times against measured ones, and the recipes that are chosen by them."""

import pytest

from float8lab import recipes
from float8lab.recipes import Auto
from float8lab.recipes.auto import TIE, choose, explain, predict
from float8lab.recipes.cost import MODES, Parts, estimate
from tests.recipes.test_cost import MEASURED

BLOCK, ROWWISE, CURRENT, DELAYED = Auto().candidates
PRECISIONS = (None, BLOCK, ROWWISE, CURRENT, DELAYED)
LLAMA = [
    (4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *[(14336, 4096)] * 2, (4096, 14336),
]  # fmt: skip
"""Linear layers of one Llama-3-8B decoder layer."""
GPT_53M = 8 * [*[(512, 512)] * 4, (1536, 512), (1536, 512), (512, 1536)]
"""Linear layers of the small GPT of ``benchmarks.overhead``, without its lm_head."""

each_mode = pytest.mark.parametrize("mode", MODES)


def predictions(shapes, tokens, mode="eager", candidates=PRECISIONS[1:]):
    return [predict([shape], candidates, tokens=tokens, mode=mode) for shape in shapes]


def step_seconds(predicted, chosen):
    """Seconds of a step: the GPU time of all layers, or their CPU time where that is longer."""
    times = [p[recipe] for p, recipe in zip(predicted, chosen, strict=True)]
    return max(sum(t.gpu for t in times), sum(t.cpu for t in times))


def test_module_with_several_weights_takes_the_sum_of_their_times():
    prediction = predict([(256, 128), (128, 512)], [CURRENT], tokens=64, mode="eager")
    for recipe in (None, CURRENT):
        parts = estimate(recipe, 64, 256, 128), estimate(recipe, 64, 128, 512)
        assert prediction[recipe] == tuple(map(sum, zip(*parts, strict=True)))


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_chosen_recipe_is_within_2_percent_of_the_fastest_measured(shape):
    (chosen,) = choose(predictions([shape], 16384, "cuda_graph"))
    times = dict(zip(PRECISIONS, MEASURED[shape], strict=True))
    assert times[chosen] <= 1.02 * min(times.values())


@each_mode
def test_every_layer_of_an_8b_model_gets_the_fastest_recipe(mode):
    # Measured as well: "converted, delayed" is the fastest row of "Transformer layer".
    assert choose(predictions(LLAMA, 16384, mode)) == [DELAYED] * 7


@each_mode
@pytest.mark.parametrize("shapes", [LLAMA, GPT_53M, [(4096, 4096)]], ids=["8B", "53M", "one"])
def test_choice_is_never_slower_than_one_recipe_for_all_layers(shapes, mode):
    for tokens in (1, 32, 512, 1024, 2048, 4096, 8192, 16384, 65536):
        predicted = predictions(shapes, tokens, mode)
        chosen = step_seconds(predicted, choose(predicted))
        for recipe in PRECISIONS:
            assert chosen <= (1 + TIE) ** 2 * step_seconds(predicted, [recipe] * len(shapes)), (
                tokens
            )


def test_fp8_is_not_chosen_where_the_gpu_does_not_hide_its_cpu_time():
    predicted = predictions(LLAMA, 2048)
    chosen = choose(predicted)
    # The layers that save most stay in FP8.
    assert chosen == [None] * 3 + [DELAYED] * 4
    assert choose(predictions(LLAMA, 4096, "compile")) == [DELAYED] * 7
    assert choose(predictions(LLAMA, 512)) == [None] * 7


def test_single_layer_takes_the_longer_of_its_gpu_and_cpu_times():
    times = predictions([(4096, 4096)], 2048)
    assert times[0][DELAYED].gpu < times[0][None].gpu < times[0][DELAYED].cpu
    assert choose(times) == [None]
    times = predictions([(4096, 4096)], 1024, "compile")
    assert times[0][DELAYED].gpu < times[0][None].gpu < times[0][DELAYED].cpu
    assert times[0][None].gpu < times[0][BLOCK].cpu
    assert choose(times) == [None]
    assert choose(predictions([(4096, 4096)], 2048, "compile")) == [DELAYED]


def test_more_accurate_recipe_wins_a_tie():
    prediction = {
        None: (1.03, 0.0),
        BLOCK: (1.021, 0.0),
        ROWWISE: (1.019, 0.0),
        DELAYED: (1.0, 0.0),
    }
    prediction = {recipe: Parts(0.0, *times) for recipe, times in prediction.items()}
    assert choose([prediction]) == [ROWWISE]
    assert choose([prediction | {None: Parts(0.0, 1.02, 0.0)}]) == [None]


def test_candidates_are_in_the_order_of_their_accuracy():
    # RESULTS.md, "Accuracy of a linear layer": e5m2 gradients cost 4 dB, older amaxes some more.
    kinds = [type(recipe).__name__ for recipe in Auto().candidates]
    assert kinds == [
        "Float8BlockScaling", "Float8RowwiseScaling", "Float8CurrentScaling", "DelayedScaling",
    ]  # fmt: skip


def test_only_candidates_are_chosen():
    candidates = (BLOCK, ROWWISE)
    chosen = set(choose(predictions(LLAMA, 16384, candidates=candidates)))
    assert chosen
    assert chosen <= set(candidates), "all of these layers are large"
    assert choose(predictions(LLAMA, 16384, candidates=())) == [None] * 7
    assert choose([]) == []


def test_experts_get_the_recipe_that_is_fastest_with_their_casts():
    # Rowwise casts of experts with 768 features take more than their GEMMs save, also as measured.
    small, wide = [(128, 1536, 2048), (128, 2048, 768)], [(8, 2048, 7168)]
    cases = [
        (small, 8 * 32768, PRECISIONS[1:], DELAYED),
        (small, 8 * 32768, (BLOCK,), BLOCK),
        (small, 8 * 32768, (ROWWISE,), None),
        ([(128, 768, 2048)], 32768, PRECISIONS[1:], None),
        (wide, 32768, PRECISIONS[1:], DELAYED),
        (wide, 32768, (ROWWISE,), ROWWISE),
        ([(8, 28672, 4096), (8, 4096, 14336)], 16384, PRECISIONS[1:], DELAYED),
    ]
    for shapes, rows, candidates, fastest in cases:
        prediction = predict(shapes, candidates, tokens=rows, mode="cuda_graph")
        assert choose([prediction]) == [fastest], (shapes, candidates)
    as_linear_layer = predict(
        [shape[1:] for shape in small], (ROWWISE,), tokens=8 * 32768, mode="cuda_graph"
    )
    assert choose([as_linear_layer]) == [ROWWISE], "as one linear layer it pays"


def test_empty_layer_stays_in_high_precision():
    assert choose(predictions([(0, 64), (64, 0)], 16384)) == [None, None]


@pytest.mark.parametrize(
    ("shape", "tokens", "candidates", "text"),
    [
        (
            (14336, 4096), 16384, (CURRENT,),
            "Float8CurrentScaling(): 4.55 ms (564 us casts), bfloat16 7.58 ms",
        ),
        (
            (512, 512), 16384, (CURRENT,),
            "bfloat16 is faster: 45 us, Float8CurrentScaling 82 us (52 us casts)",
        ),
        (
            (1536, 512), 16384, (DELAYED,),
            "bfloat16 is as fast: 113 us, DelayedScaling 111 us (47 us casts)",
        ),
        (
            (4096, 4096), 2048, (CURRENT,),
            "bfloat16: Float8CurrentScaling saves 51 us GPU, costs 232 us CPU",
        ),
        ((4096, 4096), 4096, (), "bfloat16: no recipe has FP8 GEMMs on its device"),
    ],
    ids=["pays", "slower", "tie", "cpu", "none"],
)  # fmt: skip
def test_explanation_names_the_choice_and_its_times(shape, tokens, candidates, text):
    (prediction,) = predictions([shape], tokens, candidates=candidates)
    (chosen,) = choose([prediction])
    assert explain(prediction, chosen) == text


def test_auto_is_frozen_data():
    assert Auto(tokens=64) == Auto(tokens=64) != Auto()
    assert hash(Auto(tokens=64)) == hash(Auto(tokens=64))
    assert repr(Auto()) == "Auto()"
    assert repr(Auto(tokens=64, mode="compile")) == "Auto(tokens=64, mode='compile')"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 0}, "tokens must be an integer of at least 1; got 0"),
        ({"tokens": 1e4}, "tokens must be an integer of at least 1; got 10000.0"),
        ({"tokens": True}, "tokens must be an integer of at least 1; got True"),
        ({"mode": "graph"}, "mode must be one of 'eager', 'compile' or 'cuda_graph'; got 'graph'"),
        ({"candidates": [CURRENT]}, "candidates must be a tuple of recipes"),
        ({"candidates": (None,)}, "candidates must be a tuple of recipes"),
        ({"candidates": (recipes.MXFP8BlockScaling(),)}, "candidates must be a tuple of recipes"),
    ],
)
def test_wrong_arguments_of_auto_raise(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Auto(**arguments)


def test_auto_raises_as_a_recipe():
    with pytest.raises(TypeError, match=r"recipe must be None or one of .*; got Auto"):
        recipes.autocast(recipe=Auto())
