"""SFT and DPO of TRL, by the programs in docs/transformers.md, on a small saved model."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

import float8lab

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecation warnings of its dependencies
    transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    trl = pytest.importorskip("trl", reason="needs trl, which needs Python 3.11")
    import datasets
    import tokenizers

    from float8lab.integrations.transformers import Float8Callback
    from tests.integrations.transformers.models import build
    from tests.integrations.transformers.training import losses

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of TRL and datasets

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "transformers.md").read_text()
SFT, DPO = re.findall(r"^```python\n(import trl\n.*?|reference = .*?)^```$", PAGE, re.M | re.S)
WORDS = (
    "<pad>", "<s>", "</s>", "<unk>", "the", "cat", "sat", "on", "a", "mat", "dog", "ran", "far",
    "away",
)  # fmt: skip


@pytest.fixture
def page_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The variables that the page assumes: data, and a folder with a model and its tokenizer."""
    monkeypatch.chdir(tmp_path)
    build("llama", tie_word_embeddings=False)[0].save_pretrained("model")
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(
        "model"
    )
    texts = (
        ("the cat", " sat on a mat", " ran far away"),
        ("a dog", " ran far away", " sat on a mat"),
    )
    rows = [{"prompt": p, "completion": c, "chosen": c, "rejected": r} for p, c, r in texts] * 8
    table = datasets.Dataset.from_list(rows)
    common = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1}
    options = {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-2, **common}
    return {
        "float8lab": float8lab, "recipes": float8lab.recipes, "transformers": transformers,
        "Float8Callback": Float8Callback, "options": options,
        "texts": table.select_columns(["prompt", "completion"]),
        "pairs": table.select_columns(["prompt", "chosen", "rejected"]),
    }  # fmt: skip


def run_trainer(text: str, page_variables: dict[str, Any]) -> Any:
    exec(text, page_variables)
    return page_variables["trainer"]


def test_sft_resumes_with_the_same_losses(page_variables: dict[str, Any]) -> None:
    uninterrupted = run_trainer(SFT, page_variables)
    assert float8lab.conversion_report(uninterrupted.model).converted
    resuming_text = SFT.replace(".train()", '.train(resume_from_checkpoint="sft/checkpoint-2")')
    assert losses(run_trainer(resuming_text, page_variables)) == losses(uninterrupted)


def test_dpo_with_an_fp8_reference_starts_at_zero_reward(page_variables: dict[str, Any]) -> None:
    """With a reference in FP8 the first step has no reward; one in high precision gives noise."""
    margins = [
        run_trainer(text, {**page_variables, "trl": trl}).state.log_history[0]["rewards/margins"]
        for text in (DPO, re.sub(r"float8lab.convert_to_float8.*", "", DPO))
    ]
    assert margins[0] == 0
    assert margins[1] != 0
