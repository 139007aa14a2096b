"""Perplexity: the arithmetic, the `evaluate` metric, and the same number for every batch size and worker count."""

import math
import os
from contextlib import contextmanager

import evaluate
import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from ddp_jobs import tiny_gpt2
from transformers import EvalPrediction, Trainer, TrainingArguments

from hf_edgc.clm import perplexity as perplexity_module
from hf_edgc.clm.blocks import collate
from hf_edgc.clm.perplexity import IGNORED_LABEL, compute_metrics, token_nll
from hf_edgc.metrics import PERPLEXITY_PATH, token_perplexity

BLOCKS, LENGTH = 11, 32  # 11 is divided by none of the batch sizes times workers below
TOKENS = BLOCKS * (LENGTH - 1)


def eval_blocks():
    generator = torch.Generator().manual_seed(5)
    return [{"input_ids": torch.randint(256, (LENGTH,), generator=generator).numpy()} for _ in range(BLOCKS)]


def strong_model():
    """Weights 10 times as large, so that losses differ from block to block."""
    model = tiny_gpt2()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.dim() > 1 else 1)
    return model.eval()


def reference_nll():
    """Mean over all predicted tokens, in float64, one block at a time."""
    model, losses = strong_model(), []
    for block in eval_blocks():
        tokens = torch.from_numpy(block["input_ids"])
        with torch.no_grad():
            scores = model(tokens[None]).logits[0].double()
        losses += [-scores[i].log_softmax(-1)[tokens[i + 1]].item() for i in range(LENGTH - 1)]
    assert len(losses) == TOKENS
    return sum(losses) / TOKENS


@contextmanager
def accelerate_environment(workers):
    """What a launcher would have set, for a process that is in a process group already."""
    before = dict(os.environ)
    if workers > 1:
        index = str(torch.distributed.get_rank())
        os.environ.update(RANK=index, LOCAL_RANK=index, WORLD_SIZE=str(workers), LOCAL_WORLD_SIZE=str(workers))
        os.environ.update(MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state(reset_partial_state=True)


def evaluated(batch_size, workers, output_dir, loss_type="ForCausalLM"):
    """Trainer's metrics on this worker."""
    with accelerate_environment(workers):
        model = strong_model()
        model.loss_type = loss_type
        arguments = TrainingArguments(
            output_dir=output_dir, use_cpu=True, per_device_eval_batch_size=batch_size, disable_tqdm=True
        )
        assert arguments.world_size == workers
        trainer = Trainer(
            model=model,
            args=arguments,
            eval_dataset=eval_blocks(),
            data_collator=collate,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=token_nll,
        )
        return trainer.evaluate()


def evaluated_by_two(**arguments):
    return evaluated(workers=2, **arguments)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("workers", [1, 2])
def test_same_for_every_batch_size_and_number_of_workers(batch_size, workers, run_workers, tmp_path):
    arguments = {"batch_size": batch_size, "output_dir": str(tmp_path)}
    metrics = [evaluated(workers=1, **arguments)] if workers == 1 else run_workers(evaluated_by_two, **arguments)
    assert len(metrics) == workers
    expected = reference_nll()
    for own in metrics:
        assert own["eval_tokens"] == TOKENS  # the blocks that pad the last batch are not counted
        assert own["eval_nll"] == pytest.approx(expected, abs=1e-5)
        assert own["eval_perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)


@pytest.mark.parametrize(("loss_type", "factor"), [(None, (LENGTH - 1) / LENGTH), ("ForCausalLM", 1.0)])
def test_trainers_own_loss_of_gpt2_is_too_low_unless_the_loss_is_named(loss_type, factor, tmp_path):
    metrics = evaluated(BLOCKS, 1, str(tmp_path), loss_type)
    assert metrics["eval_loss"] == pytest.approx(factor * metrics["eval_nll"], rel=1e-5)


@pytest.mark.parametrize("at_once", [1, 70, 2**24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_nll_is_the_sum_over_predicted_tokens(dtype, at_once, monkeypatch):
    monkeypatch.setattr(perplexity_module, "_LOGITS_AT_ONCE", at_once)  # pieces of 1, 3 and all 6 positions
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 7, 23, generator=generator).to(dtype)
    labels = torch.randint(23, (3, 7), generator=generator)
    labels[1, 3:] = IGNORED_LABEL
    labels[2] = IGNORED_LABEL
    result = token_nll((logits, "another output"), labels)
    log_p = logits.double().log_softmax(-1)
    for row, last in enumerate((6, 2, 0)):  # position of the last predicted token
        wanted = -sum(log_p[row, i, labels[row, i + 1]].item() for i in range(last))
        assert result[row].tolist() == pytest.approx([wanted, last], abs=1e-4)
    assert result.shape == (3, 2) and result.dtype == torch.float64


def test_compute_metrics_weighs_tokens_not_sequences():
    sums = np.array([[10.0, 2.0], [1.0, 20.0]])  # nats and tokens
    metrics = compute_metrics(EvalPrediction(predictions=sums, label_ids=None))
    assert metrics == {"perplexity": math.exp(11 / 22), "nll": 0.5, "tokens": 22}


@pytest.fixture(scope="module")
def metric():
    return evaluate.load(str(PERPLEXITY_PATH))


def test_metric_loads_from_its_folder_and_weighs_tokens(metric):
    result = metric.compute(nll=[10.0, 1.0], tokens=[2, 20])
    assert result == {"perplexity": math.exp(0.5), "nll": 0.5, "tokens": 22}


def test_metric_adds_batches_up_in_float64(metric):
    """1e8 + 1 has no place for the 1 in float32."""
    metric.add_batch(nll=[1e8], tokens=[1])
    metric.add_batch(nll=[1.0], tokens=[1])
    assert metric.compute()["nll"] == (1e8 + 1.0) / 2


def test_overflow_is_infinite_and_keeps_the_mean(metric):
    expected = {"perplexity": math.inf, "nll": 1000.0, "tokens": 3}
    assert metric.compute(nll=[1000.0, 2000.0], tokens=[1, 2]) == expected
    assert token_perplexity(3000.0, 3) == expected


def test_no_token_is_an_error(metric):
    with pytest.raises(ValueError, match="tokens=0"):
        metric.compute(nll=[0.0], tokens=[0])
    with pytest.raises(ValueError, match="tokens=0"):
        compute_metrics(EvalPrediction(predictions=np.zeros((4, 2)), label_ids=None))
