"""What the two workers of bench_quality do: one training, the same but for what is compressed and how."""

import gc
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from quality_setups import Size
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

from hf_edgc import EDGCConfig, EDGCState, edgc_hook
from hf_edgc.clm.perplexity import token_nll
from hf_edgc.corpus import standard_library_corpus, train_byte_level_bpe
from hf_edgc.records import StepRecord

VALIDATION_TOKENS = 61_440
"""480 blocks of 128: the standard error of the mean of token losses with a spread of 3 nats is 0.012, and that of the
difference of two models on the same tokens far less."""

POINTS = 40
"""Of a curve over a run."""


def prepare_text(size: Size, cache: Path) -> dict[str, Any]:
    """Tokenize the standard library once; the main process calls this before the workers read the files."""
    folder = cache / f"tokens-{size.vocabulary}"
    corpus = standard_library_corpus()
    tokenizer = train_byte_level_bpe([document.text for document in corpus.train], size.vocabulary, cache)
    for name, documents in (("train", corpus.train), ("validation", corpus.validation)):
        path = folder / f"{name}.npy"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            rows = tokenizer([document.text for document in documents], verbose=False)["input_ids"]
            np.save(path, np.concatenate([np.array([*row, tokenizer.eos_token_id], dtype=np.int32) for row in rows]))
    return {"text": corpus.describe(), "vocabulary": len(tokenizer)}


def train(
    size: Size,
    seed: int,
    options: dict[str, Any],
    torch_hook: str | None,
    cache: str,
    phase: str,
    save: str | None = None,
) -> dict[str, Any]:
    """One training on this worker, and its share of the validation.

    Args:
        size: model and training.
        seed: of the initial weights and of the batches.
        options: of EDGCConfig.
        torch_hook: one of torch's default hooks to use instead of EDGC's.
        cache: folder with the tokens.
        phase: ``scratch`` reads all training text, ``base`` its first half; ``finetune`` starts from what ``base`` has
            saved and reads the second half, for half the steps at a quarter of the rate.
        save: name of the model's file, to write or to start from.
    """
    model = _new_model(size, seed)
    steps, rate, half = size.steps, size.learning_rate, slice(0, None)
    path = Path(cache) / str(save)
    if phase == "finetune":
        model.load_state_dict(torch.load(path, weights_only=True))
        steps, rate = size.steps // 2, size.learning_rate / 4
    tokens = np.load(Path(cache) / f"tokens-{size.vocabulary}" / "train.npy", mmap_mode="r")
    if phase != "scratch":
        half = slice(0, len(tokens) // 2) if phase == "base" else slice(len(tokens) // 2, None)
    result = _fit(model, size, seed, steps, rate, tokens[half], options, torch_hook)
    if phase == "base" and dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
    return {**result, "steps": steps, **_validate(model, size, Path(cache))}


def _new_model(size: Size, seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=size.vocabulary, n_embd=size.width, n_layer=size.layers, n_head=size.heads, n_positions=size.block,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # which GPT-2 does not say; transformers warns of it
    return model


def _fit(
    model: GPT2LMHeadModel, size: Size, seed: int, steps: int, rate: float, tokens: Any, options: Any, torch_hook: Any
) -> dict[str, Any]:
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, round(0.07 * steps), steps)
    records: list[StepRecord] = []
    state = None
    if torch_hook is None:
        state = EDGCState(EDGCConfig(**options), model.named_parameters(), total_steps=steps)
        state.learning_rate = lambda: optimizer.param_groups[0]["lr"]
        state.on_record = records.append
        ddp.register_comm_hook(state, edgc_hook)
    else:
        ddp.register_comm_hook(None, getattr(default_hooks, torch_hook))
    losses, start = [], time.perf_counter()
    for step in range(steps):
        batch = _batch(tokens, size, seed, step)
        loss = ddp(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # as Trainer does
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    seconds = time.perf_counter() - start
    del ddp
    gc.collect()
    dense = steps * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    sent = dense // 2 if state is None else state.totals.sent_bytes  # torch's 16-bit hooks halve float32
    return {
        "sent_bytes": sent,
        "dense_bytes": dense,
        "ratio": dense / sent,
        "parameters": model.num_parameters(),
        "seconds": round(seconds, 1),
        "hook_s": None if state is None else round(state.totals.hook_s, 1),
        "train_loss": _thinned_means(torch.stack(losses).tolist()),
        "matrices": [] if state is None else [matrix.name for matrix in state.layout.matrices],
        "curve": _curve(records),
        "prediction_rms": _prediction_rms(records),
    }


def _batch(tokens: Any, size: Size, seed: int, step: int) -> torch.Tensor:
    """This worker's blocks of one step, (batch, block): the same whatever is compressed."""
    generator = np.random.default_rng([seed, step, dist.get_rank()])
    starts = generator.integers(0, len(tokens) - size.block, size.batch)
    return torch.from_numpy(np.stack([tokens[start : start + size.block] for start in starts]).astype(np.int64))


def _validate(model: GPT2LMHeadModel, size: Size, cache: Path) -> dict[str, float]:
    """Sum of token losses and token count of this worker's share of the validation text."""
    tokens = np.load(cache / f"tokens-{size.vocabulary}" / "validation.npy", mmap_mode="r")
    count = min(VALIDATION_TOKENS, len(tokens)) // size.block
    blocks = tokens[: count * size.block].reshape(count, size.block)[dist.get_rank() :: dist.get_world_size()]
    total = torch.zeros(2, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for start in range(0, len(blocks), 32):
            batch = torch.from_numpy(blocks[start : start + 32].astype(np.int64))
            total += token_nll(model(input_ids=batch).logits, batch).sum(0)
    return {"nll_sum": total[0].item(), "tokens": total[1].item()}


def _curve(records: list[StepRecord]) -> list[dict[str, Any]]:
    """Measured steps, thinned: what the controller saw and did."""
    measured = [record for record in records if record.entropy is not None]
    keys = (
        "step",
        "phase",
        "rank",
        "ranks",
        "entropy",
        "grad_norm",
        "error_norm",
        "predicted_error_norm",
        "learning_rate",
    )
    every = max(1, -(-len(measured) // POINTS))
    return [{key: value for key, value in asdict(record).items() if key in keys} for record in measured[::every]]


def _prediction_rms(records: list[StepRecord]) -> float | None:
    """Root mean square of ln(predicted / measured) error norm over all measured steps with a prediction."""
    pairs = [(r.predicted_error_norm, r.error_norm) for r in records]
    logs = [np.log(predicted / norm) for predicted, norm in pairs if predicted and norm]
    return float(np.sqrt(np.mean(np.square(logs)))) if logs else None


def _thinned_means(values: list[float]) -> list[float]:
    return [round(float(np.mean(part)), 4) for part in np.array_split(values, min(POINTS, len(values)))]
