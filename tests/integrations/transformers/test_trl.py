"""TRL's SFT and DPO, by the programs of docs/transformers.md, on a small model in a folder."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

import float8lab

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what its dependencies are deprecated for
    transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    trl = pytest.importorskip("trl", reason="needs trl, which needs Python 3.11")
    import datasets
    import tokenizers

    from float8lab.integrations.transformers import Float8Callback
    from tests.integrations.transformers.models import build
    from tests.integrations.transformers.training import losses

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's and datasets' own

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "transformers.md").read_text()
SFT, DPO = re.findall(r"^```python\n(import trl\n.*?|reference = .*?)^```$", PAGE, re.M | re.S)
WORDS = (
    "<pad>", "<s>", "</s>", "<unk>", "the", "cat", "sat", "on", "a", "mat", "dog", "ran", "far",
    "away",
)  # fmt: skip


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page takes for given: data, and a folder that holds a model and its tokenizer."""
    monkeypatch.chdir(tmp_path)
    build("llama", tie_word_embeddings=False)[0].save_pretrained("model")
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained("model")
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


def run(text: str, program: dict[str, Any]) -> Any:
    exec(text, program)
    return program["trainer"]


def test_sft_resumes(program: dict[str, Any]) -> None:
    whole = run(SFT, program)
    assert float8lab.conversion_report(whole.model).converted
    resumed = SFT.replace(".train()", '.train(resume_from_checkpoint="sft/checkpoint-2")')
    assert losses(run(resumed, program)) == losses(whole)


def test_dpo_starts_from_equal_models(program: dict[str, Any]) -> None:
    """By a reference in FP8 the first step has no reward; one in high precision gives noise."""
    margins = [
        run(text, {**program, "trl": trl}).state.log_history[0]["rewards/margins"]
        for text in (DPO, re.sub(r"float8lab.convert_to_float8.*", "", DPO))
    ]
    assert margins[0] == 0
    assert margins[1] != 0
