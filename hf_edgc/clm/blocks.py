"""From rows of text to blocks of tokens, all of the same length."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from hf_edgc.clm.arguments import DataArguments
from hf_edgc.clm.errors import UsageError
from hf_edgc.clm.text import Rows, Text


class TokenBlocks(torch.utils.data.Dataset[dict[str, npt.NDArray[np.int32]]]):
    """Rows of tokens joined and cut into blocks of (block_size,); a last shorter piece is left out.

    Nothing is copied: a block is a slice of the memory-mapped table of ``tokenized``.

    Args:
        tokenized: rows with a field ``input_ids``, lists of any length.
        block_size: tokens in a block.
        limit: most blocks to show; default: all.
    """

    def __init__(self, tokenized: Dataset, block_size: int, limit: int | None = None) -> None:
        """Find where each piece of the table starts."""
        column = tokenized.data.column("input_ids") if len(tokenized) else None
        pieces = column.chunks if column is not None else []
        self._pieces = [piece.flatten().to_numpy(zero_copy_only=False) for piece in pieces]
        self._ends = np.cumsum([len(piece) for piece in self._pieces], dtype=np.int64)
        self.tokens = int(self._ends[-1]) if len(self._ends) else 0
        self.block_size = block_size
        blocks = self.tokens // block_size
        self._length = blocks if limit is None else min(limit, blocks)

    def __len__(self) -> int:
        """Number of blocks."""
        return self._length

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[np.int32]]:
        """The block at ``index``, as ``input_ids`` of shape (block_size,)."""
        if not 0 <= index < self._length:
            raise IndexError(f"block {index} of {self._length}")
        start, stop = index * self.block_size, (index + 1) * self.block_size
        parts = []
        number = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            offset = int(self._ends[number]) - len(self._pieces[number])
            part = self._pieces[number][start - offset : stop - offset]
            parts.append(part)
            start += len(part)
            number += 1
        return {"input_ids": parts[0] if len(parts) == 1 else np.concatenate(parts)}


@dataclass(frozen=True)
class Blocks:
    """Examples with one field, ``input_ids`` of shape (block_size,); a side is None when it has no text."""

    train: TokenBlocks | IterableDataset | None
    validation: TokenBlocks | None


def build_blocks(
    text: Text, tokenizer: PreTrainedTokenizerBase, block_size: int, data: DataArguments, reuse_cache: bool
) -> Blocks:
    """Tokenize each side of ``text``, join its rows and cut them into blocks.

    Validation is always read in full, a training text with ``streaming`` while training.

    Args:
        text: what to cut.
        tokenizer: turns text into token ids.
        block_size: tokens in a block.
        data: how many blocks to keep, and how many processes tokenize.
        reuse_cache: whether text tokenized before may be used.

    Raises:
        UsageError: a side is shorter than one block.
    """
    sides: dict[str, TokenBlocks] = {}
    stream = None
    for name, rows, limit in (
        ("training", text.train, data.max_train_samples),
        ("validation", text.validation, data.max_eval_samples),
    ):
        if rows is None:
            continue
        tokenized = _tokenize(rows, text, tokenizer, data.preprocessing_num_workers, reuse_cache)
        if isinstance(tokenized, IterableDataset) and name == "training":
            stream = _stream(tokenized, block_size, limit)
            continue
        if isinstance(tokenized, IterableDataset):
            tokenized = Dataset.from_list(list(tokenized))
        sides[name] = TokenBlocks(tokenized, block_size, limit)
    check_long_enough({name: blocks.tokens for name, blocks in sides.items()}, block_size)
    return Blocks(stream if stream is not None else sides.get("training"), sides.get("validation"))


def check_long_enough(tokens: dict[str, int], block_size: int) -> None:
    """Refuse a text that does not fill one block.

    Args:
        tokens: number of tokens of each side, by name.
        block_size: tokens in a block.

    Raises:
        UsageError: names the side, both numbers and the largest usable block.
    """
    short = [name for name, count in tokens.items() if count < block_size]
    if not short:
        return
    largest = min(tokens.values())
    repair = f"The largest usable block is {largest}: use --block_size {largest} or less, or a longer text."
    if largest < 2:
        repair = "No block is usable (the smallest has 2 tokens): use a longer text."
    raise UsageError(
        f"The {short[0]} text has {tokens[short[0]]} tokens, shorter than one block of block_size={block_size}. "
        + repair
    )


def pack(rows: Iterable[Sequence[int]], block_size: int) -> Iterator[list[int]]:
    """Join rows of token ids and cut them into blocks of ``block_size``; a last shorter piece is left out."""
    left: list[int] = []
    for row in rows:
        left.extend(row)
        full = len(left) // block_size * block_size
        for start in range(0, full, block_size):
            yield left[start : start + block_size]
        del left[:full]


def collate(examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack blocks to ``input_ids`` and ``labels`` of shape (B, L); the model shifts the labels."""
    input_ids = torch.from_numpy(np.stack([np.asarray(example["input_ids"], dtype=np.int64) for example in examples]))
    return {"input_ids": input_ids, "labels": input_ids.clone()}


def _tokenize(
    rows: Rows, text: Text, tokenizer: PreTrainedTokenizerBase, processes: int | None, reuse_cache: bool
) -> Rows:
    end = [tokenizer.eos_token_id] if text.rows_are_documents and tokenizer.eos_token_id is not None else []
    options: dict[str, Any] = {
        "batched": True,
        "fn_kwargs": {"tokenizer": tokenizer, "column": text.column, "end": end},
        "remove_columns": rows.column_names or [text.column],
    }
    if isinstance(rows, IterableDataset):
        return rows.map(_token_ids, **options)
    return rows.map(_token_ids, num_proc=processes, load_from_cache_file=reuse_cache, desc="tokenizing", **options)


def _token_ids(
    batch: dict[str, list[Any]], tokenizer: PreTrainedTokenizerBase, column: str, end: list[int]
) -> dict[str, list[list[int]]]:
    """Token ids of each row; a missing text is an empty one."""
    texts = [text or "" for text in batch[column]]
    # verbose=False: rows longer than the model are expected, they are cut into blocks.
    return {"input_ids": [ids + end for ids in tokenizer(texts, verbose=False)["input_ids"]]}


def _stream(tokenized: IterableDataset, block_size: int, limit: int | None) -> IterableDataset:
    """The blocks of ``tokenized``, made when they are asked for.

    Raises:
        UsageError: there is not one block.
    """
    stream = IterableDataset.from_generator(_stream_rows, gen_kwargs={"tokenized": tokenized, "block_size": block_size})
    if next(iter(stream), None) is None:
        check_long_enough({"training": sum(len(row["input_ids"]) for row in tokenized)}, block_size)
    return stream if limit is None else stream.take(limit)


def _stream_rows(tokenized: IterableDataset, block_size: int) -> Iterator[dict[str, list[int]]]:
    for block in pack((row["input_ids"] for row in tokenized), block_size):
        yield {"input_ids": block}
