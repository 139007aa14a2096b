"""The embedded default text: Python's standard library on this machine, split without leakage."""

import hashlib
import importlib
import os
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from transformers import PreTrainedTokenizerFast

DEFAULT_TRAIN_BYTES = 8_000_000
"""About 2.7 million tokens at a vocabulary of 4096: one epoch of a few million parameters takes minutes on 2 cores."""

VALIDATION_SHARE = 20
"""One group of files in 20 (5 percent, as validation_split_percentage) is kept for validation."""

END_OF_TEXT = "<|endoftext|>"
TOPICS_NAME = "pydoc_data/topics"

_SKIPPED_FOLDERS = frozenset(
    {
        "site-packages",
        "dist-packages",
        "__pycache__",
        # Tests are absent from some installations: without them more machines have the same text.
        "test",
        "tests",
        "idle_test",
        # Tables of characters, and a copy of modules that are in the library once more.
        "encodings",
        "lib2to3",
        # Read as text rather than as one source file of string literals.
        "pydoc_data",
    }
)
_SKIPPED_PREFIX = "_sysconfigdata"
"""Build settings: they hold paths of the machine that built Python."""

_SHINGLE_LINE_CHARACTERS = 20
"""Lines shorter than this ("return None") are common to unrelated files and say nothing about copies."""

_COPY_SHARE = 0.3
"""Files are copies when this share of the shorter one's lines is in the other (unrelated files: below 0.1)."""

_COPY_LINES = 5
"""Fewest shared lines of a copy: a file of two lines shares "if __name__ == '__main__':" with a hundred others."""


@dataclass(frozen=True)
class Document:
    """One whole file: its name, relative to the library, and its text."""

    name: str
    text: str

    @property
    def size_bytes(self) -> int:
        """Length of the text in UTF-8."""
        return len(self.text.encode("utf-8"))


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents to validate on; no file, or copy of a file, is on both sides."""

    train: tuple[Document, ...]
    validation: tuple[Document, ...]

    def describe(self) -> str:
        """One line: the Python version, and files and bytes of each side."""
        sides = [
            f"{name} {len(documents)} files, {sum(d.size_bytes for d in documents):,} bytes"
            for name, documents in (("train", self.train), ("validation", self.validation))
        ]
        return f"standard library of Python {sys.version.split()[0]}: {'; '.join(sides)}"


def standard_library_corpus(train_bytes: int = DEFAULT_TRAIN_BYTES, root: Path | None = None) -> Corpus:
    """Read the sources and documentation topics of Python's standard library, whole files only.

    Which side a file is on depends on the CRC-32 of its name alone, not on ``train_bytes``; files that share lines
    follow the first of them. The topics of ``pydoc`` are always trained on. Files come in the order of the CRC-32 of
    their names, so that a small ``train_bytes`` takes from everywhere.

    Args:
        train_bytes: most bytes of text to train on; files that would exceed them are left out. Validation gets at
            most ``train_bytes / (VALIDATION_SHARE - 1)``, and at least one file.
        root: folder of the library; default: that of the running Python.

    Raises:
        ValueError: the folder has too few sources (a frozen or zipped Python), or ``train_bytes`` is too small for
            any file.
    """
    folder = root if root is not None else Path(sysconfig.get_paths()["stdlib"])
    sources = sorted(_read_sources(folder), key=lambda document: (_crc(document.name), document.name))
    kept_out: list[Document] = []
    trained: list[Document] = []
    for group in group_copies(sources):
        side = kept_out if _crc(group[0].name) % VALIDATION_SHARE == 0 else trained
        side.extend(group)
    if root is None:
        trained.extend(_read_topics())
    train = _take(sorted(trained, key=lambda document: (_crc(document.name), document.name)), train_bytes)
    validation = _take(kept_out, train_bytes // (VALIDATION_SHARE - 1)) or tuple(
        sorted(kept_out, key=lambda document: document.size_bytes)[:1]
    )
    if not train or not validation:
        raise ValueError(
            f"The embedded default text needs sources of Python's standard library: {folder} gave {len(train)} files "
            f"to train on within train_bytes={train_bytes} and {len(validation)} to validate on. Allow more bytes, or "
            "name a dataset or a text file."
        )
    return Corpus(train, validation)


def group_copies(documents: Sequence[Document]) -> list[list[Document]]:
    """Group documents that are identical or nearly so; order of groups and in groups is that of ``documents``.

    Two documents belong together when their texts are equal, or when at least 5 distinct long lines, and 30 percent of
    the shorter one's, are in both; groups are the connected components.
    """
    parent = list(range(len(documents)))

    def find(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    def join(one: int, other: int) -> None:
        low, high = sorted((find(one), find(other)))
        parent[high] = low

    lines = [_long_lines(document.text) for document in documents]
    first_with_text: dict[str, int] = {}
    holders: dict[str, list[int]] = {}
    for index, own in enumerate(lines):
        join(first_with_text.setdefault(documents[index].text, index), index)
        shared: dict[int, int] = {}
        for line in own:
            for other in holders.setdefault(line, []):
                shared[other] = shared.get(other, 0) + 1
            holders[line].append(index)
        for other, count in shared.items():
            if count >= max(_COPY_LINES, _COPY_SHARE * min(len(own), len(lines[other]))):
                join(other, index)
    groups: dict[int, list[Document]] = {}
    for index, document in enumerate(documents):
        groups.setdefault(find(index), []).append(document)
    return list(groups.values())


def train_byte_level_bpe(texts: Sequence[str], vocab_size: int, cache_dir: Path) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with an end-of-text token, or read it from ``cache_dir``.

    The file in the cache is named by a hash of the texts, the size and the version of ``tokenizers``; the same input
    gives the same tokenizer.

    Args:
        texts: what to train on; any text can be encoded afterwards.
        vocab_size: entries of the vocabulary, with the 256 bytes and the end of text; a short text gives fewer.
        cache_dir: folder to keep the tokenizer in; made when missing.

    Raises:
        ValueError: ``vocab_size`` is below 257.
    """
    smallest = 256 + 1  # every byte, and the end of text
    if vocab_size < smallest:
        raise ValueError(f"vocab_size={vocab_size} is too small for a byte-level tokenizer: use {smallest} or more.")
    path = cache_dir / f"bpe-{_digest(texts, vocab_size)}.json"
    if not path.is_file():
        cache_dir.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        _train(texts, vocab_size).save(str(partial))
        os.replace(partial, path)  # atomic: another run never reads half a file
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(path), bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, unk_token=END_OF_TEXT
    )


