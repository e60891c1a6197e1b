"""conversion_report describes a model as it is now, and survives copies and wrappers."""

import copy
import logging
import pickle

import pytest
import torch
from torch import nn

import float8lab
from float8lab import recipes
from tests.copies import saved_and_loaded

BLOCK = recipes.Float8BlockScaling()


def build():
    encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    return nn.ModuleDict({"encoder": encoder, "head": nn.Linear(16, 8)})


def notes(model):
    return {layer.name: layer.note for layer in float8lab.conversion_report(model).layers}


def test_conversion_returns_the_model_and_logs_one_line(caplog, capsys):
    model = build()
    keys = list(model.state_dict())
    with caplog.at_level(logging.INFO, "float8lab"):
        assert float8lab.convert_to_float8(model, exclude=["head"]) is model
    report = float8lab.conversion_report(model)
    assert report.summary == "2 of 3 linear layers in FP8, 88.7 % of 1,208 parameters"
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        ("float8lab.nn.convert", f"ModuleDict: {report.summary}")
    ]
    assert report.summary in str(report).splitlines()
    assert capsys.readouterr() == ("", "")
    assert list(model.state_dict()) == keys
    assert float8lab.to_high_precision(model) is model
    with pytest.raises(ValueError, match=r"^model must have been converted; got a ModuleDict"):
        float8lab.conversion_report(model)
    assert [vars(m).keys() for m in model.modules()] == [vars(m).keys() for m in build().modules()]


def test_a_model_that_was_not_converted_has_no_report():
    for model in (build(), float8lab.Linear(16, 16, device="cpu")):
        with pytest.raises(ValueError, match=r"^model must have been converted; got a "):
            float8lab.conversion_report(model)
    with pytest.raises(ValueError, match="strict"):
        float8lab.convert_to_float8(build(), exclude=["typo"], strict=True)
    with pytest.warns(UserWarning, match=r"^convert_to_float8 found no linear layer in a ReLU\.$"):
        empty = float8lab.convert_to_float8(nn.ReLU(), exclude=["typo"])
    assert str(float8lab.conversion_report(empty)).splitlines()[1:] == [
        "0 of 0 linear layers in FP8, 0.0 % of 0 parameters",
        "no layer is called 'typo'",
    ]


def test_reports_of_a_submodule_and_of_the_model_follow_each_conversion():
    model = build()
    float8lab.convert_to_float8(model["encoder"], exclude=["2", "typo"])
    report = float8lab.conversion_report(model)
    assert notes(model) == {
        "encoder.0": "Float8CurrentScaling()",
        "encoder.2": "excluded by '2'",
        "head": "not converted",
    }
    assert report.unmatched == ("typo",)
    assert [layer.name for layer in report.converted] == ["encoder.0"]
    # The later conversion counts, and a layer that it excludes stays in FP8 as before.
    float8lab.convert_to_float8(model, BLOCK, exclude=["encoder.0"], overrides={"head": None})
    assert notes(model) == {
        "encoder.0": "Float8CurrentScaling()",
        "encoder.2": "Float8BlockScaling()",
        "head": "high precision by overrides",
    }
    report = float8lab.conversion_report(model)
    assert [layer.converted for layer in report.layers] == [True, True, False]
    assert report.unmatched == ()
    assert list(notes(model["encoder"])) == ["0", "2"]
    assert notes(model["head"]) == {"": "high precision by overrides"}
    float8lab.to_high_precision(model["encoder"])
    assert set(notes(model).values()) == {"not converted", "high precision by overrides"}
    with pytest.raises(ValueError, match="Sequential"):
        float8lab.conversion_report(model["encoder"])


def test_copies_and_compiled_wrappers_keep_the_report():
    model = build()
    with pytest.warns(UserWarning, match="commonest reason, of 2: bfloat16 is faster: 13 us"):
        float8lab.convert_to_float8(model, "auto", exclude=["typo"])
    expected = str(float8lab.conversion_report(model))
    pickled = pickle.loads(pickle.dumps(model))
    for twin in (copy.deepcopy(model), pickled, saved_and_loaded(model)):
        assert str(float8lab.conversion_report(twin)) == expected
        assert twin.state_dict().keys() == model.state_dict().keys()
    wrapped = float8lab.conversion_report(torch.compile(model))
    assert wrapped.summary == float8lab.conversion_report(model).summary


def test_html_has_the_content_of_the_text_and_escapes_it():
    model = nn.Sequential()
    model.add_module("<b>", nn.Linear(16, 16))
    report = float8lab.conversion_report(float8lab.convert_to_float8(model, exclude=["<i>"]))
    html = report._repr_html_()
    assert "<td>&lt;b&gt;</td><td>16 x 16</td><td>FP8</td>" in html
    assert f"<p>{report.summary}<br>no layer is called &#x27;&lt;i&gt;&#x27;</p>" in html
