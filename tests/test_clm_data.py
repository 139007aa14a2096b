"""Options, text and blocks of the script, without launching it."""

import json
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from ddp_jobs import tiny_gpt2
from transformers import GPT2Config, Trainer, TrainingArguments

from hf_edgc import EDGCConfig
from hf_edgc.clm.arguments import DataArguments, ModelArguments
from hf_edgc.clm.blocks import TokenBlocks, build_blocks, check_long_enough, collate, pack
from hf_edgc.clm.command_line import check_workers, parse
from hf_edgc.clm.errors import EXIT_CODE, UsageError, report
from hf_edgc.clm.hub import loading
from hf_edgc.clm.model import choose_block_size, load_config, load_model, load_tokenizer
from hf_edgc.clm.plan import check_length, count_steps, find_checkpoint
from hf_edgc.clm.results import Facts, summary_rows, write_results
from hf_edgc.clm.text import load_text
from hf_edgc.corpus import train_byte_level_bpe

LINES = [f"line {number} of the text" for number in range(200)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_byte_level_bpe(LINES, 300, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def model_arguments(cache):
    return ModelArguments(cache_dir=cache, tokenizer_vocab_size=300)


@pytest.fixture
def files(tmp_path):
    """One text in each of the kinds of file; "other" columns and a missing row must not disturb."""
    (tmp_path / "text.txt").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    (tmp_path / "text.csv").write_text("\n".join(["other,text", *(f"1,{line}" for line in LINES)]), encoding="utf-8")
    rows = [json.dumps({"other": 1, "text": line}) for line in LINES]
    (tmp_path / "text.json").write_text("\n".join([*rows, json.dumps({"other": 2, "text": None})]), encoding="utf-8")
    return tmp_path


def token_ids(tokenizer, lines):
    return [index for ids in tokenizer(list(lines))["input_ids"] for index in ids]


def all_ids(blocks):
    return np.concatenate([blocks[index]["input_ids"] for index in range(len(blocks))]).tolist()


def refusal(function, *arguments, **options):
    """The message with which a call is refused."""
    with pytest.raises(UsageError) as error:
        function(*arguments, **options)
    return str(error.value)


class TestTokenBlocks:
    def rows(self):
        generator = np.random.default_rng(0)
        return [generator.integers(1000, size=size).tolist() for size in (5, 0, 1, 13, 2, 7, 0, 30, 3)]

    @pytest.mark.parametrize("block_size", [2, 3, 7, 20, 61])
    def test_blocks_are_the_joined_rows(self, block_size):
        rows = self.rows()
        joined = [index for row in rows for index in row]
        table = datasets.Dataset.from_list([{"input_ids": row} for row in rows])
        # Several pieces, as a large table has: blocks go across their borders.
        pieces = datasets.concatenate_datasets([table.select(range(i, i + 1)).flatten_indices() for i in range(9)])
        assert pieces.data.column("input_ids").num_chunks == 9
        for tokenized in (table, pieces):
            blocks = TokenBlocks(tokenized, block_size)
            assert blocks.tokens == len(joined)
            assert len(blocks) == len(joined) // block_size
            assert all_ids(blocks) == joined[: len(blocks) * block_size]
        assert list(pack(rows, block_size)) == [blocks[i]["input_ids"].tolist() for i in range(len(blocks))]

    def test_limit_and_end(self):
        table = datasets.Dataset.from_list([{"input_ids": row} for row in self.rows()])
        assert len(TokenBlocks(table, 7, limit=3)) == 3
        assert len(TokenBlocks(table, 7, limit=300)) == 8
        for index in (3, -1):
            with pytest.raises(IndexError):
                TokenBlocks(table, 7, limit=3)[index]

    def test_batch_has_labels_of_its_own(self):
        batch = collate([{"input_ids": np.array([1, 2], dtype=np.int32)}, {"input_ids": [3, 4]}])
        assert batch["input_ids"].tolist() == batch["labels"].tolist() == [[1, 2], [3, 4]]
        assert batch["labels"].dtype == torch.int64
        batch["labels"][0, 0] = -100
        assert batch["input_ids"][0, 0] == 1


class TestText:
    # datasets leaves the file of a csv stream that is not read to its end to the garbage collector.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
    @pytest.mark.parametrize("kind", ["txt", "csv", "json"])
    @pytest.mark.parametrize("streaming", [False, True])
    def test_every_kind_of_file_gives_the_same_blocks(self, kind, streaming, files, model_arguments, tokenizer):
        path = str(files / f"text.{kind}")
        data = DataArguments(train_file=path, validation_file=path, keep_linebreaks=False, streaming=streaming)
        text = load_text(model_arguments, data, True, True)
        assert text.column == "text"
        blocks = build_blocks(text, tokenizer, 16, data, True)
        expected = token_ids(tokenizer, LINES)
        expected = expected[: len(expected) // 16 * 16]
        assert isinstance(blocks.train, datasets.IterableDataset) == streaming
        assert [index for block in blocks.train for index in block["input_ids"]] == expected
        assert all_ids(blocks.validation) == expected

    def test_line_breaks_are_kept_by_default(self, files, model_arguments, tokenizer):
        data = DataArguments(train_file=str(files / "text.txt"))
        text = load_text(model_arguments, data, True, False)
        assert text.train[3]["text"] == LINES[3] + "\n"

    @pytest.mark.parametrize(("percentage", "kept_out"), [(5, 10), (50, 100), (99, 198)])
    def test_first_rows_are_split_off_for_validation(self, percentage, kept_out, files, model_arguments):
        data = DataArguments(
            train_file=str(files / "text.txt"), validation_split_percentage=percentage, keep_linebreaks=False
        )
        text = load_text(model_arguments, data, True, True)
        assert text.validation["text"] == LINES[:kept_out]
        assert text.train["text"] == LINES[kept_out:]

    def test_nothing_is_split_off_when_not_evaluating(self, files, model_arguments):
        text = load_text(model_arguments, DataArguments(train_file=str(files / "text.txt")), True, False)
        assert text.validation is None and len(text.train) == len(LINES)

    def test_embedded_text_ends_its_documents(self, model_arguments, tokenizer):
        data = DataArguments(embedded_train_bytes=60_000, max_train_samples=7, max_eval_samples=2)
        text = load_text(model_arguments, data, True, True)
        assert text.rows_are_documents and "standard library" in text.source
        assert sum(len(row.encode()) for row in text.train["text"]) <= 60_000
        blocks = build_blocks(text, tokenizer, 32, replace(data, max_train_samples=None), True)
        ends = all_ids(blocks.train).count(tokenizer.eos_token_id)
        assert len(text.train) - 1 <= ends <= len(text.train)
        limited = build_blocks(text, tokenizer, 32, data, True)
        assert (len(limited.train), len(limited.validation)) == (7, 2)

    def test_embedded_text_and_its_tokens_come_from_the_cache(self, model_arguments, tokenizer, monkeypatch):
        data = DataArguments(embedded_train_bytes=50_000)
        first = build_blocks(load_text(model_arguments, data, True, True), tokenizer, 32, data, True)

        def refuse(*arguments, **options):
            raise AssertionError("prepared again")

        monkeypatch.setattr("hf_edgc.clm.text._document_rows", refuse)
        text = load_text(model_arguments, data, True, True)
        monkeypatch.setattr(type(tokenizer), "__call__", refuse)
        again = build_blocks(text, tokenizer, 32, data, True)
        assert all_ids(again.train) == all_ids(first.train)
        with pytest.raises(AssertionError, match="prepared again"):
            build_blocks(text, tokenizer, 32, data, reuse_cache=False)

    def test_refusals(self, files, model_arguments):
        path = str(files / "text.txt")
        (files / "one.txt").write_text("one line only")
        (files / "numbers.csv").write_text("number\n1\n2\n")
        (files / "broken.json").write_text('{"text": ')
        (files / "head.csv").write_text("text\n")

        def load(do_train=True, do_eval=True, **options):
            return refusal(load_text, model_arguments, DataArguments(**options), do_train, do_eval)

        assert "no text to evaluate on" in load(train_file=path, validation_split_percentage=0)
        assert "no text to train on" in load(validation_file=path)
        assert "has 1 row" in load(train_file=str(files / "one.txt"))
        assert "found number" in load(train_file=str(files / "numbers.csv"), do_eval=False)
        assert "cannot be read as json" in load(train_file=str(files / "broken.json"), do_eval=False)
        assert "head.csv" in load(train_file=str(files / "head.csv"), do_eval=False)
        assert "validation_file" in load(train_file=path, streaming=True)
        assert "streaming" in load(streaming=True)
        assert "embedded_train_bytes=10" in load(embedded_train_bytes=10)


class TestShortText:
    def test_names_both_numbers_and_the_largest_usable_block(self):
        message = refusal(check_long_enough, {"training": 5000, "validation": 300}, 512)
        assert "validation text has 300 tokens" in message and "block_size=512" in message
        assert "largest usable block is 300" in message

    def test_largest_block_suits_both_sides(self):
        message = refusal(check_long_enough, {"training": 200, "validation": 30}, 512)
        assert "training text has 200" in message and "largest usable block is 30:" in message

    def test_too_short_for_any_block(self):
        assert "No block is usable" in refusal(check_long_enough, {"training": 1}, 512)

    def test_the_block_it_names_works_and_the_next_does_not(self, files, model_arguments, tokenizer):
        data = DataArguments(train_file=str(files / "text.txt"))
        text = load_text(model_arguments, data, True, True)
        message = refusal(build_blocks, text, tokenizer, 1000, data, True)
        largest = int(message.partition("largest usable block is ")[2].partition(":")[0])
        assert len(build_blocks(text, tokenizer, largest, data, True).validation) == 1
        refusal(build_blocks, text, tokenizer, largest + 1, data, True)

    def test_a_stream_too(self, files, model_arguments, tokenizer):
        data = DataArguments(train_file=str(files / "text.txt"), streaming=True)
        text = load_text(model_arguments, data, True, False)
        tokens = len(token_ids(tokenizer, [line + "\n" for line in LINES]))
        assert f"has {tokens} tokens" in refusal(build_blocks, text, tokenizer, tokens + 1, data, True)
        assert len(list(build_blocks(text, tokenizer, tokens, data, True).train)) == 1


class TestModel:
    def test_new_model_has_the_vocabulary_of_its_tokenizer(self, model_arguments, tokenizer):
        arguments = replace(model_arguments, config_overrides="n_embd=16,n_head=2,n_layer=1,n_positions=32")
        config = load_config(arguments)
        model = load_model(arguments, config, tokenizer)
        assert model.get_input_embeddings().weight.shape == (len(tokenizer), 16)
        assert model.config.eos_token_id == tokenizer.eos_token_id
        assert choose_block_size(config, None) == choose_block_size(config, 32) == 32

    def test_folder_is_read_and_grows_to_its_tokenizer(self, model_arguments, tokenizer, tmp_path):
        saved = tiny_gpt2(vocab_size=280)
        saved.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        arguments = replace(model_arguments, model_name_or_path=str(tmp_path))
        read = load_tokenizer(arguments, text=None)
        assert read.get_vocab() == tokenizer.get_vocab()
        model = load_model(arguments, load_config(arguments), read)
        weight = model.get_input_embeddings().weight
        assert weight.shape[0] == 300 and torch.equal(weight[:280], saved.get_input_embeddings().weight)

    def test_blocks_are_at_most_1024_by_default(self):
        assert choose_block_size(GPT2Config(n_positions=4096), None) == 1024

    def test_refusals(self, model_arguments, tokenizer, files):
        def config(**options):
            return refusal(load_config, replace(model_arguments, **options))

        def model(overrides):
            arguments = replace(model_arguments, config_overrides=overrides)
            return refusal(load_model, arguments, load_config(arguments), tokenizer)

        assert "model_type='gpt3'" in config(model_type="gpt3") and "gpt2" in config(model_type="gpt3")
        assert "model_type='t5'" in config(model_type="t5")  # known, but no causal language model
        assert "n_embed" in config(config_overrides="n_embed=3")
        assert "n_embd=wide" in config(config_overrides="n_embd=wide")
        assert "n_embd" in config(config_overrides="n_embd")
        assert "divisible" in model("n_embd=10,n_head=3")
        assert "has 300 entries" in model("vocab_size=299,n_layer=1")
        message = refusal(choose_block_size, GPT2Config(n_positions=64), 65)
        assert "block_size=65" in message and "64 positions" in message
        data = DataArguments(train_file=str(files / "text.txt"), streaming=True)
        text = load_text(model_arguments, data, True, False)
        assert "tokenizer_name" in refusal(load_tokenizer, model_arguments, text)

    def test_name_that_cannot_be_loaded(self):
        def load(kind):
            with loading("model_name_or_path", "gpt2", kind):
                raise OSError("We couldn't connect.\nand more")

        message = refusal(load, "model")
        assert "model_name_or_path='gpt2'" in message and "We couldn't connect." in message
        assert "hf download gpt2 --local-dir FOLDER" in message
        assert "hf download gpt2 --repo-type dataset" in refusal(load, "dataset")


class TestOptions:
    def test_file_means_the_same_as_the_command_line(self, tmp_path):
        values = {
            "output_dir": str(tmp_path),
            "max_steps": 7,
            "learning_rate": 1e-3,
            "do_train": True,
            "keep_linebreaks": False,
            "config_overrides": "n_embd=16",
            "max_rank": 8,
            "mode": "static",
            "rank": None,
            "report_to": ["none"],
            "lr_scheduler_kwargs": {"power": 2},
        }
        (tmp_path / "a.json").write_text(json.dumps(values))
        (tmp_path / "a.yaml").write_text(
            f"output_dir: {tmp_path}\nmax_steps: 7\nlearning_rate: 1e-3\ndo_train: true\nkeep_linebreaks: false\n"
            "config_overrides: n_embd=16\nmax_rank: 8\nmode: static\nrank: null\nreport_to: [none]\n"
            "lr_scheduler_kwargs: {power: 2}\n"
        )
        words = ["--output_dir", str(tmp_path), "--max_steps", "7", "--learning_rate", "0.001", "--do_train"]
        words += ["--no_keep_linebreaks", "--config_overrides", "n_embd=16", "--max_rank", "8", "--mode", "static"]
        words += ["--report_to", "none", "--lr_scheduler_kwargs", '{"power": 2}']
        wanted = parse(words)
        assert wanted.compression == EDGCConfig(max_rank=8, mode="static") and wanted.training.max_steps == 7
        for name in ("a.json", "a.yaml"):
            made = parse([str(tmp_path / name)])
            assert made.model == wanted.model and made.data == wanted.data
            assert made.compression == wanted.compression
            assert made.training.to_dict() == wanted.training.to_dict()
        assert parse([str(tmp_path / "a.json"), "--max_steps", "9"]).training.max_steps == 9

    def test_help_names_the_options_of_all_four_once(self, monkeypatch, capsys):
        with pytest.raises(SystemExit) as end:
            parse(["--help"])
        assert end.value.code == 0
        shown = capsys.readouterr().out
        for option in ("--config_overrides", "--block_size", "--learning_rate", "--entropy_every"):
            assert shown.count(f"{option} ") == 1, option
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(SystemExit):
            parse(["--help"])
        assert capsys.readouterr().out == ""

    def test_both_are_done_when_neither_is_asked_for(self, tmp_path, capsys):
        for words in ([], ["--eval_strategy", "epoch"]):
            training = parse(["--output_dir", str(tmp_path), *words]).training
            assert training.do_train and training.do_eval
            assert "doing both" in capsys.readouterr().out
        for words in (["--do_train"], ["--do_eval"]):
            training = parse(["--output_dir", str(tmp_path), *words]).training
            assert (training.do_train, training.do_eval) == ("--do_train" in words, "--do_eval" in words)
            assert capsys.readouterr().out == ""

    def test_cpu_is_used_where_there_is_nothing_else(self, tmp_path):
        assert parse(["--output_dir", str(tmp_path)]).training.use_cpu is not torch.accelerator.is_available()

    @pytest.mark.parametrize(
        ("words", "parts"),
        [
            (["--mode", "fast"], ["--mode", "'fast'", "edgc", "static", "none"]),
            (["--dtype", "float8"], ["--dtype", "'float8'", "bfloat16"]),
            (["--max_rank", "0"], ["max_rank=0", "at least 1"]),
            (["--max_steps", "many"], ["--max_steps", "'many'"]),
            (["--blocksize", "3"], ["--blocksize"]),
            (["--block_size", "1"], ["block_size=1", "at least 2"]),
            (["--validation_split_percentage", "100"], ["validation_split_percentage=100", "from 0 to 99"]),
            (["--tokenizer_vocab_size", "256"], ["tokenizer_vocab_size=256", "257"]),
            (["--eval_strategy", "often"], ["often", "steps"]),
            (["--batch_eval_metrics"], ["batch_eval_metrics=True", "False"]),
            (["--config_overrides", "n_embd=8", "--model_name_or_path", "gpt2"], ["config_overrides", "'gpt2'"]),
            (["--dataset_name", "a", "--train_file", "b.txt"], ["dataset_name='a'", "train_file"]),
            (["--train_file", "missing.txt"], ["train_file='missing.txt'", "does not exist"]),
            (["--validation_file", "text.pdf"], ["validation_file='text.pdf'", ".txt, .csv, .json"]),
            (["missing.json"], ["missing.json", "No such file"]),
        ],
    )
    def test_refusals_name_option_value_and_what_is_allowed(self, words, parts, tmp_path):
        message = refusal(parse, [*words, "--output_dir", str(tmp_path)])
        assert [part for part in parts if part not in message] == []

    @pytest.mark.parametrize(
        ("content", "parts"),
        [
            ('{"blocksize": 3}', ["blocksize"]),
            ('{"mode": "fast"}', ["mode", "'fast'", "static"]),
            ('{"max_steps": "many"}', ["max_steps", "'many'"]),
            ('{"rank_step": null}', ["rank_step=null", "4"]),
            ('{"max_rank": ', ["JSON"]),
            ("[1]", ["mapping"]),
        ],
    )
    def test_refusals_of_a_file(self, content, parts, tmp_path):
        (tmp_path / "a.json").write_text(content)
        message = refusal(parse, [str(tmp_path / "a.json"), "--output_dir", str(tmp_path)])
        assert [part for part in parts if part not in message] == []

    def test_files_of_different_kinds(self, files):
        options = {"train_file": str(files / "text.txt"), "validation_file": str(files / "text.csv")}
        assert "different kinds" in refusal(DataArguments, **options)

    def test_values_are_checked_in_python_too(self):
        assert "dtype='float8'" in refusal(ModelArguments, dtype="float8")

    def test_workers_that_do_not_see_each_other(self, monkeypatch):
        check_workers(1)
        monkeypatch.setenv("WORLD_SIZE", "2")
        check_workers(2)
        message = refusal(check_workers, 1)
        assert "started 2 processes" in message and "--use_cpu" in message

    def test_message_is_one_paragraph_on_the_main_worker_only(self, monkeypatch, capsys):
        assert report(UsageError("this\n is   wrong")) == EXIT_CODE == 2
        assert capsys.readouterr().err == "error: this is wrong\n"
        monkeypatch.setenv("RANK", "1")
        assert report(UsageError("this is wrong")) == EXIT_CODE
        assert capsys.readouterr().err == ""


class TestPlan:
    @pytest.mark.parametrize(
        "options",
        [
            {"per_device_train_batch_size": 3},
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "num_train_epochs": 2.5},
            {"per_device_train_batch_size": 4, "dataloader_drop_last": True, "num_train_epochs": 2},
            {"max_steps": 5},
        ],
    )
    def test_steps_are_those_of_trainer(self, options, tmp_path):
        training = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options)
        examples = [{"input_ids": [1, 2, 3]}] * 22
        trainer = Trainer(model=tiny_gpt2(), args=training, train_dataset=examples, data_collator=collate)
        expected = trainer.set_initial_training_values(training, trainer.get_train_dataloader())[-1]
        assert count_steps(training, len(examples)) == expected

    def test_refusals(self, tmp_path):
        training = TrainingArguments(
            output_dir=str(tmp_path / "new"), use_cpu=True, dataloader_drop_last=True, per_device_train_batch_size=8
        )
        assert "max_steps" in refusal(count_steps, training, None)
        assert "7 blocks" in refusal(count_steps, training, 7)
        message = refusal(check_length, EDGCConfig(window_steps=11), 10)
        assert "window_steps=11" in message and "10 optimizer steps" in message
        assert "warmup_fraction=0.95" in refusal(
            check_length, EDGCConfig(warmup_fraction=0.95, warmup_max_fraction=0.95), 10
        )
        check_length(EDGCConfig(window_steps=10), 10)

    def test_checkpoint_to_resume_from(self, tmp_path):
        def find(value):
            return find_checkpoint(
                TrainingArguments(output_dir=str(tmp_path), use_cpu=True, resume_from_checkpoint=value)
            )

        assert find(None) is None and find("false") is None
        with pytest.raises(UsageError, match="found no checkpoint"):
            find("true")
        for step in (5, 10):
            (tmp_path / f"checkpoint-{step}").mkdir()
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
        assert find("true") == str(tmp_path / "checkpoint-10")
        assert find(str(tmp_path / "checkpoint-5")) == str(tmp_path / "checkpoint-5")
        with pytest.raises(UsageError, match=r"trainer_state.json"):
            find(str(tmp_path))


class TestResults:
    FACTS = Facts("a text", 1_500_000, 300, 2, 10, 64, "out")

    def test_table_shows_what_was_measured(self):
        metrics = {"train_runtime": 3.0, "train_loss": 2.5, "edgc_sent_bytes": 2e6, "edgc_dense_bytes": 8e6}
        metrics |= {"edgc_compression_ratio": 4.0, "edgc_final_rank": 6, "edgc_hook_s": 0.5}
        metrics |= {"perplexity": 12.34, "eval_nll": 2.5129, "eval_tokens": 1000}
        shown = dict(summary_rows(metrics, self.FACTS))
        assert shown["perplexity"].startswith("12.34") and "1,000 tokens" in shown["perplexity"]
        assert shown["sent"].startswith("2.0 MB") and shown["dense"].startswith("8.0 MB")
        assert (shown["compression ratio"], shown["final matrix rank"]) == ("4.00", "6")
        assert "10 (640 tokens)" in shown["steps"]

    def test_table_without_training_or_evaluation(self):
        shown = dict(summary_rows({}, replace(self.FACTS, steps=0)))
        assert set(shown) == {"text", "model", "workers", "written to"}

    def test_file_replaces_that_of_an_earlier_run(self, tmp_path):
        write_results({"old": 1}, tmp_path)
        path = write_results({"perplexity": float("inf"), "eval_nll": 800.0}, tmp_path)
        assert json.loads(path.read_text()) == {"perplexity": float("inf"), "eval_nll": 800.0}
        assert path.name == "all_results.json"
