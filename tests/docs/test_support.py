"""docs/support.md contains the results of its script, which tries everything."""

import pytest

from tests.docs import support_matrix
from tests.docs.support_matrix import MODULES, RECIPES, try_feature


@pytest.mark.filterwarnings("ignore")  # warnings of torch.compile
def test_the_page_has_the_results_of_trying_everything():
    pytest.importorskip("safetensors", reason="needs the extra 'inspect'")
    pytest.importorskip("triton", reason="without triton a GPU has no casts at all")
    page = support_matrix.PAGE.read_text()
    assert support_matrix.render() == page, "run python -m tests.docs.support_matrix"


def test_a_feature_that_fails_for_a_module_names_it():
    last_module = list(MODULES)[-1]
    for results, expected_text in (
        ([True] * 7, "yes"), ([True, None] * 3 + [True], "yes"),
        ([True] * 6 + [False], f"not {last_module}"), ([None] * 6 + [False], "no"),
        ([None] * 7, "-"),
    ):  # fmt: skip
        remaining = iter(results)
        assert (
            try_feature(
                lambda case, recipe, remaining=remaining: next(remaining),
                RECIPES[0](),
            )
            == expected_text
        )
