"""From the command line, or one JSON or YAML file, to the four sets of options."""

import difflib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments

from hf_edgc import EDGCConfig
from hf_edgc.clm.arguments import DataArguments, ModelArguments
from hf_edgc.clm.errors import UsageError
from hf_edgc.logs import is_main_process

_FILE_ENDINGS = (".json", ".yaml", ".yml")

_NEEDED_FOR_PERPLEXITY = {
    "prediction_loss_only": False,
    "batch_eval_metrics": False,
    "eval_do_concat_batches": True,
}
"""Options of TrainingArguments that change what Trainer hands to ``compute_metrics``."""


class Options(NamedTuple):
    """What a run was asked to do."""

    model: ModelArguments
    data: DataArguments
    training: TrainingArguments
    compression: EDGCConfig


def parse(argv: Sequence[str]) -> Options:
    """Read ``argv`` (without the program's name): options, or a JSON or YAML file and options that override it.

    Sets ``use_cpu`` where there is no accelerator: workers on such a machine would train alone without it. Starts the
    process group, as making TrainingArguments does.

    Raises:
        UsageError: an unknown option, a value that is not allowed, or workers that do not see each other.
    """
    kinds: Any = [ModelArguments, DataArguments, TrainingArguments, EDGCConfig]
    parser = Parser(
        kinds,
        usage="run_clm_edgc.py [arguments.json or .yaml] [--option value ...]",
        allow_abbrev=False,
    )
    parser.set_defaults(
        use_cpu=not torch.accelerator.is_available(),
        # Trainer would search for unused parameters, of which language models have none; it costs a pass a step.
        ddp_find_unused_parameters=False,
        log_level_replica="error",
    )
    arguments = list(argv)
    if arguments and arguments[0].lower().endswith(_FILE_ENDINGS):
        arguments[:1] = _file_arguments(parser, Path(arguments[0]))
    found, rest = parser.read(arguments)
    if rest:
        raise UsageError(_unknown(parser, rest[0]))
    options = Options(*found)
    check_workers(options.training.world_size)
    for name, needed in _NEEDED_FOR_PERPLEXITY.items():
        if getattr(options.training, name) != needed:
            raise UsageError(f"{name}={not needed} is not allowed: perplexity needs {needed}.")
    return _choose_actions(options)


def check_workers(seen: int) -> None:
    """Refuse to train alone in each of several processes.

    Args:
        seen: number of workers that Accelerate sees.

    Raises:
        UsageError: the launcher started more.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > seen:
        raise UsageError(
            f"The launcher started {started} processes, but Accelerate sees {seen}: each would train alone, without "
            "exchanging gradients. On machines without a GPU use --use_cpu true; on machines with GPUs start at most "
            "as many processes as there are GPUs."
        )


def _unknown(parser: "Parser", word: str) -> str:
    if word.lower().endswith(_FILE_ENDINGS):
        return f"{word}: the file of arguments goes first, options that override it after it."
    if not word.startswith("-"):
        return f"{word!r} is not an option, nor the value of one; options start with --, see --help."
    known = [option for option in parser._option_string_actions if "-" not in option[2:]]
    near = difflib.get_close_matches(word.split("=")[0].replace("-", "_").replace("__", "--", 1), known, n=1)
    return f"unknown option {word}" + (f"; did you mean {near[0]}?" if near else "; see --help.")


class Parser(HfArgumentParser):
    """HfArgumentParser that raises its errors, and shows its help once instead of once a worker."""

    def read(self, arguments: Sequence[str]) -> tuple[list[Any], list[str]]:
        """The sets of options, and the words that belong to none.

        Raises:
            UsageError: a value that is not allowed.
        """
        try:
            *found, rest = self.parse_args_into_dataclasses(
                list(arguments), return_remaining_strings=True, look_for_args_file=False
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Raise instead of ending the process."""
        raise UsageError(message)

    def print_help(self, file: Any = None) -> None:
        """Print it on the main worker."""
        if is_main_process():
            super().print_help(file)


def _file_arguments(parser: Parser, path: Path) -> list[str]:
    """The options in a file, as the command line that means the same: values are then checked in one place."""
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"The file of arguments {path} cannot be read: {error.strerror}.") from error
    except (ValueError, yaml.YAMLError) as error:
        raise UsageError(f"The file of arguments {path} is not valid {path.suffix[1:].upper()}: {error}.") from error
    if not isinstance(values, dict):
        raise UsageError(f"The file of arguments {path} must hold one mapping of options to values.")
    known = vars(parser.parse_args([]))
    if unknown := sorted(str(name) for name in values if name not in known):
        raise UsageError(f"The file of arguments {path} names unknown options: {', '.join(unknown)}.")
    return [word for name, value in values.items() for word in _words(name, value, known[name])]


def _words(name: str, value: Any, default: Any) -> list[str]:
    if value is None and default is not None:
        raise UsageError(f"{name}=null is not allowed: leave the option out to get its default, {default!r}.")
    if value is None:
        return []
    if isinstance(value, list):
        return [f"--{name}", *(str(item) for item in value)]
    return [f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"]


def _choose_actions(options: Options) -> Options:
    """Train and evaluate when neither was asked for, or when only TrainingArguments asked by eval_strategy."""
    training = options.training
    asked_to_evaluate = training.do_eval and training.eval_strategy == "no"
    if not training.do_train and not asked_to_evaluate:
        training.do_train = training.do_eval = True
        if is_main_process():
            print("neither --do_train nor --do_eval was given: doing both", flush=True)
    return options