def _train(texts: Sequence[str], vocab_size: int) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _digest(texts: Sequence[str], vocab_size: int) -> str:
    digest = hashlib.sha256(f"{tokenizers.__version__} {vocab_size} {len(texts)}".encode())
    for text in texts:
        encoded = text.encode("utf-8")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()[:32]


def _read_sources(folder: Path) -> Iterator[Document]:
    """All sources below ``folder`` that are text in UTF-8, but for skipped folders."""
    for path in folder.rglob("*.py"):
        relative = path.relative_to(folder)
        if _SKIPPED_FOLDERS.intersection(relative.parts[:-1]) or path.name.startswith(_SKIPPED_PREFIX):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a few modules are in Latin-1 on purpose, and a link may be broken
        if text.strip():
            yield Document(relative.as_posix(), text)


def _read_topics() -> Iterator[Document]:
    """The language reference that ``help()`` shows, as one document (its topics quote each other)."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return
    yield Document(TOPICS_NAME, "\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n")


def _take(documents: Sequence[Document], limit_bytes: int) -> tuple[Document, ...]:
    """Take the documents that still fit into ``limit_bytes``, in order."""
    taken: list[Document] = []
    left_bytes = limit_bytes
    for document in documents:
        if document.size_bytes <= left_bytes:
            taken.append(document)
            left_bytes -= document.size_bytes
    return tuple(taken)


def _long_lines(text: str) -> frozenset[str]:
    stripped = (line.strip() for line in text.splitlines())
    return frozenset(line for line in stripped if len(line) >= _SHINGLE_LINE_CHARACTERS)


def _crc(name: str) -> int:
    return zlib.crc32(name.encode("utf-8"))
