"""Any text for any of our options on the command line of run_clm_edgc.py."""

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_edgc.clm.command_line import Options, parse
from hf_edgc.clm.errors import UsageError
from hf_edgc.config import EDGCConfig

NAMES = [spec.name for spec in dataclasses.fields(EDGCConfig)]
numbers = st.one_of(st.integers(-5, 100), st.floats(allow_nan=True), st.sampled_from([0, 1, 0.1, 10**30])).map(str)
words = st.sampled_from(
    ["", "none", "true", "edgc", "static", "ef", "bfloat16", "histogram", "*wpe*", "-1", "1e999", "0x10"]
)
texts = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=8)
values = st.one_of(numbers, words, texts)


@pytest.mark.fault("any text for any of our options on the command line", "it works, or one sentence names the option")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(options=st.dictionaries(st.sampled_from(NAMES), values, min_size=1, max_size=3))
def test_any_text_for_any_option(tmp_path, options):
    arguments = ["--output_dir", str(tmp_path)]
    for name, value in options.items():
        arguments.append(f"--{name}={value}")
    try:
        parsed = parse(arguments)
    except UsageError as error:
        message = str(error)
        # an option may be refused because of another one, and rank bounds speak of each other
        assert any(name in message for name in [*options, "rank", "warmup_max_fraction"]), message
        assert "Traceback" not in message and len(message) < 700
    else:
        assert isinstance(parsed, Options) and isinstance(parsed.compression, EDGCConfig)


def test_an_unknown_option_is_answered_with_the_nearest_known_one(tmp_path):
    with pytest.raises(UsageError, match=r"unknown option --max_rnk; did you mean --max_rank\?"):
        parse(["--output_dir", str(tmp_path), "--max_rnk", "4"])
    with pytest.raises(UsageError, match=r"a.yaml: the file of arguments goes first"):
        parse(["--output_dir", str(tmp_path), "a.yaml"])
