"""The embedded text: whole files, the same every time, nothing on both sides; and its tokenizer."""

import sys

import pytest

from hf_edgc import corpus as corpus_module
from hf_edgc.corpus import (
    END_OF_TEXT,
    TOPICS_NAME,
    VALIDATION_SHARE,
    Document,
    group_copies,
    standard_library_corpus,
    train_byte_level_bpe,
)

MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def library():
    return standard_library_corpus()


def long_lines(text):
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= 20}


def body(seed, lines=30):
    """A text that shares no line with that of another seed."""
    return "".join(f"value_{seed}_{number} = compute({seed}, {number})\n" for number in range(lines))


def write_library(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def test_default_is_large_enough_and_bounded(library):
    trained = sum(document.size_bytes for document in library.train)
    kept_out = sum(document.size_bytes for document in library.validation)
    assert 5 * MEGABYTE < trained <= corpus_module.DEFAULT_TRAIN_BYTES
    assert 0.1 * MEGABYTE < kept_out <= corpus_module.DEFAULT_TRAIN_BYTES / (VALIDATION_SHARE - 1)


def test_description_says_what_was_used(library):
    text = library.describe()
    trained = sum(document.size_bytes for document in library.train)
    for part in (sys.version.split()[0], f"{len(library.train)} files", f"{trained:,} bytes"):
        assert part in text


def test_same_text_in_same_order_every_time(library):
    assert standard_library_corpus() == library


def test_no_file_is_on_both_sides_nor_a_copy_of_one(library):
    """Measured here on its own: no validation file shares 30 percent of its lines (or 5) with a trained one."""
    trained = [(document.name, long_lines(document.text)) for document in library.train]
    assert {name for name, _ in trained}.isdisjoint(document.name for document in library.validation)
    for document in library.validation:
        own = long_lines(document.text)
        for name, lines in trained:
            shared = len(own & lines)
            assert shared < max(5, 0.3 * min(len(own), len(lines))), (document.name, name)


def test_side_depends_on_the_file_not_on_the_size(library):
    small = standard_library_corpus(MEGABYTE // 10)
    large = standard_library_corpus(100 * MEGABYTE)
    names = {document.name for document in large.validation}
    assert {document.name for document in small.validation} <= names
    assert {document.name for document in library.validation} <= names
    assert names.isdisjoint(document.name for document in small.train)
    assert sum(document.size_bytes for document in small.train) <= MEGABYTE // 10


def test_tests_and_tables_are_left_out(library):
    names = [document.name for document in (*library.train, *library.validation)]
    assert not [name for name in names if {"test", "tests", "encodings"} & set(name.split("/"))]
    assert any(name.endswith(".py") for name in names)


def test_topics_are_trained_on_where_they_exist(monkeypatch):
    large = standard_library_corpus(100 * MEGABYTE)
    topics = [document for document in large.train if document.name == TOPICS_NAME]
    assert len(topics) == 1 and 'The "with" statement' in topics[0].text
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)  # importing it now raises ImportError
    without = standard_library_corpus(100 * MEGABYTE)
    assert {document.name for document in large.train} - {document.name for document in without.train} == {TOPICS_NAME}
    assert without.validation == large.validation


def test_copies_stay_together(tmp_path):
    """Every file has a copy, exact or with a fifth of its lines changed; all pairs end on one side."""
    files = {}
    for number in range(100):
        text = body(number)
        files[f"one_{number}.py"] = text
        files[f"other/two_{number}.py"] = text if number % 2 else text.replace("compute(", "compute_again(", 6)
    made = standard_library_corpus(10 * MEGABYTE, write_library(tmp_path, files))
    sides = {document.name: "train" for document in made.train}
    sides |= {document.name: "validation" for document in made.validation}
    assert set(sides.values()) == {"train", "validation"}
    for number in range(100):
        pair = {sides.get(f"one_{number}.py"), sides.get(f"other/two_{number}.py")}
        assert len(pair - {None}) == 1, number


def test_groups_follow_chains_and_ignore_idioms():
    start, middle, end = body(1) + body(2), body(2) + body(3), body(3) + body(4)
    idiom = "if __name__ == '__main__': # of this\n"
    documents = [
        Document("a", start),
        Document("lone", "x = 1\n" + idiom),
        Document("b", middle),
        Document("also lone", "y = 2\n" + idiom),
        Document("c", end),
        Document("short", "z\n"),
        Document("short again", "z\n"),
    ]
    names = [[document.name for document in group] for group in group_copies(documents)]
    assert names == [["a", "b", "c"], ["lone"], ["also lone"], ["short", "short again"]]


def test_files_that_are_no_utf8_are_left_out(tmp_path):
    write_library(tmp_path, {f"module_{number}.py": body(number) for number in range(60)})
    (tmp_path / "latin.py").write_bytes("# \xe9t\xe9\n".encode("latin-1"))
    made = standard_library_corpus(MEGABYTE, tmp_path)
    names = {document.name for document in (*made.train, *made.validation)}
    assert "latin.py" not in names and len(names) > 10


@pytest.mark.parametrize(("train_bytes", "files"), [(MEGABYTE, {}), (10, {f"m{n}.py": body(n) for n in range(60)})])
def test_too_little_text_is_an_error_that_says_where(tmp_path, train_bytes, files):
    with pytest.raises(ValueError, match="standard library") as error:
        standard_library_corpus(train_bytes, write_library(tmp_path, files))
    assert str(tmp_path) in str(error.value) and f"train_bytes={train_bytes}" in str(error.value)


def test_tokenizer_restores_any_text(tmp_path):
    tokenizer = train_byte_level_bpe([body(1), body(2)], 300, tmp_path)
    text = "never seen: äöü 漢字 \t\n\x00 🙂"
    assert tokenizer.decode(tokenizer(text)["input_ids"], clean_up_tokenization_spaces=False) == text
    assert len(tokenizer) == 300
    assert tokenizer.eos_token == END_OF_TEXT
    assert tokenizer(END_OF_TEXT)["input_ids"] == [tokenizer.eos_token_id]
    assert len(tokenizer(body(1))["input_ids"]) < len(body(1)) / 2  # merges were learned


def test_tokenizer_is_the_same_every_time(tmp_path, library):
    texts = [document.text for document in library.train[:40]]
    for folder in ("one", "two"):
        train_byte_level_bpe(texts, 1000, tmp_path / folder)
    one, two = (next((tmp_path / folder).iterdir()) for folder in ("one", "two"))
    assert one.name == two.name and one.read_bytes() == two.read_bytes()


def test_tokenizer_comes_from_the_cache_for_the_same_input_only(tmp_path, monkeypatch):
    first = train_byte_level_bpe([body(1)], 300, tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]

    class TrainedAgainError(Exception):
        pass

    def refuse(texts, vocab_size):
        raise TrainedAgainError

    monkeypatch.setattr(corpus_module, "_train", refuse)
    assert train_byte_level_bpe([body(1)], 300, tmp_path).get_vocab() == first.get_vocab()
    for texts, size in (([body(2)], 300), ([body(1)], 301), ([body(1)[:10], body(1)[10:]], 300)):
        with pytest.raises(TrainedAgainError):
            train_byte_level_bpe(texts, size, tmp_path)


def test_too_small_a_vocabulary_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"vocab_size=256 .* 257"):
        train_byte_level_bpe([body(1)], 256, tmp_path)
