"""Which model and which text: the options people know from transformers' run_clm."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from hf_edgc.clm.errors import UsageError
from hf_edgc.corpus import DEFAULT_TRAIN_BYTES

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

FILE_KINDS = {".txt": "text", ".csv": "csv", ".json": "json", ".jsonl": "json"}
"""File endings that can be read, and the loader of ``datasets`` for each."""


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class ModelArguments:
    """The model, new or trained before, and its tokenizer.

    Raises:
        UsageError: options that exclude each other, or a value out of range.
    """

    _argument_group_name: ClassVar[str] = "model"

    model_name_or_path: str | None = _option(
        None,
        "Model to continue from: a name on the Hub (gpt2, gpt2-medium, gpt2-large, gpt2-xl, distilgpt2) or a local "
        "folder. Default: a new model.",
    )
    model_type: str = _option("gpt2", "Architecture of a new model.")
    config_overrides: str | None = _option(
        None,
        "Changes to the configuration of a new model_type, as in n_embd=128,n_head=4,n_layer=4,n_positions=128. "
        "Excludes config_name and model_name_or_path.",
    )
    config_name: str | None = _option(
        None,
        "Configuration, by Hub name or local folder, when it is not that of model_name_or_path. Without "
        "model_name_or_path: of a new model.",
    )
    tokenizer_name: str | None = _option(
        None,
        "Tokenizer, by Hub name or local folder, when it is not that of model_name_or_path. A new model without one "
        "gets a byte-level BPE tokenizer trained on its text.",
    )
    tokenizer_vocab_size: int = _option(
        4096, "Entries in the vocabulary of a tokenizer that is trained on the text (at least 257)."
    )
    cache_dir: str | None = _option(
        None,
        "Folder for what comes from the Hub and for prepared text. Default: those of the Hugging Face libraries.",
    )
    model_revision: str = _option("main", "Branch, tag or commit of the model on the Hub.")
    token: str | None = _option(None, "Access token for the Hub. Default: the one stored by `hf auth login`.")
    trust_remote_code: bool = _option(
        False, "Run code that comes with a model from the Hub. Only for models whose code you have read."
    )
    dtype: Dtype | None = _option(  # noqa: RUF009  # an immutable default
        None, "Data type of the weights; auto: as stored. Default: float32 for a new model, else as stored."
    )

    def __post_init__(self) -> None:
        """Check values that argparse does not see when an instance is made in Python."""
        if self.dtype is not None and self.dtype not in get_args(Dtype):
            raise UsageError(f"dtype={self.dtype!r} is not allowed: use one of {', '.join(get_args(Dtype))}.")
        if self.tokenizer_vocab_size < 257:
            raise UsageError(
                f"tokenizer_vocab_size={self.tokenizer_vocab_size} is not allowed: use 257 (every byte and the end of "
                "text) or more."
            )
        if self.config_overrides and (self.config_name or self.model_name_or_path):
            other = "model_name_or_path" if self.model_name_or_path else "config_name"
            raise UsageError(
                f"config_overrides={self.config_overrides!r} changes a new model_type and cannot be combined with "
                f"{other}={getattr(self, other)!r}: drop one of the two."
            )


@dataclass(frozen=True)
class DataArguments:
    """The text to train and to evaluate on, and how it is cut into blocks.

    Raises:
        UsageError: options that exclude each other, a value out of range, or a file that cannot be read.
    """

    _argument_group_name: ClassVar[str] = "text"

    dataset_name: str | None = _option(
        None,
        "Data set, by Hub name or local folder. Without it and without files: Python's standard library on this "
        "machine.",
    )
    dataset_config_name: str | None = _option(None, "Configuration of the data set.")
    train_file: str | None = _option(None, "Text to train on: a txt, csv, json or jsonl file.")
    validation_file: str | None = _option(None, "Text to evaluate on: a txt, csv, json or jsonl file.")
    max_train_samples: int | None = _option(None, "Train on the first so many blocks only.")
    max_eval_samples: int | None = _option(None, "Evaluate on the first so many blocks only.")
    streaming: bool = _option(
        False, "Read the training text while training instead of before it; needs max_steps and a tokenizer."
    )
    block_size: int | None = _option(
        None, "Tokens in one training example. Default: the positions of the model, at most 1024."
    )
    validation_split_percentage: int = _option(
        5,
        "Percentage of the training rows, the first ones, kept for validation when there is no other validation text.",
    )
    preprocessing_num_workers: int | None = _option(None, "Processes that tokenize.")
    keep_linebreaks: bool = _option(True, "Keep the line breaks of txt files.")
    overwrite_cache: bool = _option(False, "Prepare the text again although a prepared one is in the cache.")
    embedded_train_bytes: int = _option(
        DEFAULT_TRAIN_BYTES, "Most bytes of the standard library to train on, when that is the text."
    )

    @property
    def is_embedded(self) -> bool:
        """Whether the text is Python's standard library."""
        return not (self.dataset_name or self.train_file or self.validation_file)

    def __post_init__(self) -> None:
        """Check ranges and combinations, and that the files are there."""
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= (high or value):
                allowed = f"an integer from {low} to {high}" if high else f"an integer of at least {low}"
                raise UsageError(f"{name}={value!r} is not allowed: use {allowed}.")
        if self.dataset_name and (self.train_file or self.validation_file):
            raise UsageError(
                f"dataset_name={self.dataset_name!r} cannot be combined with train_file or validation_file: name "
                "either a data set or files."
            )
        if self.train_file and self.validation_file and _ending(self.train_file) != _ending(self.validation_file):
            raise UsageError(
                f"train_file={self.train_file!r} and validation_file={self.validation_file!r} are of different kinds: "
                "use two txt, two csv or two json files."
            )
        for name in ("train_file", "validation_file"):
            if (path := getattr(self, name)) is not None:
                _check_file(name, path)


_RANGES: dict[str, tuple[int, int | None]] = {
    "block_size": (2, None),  # one token to read and one to predict
    "max_train_samples": (1, None),
    "max_eval_samples": (1, None),
    "validation_split_percentage": (0, 99),
    "preprocessing_num_workers": (1, None),
    "embedded_train_bytes": (1, None),
}


def _ending(path: str) -> str:
    return FILE_KINDS.get(Path(path).suffix.lower(), Path(path).suffix)


def _check_file(name: str, path: str) -> None:
    if Path(path).suffix.lower() not in FILE_KINDS:
        raise UsageError(f"{name}={path!r} is of an unknown kind: use a file that ends in {', '.join(FILE_KINDS)}.")
    if not Path(path).is_file():
        raise UsageError(f"{name}={path!r} does not exist: give the path of a {', '.join(FILE_KINDS)} file.")
    if Path(path).stat().st_size == 0:
        raise UsageError(f"{name}={path!r} is empty (0 bytes): give a file with text.")
