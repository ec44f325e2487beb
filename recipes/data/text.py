# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Loads documents, trains tokenizers, cuts documents into rows of token ids, and caches results on disk."""

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data import python_stdlib


_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_FILE_BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
_TOKENIZER_CHARACTERS = 8_000_000  # a sample suffices for a small vocabulary, and takes seconds


def load_documents(
    name: str,
    config: str | None,
    text_column: str,
    validation_percentage: float,
    seed: int,
    max_documents: int | None = None,
) -> DatasetDict:
    """
    Loads documents, and splits off a validation set if there is none.

    Args:
        name (`str`):
            `python-stdlib`, a folder of text files (one document each) or of `.json`, `.jsonl`, `.csv` or `.parquet`
            files, one such file or a `.txt` file, also compressed as `.gz`, a folder written by
            `Dataset.save_to_disk`, or a dataset of the Hub.
        config (`str`, *optional*):
            The configuration of a dataset of the Hub.
        text_column (`str`):
            The column that holds the text.
        validation_percentage (`float`):
            Percentage of the training documents set aside when the dataset has no `validation` split.
        seed (`int`):
            Seed of the split and of the choice of `max_documents`.
        max_documents (`int`, *optional*):
            Number of documents to choose from the training split; by default all.

    Returns:
        [`~datasets.DatasetDict`] with the splits `train` and `validation` and `text_column` as only column.

    Raises:
        `ValueError`: if there is no such column or it has no texts, or no document, or a file is empty or broken.
    """
    documents = load_splits(name, config)
    for split, rows in documents.items():
        if text_column not in rows.column_names:
            raise ValueError(f"text_column={text_column!r} is not in {name!r}: choose one of {rows.column_names}.")
        documents[split] = _with_text(rows.select_columns(text_column), text_column, name)
    if max_documents is not None and max_documents < 1:
        raise ValueError(f"max_documents={max_documents} leaves no document: use 1 or more.")
    if max_documents is not None and max_documents < len(documents["train"]):
        documents["train"] = documents["train"].shuffle(seed=seed).select(range(max_documents))
    return with_validation(documents, validation_percentage, seed)


def with_validation(splits: DatasetDict, percentage: float, seed: int) -> DatasetDict:
    """Returns the splits `train` and `validation`; the second is part of the first if there is none."""
    if "validation" in splits:
        return DatasetDict(train=splits["train"], validation=splits["validation"])
    if not 0 < percentage < 100:
        raise ValueError(
            f"validation_split_percentage={percentage:g} leaves no row to train or none to evaluate: use one between "
            "0 and 100, or give a dataset with a validation split."
        )
    if len(splits["train"]) < 2:
        raise ValueError(f"The dataset has too few rows ({len(splits['train'])}) to evaluate with some: give more.")
    parts = splits["train"].train_test_split(test_size=percentage / 100, seed=seed)
    return DatasetDict(train=parts["train"], validation=parts["test"])


def load_splits(name: str, config: str | None) -> DatasetDict:
    """Loads the splits `train` and, if there is one, `validation` of a dataset."""
    loaded = load_dataset_of(name, config)
    splits = loaded if isinstance(loaded, DatasetDict) else DatasetDict(train=loaded)
    if "train" not in splits:
        raise ValueError(f"{name!r} has the splits {list(splits)} and no split 'train': rename one of them.")
    return DatasetDict({split: splits[split] for split in ("train", "validation") if split in splits})


def _with_text(rows: Dataset, column: str, name: str) -> Dataset:
    """Returns the rows without those that have no text, such as empty fields of a csv file."""
    kind = getattr(rows.features[column], "dtype", None)
    if kind == "null" or (rows.data.column(column).null_count and kind in ("string", "large_string")):
        rows = rows.filter(lambda text: text is not None, input_columns=column, desc="Rows with text")
    elif kind not in ("string", "large_string"):
        raise ValueError(
            f"The column {column!r} of {name!r} has no texts but {rows.features[column]}: choose another."
        )
    return rows


def load_dataset_of(name: str, config: str | None) -> Dataset | DatasetDict:
    """Loads a dataset of any of the kinds that [`load_documents`] names."""
    path = Path(name)
    if name == python_stdlib.NAME:
        return python_stdlib.load_python_stdlib()
    if path.is_file():
        if _builder(path) is None:
            raise ValueError(
                f"dataset_name={name!r} is not a kind of file that is read: use {sorted(_FILE_BUILDERS)}."
            )
        return _of_files(name, _builder(path), [path])
    if not path.exists() and (path.is_absolute() or _builder(path) is not None or name.count("/") > 1):
        raise ValueError(f"dataset_name={name!r} does not exist: give a folder, a file, or an id on the Hub.")
    if not path.is_dir():
        return load_dataset(name, config)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return load_from_disk(name)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    if not files:
        raise ValueError(f"dataset_name={name!r} is an empty folder: put one text file per document there.")
    of_rows = Counter(builder for builder in map(_builder, files) if builder not in (None, "text"))
    texts = [file for file in files if _builder(file) in (None, "text") and _is_text(file)]
    builder, count = of_rows.most_common(1)[0] if of_rows else (None, 0)
    if count > len(texts):
        return _of_files(name, builder, [file for file in files if _builder(file) == builder])
    documents = [file for file in files if _is_text(file)]
    return _of_files(name, "text", documents, sample_by="document")


