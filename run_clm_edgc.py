"""Train or evaluate a causal language model with entropy-driven gradient compression, through Trainer.

accelerate launch --config_file accelerate_configs/cpu_2proc.yaml run_clm_edgc.py --output_dir out --max_steps 100
accelerate launch --config_file accelerate_configs/cpu_2proc.yaml run_clm_edgc.py arguments.json
"""

import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from transformers import Trainer, set_seed

from hf_edgc import EDGCCallback
from hf_edgc.checkpoint import StateError
from hf_edgc.clm.blocks import Blocks, TokenBlocks, build_blocks, collate
from hf_edgc.clm.command_line import Options, parse
from hf_edgc.clm.errors import UsageError, report
from hf_edgc.clm.model import choose_block_size, load_config, load_model, load_tokenizer
from hf_edgc.clm.perplexity import compute_metrics, token_nll
from hf_edgc.clm.plan import check_length, count_steps, find_checkpoint
from hf_edgc.clm.results import Facts, print_summary, write_results
from hf_edgc.clm.text import Text, load_text
from hf_edgc.logs import is_main_process
from hf_edgc.recording import write_report_if_possible


def main() -> int:
    """Run with the command line's options; the exit code is 2, on every worker, for what the user can repair."""
    try:
        be_quiet()
        run(parse(sys.argv[1:]))
        code = 0
    except UsageError as error:
        code = report(error)
    tear_down()
    return code


def run(options: Options) -> None:
    """Prepare, check, train, evaluate, write and print.

    Raises:
        UsageError: before training, for anything in the options or the text that cannot work.
    """
    training = options.training
    set_seed(training.seed)
    config = load_config(options.model)
    block_size = choose_block_size(config, options.data.block_size)
    checkpoint = find_checkpoint(training)
    text, tokenizer, blocks = prepare_text(options, block_size)
    say(f"text: {text.source}")
    if training.do_train:
        known = len(blocks.train) if isinstance(blocks.train, TokenBlocks) else None
        check_length(options.compression, count_steps(training, known))
    model = load_model(options.model, config, tokenizer)
    callback = EDGCCallback(options.compression, report=False)  # it is written below, when the perplexity is known
    trainer = build_trainer(options, model, tokenizer, blocks, callback)

    metrics = train_and_evaluate(trainer, callback, checkpoint)
    facts = Facts(
        source=text.source,
        parameters=model.num_parameters(),
        vocabulary=model.config.vocab_size,
        workers=training.world_size,
        steps=trainer.state.global_step if training.do_train else 0,
        tokens_per_step=block_size * trainer.get_total_train_batch_size(training),
        output_dir=Path(training.output_dir),
    )
    if trainer.is_world_process_zero():
        write_results(metrics, facts.output_dir)
        if callback.state is not None:
            write_report_if_possible(facts.output_dir)
        print_summary(metrics, facts)
    write_model_card(trainer, options)


def prepare_text(options: Options, block_size: int) -> tuple[Text, transformers.PreTrainedTokenizerBase, Blocks]:
    """Load text and tokenizer, and make blocks of what is wanted.

    Raises:
        UsageError: files, names or options that cannot work.
    """
    training = options.training
    # The first worker prepares the text and fills the cache, the others then find it there.
    with training.main_process_first(desc="preparing the text"):
        text = load_text(options.model, options.data, training.do_train, training.do_eval)
        tokenizer = load_tokenizer(options.model, text)
        reuse_cache = not (options.data.overwrite_cache and is_main_process())
        wanted = replace(
            text,
            train=text.train if training.do_train else None,
            validation=text.validation if training.do_eval else None,
        )
        blocks = build_blocks(wanted, tokenizer, block_size, options.data, reuse_cache)
    return text, tokenizer, blocks


def train_and_evaluate(trainer: Trainer, callback: EDGCCallback, checkpoint: str | None) -> dict[str, Any]:
    """Do what is asked for; the figures of both.

    Raises:
        UsageError: the checkpoint has no usable state and require_state is on.
    """
    metrics: dict[str, Any] = {}
    if trainer.args.do_train:
        try:
            metrics |= trainer.train(resume_from_checkpoint=checkpoint).metrics
        except StateError as error:
            raise UsageError(str(error)) from error
        metrics |= callback.summary()
        trainer.save_model()
        trainer.save_state()
    if trainer.args.do_eval:
        metrics |= trainer.evaluate()
        metrics["perplexity"] = metrics["eval_perplexity"]
    return metrics


def write_model_card(trainer: Trainer, options: Options) -> None:
    """Write it, or send it to the Hub with the model; it says of model and data what run_clm's says."""
    facts = {"finetuned_from": options.model.model_name_or_path, "dataset": options.data.dataset_name}
    known = {"tasks": "text-generation", **{name: value for name, value in facts.items() if value is not None}}
    if trainer.args.push_to_hub:
        trainer.push_to_hub(**known)
    elif trainer.args.do_train:
        trainer.create_model_card(**known)


def build_trainer(
    options: Options,
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    blocks: Blocks,
    callback: EDGCCallback,
) -> Trainer:
    """Put everything into a Trainer; EDGC comes in by its callback alone.

    Raises:
        UsageError: options of TrainingArguments that do not go together.
    """
    try:
        return Trainer(
            model=model,
            args=options.training,
            train_dataset=blocks.train,
            eval_dataset=blocks.validation,
            processing_class=tokenizer,
            data_collator=collate,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=token_nll,
            callbacks=[callback],
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def say(line: str) -> None:
    """Print on the main worker."""
    if is_main_process():
        print(line, flush=True)


def be_quiet() -> None:
    """Let only the first worker's libraries speak of more than errors, and keep their small bars out of log files."""
    if not is_main_process():
        transformers.logging.set_verbosity_error()
    if not is_main_process() or not sys.stderr.isatty():
        datasets.disable_progress_bars()
        transformers.logging.disable_progress_bar()


def tear_down() -> None:
    """Free DDP before its process group: gloo may abort at interpreter exit otherwise."""
    gc.collect()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
