"""Options: what is allowed, how a refusal reads, and that layout and command line follow them."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_edgc.config import EDGCConfig
from hf_edgc.layout import build_layout


@pytest.mark.parametrize(
    "options, words",
    [
        ({"mode": "fast"}, ["mode='fast'", "edgc, static, none"]),
        ({"max_rank": 0}, ["max_rank=0", "at least 1"]),
        ({"max_rank": 8.0}, ["max_rank=8.0", "type int"]),
        ({"max_rank": True}, ["max_rank=True", "type int"]),
        ({"min_rank": 40}, ["min_rank=40", "1 to max_rank (32)"]),
        ({"rank": 4, "min_rank": 8}, ["rank=4", "min_rank (8) to max_rank (32)"]),
        ({"rank": 64}, ["rank=64", "min_rank (8) to max_rank (32)"]),
        ({"warmup_fraction": 1.0}, ["warmup_fraction=1.0", "0 to below 1"]),
        ({"warmup_fraction": float("nan")}, ["warmup_fraction=nan", "0 to below 1"]),
        ({"warmup_fraction": 0.4, "warmup_max_fraction": 0.3}, ["warmup_max_fraction=0.3", "warmup_fraction (0.4)"]),
        ({"entropy_fraction": 0.0}, ["entropy_fraction=0.0", "above 0"]),
        ({"entropy_every": -1}, ["entropy_every=-1", "at least 1"]),
        ({"min_compression_ratio": 0.5}, ["min_compression_ratio=0.5", "at least 1"]),
        ({"factor_dtype": "int8"}, ["factor_dtype='int8'", "float32, bfloat16, float16"]),
        ({"error_feedback": "yes"}, ["error_feedback='yes'", "type bool"]),
        ({"error_feedback": False}, ["allocation='per_tensor'", "global with error_feedback=False"]),
        ({"target_compression_ratio": 1.0}, ["target_compression_ratio=1.0", "above 1"]),
        (
            {"target_compression_ratio": 9.0, "mode": "static"},
            ["mode='static'", "target_compression_ratio", "mode edgc"],
        ),
        (
            {"target_compression_ratio": 9.0, "error_model": "paper"},
            ["error_model='paper'", "target_compression_ratio"],
        ),
        (
            {"target_compression_ratio": 9.0, "rank": 4},
            ["rank=4", "decides the first rank too"],
        ),
        ({"target_compression_ratio": 9.0, "warmup_max_fraction": 0.2}, ["warmup_max_fraction=0.2", "warmup_fraction"]),
    ],
)
def test_a_refusal_names_option_value_and_what_is_allowed(options, words):
    with pytest.raises(ValueError) as caught:
        EDGCConfig(**options)
    for word in words:
        assert word in str(caught.value)


names = st.sampled_from([spec.name for spec in dataclasses.fields(EDGCConfig)])
values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers()))


@pytest.mark.fault("any value for any option", "it works, or an error names the option, the value and what is allowed")
@settings(max_examples=300, deadline=None)
@given(st.dictionaries(names, values, max_size=4))
def test_any_values_either_work_or_are_refused_by_name(options):
    try:
        config = EDGCConfig(**options)
    except ValueError as error:
        assert any(name in str(error) for name in [*options, "rank", "warmup_max_fraction"])
    else:
        assert EDGCConfig.from_dict(config.to_dict()) == config
        build_layout([("w", (64, 48)), ("b", (48,))], config)


def test_from_dict_refuses_unknown_options():
    with pytest.raises(ValueError, match=r"no option ranks; allowed: .*rank_step"):
        EDGCConfig.from_dict({"ranks": 3})


def test_run_length():
    EDGCConfig(window_steps=10).check_run_length(10)
    with pytest.raises(ValueError, match="window_steps=11 is not allowed: use an integer from 1 to the 10"):
        EDGCConfig(window_steps=11).check_run_length(10)
    with pytest.raises(ValueError, match=r"warmup_fraction=0.95 .* fills all 10 optimizer steps"):
        EDGCConfig(warmup_fraction=0.95).check_run_length(10)
    for option in ({"warmup_fraction": 0.1}, {"target_compression_ratio": 9.0}):
        with pytest.raises(ValueError, match=f"{next(iter(option))}=.*length is not known: pass total_steps"):
            EDGCConfig(**option).check_run_length(None)


def test_the_digest_sees_every_option():
    base = EDGCConfig()
    changed = [
        dataclasses.replace(base, **change)
        for change in (
            {"mode": "static"}, {"rank": 16}, {"max_rank": 64}, {"min_rank": 4}, {"rank_step": 2}, {"window_steps": 5},
            {"warmup_fraction": 0.1}, {"warmup_max_fraction": 0.5}, {"error_model": "paper"}, {"lr_exponent": 0.0},
            {"entropy_estimator": "gaussian"}, {"entropy_every": 5}, {"entropy_fraction": 0.5},
            {"min_compression_ratio": 3.0}, {"factor_dtype": "float32"}, {"error_feedback": False, "mode": "static"},
            {"allocation": "global"}, {"target_compression_ratio": 10.0}, {"entropy_exponent": 0.0},
            {"compression_seed": 1}, {"error_dtype": "bfloat16"}, {"error_device": "cpu"}, {"include": ["a"]},
            {"exclude": ["a"]}, {"require_state": True}, {"watchdog_error_ratio": 0.0}, {"watchdog_grad_growth": 0.0},
            {"overlap": False}, {"codec": "auto"},
        )
    ]  # fmt: skip
    assert len({config.digest() for config in [base, *changed]}) == len(dataclasses.fields(EDGCConfig)) + 1


def test_layout_says_why_a_parameter_is_dense():
    shapes = [
        ("wte", (50257, 768)), ("conv", (64, 32, 3, 3)), ("bias", (768,)), ("scalar", ()), ("none", (0, 5)),
        ("thin", (768, 8)),
    ]  # fmt: skip
    layout = build_layout(shapes, EDGCConfig())
    assert [(m.name, m.rows, m.cols) for m in layout.matrices] == [("wte", 50257, 768), ("conv", 64, 288)]
    # the largest rank at which 64 x 288 is still halved: 64 * 288 / (2 * (64 + 288)) = 26.2
    assert [m.max_rank for m in layout.matrices] == [378, 26]
    assert {d.name: d.reason for d in layout.dense} == {
        "bias": "fewer than two dimensions",
        "scalar": "fewer than two dimensions",
        "none": "empty",
        "thin": "saves less than 2 x at rank 8",
    }
    text = layout.describe()
    assert "compressing 2 matrices" in text and "saves less than 2 x at rank 8: 1 tensor, 6,144 elements (thin)" in text
    wrong = build_layout(shapes, EDGCConfig(exclude=["*wpee*"])).describe()
    assert "no parameter matches the pattern '*wpee*'" in wrong and "no parameter" not in text


def test_include_and_exclude_go_by_name():
    shapes = [(name, (96, 96)) for name in ("h.0.mlp.c_fc", "h.0.attn.c_attn", "wte")]

    def compressed(**options):
        return [matrix.name for matrix in build_layout(shapes, EDGCConfig(max_rank=8, **options)).matrices]

    assert compressed(include=["*.mlp.*", "wte"]) == ["h.0.mlp.c_fc", "wte"]
    assert compressed(exclude=["*attn*"]) == ["h.0.mlp.c_fc", "wte"]
    assert compressed(include=["h.*"], exclude=["*attn*"]) == ["h.0.mlp.c_fc"]
    assert compressed(include=[]) == []


def test_the_layout_digest_sees_names_shapes_and_options():
    shapes = [("a", (64, 64)), ("b", (64,))]
    digests = {
        build_layout(shapes, EDGCConfig()).digest(),
        build_layout([("c", (64, 64)), ("b", (64,))], EDGCConfig()).digest(),
        build_layout([("a", (64, 65)), ("b", (64,))], EDGCConfig()).digest(),
        build_layout(shapes, EDGCConfig(mode="none")).digest(),
    }
    assert len(digests) == 4