def _builder(path: Path) -> str | None:
    """Returns the kind of a file's rows, by its name without that of its compression."""
    suffixes = [suffix for suffix in path.suffixes if suffix not in _COMPRESSED]
    return _FILE_BUILDERS.get(suffixes[-1]) if suffixes else None


def _is_text(path: Path) -> bool:
    """Returns whether a file has something that is no binary data, but for compressed text."""
    if path.suffix in _COMPRESSED:
        return _builder(path) == "text"
    with open(path, "rb") as file:
        begin = file.read(8192)
    return bool(begin.strip()) and b"\0" not in begin


def _of_files(name: str, builder: str, files: list[Path], **options: str) -> DatasetDict:
    """Opens files of one kind; names the first one that is empty."""
    if not files:
        raise ValueError(f"dataset_name={name!r} has no file with text: put one text file per document there.")
    for file in files:
        if file.stat().st_size == 0:
            raise ValueError(f"dataset_name={name!r}: {str(file)!r} is empty: remove it, or fill it.")
    if builder == "text":
        options["encoding_errors"] = "ignore"
    try:
        return load_dataset(builder, data_files=[str(file) for file in files], **options)
    except (DatasetsError, OSError, ValueError) as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(
            f"dataset_name={name!r} cannot be read as {builder} ({reason}): correct its files."
        ) from error


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """
    Trains a byte-level BPE tokenizer, which can encode any text.

    Args:
        texts (iterable of `str`):
            Documents; those after the first 8 million characters are not read.
        vocab_size (`int`):
            Number of tokens, the 256 bytes and the two special tokens included.

    Returns:
        [`~transformers.PreTrainedTokenizerFast`] with `<|endoftext|>` to begin and end a text and `<|pad|>`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_characters(texts, _TOKENIZER_CHARACTERS), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
    )


def _first_characters(texts: Iterable[str], limit: int) -> Iterable[str]:
    for text in texts:
        if limit <= 0:
            return
        yield text[:limit]
        limit -= len(text)


def documents_to_rows(
    documents: DatasetDict, tokenizer: PreTrainedTokenizerBase, text_column: str, max_length: int, overflow: str
) -> DatasetDict:
    """
    Cuts documents into rows of at most `max_length` tokens. A row never holds two documents.

    Args:
        documents ([`~datasets.DatasetDict`]):
            Result of [`load_documents`].
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer; its end token follows each document.
        text_column (`str`):
            The column that holds the text.
        max_length (`int`):
            Longest row, in tokens.
        overflow (`str`):
            `"split"` cuts a longer document into several rows, `"truncate"` keeps its first row.

    Returns:
        [`~datasets.DatasetDict`] of the same splits with the only column `input_ids`, rows of 2 to `max_length` ids.

    Raises:
        `ValueError`: if a split has no such row.
    """
    if max_length < 2:
        raise ValueError(f"max_length={max_length} leaves no token to predict: use 2 or more.")

    def cut(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        rows = []
        for ids in tokenizer(batch[text_column], return_attention_mask=False, verbose=False)["input_ids"]:
            if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
                ids = ids + [tokenizer.eos_token_id]
            end = len(ids) if overflow == "split" else max_length
            pieces = (ids[start : start + max_length] for start in range(0, end, max_length))
            rows.extend(piece for piece in pieces if len(piece) > 1)  # a single token predicts nothing
        return {"input_ids": rows}

    divided = documents.map(cut, batched=True, batch_size=100, remove_columns=[text_column], desc="Tokenizing")
    for split, rows in divided.items():
        if len(rows) == 0:
            count = len(documents[split])
            raise ValueError(f"None of the {count:,} documents of the split {split!r} has two tokens: give more text.")
    return divided


def fingerprint(*parts: object) -> str:
    """
    Returns a short name of the parts, equal in every process.

    Args:
        parts (JSON values, datasets or tokenizers):
            Everything that determines the named content.

    Returns:
        `str` of 16 hexadecimal digits.
    """
    return hashlib.sha256(json.dumps([_describe(part) for part in parts]).encode()).hexdigest()[:16]


def _describe(part: object) -> object:
    if isinstance(part, DatasetDict):
        return {split: rows._fingerprint for split, rows in part.items()}  # the content hash that `datasets` keeps
    if isinstance(part, PreTrainedTokenizerBase):
        return [part.backend_tokenizer.to_str(), part.eos_token]
    return part


def cached(
    folder: Path, make: Callable[[], object], save: Callable[[object, str], object], load: Callable[[str], object]
):
    """
    Loads the content of `folder`, which is made and saved first if the folder does not exist.

    The folder is renamed into place when it is complete. An interrupted run leaves no incomplete folder, and two
    machines on a shared disk do not mix their files.

    Args:
        folder (`Path`):
            Folder whose name identifies the content, see [`fingerprint`].
        make (`Callable`):
            Function that makes the content.
        save (`Callable`):
            Function that writes the content into a folder.
        load (`Callable`):
            Function that reads the content of a folder.
    """
    if not folder.is_dir():
        content = make()
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent)
        save(content, unfinished)
        try:
            os.replace(unfinished, folder)
        except OSError:  # another machine was faster
            shutil.rmtree(unfinished)
    return load(str(folder))
