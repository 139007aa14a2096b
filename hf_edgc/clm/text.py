"""The text of a run: from the Hub, from files, or the embedded standard library."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import datasets
from datasets import Dataset, IterableDataset

from hf_edgc.clm.arguments import FILE_KINDS, DataArguments, ModelArguments
from hf_edgc.clm.errors import UsageError
from hf_edgc.clm.hub import loading
from hf_edgc.corpus import Document, standard_library_corpus

Rows: TypeAlias = Dataset | IterableDataset


@dataclass(frozen=True)
class Text:
    """Rows of text, each side absent when it is neither asked for nor given."""

    train: Rows | None
    validation: Rows | None
    column: str
    """The column that holds the text."""
    rows_are_documents: bool
    """Whether a row is a whole document, which an end of text closes; else rows run on, as in run_clm."""
    source: str
    """What was read, for people."""


def load_text(model: ModelArguments, data: DataArguments, do_train: bool, do_eval: bool) -> Text:
    """Read the text that the options name; validation rows are split off the first training rows when needed.

    Raises:
        UsageError: text that is asked for is missing, empty or cannot be loaded.
    """
    if data.is_embedded:
        return _embedded_text(model, data)
    sides = _from_hub(model, data) if data.dataset_name else _from_files(model, data)
    train, validation = sides.get("train"), sides.get("validation")
    if train is None and do_train:
        raise UsageError("There is no text to train on: pass train_file, or a dataset_name that has a train split.")
    if validation is None and do_eval and train is not None:
        train, validation = _split(train, data)
    if validation is None and do_eval:
        raise UsageError(
            "There is no text to evaluate on: pass validation_file, a dataset_name that has a validation split, or a "
            "train_file to split validation_split_percentage off."
        )
    rows = train if train is not None else validation
    source = data.dataset_name or ", ".join(name for name in (data.train_file, data.validation_file) if name)
    return Text(train, validation, _text_column(rows, source), False, source)


def _embedded_text(model: ModelArguments, data: DataArguments) -> Text:
    if data.streaming:
        raise UsageError("streaming=True needs a dataset_name or a train_file: the embedded text is read at once.")
    try:
        corpus = standard_library_corpus(data.embedded_train_bytes)
    except ValueError as error:
        raise UsageError(f"embedded_train_bytes={data.embedded_train_bytes}: {error}") from error
    train, validation = (
        Dataset.from_generator(
            _document_rows,
            gen_kwargs={"documents": documents},
            cache_dir=model.cache_dir,
            fingerprint=_fingerprint(documents),  # by content: found again by later runs and other workers
        )
        for documents in (corpus.train, corpus.validation)
    )
    return Text(train, validation, "text", True, corpus.describe())


def _document_rows(documents: tuple[Document, ...]) -> Iterator[dict[str, str]]:
    for document in documents:
        yield {"text": document.text}


def _fingerprint(documents: tuple[Document, ...]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        digest.update(hashlib.sha256(document.text.encode("utf-8")).digest())
    return digest.hexdigest()[:16]


def _from_hub(model: ModelArguments, data: DataArguments) -> dict[str, Rows]:
    name = data.dataset_name or ""
    with loading("dataset_name", name, "dataset"):
        return dict(
            datasets.load_dataset(
                name,
                data.dataset_config_name,
                cache_dir=model.cache_dir,
                token=model.token,
                streaming=data.streaming,
            )
        )


def _from_files(model: ModelArguments, data: DataArguments) -> dict[str, Rows]:
    files = {"train": data.train_file, "validation": data.validation_file}
    paths = {side: path for side, path in files.items() if path}
    ending = next(iter(paths.values())).rpartition(".")[2].lower()
    kind = FILE_KINDS[f".{ending}"]
    options: dict[str, Any] = {"keep_linebreaks": data.keep_linebreaks} if kind == "text" else {}
    try:
        return dict(
            datasets.load_dataset(
                kind, data_files=paths, cache_dir=model.cache_dir, streaming=data.streaming, **options
            )
        )
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise UsageError(f"{' and '.join(paths.values())} cannot be read as {kind}: {reason}.") from error


def _split(train: Rows, data: DataArguments) -> tuple[Rows, Rows | None]:
    """Split the first rows off for validation; nothing is on both sides."""
    percentage = data.validation_split_percentage
    if percentage == 0:
        return train, None
    if isinstance(train, IterableDataset):
        raise UsageError(
            "streaming=True cannot split validation text off a stream of unknown length: pass validation_file, a "
            "dataset_name that has a validation split, or --do_train alone."
        )
    kept_out = max(1, len(train) * percentage // 100)
    if kept_out >= len(train):
        raise UsageError(
            f"The training text has {len(train)} row, so that validation_split_percentage={percentage} leaves none: "
            "pass validation_file."
        )
    return train.select(range(kept_out, len(train))), train.select(range(kept_out))


def _text_column(rows: Rows | None, source: str) -> str:
    """The column "text", or else the first one, as in run_clm.

    Raises:
        UsageError: it does not hold text.
    """
    if rows is None:
        raise UsageError(f"{source} has neither a train nor a validation split.")
    features = rows.features or {}
    if not features:  # a stream may not know its columns before its first row
        features = dict.fromkeys(next(iter(rows), {}), None)
    column = "text" if "text" in features else next(iter(features), None)
    if column is None:
        raise UsageError(f"{source} has no rows: give a file with text.")
    feature = features[column]
    if feature is not None and getattr(feature, "dtype", None) not in ("string", "large_string"):
        raise UsageError(
            f"{source} has no column of text: found {', '.join(features)}. Name the column of text `text`, or put it "
            "first."
        )
    return column
