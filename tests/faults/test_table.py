"""The table is what the tests say."""

from table import README, table


def test_the_table_is_made_from_the_tests():
    assert README.read_text(encoding="utf-8") == table(), "run python tests/faults/table.py --write"
