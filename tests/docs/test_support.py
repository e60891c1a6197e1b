"""docs/support.md says what happens when its script tries everything."""

import pytest

from tests.docs import support_matrix
from tests.docs.support_matrix import MODULES, RECIPES, try_feature


@pytest.mark.filterwarnings("ignore")  # what torch.compile has to say
def test_page_is_what_was_tried():
    pytest.importorskip("safetensors", reason="needs the extra 'inspect'")
    pytest.importorskip("triton", reason="without triton a GPU has no casts at all")
    page = support_matrix.PAGE.read_text()
    assert support_matrix.render() == page, "run python -m tests.docs.support_matrix"


def test_what_fails_for_a_module_is_said():
    last = list(MODULES)[-1]
    for answers, said in (
        ([True] * 7, "yes"), ([True, None] * 3 + [True], "yes"),
        ([True] * 6 + [False], f"not {last}"), ([None] * 6 + [False], "no"), ([None] * 7, "-"),
    ):  # fmt: skip
        found = iter(answers)
        assert try_feature(lambda case, recipe, found=found: next(found), RECIPES[0]()) == said
